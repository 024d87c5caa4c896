"""How long a view's gloo group takes to open: `python benchmarks/group_open.py [RANKS...]`.

Every rank opens one group after the other, all at the same moment; a group's time is that of its
slowest rank. The rendezvous is a dictionary of another process, slower than the real one.
"""

from __future__ import annotations

import statistics
import sys
import time

from holdfast.testing.transports import GroupMember, MakeTransport, run_contract
from holdfast.train.transport.gloo import GlooDevice, GlooTransport

ROUNDS = 20
WARM_UP = 3


def gloo(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1")
    return lambda: GlooTransport(device)


def open_groups(member: GroupMember) -> None:
    for i in range(WARM_UP + ROUNDS):
        member.meet(f"open{i}")
        began = time.perf_counter()
        transport = member.open(f"group{i}")
        member.addresses[f"took/{i}/{member.rank}"] = time.perf_counter() - began
        member.meet(f"opened{i}")
        transport.close()
    if member.rank == 0:
        slowest_ms = [
            1e3 * max(member.addresses[f"took/{i}/{r}"] for r in range(member.size))
            for i in range(WARM_UP, WARM_UP + ROUNDS)
        ]
        quick, middle = min(slowest_ms), statistics.median(slowest_ms)
        print(f"{member.size} ranks: median {middle:.2f} ms, least {quick:.2f} ms", flush=True)


if __name__ == "__main__":
    for size in [int(text) for text in sys.argv[1:]] or [2, 4, 8]:
        complaints = run_contract(open_groups, gloo, size)
        if complaints:
            sys.exit("\n".join(complaints))

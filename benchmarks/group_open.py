"""How long a view's gloo group takes to open: `python benchmarks/group_open.py [RANKS...]`.

Every rank opens one group after the other, all at the same moment; a group's time is that of its
slowest rank. The rendezvous is a dictionary of another process, slower than the real one.
"""

from __future__ import annotations

import statistics
import sys
import time

from holdfast.testing.transports import MakeTransport, Seat, run_contract
from holdfast.train.transport.gloo import GlooDevice, GlooTransport

ROUNDS = 20
WARM_UP = 3


def gloo(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1")
    return lambda: GlooTransport(device)


def open_groups(seat: Seat) -> None:
    for i in range(WARM_UP + ROUNDS):
        seat.meet(f"open{i}")
        began = time.perf_counter()
        transport = seat.open(f"group{i}")
        seat.addresses[f"took/{i}/{seat.rank}"] = time.perf_counter() - began
        seat.meet(f"opened{i}")
        transport.close()
    if seat.rank == 0:
        slowest_ms = [
            1e3 * max(seat.addresses[f"took/{i}/{r}"] for r in range(seat.size))
            for i in range(WARM_UP, WARM_UP + ROUNDS)
        ]
        quick, middle = min(slowest_ms), statistics.median(slowest_ms)
        print(f"{seat.size} ranks: median {middle:.2f} ms, least {quick:.2f} ms", flush=True)


if __name__ == "__main__":
    for size in [int(text) for text in sys.argv[1:]] or [2, 4, 8]:
        complaints = run_contract(open_groups, gloo, size)
        if complaints:
            sys.exit("\n".join(complaints))

"""Checks the rows that simulated workers use or give up, and settles disputes about them."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.core.servers.reading import FindRight, can_begin_from, find_common
from holdfast.lab.sim.server_moves import ServerMoves, SimWorker
from holdfast.lab.sim.simulated_servers import RowTruth, SimServer
from holdfast.lab.sim.wrong_bits import Violation


def check_found(worker: SimWorker, truth: RowTruth) -> int:
    """Check the rows that a worker is about to use; return how many are wrong unseen.

    They may be wrong only if a server has computed wrongly, and no other one has answered, or
    servers have copied the wrong rows before that was noticed.
    """
    unseen = 0
    for shard, value in worker.found.items():
        right = truth.value(shard, worker.version)
        if value == right:
            continue
        is_known = (shard, right) in worker.heard and shard not in truth.spread
        if shard not in truth.spoilt or is_known:
            raise Violation(
                f"worker {worker.number} has read shard {shard} as of {worker.version}, and it "
                "was not as it was then"
            )
        unseen += 1
    return unseen


def check_lost(worker: SimWorker, shards: Sequence[int], moves: ServerMoves) -> None:
    """Check that no server has the rows that a worker gives up."""
    for shard in shards:
        for server in moves.find_holders(shard):  # whether the worker knows it or not
            standing = server.holdings.judge(worker.version, [shard])
            if not server.is_dead and standing.can_serve:
                raise Violation(
                    f"shard {shard} was given up as of {worker.version}, but server "
                    f"{server.number} has it"
                )


def judge(
    worker: SimWorker,
    dispute: FindRight,
    servers: Sequence[SimServer],
    truth: RowTruth,
    now: float,
) -> tuple[dict[int, int], int | None]:
    """Return the claims of these servers by now, and the right one, as a worker finds them out.

    It does as tables/row_referee.py: it applies the updates that it keeps to rows on which the
    servers agree.
    """
    shard, version = dispute.shard, worker.version
    asked, claims, heard = dict[int, SimServer](), dict[int, int](), dict[int, int]()
    for (number, before), server in zip(dispute.claims, servers, strict=True):
        if server.is_silent(now):
            heard[number] = before
        elif (value := server.find(shard, version)) is not None:
            claims[number] = heard[number] = value
            asked[number] = server
    if not claims:
        return claims, None
    for start in range(version - 1, worker.kept_after - 1, -1):
        found = {n: server.find(shard, start) for n, server in asked.items()}
        earlier = {n: value for n, value in found.items() if value is not None}
        if can_begin_from(earlier, heard):
            value = next(iter(earlier.values()))
            return claims, truth.grow_from(shard, value, start, version)
    if worker.kept_after == 0:
        return claims, truth.value(shard, version)
    return claims, find_common([*heard.values(), *(claim for _, claim in dispute.claims)])

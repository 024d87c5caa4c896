"""Decides which worker hosts which virtual rank, balanced to within one. Pure.

There are two situations with two rules. In the middle of a step a survivor keeps its
results, so only lost vranks move. At a step boundary nothing computed is at stake, so the layout
returns to contiguous blocks (fewest partial sums per worker), given to the workers that already
host most of each block.
"""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Sequence

from holdfast.core.errors import require
from holdfast.core.types import WorkerId


def spread_blocks(vranks: int, workers: int) -> list[range]:
    """Cut 0 .. vranks-1 into contiguous blocks, larger ones first, sizes equal to within one."""
    require(1 <= workers <= vranks, f"{workers} workers cannot host {vranks} virtual ranks")
    base, extra = divmod(vranks, workers)
    blocks, start = [], 0
    for i in range(workers):
        size = base + (1 if i < extra else 0)
        blocks.append(range(start, start + size))
        start += size
    return blocks


def assign_at_boundary(
    vranks: int, workers: Sequence[WorkerId], previous: Sequence[WorkerId]
) -> tuple[WorkerId, ...]:
    """Assign contiguous balanced blocks; each worker keeps the one it overlaps most, if it can."""
    blocks = spread_blocks(vranks, len(workers))
    number = {w: i for i, w in enumerate(workers)}
    overlaps: Counter[tuple[int, int]] = (
        Counter()
    )  # shared by a block and a worker's present vranks
    for b, block in enumerate(blocks if previous else ()):
        overlaps.update((b, number[previous[v]]) for v in block if previous[v] in number)
    host: dict[int, WorkerId] = {}
    placed: set[WorkerId] = set()
    for (b, i), _ in sorted(overlaps.items(), key=lambda item: (-item[1], item[0])):
        if b not in host and workers[i] not in placed:
            host[b] = workers[i]
            placed.add(workers[i])
    free = iter([w for w in workers if w not in placed])
    owners: list[WorkerId] = []
    for b, block in enumerate(blocks):
        worker = host[b] if b in host else next(free)
        owners.extend([worker] * len(block))
    return tuple(owners)


def assign_mid_step(
    survivors: Sequence[WorkerId], previous: Sequence[WorkerId]
) -> tuple[WorkerId, ...]:
    """Give each lost vrank to the least loaded survivor, a neighbour's host first on equal load."""
    require(len(survivors) > 0, "no survivor to take the virtual ranks")
    hosted = Counter(previous)
    load = {w: hosted[w] for w in survivors}
    least = [(count, w) for w, count in load.items()]  # a heap; some entries are out of date
    heapq.heapify(least)
    owners = list(previous)
    for v, owner in enumerate(previous):
        if owner in load:
            continue
        while least[0][0] != load[least[0][1]]:
            heapq.heappop(least)
        count, heir = least[0]
        neighbour = previous[v ^ 1] if v ^ 1 < len(previous) else None
        if neighbour is not None and load.get(neighbour) == count:
            heir = neighbour
        owners[v] = heir
        load[heir] += 1
        heapq.heappush(least, (load[heir], heir))
    return tuple(owners)

"""Decides which worker hosts which virtual rank, balanced to within one. Pure.

There are two situations with two rules. In the middle of a step a survivor keeps its results, so
only lost virtual ranks move. At a step boundary no computed result is at stake, so the layout
returns to contiguous blocks: one for each worker, and also one for each machine and each failure
domain, because the sums of low tree nodes then never leave a machine (core/sum_plan.py).

Rank states and parameters are on all members, so they do not move with a virtual rank. The new host
loads the batches that the old one had loaded ahead. It opens the shard of a stream and reads it up
to the job's position, which can take long. So after a loss the order is restored when the next view
begins at a boundary.
"""

from __future__ import annotations

import heapq
import re
from collections import Counter
from collections.abc import Container, Iterator, Mapping, Sequence
from types import MappingProxyType

from holdfast.engine.core.domains import Path
from holdfast.engine.core.errors import require
from holdfast.engine.core.types import WorkerId

Paths = Mapping[WorkerId, Path]
ONE_MACHINE: Paths = MappingProxyType({})  # all workers are equally near to each other
_DIGITS = re.compile(r"(\d+)")


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
    vranks: int,
    workers: Sequence[WorkerId],
    previous: Sequence[WorkerId],
    paths: Paths = ONE_MACHINE,
) -> tuple[WorkerId, ...]:
    """Assign contiguous balanced blocks to domains, to the machines in them, and to workers.

    Balance leaves some choice where blocks of machines and domains end. They end at multiples of
    the highest possible power of two, so that blocks are whole subtrees of the canonical tree.

    Domains and machines keep the order of their present blocks, and a machine's workers keep most
    of theirs. A new machine takes the first gap of at least half its size (a lost machine leaves
    one), and else the last place. Without blocks the order is by name. So a machine that replaces
    another one takes its virtual ranks, and the rest stay. If the number of machines changes, up to
    half of the virtual ranks change hosts, or more if a worker has less than two.
    """
    count = len(workers)
    require(1 <= count <= vranks, f"{count} workers cannot host {vranks} virtual ranks")
    layout = _Layout(vranks, count, previous, paths)
    owners: list[WorkerId] = []
    for worker, size in layout.divide(sorted(workers), 0, range(vranks)):
        owners.extend([worker] * size)
    return tuple(owners)


class _Layout:
    """Divides blocks of virtual ranks among workers, domain by domain."""

    def __init__(
        self, vranks: int, workers: int, previous: Sequence[WorkerId], paths: Paths
    ) -> None:
        self._least, self._most = vranks // workers, -(-vranks // workers)  # for each worker
        self._paths = paths
        self._owners = previous
        self._hosted: dict[WorkerId, list[int]] = {}
        for vrank, worker in enumerate(previous):
            self._hosted.setdefault(worker, []).append(vrank)

    def divide(
        self, workers: Sequence[WorkerId], depth: int, block: range
    ) -> Iterator[tuple[WorkerId, int]]:
        """Divide a block among workers whose paths share the first `depth` names.

        Yields the workers in order, and the number of virtual ranks that each hosts.
        """
        groups: dict[Path, list[WorkerId]] = {}
        for worker in workers:
            name = self._paths.get(worker, ())[depth : depth + 1]
            groups.setdefault(name, []).append(worker)
        if list(groups) == [()]:  # all on one machine
            yield from self._match(workers, block)
            return
        named = [groups[name] for name in sorted(groups, key=_natural_key)]
        for group, part in self._cut(self._order(named, block), block):
            yield from self.divide(group, depth + 1, part)

    def _match(self, workers: Sequence[WorkerId], block: range) -> Iterator[tuple[WorkerId, int]]:
        """Cut a machine's block; each worker keeps the part that it overlaps most, if it can."""
        parts = spread_blocks(len(block), len(workers))
        number = {worker: i for i, worker in enumerate(workers)}
        overlaps = Counter(
            (p, number[self._owners[block[v]]])
            for p, part in enumerate(parts if self._owners else ())
            for v in part
            if self._owners[block[v]] in number
        )
        host: dict[int, WorkerId] = {}
        placed: set[WorkerId] = set()
        for (p, i), _ in sorted(overlaps.items(), key=lambda item: (-item[1], item[0])):
            if p not in host and workers[i] not in placed:
                host[p] = workers[i]
                placed.add(workers[i])
        free = iter([worker for worker in workers if worker not in placed])
        for p, part in enumerate(parts):
            yield host[p] if p in host else next(free), len(part)

    def _order(self, groups: Sequence[list[WorkerId]], block: range) -> Iterator[list[WorkerId]]:
        """Yield groups in the order of their virtual ranks; new groups fill the gaps."""
        middles = [self._find_middle(group) for group in groups]
        new = [group for group, middle in zip(groups, middles, strict=True) if middle < 0]
        known = sorted((middle, i) for i, middle in enumerate(middles) if middle >= 0)
        total, width, before = sum(map(len, groups)), len(block), 0  # before: workers
        for middle, i in known:
            group = groups[i]
            # How far it is from here to the middle of the group's present block, times 2 * total.
            while new and (
                total * (2 * (middle - block.start) + 1) - width * (2 * before + len(group))
                >= width * len(new[0])
            ):
                before += len(new[0])
                yield new.pop(0)
            before += len(group)
            yield group
        yield from new

    def _find_middle(self, group: Sequence[WorkerId]) -> int:
        """Return the median of the virtual ranks that workers host now, or -1."""
        every = sorted(vrank for worker in group for vrank in self._hosted.get(worker, ()))
        return every[(len(every) - 1) // 2] if every else -1

    def _cut(
        self, groups: Iterator[list[WorkerId]], block: range
    ) -> Iterator[tuple[list[WorkerId], range]]:
        """Cut a block into one for each group, where the canonical tree has its widest nodes."""
        ordered = list(groups)
        left, start = sum(map(len, ordered)), block.start
        for group in ordered:
            count, ideal = len(group), start + (block.stop - start) * len(group) // left
            left -= count
            low = max(start + self._least * count, block.stop - self._most * left)
            high = min(start + self._most * count, block.stop - self._least * left)
            end = _find_roundest(low, high, ideal)
            yield group, range(start, end)
            start = end


def _find_roundest(low: int, high: int, ideal: int) -> int:
    """Return the multiple of the highest power of two in low .. high, the nearest to `ideal`."""
    step = 1
    while -(-low // (2 * step)) * 2 * step <= high:
        step *= 2
    return min(range(-(-low // step) * step, high + 1, step), key=lambda end: abs(end - ideal))


def _natural_key(name: Path) -> tuple[list[str | int], Path]:
    """Return a key by which n2 comes before n10."""
    parts = _DIGITS.split(name[0]) if name else []
    return [int(part) if i % 2 else part for i, part in enumerate(parts)], name


class Takers:
    """Finds the nearest worker for a task; among equally near workers the cost decides."""

    def __init__(self, costs: Mapping[WorkerId, int], paths: Paths) -> None:
        self._costs = dict(costs)
        self._paths = paths
        self._heaps: dict[Path, list[tuple[int, WorkerId]]] = {}  # some entries are out of date
        for worker, cost in costs.items():
            for near in self._list_groups(worker):
                self._heaps.setdefault(near, []).append((cost, worker))
        for heap in self._heaps.values():
            heapq.heapify(heap)

    def find(self, path: Path, limit: int) -> WorkerId | None:
        """Return the worker nearest to a path whose cost is at most `limit`."""
        for depth in range(len(path), -1, -1):
            heap = self._heaps.get(path[:depth], [])
            while heap and heap[0][0] != self._costs[heap[0][1]]:
                heapq.heappop(heap)
            if heap and heap[0][0] <= limit:
                return heap[0][1]
        return None

    def set_cost(self, worker: WorkerId, cost: int) -> None:
        self._costs[worker] = cost
        for near in self._list_groups(worker):
            heapq.heappush(self._heaps[near], (cost, worker))

    def _list_groups(self, worker: WorkerId) -> Iterator[Path]:
        path = self._paths.get(worker, ())
        return (path[:depth] for depth in range(len(path) + 1))


def assign_mid_step(
    survivors: Sequence[WorkerId], previous: Sequence[WorkerId], paths: Paths = ONE_MACHINE
) -> tuple[WorkerId, ...]:
    """Give each lost virtual rank to a survivor near the host of its neighbour in the tree.

    Balance takes precedence: the survivors' numbers of tasks are as equal as they can be. Among the
    survivors that may have one more, a worker on the same machine is preferred, then one in the
    narrowest common failure domain, then the one with the fewest tasks, and of these the
    neighbour's host.
    """
    require(len(survivors) > 0, "no survivor to take the virtual ranks")
    hosted = Counter(previous)
    load = {w: hosted[w] for w in survivors}
    lost = [vrank for vrank, owner in enumerate(previous) if owner not in load]
    level, above = _find_level(sorted(load.values()), len(lost))
    takers, after = Takers(load, paths), _find_next(previous, load)
    owners = list(previous)
    for vrank in lost:
        # Those before it have a host again.
        beside = [other for other in (vrank - 1, after.get(vrank, -1)) if other >= 0]
        near = min(beside, key=lambda other: vrank ^ other, default=None)
        path = paths.get(owners[near], ()) if near is not None else ()
        heir = takers.find(path, level if above else level - 1)
        assert heir is not None, "the level leaves room for every lost virtual rank"
        neighbour = previous[vrank ^ 1] if vrank ^ 1 < len(previous) else None
        if neighbour is not None and load.get(neighbour) == load[heir]:
            heir = neighbour
        owners[vrank] = heir
        above -= load[heir] == level
        load[heir] += 1
        takers.set_cost(heir, load[heir])
    return tuple(owners)


def _find_level(loads: Sequence[int], more: int) -> tuple[int, int]:
    """Return the number of tasks that each worker has at least once `more` are shared out evenly.

    `loads`: their tasks so far, ascending. Second: the number of workers that have one task more,
    of the workers that had no more before.
    """
    total = sum(loads)
    for count in range(len(loads), 0, -1):
        level, above = divmod(total + more, count)
        if level >= loads[count - 1]:
            return level, above
        total -= loads[count - 1]
    raise AssertionError("the least loaded worker is at its own level")


def _find_next(owners: Sequence[WorkerId], present: Container[WorkerId]) -> dict[int, int]:
    """Map each lost virtual rank to the next virtual rank that a present worker hosts."""
    found: dict[int, int] = {}
    last = -1
    for vrank in reversed(range(len(owners))):
        if owners[vrank] in present:
            last = vrank
        elif last >= 0:
            found[vrank] = last
    return found

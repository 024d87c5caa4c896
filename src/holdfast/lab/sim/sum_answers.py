"""Answers questions about a simulated sum to which some members add wrong parts.

These members are wrong in the first run along the tree, at each tree node whose sum they help to
make; later runs are right. Numbers stand for digests.
"""

from __future__ import annotations

import functools
from collections.abc import Collection

from holdfast.engine.core import tree
from holdfast.engine.core.ground.effects import SumQuestion, SumStage
from holdfast.engine.core.step.sum_trial import TREE_RUNS
from holdfast.engine.core.sum_plan import find_shared_sums, have_common_elements

Row = tuple[int, ...]
Piece = tuple[tree.Node, int]  # a node, and the number of one of its pieces


class SumMakers:
    """Knows who makes which sums. `hosts`: the rank of each virtual rank, of `size` members."""

    def __init__(self, hosts: tuple[int, ...], size: int) -> None:
        nodes = tree.find_host_nodes(hosts, size)
        self._runs = [find_shared_sums(nodes, len(hosts), turned) for turned in range(TREE_RUNS)]

    def makers_among(self, ranks: Collection[int]) -> tuple[int, ...]:
        """Return those of these ranks that help to make a sum."""
        makers = {rank for each in self._runs[0] for rank in each.hosts}
        return tuple(rank for rank in ranks if rank in makers)

    def trace(self, rank: int, wrongly: tuple[int, ...], total: int) -> Row:
        """Return a member's row about the sums that it has made."""
        wrong = self._find_wrong_pieces(wrongly)
        root = self._runs[0][-1].node if self._runs[0] else None
        made: list[int] = []
        is_right = [1] * TREE_RUNS
        for run, sums in enumerate(self._runs):
            for each in sums:
                if rank in each.hosts:
                    piece = each.node, each.hosts.index(rank)
                    is_wrong = run == 0 and piece in wrong
                    made.append(hash((total, piece)) + is_wrong)
                    if is_wrong and each.node == root:
                        is_right[run] = 0
        copies = [0 if wrongly else 1, 1]
        return (*made, *is_right, *copies)

    def _find_wrong_pieces(self, wrongly: tuple[int, ...]) -> set[Piece]:
        """Return the pieces that are wrong after the first run."""
        wrong: set[Piece] = set()
        counts = {each.node: len(each.hosts) for each in self._runs[0]}
        for each in self._runs[0]:
            for i, maker in enumerate(each.hosts):
                if maker in wrongly or any(
                    have_common_elements((i, len(each.hosts)), (j, counts[child]))
                    for child in (each.left, each.right)
                    for j in range(counts.get(child, 0))
                    if (child, j) in wrong
                ):
                    wrong.add((each.node, i))
        return wrong


def answer(
    question: SumQuestion,
    rank: int,
    hosts: tuple[int, ...],
    size: int,
    wrongly: tuple[int, ...],
    total: int,
) -> Row:
    """Return a member's row, if `wrongly` were wrong and the right sum is `total`."""
    if question.stage is SumStage.COMPARE:
        return hash((total, wrongly)) if wrongly else hash(total), hash(total)
    if question.stage is SumStage.FLAT:
        return tuple(hash((total, piece)) for piece in range(size))
    return makers_of(hosts, size).trace(rank, wrongly, total)


@functools.lru_cache(maxsize=64)
def makers_of(hosts: tuple[int, ...], size: int) -> SumMakers:
    """Return the makers of all sums. Kept, since all members need the same."""
    return SumMakers(hosts, size)

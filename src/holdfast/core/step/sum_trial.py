"""Finds which sum of a bucket is right, when members have summed it more than once. Pure.

Each piece of a bucket is summed by one member, and in each further run by another one; every member
then shows digests of all its pieces. The number of pieces is the number of members; where workers
have several processes, it is that number for each shard, one shard after the other.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.step.audit import ATTEMPTS_MAX

Table = tuple[tuple[int, ...], ...]  # [member][piece]: digests


@dataclass(frozen=True, slots=True, kw_only=True)
class SumVerdict:
    """Names the right digest of each piece, and the ranks that had it wrong.

    `undecided`: no majority. `amended`: some member must take a piece from another run.
    """

    right: tuple[int, ...] = ()
    wrong: tuple[int, ...] = ()
    undecided: bool = False
    amended: bool = False


class SumTrial:
    """Hears the runs of one bucket's sum until they suffice for a verdict."""

    def __init__(self, bucket: int) -> None:
        self.bucket = bucket
        self.tables: list[Table] = []

    def hear(self, table: Table) -> SumVerdict | None:
        """Take in one more run; None if the sum must be computed once more."""
        self.tables.append(table)
        if len(self.tables) < 2:
            return None
        first = self.tables[0][0]
        if all(row == first for each in self.tables for row in each):
            return SumVerdict(right=first)
        if len(self.tables) < ATTEMPTS_MAX:
            return None
        right = majority(self.tables)
        if right is None:
            return SumVerdict(undecided=True)
        return SumVerdict(right=right, wrong=find_wrong(self.tables, right), amended=True)


def majority(tables: Sequence[Table]) -> tuple[int, ...] | None:
    """Return for each piece the digest that most have in most runs, if two have summed it."""
    right, members = [], len(tables[0])
    for piece in range(len(tables[0][0])):
        heard = [[row[piece] for row in table] for table in tables]
        counts = Counter(digest for said in heard for digest in said)
        ((digest, count),) = counts.most_common(1)
        turns = [turned for turned, said in enumerate(heard) if digest in said]
        summed_by = {(piece - turned) % members for turned in turns}
        if 2 * count <= counts.total() or len(summed_by) < 2:
            return None
        right.append(digest)
    return tuple(right)


def find_wrong(tables: Sequence[Table], right: Sequence[int]) -> tuple[int, ...]:
    """Return who summed what most have wrongly, or whose copy alone is wrong."""
    found: list[int] = []
    members = len(tables[0])
    for turned, table in enumerate(tables):
        for piece, digest in enumerate(right):
            wrong = [rank for rank in range(members) if table[rank][piece] != digest]
            most = 2 * len(wrong) > members
            found += [(piece - turned) % members] if most else wrong
    return tuple(sorted(set(found)))

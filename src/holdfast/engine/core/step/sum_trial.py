"""Finds the right sum of a bucket, and the members that made a wrong one. Pure.

A bucket is summed along the canonical tree, and then once more, each piece of each tree node by
another member: the members compare their results. Only if these differ the bucket is summed flat:
each piece by one member, in each further run by another one, until most results agree. Then the
members exchange digests of the sums that they made at the tree's nodes. Where two of them differ,
though the sums below are alike, one of their makers was wrong: the one whose run ended wrongly.

Where workers have several processes, each row has the words of all shards, one after the other.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence

from holdfast.engine.core import tree
from holdfast.engine.core.ground.effects import COMPARE, SumQuestion, SumStage
from holdfast.engine.core.step.audit import ATTEMPTS_MAX
from holdfast.engine.core.sum_plan import SharedSum, find_shared_sums, have_common_elements

Table = tuple[tuple[int, ...], ...]  # a row of each member
TREE_RUNS = 2
# The last words of a member's row of TRACE, 1 or 0: whether its piece of the root's sum is right in
# each run along the tree; and whether its copy of the whole result is.
VERDICT_WORDS = 2 * TREE_RUNS


class SumTrial:
    """Collects tables about one bucket's sum until they suffice.

    `hosts`: the rank that hosts each virtual rank, of `size` members.
    """

    def __init__(self, bucket: int, hosts: Sequence[int], size: int) -> None:
        self.bucket = bucket
        # The table to hear next, or None at the end.
        self.question: SumQuestion | None = COMPARE
        # The digest of each piece of the right sum, if the members' sums have differed.
        self.right: tuple[int, ...] = ()
        # The ranks that were wrong.
        self.wrong: tuple[int, ...] = ()
        # No sum has a majority.
        self.is_undecided = False
        self._hosts = hosts
        self._size = size
        self._flat: list[Table] = []

    def hear(self, table: Table) -> None:
        """Take in the table that was asked for."""
        assert self.question is not None, "a trial hears nothing after its end"
        match self.question.stage:
            case SumStage.COMPARE:
                self.question = None if _is_alike(table) else SumQuestion(SumStage.FLAT)
            case SumStage.FLAT:
                self._flat.append(table)
                self._decide()
            case SumStage.TRACE:
                makers = find_makers(self._hosts, self._size, table)
                self.wrong = tuple(sorted({*find_wrong(self._flat, self.right), *makers}))
                self.question = None

    def _decide(self) -> None:
        runs, first = len(self._flat), self._flat[0][0]
        if runs > 1 and all(row == first for each in self._flat for row in each):
            self.right = first
        elif runs == ATTEMPTS_MAX:
            self.right = majority(self._flat) or ()
            self.is_undecided = not self.right
        else:
            self.question = SumQuestion(SumStage.FLAT, runs)
            return
        self.question = SumQuestion(SumStage.TRACE) if self.right else None


def _is_alike(table: Table) -> bool:
    """Return whether all members have the same result in both runs."""
    first = table[0]
    pairs = all(first[i] == first[i + 1] for i in range(0, len(first), TREE_RUNS))
    return pairs and all(row == first for row in table)


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
    """Return the members that summed wrongly most often, or the one whose copy alone is wrong."""
    found: list[int] = []
    members = len(tables[0])
    for turned, table in enumerate(tables):
        for piece, digest in enumerate(right):
            wrong = [rank for rank in range(members) if table[rank][piece] != digest]
            most = 2 * len(wrong) > members
            found += [(piece - turned) % members] if most else wrong
    return tuple(sorted(set(found)))


# ---------------------------------------------------------------- sums at the tree's nodes


def find_makers(hosts: Sequence[int], size: int, table: Table) -> set[int]:
    """Return the ranks that made a wrong sum along the tree, or whose copy alone was wrong."""
    nodes = tree.find_host_nodes(hosts, size)
    runs = [find_shared_sums(nodes, len(hosts), turned) for turned in range(TREE_RUNS)]
    made = Counter(rank for each in runs[0] for rank in each.hosts)
    found: set[int] = set()
    for shard in range(len(table[0]) // (TREE_RUNS * made[0] + VERDICT_WORDS)):
        rows = []
        for rank, row in enumerate(table):
            width = TREE_RUNS * made[rank] + VERDICT_WORDS
            rows.append(row[shard * width : (shard + 1) * width])
        found |= _Trace(runs, rows, made).find()
    return found


class _Trace:
    """Compares the two runs of one shard, piece by piece of each tree node."""

    def __init__(
        self,
        runs: Sequence[Sequence[SharedSum]],
        rows: Sequence[Sequence[int]],
        made: Mapping[int, int],
    ) -> None:
        self._runs = runs
        self._rows = rows
        self._made = made
        # The pieces of each node whose digests differ.
        self._unlike: dict[tree.Node, set[int]] = defaultdict(set)
        self._counts = {each.node: len(each.hosts) for each in runs[0]}

    def find(self) -> set[int]:
        found: set[int] = set()
        place: Counter[int] = Counter()  # sums of each member that were looked at
        for sums in zip(*self._runs, strict=True):
            for piece, makers in enumerate(zip(*(each.hosts for each in sums), strict=True)):
                said = [
                    self._rows[rank][run * self._made[rank] + place[rank]]
                    for run, rank in enumerate(makers)
                ]
                if said[0] != said[1]:
                    if not self._differs_below(sums[0], piece):
                        found |= self._blame(sums[0].node, piece, makers)
                    self._unlike[sums[0].node].add(piece)
            place.update(sums[0].hosts)
        return found | set(self._wrong_copies())

    def _differs_below(self, shared: SharedSum, piece: int) -> bool:
        """Return whether the runs differ in the same part of a child's sum."""
        return any(
            have_common_elements((piece, len(shared.hosts)), (other, self._counts[child]))
            for child in (shared.left, shared.right)
            for other in self._unlike.get(child, ())
        )

    def _blame(self, node: tree.Node, piece: int, makers: Sequence[int]) -> set[int]:
        """Return the maker of a piece in the wrong run; none if both runs are wrong."""
        wrong = []
        for run, maker in enumerate(makers):
            root = self._runs[run][-1].hosts
            parts = (
                self._verdict(rank, run)
                for i, rank in enumerate(root)
                if have_common_elements((piece, self._counts[node]), (i, len(root)))
            )
            if not all(parts):
                wrong.append(maker)
        return set(wrong) if len(wrong) == 1 else set()

    def _wrong_copies(self) -> Iterator[int]:
        """Return the ranks whose result alone was damaged."""
        for run, sums in enumerate(self._runs):
            if all(self._verdict(rank, run) for rank in (sums[-1].hosts if sums else ())):
                for rank in range(len(self._rows)):
                    if not self._verdict(rank, TREE_RUNS + run):
                        yield rank

    def _verdict(self, rank: int, word: int) -> int:
        return self._rows[rank][word - VERDICT_WORDS]

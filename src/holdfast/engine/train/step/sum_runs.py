"""Sums a bucket, or rows, more than once, each piece by another member, to find wrong sums."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable, Sequence
from typing import Generic, TypeVar

import torch
import xxhash

from holdfast.engine.core.errors import Aborted
from holdfast.engine.core.ground.effects import SumQuestion, SumStage
from holdfast.engine.core.sum_plan import WHOLE, Part, SumPlan, cut, cut_evenly
from holdfast.engine.train.exchange.cut_plan import PIECE_ALIGN
from holdfast.engine.train.exchange.layout import TAG_AUDIT, Layout, all_gather, gather_bytes
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.step.bucket_sums import BucketSum
from holdfast.engine.train.step.row_sums import NodeRows, RowPiece, RowsSum
from holdfast.engine.train.step.row_table import Rows

Tensors = Sequence[torch.Tensor]
Run = TypeVar("Run", BucketSum, RowsSum)
Result = TypeVar("Result")


class SumRuns(ABC, Generic[Run, Result]):
    """Keeps one member's runs of one sum. `first`: the run that the step has used."""

    def __init__(self, first: Run, layout: Layout) -> None:
        self._first: Run = first
        self._layout = layout
        self._again: Run | None = None
        # All results: those along the tree, and then the flat ones.
        self._results: list[Result] = []
        # Digests of the sums that this member has made at tree nodes, in both runs along the tree.
        self._made: list[int] = []

    def answer(self, question: SumQuestion, transport: Transport) -> list[list[int]]:
        """Answer a question about the sum, and return all members' answers, by rank. Aborted."""
        if question.stage is SumStage.TRACE:  # rows of several lengths
            mine = torch.tensor(self._trace(), dtype=torch.int64).numpy().tobytes()
            rows = gather_bytes(transport, self._layout, mine)
            return [torch.frombuffer(bytearray(row), dtype=torch.int64).tolist() for row in rows]
        if question.stage is SumStage.COMPARE:
            row = self._compare(transport)
        else:
            row = self._sum_flat(transport, question.turned)
        table = all_gather(transport, self._layout, torch.tensor(row), TAG_AUDIT)
        return table.tolist()

    def put_right(self, right: Sequence[int]) -> None:
        """Use a run that has this digest for each piece. Aborted if there is none here."""
        digests = [[digest_all(each) for each in self._list_pieces(r)] for r in self._results]
        chosen = []
        for piece, digest in enumerate(right):
            found = (
                r for r, had in zip(self._results, digests, strict=True) if had[piece] == digest
            )
            if (result := next(found, None)) is None:
                raise Aborted(f"piece {piece} of {self._name()} is wrong here in all runs")
            chosen.append(result)
        self._use(chosen)

    def _compare(self, transport: Transport) -> list[int]:
        """Sum along the tree once more; return 63 bits of the results of both runs."""
        self._again = again = self._repeat(transport, self._layout.turned_plan(1))
        return [digest_all(self._cut(self._result_of(run), WHOLE)) for run in (self._first, again)]

    def _sum_flat(self, transport: Transport, turned: int) -> list[int]:
        """Sum flat; return 63 bits of each piece, in the order of members."""
        if not self._results:
            assert self._again is not None, "a sum is disputed once it was made twice"
            runs = (self._first, self._again)
            self._results = [self._copy(self._result_of(run)) for run in runs]
            self._made = [digest_all(each) for run in runs for each in self._list_made(run)]
        found = self._result_of(self._repeat(transport, self._layout.flat_plan(turned)))
        self._results.append(found)
        return [digest_all(each) for each in self._list_pieces(found)]

    def _repeat(self, transport: Transport, plan: SumPlan) -> Run:
        """Make the sum again, by another plan. Aborted."""
        again = self._first.repeat(plan)
        again.begin(transport)
        while again.advance(transport):
            pass
        again.finish()
        return again

    def _trace(self) -> list[int]:
        """Return digests of the sums of this member, and whether its parts were right."""
        assert self._again is not None, "a sum is traced once it was made twice"
        right = self._result_of(self._first)
        parts: list[bool] = []
        copies: list[bool] = []
        runs = (self._first, self._again)
        for run, had in zip(runs, self._results, strict=False):
            own = run.plan.own
            parts.append(own is None or self._are_equal(had, right, own[1]))
            copies.append(self._are_equal(had, right, WHOLE))
        return [*self._made, *map(int, (*parts, *copies))]

    def _list_parts(self) -> list[Part]:
        """Return the parts of a flat sum, by rank."""
        size = self._layout.size
        return [cut_evenly(rank, size) for rank in range(size)]

    def _are_equal(self, one: Result, other: Result, part: Part) -> bool:
        pairs = zip(self._cut(one, part), self._cut(other, part), strict=True)
        return all(torch.equal(as_bytes(had), as_bytes(right)) for had, right in pairs)

    @abstractmethod
    def _name(self) -> str: ...

    @abstractmethod
    def _result_of(self, run: Run) -> Result: ...

    @abstractmethod
    def _copy(self, result: Result) -> Result:
        """Return a result that `_use` does not change."""

    @abstractmethod
    def _cut(self, result: Result, part: Part) -> Tensors:
        """Return the tensors with a part of a result."""

    @abstractmethod
    def _list_pieces(self, result: Result) -> Sequence[Tensors]:
        """Return the pieces of a flat sum, by rank."""

    @abstractmethod
    def _list_made(self, run: Run) -> Sequence[Tensors]:
        """Return the sums that this member has made at tree nodes."""

    @abstractmethod
    def _use(self, chosen: Sequence[Result]) -> None:
        """Use the piece of each rank from the result that was chosen for it."""


class BucketRuns(SumRuns[BucketSum, torch.Tensor]):
    """Keeps the runs of a bucket's sum."""

    def _name(self) -> str:
        return f"bucket {self._first.bucket.index}"

    def _result_of(self, run: BucketSum) -> torch.Tensor:
        return run.result

    def _copy(self, result: torch.Tensor) -> torch.Tensor:
        return result.clone()

    def _cut(self, result: torch.Tensor, part: Part) -> Tensors:
        return [result[cut(part, result.numel(), PIECE_ALIGN)]]

    def _list_pieces(self, result: torch.Tensor) -> Sequence[Tensors]:
        return [self._cut(result, part) for part in self._list_parts()]

    def _list_made(self, run: BucketSum) -> Sequence[Tensors]:
        return [[each] for each in run.made_sums()]

    def _use(self, chosen: Sequence[torch.Tensor]) -> None:
        result = self._first.result
        for part, each in zip(self._list_parts(), chosen, strict=True):
            where = cut(part, result.numel(), PIECE_ALIGN)
            result[where] = each[where]


class RowRuns(SumRuns[RowsSum, list[Rows]]):
    """Keeps the runs of the sum of all tables' rows."""

    def _name(self) -> str:
        return "the rows"

    def _result_of(self, run: RowsSum) -> list[Rows]:
        return run.results

    def _copy(self, result: list[Rows]) -> list[Rows]:
        return result

    def _cut(self, result: list[Rows], part: Part) -> Tensors:
        if part != WHOLE:
            result = [RowPiece.of(rows).cut(part).rows for rows in result]
        return _tensors_of(result)

    def _list_pieces(self, result: list[Rows]) -> Sequence[Tensors]:
        whole = [RowPiece.of(rows) for rows in result]
        return [_tensors_of(e.cut(part).rows for e in whole) for part in self._list_parts()]

    def _list_made(self, run: RowsSum) -> Sequence[Tensors]:
        return [_tensors_of(piece.rows for piece in pieces) for pieces in run.made]

    def _use(self, chosen: Sequence[list[Rows]]) -> None:
        total = NodeRows()
        for part, result in zip(self._list_parts(), chosen, strict=True):
            total.put(part, [RowPiece.of(rows).cut(part) for rows in result])
        self._first.use(total.gather())


def _tensors_of(tables: Iterable[Rows]) -> list[torch.Tensor]:
    return [tensor for rows in tables for tensor in (rows.places, rows.values)]


def digest_all(tensors: Sequence[torch.Tensor]) -> int:
    """Return 63 bits of all values of these tensors, in their order (xxh3)."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(as_bytes(tensor).numpy().data)
    return digest.intdigest() >> 1

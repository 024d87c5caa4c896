"""Sums a bucket more than once, each piece by another member, to find wrong sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from holdfast.core.errors import Aborted
from holdfast.core.step.sum_trial import SumQuestion, SumStage
from holdfast.train.exchange.layout import TAG_AUDIT, Layout, all_gather, gather_bytes
from holdfast.train.exchange.seam import Transport
from holdfast.train.exchange.tensor_bytes import as_bytes
from holdfast.train.step.bucket_sums import BucketSum, sum_flat


class SumRuns:
    """Keeps one member's runs of one bucket's sum. `first`: that of the step."""

    def __init__(self, first: BucketSum, layout: Layout) -> None:
        self._first = first
        self._layout = layout
        self._again: BucketSum | None = None
        # All results: those along the tree, and then the flat ones.
        self._results: list[torch.Tensor] = []
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
        result = self._first.result
        for piece, digest in enumerate(right):
            where = self._layout.piece(piece, result.numel())
            runs = (run[where] for run in self._results)
            found = next((each for each in runs if _digest(each) == digest), None)
            if found is None:
                index = self._first.bucket.index
                raise Aborted(f"piece {piece} of bucket {index} is wrong here in all runs")
            result[where] = found

    def _compare(self, transport: Transport) -> list[int]:
        """Sum along the tree once more; return 63 bits of the results of both runs."""
        self._again = again = BucketSum(self._first.bucket, self._layout, turned=1)
        again.begin(transport)
        while again.advance(transport):
            pass
        return [_digest(each.result) for each in (self._first, again)]

    def _sum_flat(self, transport: Transport, turned: int) -> list[int]:
        """Sum flat; return 63 bits of each piece, in the order of members."""
        if not self._results:
            assert self._again is not None, "a sum is disputed once it was made twice"
            # The first result is a copy, since a part of it may be put right.
            self._results = [self._first.result.clone(), self._again.result]
            runs = (self._first, self._again)
            self._made = [_digest(each) for run in runs for each in run.made_sums()]
        found = sum_flat(self._first.bucket, self._layout, transport, turned)
        self._results.append(found)
        pieces = [self._layout.piece(rank, found.numel()) for rank in range(self._layout.size)]
        return [_digest(found[piece]) for piece in pieces]

    def _trace(self) -> list[int]:
        """Return what this member has made, and whether its parts and copies were right."""
        assert self._again is not None, "a sum is traced once it was made twice"
        right = self._first.result
        both = list(zip((self._first, self._again), self._results, strict=False))
        parts = [_are_equal(had[run.own_piece], right[run.own_piece]) for run, had in both]
        copies = [_are_equal(had, right) for _, had in both]
        return [*self._made, *map(int, (*parts, *copies))]


def _are_equal(one: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether both have the same bits."""
    return torch.equal(as_bytes(one), as_bytes(other))


def _digest(values: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(as_bytes(values).numpy().data) >> 1


def digest_all(tensors: Sequence[torch.Tensor]) -> int:
    """Return 63 bits of all values of these tensors, in their order (xxh3)."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(as_bytes(tensor).numpy().data)
    return digest.intdigest() >> 1

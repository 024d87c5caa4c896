"""Sums a bucket more than once, each piece by another member, to find wrong sums."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from holdfast.core.errors import Aborted
from holdfast.train.exchange.layout import Layout
from holdfast.train.exchange.seam import Transport
from holdfast.train.exchange.tensor_bytes import as_bytes
from holdfast.train.step.bucket_sums import FlatSum
from holdfast.train.step.buckets import Bucket


class SumRuns:
    """Keeps one member's runs of one bucket's sum; the first run is the bucket's result."""

    def __init__(self, bucket: Bucket, layout: Layout) -> None:
        self._bucket = bucket
        self._layout = layout
        self._runs: list[torch.Tensor] = [bucket.result.data]

    def add(self, transport: Transport) -> None:
        """Sum the bucket once more, each piece by a later member. Aborted."""
        into = torch.empty_like(self._bucket.result.data)
        again = FlatSum(self._bucket, self._layout, into=into, turned=len(self._runs))
        again.begin(transport)
        while again.advance(transport):
            pass
        self._runs.append(into)

    def digests(self) -> list[int]:
        """Return 63 bits of each piece of the last run, in the order of members."""
        flat, layout = self._runs[-1], self._layout
        pieces = [flat[layout.piece(rank, flat.numel())] for rank in range(layout.size)]
        return [_digest_piece(piece) for piece in pieces]

    def put_right(self, right: Sequence[int]) -> None:
        """Use a run that has this digest for each piece. Aborted if there is none here."""
        result = self._runs[0]
        for piece, digest in enumerate(right):
            where = self._layout.piece(piece, result.numel())
            runs = (run[where] for run in self._runs)
            found = next((r for r in runs if _digest_piece(r) == digest), None)
            if found is None:
                raise Aborted(f"piece {piece} of bucket {self._bucket.index} is wrong here in all")
            result[where] = found


def _digest_piece(piece: torch.Tensor) -> int:
    return xxhash.xxh3_64_intdigest(as_bytes(piece).numpy().data) >> 1


def digest_all(tensors: Sequence[torch.Tensor]) -> int:
    """Return 63 bits of all values of these tensors, in their order (xxh3)."""
    digest = xxhash.xxh3_64()
    for tensor in tensors:
        digest.update(as_bytes(tensor).numpy().data)
    return digest.intdigest() >> 1

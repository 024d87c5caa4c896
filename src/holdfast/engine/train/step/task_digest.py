"""Digests a task's gradient, to compare it with that of another run of the task.

A digest is 63 bits of its bytes; or, where two runs of a task never have the same bits, a count
sketch (Charikar, Chen and Farach-Colton 2002): sums with random signs, near for near gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash

from holdfast.engine.core.step.audit import Sketch
from holdfast.engine.core.step.audits import SKETCH_WORDS
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.step.part_digest import PartDigest


class TaskDigest:
    """Digests the task that is being computed; buckets may come in any order.

    `cycle`: steps in which the ledger's digests of parts cover all of a gradient; 0: none is taken.
    """

    def __init__(self, cycle: int = 0) -> None:
        self._part = PartDigest(cycle)
        self._bits: int | None = None
        self._sketch: torch.Tensor | None = None

    def begin(self, *, bits: bool, sketch: bool, step: int = 0) -> None:
        """Begin a task, and take the bits of its gradient, its sketch, both or neither.

        `step`: of the job; it says which part the ledger's digest is of.
        """
        self._part.begin(step)
        self._bits = 0 if bits else None
        self._sketch = torch.zeros(SKETCH_WORDS, dtype=torch.float64) if sketch else None

    def note(self, bucket: int, flat: torch.Tensor) -> None:
        """Take in one bucket of the task's gradient, or the places or values of a table."""
        self._part.note(bucket, flat)
        if self._sketch is not None:
            if flat.numel() and (flat.is_floating_point() or flat.is_complex()):
                self._sketch = self._sketch + sketch(flat.reshape(-1), bucket)
        if self._bits is not None:
            data = as_bytes(flat).cpu().numpy().data
            self._bits ^= xxhash.xxh3_64_intdigest(data, seed=bucket) >> 1

    @property
    def bits(self) -> int:
        """Return 63 bits of the task's gradient; 0 if they were not wanted."""
        return self._bits or 0

    def part(self) -> int:
        """Return 63 bits of a part of the task's gradient, for the ledger; 0: not taken."""
        return self._part.take()

    def part_of(self, step: int, parts: Iterable[tuple[int, torch.Tensor]]) -> int:
        """Return 63 bits of a part of a whole gradient, between two tasks; 0: not taken."""
        return self._part.of(step, parts)

    @property
    def sketch(self) -> Sketch:
        """Return the sketch of the task's gradient; () if it was not wanted."""
        return () if self._sketch is None else tuple(self._sketch.tolist())


def sketch(flat: torch.Tensor, seed: int) -> torch.Tensor:
    """Return [SKETCH_WORDS] float64 on the host: the sum of squares, and sums with random signs.

    Those of the parts of a gradient add up to that of the whole.
    """
    sums = SKETCH_WORDS - 1
    flat = torch.view_as_real(flat).reshape(-1) if flat.is_complex() else flat
    dice = torch.Generator().manual_seed(seed)
    signs = torch.randint(0, 2, (len(flat),), generator=dice, dtype=torch.int8) * 2 - 1
    values = flat.double()
    signed = values * signs.to(flat.device)
    padded = torch.nn.functional.pad(signed, (0, -len(flat) % sums))
    signed_sums = padded.view(sums, -1).sum(dim=1)
    return torch.cat([values.square().sum().view(1), signed_sums]).cpu()

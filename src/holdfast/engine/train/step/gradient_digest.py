"""Digests gradients in parts for the ledger, or whole, to compare a task with its other run.

Equal gradients have equal digests, whoever computes them. The ledger's digest covers other parts in
each step, so that a lasting difference shows within a cycle of steps. On a GPU the part is summed
as whole numbers there, and the host reads one number per bucket at the end of the task.

A task's digest is 63 bits of its bytes; or, where two runs of a task never have the same bits, a
count sketch (Charikar, Chen and Farach-Colton 2002): sums with random signs, near for near
gradients.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash

from holdfast.engine.core.step.audit import Sketch
from holdfast.engine.core.step.audits import SKETCH_WORDS
from holdfast.engine.train.exchange.tensor_bytes import as_bytes, memory_of, sum_of_bits

# A bucket of less than 2 * ALWAYS_BYTES is digested whole in each step. Larger ones wait for a step
# in which AT_ONCE_BYTES of them are digested, since each call has its price.
ALWAYS_BYTES = 1 << 16
AT_ONCE_BYTES = 1 << 19


class PartDigest:
    """Takes in the buckets and tables of one gradient, in any order.

    `cycle`: steps in which all of it is seen, or fewer for small buckets; 0: no digests.
    """

    def __init__(self, cycle: int) -> None:
        self._cycle = cycle
        self._step = 0
        self._bits = 0
        self._sums: list[tuple[int, torch.Tensor]] = []  # buckets with sums of their parts on a GPU

    def begin(self, step: int) -> None:
        """Begin a gradient of this step of the job."""
        self._step, self._bits = step, 0
        self._sums.clear()

    def note(self, bucket: int, flat: torch.Tensor) -> None:
        """Take in one bucket, or the places or values of a table."""
        if not self._cycle:
            return
        turn = self._turn_of(bucket, flat.nbytes)
        if turn is None:
            return
        if flat.device.type != "cpu":
            flat = flat.reshape(-1)
            self._sums.append((bucket, sum_of_bits(flat[_part(len(flat), turn)])))
            return
        memory = memory_of(flat)
        part = memory[_part(len(memory), turn)]
        self._bits ^= xxhash.xxh3_64_intdigest(part, seed=bucket) >> 1

    def take(self) -> int:
        """Return the digest of 63 bits; 0 only if the cycle is 0."""
        if not self._cycle:
            return 0
        if self._sums:  # one transfer for all of them
            device = self._sums[0][1].device
            gathered = torch.stack([found.to(device) for _, found in self._sums]).tolist()
            for (bucket, _), found in zip(self._sums, gathered, strict=True):
                data = found.to_bytes(8, "little", signed=True)
                self._bits ^= xxhash.xxh3_64_intdigest(data, seed=bucket) >> 1
            self._sums.clear()
        return self._bits or 1

    def of(self, step: int, parts: Iterable[tuple[int, torch.Tensor]]) -> int:
        """Return 63 bits of these buckets, which are all of a gradient, as `take` does."""
        self.begin(step)
        for bucket, flat in parts:
            self.note(bucket, flat)
        return self.take()

    def _turn_of(self, bucket: int, size: int) -> tuple[int, int] | None:
        """Return the part of a bucket to digest in this step, and the number of its parts, or None.

        All parts have their turn in at most `cycle` steps, and few buckets in one step.
        """
        cycle = max(min(self._cycle, size // ALWAYS_BYTES), 1)
        parts = max(min(cycle, size // AT_ONCE_BYTES), 1)
        turn, wait = divmod(self._step + bucket, cycle // parts)
        return None if wait else (turn % parts, parts)


def _part(length: int, turn: tuple[int, int]) -> slice:
    number, parts = turn
    return slice(length * number // parts, length * (number + 1) // parts)


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

        `step`: of the job; the ledger's digest is of the part for this step.
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

    The sketches of a gradient's parts add up to the sketch of the whole.
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

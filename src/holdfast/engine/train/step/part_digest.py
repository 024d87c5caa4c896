"""Digests parts of a gradient for the ledger: other parts in each step.

Equal gradients have equal digests, whoever computes them; a lasting difference shows within a
cycle of steps. On a GPU the part is summed as whole numbers there, and the host reads one number
per bucket at the end of the task.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
import xxhash

from holdfast.engine.train.exchange.tensor_bytes import memory_of, sum_of_bits

# A bucket of less than 2 * ALWAYS_BYTES is digested whole in each step. Larger ones wait for a step
# in which AT_ONCE_BYTES of them are digested, since each call has its price.
ALWAYS_BYTES = 1 << 16
AT_ONCE_BYTES = 1 << 19


class PartDigest:
    """Takes in the buckets and tables of one gradient, in any order.

    `cycle`: steps in which all of it is seen, or fewer for small buckets; 0: nothing is digested.
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

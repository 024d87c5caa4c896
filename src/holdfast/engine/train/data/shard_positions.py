"""Computes how far each shard of a stream has been read, from the records of committed steps.

Workers do not send each other the positions of their shards: a step's row says how many samples a
task has used, and has a digest of their position. A shard that has ended begins again, in its next
epoch. Must not know torch or datasets: the ledger's proof walks the same way.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import xxhash

from holdfast.engine.core.errors import UserError

ORDER = "stream-1"  # names the way of counting in ledgers and checkpoints
_STATEFUL = struct.pack("<q", 1)
Position = tuple[int, int, int]  # epoch; samples of it used so far; step in which it began


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan:
    """Cuts the samples of a stream into steps: each shard gives its next `batch_size`.

    Each virtual rank has one shard. The last batch of a shard's epoch may be smaller.
    """

    batch_size: int
    virtual_ranks: int
    seed: int
    first_step: int = 0

    def __post_init__(self) -> None:
        if self.batch_size < 1:
            raise UserError(f"batch_size={self.batch_size} is not a size: give 1 or more samples")

    def start(self) -> list[Position]:
        """Return the positions of all shards before the first step."""
        return [(0, 0, self.first_step)] * self.virtual_ranks

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (0, steps since the first), because each shard ends at another time."""
        return 0, step - self.first_step

    def digest(self, shard: int, epoch: int, taken: int, count: int, stateful: bool = False) -> int:
        """Compute xxh3_64 over (shard, epoch, taken, count) as little-endian int64.

        `stateful`: the shard's reader can give its state; then a fifth number follows, 1.
        """
        packed = struct.pack("<4q", shard, epoch, taken, count) + (_STATEFUL if stateful else b"")
        return xxhash.xxh3_64_intdigest(packed)

    def position_after(
        self,
        positions: Sequence[Position],
        step: int,
        counts: Sequence[int],
        digests: Sequence[int],
        told: str = "",
    ) -> list[Position]:
        """Return the positions after a step that has used `counts[i]` samples of shard i.

        UserError if a digest differs from that of the next samples.
        """
        return [position for position, _ in self._walk(positions, step, counts, digests)]

    def stateful(
        self,
        positions: Sequence[Position],
        step: int,
        counts: Sequence[int],
        digests: Sequence[int],
    ) -> bool:
        """Return whether the reader of any shard can give its state. UserError."""
        return any(found for _, found in self._walk(positions, step, counts, digests))

    def _walk(
        self,
        positions: Sequence[Position],
        step: int,
        counts: Sequence[int],
        digests: Sequence[int],
    ) -> list[tuple[Position, bool]]:
        marks = zip(positions, counts, digests, strict=True)
        return [self._next_position(shard, step, *each) for shard, each in enumerate(marks)]

    def _next_position(
        self, shard: int, step: int, at: Position, count: int, digest: int
    ) -> tuple[Position, bool]:
        ended = (at[0] + 1, 0, step)  # it had no more samples, so the next epoch began at once
        for epoch, taken, began in (at, ended) if at[1] or not count else (at,):
            for stateful in (False, True):
                if digest == self.digest(shard, epoch, taken, count, stateful):
                    if count < self.batch_size:
                        return (epoch + 1, 0, step + 1), stateful
                    return (epoch, taken + count, began), stateful
        raise UserError(
            f"step {step} used other samples of shard {shard} than those that come next, after "
            f"{at[1]} of epoch {at[0]}"
        )

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in plain values, for ledgers and checkpoints."""
        return {"order": ORDER, **asdict(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> StreamPlan:
        """Reverse `to_dict`; trusts nothing: UserError unless the plan is one of ours."""
        values = {name: value for name, value in plain.items() if name != "order"}
        fields = ("batch_size", "virtual_ranks", "seed", "first_step")
        if sorted(values) != sorted(fields) or not all(type(v) is int for v in values.values()):
            raise UserError(f"plan {sorted(values)} is not that of a stream: write it with to_dict")
        if values["virtual_ranks"] < 1 or values["first_step"] < 0:
            raise UserError(f"plan {values} has impossible numbers: write it with to_dict")
        return cls(**values)

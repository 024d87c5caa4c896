"""Computes how far data that are read in order have been used, from the records of committed steps.

Such data are the shards of a stream, and the order that a script's own sampler gives. Workers do
not send each other their positions: a step's row has the number of samples of each task, and
a digest of their position. Must not know torch, datasets or samplers: the ledger's proof walks the
same way.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, ClassVar, TypeVar, cast

import msgspec
import xxhash

from holdfast.engine.core.errors import UserError

#: The epoch; its batches and samples used so far; the digest, batches and samples of its order. The
#: last three are 0 before the epoch's first step.
OrderPosition = tuple[int, int, int, int, int, int]
#: The epoch of a shard; its samples used so far; the step in which it began.
Position = tuple[int, int, int]
_STATEFUL = struct.pack("<q", 1)
P = TypeVar("P", bound="ReadPlan")


class ReadPlan:
    """Is the common part of the plans of data that are read in order, all of them dataclasses.

    `order` names the way of counting in ledgers and checkpoints.
    """

    __slots__ = ()

    order: ClassVar[str]
    virtual_ranks: int
    seed: int
    first_step: int

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (0, steps since the first): the plan does not know when an epoch ends."""
        return 0, step - self.first_step

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in plain values, for ledgers and checkpoints."""
        mine = {name: getattr(self, name) for name in _names_of(type(self))}
        return {"order": self.order, **mine}

    @classmethod
    def from_dict(cls: type[P], plain: Mapping[str, Any]) -> P:
        """Reverse `to_dict`. UserError unless the plan is one of ours."""
        values = {name: value for name, value in plain.items() if name != "order"}
        are_numbers = all(type(value) is int for value in values.values())
        if sorted(values) != sorted(_names_of(cls)) or not are_numbers:
            raise UserError(
                f"plan {sorted(values)} does not fit the order {cls.order!r}: write it with to_dict"
            )
        if values["virtual_ranks"] < 1 or values["first_step"] < 0:
            raise UserError(f"plan {values} has impossible numbers: write it with to_dict")
        return cls(**values)


def _names_of(plan: type[ReadPlan]) -> list[str]:
    return [field.name for field in fields(cast("Any", plan))]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderFacts:
    """Describes an epoch's order, as recorded in the epoch's first step."""

    epoch: int
    #: 63 bits: digest of the batches' sizes and samples.
    order: int
    batches: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPlan(ReadPlan):
    """Cuts a sampler's batches into steps: each vrank takes the next one.

    `number`: of the sampler in the script.
    """

    order = "sampler-1"

    number: int
    virtual_ranks: int
    seed: int
    first_step: int = 0

    def start(self) -> list[OrderPosition]:
        """Return the position in the order before the first step."""
        return [(0, 0, 0, 0, 0, 0)]

    def digest(self, facts: OrderFacts, batch: int, first: int, count: int) -> int:
        """Compute xxh3_64 over (order, epoch, batch, its first sample's place, count) as int64."""
        packed = struct.pack("<5q", facts.order, facts.epoch, batch, first, count)
        return xxhash.xxh3_64_intdigest(packed)

    def position_after(
        self,
        positions: Sequence[OrderPosition],
        step: int,
        counts: Sequence[int],
        digests: Sequence[int],
        told: str,
    ) -> list[OrderPosition]:
        """Return the position after a step; `told` is the ledger's text of that step.

        UserError if a digest is not the next batch's.
        """
        epoch, batch, taken, order, batches, samples = positions[0]
        if batches:
            facts = OrderFacts(epoch=epoch, order=order, batches=batches, samples=samples)
        else:
            facts = _facts(told, epoch, step)
        for count, digest in zip(counts, digests, strict=True):
            exists = batch < facts.batches
            if exists != bool(count) or digest != self.digest(facts, batch, taken, count):
                raise UserError(
                    f"step {step} used other samples than those that come next, after {taken} of "
                    f"epoch {epoch}"
                )
            batch, taken = batch + exists, taken + count
        if (batch == facts.batches) != (taken == facts.samples):
            raise UserError(
                f"step {step} used batch {batch} of {facts.batches} with sample {taken} of "
                f"{facts.samples} of epoch {epoch}"
            )
        if batch == facts.batches:
            return [(epoch + 1, 0, 0, 0, 0, 0)]
        return [(epoch, batch, taken, facts.order, facts.batches, facts.samples)]


def encode_facts(facts: OrderFacts) -> str:
    """Return the ledger's text for an epoch's first step."""
    return msgspec.json.encode(facts).decode()


def _facts(told: str, epoch: int, step: int) -> OrderFacts:
    """Read what `encode_facts` has written. UserError if it cannot be that epoch's."""
    try:
        facts = msgspec.json.decode(told or "{}", type=OrderFacts)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        facts = None
    if facts is None or facts.epoch != epoch or not 0 < facts.batches <= facts.samples < 1 << 48:
        raise UserError(f"step {step} begins epoch {epoch} and says of its order: {told!r}")
    if not 0 <= facts.order < 1 << 63:
        raise UserError(f"step {step} begins epoch {epoch} with an impossible digest {facts.order}")
    return facts


@dataclass(frozen=True, slots=True, kw_only=True)
class StreamPlan(ReadPlan):
    """Cuts the samples of a stream into steps: each shard gives its next `batch_size`.

    Each virtual rank has one shard. The last batch of a shard's epoch may be smaller.
    """

    order = "stream-1"

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

        UserError if a digest is not the next samples'.
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

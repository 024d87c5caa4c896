"""Computes how far a sampler's order has been used, from the records of committed steps.

A step takes the next V batches of an epoch's order, one for each virtual rank; in an epoch's last
step some have none. Invariant: every batch of the sampler is used exactly once, in its order. The
proof of that does not need the sampler: the step that begins an epoch records how many batches and
samples its order has, and a digest of it, which goes into the digests of all its tasks. Must not
know torch or samplers: the ledger's proof walks the same way.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import msgspec
import xxhash

from holdfast.engine.core.errors import UserError

ORDER = "sampler-1"  # names the way of counting in ledgers and checkpoints
# The epoch; its batches and samples used so far; the digest, batches and samples of its order. The
# last three are 0 before the epoch's first step.
OrderPosition = tuple[int, int, int, int, int, int]


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderFacts:
    """Describes an epoch's order, as recorded in the epoch's first step."""

    epoch: int
    order: int  # 63 bits: digest of the batches' sizes and samples
    batches: int
    samples: int


@dataclass(frozen=True, slots=True, kw_only=True)
class OrderPlan:
    """Cuts a sampler's batches into steps: each vrank takes the next one.

    `number`: tells apart the samplers of one script.
    """

    number: int
    virtual_ranks: int
    seed: int
    first_step: int = 0

    def start(self) -> list[OrderPosition]:
        """Return the position in the order before the first step."""
        return [(0, 0, 0, 0, 0, 0)]

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (0, steps since the first): the plan does not know when an epoch ends."""
        return 0, step - self.first_step

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

        UserError if a digest differs from that of the next batch.
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

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in plain values, for ledgers and checkpoints."""
        return {"order": ORDER, **asdict(self)}

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> OrderPlan:
        """Reverse `to_dict`; trusts nothing: UserError unless the plan is one of ours."""
        values = {name: value for name, value in plain.items() if name != "order"}
        fields = ("number", "virtual_ranks", "seed", "first_step")
        if sorted(values) != sorted(fields) or not all(type(v) is int for v in values.values()):
            raise UserError(
                f"plan {sorted(values)} is not that of a sampler: write it with to_dict"
            )
        if values["virtual_ranks"] < 1 or values["first_step"] < 0:
            raise UserError(f"plan {values} has impossible numbers: write it with to_dict")
        return cls(**values)


def tell(facts: OrderFacts) -> str:
    """Return the ledger's text for an epoch's first step."""
    return msgspec.json.encode(facts).decode()


def _facts(told: str, epoch: int, step: int) -> OrderFacts:
    """Read what `tell` has written. UserError if it cannot be that epoch's."""
    try:
        facts = msgspec.json.decode(told or "{}", type=OrderFacts)
    except (msgspec.MsgspecError, ValueError, RecursionError):
        facts = None
    if facts is None or facts.epoch != epoch or not 0 < facts.batches <= facts.samples < 1 << 48:
        raise UserError(f"step {step} begins epoch {epoch} and says of its order: {told!r}")
    if not 0 <= facts.order < 1 << 63:
        raise UserError(f"step {step} begins epoch {epoch} with an impossible digest {facts.order}")
    return facts

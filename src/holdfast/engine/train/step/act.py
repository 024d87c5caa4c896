"""Describes what the workers do together in a step: a value that all of them compare."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import msgspec
import xxhash

from holdfast.engine.core.errors import Aborted
from holdfast.engine.core.ground.events import StepKind
from holdfast.engine.core.types import WorkerId

_decode = msgspec.msgpack.Decoder(tuple[str, int, str]).decode


@dataclass(frozen=True, slots=True)
class Act:
    """Describes the work of one step, which must be the same on all workers.

    `text`: the work, in words for people. `loop`: the number of the script's loop. `line`: the
    script's line that has opened the step; it may differ between workers. `kind`: what the step
    brings together, which follows from the text.
    """

    text: str = ""
    loop: int = 0
    line: str = ""
    kind: StepKind = StepKind.GRADIENTS

    def number(self, plan: int) -> int:
        """Return 63 bits that stand for the act and the plan of sums, but not for the line."""
        return xxhash.xxh3_64_intdigest(f"{plan} {self.loop} {self.text}".encode()) >> 1

    def encode(self) -> bytes:
        """Return the bytes of the act."""
        return msgspec.msgpack.encode((self.text, self.loop, self.line))

    @classmethod
    def decode(cls, data: bytes) -> Act:
        """Return the act that another member has sent. Aborted if it cannot be read."""
        try:
            return cls(*_decode(data))
        except msgspec.DecodeError as error:
            raise Aborted(f"a member has sent an act that cannot be read: {error}") from None


def describe_difference(acts: Mapping[WorkerId, Act]) -> str:
    """Describe in a sentence that two workers do different things in one step, and where."""
    first, mine = next(iter(acts.items()))
    for worker, act in acts.items():
        if (act.text, act.loop) != (mine.text, mine.loop):
            same = act.text == mine.text
            return (
                f"{_describe(first, mine, same)}, where {_describe(worker, act, same)}: the calls "
                "that workers make together must come in the same order on all workers, so make "
                "none of them under a condition that only some workers meet, such as job.is_leader"
            )
    others = [worker for worker in acts if worker != first]
    return (
        f"worker {others[0]} trains other parameters than worker {first} in this step: freeze, "
        "thaw, add and remove parameters on all workers at the same step"
    )


def _describe(worker: WorkerId, act: Act, with_loop: bool) -> str:
    loop = f" in its loop {act.loop + 1}" if with_loop else ""
    return f"worker {worker} {act.text}{loop}{f' ({act.line})' if act.line else ''}"

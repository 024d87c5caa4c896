"""Defines the ids of the protocol, and writes workers' numbers for people. Pure."""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass
from typing import NamedTuple, NewType

WorkerId = NewType("WorkerId", int)
AgentId = NewType("AgentId", str)
Incarnation = NewType("Incarnation", int)
ViewNumber = NewType("ViewNumber", int)

NO_VIEW = ViewNumber(0)
RELEASE_ALL = 1 << 30  # a release_loop no loop counter reaches


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: a machine looks at the clock again."""


class Peer(NamedTuple):
    """Names one process of a worker, which may have several, for processes of other workers.

    `shard`: which part of the model it holds; the processes of one shard exchange gradients.
    """

    worker: WorkerId
    shard: int = 0


class ProcessRole(enum.Enum):
    """Names the jobs that an agent's process may have."""

    #: It runs the user's script and hosts virtual ranks.
    WORKER = "worker"
    #: It serves torch.distributed's store to a group (core/membership/group.py).
    STORE = "store"


def spans(workers: Sequence[WorkerId]) -> str:
    """Format worker numbers for people: 0, 1, 4-9."""
    ordered = sorted(workers)
    starts = [w for i, w in enumerate(ordered) if i == 0 or w - ordered[i - 1] > 1]
    ends = [w for i, w in enumerate(ordered) if w == ordered[-1] or ordered[i + 1] - w > 1]
    parts = [
        str(a) if a == b else f"{a}, {b}" if b == a + 1 else f"{a}-{b}"
        for a, b in zip(starts, ends, strict=True)
    ]
    return ", ".join(parts)


def name_workers(workers: Sequence[WorkerId]) -> str:
    """Name workers for people: worker 2, or workers 2, 3."""
    return f"worker{'' if len(workers) == 1 else 's'} {spans(workers)}"


def say_of_workers(workers: Sequence[WorkerId], one: str, several: str) -> str:
    """Return a sentence on one worker, or several: worker 2 joins, workers 2, 3 join."""
    return f"{name_workers(workers)} {one if len(workers) == 1 else several}"


def read_spans(text: str, most: int) -> list[WorkerId]:
    """Return the worker numbers that `spans` has formatted, `most` of them at most."""
    found: list[WorkerId] = []
    for part in text.split(","):
        first, _, last = part.strip().partition("-")
        if first.isdecimal() and (not last or last.isdecimal()):
            numbers = range(int(first), int(last or first) + 1)[: most - len(found)]
            found += map(WorkerId, numbers)
    return found

"""Names workers for people, in few words however many they are. Pure."""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.core.types import WorkerId


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

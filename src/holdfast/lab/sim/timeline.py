"""Keeps the time of simulated worlds, and the story of one: the events of its machines."""

from __future__ import annotations

import heapq
import zlib
from collections import deque
from collections.abc import Callable
from typing import Any, Protocol

STORY_MAX = 40


class Timeline:
    """Keeps future events in order. Worlds that share a timeline live at the same time."""

    def __init__(self) -> None:
        self.now = 0.0
        self._heap: list[tuple[float, int, Callable[..., None], tuple[Any, ...]]] = []
        self._order = 0

    def call_later(self, delay_s: float, call: Callable[..., None], args: tuple[Any, ...]) -> None:
        """Schedule a call."""
        self._order += 1
        heapq.heappush(self._heap, (self.now + delay_s, self._order, call, args))

    def step(self, deadline: float) -> bool:
        """Make the next call; return whether there was one before the deadline."""
        if not self._heap or self._heap[0][0] > deadline:
            return False
        self.now, _, call, args = heapq.heappop(self._heap)
        call(*args)
        return True


class StoryHost(Protocol):
    """Is a host of a machine, with a name for the story."""

    @property
    def label(self) -> str: ...


class Story:
    """Keeps the last events of a run, and a digest of all. `listener`: takes a line for each."""

    def __init__(self, timeline: Timeline, listener: Callable[[str], None] | None) -> None:
        self.events = 0
        self.digest = 0
        self._timeline = timeline
        self.listener = listener
        self._last: deque[tuple[float, StoryHost | None, object, Any]] = deque(maxlen=STORY_MAX)

    def note(self, who: StoryHost, event: object, effects: list[Any]) -> None:
        """Remember one event of a machine; its digest makes two runs comparable."""
        now = self._timeline.now
        text = f"{now:.9f}{type(event).__name__}{len(effects)}"
        self.digest = zlib.crc32(text.encode(), self.digest)
        self._remember(who, event, effects)

    def mark(self, text: str) -> None:
        """Remember an event of the world."""
        self._remember(None, text, ())

    def recent(self) -> list[str]:
        """Return the last lines."""
        return [write_line(*entry) for entry in self._last]

    def _remember(self, who: StoryHost | None, event: object, effects: Any) -> None:
        entry = (self._timeline.now, who, event, effects)
        self._last.append(entry)
        if self.listener is not None:
            self.listener(write_line(*entry))


def write_line(now: float, who: StoryHost | None, event: object, effects: Any) -> str:
    """Write one line of the story, and one more for each effect."""
    if who is None:
        return f"{now:10.4f}  *** {event}"
    lines = [f"{now:10.4f}  {who.label:14} {_shorten(event)}"]
    lines += [f"{'':28}-> {_shorten(effect)}" for effect in effects]
    return "\n".join(lines)


def _shorten(value: object) -> str:
    """Write a dataclass without the noise: without names of types and default values."""
    if isinstance(value, tuple):
        return "(" + ", ".join(_shorten(v) for v in value) + ")"
    fields = getattr(value, "__dataclass_fields__", None)
    if fields is None:
        return str(value)
    shown = [
        f"{name}={_shorten(getattr(value, name))}"
        for name, field in fields.items()
        if getattr(value, name) != field.default
    ]
    return f"{type(value).__name__}({', '.join(shown)})"

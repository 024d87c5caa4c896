"""Simulates the other processes of a worker that has several: they follow it, later.

What the worker does stands for shard 0. Each further shard does the same in the same order, and is
late by a time of its own; now and then its connections break where those of shard 0 do not.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from random import Random

from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import WorkerEvent
from holdfast.engine.core.step.shards import ShardEvents
from holdfast.engine.core.types import Tick, ViewNumber

_OF_THE_WORKER = (ev.Directed, Tick, ev.LinkLost, ev.StillAwaited)  # the others never see these
BREAKS = 0.002  # chance for each thing that a shard does together with other workers

Later = Callable[..., None]  # (shard, seconds, call, arguments)


class OtherShards:
    """Gathers the events of one worker's processes; `feed` hands the joint ones to the machine."""

    def __init__(self, count: int, lag_s: float, rng: Random, feed: Callable[[WorkerEvent], None]):
        self._count = count
        self._lag_s = lag_s
        self._rng = rng
        self._feed = feed
        self._events = ShardEvents(count)
        self.behind = 0  # things that shard 0 has done and another one has not
        self._free = [0.0] * count  # when a shard has done all its work so far

    def follow_first(
        self, event: WorkerEvent, now: float, later: Later, *, may_break: bool
    ) -> Sequence[WorkerEvent]:
        """Return what the machine is told of what shard 0 has done; the others follow."""
        if self._count == 1 or isinstance(event, _OF_THE_WORKER):
            return [event]
        for shard in range(1, self._count):
            copy = event
            view: ViewNumber | None = getattr(event, "view", None)
            if view is not None and may_break and self._rng.random() < BREAKS:
                copy = ev.GroupBroken(view, f"shard {shard} has lost a connection")
            lag_s = self._rng.expovariate(1.0) * self._lag_s
            self._free[shard] = max(self._free[shard], now + lag_s)
            self.behind += 1
            later(shard, self._free[shard] - now, self._follow, shard, copy)
        return self._events.hear(0, event)

    def lag_s(self, now: float) -> float:
        """Return the seconds until the slowest shard is level with shard 0."""
        return max(self._free) - now

    def enter(self, view: ViewNumber) -> None:
        """Begin a view: what only some have done in earlier ones is not waited for."""
        self._events.begin(view)

    def _follow(self, shard: int, event: WorkerEvent) -> None:
        self.behind -= 1
        for told in self._events.hear(shard, event):
            self._feed(told)

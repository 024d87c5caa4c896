"""Workers of several processes in a story: each process does what the first one does.

A story may hold one process back, so that the other processes wait for it, and may break its
connections. Those on further nodes of a worker that is spread over several live and end by
themselves.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field

from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.step.shards import FollowerProofs, ShardEvents
from holdfast.engine.core.types import AgentId, Incarnation, Tick, ViewNumber, WorkerId
from holdfast.engine.core.worker_status import Stage, WorkerStatus

OF_THE_WORKER = (ev.Directed, Tick, ev.LinkLost, ev.StillAwaited)  # received by the first one alone


class Shards:
    """Keeps the processes of one worker, by the shards that they hold."""

    def __init__(self, count: int) -> None:
        self.count = count
        self._events = ShardEvents(count)
        self._behind: dict[int, deque[ev.WorkerEvent]] = {}  # by shard that is held back

    def hear(self, event: ev.WorkerEvent) -> Iterator[ev.WorkerEvent]:
        """Hand an event to all processes; yield the events that the machine receives by now."""
        if self.count == 1 or isinstance(event, OF_THE_WORKER):
            yield event
            return
        for shard in range(self.count):
            if shard in self._behind:
                self._behind[shard].append(event)
            else:
                yield from self._events.hear(shard, event)

    def hold_back(self, shard: int) -> None:
        """Make a process fall behind: the machine receives no event of it from now on."""
        self._behind.setdefault(shard, deque())

    def catch_up(self, shard: int) -> Iterator[ev.WorkerEvent]:
        """Deliver all events with which a process was late."""
        for event in self._behind.pop(shard, ()):
            yield from self._events.hear(shard, event)

    def lose_connection(self, shard: int, view: ViewNumber) -> Iterator[ev.WorkerEvent]:
        """Break the connection of a process to the same shard of another worker."""
        reason = f"shard {shard} has lost a connection"
        yield from self._events.hear(shard, ev.GroupBroken(view, reason))

    def begin(self, view: ViewNumber) -> None:
        """Begin a view: work that only some processes have done before is dropped."""
        self._events.begin(view)


@dataclass
class Further:
    """Keeps the processes of a worker on one of its further nodes."""

    worker: WorkerId
    incarnation: Incarnation
    node: AgentId
    place: int
    alive: bool = True
    said: int = 0
    proofs: FollowerProofs = field(default_factory=FollowerProofs)

    def committed(self, now: float, *, voted: bool) -> WorkerStatus | None:
        """Apply a step; return the status that proves that all members have acted, if any."""
        proved_at = self.proofs.record_commit(now, voted=voted)
        if proved_at is None or not self.alive:
            return None
        self.said += 1
        return WorkerStatus(
            worker=self.worker,
            incarnation=self.incarnation,
            seq=self.said,
            stage=Stage.READY,
            proved_at=proved_at,
        )


class FurtherNodes:
    """Keeps the processes on further nodes of all workers."""

    def __init__(self) -> None:
        self._all: list[Further] = []

    def add(self, further: Further) -> None:
        """Start the processes of a worker on a node."""
        self._all.append(further)

    def of(self, worker: WorkerId, incarnation: Incarnation) -> list[Further]:
        """Return the processes of one worker that live, by place."""
        key = (worker, incarnation)
        return [f for f in self._all if f.alive and (f.worker, f.incarnation) == key]

    def on(self, node: AgentId) -> Iterable[Further]:
        """Return the processes that live on a node."""
        return [each for each in self._all if each.alive and each.node == node]

"""Drives the worker machine: events in under one lock, effects out to their threads.

Three threads meet here: the script's own (computes), the engine (exchanges) and the control thread
(talks to the agent). All their observations become events of the pure machine; each takes its own
effects from a queue, in order.
"""

from __future__ import annotations

import dataclasses
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeGuard

from holdfast.engine.core.errors import Aborted, ScriptFault, UserError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.step.speculation import Lateness
from holdfast.engine.core.types import Peer, Tick
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.host.lifetime import end_lost
from holdfast.engine.records.time_lines import TimeUse
from holdfast.engine.train.step.link_watch import LinkWatch, ViewGroup
from holdfast.engine.train.step.monitor import Monitor
from holdfast.engine.train.step.time_sheet import TimeSheet

READ_S = 0.1  # for the control thread to read messages of the agent
_SCRIPT = ef.Begin | ef.Compute | ef.CopyState | ef.Adopt | ef.Commit | ef.Release
_ENGINE = (
    *(ef.Install, ef.SendMissed, ef.SyncState),
    *(ef.Gather, ef.Reduce, ef.CheckSum, ef.SendDone, ef.SendCounted),
)
ScriptOrder = ef.ScriptEffect | ef.Adopt
EngineOrder = ef.EngineEffect | ef.SendDone | ef.SendCounted


LEFT_WRONG = "it left the job, because it computed wrongly or held a wrong state"


class Link(Protocol):
    """Sends to the agent. No call blocks."""

    def tell(self, status: WorkerStatus) -> None: ...

    def publish(self, view: int, address: bytes) -> None: ...

    def has_unread(self) -> bool:
        """Return whether the agent has sent a message that is not read yet."""
        ...


class Machine(Protocol):
    """Is the driver's interface to its WorkerMachine, or to a substitute in another process."""

    @property
    def lateness(self) -> Lateness: ...

    @property
    def view(self) -> View | None: ...

    @property
    def pending(self) -> bool: ...

    def handle(self, event: ev.WorkerEvent, now: float) -> Sequence[ef.WorkerEffect]: ...

    def snapshot(self) -> WorkerStatus: ...

    def leads(self, now: float) -> bool: ...

    def deadline(self) -> float | None: ...


class Shards(Protocol):
    """Offers the other processes of this worker. Called with the monitor held."""

    def hear(self, shard: int, event: ev.WorkerEvent) -> Sequence[ev.WorkerEvent]:
        """Return the events for the machine that follow from an event in the process of `shard`."""
        ...

    def order(self, effect: ef.WorkerEffect, status: WorkerStatus) -> None:
        """Have all of them carry out what the machine has decided, if that is for them."""
        ...

    def meet(self, view: int, addresses: Mapping[Peer, bytes]) -> None:
        """Send them the addresses of the members of a view."""
        ...


class Hands(Protocol):
    """Carries out effects that concern gradients, at once and with the monitor held."""

    def carry_out(self, effect: ef.WorkerEffect) -> Sequence[ev.WorkerEvent]:
        """Carry out one effect, and return the events that follow for the machine."""
        ...


class Driver:
    """Drives a worker machine, as the module describes. Public attributes need the monitor held."""

    def __init__(
        self,
        machine: Machine,
        link: Link,
        monitor: Monitor,
        shards: Shards | None = None,
        times: TimeSheet | None = None,
    ) -> None:
        self.monitor = monitor
        self.times = times or TimeSheet()  # how the script's thread spends its time
        self.aborted = 0  # views up to this number must not be used
        self.failure: BaseException | None = None
        self.books: dict[int, dict[Peer, bytes]] = {}
        self._machine = machine
        self._link = link
        self._shards = shards
        self._hands: Hands | None = None
        self._script: deque[ScriptOrder] = deque()
        self._engine: deque[EngineOrder] = deque()
        self._events: deque[ev.WorkerEvent] = deque()
        self._posting = False
        # Wake a thread only for its own event: a spurious wake-up takes the interpreter from
        # another.
        self._script_waits = False
        self._script_until: float | None = None
        self._engine_waits = False
        self._rows_of: tuple[int, int] = (0, -1)  # the view and step whose rows may be exchanged
        self._links = LinkWatch()

    def serve(self, hands: Hands) -> None:
        """Enter views from now on: the worker has something to train."""
        with self.monitor:
            self._hands = hands

    # ------------------------------------------------------------ events

    def post(self, event: ev.WorkerEvent, shard: int = 0) -> None:
        """Feed one event to the machine and carry out its effects.

        `shard`: the worker's process from which the event comes.
        """
        with self.monitor:
            self._events.extend(self._gather_shards(event, shard))
            if self._posting:
                return
            self._posting = True
            try:
                while self._events:
                    for effect in self._machine.handle(self._events.popleft(), time.monotonic()):
                        self._carry_out(effect)
            finally:
                self._posting = False
            if self._script_waits and self._machine.deadline() != self._script_until:
                self.monitor.notify_all()

    def obey(self, effect: ef.WorkerEffect) -> None:
        """Carry out what the machine in another process of this worker has decided."""
        with self.monitor:
            self._carry_out(effect)
            while self._events:
                self._machine.handle(self._events.popleft(), time.monotonic())

    def _gather_shards(self, event: ev.WorkerEvent, shard: int = 0) -> Sequence[ev.WorkerEvent]:
        return (event,) if self._shards is None else self._shards.hear(shard, event)

    def tick(self) -> None:
        """Look whether the right to act ended or a link is lost; called several times a second.

        Messages of the agent are read first: a process that was paused may go on by the newest.
        """
        with self.monitor:
            deadline = self._machine.deadline()
            now = time.monotonic()
            if deadline is not None and now >= deadline and not self._link.has_unread():
                self.post(Tick())
            view = self.view
            group = None if view is None else self._links.find_due(view.number, now)
        for event in self._links.look(view, group) if view and group else ():
            self.post(event)

    def fail(self, error: BaseException) -> None:
        """Let the script's thread raise `error` at its next wait."""
        with self.monitor:
            self.failure = self.failure or error
            self.monitor.notify_all()

    # ------------------------------------------------------------ what is known

    def status(self) -> WorkerStatus:
        """Return the worker's status for the control plane."""
        with self.monitor:
            return self._machine.snapshot()

    @property
    def view(self) -> View | None:
        """Return the newest view installed."""
        with self.monitor:
            return self._machine.view

    @property
    def leads(self) -> bool:
        """Return whether this worker acts for the job."""
        with self.monitor:
            return self._machine.leads(time.monotonic())

    @property
    def pending(self) -> bool:
        """Return whether a planned change of the view is known here."""
        with self.monitor:
            return self._machine.pending

    @property
    def copied(self) -> int:
        """Return how many tasks of others this worker has computed because they were late."""
        with self.monitor:
            return self._machine.lateness.copied

    # ------------------------------------------------------------ orders

    def next_for_script(self, within_s: float = float("inf")) -> ScriptOrder | None:
        """Wait for the script's next order; None if none comes within that time.

        Raises the error of a thread that has failed.
        """
        until = time.monotonic() + within_s
        with self.monitor:
            if not self._script:
                self.times.wait(self._machine.snapshot())
            while not self._script:
                if self.failure is not None:
                    raise self.failure
                if time.monotonic() >= until:
                    return None
                self._wait(until)
            order = self._script.popleft()
            self.times.take(order, self._machine.snapshot().view)
            if self._shards is not None:
                self._shards.order(order, self._machine.snapshot())
            return order

    def next_for_engine(self) -> EngineOrder:
        """Wait for the engine's next order."""
        with self.monitor:
            self._engine_waits = True
            while not self._engine:
                self.monitor.wait()
            self._engine_waits = False
            return self._engine.popleft()

    def await_rows(self, view: int, step: int) -> None:
        """Wait until this worker's rows of a step may be exchanged. Raises Aborted."""
        with self.monitor:
            while self._rows_of != (view, step):
                self.check_alive(view)
                self.monitor.wait()
            self._rows_of = (0, -1)

    def _wait(self, most: float) -> None:
        """Wait for a change, or until it is time to report that others are late; up to `most`."""
        self._script_until = deadline = self._machine.deadline()
        until = most if deadline is None else min(deadline, most)
        left_s = None if until == float("inf") else until - time.monotonic()
        self._script_waits = True
        try:
            changed = (left_s is None or left_s > 0) and self.monitor.wait(left_s)
            if not changed and self._link.has_unread():
                changed = self.monitor.wait(READ_S)
        finally:
            self._script_waits = False
        if not changed:
            self.post(Tick())

    # ------------------------------------------------------------ groups

    def adopt_group(self, view: int, group: ViewGroup) -> None:
        """Let an abort of `view` cut `group` from now on. Aborted if that has happened already."""
        with self.monitor:
            self.check_alive(view)
            self._links.group = (view, group)

    def check_alive(self, view: int) -> None:
        """Raise Aborted once a view is given up."""
        with self.monitor:
            if view <= self.aborted or self.failure is not None:
                raise Aborted(f"view {view} was given up")

    def learn_addresses(self, view: int, addresses: dict[Peer, bytes]) -> None:
        """Record the addresses of a view's members, as received from the agent."""
        with self.monitor:
            self.books = {view: addresses}
            if self._shards is not None:
                self._shards.meet(view, addresses)
            self.monitor.notify_all()

    # ------------------------------------------------------------ effects

    def _carry_out(self, effect: ef.WorkerEffect) -> None:
        # those for the script follow once they begin
        if self._shards is not None and not isinstance(effect, _SCRIPT):
            self._shards.order(effect, self._machine.snapshot())
        if isinstance(effect, _SCRIPT):
            if isinstance(effect, ef.Commit):  # drop tasks that have not begun
                kept = [each for each in self._script if not isinstance(each, ef.Compute)]
                self._script = deque(kept)
            self._script.append(effect)
            if self._script_waits:
                self.monitor.notify_all()
        elif _is_for_engine(effect):
            self._engine.append(effect)
            self.times.note_engine(effect)
            # For a sum, the first full bucket or the rows wake the engine.
            if self._engine_waits and not isinstance(effect, ef.Reduce):
                self.monitor.notify_all()
        else:
            self._carry_out_at_once(effect)

    def _carry_out_at_once(self, effect: ef.WorkerEffect) -> None:
        match effect:
            case ef.Tell(status):
                self._link.tell(status)
            case ef.Abort(view):
                self.aborted = max(self.aborted, view)
                self._links.abort(view)
                self.times.expect(TimeUse.STALL)
                self.monitor.notify_all()
            case ef.ShareRows(view, step):
                self._rows_of = (view, step)
                self.monitor.notify_all()
            case ef.Exit():
                self.end_process()
            case ef.GiveUp(reason, by_script):
                self.fail(ScriptFault(reason) if by_script else UserError(reason))
            case _:
                try:
                    if self._hands is not None:
                        for event in self._hands.carry_out(effect):
                            self._events.extend(self._gather_shards(event))
                except Exception as error:  # noqa: BLE001 - the script raises it, from its thread
                    self.fail(error)

    def end_process(self, reason: str = LEFT_WRONG) -> None:
        """End this process at once: its state must not be used. The agent learns the reason."""
        status = self._machine.snapshot()
        self._link.tell(dataclasses.replace(status, seq=status.seq + 1, detail=reason))
        end_lost(reason)


def _is_for_engine(effect: ef.WorkerEffect) -> TypeGuard[EngineOrder]:
    if isinstance(effect, ef.ReplicaEffect):
        return ef.needs_group(effect)
    return isinstance(effect, _ENGINE)


class ViewRendezvous:
    """Exchanges the addresses of one view's members through the agent and the coordinator."""

    def __init__(self, driver: Driver, link: Link, view: View, peers: Sequence[Peer]) -> None:
        self._driver = driver
        self._link = link
        self._view = view
        self._peers = peers  # by rank

    def publish(self, address: bytes) -> None:
        """Send this worker's address to the others."""
        with self._driver.monitor:  # a newer view's address must be the last
            self._driver.check_alive(self._view.number)
            self._link.publish(self._view.number, address)

    def lookup(self, rank: int) -> bytes:
        """Wait for a member's address. Raises Aborted."""
        number = self._view.number
        with self._driver.monitor:
            while number not in self._driver.books:
                self._driver.check_alive(number)
                self._driver.monitor.wait()
            return self._driver.books[number][self._peers[rank]]

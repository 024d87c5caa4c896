"""Drives the worker machine: events in under one lock, effects out to their threads.

Three threads meet here: the script's own (computes), the engine (exchanges) and the control thread
(talks to the agent). All their observations become events of the pure machine; each takes its own
effects from a queue, in order. One lock guards the data that they share.
"""

from __future__ import annotations

import dataclasses
import threading
import time
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Generic, Protocol, TypeGuard, TypeVar

from holdfast.engine.core.errors import Aborted, ScriptFault, UserError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.step.speculation import Lateness
from holdfast.engine.core.types import Peer, Tick
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.host.lifetime import end_lost
from holdfast.engine.net.descriptors import DescriptorWatch
from holdfast.engine.records.time_lines import TimeUse
from holdfast.engine.train.step.time_sheet import TimeSheet

READ_S = 0.1  # for the control thread to read messages of the agent
LOOK_S = 0.5  # between two looks at a group's links
ScriptOrder = ef.ScriptEffect | ef.Adopt
EngineOrder = ef.EngineEffect | ef.SendDone | ef.SendCounted
Order = TypeVar("Order")

LEFT_WRONG = "it left the job, because it computed wrongly or held a wrong state"


class Monitor(threading.Condition):
    """Guards the data shared by the script, the engine and the control thread of one worker.

    A thread that changes something for which another may wait notifies all. The driver owns the
    monitor; other parts get it to read and write their share of the state.
    """

    def __init__(self) -> None:
        super().__init__(threading.RLock())


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


class Shards:
    """Offers the other processes of this worker, of which there are none here.

    Called with the monitor held.
    """

    def hear(self, shard: int, event: ev.WorkerEvent) -> Sequence[ev.WorkerEvent]:
        """Return the events for the machine that follow from an event in the process of `shard`."""
        return (event,)

    def order(self, effect: ef.WorkerEffect, status: WorkerStatus) -> None:
        """Send them a decision of the machine, if it is for them."""

    def meet(self, view: int, addresses: Mapping[Peer, bytes]) -> None:
        """Send them the addresses of the members of a view."""


class Prompt(Protocol):
    """Carries out effects that concern gradients, at once and with the monitor held."""

    def carry_out_now(self, effect: ef.WorkerEffect) -> Sequence[ev.WorkerEvent]:
        """Carry out one effect, and return the events that follow for the machine."""
        ...


class ViewGroup(Protocol):
    """Offers what any thread may use of a view's process group."""

    def abort(self) -> None: ...

    def lost_ranks(self) -> Sequence[int]: ...


class ViewGroups:
    """Knows which views may be used, the present view's group, and its members' addresses."""

    def __init__(self, monitor: Monitor) -> None:
        #: Views up to this number must not be used.
        self.aborted = 0
        self._monitor = monitor
        self._is_closed = False  # no view may be used any more
        # The view's number, and its group if any.
        self._group: tuple[int, ViewGroup] | None = None
        self._addresses: dict[int, dict[Peer, bytes]] = {}  # by view
        self._look_at = 0.0  # when to look at the links next
        self._descriptors = DescriptorWatch()

    def check_alive(self, view: int) -> None:
        """Raise Aborted once a view is given up."""
        with self._monitor:
            if view <= self.aborted or self._is_closed:
                raise Aborted(f"view {view} was given up")

    def adopt(self, view: int, group: ViewGroup) -> None:
        """Take this group, which an abort of `view` cuts. Aborted if that has happened already."""
        with self._monitor:
            self.check_alive(view)
            self._group = (view, group)

    def abort(self, view: int) -> None:
        """Give up this view and earlier ones: cut the group of such a view."""
        with self._monitor:
            self.aborted = max(self.aborted, view)
            if self._group is not None and self._group[0] <= view:
                self._group[1].abort()
                self._group = None
            self._monitor.notify_all()

    def close(self) -> None:
        """Give up all views, because a thread of this worker has failed."""
        with self._monitor:
            self._is_closed = True
            self._monitor.notify_all()

    def learn_addresses(self, view: int, addresses: dict[Peer, bytes]) -> None:
        """Record the addresses of a view's members, as received from the agent."""
        with self._monitor:
            self._addresses = {view: addresses}
            self._monitor.notify_all()

    def await_addresses(self, view: int) -> dict[Peer, bytes]:
        """Wait for the addresses of a view's members. Raises Aborted."""
        with self._monitor:
            while view not in self._addresses:
                self.check_alive(view)
                self._monitor.wait()
            return self._addresses[view]

    def find_due(self, view: int, now: float) -> ViewGroup | None:
        """Return the group of this view if it is time to look at it."""
        if self._group is None or self._group[0] != view or now < self._look_at:
            return None
        self._look_at = now + LOOK_S
        return self._group[1]

    def look(self, view: View, group: ViewGroup) -> list[ev.WorkerEvent]:
        """Return events about descriptors, and about the links of a view's group.

        It is called without the monitor.
        """
        found: list[ev.WorkerEvent] = []
        if text := self._descriptors.complaint():
            found.append(ev.EventNoted("descriptors", text))
        if peers := tuple(view.workers[rank] for rank in group.lost_ranks()):
            found.append(ev.LinkLost(view.number, peers))
        return found


class OrderQueue(Generic[Order]):
    """Keeps the orders of one thread, which is woken for its own orders only.

    A spurious wake-up would take the interpreter from another thread.
    """

    def __init__(self) -> None:
        self.orders: deque[Order] = deque()
        #: Its thread waits.
        self.is_awaited = False
        #: Its thread waits until then.
        self.until: float | None = None


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
        #: How the script's thread spends its time.
        self.times = times or TimeSheet()
        self.groups = ViewGroups(monitor)
        self.failure: BaseException | None = None
        self._machine = machine
        self._link = link
        self._shards = shards or Shards()
        self._prompt: Prompt | None = None
        self._script: OrderQueue[ScriptOrder] = OrderQueue()
        self._engine: OrderQueue[EngineOrder] = OrderQueue()
        self._events: deque[ev.WorkerEvent] = deque()
        self._posting = False
        self._rows_of: tuple[int, int] = (0, -1)  # the view and step whose rows may be exchanged

    def serve(self, prompt: Prompt) -> None:
        """Enter views from now on: the worker has something to train."""
        with self.monitor:
            self._prompt = prompt

    # ------------------------------------------------------------ events

    def post(self, event: ev.WorkerEvent, shard: int = 0) -> None:
        """Feed one event to the machine and carry out its effects.

        `shard`: the worker's process from which the event comes.
        """
        with self.monitor:
            self._events.extend(self._shards.hear(shard, event))
            if self._posting:
                return
            self._posting = True
            try:
                while self._events:
                    for effect in self._machine.handle(self._events.popleft(), time.monotonic()):
                        self._carry_out(effect)
            finally:
                self._posting = False
            if self._script.is_awaited and self._machine.deadline() != self._script.until:
                self.monitor.notify_all()

    def obey(self, effect: ef.WorkerEffect) -> None:
        """Carry out what the machine in another process of this worker has decided."""
        with self.monitor:
            self._carry_out(effect)
            while self._events:
                self._machine.handle(self._events.popleft(), time.monotonic())

    def tick(self) -> None:
        """Look whether the right to act ended or a link is lost; called several times a second.

        Messages of the agent are read first: a process that was paused may continue by the newest.
        """
        with self.monitor:
            deadline = self._machine.deadline()
            now = time.monotonic()
            if deadline is not None and now >= deadline and not self._link.has_unread():
                self.post(Tick())
            view = self.view
            group = None if view is None else self.groups.find_due(view.number, now)
        for event in self.groups.look(view, group) if view and group else ():
            self.post(event)

    def fail(self, error: BaseException) -> None:
        """Record an error, which the script's thread raises at its next wait."""
        with self.monitor:
            self.failure = self.failure or error
            self.groups.close()

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
        """Return the number of late tasks that this worker has computed for other workers."""
        with self.monitor:
            return self._machine.lateness.copied

    # ------------------------------------------------------------ orders

    def next_for_script(self, within_s: float = float("inf")) -> ScriptOrder | None:
        """Wait for the script's next order; None if none comes within that time.

        Raises the error of a thread that has failed.
        """
        until = time.monotonic() + within_s
        with self.monitor:
            if not self._script.orders:
                self.times.wait(self._machine.snapshot())
            while not self._script.orders:
                if self.failure is not None:
                    raise self.failure
                if time.monotonic() >= until:
                    return None
                self._wait(until)
            order = self._script.orders.popleft()
            self.times.take(order, self._machine.snapshot().view)
            self._shards.order(order, self._machine.snapshot())
            return order

    def next_for_engine(self) -> EngineOrder:
        """Wait for the engine's next order."""
        with self.monitor:
            self._engine.is_awaited = True
            while not self._engine.orders:
                self.monitor.wait()
            self._engine.is_awaited = False
            return self._engine.orders.popleft()

    def await_rows(self, view: int, step: int) -> None:
        """Wait until this worker's rows of a step may be exchanged. Raises Aborted."""
        with self.monitor:
            while self._rows_of != (view, step):
                self.groups.check_alive(view)
                self.monitor.wait()
            self._rows_of = (0, -1)

    def _wait(self, most: float) -> None:
        """Wait for a change, or until it is time to report late workers; up to `most`."""
        self._script.until = deadline = self._machine.deadline()
        until = most if deadline is None else min(deadline, most)
        left_s = None if until == float("inf") else until - time.monotonic()
        self._script.is_awaited = True
        try:
            changed = (left_s is None or left_s > 0) and self.monitor.wait(left_s)
            if not changed and self._link.has_unread():
                changed = self.monitor.wait(READ_S)
        finally:
            self._script.is_awaited = False
        if not changed:
            self.post(Tick())

    def learn_addresses(self, view: int, addresses: dict[Peer, bytes]) -> None:
        """Record the addresses of a view's members, as received from the agent."""
        with self.monitor:
            self.groups.learn_addresses(view, addresses)
            self._shards.meet(view, addresses)

    # ------------------------------------------------------------ effects

    def _carry_out(self, effect: ef.WorkerEffect) -> None:
        # Those for the script follow once they begin.
        if not _is_for_script(effect):
            self._shards.order(effect, self._machine.snapshot())
        if _is_for_script(effect):
            if isinstance(effect, ef.Commit):  # drop tasks that have not begun
                orders = self._script.orders
                begun = [order for order in orders if not isinstance(order, ef.Compute)]
                self._script.orders = deque(begun)
            self._script.orders.append(effect)
            if self._script.is_awaited:
                self.monitor.notify_all()
        elif _is_for_engine(effect):
            self._engine.orders.append(effect)
            self.times.note_engine(effect)
            # For a sum, the first full bucket or the rows wake the engine.
            if self._engine.is_awaited and not isinstance(effect, ef.Reduce):
                self.monitor.notify_all()
        else:
            self._carry_out_at_once(effect)

    def _carry_out_at_once(self, effect: ef.WorkerEffect) -> None:
        match effect:
            case ef.Tell(status):
                self._link.tell(status)
            case ef.Abort(view):
                self.groups.abort(view)
                self.times.expect(TimeUse.STALL)
            case ef.ShareRows(view, step):
                self._rows_of = (view, step)
                self.monitor.notify_all()
            case ef.Exit():
                self.end_process()
            case ef.GiveUp(reason, by_script):
                self.fail(ScriptFault(reason) if by_script else UserError(reason))
            case _:
                try:
                    if self._prompt is not None:
                        for event in self._prompt.carry_out_now(effect):
                            self._events.extend(self._shards.hear(0, event))
                except Exception as error:  # noqa: BLE001 - the script raises it, from its thread
                    self.fail(error)

    def end_process(self, reason: str = LEFT_WRONG) -> None:
        """End this process at once: its state must not be used. The agent learns the reason."""
        status = self._machine.snapshot()
        self._link.tell(dataclasses.replace(status, seq=status.seq + 1, detail=reason))
        end_lost(reason)


def _is_for_script(effect: ef.WorkerEffect) -> TypeGuard[ScriptOrder]:
    return isinstance(effect, ef.ForScript)


def _is_for_engine(effect: ef.WorkerEffect) -> TypeGuard[EngineOrder]:
    if isinstance(effect, ef.ReplicaEffect):
        return ef.needs_group(effect)
    return isinstance(effect, ef.ForEngine)


class ViewRendezvous:
    """Exchanges the addresses of one view's members through the agent and the coordinator."""

    def __init__(self, driver: Driver, link: Link, view: View, peers: Sequence[Peer]) -> None:
        self._driver = driver
        self._link = link
        self._view = view
        self._peers = peers  # by rank

    def publish(self, address: bytes) -> None:
        """Send this worker's address to the other members."""
        with self._driver.monitor:  # a newer view's address must be the last
            self._driver.groups.check_alive(self._view.number)
            self._link.publish(self._view.number, address)

    def lookup(self, rank: int) -> bytes:
        """Wait for a member's address. Raises Aborted."""
        return self._driver.groups.await_addresses(self._view.number)[self._peers[rank]]

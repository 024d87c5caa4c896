"""The worker machine's driver: events in under one lock, effects out, waiting threads woken.

Three threads meet here: the script's own (computes), the engine (exchanges) and the control thread
(talks to the agent). Whatever they see becomes an event of the pure machine; what the machine
decides is left in plain attributes, and everyone who waits for a change waits on `changed`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from typing import Protocol

from holdfast.core.errors import Aborted, assert_never
from holdfast.core.step import worker as machine
from holdfast.core.step.speculation import Patience
from holdfast.core.types import Incarnation, View, WorkerId, WorkerStatus

LOOK_S = 0.5  # between two looks at a group's links


class Link(Protocol):
    """The way to the agent. Neither call blocks."""

    def tell(self, status: WorkerStatus) -> None: ...

    def publish(self, view: int, address: bytes) -> None: ...


class Cuttable(Protocol):
    def abort(self) -> None: ...

    def lost(self) -> Sequence[int]: ...


class Driver:
    """See the module's docstring. Public attributes are read under `changed`."""

    def __init__(
        self,
        worker: WorkerId,
        incarnation: Incarnation,
        link: Link,
        patience: Patience | None = None,
    ) -> None:
        self.worker = worker
        self.changed = threading.Condition(threading.RLock())
        self.view: View | None = None  # newest installed
        self.aborted = 0  # views up to this number must not be used
        self.committed = 0
        self.begun: int | None = None  # the step that the script may compute
        self.copying: int | None = None  # the step of which it may copy what others are late with
        self.released = 0  # the loop that the script may leave
        self.to_save: tuple[int, View] | None = None  # after so many steps, as that view agreed
        self.save_wanted = False  # at the next boundary, by an operator
        self.stops = False  # the job is about to end: what is saved now counts as it is
        self.failure: BaseException | None = None
        self.books: dict[int, dict[WorkerId, bytes]] = {}
        self._machine = machine.WorkerMachine(worker, incarnation, patience)
        self._link = link
        self._group: tuple[int, Cuttable] | None = None
        self._look_at = 0.0  # when to look next at the group's links

    def post(self, event: machine.WorkerEvent) -> None:
        """Feed one event to the machine and carry out what it decides."""
        with self.changed:
            for effect in self._machine.handle(event, time.monotonic()):
                self._carry_out(effect)
            self.changed.notify_all()

    def tick(self) -> None:
        """Called several times a second: has the right to act ended?"""
        with self.changed:
            deadline = self._machine.deadline()
            now = time.monotonic()
            if deadline is not None and now >= deadline:
                self.post(machine.Tick())
            view, group = self.view, self._group
            if view is None or group is None or group[0] != view.number or now < self._look_at:
                return
            self._look_at = now + LOOK_S
        peers = tuple(view.workers[rank] for rank in group[1].lost())
        if peers:
            self.post(machine.LinkLost(view.number, peers))

    def fail(self, error: BaseException) -> None:
        """Let the script's thread raise `error` at its next wait."""
        with self.changed:
            self.failure = self.failure or error
            self.changed.notify_all()

    def status(self) -> WorkerStatus:
        with self.changed:
            return self._machine.snapshot()

    @property
    def at_rest(self) -> bool:
        """Whether the script has applied all that is committed, and waits."""
        with self.changed:
            return self._machine.at_rest

    def wait(self) -> None:
        """For a change, or for the time to say that others are late; with `changed` held."""
        deadline = self._machine.deadline()
        now = time.monotonic()
        if deadline is None or deadline == float("inf"):
            self.changed.wait()
        elif deadline <= now or not self.changed.wait(deadline - now):
            self.post(machine.Tick())

    @property
    def copied(self) -> int:
        """How many tasks of others this worker has computed because they were late."""
        with self.changed:
            return self._machine.lateness.copied

    @property
    def leads(self) -> bool:
        with self.changed:
            return self._machine.leads(time.monotonic())

    @property
    def pending(self) -> bool:
        with self.changed:
            return self._machine.pending

    def want_save(self) -> None:
        with self.changed:
            self.save_wanted = self.stops = True
            self.changed.notify_all()

    def save_after(self, step: int, view: View) -> None:
        """All members of `view` have agreed to save the state that `step` leads to."""
        with self.changed:
            self.to_save = (step + 1, view)
            self.save_wanted = False

    def hosted(self) -> tuple[int, ...]:
        """This worker's virtual ranks in the step to be committed next."""
        with self.changed:
            return self._machine.snapshot().hosted

    @property
    def owners(self) -> tuple[WorkerId, ...]:
        """Who hosts each virtual rank in that step."""
        with self.changed:
            return self._machine.owners

    def adopt_group(self, view: int, group: Cuttable) -> None:
        """From now on aborting `view` cuts `group`. Raises Aborted if that has happened already."""
        with self.changed:
            self.check_alive(view)
            self._group = (view, group)

    def check_alive(self, view: int) -> None:
        with self.changed:
            if view <= self.aborted or self.failure is not None:
                raise Aborted(f"view {view} was given up")

    def learn_addresses(self, view: int, addresses: dict[WorkerId, bytes]) -> None:
        with self.changed:
            self.books = {view: addresses}
            self.changed.notify_all()

    def _carry_out(self, effect: machine.WorkerEffect) -> None:
        match effect:
            case machine.Tell(status):
                self._link.tell(status)
            case machine.Abort(view):
                self.aborted = max(self.aborted, view)
                if self._group is not None and self._group[0] <= view:
                    self._group[1].abort()
                    self._group = None
            case machine.Install(view):
                self.view, self.copying = view, None
                lag = view.late_worker(self.worker)
                # It may go back: what was to be begun from may not have been readable.
                self.committed = view.resume_step if lag is None else lag.committed
            case machine.Commit(step):
                self.committed = step + 1
            case machine.Begin(step):
                self.begun = step
            case machine.Speculate(step):
                self.copying = step
            case machine.Release(loop):
                self.released = loop
            case _:
                assert_never(effect)


class ViewRendezvous:
    """How the members of one view exchange addresses: through the agent and the coordinator."""

    def __init__(self, driver: Driver, link: Link, view: View) -> None:
        self._driver = driver
        self._link = link
        self._view = view

    def publish(self, address: bytes) -> None:
        with self._driver.changed:  # nothing may come after what a newer view publishes
            self._driver.check_alive(self._view.number)
            self._link.publish(self._view.number, address)

    def lookup(self, rank: int) -> bytes:
        number = self._view.number
        with self._driver.changed:
            while number not in self._driver.books:
                self._driver.check_alive(number)
                self._driver.changed.wait()
            return self._driver.books[number][self._view.workers[rank]]

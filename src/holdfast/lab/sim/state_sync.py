"""Simulates how members compare their states in a pause, and send them to those that join."""

from __future__ import annotations

from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.types import WorkerId
from holdfast.lab.sim.arithmetic import MISSING_STATE_OFFSET
from holdfast.lab.sim.groups import Group
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.state_ends import StateWorld


class SimulatedSync:
    """Carries out one process's part: compare, send or receive, and compare again.

    The part under way is "print", "state", "storing" or "digest"; empty if none is.
    """

    def __init__(self, process: Actor, world: StateWorld) -> None:
        self._process = process
        self._world = world
        self._under_way = ""

    def enter(self) -> None:
        """A view is installed."""
        self._under_way = ""

    def begin(self, group: Group) -> None:
        """Show the other members a digest of this worker's state."""
        self._under_way = "print"
        self._world.data.turns.gather(self._process, group, ("print", 0), self._digest())

    def go_on(self, group: Group) -> None:
        """Compare the state among its holders; then send it to joiners, and compare among all."""
        process, view, data = self._process, group.view, self._world.data
        if (
            self._under_way == "print"
            and (prints := group.messages_of_all(("print", 0))) is not None
        ):
            back = frozenset(lag.worker for lag in view.catching_up)
            held = data.results.held_prints(group, prints)
            if len(set(held.values())) > 1:
                self._under_way = ""
                process.feed(ev.StatesCompared(view.number, tuple(sorted(held.items()))))
                return
            self._under_way = "state"
            self._donate(group, back)
        if self._under_way == "state":
            joins = process.worker in group.shape.joiners
            joins = joins and view.late_worker(process.worker) is None
            states = group.heard.get(("state", 0), {})
            if not joins or not group.shape.donors:
                self._show(group)
            elif len(states) == group.shape.donors:
                self._under_way = "storing"
                delay_s = self._world.delay(self._world.options.load_s)
                process.post(delay_s, self._store, group.number)
        if (
            self._under_way == "digest"
            and (digests := group.messages_of_all(("digest", 0))) is not None
        ):
            self._under_way = ""
            self._world.truth.steps.check_sync(process, view, digests)
            process.feed(ev.StatesCompared(view.number))

    def _donate(self, group: Group, back: frozenset[WorkerId]) -> None:
        process, view, world = self._process, group.view, self._world
        if process.worker not in group.shape.joiners:
            world.truth.steps.check_donation(process, view)
            body = (process.state, process.step, process.spoiling.flipped)
            for key in group.shape.joiner_keys:
                if key[0] not in back:
                    load_s = world.options.load_s
                    world.data.send(process, group, key, ("state", 0), body, load_s)
        elif group.shape.donors and process.worker not in back:
            process.feed(ev.Loading())
            process.state = None

    def _store(self, number: int) -> None:
        process, group = self._process, self._process.open_group(number)
        if group is not None:
            states = group.heard["state", 0]
            _, (process.state, process.step, process.spoiling.flipped) = min(states.items())
            process.spoiling.lacks = MISSING_STATE_OFFSET * self._world.options.forgetful
            self._show(group)
            self.go_on(group)

    def _show(self, group: Group) -> None:
        """Send all members the digest of this worker's state."""
        self._under_way = "digest"
        self._world.data.turns.gather(self._process, group, ("digest", 0), self._digest())

    def _digest(self) -> tuple[int | None, int | None]:
        return self._process.state, self._process.spoiling.flipped

"""Simulates the moves of a worker's states and steps: from where they come, and where they go.

It mirrors train/step/mover.py and the sources and sinks of train/state: one class stands for the
store, one for the nodes' memory, and one for the members of a view; feeds.py has the workers that
follow. An order begins something here, and its result comes later, as an event. This module
makes no decisions.
"""

from __future__ import annotations

from functools import partial
from typing import Protocol

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind, SourceKind
from holdfast.engine.core.redundancy import Recall
from holdfast.engine.core.replica.saves import list_replacements
from holdfast.engine.core.types import AgentId, ViewNumber, WorkerId
from holdfast.engine.core.views import FollowOrder, LateWorker, View
from holdfast.lab.sim.arithmetic import MISSING_STATE_OFFSET, Copy, Share
from holdfast.lab.sim.checkers import Truth
from holdfast.lab.sim.data_network import DataNetwork
from holdfast.lab.sim.groups import Group, What
from holdfast.lab.sim.seams import Actor, Clock, Memory
from holdfast.lab.sim.stored import WriterHost

StateOrder = ef.ReplicaEffect | ef.SendMissed | ef.SyncState
MESSAGES = "missed", "print", "state", "digest"  # kinds of messages that are about states


class StateWorld(Clock, Protocol):
    """Is the world around a process's states."""

    store_silent: bool

    def reaches(self, agent: AgentId) -> bool:
        """Return whether a node can be asked for its memory's contents."""
        ...

    @property
    def data(self) -> DataNetwork: ...

    @property
    def truth(self) -> Truth: ...


class SimulatedEnd:
    """Refuses all orders; each end overrides the methods for those it takes."""

    def load_state(self, order: ef.ObtainState, group: Group | None) -> None:
        """Begin to load a state."""
        raise AssertionError(f"no state comes from {order.source}")

    def take_step(self, order: ef.ObtainStep, group: Group | None) -> None:
        """Begin to put a step where the script applies it."""
        raise AssertionError(f"no step comes from {order.source}")

    def take_copy(self, order: ef.CopyState, began: float) -> ev.StateCopied:
        """Take the copy that was begun at a time and is complete now."""
        raise AssertionError(f"nothing is copied for {order.sink}")

    def keep(self, order: ef.KeepStep, group: Group | None) -> None:
        """Begin to keep a step."""
        raise AssertionError(f"nothing is kept for {order.sink}")

    def forget(self, order: ef.Forget) -> None:
        """Drop states and steps that are not needed any more."""
        raise AssertionError(f"nothing is forgotten by {order.sink}")

    def follow(self, order: FollowOrder | None) -> None:
        """Take in the messages of this order; None: of none."""
        raise AssertionError("no members feed this worker")


class StoreEnd(SimulatedEnd):
    """Reads checkpoints, and has the node's writer save them."""

    def __init__(self, process: Actor, world: StateWorld, writer: WriterHost) -> None:
        self._process = process
        self._world = world
        self._writer = writer

    def load_state(self, order: ef.ObtainState, group: Group | None) -> None:
        """Begin from a checkpoint: each member reads a share, and one finds any damage."""
        assert group is not None, "a checkpoint is read in a view"
        process, view, world, step = self._process, group.view, self._world, order.step
        if world.store_silent:
            reason = f"the checkpoint of step {step} cannot be read just now"
            process.post(1.0, process.feed, _make_failure(SourceKind.STORE, group, reason))
            return
        stored, reader = world.truth.stored, group.keys[view.number % len(group.keys)]
        if process.key == reader and (step not in stored.saved or step in stored.rotten):
            self._refuse(view, step)
            return
        process.feed(ev.Loading())
        process.work.state = None
        process.post(world.delay(world.options.load_s), self._finish_load, group.number)

    def _refuse(self, view: View, step: int) -> None:
        """Report that a checkpoint cannot be read, and which one can be instead."""
        truth, stored = self._world.truth, self._world.truth.stored
        others = list_replacements(stored.list_views(), step, view.invalidations)
        other = next((each for each in others if each not in stored.rotten), 0)
        truth.count["checkpoints instead of damaged ones"] += bool(other)
        reason = "the checkpoint is damaged"
        self._process.feed(ev.ObtainFailed(SourceKind.STORE, view.number, reason, step, other))

    def _finish_load(self, number: int) -> None:
        process, group = self._process, self._process.open_group(number)
        if group is None:
            return
        if group.view.base not in self._world.truth.stored.saved:  # it was removed by now
            self._refuse(group.view, group.view.base)
        else:
            process.work.step = group.view.base
            process.work.state, process.spoiling.flipped = self._world.truth.check_loaded_state(
                process.work.step
            )
            process.feed(ev.StateObtained(SourceKind.STORE, group.view.number))

    def take_copy(self, order: ef.CopyState, began: float) -> ev.StateCopied:
        """Give the copy to the writer."""
        self._writer.save(self._process, order)
        return ev.StateCopied(order.sink, order.step, self._world.now - began)


class MemoryEnd(SimulatedEnd):
    """Puts pieces of states and steps into the nodes' memory, and recalls them."""

    def __init__(self, process: Actor, world: StateWorld) -> None:
        self._process = process
        self._world = world

    def load_state(self, order: ef.ObtainState, group: Group | None) -> None:
        """Put the state together from which the view begins."""
        recall = _recall_of(group)
        process, world = self._process, self._world
        process.feed(ev.Loading())
        process.work.state = None
        process.post(world.delay(world.options.load_s), self._finish_recall, order.view, recall)

    def _finish_recall(self, number: ViewNumber, recall: Recall) -> None:
        process, group = self._process, self._process.open_group(number)
        if group is None:
            return
        copy = self._world.truth.memories.state(recall.view, recall.base, self._world.reaches)
        if copy is None:
            process.feed(_make_failure(SourceKind.MEMORY, group, "pieces of the state are missing"))
            return
        process.work.step = recall.base
        process.work.state, process.spoiling.flipped = copy
        self._world.truth.count["states recalled"] += 1
        process.feed(ev.StateObtained(SourceKind.MEMORY, number))

    def take_step(self, order: ef.ObtainStep, group: Group | None) -> None:
        """Put the sum of a step together."""
        recall = _recall_of(group)
        assert group is not None, "a step is recalled in a view"
        process, step = self._process, order.step
        view = next(s.view for s in recall.sources if s.first <= step < s.end)
        total = self._world.truth.memories.total(view, step, self._world.reaches)
        if total is None:
            process.feed(
                _make_failure(SourceKind.MEMORY, group, "pieces of a gradient are missing")
            )
            return
        process.work.total, process.work.total_step, process.exchanges.parts = total, step, ()
        self._world.truth.count["steps recalled"] += 1
        process.feed(ev.StepObtained(SourceKind.MEMORY, group.view.number, step))

    def take_copy(self, order: ef.CopyState, began: float) -> ev.StateCopied:
        """Begin to make pieces of the copy; the script continues."""
        process, world = self._process, self._world
        world.truth.errors.record_comparison(order.step)
        copy = (process.work.state, process.spoiling.flipped)
        process.post(world.delay(world.options.load_s), self._finish_replication, order, copy)
        return ev.StateCopied(order.sink, order.step)

    def _finish_replication(self, order: ef.CopyState, copy: Copy) -> None:
        problem = ""
        if self._world.rng.random() < self._world.options.feed_fails:
            problem = "there is no memory for it"
        else:
            self._process.spread.visit_memories(partial(self._keep_state, order, copy))
        self._process.feed(ev.StateProtected(order.step, problem))

    def _keep_state(
        self, order: ef.CopyState, copy: Copy, memory: Memory, _: AgentId, place: int
    ) -> None:
        memory.keep_state(order.view, self._process.worker, order.step, copy, place)

    def keep(self, order: ef.KeepStep, group: Group | None) -> None:
        """Begin to put this member's pieces of a sum there."""
        assert group is not None, "a step is kept in a view"
        delay_s = self._world.delay(self._world.options.channel_s)
        self._process.post(delay_s, self._keep_sum, group.view, order.step)

    def _keep_sum(self, view: View, step: int) -> None:
        """Put them there, unless the view has ended."""
        process, worker = self._process, self._process.worker
        if process.open_group(view.number) is not None and process.work.total_step == step:
            total = process.work.total
            process.spread.visit_memories(
                lambda memory, _, place: memory.keep_sum(view, worker, step, total, place)
            )
            full = self._world.rng.random() < self._world.options.feed_fails
            process.feed(ev.StepKept(view.number, step, full))

    def forget(self, order: ef.Forget) -> None:
        """Drop states and steps older than a protected state, on all of the worker's nodes."""
        self._process.spread.visit_memories(partial(self._forget, order.view, order.step))

    def _forget(self, view: int, step: int, memory: Memory, agent: AgentId, _: int) -> None:
        self._world.truth.memories.record_forgetting(agent, view, step)
        memory.forget(view, step)


class MembersEnd(SimulatedEnd):
    """Keeps steps for members that were suspended, and receives those kept for this one."""

    def __init__(self, process: Actor, world: StateWorld) -> None:
        self._process = process
        self._world = world
        self._kept: dict[int, Share] = {}  # sums, by step
        self._receiving: ef.ObtainStep | None = None

    def enter(self, view: View) -> None:
        """A view is installed."""
        self._receiving = None
        if not view.catching_up:
            self._kept.clear()

    def keep(self, order: ef.KeepStep, group: Group | None) -> None:
        """Keep this member's piece of a sum."""
        assert group is not None, "a step is kept in a view"
        rank, size = group.view.rank(self._process.worker), len(group.keys)
        self._kept[order.step] = Share(rank, size, self._process.work.total or 0)

    def forget(self, order: ef.Forget) -> None:
        """Drop every step that was kept, because no member needs it any more."""
        self._kept.clear()

    def send(self, lag: LateWorker, group: Group) -> None:
        """Send a member the steps that it has missed."""
        key = (int(lag.worker), int(lag.incarnation))
        for step in range(lag.committed, group.view.resume_step):
            share = self._kept.get(step, Share(-1, 0, 0))
            self._world.data.send(self._process, group, key, ("missed", step), share)

    def take_step(self, order: ef.ObtainStep, group: Group | None) -> None:
        """Wait for a step that this member has missed."""
        assert group is not None, "members give steps in a view"
        self._receiving = order
        self.receive(group)

    def receive(self, group: Group) -> None:
        """Apply the next missed step, once all shares of it are here and the script waits."""
        process, receiving = self._process, self._receiving
        if receiving is None:
            return
        shares = group.heard.get(("missed", receiving.step), {})
        if len(shares) == len(group.view.donors):
            self._receiving = None
            kept = [shares[key] for key in sorted(shares)]
            self._world.truth.steps.check_pieces(process, receiving.step, kept)
            process.work.total, process.work.total_step = kept[0].total, receiving.step
            process.exchanges.parts = ()
            process.feed(ev.StepObtained(SourceKind.MEMBERS, group.view.number, receiving.step))


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
            body = (process.work.state, process.work.step, process.spoiling.flipped)
            for key in group.shape.joiner_keys:
                if key[0] not in back:
                    load_s = world.options.load_s
                    world.data.send(process, group, key, ("state", 0), body, load_s)
        elif group.shape.donors and process.worker not in back:
            process.feed(ev.Loading())
            process.work.state = None

    def _store(self, number: int) -> None:
        process, group = self._process, self._process.open_group(number)
        if group is not None:
            states = group.heard["state", 0]
            _, (process.work.state, process.work.step, process.spoiling.flipped) = min(
                states.items()
            )
            process.spoiling.lacks = MISSING_STATE_OFFSET * self._world.options.forgetful
            self._show(group)
            self.go_on(group)

    def _show(self, group: Group) -> None:
        """Send all members the digest of this worker's state."""
        self._under_way = "digest"
        self._world.data.turns.gather(self._process, group, ("digest", 0), self._digest())

    def _digest(self) -> tuple[int | None, int | None]:
        return self._process.work.state, self._process.spoiling.flipped


class SimulatedMover:
    """Moves the states and steps of one process; `feeds`: to and from workers that follow."""

    def __init__(
        self, process: Actor, world: StateWorld, writer: WriterHost, feeds: SimulatedEnd
    ) -> None:
        store, memory = StoreEnd(process, world, writer), MemoryEnd(process, world)
        self._members = MembersEnd(process, world)
        self._sync = SimulatedSync(process, world)
        self._sources: dict[SourceKind, SimulatedEnd] = {
            SourceKind.STORE: store,
            SourceKind.MEMORY: memory,
            SourceKind.MEMBERS: self._members,
            SourceKind.FEED: feeds,
        }
        self._sinks: dict[SinkKind, SimulatedEnd] = {
            SinkKind.STORE: store,
            SinkKind.MEMORY: memory,
            SinkKind.LATE: self._members,
            SinkKind.FOLLOWERS: feeds,
        }

    def enter(self, view: View) -> None:
        """A view is installed: work under way in an earlier one does not count."""
        self._members.enter(view)
        self._sync.enter()

    def carry_out(self, order: StateOrder, group: Group | None) -> None:
        """Begin what the machine wants; `group`: None if the view's connections are closed."""
        if group is None and _is_for_members(order):
            return
        match order:
            case ef.ObtainState():
                self._sources[order.source].load_state(order, group)
            case ef.ObtainStep():
                self._sources[order.source].take_step(order, group)
            case ef.KeepStep():
                self._sinks[order.sink].keep(order, group)
            case ef.Forget():
                self._sinks[order.sink].forget(order)
            case ef.Follow(follow):
                self._sources[SourceKind.FEED].follow(follow)
            case ef.SendMissed(_, lag) if group is not None:
                self._members.send(lag, group)
            case ef.SyncState() if group is not None:
                self._sync.begin(group)

    def take_copy(self, order: ef.CopyState, began: float) -> ev.StateCopied:
        """Give a copy of the state to its sink, once the script has made it."""
        return self._sinks[order.sink].take_copy(order, began)

    def receive(self, what: What, group: Group) -> None:
        """Take in a message from a member."""
        if what[0] == "missed":
            self._members.receive(group)
        else:
            self._sync.go_on(group)


def _is_for_members(order: StateOrder) -> bool:
    """Return whether an order can be carried out only while the members are connected."""
    match order:
        case ef.SendMissed() | ef.SyncState() | ef.KeepStep(SinkKind.LATE):
            return True
        case _:
            return ef.needs_group(order)


def _recall_of(group: Group | None) -> Recall:
    recall = group.view.recall if group is not None else None
    assert recall is not None, "nothing is recalled in this view"
    return recall


def _make_failure(source: SourceKind, group: Group, reason: str) -> ev.ObtainFailed:
    return ev.ObtainFailed(source, group.view.number, reason)

"""Passes a simulated replica's orders on to the end that each one names.

It mirrors the mover of a real worker (train/step/mover.py): one object stands for each source and
each sink, and nothing is decided here.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.ends import SinkKind, SourceKind
from holdfast.engine.core.views import View
from holdfast.lab.sim.feeds import Feeds, FeedWorld
from holdfast.lab.sim.groups import Group, What
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.state_ends import MembersEnd, MemoryEnd, SimulatedEnd, StateWorld, StoreEnd
from holdfast.lab.sim.state_sync import SimulatedSync
from holdfast.lab.sim.stored import WriterHost

StateOrder = ef.ReplicaEffect | ef.SendMissed | ef.SyncState
MESSAGES = "missed", "print", "state", "digest"  # kinds of messages that are about states


class MovingWorld(StateWorld, FeedWorld, Protocol):
    """Is the world around a process's states and feeds."""


class SimulatedMover:
    """Moves the states and steps of one process."""

    def __init__(self, process: Actor, world: MovingWorld, writer: WriterHost) -> None:
        store, memory = StoreEnd(process, world, writer), MemoryEnd(process, world)
        self.feeds = Feeds(process, world)
        self._members = MembersEnd(process, world)
        self._sync = SimulatedSync(process, world)
        self._sources: dict[SourceKind, SimulatedEnd] = {
            SourceKind.STORE: store,
            SourceKind.MEMORY: memory,
            SourceKind.MEMBERS: self._members,
            SourceKind.FEED: self.feeds,
        }
        self._sinks: dict[SinkKind, SimulatedEnd] = {
            SinkKind.STORE: store,
            SinkKind.MEMORY: memory,
            SinkKind.LATE: self._members,
            SinkKind.FOLLOWERS: self.feeds,
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
                self.feeds.follow(follow)
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

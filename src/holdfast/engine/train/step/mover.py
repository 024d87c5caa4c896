"""Carries out what the replica machine orders: it obtains, copies and keeps states and steps.

Each source and each sink is one object; the mover passes an order on to the object that it
names. It makes no decisions, and returns the result of an order as events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind, SourceKind
from holdfast.engine.core.invalidations import Invalidations
from holdfast.engine.core.views import FollowOrder, View
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.checkpoint.transfer import StateSync
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.step.reduction import Layout

Events = Sequence[ev.WorkerEvent]
GroupOrder = ef.ObtainState | ef.ObtainStep | ef.KeepStep | ef.Forget | ef.SendMissed | ef.SyncState
PromptOrder = ef.ReplicaEffect | ef.MarkCommitted | ef.Withdraw


@dataclass(slots=True)
class ViewConnections:
    """Keeps this worker's part in one view: its members' places, and the connections to them."""

    view: View
    layout: Layout
    transport: Transport

    @property
    def donors(self) -> list[int]:
        """Return the ranks of the members that hold the state."""
        return [self.view.rank(worker) for worker in self.view.donors]

    def piece(self, numel: int) -> slice:
        """Return the slice of a sum of `numel` elements that falls to this member."""
        return self.layout.piece(self.layout.rank, numel)


class StateSource:
    """Gives states or steps. Each call returns the result as events; Aborted if the view ended.

    A source overrides the methods for the kinds that it gives.
    """

    def load_state(self, order: ef.ObtainState, at: ViewConnections | None) -> Events:
        """Load the state, together with the view's members if there is one."""
        raise AssertionError(f"no state comes from {order.source}")

    def take_step(self, order: ef.ObtainStep, at: ViewConnections | None) -> Events:
        """Put the gradient of a step where the script finds it."""
        raise AssertionError(f"no step comes from {order.source}")

    def settle(self) -> None:
        """Wait until no state is being loaded."""

    def follow(self, order: FollowOrder | None) -> Events:
        """Take in messages of this order; None: of none. Return events about complete parts."""
        return ()

    def withdraw(self, invalidations: Invalidations) -> None:
        """Remove states that must not be used any more."""


class StateSink:
    """Takes copies of the state, and reduced steps. A sink overrides the methods for these."""

    def copy(self, order: ef.CopyState) -> ev.StateCopied:
        """Copy this worker's share; the script stands still."""
        raise AssertionError(f"no state is copied for {order.sink}")

    def keep(self, order: ef.KeepStep, at: ViewConnections) -> Events:
        """Keep this member's piece of a reduced step."""
        raise AssertionError(f"no step is kept for {order.sink}")

    def send_kept(self, order: ef.SendMissed, at: ViewConnections) -> None:
        """Send a member the steps that were kept for it. Aborted."""

    def mark(self, view: int, step: int) -> None:
        """Record that this worker commits a step."""

    def forget(self, order: ef.Forget) -> None:
        """Drop states or steps that the sink does not need any more."""

    def wait_before_update(self) -> None:
        """Wait for copies under way: the state is about to change."""

    def finish(self) -> None:
        """Wait for what the end of a loop must not cut off."""

    def copied_fingerprint(self, step: int) -> int:
        """Return a fingerprint of the state if it was copied one step before; 0: it was not."""
        return 0


class StateMover:
    """Passes orders on to sources and sinks, as the module describes.

    `loading` is called before the state of the script is overwritten. A job without redundancy
    lacks the nodes' memory as a sink.
    """

    def __init__(
        self,
        sources: Mapping[SourceKind, StateSource],
        sinks: Mapping[SinkKind, StateSink],
        loaded: LoadedState,
        loading: Callable[[], None],
    ) -> None:
        self._sources = sources
        self._sinks = sinks
        self._loaded = loaded
        self._loading = loading

    # ------------------------------------------------------------ by the engine, in a view

    def carry_out(self, order: GroupOrder, at: ViewConnections) -> Events:
        """Carry out an order together with the view's members; returns the result. Aborted."""
        match order:
            case ef.KeepStep():
                return self._sinks[order.sink].keep(order, at)
            case ef.Forget():
                self._sinks[order.sink].forget(order)
                return ()
        self._sources[SourceKind.FEED].settle()
        match order:
            case ef.ObtainState():
                return self._sources[order.source].load_state(order, at)
            case ef.ObtainStep():
                return self._sources[order.source].take_step(order, at)
            case ef.SendMissed():
                self._sinks[SinkKind.LATE].send_kept(order, at)
                return ()
            case ef.SyncState():
                return (self._sync(at),)

    def _sync(self, at: ViewConnections) -> ev.StatesCompared:
        """Bring joiners up to date from donors, and compare the states of all members."""
        view = at.view
        back = [view.rank(lag.worker) for lag in view.catching_up]
        joiners = [view.rank(worker) for worker in view.joiners]
        sync = StateSync(at.transport, at.layout, self._loaded, self._loading)
        held = sync.run(at.donors, [rank for rank in joiners if rank not in back], back)
        prints = tuple((view.workers[rank], each) for rank, each in sorted(held.items()))
        return ev.StatesCompared(view.number, prints)

    # ------------------------------------------------------------ at once

    def carry_out_now(self, order: PromptOrder, at: ViewConnections | None) -> Events:
        """Carry out an order without other members; returns the result."""
        match order:
            case ef.ObtainState():
                return self._sources[order.source].load_state(order, None)
            case ef.ObtainStep():
                return self._sources[order.source].take_step(order, None)
            case ef.KeepStep():
                assert at is not None, "a step is kept in a view"
                return self._sinks[order.sink].keep(order, at)
            case ef.Forget() if order.sink in self._sinks:
                self._sinks[order.sink].forget(order)
            case ef.MarkCommitted(view, step) if SinkKind.MEMORY in self._sinks:
                self._sinks[SinkKind.MEMORY].mark(view, step)
            case ef.Withdraw(invalidations):
                self._sources[SourceKind.STORE].withdraw(invalidations)
            case ef.Follow(follow):
                return self._sources[SourceKind.FEED].follow(follow)
        return ()

    # ------------------------------------------------------------ by the script's thread

    def copy(self, order: ef.CopyState) -> ev.StateCopied:
        """Copy the state for a sink, between two steps."""
        return self._sinks[order.sink].copy(order)

    def wait_before_update(self) -> None:
        """Wait for copies under way: the state is about to change."""
        for sink in self._sinks.values():
            sink.wait_before_update()

    def copied_fingerprint(self, step: int) -> int:
        """Return a fingerprint of the state if it was copied one step before; 0: it was not."""
        return max(sink.copied_fingerprint(step) for sink in self._sinks.values())

    def finish(self) -> None:
        """Wait for a save under way: the loop has ended."""
        for sink in self._sinks.values():
            sink.finish()

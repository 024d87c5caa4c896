"""Carries out what the replica machine orders: it obtains, copies and keeps states and steps.

Each source and each sink is one object; the mover passes an order on to the one that it names. It
decides nothing: it returns the result of an order as events.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Protocol

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.ends import SinkKind, SourceKind
from holdfast.engine.core.views import FollowOrder, View
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.checkpoint.transfer import StateSync
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.step.missed_steps import MissedSteps
from holdfast.engine.train.step.reduction import Layout

Events = Sequence[ev.WorkerEvent]
GroupOrder = ef.ObtainState | ef.ObtainStep | ef.KeepStep | ef.Forget | ef.SendMissed | ef.SyncState


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


class StateSource(Protocol):
    """Gives states or steps. Each call returns the result as events; Aborted if the view ended."""

    def load_state(self, order: ef.ObtainState, at: ViewConnections | None) -> Events:
        """Load the state, together with the view's members if there is one."""
        ...

    def take_step(self, order: ef.ObtainStep, at: ViewConnections | None) -> Events:
        """Put the gradient of a step where the script finds it."""
        ...


class StateSink(Protocol):
    """Takes copies of the state, and reduced steps."""

    def copy(self, order: ef.CopyState) -> ev.StateCopied:
        """Copy this worker's share; the script stands still meanwhile."""
        ...

    def keep(self, order: ef.KeepStep, at: ViewConnections) -> Events:
        """Keep this member's piece of a reduced step."""
        ...

    def forget(self, order: ef.Forget) -> None:
        """Drop states or steps that the sink does not need any more."""
        ...

    def wait_before_update(self) -> None:
        """Let copies under way come first: the state is about to change."""
        ...

    def finish(self) -> None:
        """Wait for what the end of a loop must not cut off."""
        ...

    def copied_fingerprint(self, step: int) -> int:
        """Return a fingerprint of the state if it was copied one step before; 0: it was not."""
        ...


class StateMover:
    """Passes orders on to sources and sinks, as the module describes.

    `settled` waits until nothing else loads a state here. `loading` tells that the state of the
    script is about to be overwritten. A job without a store or redundancy lacks these sources and
    sinks.
    """

    def __init__(
        self,
        sources: Mapping[SourceKind, StateSource],
        sinks: Mapping[SinkKind, StateSink],
        loaded: LoadedState,
        missed: MissedSteps,
        follow: Callable[[FollowOrder | None], Events],
        settled: Callable[[], None],
        loading: Callable[[], None],
    ) -> None:
        self._sources = sources
        self._sinks = sinks
        self._loaded = loaded
        self._missed = missed
        self._follow = follow
        self._settled = settled
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
        self._settled()
        match order:
            case ef.ObtainState():
                return self._sources[order.source].load_state(order, at)
            case ef.ObtainStep():
                return self._sources[order.source].take_step(order, at)
            case ef.SendMissed(_, lag):
                steps = range(lag.committed, at.view.resume_step)
                first = at.layout.rank == at.donors[0]
                self._missed.send(at.transport, at.view.rank(lag.worker), steps, first=first)
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

    def carry_out_at_once(self, order: ef.ReplicaEffect, at: ViewConnections | None) -> Events:
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
            case ef.Follow(follow):
                return self._follow(follow)
        return ()

    # ------------------------------------------------------------ by the script's thread

    def copy(self, order: ef.CopyState) -> ev.StateCopied:
        """Copy the state for a sink, between two steps."""
        return self._sinks[order.sink].copy(order)

    def wait_before_update(self) -> None:
        """Let copies under way come first: the state is about to change."""
        for sink in self._sinks.values():
            sink.wait_before_update()

    def copied_fingerprint(self, step: int) -> int:
        """Return a fingerprint of the state if it was copied one step before; 0: it was not."""
        return max(sink.copied_fingerprint(step) for sink in self._sinks.values())

    def finish(self) -> None:
        """Wait for a save under way: the loop has ended."""
        for sink in self._sinks.values():
            sink.finish()

"""Gives copies of the state and reduced steps to the store, the nodes' memory and other workers."""

from __future__ import annotations

import contextlib
import time

from holdfast.engine.core.errors import WorldError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.ends import SinkKind
from holdfast.engine.core.types import WorkerId
from holdfast.engine.train.checkpoint.saver import Saver
from holdfast.engine.train.checkpoint.shares import share_selector
from holdfast.engine.train.checkpoint.state import Capture
from holdfast.engine.train.feeding.feeder import Feeder
from holdfast.engine.train.protection.protector import Protector
from holdfast.engine.train.step.missed_steps import MissedSteps
from holdfast.engine.train.step.mover import Events, ViewConnections

SAVE_S_MAX = 600.0  # how long the end of a loop waits for a checkpoint under way


class PlainSink:
    """Refuses copies and steps; a sink overrides the methods for those it takes."""

    def copy(self, order: ef.CopyState) -> ev.StateCopied:
        """Refuse a copy, since no copy is ordered for this sink."""
        raise AssertionError(f"nothing is copied for {order.sink}")

    def keep(self, order: ef.KeepStep, at: ViewConnections) -> Events:
        """Refuse a step, since no steps are kept for this sink."""
        raise AssertionError(f"nothing is kept for {order.sink}")

    def forget(self, order: ef.Forget) -> None:
        """Drop nothing, since this sink keeps nothing."""

    def wait_before_update(self) -> None:
        """Return at once, since this sink delays nothing."""

    def finish(self) -> None:
        """Return at once, since this sink delays nothing."""

    def copied_fingerprint(self, step: int) -> int:
        """Return 0, since no copy for this sink is compared."""
        return 0


class StoreSink(PlainSink):
    """Has shares of the state saved; `saver` is None without a store or a writer.

    `capture`: the state, if this worker holds only its share, which others need as well.
    """

    def __init__(self, saver: Saver | None, me: WorkerId, capture: Capture | None) -> None:
        self._saver = saver
        self._me = me
        self._capture = capture

    def copy(self, order: ef.CopyState) -> ev.StateCopied:
        """Copy this worker's share of the state into memory that outlives it."""
        began, problem = time.monotonic(), "there is no writer"
        if self._saver is not None:
            problem = self._saver.copy(order.step, order.view, self._me, checked=order.checked)
        elif self._capture is not None:
            with contextlib.suppress(WorldError):
                self._capture(share_selector(len(order.view.members)))
        return ev.StateCopied(SinkKind.STORE, order.step, time.monotonic() - began, problem)

    def wait_before_update(self) -> None:
        """Wait until copies from a GPU have left it."""
        if self._saver is not None:
            self._saver.wait_before_update()

    def finish(self) -> None:
        """Wait for a save under way."""
        if self._saver is not None:
            self._saver.finish(SAVE_S_MAX)


class FollowersSink(PlainSink):
    """Sends a copy of the state, and the steps since, to workers that follow."""

    def __init__(self, feeder: Feeder, me: WorkerId) -> None:
        self._feeder = feeder
        self._me = me

    def copy(self, order: ef.CopyState) -> ev.StateCopied:
        """Copy this worker's share of the state, and begin to send it."""
        assert order.order is not None, "followers are fed by an order"
        problem = self._feeder.stage(order.step, order.order, order.view, self._me)
        number = order.order.number
        return ev.StateCopied(SinkKind.FOLLOWERS, order.step, problem=problem, order=number)

    def keep(self, order: ef.KeepStep, at: ViewConnections) -> Events:
        """Send this member's piece of a step."""
        self._feeder.send_step(order.step, compared=order.compared)
        return ()

    def forget(self, order: ef.Forget) -> None:
        """Stop feeding one follower, or all of them."""
        if order.follower is None:
            self._feeder.end(finish=order.finish)
        else:
            self._feeder.drop(order.follower)

    def wait_before_update(self) -> None:
        """Wait until the copy is made."""
        self._feeder.wait_before_update()

    def copied_fingerprint(self, step: int) -> int:
        """Return a fingerprint of the state if it was copied one step before; 0: it was not."""
        return self._feeder.copied_fingerprint(step)


class MemorySink(PlainSink):
    """Puts pieces of states and steps into the nodes' memory."""

    def __init__(self, protector: Protector) -> None:
        self._protector = protector

    def copy(self, order: ef.CopyState) -> ev.StateCopied:
        """Begin to make pieces of the state; the script may go on meanwhile."""
        self._protector.begin(order.step, order.view)
        return ev.StateCopied(SinkKind.MEMORY, order.step)

    def keep(self, order: ef.KeepStep, at: ViewConnections) -> Events:
        """Put pieces of a reduced step there."""
        return (self._protector.keep(order.step, at.view),)

    def forget(self, order: ef.Forget) -> None:
        """Drop states and steps older than a protected state."""
        self._protector.forget(order.view, order.step)

    def wait_before_update(self) -> None:
        """Wait until nothing is read of the state any more."""
        self._protector.wait_before_update()


class LateSink(PlainSink):
    """Keeps steps for members that were suspended, until they come back."""

    def __init__(self, missed: MissedSteps) -> None:
        self._missed = missed

    def keep(self, order: ef.KeepStep, at: ViewConnections) -> Events:
        """Keep this member's piece of a step."""
        self._missed.keep(order.step, at.piece)
        return ()

    def forget(self, order: ef.Forget) -> None:
        """Drop every step that was kept, since nobody needs it any more."""
        self._missed.forget()

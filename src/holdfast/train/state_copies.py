"""Copies this worker's share of the state at a boundary: to be saved, fed or protected."""

from __future__ import annotations

import contextlib
import time

from holdfast.core.errors import WorldError
from holdfast.core.step import effects as ef
from holdfast.core.step import events as ev
from holdfast.train.checkpoint.saver import Saver
from holdfast.train.checkpoint.shares import wanted_of_shares
from holdfast.train.checkpoint.state import Capture
from holdfast.train.driver import Driver
from holdfast.train.feeding.feeder import Feeder
from holdfast.train.protection.protector import Protector

SAVE_S_MAX = 600.0  # how long the end of a loop waits for a checkpoint under way


class StateCopies:
    """Has shares copied when the machine says so; `saver` is None without a store or a writer.

    `capture`: the state, if this worker holds only its share, of which others need some.
    """

    def __init__(
        self,
        driver: Driver,
        saver: Saver | None,
        feeder: Feeder,
        protector: Protector | None,
        capture: Capture | None = None,
    ) -> None:
        self._capture = capture
        self._driver = driver
        self._saver = saver
        self._feeder = feeder
        self._protector = protector

    def copy(self, order: ef.SaveShare | ef.StageState | ef.ProtectState) -> None:
        """Copy what is ordered, between two steps, and tell the machine."""
        if isinstance(order, ef.ProtectState):
            assert self._protector is not None, "nothing is protected in this job"
            self._protector.begin(order.step, order.view)
            self._driver.post(ev.ProtectionBegun(order.step))
            return
        worker, began = self._driver.status().worker, time.monotonic()
        if isinstance(order, ef.StageState):
            problem = self._feeder.stage(order.step, order.order, order.view, worker)
            self._driver.post(ev.Staged(order.order.number, problem))
            return
        problem = "there is no writer"
        if self._saver is not None:
            problem = self._saver.copy(order.step, order.view, worker, checked=order.checked)
        elif self._capture is not None:
            with contextlib.suppress(WorldError):
                self._capture(wanted_of_shares(len(order.view.members)))
        self._driver.post(ev.ShareCopied(order.step, time.monotonic() - began, problem))

    def before_update(self) -> None:
        """Let copies under way come first: the state is about to change."""
        self._feeder.before_update()
        if self._protector is not None:
            self._protector.before_update()
        if self._saver is not None:
            self._saver.before_update()

    def copied_before(self, step: int) -> int:
        """Return a fingerprint of the state if it was fed one step before; 0: it was not."""
        return self._feeder.copied_before(step)

    def finish(self) -> None:
        """Wait for a save under way: the loop has ended."""
        if self._saver is not None:
            self._saver.finish(SAVE_S_MAX)

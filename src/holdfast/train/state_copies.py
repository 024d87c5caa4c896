"""Copies this worker's share of the state at a boundary: for checkpoints, and for followers."""

from __future__ import annotations

import time

from holdfast.core.step import effects as ef
from holdfast.core.step import events as ev
from holdfast.train.checkpoint.saver import Saver
from holdfast.train.driver import Driver
from holdfast.train.feeding.feeder import Feeder

SAVE_S_MAX = 600.0  # how long the end of a loop waits for a checkpoint under way


class StateCopies:
    """Has shares copied when the machine says so; `saver` is None without a store or a writer."""

    def __init__(self, driver: Driver, saver: Saver | None, feeder: Feeder) -> None:
        self._driver = driver
        self._saver = saver
        self._feeder = feeder

    def copy(self, order: ef.SaveShare | ef.StageState) -> None:
        """Copy what is ordered, between two steps, and tell the machine."""
        worker, began = self._driver.status().worker, time.monotonic()
        if isinstance(order, ef.StageState):
            problem = self._feeder.stage(order.step, order.order, order.view, worker)
            self._driver.post(ev.Staged(order.order.number, problem))
            return
        problem = "there is no writer"
        if self._saver is not None:
            problem = self._saver.copy(order.step, order.view, worker, checked=order.checked)
        self._driver.post(ev.ShareCopied(order.step, time.monotonic() - began, problem))

    def before_update(self) -> None:
        """Let copies under way come first: the state is about to change."""
        self._feeder.before_update()
        if self._saver is not None:
            self._saver.before_update()

    def finish(self) -> None:
        """Wait for a save under way: the loop has ended."""
        if self._saver is not None:
            self._saver.finish(SAVE_S_MAX)

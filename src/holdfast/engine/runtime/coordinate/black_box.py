"""Keeps recordings and bundles, so that people can understand a coordinator's decisions."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorEvent,
)
from holdfast.engine.records.recordings import Machine
from holdfast.engine.runtime.coordinate.bundle_keeper import BundleKeeper
from holdfast.engine.runtime.coordinate.recorder import Recorder
from holdfast.engine.runtime.rundir import RunDir

BUNDLED = ("resumed", "failed")  # kinds of events after which a bundle is kept


class BlackBox:
    """Records one machine. `say`: takes a sentence on a part that cannot be kept."""

    def __init__(self, run_dir: RunDir, machine: Machine, say: Callable[[str], None]) -> None:
        self._machine = machine
        self._recorder = Recorder(run_dir.path, machine.snapshot().record.term, say)
        self._bundles = BundleKeeper(run_dir, say)

    def begin(self) -> None:
        """Record from now on."""
        self._recorder.begin(self._machine, time.monotonic())

    def handle(self, event: CoordinatorEvent, now: float) -> Sequence[CoordinatorEffect]:
        """Have the machine handle an event, record the event and its effects; return these."""
        self._recorder.hear(event, now)
        try:
            effects = self._machine.handle(event, now)
        except Exception:  # a bug of ours: the recording ends with the event that has led to it
            self._recorder.close()
            raise
        self._recorder.note(self._machine, effects, now)
        for effect in effects:
            if isinstance(effect, Announce) and effect.kind in BUNDLED:
                self._bundles.order(effect.id)
        return effects

    async def close(self) -> None:
        """Write the rest, for a limited time."""
        self._recorder.close()
        await self._bundles.finish()

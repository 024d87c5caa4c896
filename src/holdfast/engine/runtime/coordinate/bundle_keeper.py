"""Keeps a bundle of each incident, in a thread: the coordinator goes on meanwhile."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.runtime.rundir import RunDir

SETTLE_S = 1.0  # until what belongs to an incident is in its files
PAUSE_S = 30.0  # between two bundles: further incidents are in the next one's recordings
FINISH_S = 5.0  # for one that is being written as the job ends


class BundleKeeper:
    """Writes one bundle at a time. `say`: takes a sentence on one that cannot be written."""

    def __init__(self, run_dir: RunDir, say: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._say = say
        self._task: asyncio.Task[None] | None = None
        self._next = ""  # the newest incident that has no bundle yet
        self._is_ending = asyncio.Event()

    def order(self, incident: str) -> None:
        """Have a bundle written of the incident that this event belongs to."""
        self._next = incident
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._work())

    async def finish(self) -> None:
        """Write the last bundle, if one is ordered, for a limited time."""
        self._is_ending.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=FINISH_S)

    async def _work(self) -> None:
        while self._next:
            await self._pause(SETTLE_S)
            incident, self._next = self._next, ""
            try:
                await asyncio.to_thread(_write, self._run_dir, incident)
            except (HoldfastError, OSError) as error:
                self._say(f"incident {incident} has no bundle: {error}")
            await self._pause(PAUSE_S)

    async def _pause(self, duration_s: float) -> None:
        try:
            await asyncio.wait_for(self._is_ending.wait(), duration_s)
        except asyncio.TimeoutError:
            return


def _write(run_dir: RunDir, incident: str) -> None:
    from holdfast.engine.runtime.post_mortem import keep_bundle  # it takes a while

    keep_bundle(run_dir, incident)

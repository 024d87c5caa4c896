"""Reads checkpoints again and again, slowly, to find rot while it can still be repaired."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

from holdfast.engine.core.errors import Damaged, WorldError
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.manifest import PACKS
from holdfast.engine.state.store.storage import Missing
from holdfast.engine.state.store.volumes import VolumeStorage


class Pacer:
    """Limits the rate of reading: it waits until no more than `rate` bytes a second were read."""

    def __init__(self, rate: float, wait: Callable[[float], object] = time.sleep) -> None:
        self._rate = rate
        self._wait = wait
        self._began = time.monotonic()
        self._bytes = 0

    def __call__(self, count: int) -> None:
        self._bytes += count
        early_s = self._began + self._bytes / self._rate - time.monotonic()
        if early_s > 0:
            self._wait(early_s)


def scrub(store: Checkpoints, pacer: Callable[[int], None]) -> Iterator[str]:
    """Read all objects once; yield the faults, and whether they were repaired."""
    if isinstance(store.storage, VolumeStorage):
        yield from _mend(store, store.storage, pacer)
        return
    for step in store.steps():
        try:
            found = [f"step {step}: {bad}" for bad in store.verify(step, pacer)]
        except WorldError as error:
            found = [str(error)]
        if step in store.steps():  # else it was retired meanwhile
            yield from found


def _mend(
    store: Checkpoints, volumes: VolumeStorage, pacer: Callable[[int], None]
) -> Iterator[str]:
    for name in volumes.all_names():
        try:
            yield from (f"repaired: {line}" for line in volumes.repair(name))
            pacer(volumes.size(name) or 0)
        except Missing:
            continue  # it was retired meanwhile, or its save was interrupted
        except WorldError as error:
            if name in volumes.names(name.rpartition("/")[0] + "/"):  # else it was removed
                if name.startswith(PACKS) and isinstance(error, Damaged):
                    store.suspect(name, str(error))
                yield f"lost: {error}"

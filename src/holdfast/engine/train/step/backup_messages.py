"""Lets members of a view agree whose results of a step count (core/step/backup.py).

The first member hears from each other one that has done its tasks, and sends its decision to all:
two small messages for each other member in a step. They go straight, since a slow member must not
stand between the others, which do not wait for it. They may come at any time, also while this
worker's script still computes the step before, so they are heard while no thread waits.
"""

from __future__ import annotations

from collections.abc import Collection

import numpy as np
import torch

from holdfast.engine.core.ground.events import FIRST, CountSettled, MemberDone
from holdfast.engine.core.views import View
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.step.driver import Driver

TAG_DONE, TAG_COUNTED = 12, 13
STEP_BYTES = 8  # at the start of each message


class BackupMessages:
    """Exchanges messages of one view about members that have done their tasks, and that count."""

    def __init__(self, driver: Driver, view: View, layout: Layout, transport: Transport) -> None:
        self._driver = driver
        self._view = view
        self._layout = layout
        self._transport = transport

    def listen(self) -> None:
        """Begin to listen, for the life of the view."""
        if self._layout.rank == FIRST:
            self._transport.listen(TAG_DONE, 2 * STEP_BYTES, self._hear_done, always=True)
        else:
            size = STEP_BYTES + -(-self._layout.size // 8)  # one bit for each member
            self._transport.listen(TAG_COUNTED, size, self._hear_counted, always=True)

    def send_done(self, step: int, samples: int) -> None:
        """Send the first member the number of samples of this member's tasks. Aborted."""
        words = torch.tensor([step, samples], dtype=torch.int64)
        self._transport.exchange([(FIRST, words)], [], TAG_DONE).wait()

    def send_counted(self, step: int, ranks: Collection[int]) -> None:
        """Send all members the ranks that count. Aborted."""
        flags = np.zeros(self._layout.size, np.uint8)
        flags[list(ranks)] = 1
        data = np.int64(step).tobytes() + np.packbits(flags).tobytes()
        message = torch.frombuffer(bytearray(data), dtype=torch.uint8)
        sends = [(peer, message) for peer in self._layout.others]
        self._transport.exchange(sends, [], TAG_COUNTED).wait()

    def _hear_done(self, peer: int, data: bytes) -> None:
        step, samples = np.frombuffer(data, np.int64).tolist()
        self._driver.post(MemberDone(self._view.number, peer, step, samples))

    def _hear_counted(self, peer: int, data: bytes) -> None:
        if peer == FIRST:
            step = int(np.frombuffer(data[:STEP_BYTES], np.int64)[0])
            flags = np.unpackbits(np.frombuffer(data[STEP_BYTES:], np.uint8))
            ranks = tuple(np.flatnonzero(flags[: self._layout.size]).tolist())
            self._driver.post(CountSettled(self._view.number, step, ranks))

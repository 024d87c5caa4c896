"""Lets members of a view agree whose results of a step count (core/step/backup.py).

They may send such messages at any time, also while this worker's script still computes the step
before, so they are heard while no thread waits for messages.
"""

from __future__ import annotations

import numpy as np
import torch

from holdfast.core.step.backup import FIRST
from holdfast.core.step.events import CountSettled, MemberDone
from holdfast.core.types import View
from holdfast.train.exchange.layout import Layout
from holdfast.train.exchange.seam import Transport
from holdfast.train.step.driver import Driver

TAG_BACKUP = 10


class BackupMessages:
    """Receives the messages of one view about finished members, and about counted ones."""

    def __init__(self, driver: Driver, view: View, layout: Layout, transport: Transport) -> None:
        self._driver = driver
        self._view = view
        self._layout = layout
        self._transport = transport

    def listen(self) -> None:
        """Begin to listen, for the life of the view."""
        size = 8 * (1 + self._layout.size)
        self._transport.listen(TAG_BACKUP, size, self._hear, always=True)

    @staticmethod
    def send(
        transport: Transport, layout: Layout, to: list[int], step: int, said: list[int]
    ) -> None:
        """Send a message about a step to these ranks. Aborted."""
        words = torch.zeros(1 + layout.size, dtype=torch.int64)
        words[: 1 + len(said)] = torch.tensor([step, *said])
        transport.exchange([(p, words) for p in to], [], TAG_BACKUP).wait()

    def _hear(self, peer: int, data: bytes) -> None:
        step, *said = np.frombuffer(data, np.int64).tolist()
        view = self._view.number
        if self._layout.rank == FIRST:
            self._driver.post(MemberDone(view, peer, step, said[0]))
        elif peer == FIRST:
            ranks = tuple(rank for rank, counts in enumerate(said) if counts)
            self._driver.post(CountSettled(view, step, ranks))

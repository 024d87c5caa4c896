"""Finds the member for whose tasks a step waits, by asking along the ways that the rows take.

Rows spread in turns, so a member that waits knows only who owes it the next message, and that
member may itself wait for another one. It asks that member, then the one named in the answer, and
so on: log2 N questions at most. A member whose tasks are not done is late. One that does not answer
is taken for late, too: while it computes nobody may read its messages.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable
from contextlib import suppress

import torch

from holdfast.core.errors import Aborted
from holdfast.core.step.events import StillAwaited
from holdfast.core.types import View
from holdfast.train.exchange.layout import TAG_LATE, Layout
from holdfast.train.exchange.seam import Transport
from holdfast.train.step.driver import Driver

ANSWER_S = 0.1  # a member that waits answers sooner
NONE_AWAITED = -1
_MESSAGE = struct.Struct("<3q")  # the kind, the step, and a rank
_QUESTION, _ANSWER = 0, 1


class LateSearch:
    """Asks, and answers, in one view.

    `awaited`: returns the rank for which this member waits in a step; its own one if its tasks are
    not done; NONE_AWAITED.
    """

    def __init__(
        self,
        driver: Driver,
        view: View,
        layout: Layout,
        transport: Transport,
        awaited: Callable[[int], int],
    ) -> None:
        self._driver = driver
        self._view = view
        self._layout = layout
        self._transport = transport
        self._awaited = awaited
        self._lock = threading.Lock()
        self._asked: tuple[int, int] | None = None  # the step, and the rank that was asked
        self._left = 0  # questions that may still be asked

    def listen(self) -> None:
        """Begin to answer, for the life of the view."""
        self._transport.listen(TAG_LATE, _MESSAGE.size, self._hear)

    def look(self, step: int) -> None:
        """Begin to search; StillAwaited is posted once a member is found."""
        self._left = self._layout.size.bit_length() + 1
        self._ask(step, self._awaited(step))

    def _ask(self, step: int, rank: int) -> None:
        if rank in (NONE_AWAITED, self._layout.rank) or not self._left:
            return
        with self._lock:
            self._left -= 1
            self._asked = step, rank
        self._send(rank, _QUESTION, step, 0)
        timer = threading.Timer(ANSWER_S, self._conclude, (step, rank))
        timer.daemon = True
        timer.start()

    def _send(self, rank: int, what: int, step: int, value: int) -> None:
        data = torch.frombuffer(bytearray(_MESSAGE.pack(what, step, value)), dtype=torch.uint8)
        with suppress(Aborted):
            self._transport.exchange([(rank, data)], [], TAG_LATE)

    def _hear(self, peer: int, data: bytes) -> None:
        what, step, value = _MESSAGE.unpack(data)
        if what == _QUESTION:
            self._send(peer, _ANSWER, step, self._awaited(step))
        elif what == _ANSWER and value == peer:
            self._conclude(step, peer)
        elif what == _ANSWER and self._is_asked(step, peer) and 0 <= value < self._layout.size:
            self._ask(step, value)

    def _is_asked(self, step: int, rank: int) -> bool:
        """Return whether an answer was awaited; it is not any more."""
        with self._lock:
            found = self._asked == (step, rank)
            if found:
                self._asked = None
            return found

    def _conclude(self, step: int, rank: int) -> None:
        """Report a late member, unless its answer was that another one is."""
        if self._is_asked(step, rank):
            self._driver.post(StillAwaited(self._view.number, step, (rank,)))

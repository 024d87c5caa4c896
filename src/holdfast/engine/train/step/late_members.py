"""Lets the members of a view find a late member, and agree whose results count without late ones.

Rows spread in turns, so a member that waits knows only the member that owes it the next message,
and that member may itself wait for another one. It asks that member, which answers at once, asks
the member for which it waits itself, and passes on the rank it found: log2 N questions at most.
Only members that exchange rows ask each other, so no question needs a new connection. A member
whose tasks are not done is late. A member that does not answer is taken for late,
too, because no thread may read its messages while it computes.

With backup workers (core/step/backup.py) each member reports to the first one that it has done its
tasks, and the first sends its decision to all: two small messages for each other member in a step.
They go straight, since a slow member must not stand between members that do not wait for it.
They may come at any time, also while this worker's script still computes the step before, so they
are received while no thread waits.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field

import numpy as np
import torch

from holdfast.engine.core.errors import Aborted
from holdfast.engine.core.ground.events import FIRST, CountSettled, MemberDone, StillAwaited
from holdfast.engine.core.views import View
from holdfast.engine.train.exchange.layout import TAG_LATE, Layout
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.step.driver import Driver

ANSWER_S = 0.1  # a member that waits answers sooner
NONE_AWAITED = -1
_MESSAGE = struct.Struct("<3q")  # the kind, the step, and a rank
_QUESTION, _ANSWER, _FOUND = 0, 1, 2
TAG_DONE, TAG_COUNTED = 12, 13
STEP_BYTES = 8  # at the start of each message


@dataclass(eq=False)
class _Search:
    """Is one question, until the late member is known."""

    step: int
    asked: int
    # The members to which the rank that is found goes; this member's own rank if it posts it.
    askers: set[int] = field(default_factory=set)
    # Whether the asked member has answered that it waits, too: the rank it finds will follow.
    is_answered: bool = False


class LateSearch:
    """Asks, and answers, in one view.

    `awaited`: returns the rank for which this member waits in a step; its own one if its tasks are
    not done; NONE_AWAITED. It is a rank with which this member exchanges rows.
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
        self._search: _Search | None = None

    def listen(self) -> None:
        """Begin to answer, for the life of the view."""
        self._transport.listen(TAG_LATE, _MESSAGE.size, self._receive)

    def look(self, step: int) -> None:
        """Begin to search; StillAwaited is posted once a member is found."""
        self._ask(step, self._awaited(step), self._layout.rank)

    def _ask(self, step: int, rank: int, asker: int) -> None:
        if rank in (NONE_AWAITED, self._layout.rank):
            return
        with self._lock:
            before = self._search
            if before is not None and (before.step, before.asked) == (step, rank):
                before.askers.add(asker)
                return
            search = self._search = _Search(step, rank, {asker})
            if before is not None and before.step == step:
                search.askers |= before.askers
        self._send(rank, _QUESTION, step, 0)
        timer = threading.Timer(ANSWER_S, self._end_patience, (search,))
        timer.daemon = True
        timer.start()

    def _send(self, rank: int, what: int, step: int, value: int) -> None:
        data = torch.frombuffer(bytearray(_MESSAGE.pack(what, step, value)), dtype=torch.uint8)
        with suppress(Aborted):
            self._transport.exchange([(rank, data)], [], TAG_LATE)

    def _receive(self, peer: int, data: bytes) -> None:
        what, step, value = _MESSAGE.unpack(data)
        if what == _QUESTION:
            awaited = self._awaited(step)
            self._send(peer, _ANSWER, step, awaited)
            if awaited != peer:
                self._ask(step, awaited, peer)
            return
        search = self._search
        if search is None or (search.step, search.asked) != (step, peer):
            return
        if what == _FOUND and 0 <= value < self._layout.size:
            self._conclude(search, value)
        elif what == _ANSWER and value == peer:
            self._conclude(search, peer)
        elif what == _ANSWER and value == NONE_AWAITED:
            self._take(search)
        elif what == _ANSWER:
            search.is_answered = True

    def _end_patience(self, search: _Search) -> None:
        if not search.is_answered:
            self._conclude(search, search.asked)

    def _take(self, search: _Search) -> bool:
        """Return whether the search is the open one; it is not any more."""
        with self._lock:
            is_open = self._search is search
            if is_open:
                self._search = None
            return is_open

    def _conclude(self, search: _Search, rank: int) -> None:
        if not self._take(search):
            return
        for asker in search.askers:
            if asker == self._layout.rank:
                self._driver.post(StillAwaited(self._view.number, search.step, (rank,)))
            else:
                self._send(asker, _FOUND, search.step, rank)


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

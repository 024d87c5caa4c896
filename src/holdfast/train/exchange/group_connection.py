"""Carries messages between two members of a group over connections that have been proved.

A message is its tag, its size and its bytes. One thread reads, straight into the tensor that a
caller has given for the message. A small message that arrives too early is kept. A large one stays
in the kernel and holds up its sender, until a caller wants it or a message behind it.

The caller's own thread sends small messages. A second thread, started when it is first needed,
sends the rest. Both make few and large calls into the kernel, since a thread that returns from one
has to wait for the interpreter.
"""

from __future__ import annotations

import struct
import threading
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from holdfast.core.errors import Aborted
from holdfast.train.exchange.wires import PARTS_MAX, Part, Wire

HEAD = struct.Struct("!qQ")  # tag, and bytes that follow
BUFFER_BYTES = 1 << 16  # read at a time, so that a small message takes one call
EARLY_BYTES = 1 << 16  # a larger message waits in the kernel until a caller wants it
EARLY_BYTES_MAX = 4 << 30  # limit for all messages that one peer has sent too early
AT_ONCE_BYTES = 1 << 18  # the caller's own thread sends up to this much of an exchange
GIVEN_UP = "the view was given up"


class Incoming:
    """Is one message that will arrive; `place` is the memory where it goes."""

    __slots__ = ("done", "early", "place", "tag")

    def __init__(self, tag: int, place: memoryview) -> None:
        self.tag = tag
        self.place = place
        self.done = False
        self.early: Incoming | None = None  # the same message, if it came before it was wanted


class Outgoing:
    """Stands for messages that have not all been handed to the kernel yet."""

    __slots__ = ("done", "parts")

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.done = False


class GroupConnection:
    """Sends to, and receives from, one peer. Call `start` once its connection is proved.

    `on_end` is called, from any thread, when the connection has ended for whatever reason.
    """

    def __init__(self, peer: int, wire: Wire, on_end: Callable[[], None]) -> None:
        self.peer = peer
        self.wire = wire
        self._on_end = on_end
        self._lock = threading.Lock()
        # a message has arrived or been sent, or the connection has ended
        self._news = threading.Condition(self._lock)
        self._wants = threading.Condition(self._lock)  # wakes the reader
        self._to_send = threading.Condition(self._lock)  # wakes the sender
        self._ended = ""  # why
        self._wanted: dict[int, deque[Incoming]] = {}  # by tag
        self._early: dict[int, deque[Incoming]] = {}
        self._early_bytes = 0
        self._waiting = 0  # threads that wait for a message
        self._leaving: deque[Outgoing] = deque()
        self._sender: threading.Thread | None = None
        self._can_send = True  # False once the sender has returned for good
        self._busy = 0  # threads that use the connection
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._stop = 0  # the bytes between them have been read, but not taken

    def start(self) -> None:
        """Begin to read."""
        self._busy += 1
        self._run(self._read, "holdfast-receive")

    # ------------------------------------------------------------ for the exchanges

    def expect(self, tag: int, place: memoryview) -> Incoming:
        """Have the next message under this tag written to `place`. Aborted."""
        message = Incoming(tag, place)
        with self._lock:
            early = self._early.get(tag)
            if early:
                message.early = early.popleft()
                if not early:
                    del self._early[tag]
                _check_size(message.place, len(message.early.place))
            else:
                self._check()
                self._wanted.setdefault(tag, deque()).append(message)
                self._wants.notify()  # the reader may stand before this very message
        return message

    def wait_for(self, message: Incoming) -> None:
        """Wait until a message has arrived. Aborted."""
        source = message.early or message
        if not source.done:
            with self._lock:
                self._waiting += 1
                self._wants.notify()
                while not source.done and not self._ended:
                    self._news.wait()
                self._waiting -= 1
                if not source.done:
                    self._check()
        if message.early is not None:
            message.place[:] = message.early.place
            message.early = None
            message.done = True
            with self._lock:
                self._early_bytes -= len(message.place)

    def send(self, messages: Sequence[tuple[int, memoryview]]) -> Outgoing | None:
        """Start to send messages.

        Return the rest to wait for, or None if all were sent. Aborted.
        """
        parts: list[Part] = []
        for tag, data in messages:
            parts += [HEAD.pack(tag, len(data)), data]
        count = sum(len(part) for part in parts)
        with self._lock:
            self._check()
            if not self._leaving and count <= AT_ONCE_BYTES and len(parts) <= PARTS_MAX:
                try:
                    sent = self.wire.send(parts, wait=False)
                except OSError as error:
                    raise Aborted(self._reason_of_end(error), self.peer) from None
                if sent == count:
                    return None
                parts = _rest(parts, sent)
            batch = Outgoing(parts)
            self._leaving.append(batch)
            if self._sender is None:
                self._busy += 1
                self._sender = self._run(self._write, "holdfast-send")
            self._to_send.notify()
        return batch

    def wait_until_sent(self, batch: Outgoing) -> None:
        """Wait until the kernel has all of these messages. Aborted.

        A peer that has received everything may end the connection before the sender has returned
        from the kernel. So only the sender knows whether its messages have left.
        """
        with self._lock:
            while not batch.done:
                if not self._can_send:
                    self._check()
                self._news.wait()

    # ------------------------------------------------------------ the end

    def end(self, why: str = GIVEN_UP) -> None:
        """End the connection, which frees all waiting threads on both sides. Never blocks."""
        self.wire.shut()
        with self._lock:
            first, self._ended = not self._ended, self._ended or why
            for each in (self._news, self._wants, self._to_send):
                each.notify_all()
        if first:
            self._on_end()

    def close(self) -> None:
        """End it, and return when no thread writes to a tensor any more.

        That does not depend on the peer: a call into the kernel ends with the connection.
        """
        self.end()
        with self._lock:
            while self._busy:
                self._news.wait()
        self.wire.close()

    def _check(self) -> None:
        if self._ended:
            raise Aborted(self._ended, None if self._ended == GIVEN_UP else self.peer)

    def _reason_of_end(self, error: OSError) -> str:
        return f"the connection to rank {self.peer} has ended: {error.strerror or error}"

    # ------------------------------------------------------------ the two threads

    def _run(self, work: Callable[[], None], name: str) -> threading.Thread:
        def run() -> None:
            try:
                work()
            except OSError as error:
                self.end(self._reason_of_end(error))
            except (Aborted, MemoryError) as error:
                self.end(str(error) or "there is no memory for a message")
            finally:
                with self._lock:
                    self._busy -= 1
                    self._news.notify_all()

        thread = threading.Thread(target=run, name=name, daemon=True)
        thread.start()
        return thread

    def _write(self) -> None:
        try:
            while True:
                self._write_next()
        finally:
            with self._lock:
                self._can_send = False
                self._news.notify_all()

    def _write_next(self) -> None:
        with self._lock:
            while not self._leaving:
                self._check()
                self._to_send.wait()
            batch = self._leaving[0]
        parts = batch.parts
        while parts:
            parts = _rest(parts, self.wire.send(parts, wait=True))
        with self._lock:
            self._leaving.popleft()
            batch.parts = []
            batch.done = True
            self._news.notify_all()

    def _read(self) -> None:
        while True:
            self._fill(HEAD.size)
            tag, size = HEAD.unpack_from(self._buffer, self._start)
            self._start += HEAD.size
            message = self._place_for(tag, size)
            self._receive(message.place)
            with self._lock:
                message.done = True
                self._news.notify_all()

    def _place_for(self, tag: int, size: int) -> Incoming:
        with self._lock:
            while True:
                self._check()
                wanted = self._wanted.get(tag)
                if wanted:
                    message = wanted.popleft()
                    if not wanted:
                        del self._wanted[tag]
                    _check_size(message.place, size)
                    return message
                if size <= EARLY_BYTES or self._waiting:
                    break
                self._wants.wait()
            self._early_bytes += size
            if self._early_bytes > EARLY_BYTES_MAX:
                raise Aborted(
                    f"rank {self.peer} has sent {self._early_bytes} bytes too early", self.peer
                )
            # Its pages are touched only as the bytes come.
            early = Incoming(tag, np.empty(size, np.uint8).data)
            self._early.setdefault(tag, deque()).append(early)
            return early

    def _fill(self, count: int) -> None:
        """Read ahead until the buffer holds at least `count` bytes."""
        if self._start == self._stop:
            self._start = self._stop = 0
        elif self._start + count > BUFFER_BYTES:
            left = self._stop - self._start
            self._buffer[:left] = bytes(self._buffer[self._start : self._stop])
            self._start, self._stop = 0, left
        while self._stop - self._start < count:
            self._stop += self._receive_some(self._buffer[self._stop :])

    def _receive(self, place: memoryview) -> None:
        size = len(place)
        at = min(size, self._stop - self._start)
        if at:
            place[:at] = self._buffer[self._start : self._start + at]
            self._start += at
        while at < size:
            at += self._receive_some(place[at:], whole=True)

    def _receive_some(self, place: memoryview, *, whole: bool = False) -> int:
        count = self.wire.receive(place, whole=whole)
        if not count:
            raise Aborted(f"rank {self.peer} has ended the connection", self.peer)
        return count


def _check_size(place: memoryview, size: int) -> None:
    if len(place) != size:
        raise Aborted(f"a message has {size} bytes, where {len(place)} were expected")


def _rest(parts: list[Part], sent: int) -> list[Part]:
    """Return the parts that remain after `sent` bytes."""
    for i, part in enumerate(parts):
        if sent < len(part):
            return [memoryview(part)[sent:], *parts[i + 1 :]]
        sent -= len(part)
    return []

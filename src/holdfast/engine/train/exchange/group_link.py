"""Carries messages between two members of a group over connections that have been proved.

A message is its tag, its size and its bytes. It is read straight into the tensor that a caller has
given for it. A small message that comes too early is kept. A large one stays in the kernel and
holds up its sender, until a caller wants it, or waits for a message behind it.

Nothing here blocks, and no lock is taken: the group's network calls with its lock held.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Callable, Sequence

import numpy as np

from holdfast.engine.core.errors import Aborted
from holdfast.engine.train.exchange.wires import Part, Wire

HEAD = struct.Struct("!qQq")  # tag, bytes that follow, and the time at which they were sent
BUFFER_BYTES = 1 << 16  # read at a time, so that a small message takes one call
EARLY_BYTES = 1 << 16  # a larger message waits in the kernel until a caller wants it
EARLY_BYTES_MAX = 4 << 30  # limit for all messages that one peer has sent too early
GIVEN_UP = "the view was given up"


Hear = Callable[[int, bytes], None]  # the sender's rank, and the message


class Incoming:
    """Is one message that will arrive; `place` is the memory where it goes."""

    __slots__ = ("done", "early", "place", "sent_us", "tag")

    def __init__(self, tag: int, place: memoryview) -> None:
        self.tag = tag
        self.place = place
        #: The time of sending, by the sender's clock.
        self.sent_us = 0
        self.done = False
        #: The same message, if it came before it was wanted.
        self.early: Incoming | None = None

    @property
    def source(self) -> Incoming:
        """Return the message as it arrives."""
        return self.early or self


class Outgoing:
    """Stands for messages that have not all been handed to the kernel yet."""

    __slots__ = ("done", "parts")

    def __init__(self, parts: list[Part]) -> None:
        self.parts = parts
        self.done = False


class Listeners:
    """Keeps the listeners of one group's member. The group's network locks it."""

    def __init__(self) -> None:
        #: Some messages may come while no thread waits.
        self.is_always_on = False
        self._sizes: dict[int, int] = {}  # by tag
        self._listeners: dict[int, Hear] = {}  # by tag
        self._heard: deque[tuple[Hear, int, bytes]] = deque()

    def add(self, tag: int, size: int, hear: Hear, *, always: bool) -> None:
        """Give messages under a tag, of `size` bytes, to `hear` from now on."""
        self._sizes[tag], self._listeners[tag] = size, hear
        self.is_always_on |= always

    def size_of(self, tag: int) -> int | None:
        """Return the size of messages under a tag; None if there is no listener."""
        return self._sizes.get(tag)

    def put(self, tag: int, peer: int, data: bytes) -> None:
        """Keep a message for its listener."""
        self._heard.append((self._listeners[tag], peer, data))

    def take(self) -> tuple[Hear, int, bytes] | None:
        """Return the next message with its listener and its sender."""
        return self._heard.popleft() if self._heard else None


class _ReadAhead:
    """Keeps bytes that were read, and belong to no message whose place is known yet."""

    def __init__(self) -> None:
        self._buffer = memoryview(bytearray(BUFFER_BYTES))
        self._start = self._stop = 0  # the bytes between them are here

    def __len__(self) -> int:
        return self._stop - self._start

    def room(self) -> memoryview:
        """Return the memory to read into; `grow` by the number of bytes that were read."""
        left = len(self)
        if self._stop == BUFFER_BYTES or not left:
            self._buffer[:left] = bytes(self._buffer[self._start : self._stop])
            self._start, self._stop = 0, left
        return self._buffer[self._stop :]

    def grow(self, count: int) -> None:
        self._stop += count

    def take(self, count: int) -> memoryview:
        """Return the next bytes, until the next `room`."""
        self._start += count
        return self._buffer[self._start - count : self._start]


class GroupLink:
    """Sends to, and receives from, one peer, once `connect` has brought its connections.

    `listeners` get messages that no caller expects.
    """

    def __init__(self, peer: int, listeners: Listeners) -> None:
        self._listeners = listeners
        self.peer = peer
        self.wire: Wire | None = None
        self.ended = ""  # why
        #: Threads that wait for a message of this peer.
        self.waiting = 0
        #: A message stays in the kernel, and those behind it.
        self.is_held_up = False
        self._wanted: dict[int, deque[Incoming]] = {}  # by tag
        self._early: dict[int, deque[Incoming]] = {}
        self._early_bytes = 0
        self._leaving: deque[Outgoing] = deque()
        self._ahead = _ReadAhead()
        # Tag, size and time of a message whose bytes are still coming.
        self._head: tuple[int, int, int] | None = None
        self._coming: Incoming | None = None  # the message, once there is a place for it
        self._at = 0  # bytes of it that are here

    def connect(self, wire: Wire) -> None:
        """Begin to use the connections, and send the messages that have waited for them."""
        self.wire = wire
        self.write()

    # ------------------------------------------------------------ for the exchanges

    def expect(self, tag: int, place: memoryview) -> Incoming:
        """Write the next message under this tag to `place` once it arrives. Aborted."""
        message = Incoming(tag, place)
        early = self._early.get(tag)
        if early:
            message.early = early.popleft()
            if not early:
                del self._early[tag]
            _check_size(message.place, len(message.early.place))
        else:
            self.check()
            self._wanted.setdefault(tag, deque()).append(message)
        return message

    def take_early(self, tag: int) -> list[bytes]:
        """Return the messages under this tag that have come, which no caller wants any more."""
        early = self._early.pop(tag, ())
        self._early_bytes -= sum(len(each.place) for each in early)
        return [bytes(each.place) for each in early if each.done]

    def take(self, message: Incoming) -> None:
        """Move a message that is here to its place, if it came before it was wanted."""
        if message.early is not None:
            message.place[:] = message.early.place
            message.sent_us = message.early.sent_us
            message.early = None
            message.done = True
            self._early_bytes -= len(message.place)

    def send(self, messages: Sequence[tuple[int, memoryview]], sent_us: int = 0) -> Outgoing | None:
        """Send messages until the kernel takes no more.

        Return the rest to wait for, or None if all were sent. Aborted.
        """
        self.check()
        parts: list[Part] = []
        for tag, data in messages:
            parts += [HEAD.pack(tag, len(data), sent_us), data]
        batch = Outgoing(parts)
        self._leaving.append(batch)
        if len(self._leaving) == 1:
            self.write()
        self.check()
        return None if batch.done else batch

    def check(self) -> None:
        """Raise Aborted once the connection has ended."""
        if self.ended:
            raise Aborted(self.ended, None if self.ended == GIVEN_UP else self.peer)

    @property
    def wants_to_write(self) -> bool:
        """Return whether messages wait until the kernel takes more."""
        return bool(self._leaving)

    @property
    def is_expecting(self) -> bool:
        """Return whether a caller wants a message that is not here."""
        return bool(self._wanted) or self._coming is not None

    # ------------------------------------------------------------ when the kernel is ready

    def write(self) -> None:
        """Send as much as the kernel takes."""
        if self.wire is None or self.ended:
            return
        try:
            while self._leaving:
                batch = self._leaving[0]
                while batch.parts:
                    sent = self.wire.send(batch.parts)
                    if not sent:
                        return
                    batch.parts = _rest(batch.parts, sent)
                batch.done = True
                self._leaving.popleft()
        except OSError as error:
            self.end(self._reason_of_end(error))

    def read(self) -> None:
        """Receive all bytes that are there, while there are places for them."""
        self.is_held_up = False
        try:
            while not self.ended and self._read_some():
                pass
        except OSError as error:
            self.end(self._reason_of_end(error))
        except (Aborted, MemoryError) as error:
            self.end(str(error) or "there is no memory for a message")

    def end(self, why: str = GIVEN_UP) -> None:
        """End the connection, also for the peer."""
        self.ended = self.ended or why
        if self.wire is not None:
            self.wire.shut()

    def _reason_of_end(self, error: OSError) -> str:
        return f"the connection to rank {self.peer} has ended: {error.strerror or error}"

    def _read_some(self) -> bool:
        """Take a step in reading; return False if there are no bytes to read, or no place."""
        if self._head is None:
            if len(self._ahead) < HEAD.size:
                count = self._receive(self._ahead.room())
                self._ahead.grow(count)
                return bool(count)
            self._head = HEAD.unpack(self._ahead.take(HEAD.size))
        if self._coming is None:
            tag, size, sent_us = self._head
            self._coming = self._place_for(tag, size)
            if self._coming is None:
                self.is_held_up = True
                return False
            self._coming.sent_us = sent_us
            self._at = min(size, len(self._ahead))
            self._coming.place[: self._at] = self._ahead.take(self._at)
        place = self._coming.place
        if self._at < len(place):
            count = self._receive(place[self._at :])
            if not count:
                return False
            self._at += count
        if self._at == len(place):
            self._coming.done = True
            if self._listeners.size_of(self._coming.tag) is not None:
                self._listeners.put(self._coming.tag, self.peer, bytes(place))
            self._head = self._coming = None
        return True

    def _receive(self, place: memoryview) -> int:
        """Receive some bytes; return 0 if none are there. Aborted at the end of the connection."""
        if self.wire is None:
            return 0
        count = self.wire.receive(place)
        if count == 0:
            raise Aborted(f"rank {self.peer} has ended the connection", self.peer)
        return count or 0

    def _place_for(self, tag: int, size: int) -> Incoming | None:
        """Return the place of a message; None: it has to wait in the kernel. Aborted."""
        wanted = self._wanted.get(tag)
        if wanted:
            message = wanted.popleft()
            if not wanted:
                del self._wanted[tag]
            _check_size(message.place, size)
            return message
        if (listened := self._listeners.size_of(tag)) is not None:
            found = Incoming(tag, memoryview(bytearray(listened)))
            _check_size(found.place, size)
            return found
        if size > EARLY_BYTES and not self.waiting:
            return None
        self._early_bytes += size
        if self._early_bytes > EARLY_BYTES_MAX:
            raise Aborted(
                f"rank {self.peer} has sent {self._early_bytes} bytes too early", self.peer
            )
        # Its pages are touched only as the bytes come.
        early = Incoming(tag, np.empty(size, np.uint8).data)
        self._early.setdefault(tag, deque()).append(early)
        return early


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

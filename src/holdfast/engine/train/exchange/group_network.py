"""Moves the messages of one group, whichever thread has time for it.

A thread that waits for messages asks the kernel itself which connections are ready, so no other
thread has to wake it. One such thread works at a time; if several wait, only one is awake. A thread
of the network's own works while none waits, and only after `go_on`.
"""

from __future__ import annotations

import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from holdfast.engine.core.errors import Aborted
from holdfast.engine.train.exchange.group_link import (
    GIVEN_UP,
    GroupLink,
    Hear,
    Incoming,
    Listeners,
    Outgoing,
)
from holdfast.engine.train.exchange.wires import Wire

Expected = tuple[GroupLink, Incoming]
Leaving = tuple[GroupLink, Outgoing]


@dataclass(frozen=True, slots=True)
class Ready:
    """Describes a link that the kernel has reported."""

    link: GroupLink
    can_write: bool
    can_read: bool


class LinkPoll:
    """Asks for one group's links. While a thread waits, others may call all but `close`."""

    def __init__(self) -> None:
        self._links: dict[int, GroupLink] = {}  # by descriptor
        self._asked: dict[int, int] = {}  # events by descriptor
        self._epoll = select.epoll()
        self._bell = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._epoll.register(self._bell, select.EPOLLIN)
        self._is_closed = False

    def ask(self, link: GroupLink) -> None:
        """Ask for what matters of a link now."""
        wire = link.wire
        if wire is None or self._is_closed:
            return
        wanted = dict.fromkeys((channel.fileno() for channel in wire.channels), 0)
        if link.wants_to_write and not link.ended:
            wanted[wire.sends.fileno()] |= select.EPOLLOUT
        if not link.is_held_up and not link.ended:
            wanted[wire.receives.fileno()] |= select.EPOLLIN
        for descriptor, events in wanted.items():
            before = self._asked.get(descriptor, 0)
            if before and not events:  # the end of a connection would be reported all the time
                self._epoll.unregister(descriptor)
            elif events and not before:
                self._epoll.register(descriptor, events)
            elif events != before:
                self._epoll.modify(descriptor, events)
            self._asked[descriptor] = events
            self._links[descriptor] = link

    def wait(self) -> list[tuple[int, int]]:
        """Wait until links are ready, or until `ring`; return descriptors with their events."""
        return self._epoll.poll()

    def find(self, reported: list[tuple[int, int]]) -> Iterator[Ready]:
        """Return the links that were reported."""
        ends = select.EPOLLHUP | select.EPOLLERR
        for descriptor, events in reported:
            if descriptor == self._bell:
                os.eventfd_read(self._bell)
            else:
                can_write, can_read = events & select.EPOLLOUT, events & (select.EPOLLIN | ends)
                yield Ready(self._links[descriptor], bool(can_write), bool(can_read))

    def ring(self) -> None:
        """Wake the thread that waits."""
        if not self._is_closed:
            os.eventfd_write(self._bell, 1)

    def close(self) -> None:
        """Free the descriptors. No thread may wait any more."""
        self._is_closed = True
        self._epoll.close()
        os.close(self._bell)


class GroupNetwork:
    """Keeps the links of one group's member. All methods may be called from any thread."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._news = threading.Condition(self._lock)  # wakes threads that wait
        self._more = threading.Condition(self._lock)  # wakes the network's own thread
        self._links: dict[int, GroupLink] = {}  # by rank
        self._poll = LinkPoll()
        self._listeners = Listeners()
        self._is_polling = False  # a thread asks the kernel which links are ready
        self._waiting = 0  # threads that wait
        self._goes_on = False  # the network's own thread has work to do
        self._thread: threading.Thread | None = None
        self.aborted = False
        self._is_closed = False

    # ------------------------------------------------------------ links

    def link(self, peer: int) -> GroupLink:
        """Return the link to a rank, which may not be connected yet. Aborted."""
        with self._lock:
            self.check()
            return self._find(peer)

    def connect(self, peer: int, wire: Wire) -> bool:
        """Give a link its connections; return False if the group was given up."""
        with self._lock:
            if self.aborted:
                return False
            link = self._find(peer)
            link.connect(wire)
            self._poll.ask(link)
            self._news.notify_all()
            # A message that had to wait for the connections may have left: the kernel reports no
            # more of it to a thread that waits.
            self._poll.ring()
            return True

    def wires(self) -> dict[int, Wire]:
        """Return the connections that work, or have worked, by rank."""
        with self._lock:
            every = self._links.items()
            return {peer: link.wire for peer, link in every if link.wire is not None}

    def _find(self, peer: int) -> GroupLink:
        found = self._links.get(peer)
        if found is None:
            found = self._links[peer] = GroupLink(peer, self._listeners)
        return found

    def await_connections(self, peers: Iterable[int], until: float) -> set[int]:
        """Wait until these ranks are connected; return the missing ones at `until`. Aborted.

        `until`: seconds of the monotonic clock.
        """
        with self._lock:
            while True:
                self.check()
                missing = {peer for peer in peers if self._find(peer).wire is None}
                left_s = until - time.monotonic()
                if not missing or left_s <= 0:
                    return missing
                self._news.wait(left_s)

    # ------------------------------------------------------------ messages

    def exchange(
        self,
        sends: Mapping[GroupLink, Sequence[tuple[int, memoryview]]],
        receives: Sequence[tuple[GroupLink, memoryview]],
        tag: int,
        sent_us: int = 0,
    ) -> tuple[list[Expected], list[Leaving]]:
        """Begin to send and to receive. Returns the messages that are not done yet. Aborted."""
        with self._lock:
            self.check()
            expected = [(link, link.expect(tag, place)) for link, place in receives]
            for link in {link for link, _ in receives if link.is_held_up}:
                self._release_held(link)
            leaving = []
            for link, batch in sends.items():
                outgoing = link.send(batch, sent_us)
                if outgoing is not None:
                    leaving.append((link, outgoing))
                    self._poll.ask(link)
            return expected, leaving

    def wait(
        self,
        expected: Sequence[Expected],
        leaving: Sequence[Leaving],
        record_arrival: Callable[[int, int], None] | None = None,
    ) -> None:
        """Wait until all of these are done. Aborted.

        `record_arrival` gets the rank of each message, in their order, and the time it carries.
        """
        with self._lock:
            self._waiting += 1
            try:
                for link, message in expected:
                    self._wait_for(link, message.source)
                    link.take(message)
                    if record_arrival is not None:
                        record_arrival(link.peer, message.sent_us)
                for link, batch in leaving:
                    self._wait_for(link, batch)
                self.check()
            finally:
                self._waiting -= 1
                if self._waiting:
                    self._news.notify_all()  # another thread has to work now
                elif self._goes_on:
                    self._more.notify()

    def are_done(self, expected: Sequence[Expected], leaving: Sequence[Leaving]) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        with self._lock:
            come = all(message.source.done or link.ended for link, message in expected)
            return self.aborted or (come and all(b.done or at.ended for at, b in leaving))

    def listen(self, tag: int, size: int, hear: Hear, *, always: bool) -> None:
        """Give messages under this tag to `hear`; `always`: also while no thread waits."""
        with self._lock:
            self._listeners.add(tag, size, hear, always=always)
            for peer, link in self._links.items():
                for data in link.take_early(tag):
                    self._listeners.put(tag, peer, data)
            self._deliver()
        if always:
            self.go_on()

    def go_on(self) -> None:
        """Move messages also while no thread waits, until none is under way."""
        with self._lock:
            if self.aborted or self._goes_on or not self._is_busy():
                return
            self._goes_on = True
            if self._thread is None:
                self._thread = threading.Thread(
                    target=self._work, name="holdfast-network", daemon=True
                )
                self._thread.start()
            self._more.notify()

    def _is_busy(self) -> bool:
        """Return whether messages have to leave, or are expected."""
        return self._listeners.is_always_on or any(
            link.wants_to_write or link.is_expecting for link in self._links.values()
        )

    def _wait_for(self, link: GroupLink, one: Incoming | Outgoing) -> None:
        if one.done:
            return
        link.waiting += 1
        try:
            if link.is_held_up:
                self._release_held(link)
            while not one.done:
                self.check()
                link.check()
                if self._is_polling:
                    self._news.wait()
                else:
                    self._move()
        finally:
            link.waiting -= 1

    def _release_held(self, link: GroupLink) -> None:
        """Read on, now that there may be a place for the message that holds a link up."""
        link.read()
        self._poll.ask(link)
        if self._waiting:
            self._news.notify_all()

    # ------------------------------------------------------------ work

    def _move(self) -> None:
        """Wait until connections are ready, and move their messages. The lock is held."""
        self._is_polling = True
        self._lock.release()
        try:
            reported = self._poll.wait()
        finally:
            self._lock.acquire()
            self._is_polling = False
        for ready in self._poll.find(reported):
            if self.aborted:
                break
            if ready.can_write:
                ready.link.write()
            if ready.can_read:
                ready.link.read()
            self._poll.ask(ready.link)
        if self._waiting or self.aborted:
            self._news.notify_all()
        self._deliver()

    def _deliver(self) -> None:
        """Give messages to their listeners. The lock, which is held, is released for that time."""
        while not self.aborted and (found := self._listeners.take()) is not None:
            hear, peer, data = found
            self._lock.release()
            try:
                hear(peer, data)
            finally:
                self._lock.acquire()

    def _work(self) -> None:
        """Move messages while no other thread does, for the life of the group."""
        with self._lock:
            while not self.aborted:
                if self._goes_on and not self._is_busy():
                    self._goes_on = False
                if self._goes_on and not self._is_polling and not self._waiting:
                    self._move()
                else:
                    self._more.wait()

    # ------------------------------------------------------------ the end

    def check(self) -> None:
        """Raise Aborted once the view is given up."""
        if self.aborted:
            raise Aborted(GIVEN_UP)

    def abort(self) -> None:
        """End all connections, which frees all waiting threads on all sides."""
        with self._lock:
            if self.aborted:
                return
            self.aborted = True
            for link in self._links.values():
                link.end()
            self._poll.ring()
            self._news.notify_all()
            self._more.notify_all()

    def close(self) -> None:
        """Abort, and return when no thread writes to a tensor any more. Never blocks for long."""
        self.abort()
        with self._lock:
            while self._is_polling:
                self._news.wait()
            if self._is_closed:
                return
            self._is_closed = True
            for link in self._links.values():
                if link.wire is not None:
                    link.wire.close()
            self._links.clear()
            self._poll.close()

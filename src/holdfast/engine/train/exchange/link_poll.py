"""Asks the kernel which links of a group can be read, or written to."""

from __future__ import annotations

import os
import select
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.engine.train.exchange.group_link import GroupLink


@dataclass(frozen=True, slots=True)
class Ready:
    """Describes a link that the kernel has reported."""

    link: GroupLink
    can_write: bool
    can_read: bool


class LinkPoll:
    """Asks for the links of one group. One thread may wait while others call all but `close`."""

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

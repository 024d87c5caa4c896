"""Declares how tensors travel between the members of one view; TCP and NCCL implement it.

A transport knows ranks (positions in the view's members), tensors and tags; it does not know steps,
virtual ranks or why anything is sent. The invariant every implementation keeps: `abort` may be
called from any thread at any time, returns at once, and makes every wait, present and future, raise
Aborted on all sides.

Every transport measures how long the network takes with gradients, and whose took longest, for a
member's votes. Each message carries the time at which its sender began to send it, counted from the
end of the last vote, as each member saw it. So a member that computes longer, or that has itself
waited for another one, is not taken for a slow network.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.engine.core.errors import Aborted
from holdfast.engine.core.ground.events import NO_MEMBER, Wait

SHORT_S = 0.001  # shorter waits do not count
Message = tuple[int, torch.Tensor]  # (peer's rank in the view, contiguous tensor)


class Waits:
    """Times the waits in one view. `clock`: seconds. Call `begin` when a vote is complete."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._began = 0.0  # time when the step began
        self._since = 0.0  # time when the present wait began
        self._sent_us = 0  # time when this member began to send its last bucket
        #: The longest wait that was not short.
        self._longest = Wait()
        #: The wait for the newest of the messages that were in time.
        self._newest = Wait()

    def begin(self) -> None:
        """Record that a step begins."""
        self._began = self._clock()

    def begin_bucket(self) -> None:
        """Record that this member sends another bucket: only waits after the last one count."""
        self._longest = self._newest = Wait()
        self._sent_us = self.now_us()

    def now_us(self) -> int:
        """Return the time that messages carry."""
        return int((self._clock() - self._began) * 1e6)

    def begin_wait(self) -> None:
        """Record that this member waits for messages from now on."""
        self._since = self._clock()

    def record_arrival(self, peer: int, sent_us: int) -> None:
        """Record that the awaited peer's messages are here, and that the next wait begins."""
        began, self._since = self._since, self._clock()
        now_us = self.now_us()
        found = Wait(peer, max(0, now_us - sent_us), now_us - self._sent_us)
        if self._since - began > SHORT_S:
            self._longest = max(found, self._longest, key=lambda wait: wait.counted_us)
        elif self._newest.peer == NO_MEMBER or found.took_us < self._newest.took_us:
            self._newest = Wait(peer, found.took_us)

    def wait_of_step(self) -> Wait:
        """Return the times for the vote of this step."""
        return self._newest if self._longest.peer == NO_MEMBER else self._longest


class Rendezvous(Protocol):
    """Lets members of a view find each other: an all-gather of opaque addresses by rank."""

    def publish(self, address: bytes) -> None: ...

    def lookup(self, rank: int) -> bytes:
        """Wait until that member has published; raises Aborted when the view is given up."""
        ...


class Pending(Protocol):
    def wait(self, waits: Waits | None = None) -> None:
        """Block until every send and receive of the exchange is done; raises Aborted.

        `waits` records each peer's messages as they arrive, if peers can be distinguished.
        """
        ...

    def is_done(self) -> bool:
        """Return whether `wait` would return, or raise, at once."""
        ...


class Transport(Protocol):
    """Carries messages of one view's group.

    `open` blocks until the ranks in `peers`, with which this one exchanges in each step, are
    connected; None: all. Any other is connected when it is first needed. `ordered`: tags are
    ignored, so all members must start the same exchanges in the same order.
    """

    ordered: bool

    def open(
        self, rank: int, size: int, rendezvous: Rendezvous, peers: Collection[int] | None = None
    ) -> None: ...

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        tag: int,
        sent_us: int = 0,
    ) -> Pending:
        """Start sending and receiving; both sides of a message use the same tag and size.

        `sent_us`: a time that goes with the messages, for the `Waits` of who receives them.

        Tensors must stay untouched until the wait returns. Messages between one pair of ranks under
        one tag arrive in the order sent.
        """
        ...

    def listen(
        self, tag: int, size: int, hear: Callable[[int, bytes], None], *, always: bool = False
    ) -> None:
        """Give messages under this tag, of `size` bytes, to `hear` with their sender's rank.

        Any thread may call `hear`. `always`: also while no thread waits for messages.
        """
        ...

    def go_on(self) -> None:
        """Move messages also while no thread waits for them, until none is under way.

        To be called by a thread that is about to wait for something else.
        """
        ...

    def lost_ranks(self) -> Sequence[int]:
        """Return ranks that the network does not reach any more, as far as the kernel knows.

        Called now and then from another thread, also while the group is being built. A peer that is
        merely frozen or busy is never among them. A group with a connection that has ended is
        aborted here, unless it already is.
        """
        ...

    def abort(self) -> None: ...

    def close(self) -> None:
        """Free everything; never blocks."""
        ...


@dataclass(slots=True)
class NothingPending:
    """Represents the exchange of a view with a single member, which is done at once."""

    def wait(self, waits: Waits | None = None) -> None:
        return

    def is_done(self) -> bool:
        return True


class AloneTransport:
    """Implements `Transport` for a view with one member, which has no peer."""

    ordered = False

    def __init__(self) -> None:
        self._aborted = False

    def open(
        self, rank: int, size: int, rendezvous: Rendezvous, peers: Collection[int] | None = None
    ) -> None:
        if (rank, size) != (0, 1):
            raise Aborted(f"a view of {size} members needs a real transport")

    def exchange(
        self,
        sends: Sequence[Message],
        receives: Sequence[Message],
        tag: int,
        sent_us: int = 0,
    ) -> Pending:
        if self._aborted or sends or receives:
            raise Aborted("the view was given up")
        return NothingPending()

    def listen(
        self, tag: int, size: int, hear: Callable[[int, bytes], None], *, always: bool = False
    ) -> None:
        return

    def go_on(self) -> None:
        return

    def lost_ranks(self) -> Sequence[int]:
        return ()

    def abort(self) -> None:
        self._aborted = True

    def close(self) -> None:
        self._aborted = True


def is_done(pending: Pending | None) -> bool:
    """Return whether an exchange is done, or there is none."""
    return pending is None or pending.is_done()

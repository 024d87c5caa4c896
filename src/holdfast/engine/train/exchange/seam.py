"""Declares how tensors travel between the members of one view; TCP and NCCL implement it.

A transport knows ranks (positions in the view's members), tensors and tags; it does not know steps,
virtual ranks or why anything is sent. The invariant every implementation keeps: `abort` may be
called from any thread at any time, returns at once, and makes every wait, present and future, raise
Aborted on all sides.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch

from holdfast.engine.core.errors import Aborted
from holdfast.engine.train.exchange.waits import Waits

Message = tuple[int, torch.Tensor]  # (peer's rank in the view, contiguous tensor)


class Rendezvous(Protocol):
    """Lets members of a view find each other: an all-gather of opaque addresses by rank."""

    def publish(self, address: bytes) -> None: ...

    def lookup(self, rank: int) -> bytes:
        """Wait until that member has published; raises Aborted when the view is given up."""
        ...


class Pending(Protocol):
    def wait(self, waits: Waits | None = None) -> None:
        """Block until every send and receive of the exchange is done; raises Aborted.

        `waits` is told of each peer's messages as they arrive, if they can be told apart.
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
        """Have messages under this tag, of `size` bytes, given to `hear` with their sender's rank.

        Any thread may call `hear`. `always`: also while no thread waits for messages.
        """
        ...

    def go_on(self) -> None:
        """Move messages also while no thread waits for them, until nothing is under way.

        To be called by a thread that is about to wait for something else.
        """
        ...

    def lost_ranks(self) -> Sequence[int]:
        """Return ranks that the network does not reach any more, as far as the kernel knows.

        Called now and then from another thread, also while the group is being built. A peer that is
        merely frozen or busy is never among them. A group with a connection that has ended, and
        that nobody aborts, is aborted here.
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
    """Implements `Transport` for a view with one member: nothing to send, nobody to lose."""

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
    """Return whether there is nothing to wait for."""
    return pending is None or pending.is_done()

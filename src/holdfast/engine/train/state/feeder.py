"""Feeds workers that follow: a copy of this member's share of the state, then step after step.

Each follower has a thread and a TCP connection of its own, so that training waits for none. Both
sides first prove that they are of the job (net/peer_stream.py). Then messages go one way: a head in
MessagePack, and buffers whose digests are in it. They are never executed or unpickled.
"""

from __future__ import annotations

import queue
import socket
import threading
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import msgspec
import torch
import xxhash

from holdfast.engine.core.errors import WireError, first_line
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind, SourceKind
from holdfast.engine.core.replica.feeding import count_feeders
from holdfast.engine.core.types import NO_VIEW, WorkerId
from holdfast.engine.core.views import Follower, FollowOrder, View
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_stream import UNLIMITED, SendRate
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.free_memory import free_bytes
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.transfer import parts_of
from holdfast.engine.train.exchange.layout import piece_of
from holdfast.engine.train.exchange.tensor_bytes import memory_of
from holdfast.engine.train.state.share import StagedState
from holdfast.engine.train.state.step_image import StepImage, StepMemory
from holdfast.engine.train.step.mover import Events, StateSink, ViewConnections
from holdfast.engine.train.step.step_data import StepData

MAGIC = b"hfeed\0\0\1"
HEAD_BYTES_MAX = 1 << 20


class FeedHead(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the message that follows. `buffers`: bytes and digest of each.

    `kind`: "state" (first, with the skeleton from rank 0), "part" (of the state), "step" or "end".
    `step`: the step of the state, or of the gradient. `index`: the number of the part. `plan`: 63
    bits that stand for the summed parameters. `tables`: for each, the number of rows sent, and
    whether these are all of its rows. `compared`: the members know that they have copied the same
    state.
    """

    kind: str
    step: int = 0
    index: int = 0
    plan: int = 0
    tables: tuple[tuple[int, bool], ...] = ()
    compared: bool = False
    buffers: tuple[tuple[int, bytes], ...] = ()


def connect_follower(
    address: str, identity: PeerIdentity, number: int, rank: int, size: int
) -> socket.socket:
    """Connect to a follower as rank `rank` of `size` that feed by an order. OSError, WireError."""
    return peer_stream.connect(address, identity, MAGIC, (number, rank, size))


def send_message(
    channel: socket.socket,
    head: FeedHead,
    buffers: Sequence[memoryview],
    rate: SendRate = UNLIMITED,
    digest: bytes = b"",
) -> None:
    """Send one message. `digest`: the digest of its only buffer, if known. OSError."""
    named = tuple((len(each), digest or xxhash.xxh3_128_digest(each)) for each in buffers)
    peer_stream.send_message(channel, msgspec.structs.replace(head, buffers=named))
    for each in buffers:
        rate.send(channel, each)


def read_head(channel: socket.socket) -> FeedHead:
    """Read the head of the next message. OSError, WireError."""
    return peer_stream.receive_message(channel, FeedHead, HEAD_BYTES_MAX)


def read_into(channel: socket.socket, place: memoryview, named: tuple[int, bytes]) -> None:
    """Read a buffer to where it belongs, and check it. OSError, WireError."""
    count, digest = named
    if count != len(place):
        raise WireError(f"a follower was sent {count} bytes where {len(place)} belong")
    peer_stream.fill(channel, place)
    if xxhash.xxh3_128_digest(place) != digest:
        raise WireError("what a follower was sent has arrived damaged")


StateParts = list[tuple[int, memoryview]]  # numbers of parts, and their bytes
MARGIN = 0.9  # part of the free memory that copies and steps may take


class Feeder(StateSink):
    """Feeds followers for member `me`. `rate`: bytes a second at which the state is sent.

    `compares`: members compare the state that they feed.
    """

    def __init__(
        self,
        me: WorkerId,
        protected: Mapping[str, Any],
        data: StepData,
        tell: Callable[[ev.WorkerEvent], None],
        identity: PeerIdentity,
        rate: float,
        *,
        compares: bool,
    ) -> None:
        self._me = me
        self._protected = protected
        self._data = data
        self._tell = tell
        self._identity = identity
        self._rate = rate
        self._staged = StagedState(protected, compares=compares)
        self._step = -1  # the state was last copied just before this step
        self._memory = StepMemory()
        self._senders: list[_Sender] = []
        self._rank, self._feeders = 0, 1
        self._number = 0

    def copy(self, order: ef.CopyState) -> ev.StateCopied:
        """Copy this worker's share of the state, and begin to send it. By the script's thread."""
        assert order.order is not None, "followers are fed by an order"
        problem = self._stage(order.step, order.order, order.view)
        number = order.order.number
        return ev.StateCopied(SinkKind.FOLLOWERS, order.step, problem=problem, order=number)

    def _stage(self, step: int, order: FollowOrder, view: View) -> str:
        """Return the reason why there is no copy, or ""."""
        self.end(finish=False)
        self._rank, self._feeders = view.rank(self._me), count_feeders(len(view.members))
        feeds = self._rank < self._feeders
        skeleton, tensors = state.capture(self._protected)
        parts = parts_of([t.nbytes for t in tensors], self._feeders)
        needed = sum(part.stop - part.start for part in parts if part.share == self._rank)
        free = free_bytes()
        if needed > free * MARGIN:
            return f"a copy takes {needed >> 20} MiB of memory, and {free >> 20} MiB are free"
        try:
            self._staged.copy(skeleton, tensors, parts, self._rank)
        except (MemoryError, RuntimeError) as error:
            return first_line(error)
        self._number, self._step = order.number, step
        head = FeedHead(kind="state", step=step)
        first = [memoryview(skeleton)] if self._rank == 0 else []
        budget = max(int((free - needed) * MARGIN / 2), 1 << 20)
        for follower in order.followers if feeds else ():
            who = order.number, self._rank, self._feeders
            connect = partial(connect_follower, follower.address, self._identity, *who)
            sender = _Sender(follower, budget, connect, self._staged, self._reuse_memory)
            sender.put(_Message(head, first))
            self._senders.append(sender)
        for sender in self._senders:
            args = sender, self._staged.messages(parts, self._rank)
            threading.Thread(target=self._run, args=args, name="holdfast-feed", daemon=True).start()
        every = [bucket.result.data for bucket in self._data.gradients.active]
        results = [each for each in every if not each.is_cuda]
        own = [self._piece(each.numel()) for each in results] if feeds else []
        sizes = [each[part].nbytes for each, part in zip(results, own, strict=feeds)]
        self._memory.prepare(sizes, budget)
        return ""

    def wait_before_update(self) -> None:
        """Wait for copies under way, because the state is about to change."""
        self._staged.wait_before_update()
        if self._staged.problem and self._number:
            problem = self._staged.problem
            number = self._number
            self._tell(ev.ObtainFailed(SourceKind.FEED, NO_VIEW, problem, order=number))
            self._number = 0

    def copied_fingerprint(self, step: int) -> int:
        """Return a fingerprint of the state if it was copied one step before; otherwise 0."""
        return self._staged.fingerprint if self._step == step - 1 else 0

    def keep(self, order: ef.KeepStep, at: ViewConnections) -> Events:
        """Send this member's piece of a reduced step, which the script has not touched yet."""
        if not self._senders:
            return ()
        image = StepImage.copy(
            self._data, self._piece, self._memory.copy, with_shared=self._rank == 0
        )
        head = FeedHead(
            kind="step",
            step=order.step,
            plan=image.plan,
            tables=tuple(image.tables),
            compared=order.compared,
        )
        sent = [memory_of(each.cpu()) for each in image.buffers]
        on_host = [piece for piece in image.pieces if not piece.is_cuda]  # else `sent` is a copy
        message = _Message(head, sent, on_host, len(self._senders))
        for sender in self._senders:
            waiting = sender.put(message)
            if waiting > sender.budget:
                worker = sender.follower.worker
                self._tell(ev.FollowerBehind(self._number, worker, waiting))
        return ()

    def forget(self, order: ef.Forget) -> None:
        """Stop feeding all followers, or a slow one: its connection ends at once."""
        if order.follower is None:
            self.end(finish=order.finish)
            return
        for sender in self._senders:
            if sender.follower.worker == order.follower:
                sender.end(finish=False)
        self._senders = [s for s in self._senders if s.follower.worker != order.follower]

    def end(self, *, finish: bool) -> None:
        """Stop feeding all followers; unless it is to `finish`, connections end at once."""
        for sender in self._senders:
            sender.end(finish=finish)
        self._senders = []
        self._number = 0
        self._staged.release()
        self._memory.release()

    def _piece(self, numel: int) -> slice:
        """Return the elements of a flat buffer that this member sends."""
        return piece_of(self._rank, self._feeders, numel)

    # ------------------------------------------------------------ sending

    def _run(self, sender: _Sender, state_parts: StateParts) -> None:
        try:
            sender.run(state_parts, SendRate(self._rate))
        except (OSError, WireError, ValueError, RuntimeError) as error:
            if not sender.ended:
                text = f"sending to {sender.follower.address} has failed: {first_line(error)}"
                self._tell(ev.EventNoted("join", text))

    def _reuse_memory(self, message: _Message) -> None:
        """Reuse the memory of a step once it was sent to all followers."""
        if message.count_sender() and self._number:
            self._memory.give_back(message.pieces)


class _Message:
    """Is a message with its large tensors, kept until all of its `holders` have sent it."""

    def __init__(
        self,
        head: FeedHead,
        buffers: list[memoryview],
        pieces: Sequence[torch.Tensor] = (),
        holders: int = 1,
    ) -> None:
        self.head = head
        self.buffers = buffers
        self.pieces = pieces
        self._left = holders
        self._lock = threading.Lock()

    def count_sender(self) -> bool:
        """Count one more sender; return whether all have sent it now."""
        with self._lock:
            self._left -= 1
            return self._left == 0


class _Sender:
    """Sends to one follower, in a thread: first the state, then the messages from `put`."""

    def __init__(
        self,
        follower: Follower,
        budget: int,
        connect: Callable[[], socket.socket],
        staged: StagedState,
        sent: Callable[[_Message], None],
    ) -> None:
        self.follower = follower
        self.budget = budget  # bytes that may wait
        self.ended = False
        self._waiting = 0
        self._connect = connect
        self._staged = staged
        self._sent = sent  # called with each message that was sent
        self._queue: queue.SimpleQueue[_Message | None] = queue.SimpleQueue()
        self._lock = threading.Lock()
        self._channel: socket.socket | None = None
        self._is_cut = False  # no further message may be sent

    def put(self, message: _Message) -> int:
        """Send a message later; return how many bytes wait now."""
        size = sum(map(len, message.buffers))
        with self._lock:
            self._waiting += size
            waiting = self._waiting
        self._queue.put(message)
        return waiting

    def end(self, *, finish: bool) -> None:
        """Send no further messages; those in the queue are still sent if it is to `finish`."""
        with self._lock:
            self.ended = True
            self._is_cut = not finish
            if not finish and self._channel is not None:
                peer_stream.shut(self._channel)  # the sending thread closes it
        self._queue.put(None)

    def run(self, parts: StateParts, rate: SendRate) -> None:
        """Connect, and send until `end` is called. OSError, WireError."""
        channel = self._connect()
        with self._lock:
            self._channel = channel
            if self._is_cut:
                peer_stream.shut(channel)
        with channel:
            self._send(channel, self._queue.get())
            for number, data in parts:  # each as soon as it is copied
                self._staged.await_part(number)
                head = FeedHead(kind="part", index=number)
                send_message(channel, head, [data], rate, self._staged.digest(number))
            parts.clear()
            while (message := self._queue.get()) is not None:
                self._send(channel, message)
            send_message(channel, FeedHead(kind="end"), [])

    def _send(self, channel: socket.socket, message: _Message | None) -> None:
        if message is not None:
            send_message(channel, message.head, message.buffers)
            with self._lock:
                self._waiting -= sum(map(len, message.buffers))
            self._sent(message)

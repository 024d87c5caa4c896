"""Receives the state and reduced steps that members feed to this worker before it joins them.

Each member connects and sends its share; a thread for each connection reads it. Each complete part
is posted to the machine, and decides when it is loaded and applied.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Callable
from dataclasses import dataclass, field
from operator import itemgetter

import torch

from holdfast.engine.core.errors import HoldfastError, WireError, first_line
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SourceKind
from holdfast.engine.core.types import NO_VIEW
from holdfast.engine.core.views import FollowOrder
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_listener import serve
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.free_memory import free_bytes
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.checkpoint.transfer import StatePart, parts_of
from holdfast.engine.train.exchange.tensor_bytes import memory_of, room
from holdfast.engine.train.state.feeder import MAGIC, FeedHead, read_head, read_into
from holdfast.engine.train.state.step_image import StepImage, StepMemory, put_images
from holdfast.engine.train.step.mover import Events, StateSource, ViewConnections
from holdfast.engine.train.step.step_data import StepData

MARGIN = 0.9  # part of the free memory that the state may take
Told = tuple[FeedHead, list[torch.Tensor]]  # one member's part of a step


@dataclass(slots=True)
class _Feed:
    """Collects everything received by one order, from `size` members."""

    number: int
    size: int
    step: int = -1
    skeleton: bytes = b""
    tensors: list[torch.Tensor] | None = None  # None: the skeleton is missing
    left: int = 0  # parts of the state that are on their way
    steps: dict[int, dict[int, Told]] = field(default_factory=dict)  # by step and rank
    failure: str = ""
    channels: list[socket.socket] = field(default_factory=list)

    def parts(self) -> list[StatePart]:
        sizes = [t.nbytes for t in self.tensors or ()]
        return parts_of(sizes, self.size)

    def news(self) -> list[ev.WorkerEvent]:
        """Return an event for each complete part."""
        found: list[ev.WorkerEvent] = []
        if self.tensors is not None and not self.left:
            found.append(ev.StateFed(self.number, self.step))
        for step, told in sorted(self.steps.items(), key=itemgetter(0)):
            if len(told) == self.size:
                compared = all(head.compared for head, _ in told.values())
                found.append(ev.StepFed(self.number, step, compared))
        if self.failure:
            found.append(_make_failure(self.number, self.failure))
        return found


class FedReceiver(StateSource):
    """Listens for members that feed this worker. `tell` posts an event; it may block shortly."""

    def __init__(
        self,
        data: StepData,
        loaded: LoadedState,
        tell: Callable[[ev.WorkerEvent], None],
        fail: Callable[[BaseException], None],
        identity: PeerIdentity,
    ) -> None:
        self._data = data
        self._loaded = loaded
        self._tell = tell
        self._fail = fail
        self._identity = identity
        self._lock = threading.Condition()
        self._number = 0  # number of the followed order; 0: none
        # by order; members may connect before the order arrives here
        self._feeds: dict[int, _Feed] = {}
        self._loading: threading.Thread | None = None
        self._memory = StepMemory()

    def listen(self, host: str) -> str:
        """Begin to listen; return the address. OSError."""
        address, _ = serve(host, self._identity, MAGIC, self._serve)
        return address

    # ------------------------------------------------------------ what the machine decides

    def follow(self, order: FollowOrder | None) -> Events:
        """Take in messages of this order; None: of none. Return events about complete parts."""
        if order is None:
            self._unfollow()
            return ()
        with self._lock:
            self._number = order.number
            self._drop([n for n in self._feeds if n < order.number])
            feed = self._feeds.get(order.number)
            return feed.news() if feed is not None else ()

    def _unfollow(self) -> None:
        """Forget everything received, and close the connections."""
        with self._lock:
            number, self._number = self._number, 0
            self._drop([n for n in self._feeds if n <= number])
        self._memory.release()

    def load_state(self, order: ef.ObtainState, at: ViewConnections | None) -> Events:
        """Load the received state, in a thread that posts an event; the script waits."""
        self._loading = threading.Thread(
            target=self._load, args=(order.order,), name="holdfast-load", daemon=True
        )
        self._loading.start()
        return ()

    def settle(self) -> None:
        """Wait until no state is being loaded."""
        if self._loading is not None:
            self._loading.join()

    def take_step(self, order: ef.ObtainStep, at: ViewConnections | None) -> Events:
        """Put a step's gradient, buffers and tables where the script finds them."""
        step = order.step
        with self._lock:
            number = self._number
            told = self._feeds[number].steps.pop(step)
        buckets = len(self._data.gradients.active)
        images = [
            StepImage.of_buffers(head.plan, head.tables, buffers, buckets)
            for _, (head, buffers) in sorted(told.items())
        ]
        try:
            put_images(self._data, images)
        except WireError as error:
            return [_make_failure(number, f"step {step} does not fit: {first_line(error)}")]
        for image in images:
            self._memory.give_back(image.pieces)
        return [ev.StepObtained(SourceKind.FEED, order.view, step)]

    def _load(self, number: int) -> None:
        with self._lock:
            feed = self._feeds.get(number)
            if feed is None or number != self._number:
                return
            skeleton, tensors = feed.skeleton, feed.tensors or []
        try:
            self._loaded.load(skeleton, tensors)
            self._loaded.check()
        except HoldfastError as error:
            self._fail(error)
            return
        with self._lock:
            feed.tensors = []  # the memory is free again
            feed.left = -1
        self._tell(ev.StateObtained(SourceKind.FEED, NO_VIEW, number))

    def _drop(self, numbers: list[int]) -> None:
        for number in numbers:
            feed = self._feeds.pop(number)
            for channel in feed.channels:
                peer_stream.shut(channel)  # its own thread closes it
        self._lock.notify_all()

    # ------------------------------------------------------------ connections

    def _serve(self, channel: socket.socket, purpose: peer_stream.Purpose) -> None:
        """Receive all messages from rank `rank` of `size` members under one order."""
        number, rank, size = purpose
        if rank >= size:
            raise WireError(f"rank {rank} of {size} members that feed")
        with self._lock:
            if number < self._number:
                return
            feed = self._feeds.setdefault(number, _Feed(number=number, size=size))
            feed.channels.append(channel)
        try:
            self._read(channel, feed, rank)
        except (OSError, WireError, MemoryError, RuntimeError, IndexError) as error:
            self._record_failure(feed, first_line(error))

    def _read(self, channel: socket.socket, feed: _Feed, rank: int) -> None:
        """Read all messages from one member. OSError, WireError."""
        head = read_head(channel)
        if head.kind != "state":
            raise WireError(f"a member began with {head.kind!r}")
        if rank == 0:
            skeleton = room(head.buffers[0][0])
            read_into(channel, memory_of(skeleton), head.buffers[0])
            self._begin(feed, head.step, skeleton.numpy().tobytes())
        with self._lock:
            while feed.tensors is None:
                if self._feeds.get(feed.number) is not feed or feed.failure:
                    return
                self._lock.wait()
            tensors = feed.tensors
        if feed.step != head.step:
            raise WireError(f"members have copied steps {feed.step} and {head.step}")
        parts = feed.parts()
        while (head := read_head(channel)).kind != "end":
            if head.kind == "part":
                part = parts[head.index]
                if part.share != rank:
                    raise WireError(f"rank {rank} sends a part of rank {part.share}")
                place = memory_of(tensors[part.tensor])[part.start : part.stop]
                read_into(channel, place, head.buffers[0])
                self._record_part(feed, rank, None)
            else:
                self._record_part(feed, rank, (head, self._buffers(channel, head)))

    def _begin(self, feed: _Feed, step: int, skeleton: bytes) -> None:
        metas = state.metas(skeleton)
        tensors = [state.allocate(meta) for meta in metas]  # not touched yet
        _check_room(sum(tensor.nbytes for tensor in tensors))
        with self._lock:
            feed.step, feed.skeleton, feed.tensors = step, skeleton, tensors
            feed.left = len(parts_of([t.nbytes for t in tensors], feed.size))
            self._lock.notify_all()

    def _buffers(self, channel: socket.socket, head: FeedHead) -> list[torch.Tensor]:
        _check_room(sum(count for count, _ in head.buffers))
        found = [self._memory.block(count) for count, _ in head.buffers]
        for buffer, named in zip(found, head.buffers, strict=True):
            read_into(channel, memory_of(buffer), named)
        return found

    def _record_part(self, feed: _Feed, rank: int, told: Told | None) -> None:
        """Record a part of the state, or of a step, and report the parts that are now complete."""
        with self._lock:
            before = feed.news()
            if told is None:
                feed.left -= 1
            else:
                feed.steps.setdefault(told[0].step, {})[rank] = told
            follows = feed.number == self._number
            news = [event for event in feed.news() if event not in before] if follows else []
        for event in news:
            self._tell(event)

    def _record_failure(self, feed: _Feed, reason: str) -> None:
        with self._lock:
            if self._feeds.get(feed.number) is not feed:
                return
            feed.failure = feed.failure or reason
            follows = feed.number == self._number
            self._lock.notify_all()
        if follows:
            self._tell(_make_failure(feed.number, reason))


def _make_failure(number: int, reason: str) -> ev.ObtainFailed:
    return ev.ObtainFailed(SourceKind.FEED, NO_VIEW, reason, order=number)


def _check_room(needed: int) -> None:
    free = free_bytes()
    if needed > free * MARGIN:
        raise MemoryError(
            f"{needed >> 20} MiB more are needed, and {free >> 20} MiB of memory are free"
        )

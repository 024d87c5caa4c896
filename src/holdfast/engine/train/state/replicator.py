"""Puts this worker's pieces of states and gradients into its node's memory.

Tensors that may change while the next step computes are copied at the boundary. Parameters and the
optimizer's state are read while it computes, and `wait_before_update` waits for that. The pieces of
a reduced gradient are written before the worker votes for its step. When no worker has the state
any more, it is made again from such pieces.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast.engine.core.errors import Damaged, UserError, WorldError, first_line
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind, SourceKind
from holdfast.engine.core.redundancy import Piece, Recall, Redundancy
from holdfast.engine.core.replica.replicating import parts_of, pieces_of
from holdfast.engine.core.types import Peer, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.arena import GRADIENT, STATE, PieceArena, PieceEntry, PieceShelf
from holdfast.engine.state.memory.node_memory import PieceReader
from holdfast.engine.state.memory.pieces import Image, Parcel, PieceCoder, PiecePost
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.checkpoint.state import Capture, Extent, Wanted
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.state.gpu_pieces import DeviceImage, TensorCode
from holdfast.engine.train.state.share import StateShare, Steady
from holdfast.engine.train.state.step_image import StepImage, put_images
from holdfast.engine.train.step.mover import Events, StateSink, StateSource, ViewConnections
from holdfast.engine.train.step.step_data import StepData

# They show a lack of memory, on the host or on a GPU, or a node that does not take its pieces.
NO_ROOM = (MemoryError, OSError, WorldError, torch.OutOfMemoryError)
SIZES = struct.Struct("!Q")  # the length of the skeleton, at the start of a state's image


@dataclass(frozen=True, slots=True)
class _Kept:
    """Describes which pieces of this process's shard its worker keeps on one of its nodes.

    `to`: the process there, by its shard, that writes them into the node's memory.
    """

    to: int
    shelf: PieceShelf
    pieces: tuple[Piece, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class PieceTarget:
    """Names the file for a process's pieces, and the way to the worker's other nodes.

    `shard`: the number of this process among the worker's `procs`, which are on `spread` nodes.
    """

    arena: PieceArena
    worker: WorkerId
    shard: int = 0
    procs: int = 1
    spread: int = 1
    post: PiecePost | None = None

    def writer_on(self, place: int) -> int:
        """Return the shard of the process that writes this one's pieces on a node."""
        each = self.procs // self.spread
        return place * each + self.shard % each


class Replicator(StateSink):
    """Replicates one worker's state; `tell` posts an event, `fail` has the script raise an error.

    `capture`: captures the state, if this process has only a part of it.
    """

    def __init__(
        self,
        target: PieceTarget,
        redundancy: Redundancy,
        protected: Mapping[str, Any],
        data: StepData,
        tell: Callable[[ev.WorkerEvent], None],
        fail: Callable[[BaseException], None],
        capture: Capture | None = None,
    ) -> None:
        self._target = target
        self._arena = target.arena
        self._redundancy = redundancy
        self._worker = target.worker
        self._data = data
        self._capture = capture or (lambda _: state.capture_named(protected))
        self._tell = tell
        self._fail = fail
        self._kept: tuple[int, list[_Kept]] | None = None  # the view's number and its pieces
        self._coders: dict[tuple[int, int], PieceCoder] = {}  # by parts and bytes
        self._share = StateShare(protected)
        self._state_bytes = 0  # size of this worker's pieces of a state, as far as known
        self._step_bytes = 0  # size of its pieces of a gradient
        self._said = False  # the lack of room is logged
        self._code: TensorCode | None = None  # codes tensors on a GPU

    # ------------------------------------------------------------ states

    def copy(self, order: ef.CopyState) -> ev.StateCopied:
        """Begin to make pieces of the state, in a thread. The script's thread calls this."""
        step, view, began = order.step, order.view, time.monotonic()
        self.wait_before_update()
        try:
            skeleton, found = self._capture(self._make_selector(view))
        except WorldError as error:
            self._tell(ev.StateProtected(step, first_line(error)))
            return ev.StateCopied(SinkKind.MEMORY, step)
        self._share.begin()
        parts = [torch.frombuffer(bytearray(_head(skeleton)), dtype=torch.uint8)]
        for each in found:
            stays = each.private or self._share.is_steady(each.tensor)
            parts.append(each.tensor if stays else each.tensor.clone())
        args = step, view, _image(parts), Steady(parts)
        self._share.read_beside("holdfast-replicate", self._make_state, *args)
        return ev.StateCopied(SinkKind.MEMORY, step, time.monotonic() - began)

    def wait_before_update(self) -> None:
        """Wait until the state has been read, because it is about to change."""
        self._share.wait_before_update()

    def _make_selector(self, view: View) -> Wanted:
        """Return the function that chooses the bytes for the pieces of each member of a view."""

        def extents_of(skeleton: bytes, tensors: Sequence[torch.Tensor], rank: int) -> list[Extent]:
            head, sizes = len(_head(skeleton)), [tensor.nbytes for tensor in tensors]
            coder = PieceCoder(self._redundancy, max(len(view.ring), 1), head + sum(sizes))
            pieces = pieces_of(view, view.workers[rank], self._redundancy)
            found = []
            for start, stop in map(coder.span, pieces):
                at = head
                for tensor, size in enumerate(sizes):
                    first, last = max(start - at, 0), min(stop - at, size)
                    found += [Extent(tensor, first, last)] if first < last else []
                    at += size
            return found

        return extents_of

    def _make_state(
        self,
        step: int,
        view: View,
        image: Image | DeviceImage,
        steady: Steady,
    ) -> None:
        problem = ""
        try:
            self._state_bytes = self._put(STATE, view, step, image, steady)
        except UserError as error:
            self._fail(error)
            return
        except (*NO_ROOM, RuntimeError) as error:  # a GPU that fails raises RuntimeError
            problem = first_line(error)
        self._tell(ev.StateProtected(step, problem))

    # ------------------------------------------------------------ gradients

    def keep(self, order: ef.KeepStep, at: ViewConnections) -> Events:
        """Put pieces of the reduced gradient of a step there. By the engine's thread.

        Without room the step continues, and is not kept.
        """
        step, view, full = order.step, at.view, True
        try:
            image = _image(StepImage.view(self._data).encode())
            self._step_bytes = self._put(GRADIENT, view, step, image, Steady())
            full = self._arena.used + self._step_bytes * 2 + self._state_bytes > self._arena.budget
            self._said = self._said and full
        except NO_ROOM as error:
            if not self._said:
                text = f"step {step} is not kept: {first_line(error)}"
                self._tell(ev.EventNoted("memory", text))
            self._said = True
        return (ev.StepKept(view.number, step, full),)

    def mark(self, view: int, step: int) -> None:
        """Record that this worker commits a step."""
        self._arena.mark(view, step)

    def forget(self, order: ef.Forget) -> None:
        """Drop pieces older than the state after these steps, which the view has replicated."""
        self._arena.forget(order.view, order.step)

    # ------------------------------------------------------------ pieces

    def _put(
        self,
        kind: str,
        view: View,
        step: int,
        image: Image | DeviceImage,
        steady: Steady,
    ) -> int:
        """Make this process's pieces of an image; return their size.

        MemoryError, UserError; WorldError and OSError if other processes do not receive theirs.
        WorldError if a tensor of `steady` has changed since: then no piece is kept.
        """
        every = self._pieces_in(view)
        shape = (max(every[0].shelf.parts, 1), image.size)
        coder = self._coders.get(shape)
        if coder is None:
            coder = PieceCoder(self._redundancy, *shape)
            self._coders = dict(list(self._coders.items())[-4:]) | {shape: coder}
        needed = coder.size * sum(len(kept.pieces) for kept in every)
        self._check(kind, needed)
        sizes, shard = (image.size, coder.size), self._target.shard
        blank = PieceEntry(kind, view.number, step, *sizes, 0, (), shard)
        parcels = []
        for kept in every:
            if kept.to == shard:
                self._write(coder, image, kept, blank, steady)
            elif kept.pieces:
                parcels.append(self._pack(coder, image, kept, blank))
        steady.check()
        if parcels and self._target.post is not None:
            self._target.post.put(parcels)
        return needed

    def _write(
        self,
        coder: PieceCoder,
        image: Image | DeviceImage,
        kept: _Kept,
        blank: PieceEntry,
        steady: Steady,
    ) -> None:
        """Write pieces into this node's memory."""
        start, room = self._arena.take(coder.size * len(kept.pieces))
        try:
            digests = self._make_all(coder, image, kept, room)
            steady.check()
            entry = msgspec.structs.replace(blank, start=start, digests=digests)
            self._arena.put(entry, kept.shelf)
        except BaseException:
            self._arena.give_back(start)
            raise

    def _pack(
        self, coder: PieceCoder, image: Image | DeviceImage, kept: _Kept, blank: PieceEntry
    ) -> tuple[int, Parcel, list[memoryview]]:
        """Make pieces for another process to keep."""
        room = np.empty(coder.size * len(kept.pieces), np.uint8).data
        digests = self._make_all(coder, image, kept, room)
        entry = msgspec.structs.replace(blank, digests=digests)
        return kept.to, Parcel(entry, kept.shelf), [room]

    def _make_all(
        self, coder: PieceCoder, image: Image | DeviceImage, kept: _Kept, room: memoryview
    ) -> tuple[bytes, ...]:
        size = coder.size
        return tuple(
            self._make(coder, image, piece, room[index * size :][:size])
            for index, piece in enumerate(kept.pieces)
        )

    def _make(
        self, coder: PieceCoder, image: Image | DeviceImage, piece: Piece, room: memoryview
    ) -> bytes:
        if isinstance(image, Image):
            return coder.make(image, piece, room)
        if self._code is None and self._redundancy.data > 1:
            self._code = TensorCode(self._redundancy.data, self._redundancy.parity)
        return image.make(coder, self._code, piece, room)

    def _check(self, kind: str, needed: int) -> None:
        """Raise UserError if the budget does not even hold two states and two gradients."""
        state_bytes = needed if kind == STATE else self._state_bytes
        step_bytes = needed if kind == GRADIENT else self._step_bytes
        least = 2 * (state_bytes + step_bytes)
        if least > self._arena.budget:
            raise UserError(
                f"the memory budget of {_megabytes(self._arena.budget)} for each worker is too "
                f"small: worker {self._worker} keeps {_megabytes(state_bytes)} of each state and "
                f"{_megabytes(step_bytes)} of each step's gradient, and needs room for two of "
                f"both, {_megabytes(least)}; raise --memory-budget, or set --redundancy none"
            )

    def _pieces_in(self, view: View) -> list[_Kept]:
        """Return the pieces of this process's shard on each of its worker's nodes."""
        if self._kept is None or self._kept[0] != view.number:
            shard, parts = self._target.shard, parts_of(view, self._target.shard)
            every = []
            for place in range(self._target.spread):
                pieces = pieces_of(view, self._worker, self._redundancy, shard, place)
                plain = tuple((part, number) for part, number in pieces)
                shelf = PieceShelf(view.number, parts, plain, 0, shard)
                every.append(_Kept(self._target.writer_on(place), shelf, pieces))
            self._kept = view.number, every
        return self._kept[1]


def _head(skeleton: bytes) -> bytes:
    """Return the beginning of a state's image."""
    return SIZES.pack(len(skeleton)) + skeleton


def _image(tensors: Sequence[torch.Tensor]) -> Image | DeviceImage:
    """View the bytes of tensors as one image, where they lie."""
    devices = [tensor.device for tensor in tensors if tensor.is_cuda]
    if devices:
        return DeviceImage(tensors, devices[0])
    return Image([as_bytes(tensor).numpy().data for tensor in tensors])


def _megabytes(count: int) -> str:
    return f"{count / 1e6:.3g} MB"


def buffers_of_state(image: memoryview) -> tuple[bytes, Sequence[torch.Tensor]]:
    """Take an image of a state apart: its skeleton, and tensors that share its memory.

    WireError, struct.error or RuntimeError if it is none.
    """
    (length,) = SIZES.unpack(image[: SIZES.size])
    at = SIZES.size + length
    skeleton = bytes(image[SIZES.size : at])
    tensors = []
    for meta in state.metas(skeleton):
        tensor = state.allocate(meta)
        size = tensor.nbytes
        if size:
            as_bytes(tensor).copy_(torch.frombuffer(image[at : at + size], dtype=torch.uint8))
        at += size
        tensors.append(tensor)
    return skeleton, tensors


PAUSE_S = 1.0  # time for nodes to report damaged pieces to the coordinator


class Recalling(StateSource):
    """Recalls the state that a view names, for the shard of process `me`.

    `identity`: of this process. `loading` is called once all of the state is here. `tell` posts an
    event.
    """

    def __init__(
        self,
        me: Peer,
        data: StepData,
        loaded: LoadedState,
        identity: PeerIdentity,
        redundancy: Redundancy,
        loading: Callable[[], None],
        tell: Callable[[ev.WorkerEvent], None],
    ) -> None:
        self._me = me
        self._data = data
        self._loaded = loaded
        self._identity = identity
        self._redundancy = redundancy
        self._loading = loading
        self._tell = tell
        self._reader: tuple[int, PieceReader] | None = None  # the view's number, and its reader
        self._began = 0.0

    def load_state(self, order: ef.ObtainState, at: ViewConnections | None) -> Events:
        """Load the state from which a view begins. StateMismatch if the script cannot take it."""
        assert at is not None, "a state is recalled in a view"
        view, recall = at.view, self._recall_of(at.view)
        try:
            image = self._reader_for(view, recall).read(STATE, recall.view, recall.base)
            skeleton, tensors = buffers_of_state(image)
        except (WorldError, MemoryError, struct.error, RuntimeError, ValueError) as error:
            return self._make_failure(view, f"the state after {recall.base} steps", error)
        self._loading()
        self._loaded.load(skeleton, list(tensors))
        if not recall.sources:
            self._finish(view, recall)
        return (ev.StateObtained(SourceKind.MEMORY, view.number),)

    def take_step(self, order: ef.ObtainStep, at: ViewConnections | None) -> Events:
        """Put the gradient of a step where the script finds it."""
        assert at is not None, "a step is recalled in a view"
        view, step, recall = at.view, order.step, self._recall_of(at.view)
        source = next(each for each in recall.sources if each.first <= step < each.end)
        try:
            image = self._reader_for(view, recall).read(GRADIENT, source.view, step)
            put_images(self._data, [StepImage.decode(image)])
        except (WorldError, MemoryError) as error:
            return self._make_failure(view, f"the gradient of step {step}", error)
        if step + 1 == recall.step:
            self._finish(view, recall)
        return (ev.StepObtained(SourceKind.MEMORY, view.number, step),)

    def end(self) -> None:
        """Close the connections to all nodes."""
        if self._reader is not None:
            self._reader[1].close()
            self._reader = None

    def _finish(self, view: View, recall: Recall) -> None:
        """Hang up; the leader's first process describes the recall."""
        if self._reader is not None and self._me == Peer(view.leader, 0):
            size, took_s = self._reader[1].received, time.monotonic() - self._began
            text = (
                f"the nodes' memory gave the state after {recall.base} steps and the gradients of "
                f"{recall.step - recall.base} more: {size / 1e6:.3g} MB to each process, in "
                f"{took_s:.2g} s"
            )
            self._tell(ev.EventNoted("memory", text))
        self.end()

    def _reader_for(self, view: View, recall: Recall) -> PieceReader:
        if self._reader is None or self._reader[0] != view.number:
            self.end()
            self._began = time.monotonic()
            reader = PieceReader(recall.nodes, self._identity, self._redundancy, self._me.shard)
            self._reader = view.number, reader
        return self._reader[1]

    def _make_failure(self, view: View, what: str, error: Exception) -> Events:
        self.end()
        time.sleep(PAUSE_S)
        text = f"{what} cannot be recalled: {first_line(error)}"
        return (ev.ObtainFailed(SourceKind.MEMORY, view.number, text),)

    @staticmethod
    def _recall_of(view: View) -> Recall:
        if view.recall is None:
            raise Damaged("this view recalls nothing")
        return view.recall

"""Puts this worker's pieces of states and gradients into its node's memory.

What may change while the next step computes is copied at the boundary; parameters and the
optimizer's state are read beside it, and `before_update` waits until that is done. The pieces of a
reduced gradient are written before the worker votes for its step.
"""

from __future__ import annotations

import struct
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.core.errors import UserError, WorldError, first_line
from holdfast.core.redundancy import Piece, Redundancy
from holdfast.core.step import events as ev
from holdfast.core.step.protecting import pieces_of
from holdfast.core.types import View, WorkerId
from holdfast.memory.arena import GRADIENT, STATE, PieceArena, PieceEntry, PieceShelf
from holdfast.memory.pieces import Image, PieceCoder
from holdfast.train.checkpoint import state
from holdfast.train.checkpoint.staging import steady_storages
from holdfast.train.checkpoint.state import Capture, Extent, Wanted
from holdfast.train.protection.device_image import DeviceImage
from holdfast.train.protection.tensor_coding import TensorCode
from holdfast.train.step.kept_step import image_of
from holdfast.train.step.step_data import StepData

SIZES = struct.Struct("!Q")  # the length of the skeleton, which begins the image of a state


@dataclass(frozen=True, slots=True)
class _Whose:
    """Says which pieces of a view this worker keeps."""

    view: int
    shelf: PieceShelf
    pieces: tuple[Piece, ...]


class Protector:
    """Protects one worker's job; `tell` posts an event, `fail` has the script raise an error.

    `capture`: the state, if not all of it is here.
    """

    def __init__(
        self,
        arena: PieceArena,
        redundancy: Redundancy,
        worker: WorkerId,
        sources: tuple[Mapping[str, Any], StepData],
        tell: Callable[[ev.WorkerEvent], None],
        fail: Callable[[BaseException], None],
        capture: Capture | None = None,
    ) -> None:
        self._arena = arena
        self._redundancy = redundancy
        self._worker = worker
        self._protected, self._data = sources
        self._capture = capture or (lambda _: state.capture_named(self._protected))
        self._tell = tell
        self._fail = fail
        self._whose: _Whose | None = None
        self._coders: dict[tuple[int, int], PieceCoder] = {}  # by parts and bytes
        self._making: threading.Thread | None = None
        self._state_bytes = 0  # of this worker's pieces of a state, as far as known
        self._step_bytes = 0  # and of a gradient
        self._said = False  # that there is no room
        self._code: TensorCode | None = None  # for what lies on a GPU

    # ------------------------------------------------------------ states

    def begin(self, step: int, view: View) -> None:
        """Begin to put pieces of the state after `step` steps there. By the script's thread."""
        self.before_update()
        try:
            skeleton, found = self._capture(self._wanted(view))
        except WorldError as error:
            self._tell(ev.StateProtected(step, first_line(error)))
            return
        steady = steady_storages(self._protected)
        parts = [torch.frombuffer(bytearray(_head(skeleton)), dtype=torch.uint8)]
        for each in found:
            tensor = each.tensor
            stays = each.private or tensor.untyped_storage().data_ptr() in steady
            parts.append(tensor if stays else tensor.clone())
        args = (step, view, _image(parts))
        self._making = threading.Thread(
            target=self._make_state, args=args, name="holdfast-protect", daemon=True
        )
        self._making.start()

    def before_update(self) -> None:
        """Wait until nothing is read of the state any more: it is about to change."""
        if self._making is not None:
            self._making.join()
            self._making = None

    def _wanted(self, view: View) -> Wanted:
        """Return what says which bytes of the state each member of a view makes its pieces of."""

        def wanted(skeleton: bytes, tensors: Sequence[torch.Tensor], rank: int) -> list[Extent]:
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

        return wanted

    def _make_state(self, step: int, view: View, image: Image | DeviceImage) -> None:
        whose, problem = self._whose_of(view), ""
        try:
            self._state_bytes = self._put(STATE, whose, step, image)
        except UserError as error:
            self._fail(error)
            return
        except (MemoryError, OSError, RuntimeError) as error:  # those of a GPU are RuntimeErrors
            problem = first_line(error)
        self._tell(ev.StateProtected(step, problem))

    # ------------------------------------------------------------ gradients

    def keep(self, step: int, view: View) -> ev.GradientKept:
        """Put pieces of the reduced gradient of a step there. By the engine's thread.

        Without room the step goes on, and is not protected.
        """
        whose, full = self._whose_of(view), True
        try:
            self._step_bytes = self._put(GRADIENT, whose, step, _image(image_of(self._data)))
            full = self._arena.used + self._step_bytes * 2 + self._state_bytes > self._arena.budget
        except MemoryError as error:
            if not self._said:
                self._tell(ev.EventNoted("memory", f"step {step} is not kept: {error}"))
        self._said = full
        return ev.GradientKept(view.number, step, full)

    def mark(self, view: int, step: int) -> None:
        """Note that this worker commits a step."""
        self._arena.mark(view, step)

    def forget(self, view: int, step: int) -> None:
        """Drop what is older than the state after `step` steps, which `view` has protected."""
        self._arena.forget(view, step)

    # ------------------------------------------------------------ pieces

    def _put(self, kind: str, whose: _Whose, step: int, image: Image | DeviceImage) -> int:
        """Make this worker's pieces of an image; returns their size. MemoryError, UserError."""
        shape = (whose.shelf.parts, image.size)
        coder = self._coders.get(shape)
        if coder is None:
            coder = PieceCoder(self._redundancy, *shape)
            self._coders = dict(list(self._coders.items())[-4:]) | {shape: coder}
        needed = coder.size * len(whose.pieces)
        self._check(kind, needed)
        start, room = self._arena.take(needed)
        try:
            digests = [
                self._make(coder, image, piece, room[index * coder.size :][: coder.size])
                for index, piece in enumerate(whose.pieces)
            ]
            entry = PieceEntry(
                kind, whose.view, step, image.size, coder.size, start, digests=tuple(digests)
            )
            self._arena.put(entry, whose.shelf)
        except BaseException:
            self._arena.give_back(start)
            raise
        return needed

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

    def _whose_of(self, view: View) -> _Whose:
        whose = self._whose
        if whose is None or whose.view != view.number:
            pieces = pieces_of(view, self._worker, self._redundancy)
            plain = tuple((part, number) for part, number in pieces)
            whose = _Whose(view.number, PieceShelf(view.number, len(view.ring), plain, 0), pieces)
            self._whose = whose
        return whose


def _head(skeleton: bytes) -> bytes:
    """Return what begins the image of a state."""
    return SIZES.pack(len(skeleton)) + skeleton


def _image(tensors: Sequence[torch.Tensor]) -> Image | DeviceImage:
    """View the bytes of tensors as one image, where they lie."""
    devices = [tensor.device for tensor in tensors if tensor.is_cuda]
    if devices:
        return DeviceImage(tensors, devices[0])
    return Image([state.as_bytes(tensor).numpy().data for tensor in tensors])


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
        tensor = state.empty(meta)
        size = tensor.nbytes
        if size:
            state.as_bytes(tensor).copy_(torch.frombuffer(image[at : at + size], dtype=torch.uint8))
        at += size
        tensors.append(tensor)
    return skeleton, tensors

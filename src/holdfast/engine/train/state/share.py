"""Takes one member's share of the state: cuts it, copies it, digests it and waits for the copies.

At a boundary the script stands still. What a task or a forward pass may change is copied there.
Parameters and optimizers' states hold still until the next update, so a thread may read them while
the next step computes, and GPUs copy in streams of their own; `wait_before_update` waits for both.
"""

from __future__ import annotations

import contextlib
import threading
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from holdfast.engine.core.errors import WorldError, first_line
from holdfast.engine.core.sum_plan import part_of
from holdfast.engine.train.checkpoint.local_tensors import local_of
from holdfast.engine.train.checkpoint.state import Extent, Wanted
from holdfast.engine.train.checkpoint.transfer import StatePart
from holdfast.engine.train.exchange.tensor_bytes import as_bytes, memory_of, room
from holdfast.engine.train.state.step_image import free_beside
from holdfast.engine.train.step.table_parameters import AbsentWeight

BLOCK_BYTES = 1 << 20  # copied and then digested while it is in the processor's cache
CHANGED = (
    "the script has changed the state while it was copied; change it in the step's update, or "
    "after the loop"
)

# ---------------------------------------------------------------- cut between rows, for checkpoints


@dataclass(frozen=True, slots=True)
class Slice:
    """Names rows `start` to `stop` of a tensor; all of it, if it is not `cut`."""

    tensor: int
    start: int
    stop: int
    cut: bool


def share_of(tensors: Sequence[torch.Tensor], rank: int, size: int) -> list[Slice]:
    """Return the slices that rank `rank` of `size` saves; each row of a tensor is in one share."""
    total = sum(t.nbytes for t in tensors)
    begin, end = part_of(total, rank, size)
    found: list[Slice] = []
    at = 0
    for index, tensor in enumerate(tensors):
        rows = tensor.shape[0] if tensor.dim() else 1
        if tensor.nbytes == 0:
            if begin <= at < end or (rank == size - 1 and at == total):
                found.append(Slice(index, 0, rows, cut=False))
            continue
        row = tensor.nbytes // rows
        start = _clamp(-((at - begin) // row), rows) if rank > 0 else 0
        stop = _clamp(-((at - end) // row), rows) if rank < size - 1 else rows
        if start < stop:
            found.append(Slice(index, start, stop, cut=stop - start < rows))
        at += tensor.nbytes
    return found


def share_selector(size: int) -> Wanted:
    """Return a function that lists the bytes that each of `size` ranks needs for its share."""

    def extents_of(_: bytes, tensors: Sequence[torch.Tensor], rank: int) -> list[Extent]:
        found = []
        for each in share_of(tensors, rank, size):
            tensor = tensors[each.tensor]
            row = tensor.nbytes // max(tensor.shape[0] if tensor.dim() else 1, 1)
            found.append(Extent(each.tensor, each.start * row, each.stop * row))
        return found

    return extents_of


def _clamp(row: int, rows: int) -> int:
    return min(max(row, 0), rows)


# ---------------------------------------------------------------- copied and waited for


class Steady:
    """Finds out whether tensors hold still from now on, as far as torch counts changes."""

    def __init__(self, tensors: Sequence[torch.Tensor] = ()) -> None:
        self._versions = [(each, each._version) for each in tensors if not each.is_inference()]

    def check(self) -> None:
        """Raise WorldError if a tensor has changed."""
        if any(tensor._version != version for tensor, version in self._versions):
            raise WorldError(CHANGED)


class StateShare:
    """Copies the share of the job's objects, `protected`, and reads it during the next step.

    Modules' buffers change in a forward pass: GPUs copy them before the next one.
    """

    def __init__(self, protected: Mapping[str, Any]) -> None:
        self._protected = protected
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: list[torch.cuda.Event] = []
        self._pinned: memoryview = memoryview(b"")
        self._reading: threading.Thread | None = None
        self._steady: set[int] = set()  # storages that no task changes

    def begin(self) -> None:
        """Find the tensors that hold still until the next update. At a boundary."""
        self._steady = _find_steady_storages(self._protected)

    def is_steady(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor holds still until the next update."""
        return tensor.untyped_storage().data_ptr() in self._steady

    def read_beside(self, name: str, read: Callable[..., None], *args: Any) -> None:
        """Read steady tensors in a thread, while the next step computes."""
        self._reading = threading.Thread(target=read, args=args, name=name, daemon=True)
        self._reading.start()

    def wait_before_update(self) -> None:
        """Wait for the reading thread, and let GPUs do so for copies: the state will change."""
        self._hold()
        if self._reading is not None:
            self._reading.join()
            self._reading = None

    def copy(self, memory: memoryview, places: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy each tensor's bytes to its place; `wait_for_copies` waits for those on GPUs."""
        on_gpu = []
        for start, tensor in places:
            if tensor.is_cuda:
                on_gpu.append((start, tensor))
            elif tensor.nbytes:
                _room(memory, start, tensor).copy_(tensor)
        if on_gpu:
            self._pin(memory, on_gpu[0][1].device)
            changing = {
                local_of(buffer).untyped_storage().data_ptr()
                for module in self._protected.values()
                if isinstance(module, torch.nn.Module)
                for buffer in module.buffers()
            }
            early = [p for p in on_gpu if p[1].untyped_storage().data_ptr() in changing]
            late = [p for p in on_gpu if p[1].untyped_storage().data_ptr() not in changing]
            self._start(memory, early)
            self._hold()
            self._start(memory, late)

    @property
    def is_busy(self) -> bool:
        """Return whether copies may be under way."""
        return not all(event.query() for event in self._under_way)

    def _hold(self) -> None:
        """Make all work queued later on the GPUs' present streams wait for the copies."""
        for event in self._under_way:
            torch.cuda.current_stream(event.device).wait_event(event)

    def wait_for_copies(self) -> None:
        """Wait until all copies are complete. WorldError if a GPU has failed."""
        try:
            for event in self._under_way:
                event.synchronize()
        except RuntimeError as error:
            raise WorldError(f"a copy from the GPU has failed: {error}") from None

    def release(self) -> None:
        """Prepare for giving the memory back, unless a thread still copies into it."""
        if self._reading is not None and self._reading.is_alive():
            return
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(_address(self._pinned))
        self._pinned = memoryview(b"")

    def _start(self, memory: memoryview, places: Sequence[tuple[int, torch.Tensor]]) -> None:
        devices = {tensor.device for _, tensor in places}
        for device in sorted(devices, key=str):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for start, tensor in places:
                    if tensor.device == device and tensor.nbytes:
                        _room(memory, start, tensor).copy_(tensor, non_blocking=True)
                        tensor.record_stream(stream)
                event = torch.cuda.Event()
                event.record(stream)
            self._under_way.append(event)

    def _pin(self, memory: memoryview, device: torch.device) -> None:
        """Pin the memory; otherwise the copies are slower, and hold up the host."""
        self._under_way = []
        if not self._pinned:
            failed = torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0)
            self._pinned = memoryview(b"") if int(failed) else memory
            if int(failed):
                # CUDA also reports this error to the next kernel that is started: let it be this
                # one, and not the script's.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=device)


def _find_steady_storages(protected: Mapping[str, Any]) -> set[int]:
    """Return the storages of parameters and optimizers' states, which no task changes."""
    found: list[torch.Tensor] = []
    for each in protected.values():
        if isinstance(each, torch.nn.Module):
            found += [p for p in each.parameters() if not isinstance(p, AbsentWeight)]
        elif isinstance(each, torch.optim.Optimizer):
            values = (v for held in each.state.values() for v in held.values())
            found += [v for v in values if isinstance(v, torch.Tensor)]
    return {local_of(tensor).untyped_storage().data_ptr() for tensor in found}


def _room(memory: memoryview, start: int, tensor: torch.Tensor) -> torch.Tensor:
    place = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=start)
    return place.view(tensor.dtype).view(tensor.shape)


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()


# ---------------------------------------------------------------- digested, for followers


@dataclass(frozen=True, slots=True)
class _Piece:
    """Is one part of the state, with its place in the arena if this member sends it."""

    number: int
    tensor: torch.Tensor
    part: StatePart
    place: int | None

    def view_flat(self) -> torch.Tensor:
        """View its bytes in place; return a copy, if they have gaps."""
        flat = self.tensor.contiguous().reshape(-1).view(torch.uint8)
        return flat[self.part.start : self.part.stop]


class StagedState:
    """Copies one member's share for followers, and digests all of the state.

    The digests of all members' states are compared before a follower joins. Of its own share a
    member digests the copy, and sends it with these digests. So a follower loads, byte for byte,
    the state that the members have compared. `compares`: digest all of it, not only the copy.
    """

    def __init__(self, protected: Mapping[str, Any], *, compares: bool) -> None:
        self._compares = compares
        self._share = StateShare(protected)
        self._arena = room(0)
        self._progress = threading.Condition()  # a part was copied, or copying has ended
        self._on_gpu: frozenset[int] = frozenset()  # parts that lie on GPUs
        self._skeleton = b""
        self._digests: list[bytes] = []  # by part; empty if only a GPU has seen it
        self._print = 0
        self.problem = ""  # why there is no copy after all

    def copy(
        self,
        skeleton: bytes,
        tensors: Sequence[torch.Tensor],
        parts: Sequence[StatePart],
        rank: int,
    ) -> None:
        """Copy the parts of this rank, and digest all of them. MemoryError, RuntimeError."""
        self._skeleton, self._digests = skeleton, [b""] * len(parts)
        self._print, self.problem = 0, ""
        self._share.begin()
        on_gpu, early, late = list[_Piece](), list[_Piece](), list[_Piece]()
        size = 0
        for number, part in enumerate(parts):
            tensor, mine = tensors[part.tensor].detach(), part.share == rank
            if mine or self._compares:
                is_late = self._share.is_steady(tensor)
                pieces = on_gpu if tensor.is_cuda else late if is_late else early
                pieces.append(_Piece(number, tensor, part, size if mine else None))
            size += (part.stop - part.start) * mine
        self._on_gpu = frozenset(piece.number for piece in on_gpu)
        self._arena = room(size)  # the copying thread touches the pages
        placed = [(p.place, p.view_flat()) for p in on_gpu if p.place is not None]
        self._share.copy(memory_of(self._arena), placed)
        # Later work on the same stream does not change the bytes that these sums read.
        sums = [each.view_flat().sum(dtype=torch.int64) for each in on_gpu if self._compares]
        for piece in early:
            self._take(piece, self._arena)
        self._share.read_beside("holdfast-stage", self._finish, late, sums, self._arena)

    def wait_before_update(self) -> None:
        """Wait for copies under way: the state is about to change."""
        self._share.wait_before_update()

    def await_part(self, number: int) -> None:
        """Wait until a part is copied. WorldError; RuntimeError if the copy could not be made."""
        if number in self._on_gpu:
            self._share.wait_for_copies()
            return
        with self._progress:
            while not self._digests[number] and not self.problem:
                self._progress.wait()
        if self.problem:
            raise RuntimeError(self.problem)

    @property
    def fingerprint(self) -> int:
        """Return 63 bits of all of the state, never 0; or 0 if no part was digested."""
        return 0 if self.problem else self._print

    def messages(self, parts: Sequence[StatePart], rank: int) -> list[tuple[int, memoryview]]:
        """Return the number of each part of this rank, and where its bytes will be."""
        memory, at, found = memory_of(self._arena), 0, list[tuple[int, memoryview]]()
        for number, part in enumerate(parts):
            if part.share == rank:
                stop = at + part.stop - part.start
                found.append((number, memory[at:stop]))
                at = stop
        return found

    def digest(self, number: int) -> bytes:
        """Return the digest of a part that has been copied; empty if there is none."""
        return self._digests[number]

    def release(self) -> None:
        """Give up the arena, unless it is being sent: then the sender holds it."""
        self._share.release()
        held, self._arena = [self._arena], room(0)
        free_beside(held)

    def _finish(
        self, pieces: Sequence[_Piece], sums: Sequence[torch.Tensor], arena: torch.Tensor
    ) -> None:
        try:
            for piece in sorted(pieces, key=lambda each: each.place is None):
                self._take(piece, arena)
            words = b""
            if sums:
                gathered = torch.stack([each.to(sums[0].device) for each in sums])
                words = as_bytes(gathered).numpy().tobytes()
        except (MemoryError, RuntimeError) as error:
            with self._progress:
                self.problem = f"the state cannot be copied: {first_line(error)}"
                self._progress.notify_all()
            return
        if self._compares:
            every = xxhash.xxh3_64(self._skeleton)
            for each in (*self._digests, words):
                every.update(each)
            self._print = every.intdigest() >> 1 or 1

    def _take(self, piece: _Piece, arena: torch.Tensor) -> None:
        """Digest a part: the copy, if this member sends it, else the state itself."""
        digest, flat = xxhash.xxh3_128(), piece.view_flat()
        for start in range(0, flat.numel(), BLOCK_BYTES):
            block = flat[start : start + BLOCK_BYTES]
            if piece.place is not None:
                at = piece.place + start
                block = arena[at : at + block.numel()].copy_(block)
            digest.update(block.cpu().numpy().data)
        with self._progress:
            self._digests[piece.number] = digest.digest()
            self._progress.notify_all()

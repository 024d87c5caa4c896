"""Copies one member's share of the state for followers, and digests all of the state beside it.

Tensors that may change while the next step computes are copied and digested at the boundary. Those
of parameters and optimizers follow in a thread, while the step computes; `wait_before_update` waits
for it. The digests of all members' states are compared before a follower joins. For its own share a
member digests the copy, and sends the copy with these digests. So a follower loads, byte for byte,
the state that the members have compared.
"""

from __future__ import annotations

import threading
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import xxhash

from holdfast.engine.core.errors import first_line
from holdfast.engine.train.checkpoint.staging import Copier, find_steady_storages
from holdfast.engine.train.checkpoint.transfer import StatePart
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.feeding.feed_frames import bytes_of
from holdfast.engine.train.feeding.step_memory import free_beside
from holdfast.engine.train.step.kept_step import room

BLOCK_BYTES = 1 << 20  # copied and then digested while it is in the processor's cache


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
    """Copies one state. `compares`: digest all of it, not only the copy."""

    def __init__(self, protected: Mapping[str, Any], *, compares: bool) -> None:
        self._protected = protected
        self._compares = compares
        self._copier = Copier(protected)
        self._arena = room(0)
        self._thread: threading.Thread | None = None
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
        steady = find_steady_storages(self._protected)
        on_gpu, early, late = list[_Piece](), list[_Piece](), list[_Piece]()
        size = 0
        for number, part in enumerate(parts):
            tensor, mine = tensors[part.tensor].detach(), part.share == rank
            if mine or self._compares:
                is_steady = tensor.untyped_storage().data_ptr() in steady
                pieces = on_gpu if tensor.is_cuda else late if is_steady else early
                pieces.append(_Piece(number, tensor, part, size if mine else None))
            size += (part.stop - part.start) * mine
        self._on_gpu = frozenset(piece.number for piece in on_gpu)
        self._arena = room(size)  # the copying thread touches the pages
        placed = [(p.place, p.view_flat()) for p in on_gpu if p.place is not None]
        self._copier.copy(bytes_of(self._arena), placed)
        # Later work on the same stream does not change the bytes that these sums read.
        sums = [each.view_flat().sum(dtype=torch.int64) for each in on_gpu if self._compares]
        for piece in early:
            self._take(piece, self._arena)
        args = late, sums, self._arena
        self._thread = threading.Thread(
            target=self._finish, args=args, name="holdfast-stage", daemon=True
        )
        self._thread.start()

    def wait_before_update(self) -> None:
        """Wait for copies under way, since the state is about to change."""
        self._copier.hold()
        if self._thread is not None:
            self._thread.join()
            self._thread = None

    def await_part(self, number: int) -> None:
        """Wait until a part is copied. WorldError; RuntimeError if the copy could not be made."""
        if number in self._on_gpu:
            self._copier.wait_for_copies()
            return
        with self._progress:
            while not self._digests[number] and not self.problem:
                self._progress.wait()
        if self.problem:
            raise RuntimeError(self.problem)

    @property
    def fingerprint(self) -> int:
        """Return 63 bits of all of the state, never 0; or 0 if nothing was digested."""
        return 0 if self.problem else self._print

    def messages(self, parts: Sequence[StatePart], rank: int) -> list[tuple[int, memoryview]]:
        """Return the number of each part of this rank, and where its bytes will be."""
        memory, at, found = bytes_of(self._arena), 0, list[tuple[int, memoryview]]()
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
        if self._thread is None or not self._thread.is_alive():
            self._copier.release()
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

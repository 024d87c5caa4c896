"""Cuts pieces from tensors that lie on a GPU, so that only pieces are copied to the host."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import xxhash

from holdfast.engine.core.redundancy import Piece
from holdfast.engine.state.memory.pieces import PieceCoder
from holdfast.engine.train.protection.tensor_coding import WORD_BYTES, TensorCode


class DeviceImage:
    """Presents several tensors' bytes as one, as memory/pieces.py does with buffers of the host."""

    def __init__(self, tensors: Sequence[torch.Tensor], device: torch.device) -> None:
        self._flat = [t.detach().contiguous().reshape(-1).view(torch.uint8) for t in tensors]
        self._device = device
        self.size = sum(flat.numel() for flat in self._flat)

    def bytes_from(self, start: int, size: int) -> torch.Tensor:
        """Return `size` bytes from `start` on, filled up with zeros: [size] uint8."""
        found = torch.zeros(size, dtype=torch.uint8, device=self._device)
        at = 0
        for flat in self._flat:
            first, last = max(start - at, 0), min(start + size - at, flat.numel())
            if first < last:
                found[at + first - start : at + last - start].copy_(flat[first:last])
            at += flat.numel()
        return found

    def make(
        self, coder: PieceCoder, code: TensorCode | None, piece: Piece, room: memoryview
    ) -> bytes:
        """Write one piece to the host, as PieceCoder.make does; returns its digest."""
        size, first = coder.size, piece.part * coder.data * coder.size
        if code is None or piece.number < coder.data:
            number = 0 if code is None else piece.number
            found = self.bytes_from(first + number * size, size)
        else:
            padded = -(-size // WORD_BYTES) * WORD_BYTES
            data = []
            for number in range(coder.data):
                words = torch.zeros(padded, dtype=torch.uint8, device=self._device)
                words[:size] = self.bytes_from(first + number * size, size)
                data.append(words.view(torch.int64))
            found = code.make(piece.number, data).view(torch.uint8)[:size]
        torch.frombuffer(room, dtype=torch.uint8, count=size).copy_(found)
        return xxhash.xxh3_128_digest(room[:size])

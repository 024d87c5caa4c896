"""Makes arrays with room for whole tables; only the parts that are written take memory.

A server holds some shards of each table, and may have to hold others later. Its arrays have a place
for every row of a table from the start, so a shard comes and goes without a copy of the others:
the kernel gives memory to pages at their first use, and takes it back on request.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable
from contextlib import suppress

import torch

RESERVED_MIN = 1 << 20  # bytes; smaller arrays take their memory at once
MAP_NORESERVE = 0x4000  # Linux reserves address space alone, which may exceed the memory


class ReservedArrays:
    """Makes arrays of zeros, and frees the memory of their parts.

    `whole`: all parts will be used, so arrays take their memory at once. RuntimeError: there is
    not enough.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._maps: dict[int, mmap.mmap] = {}  # by the address of the array

    def make(self, count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an array [count, width] of zeros; of the shape [count] if `width` is 0."""
        shape = (count, width) if width else (count,)
        size = count * max(width, 1) * dtype.itemsize
        if size >= RESERVED_MIN and not self._whole:
            with suppress(OSError):  # the machine allows no more of them
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
                room = mmap.mmap(-1, size, flags=flags)
                found = torch.frombuffer(room, dtype=dtype).view(shape)
                self._maps[found.data_ptr()] = room
                return found
        return torch.zeros(shape, dtype=dtype)

    def release(self, arrays: Iterable[torch.Tensor], places: range) -> None:
        """Free the memory of these places [first dimension]; do not read them afterwards."""
        for array in arrays:
            room = self._maps.get(array.data_ptr())
            if room is None:
                continue
            row = array[0].numel() * array.element_size()
            # A page at an edge has rows of a neighbour, too.
            start = -(-places.start * row // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = places.stop * row // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > start:
                room.madvise(mmap.MADV_DONTNEED, start, stop - start)


def check_room(size: int) -> None:
    """Raise RuntimeError if `size` bytes are more than this machine can have at all."""
    torch.empty(size, dtype=torch.uint8)

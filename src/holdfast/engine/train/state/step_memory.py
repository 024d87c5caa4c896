"""Keeps the memory of steps on their way to followers, and frees memory in threads.

A large block that was just allocated costs a page fault for every page, more than the copy into it.
So a thread touches the first blocks ahead of their use, and all blocks are used again and again.
"""

from __future__ import annotations

import threading
from collections.abc import Sequence

import torch

from holdfast.engine.train.exchange.tensor_bytes import room

LARGE_BYTES = 1 << 20  # smaller blocks are the allocator's business
AHEAD = 2  # steps for which there is memory before the first is sent


class StepMemory:
    """Keeps blocks by their size. Any thread may call it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._free: list[torch.Tensor] = []
        # number of releases; a block allocated before the last one is not kept any more
        self._released = 0

    def prepare(self, sizes: Sequence[int], most: int) -> None:
        """Touch memory for a few steps, whose tensors have these sizes, in a thread.

        `most`: how many bytes all of it may take.
        """
        ahead = min(AHEAD, most // max(sum(sizes), 1))
        wanted = [size for size in sizes if size >= LARGE_BYTES] * ahead
        args = wanted, self._released
        threading.Thread(target=self._touch, args=args, name="holdfast-touch", daemon=True).start()

    def copy(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a copy of a tensor, made in a free block if there is one of its size."""
        if tensor.is_cuda or tensor.nbytes < LARGE_BYTES:
            return tensor.clone()
        return self.block(tensor.nbytes).view(tensor.dtype).view(tensor.shape).copy_(tensor)

    def block(self, count: int) -> torch.Tensor:
        """Return a block of `count` bytes: a free one of that size, or a new one."""
        with self._lock:
            fits = (i for i, block in enumerate(self._free) if block.nbytes == count)
            at = next(fits, None)
            return room(count) if at is None else self._free.pop(at)

    def give_back(self, tensors: Sequence[torch.Tensor]) -> None:
        """Take back blocks, or copies in them, for later use; tensors on GPUs are freed."""
        large = [t for t in tensors if t.nbytes >= LARGE_BYTES and not t.is_cuda]
        blocks = [t.reshape(-1).view(torch.uint8) for t in large]
        with self._lock:
            self._free += blocks

    def release(self) -> None:
        """Give all free blocks back."""
        with self._lock:
            blocks, self._free = self._free, []
            self._released += 1
        free_beside(blocks)

    def _touch(self, sizes: Sequence[int], released: int) -> None:
        for size in sizes:
            block = room(size).zero_()
            with self._lock:
                if self._released != released:
                    return
                self._free.append(block)


def free_beside(blocks: list[torch.Tensor]) -> None:
    """Give memory back to the system in a thread, because freeing many touched pages takes long.

    `blocks`: the only reference to them; the caller must keep no other.
    """
    threading.Thread(target=blocks.clear, name="holdfast-free", daemon=True).start()

"""Keeps a step's results besides gradients: one row per virtual rank, and module buffers.

Rows have each task's loss, weight, sample count, host, and digests of its samples and of a part of
its gradient. Flags of the used parameters travel with them, and whether a script wants the loop to
end. Module buffers (BatchNorm's statistics) are defined as those left by virtual rank 0: every task
starts from the buffers of the step's start, so a task stays a pure function.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from typing import NamedTuple

import numpy as np
import torch

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.exchange.tensor_bytes import as_bytes

LOSS, COUNT, DIGEST, WORKER, INCARNATION, WEIGHT, GRADIENT, COLUMNS = 0, 1, 2, 3, 4, 5, 6, 7
UNWEIGHTED = -1.0  # the weight of a task whose loss is a mean
LEFT_OUT = -2.0  # the weight of a task whose batch the script leaves out


class TaskHost(NamedTuple):
    """Is the process that has computed a task."""

    worker: int
    incarnation: int


class StepTable:
    """Keeps an int64 row per virtual rank (floats as their bits) and the used flags."""

    def __init__(self, vranks: int, params: int) -> None:
        self.rows = torch.zeros(vranks, COLUMNS, dtype=torch.int64)
        #: A worker's script wants the loop to end.
        self.stops = False
        # The same memory: for a few words at a time NumPy is many times faster.
        self._rows = self.rows.numpy()
        self.expect(params)

    def expect(self, params: int) -> None:
        """Make room for the flags of `params` parameters."""
        self.used = torch.zeros(params, dtype=torch.bool)
        self._used = self.used.numpy()

    def put(
        self,
        vrank: int,
        loss: float,
        count: int,
        digest: int,
        host: TaskHost,
        weight: float = UNWEIGHTED,
        gradient: int = 0,
    ) -> None:
        """Write one task's row. `gradient`: 63 bits of a part of its gradient; 0: not taken."""
        bits, weight_bits = struct.unpack("<2q", struct.pack("<2d", loss, weight))
        signed = digest - (1 << 64) if digest >= 1 << 63 else digest
        self._rows[vrank] = (bits, count, signed, *host, weight_bits, gradient)

    def take(self, vranks: Iterable[int], own: StepTable) -> None:
        """Take these rows from the table of the worker that hosts them."""
        hosted = list(vranks)
        self._rows[hosted] = own._rows[hosted]

    def drop(self, vranks: Iterable[int], host: TaskHost) -> None:
        """Record that `host`'s results for these do not count: no loss, no samples."""
        for vrank in vranks:
            self.put(vrank, 0.0, 0, 0, host)

    def losses(self) -> list[float]:
        return self._rows[:, LOSS].view(np.float64).tolist()

    def weights(self) -> list[float]:
        return self._rows[:, WEIGHT].view(np.float64).tolist()

    def counts(self) -> list[int]:
        return self._rows[:, COUNT].tolist()

    def hosts(self) -> list[TaskHost]:
        return [TaskHost(w, i) for w, i in self._rows[:, WORKER:WEIGHT].tolist()]

    def digests(self) -> list[int]:
        return self._rows[:, DIGEST].view(np.uint64).tolist()

    def gradients(self) -> list[int]:
        return self._rows[:, GRADIENT].tolist()

    def pack(self, head: Sequence[int], vranks: Iterable[int]) -> torch.Tensor:
        """Pack `head` and the rows of `vranks` into an int64 message."""
        hosted = list(vranks)
        words = np.empty(len(head) + self.words(len(hosted)), np.int64)
        words[: len(head)] = head
        words[len(head) :] = self._rows[hosted].reshape(-1)
        return torch.from_numpy(words)

    def unpack(self, head: int, vranks: Iterable[int], message: torch.Tensor) -> None:
        """Take in another worker's packed message; its head has `head` words."""
        self._rows[list(vranks)] = message.numpy()[head:].reshape(-1, COLUMNS)

    @staticmethod
    def words(hosted: int) -> int:
        """Return the number of words in the rows of `hosted` virtual ranks."""
        return hosted * COLUMNS


class Buffers:
    """Keeps the buffers of the protected models, with their values at the start of the step.

    Changes are found by comparing bytes: autograd's version counters do not notice BatchNorm's.
    """

    def __init__(self, modules: Iterable[tuple[str, torch.nn.Module]]) -> None:
        self._modules = list(modules)
        self._left: torch.Tensor | None = None  # the buffers left by virtual rank 0, as a message
        # the first rank computed here, and its message
        self._kept: tuple[int, torch.Tensor] | None = None
        self.find()

    def find(self) -> None:
        """Find the buffers; call it again when the modules have changed."""
        self._places = [
            (f"{path}.{key}", owner, key)
            for name, module in self._modules
            for path, owner in module.named_modules(prefix=name)
            for key, value in owner._buffers.items()
            if value is not None
        ]
        self._start: list[torch.Tensor] = []

    def __len__(self) -> int:
        return len(self._places)

    @property
    def start(self) -> list[torch.Tensor]:
        """Return the buffers as they were at the step's beginning."""
        return self._start

    def remember(self) -> None:
        """Take the present values as those of the step's start."""
        self._left = self._kept = None
        with torch.no_grad():
            if not self._start:
                self._start = [owner._buffers[key].clone() for _, owner, key in self._places]
            elif self._places:
                torch._foreach_copy_(self._start, self._values())

    def restore(self) -> None:
        """Set the buffers back to the step's start."""
        if self._places:
            with torch.no_grad():
                torch._foreach_copy_(self._values(), self._start)

    def changes(self) -> torch.Tensor:
        """Return a task's changes of the buffers, as a message."""
        flags = torch.zeros(len(self), dtype=torch.uint8)
        parts: list[torch.Tensor] = []
        for i, (value, start) in enumerate(zip(self._values(), self._start, strict=True)):
            left = as_bytes(value)
            if not torch.equal(left, as_bytes(start)):
                flags[i] = 1
                parts.append(left)
        return torch.cat([flags, *parts])

    def keep(self, vrank: int, left: torch.Tensor) -> None:
        """Keep the buffers from a virtual rank's task, unless those of an earlier rank are kept."""
        if self._kept is None or vrank <= self._kept[0]:
            self._kept = vrank, left

    @property
    def kept(self) -> torch.Tensor | None:
        """Return the message of the first virtual rank computed here."""
        return None if self._kept is None else self._kept[1]

    @property
    def left(self) -> torch.Tensor | None:
        """Return the message to send: one changed flag per buffer, then the changed ones' bytes."""
        return self._left

    def receive(self, message: torch.Tensor) -> None:
        """Take the message from the host of virtual rank 0."""
        self._left = message

    def share(self) -> None:
        """Use the buffers of this worker's first virtual rank as those for all workers."""
        self._left = self.kept

    def apply(self) -> None:
        """Install the buffers left by virtual rank 0, on every worker alike."""
        self.restore()
        if self._left is None:
            return
        position = len(self)
        values = self._values()
        with torch.no_grad():
            for i in self._left[:position].nonzero().flatten().tolist():
                size = values[i].numel() * values[i].element_size()
                part = self._left[position : position + size].clone()
                values[i].copy_(part.view(values[i].dtype).view(values[i].shape))
                position += size

    def _values(self) -> list[torch.Tensor]:
        found: list[torch.Tensor] = []
        for i, (name, owner, key) in enumerate(self._places):
            value = owner._buffers[key]
            if value is None or (self._start and value.shape != self._start[i].shape):
                raise UserError(f"buffer {name} changed its shape during training: keep it fixed")
            found.append(value)
        return found

"""Keeps a reduced step apart from the buckets, for workers that have not taken part in it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch

from holdfast.train.step.row_table import Rows
from holdfast.train.step.step_data import StepData

HEAD = 4  # numbers: the view in which it was reduced, two sizes, and whether the loop stops


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptStep:
    """Holds a step as one member keeps it; all but the pieces is the same on all members."""

    pieces: tuple[torch.Tensor, ...]  # of each bucket's sum
    head: torch.Tensor  # [HEAD] int64
    rows: torch.Tensor
    used: torch.Tensor
    left: torch.Tensor  # the buffers of virtual rank 0
    told: torch.Tensor  # values, as bytes
    tables: tuple[Rows, ...]

    @classmethod
    def of(cls, step: StepData, piece: Callable[[int], slice]) -> KeptStep:
        """Copy a reduced step, which the script has not touched yet.

        `piece`: what of a sum with so many elements falls to this member.
        """
        results = [bucket.result.data for bucket in step.gradients.active]
        left = room(0) if step.buffers.left is None else step.buffers.left.clone()
        told = _of(step.values.encoded())
        head = [step.reduced_in, left.numel(), told.numel(), int(step.table.stops)]
        return cls(
            head=torch.tensor(head, dtype=torch.int64),
            pieces=tuple(r[piece(r.numel())].clone() for r in results),
            rows=step.table.rows.clone(),
            used=step.table.used.clone(),
            left=left,
            told=told,
            tables=tuple(table.result.copy() for table in step.gradients.active_tables),
        )

    @property
    def nbytes(self) -> int:
        """Return how much memory its gradients take."""
        rows = sum(each.places.nbytes + each.values.nbytes for each in self.tables)
        return rows + sum(piece.nbytes for piece in self.pieces)


def put_shared(
    step: StepData,
    head: torch.Tensor,
    used: torch.Tensor,
    left: torch.Tensor,
    told: torch.Tensor,
) -> None:
    """Put what is the same on all members, but the rows, where the script finds it."""
    view, _, _, stops = head.tolist()
    step.table.used.copy_(used)
    if left.numel():
        step.buffers.receive(left)
    step.values.receive(told.numpy().tobytes())
    step.table.stops = bool(stops)
    step.became_reduced(view)


def room(count: int) -> torch.Tensor:
    """Return room for so many bytes: [count] uint8."""
    return torch.empty(count, dtype=torch.uint8)


def _of(data: bytes) -> torch.Tensor:
    return torch.frombuffer(bytearray(data), dtype=torch.uint8) if data else room(0)

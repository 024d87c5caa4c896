"""Checkpoints of a running job: a copy at a step boundary, written while training goes on.

All members of a view agree in a vote that the next boundary is to be saved; then each copies its
share of the state into memory that outlives it, and has the writer of its node save that. A save
that fails costs a checkpoint, never training.
"""

from __future__ import annotations

import re
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping
from typing import Any

import torch

from holdfast.core.errors import WorldError, first_line
from holdfast.core.step.save_interval import Pace
from holdfast.core.types import View, WorkerId
from holdfast.store.snapshot import (
    ALIGN,
    Answer,
    Arena,
    Order,
    Slot,
    read_answer,
    send,
    table_of,
    token_for,
)
from holdfast.train.checkpoint import state
from holdfast.train.checkpoint.shares import Slice, share_of
from holdfast.train.checkpoint.staging import Copier

SKELETON = ".skeleton"  # the entry with everything that is no tensor
_PLACE = re.compile(r"\[('?)(.*?)\1\]")


class Saver:
    """`orders`: to the node's writer. `saved` is told, in a thread, of steps that are durable,
    and of their views.

    `every`: steps; 0 when it is for `pace` to say how often. `tell`: for the job's event log.
    """

    def __init__(
        self,
        orders: socket.socket,
        job: str,
        every: int,
        pace: Pace,
        protected: Mapping[str, Any],
        saved: Callable[[int, int], None],
        tell: Callable[[str], None] = lambda text: None,
    ) -> None:
        self._orders = orders
        self._job = job
        self._every = every
        self._pace = pace
        self._protected = protected
        self._saved = saved
        self._story = tell
        self._arena = Arena()
        self._copier = Copier(protected)
        self._thread: list[threading.Thread] = []  # the save under way: none or one
        self._last: int | None = None  # step that was saved, or that this worker began with

    @property
    def busy(self) -> bool:
        return any(thread.is_alive() for thread in self._thread)

    def due(self, step: int) -> bool:
        """Whether the state after `step` steps should be saved. To be asked once for each step."""
        now = time.monotonic()
        self._pace.step(now, self.busy)
        if not self._every:
            return self._pace.due(now)
        if self._last is None:
            self._last = step - 1
        return step // self._every > self._last // self._every

    def enter(self, view: View) -> None:
        """The workers of a new view are known."""
        self._pace.members((m.worker, m.incarnation) for m in view.members)

    def at_boundary(self, step: int, view: View, me: WorkerId) -> None:
        """The state is that after `step` steps: copy this worker's share, and have it saved."""
        self._last = step
        rank, size, began = view.workers.index(me), len(view.members), time.monotonic()
        try:
            table_at, table_bytes = self._copy(rank, size)
            order = Order(
                step=step,
                view=view.number,
                token=token_for(self._job, view.number, step),
                rank=rank,
                size=size,
                table_at=table_at,
                table_bytes=table_bytes,
            )
            # Unless copies are still under way this worker may die now: its share will be saved.
            answers = None if self._copier.busy else send(self._orders, order, self._arena)
        except (OSError, MemoryError, WorldError) as error:
            self._tell(rank, f"step {step} is not saved: {first_line(error)}")
            return
        finally:  # or it would be due, and cost a copy, after every step
            now = time.monotonic()
            self._pace.began(now, now - began)
        thread = threading.Thread(target=self._await, args=(order, began, answers), daemon=True)
        self._thread = [thread]
        thread.start()

    def before_update(self) -> None:
        """The state is about to change: copies under way come first."""
        self._copier.hold()

    def finish(self, timeout_s: float) -> None:
        """Wait for a save under way."""
        for thread in self._thread:
            thread.join(timeout_s)

    def _copy(self, rank: int, size: int) -> tuple[int, int]:
        """Returns where the table of the copies is, and its bytes."""
        skeleton, names, tensors = state.capture_named(self._protected)
        readable = _readable(names)
        slices = share_of(tensors, rank, size)
        slots: list[Slot] = []
        at = 0
        if rank == 0:
            slots.append(Slot(name=SKELETON, start=0, size=len(skeleton)))
            at = len(skeleton)
        places = []
        for each in slices:
            at = -(-at // ALIGN) * ALIGN
            part = _part(tensors[each.tensor], each)
            slots.append(_slot(readable[each.tensor], tensors[each.tensor], each, at))
            places.append((at, part))
            at += part.nbytes
        table = table_of(slots)
        if at + len(table) > len(self._arena.memory):
            self._copier.release()
            self._arena.fit(at + len(table))
        memory = self._arena.memory
        if rank == 0:
            memory[: len(skeleton)] = skeleton
        self._copier.copy(memory, places)
        memory[at : at + len(table)] = table
        return at, len(table)

    def _await(self, order: Order, began: float, answers: int | None) -> None:
        step = order.step
        try:
            if answers is None:
                self._copier.arrived()
                answers = send(self._orders, order, self._arena)
            answer = read_answer(answers)
        except WorldError as error:
            answer = Answer(problem=str(error))
        if answer.problem:
            self._tell(order.rank, f"step {step} is not saved: {answer.problem}")
        elif answer.durable:
            self._saved(step, order.view)
            how_often = "" if self._every else f"; {self._pace}"
            took_s = time.monotonic() - began
            self._tell(order.rank, f"step {step} is saved, in {took_s:.2f} s{how_often}")

    def _tell(self, rank: int, text: str) -> None:
        """To the worker's log; once of all workers to the story."""
        say(text)
        if rank == 0:
            self._story(text)


def _readable(paths: list[str]) -> list[str]:
    """state['model']['layer.weight'] as model.layer.weight, unless two would be the same."""
    found = [_PLACE.sub(r".\2", path).removeprefix("state.") for path in paths]
    times = Counter(found)
    return [name if times[name] == 1 else path for name, path in zip(found, paths, strict=True)]


def _part(tensor: torch.Tensor, each: Slice) -> torch.Tensor:
    return tensor.detach()[each.start : each.stop] if each.cut else tensor.detach()


def _slot(name: str, tensor: torch.Tensor, each: Slice, at: int) -> Slot:
    part, below = _part(tensor, each), (0,) * (tensor.dim() - 1)
    return Slot(
        name=name,
        start=at,
        size=part.nbytes,
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(part.shape),
        offset=(each.start, *below) if each.cut else (),
        whole=tuple(tensor.shape) if each.cut else (),
    )


def say(text: str) -> None:
    """To the worker's log."""
    sys.stderr.write(f"holdfast: {text}\n")

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
from typing import Any, Protocol

import torch

from holdfast.engine.core.errors import WorldError, first_line
from holdfast.engine.core.ground.events import SaveEnded
from holdfast.engine.core.recurring import Recurring
from holdfast.engine.core.types import ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.state.store.manifest import SKELETON, name_in_shard
from holdfast.engine.state.store.snapshot import (
    ALIGN,
    Arena,
    Order,
    SaveAnswer,
    StagedItem,
    read_answer,
    send,
    table_of,
    token_for,
)
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.shares import Slice, share_of, share_selector
from holdfast.engine.train.checkpoint.staging import Copier
from holdfast.engine.train.checkpoint.state import Capture, NamedTensor

_PLACE = re.compile(r"\[('?)(.*?)\1\]")


TABLES_S = 600.0  # to wait for what servers save of tables, which may be much more than the rest


class RowSaves(Protocol):
    """Has servers of tables save their rows as further shares of a checkpoint."""

    def save(self, step: int, token: str, first: int) -> int:
        """Have all servers save the rows as they are now, as shares from number `first` on.

        Returns how many shares these are.
        """
        ...


class Saver:
    """Copies this worker's share of the state, and has the writer of its node save it.

    `orders`: to that writer. `tell` is called, in a thread, with how each save has ended.
    `whole_print` returns a print of the whole state, the same for all workers. `shard`: which of
    its worker's processes this is, and of how many. `capture`: the state, if not all is here.
    """

    def __init__(
        self,
        orders: socket.socket,
        job: str,
        protected: Mapping[str, Any],
        tell: Callable[[SaveEnded], None],
        whole_print: Callable[[], int],
        shard: tuple[int, int] = (0, 1),
        capture: Capture | None = None,
    ) -> None:
        self.rows: RowSaves | None = None
        self._whole_print = whole_print
        self._shard, self._procs = shard
        self._capture = capture or (lambda _: state.capture_named(protected))
        self._orders = orders
        self._job = job
        self._tell = tell
        self._failures = Recurring()
        self._arena = Arena()
        self._copier = Copier(protected)
        self._thread: list[threading.Thread] = []  # the save under way: none or one

    def copy(self, step: int, view: View, me: WorkerId, *, checked: bool = False) -> str:
        """Copy this worker's share of the state after `step` steps, and have it saved.

        `checked`: it is saved only if all members have the same state. The script stands still
        meanwhile. Returns why there is no copy, or "".
        """
        rank, size, began = view.rank(me), len(view.members), time.monotonic()
        try:
            table_at, table_bytes = self._copy(rank, size)  # those of shard 0 come first
            token = token_for(self._job, view.number, step)
            # The worker that commits the checkpoint counts them, since their number may change.
            rows = self.rows if self._shard == rank == 0 else None
            more = rows.save(step, token, self._procs * size) if rows is not None else 0
            order = Order(
                step=step,
                view=view.number,
                token=token,
                rank=self._shard * size + rank,
                size=self._procs * size + more,
                table_at=table_at,
                table_bytes=table_bytes,
                shard=self._shard,
                procs=self._procs,
                state_print=self._whole_print() if checked else 0,
                patience_s=TABLES_S if more else 0.0,
            )
            # Unless copies are still under way this worker may die now: its share will be saved.
            answers = None if self._copier.is_busy else send(self._orders, order, self._arena)
        except (OSError, MemoryError, WorldError) as error:
            self._complain(step, first_line(error))
            return first_line(error)
        thread = threading.Thread(target=self._await, args=(order, began, answers), daemon=True)
        self._thread = [thread]
        thread.start()
        return ""

    def wait_before_update(self) -> None:
        """Let copies under way come first: the state is about to change."""
        self._copier.hold()

    def finish(self, timeout_s: float) -> None:
        """Wait for a save under way."""
        for thread in self._thread:
            thread.join(timeout_s)

    def _copy(self, rank: int, size: int) -> tuple[int, int]:
        """Returns where the table of the copies is, and its bytes."""
        skeleton, found = self._capture(share_selector(size))
        readable = _readable_name([each.path for each in found])
        slices = share_of([each.tensor for each in found], rank, size)
        slots: list[StagedItem] = []
        at = 0
        if rank == 0:
            name = name_in_shard(SKELETON, self._shard)
            slots.append(StagedItem(name=name, start=0, size=len(skeleton)))
            at = len(skeleton)
        places = []
        for each in slices:
            at = -(-at // ALIGN) * ALIGN
            named, part = found[each.tensor], _part(found[each.tensor].tensor, each)
            alone = named.box is None or not named.box.first
            name = name_in_shard(readable[each.tensor], self._shard if alone else 0)
            slots.append(_slot(name, named, each, at))
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

    def _complain(self, step: int, problem: str) -> None:
        if text := self._failures.count_failure(f"this worker's share of step {step}", problem):
            say(text)

    def _await(self, order: Order, began: float, answers: int | None) -> None:
        try:
            if answers is None:
                self._copier.wait_for_copies()
                answers = send(self._orders, order, self._arena)
            answer = read_answer(answers)
        except WorldError as error:
            answer = SaveAnswer(problem=str(error))
        took_s = time.monotonic() - began
        if answer.problem:
            if order.rank > 0:  # the job's event log has those of the first share
                self._complain(order.step, answer.problem)
        elif (text := self._failures.forget_failures()) and answer.durable:
            say(f"step {order.step} is saved{text}")
        view = ViewNumber(order.view)
        first = order.rank == 0
        self._tell(SaveEnded(order.step, view, answer.durable, answer.problem, took_s, first))


def _readable_name(paths: list[str]) -> list[str]:
    """Write state['model']['layer.weight'] as model.layer.weight, unless two would be the same."""
    found = [_PLACE.sub(r".\2", path).removeprefix("state.") for path in paths]
    times = Counter(found)
    return [name if times[name] == 1 else path for name, path in zip(found, paths, strict=True)]


def _part(tensor: torch.Tensor, each: Slice) -> torch.Tensor:
    return tensor.detach()[each.start : each.stop] if each.cut else tensor.detach()


def _slot(name: str, named: NamedTensor, each: Slice, at: int) -> StagedItem:
    part, box = _part(named.tensor, each), named.box
    below = (0,) * (part.dim() - 1)
    offset, whole = (each.start, *below) if each.cut else (), tuple(named.tensor.shape)
    if box is not None:
        start = offset or (0,) * part.dim()
        offset = tuple(one + more for one, more in zip(box.offset, start, strict=True))
        whole = box.whole
    return StagedItem(
        name=name,
        start=at,
        size=part.nbytes,
        dtype=str(part.dtype).removeprefix("torch."),
        shape=tuple(part.shape),
        offset=offset,
        whole=whole if offset else (),
    )


def say(text: str) -> None:
    """Write a line to the worker's log."""
    print_plain(f"holdfast: {text}", file=sys.stderr)

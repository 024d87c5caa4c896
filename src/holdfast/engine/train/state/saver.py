"""Checkpoints of a running job: a copy at a step boundary, written while training continues.

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
from dataclasses import dataclass
from typing import Any

import torch

from holdfast.engine.core.errors import WorldError, first_line
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import SaveEnded, SinkKind, StateCopied
from holdfast.engine.core.replica.saves import SaveFailures
from holdfast.engine.core.types import Peer, ViewNumber
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
from holdfast.engine.train.checkpoint.state import Capture, NamedTensor
from holdfast.engine.train.state.share import Slice, StateShare, share_of, share_selector
from holdfast.engine.train.step.mover import StateSink

_PLACE = re.compile(r"\[('?)(.*?)\1\]")


SAVE_S_MAX = 600.0  # how long the end of a loop waits for a checkpoint under way
TABLES_S = 600.0  # to wait for what servers save of tables, which may be much more than the rest


@dataclass(frozen=True, slots=True)
class WriterLink:
    """Connects process `me`, one of its worker's `procs`, with the writer of its node."""

    orders: socket.socket
    job: str
    me: Peer
    procs: int = 1


class Saver(StateSink):
    """Copies this worker's share of the state, and has the writer of its node save it.

    `writer`: None without a store, or without a writer. `tell` is called, in a thread, when a save
    has ended. `fingerprint_whole` returns the fingerprint of the whole state, the same on all
    workers. `capture`: captures the state, if not all of it is here. `save_rows(step, token,
    first)`: has servers of tables save their rows as they are now, as further shares of a
    checkpoint, from number `first` on, and returns how many shares these are.
    """

    def __init__(
        self,
        writer: WriterLink | None,
        protected: Mapping[str, Any],
        tell: Callable[[SaveEnded], None],
        fingerprint_whole: Callable[[], int],
        capture: Capture | None = None,
        save_rows: Callable[[int, str, int], int] | None = None,
    ) -> None:
        self._writer = writer
        self._tell = tell
        self._fingerprint_whole = fingerprint_whole
        self._capture = capture or (lambda _: state.capture_named(protected))
        self._save_rows = save_rows
        self._failures = SaveFailures()
        self._arena = Arena()
        self._share = StateShare(protected)
        self._thread: list[threading.Thread] = []  # the save under way: none or one

    def copy(self, order: ef.CopyState) -> StateCopied:
        """Copy this worker's share of the state, and have it saved. The script stands still."""
        began, problem = time.monotonic(), ""
        try:
            if self._writer is None:
                self._capture(share_selector(len(order.view.members)))  # as all members do
                raise WorldError("there is no writer")
            self._have_saved(order, self._writer, began)
        except (OSError, MemoryError, WorldError) as error:
            problem = first_line(error)
            self._complain(order.step, problem)
        return StateCopied(SinkKind.STORE, order.step, time.monotonic() - began, problem)

    def _have_saved(self, order: ef.CopyState, writer: WriterLink, began: float) -> None:
        """Copy the share and send the writer an order. OSError, MemoryError, WorldError."""
        view, step, shard, procs = order.view, order.step, writer.me.shard, writer.procs
        rank, size = view.rank(writer.me.worker), len(view.members)
        table_at, table_bytes = self._copy(rank, size, shard)  # those of shard 0 come first
        token = token_for(writer.job, view.number, step)
        # The worker that commits the checkpoint counts them, since their number may change.
        save_rows = self._save_rows if shard == rank == 0 else None
        more = save_rows(step, token, procs * size) if save_rows is not None else 0
        share = Order(
            step=step,
            view=view.number,
            token=token,
            rank=shard * size + rank,
            size=procs * size + more,
            table_at=table_at,
            table_bytes=table_bytes,
            shard=shard,
            procs=procs,
            state_print=self._fingerprint_whole() if order.checked else 0,
            patience_s=TABLES_S if more else 0.0,
        )
        # Unless copies are still under way this worker may die now: its share will be saved.
        answers = None if self._share.is_busy else send(writer.orders, share, self._arena)
        args = writer.orders, share, began, answers
        thread = threading.Thread(target=self._await, args=args, daemon=True)
        self._thread = [thread]
        thread.start()

    def wait_before_update(self) -> None:
        """Wait for copies under way: the state is about to change."""
        self._share.wait_before_update()

    def finish(self) -> None:
        """Wait for a save under way: the loop has ended."""
        for thread in self._thread:
            thread.join(SAVE_S_MAX)

    def _copy(self, rank: int, size: int, shard: int) -> tuple[int, int]:
        """Returns where the table of the copies is, and its bytes."""
        skeleton, found = self._capture(share_selector(size))
        readable = _readable_name([each.path for each in found])
        slices = share_of([each.tensor for each in found], rank, size)
        slots: list[StagedItem] = []
        at = 0
        if rank == 0:
            name = name_in_shard(SKELETON, shard)
            slots.append(StagedItem(name=name, start=0, size=len(skeleton)))
            at = len(skeleton)
        places = []
        for each in slices:
            at = -(-at // ALIGN) * ALIGN
            named, part = found[each.tensor], _part(found[each.tensor].tensor, each)
            alone = named.box is None or not named.box.first
            name = name_in_shard(readable[each.tensor], shard if alone else 0)
            slots.append(_slot(name, named, each, at))
            places.append((at, part))
            at += part.nbytes
        table = table_of(slots)
        if at + len(table) > len(self._arena.memory):
            self._share.release()
            self._arena.fit(at + len(table))
        memory = self._arena.memory
        if rank == 0:
            memory[: len(skeleton)] = skeleton
        self._share.copy(memory, places)
        memory[at : at + len(table)] = table
        return at, len(table)

    def _complain(self, step: int, problem: str) -> None:
        if text := self._failures.count_failure(f"this worker's share of step {step}", problem):
            say(text)

    def _await(
        self, orders: socket.socket, order: Order, began: float, answers: int | None
    ) -> None:
        try:
            if answers is None:
                self._share.wait_for_copies()
                answers = send(orders, order, self._arena)
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

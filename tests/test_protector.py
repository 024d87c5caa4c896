"""What a worker does where its pieces cannot be made: it says so, and lets the room go."""

from __future__ import annotations

import os
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.core.errors import UserError
from holdfast.core.redundancy import read_redundancy
from holdfast.core.step import events as ev
from holdfast.core.types import AgentId, Incarnation, Member, View, ViewNumber, WorkerId
from holdfast.memory.arena import PieceArena
from holdfast.memory.pieces import PieceCoder
from holdfast.train.checkpoint import state
from holdfast.train.protection.protector import PieceTarget, Protector

BUDGET = 1 << 20
ME = WorkerId(0)
VIEW = View(
    number=ViewNumber(1),
    members=tuple(
        Member(worker=WorkerId(w), incarnation=Incarnation(1), agent=AgentId(f"n{w}"))
        for w in range(3)
    ),
    owners=(0,),
    resume_step=0,
    leader=0,
    ring=tuple(AgentId(f"n{w}") for w in range(3)),
)


class Told:
    """A protector of a small model, and what it says."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.events: list[ev.WorkerEvent] = []
        self.errors: list[BaseException] = []
        self.arena = PieceArena(os.memfd_create("test"), ME, budget)
        self.net = nn.Linear(30, 10)
        data: Any = None  # only gradients need it
        self.protector = Protector(
            PieceTarget(arena=self.arena, worker=ME),
            read_redundancy("replicate:1"),
            ({"net": self.net}, data),
            self.events.append,
            self.errors.append,
        )

    def protect(self) -> None:
        self.protector.begin(4, VIEW)
        self.protector.before_update()


def test_a_state_is_protected() -> None:
    told = Told()
    told.protect()
    assert told.events == [ev.StateProtected(4, "")]
    assert told.arena.used > 0


@pytest.mark.parametrize("redundancy", ["replicate:1", "replicate:2", "rs:2+1"])
def test_each_member_asks_for_the_bytes_that_its_pieces_are_made_of(redundancy: str) -> None:
    """Where each worker holds its share of the state only, nobody is sent anything else."""
    asked: list[Any] = []

    def capture(wanted: Any) -> Any:
        asked.append(wanted)
        return state.capture_named({"net": net})

    net, nothing = nn.Linear(30, 10), lambda _: None
    target = PieceTarget(arena=PieceArena(os.memfd_create("test"), ME, BUDGET), worker=ME)
    data: Any = None
    chosen = read_redundancy(redundancy)
    protector = Protector(target, chosen, ({"net": net}, data), nothing, nothing, capture)
    protector.begin(4, VIEW)
    protector.before_update()
    tensors = [torch.zeros(numel) for numel in (1000, 1, 300)]
    times = [torch.zeros(tensor.nbytes, dtype=torch.int64) for tensor in tensors]
    for rank in range(3):
        for tensor, start, stop in asked[0](b"", tensors, rank):
            assert 0 <= start < stop <= tensors[tensor].nbytes
            times[tensor][start:stop] += 1
    # Of each part every data piece is made of its own bytes, and a parity piece of all of them.
    once = chosen.pieces if chosen.data == 1 else 1 + chosen.parity
    assert all(bool((each == once).all()) for each in times), times


def test_a_state_that_changes_while_it_is_copied_is_not_kept(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    told, plain = Told(), PieceCoder.make

    def make(self: PieceCoder, *args: Any) -> bytes:
        digest = plain(self, *args)
        with torch.no_grad():
            told.net.weight.mul_(2.0)  # as a script that swaps averaged weights in
        return digest

    monkeypatch.setattr(PieceCoder, "make", make)
    told.protect()
    assert [type(event) for event in told.events] == [ev.StateProtected]
    assert "the script has changed the state while it was copied" in str(told.events)
    assert told.arena.used == 0
    monkeypatch.undo()
    told.protect()
    assert told.events[1:] == [ev.StateProtected(4, "")]


@pytest.mark.parametrize("error", [RuntimeError, OSError, MemoryError])
def test_a_state_whose_pieces_cannot_be_made_is_told(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    def make(*_: object) -> bytes:
        raise error("the device is out of memory")

    monkeypatch.setattr(PieceCoder, "make", make)
    told = Told()
    told.protect()
    assert told.events == [ev.StateProtected(4, "the device is out of memory")]
    assert told.arena.used == 0
    assert told.errors == []


def test_room_is_let_go_where_the_table_is_full(monkeypatch: pytest.MonkeyPatch) -> None:
    def put(*_: object) -> None:
        raise MemoryError("7 entries do not fit into the table of pieces")

    monkeypatch.setattr(PieceArena, "put", put)
    told = Told()
    told.protect()
    assert told.events == [ev.StateProtected(4, "7 entries do not fit into the table of pieces")]
    assert told.arena.used == 0


def test_a_budget_that_holds_too_little_is_the_users_error() -> None:
    told = Told(64)
    told.protect()
    (error,) = told.errors
    assert isinstance(error, UserError)
    assert "raise --memory-budget, or set --redundancy none" in str(error)
    assert told.events == []

"""A worker whose pieces cannot be made reports that, and frees the room."""

from __future__ import annotations

import os
from typing import Any, cast

import pytest
import torch
from torch import nn

from fake_gpu import fake_gpu, on_gpu
from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind
from holdfast.engine.core.redundancy import read_redundancy
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.state.memory.arena import ArenaReading, PieceArena
from holdfast.engine.state.memory.pieces import PieceCoder
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.state import NamedTensor
from holdfast.engine.train.state.replicator import PieceTarget, Replicator
from holdfast.engine.train.step.mover import ViewConnections
from step_data_kit import fill_step, make_step

__all__ = ["fake_gpu"]
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
_NONE: Any = None
IN_VIEW = ViewConnections(VIEW, _NONE, _NONE)


class Told:
    """Is a replicator of a small model, and its messages."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.events: list[ev.WorkerEvent] = []
        self.errors: list[BaseException] = []
        self.arena = PieceArena(os.memfd_create("test"), ME, budget)
        self.net = nn.Linear(30, 10)
        data: Any = None  # only gradients need it
        self.replicator = Replicator(
            PieceTarget(arena=self.arena, worker=ME),
            read_redundancy("replicate:1"),
            {"net": self.net},
            data,
            self.events.append,
            self.errors.append,
        )

    def protect(self) -> None:
        self.replicator.copy(ef.CopyState(SinkKind.MEMORY, 4, VIEW))
        self.replicator.wait_before_update()


def test_a_state_is_protected() -> None:
    told = Told()
    told.protect()
    assert told.events == [ev.StateProtected(4, "")]
    assert told.arena.used > 0


@pytest.mark.parametrize("redundancy", ["replicate:1", "replicate:2", "rs:2+1"])
def test_each_member_asks_for_the_bytes_that_its_pieces_are_made_of(redundancy: str) -> None:
    """Where each worker holds only its share of the state, it sends only these."""
    asked: list[Any] = []

    def capture(wanted: Any) -> Any:
        asked.append(wanted)
        return state.capture_named({"net": net})

    net, nothing = nn.Linear(30, 10), lambda _: None
    target = PieceTarget(arena=PieceArena(os.memfd_create("test"), ME, BUDGET), worker=ME)
    data: Any = None
    chosen = read_redundancy(redundancy)
    replicator = Replicator(target, chosen, {"net": net}, data, nothing, nothing, capture)
    replicator.copy(ef.CopyState(SinkKind.MEMORY, 4, VIEW))
    replicator.wait_before_update()
    tensors = [torch.zeros(numel) for numel in (1000, 1, 300)]
    times = [torch.zeros(tensor.nbytes, dtype=torch.int64) for tensor in tensors]
    for rank in range(3):
        for tensor, start, stop in asked[0](b"", tensors, rank):
            assert 0 <= start < stop <= tensors[tensor].nbytes
            times[tensor][start:stop] += 1
    # Each data piece of a part is made of its own bytes, and a parity piece of all of them.
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


def test_a_state_that_cannot_be_captured_is_told() -> None:
    """Other workers may have shares of it that cannot be reached."""
    told: list[Any] = []

    def capture(_: object) -> Any:
        raise WorldError("worker 1 cannot be reached")

    target = PieceTarget(arena=PieceArena(os.memfd_create("test"), ME, BUDGET), worker=ME)
    data: Any = None
    chosen = read_redundancy("replicate:1")
    replicator = Replicator(target, chosen, {}, data, told.append, told.append, capture)
    replicator.copy(ef.CopyState(SinkKind.MEMORY, 4, VIEW))
    replicator.wait_before_update()
    assert told == [ev.StateProtected(4, "worker 1 cannot be reached")]


@pytest.mark.parametrize("redundancy", ["replicate:2", "rs:2+1"])
def test_pieces_of_a_state_on_a_gpu_are_those_of_the_host(
    redundancy: str, fake_gpu: torch.device
) -> None:
    def pieces_of(tensors: list[torch.Tensor]) -> list[bytes]:
        descriptor, told, data = os.memfd_create("test"), [], cast(Any, None)
        target = PieceTarget(arena=PieceArena(descriptor, ME, BUDGET), worker=ME)
        found = [NamedTensor(f"{at}", tensor, private=True) for at, tensor in enumerate(tensors)]
        replicator = Replicator(
            target,
            read_redundancy(redundancy),
            {},
            data,
            told.append,
            told.append,
            lambda _: (b"skeleton", found),
        )
        replicator.copy(ef.CopyState(SinkKind.MEMORY, 4, VIEW))
        replicator.wait_before_update()
        assert told == [ev.StateProtected(4, "")]
        reading = ArenaReading(descriptor)
        table = reading.table()
        assert table is not None
        (entry,) = table.entries
        return [bytes(reading.piece(entry, at)) for at in range(len(entry.digests))]

    host = [torch.randn(size, dtype=torch.float64) for size in (50, 7, 300)]
    assert pieces_of([host[0], *map(on_gpu, host[1:])]) == pieces_of(host)


class Keeping:
    """A replicator that is to keep gradients of steps."""

    def __init__(self, budget: int = BUDGET) -> None:
        self.events: list[Any] = []
        self.step = make_step()
        self.arena = PieceArena(os.memfd_create("test"), ME, budget)
        self.replicator = Replicator(
            PieceTarget(arena=self.arena, worker=ME),
            read_redundancy("replicate:1"),
            {"net": nn.Linear(300, 31)},
            self.step,
            self.events.append,
            self.events.append,
        )

    def keep(self, index: int) -> bool:
        """Keep a step; return whether the replicator reports that it is nearly full."""
        fill_step(self.step, index)
        order = ef.KeepStep(SinkKind.MEMORY, VIEW.number, index)
        (told,) = self.replicator.keep(order, IN_VIEW)
        assert isinstance(told, ev.StepKept)
        assert (told.view, told.step) == (VIEW.number, index)
        return told.full

    def bytes_of_a_step(self) -> int:
        self.keep(0)
        return self.replicator._step_bytes


def test_a_budget_for_two_steps_is_enough_to_begin_with() -> None:
    """The size of the state shows only once it is protected."""
    needed = Keeping().bytes_of_a_step()
    keeping = Keeping(2 * needed)
    keeping.keep(1)
    assert keeping.events == []
    with pytest.raises(UserError, match="raise --memory-budget"):
        Keeping(2 * needed - 1).keep(1)


def test_the_protector_reports_that_it_is_nearly_full_while_one_more_state_fits() -> None:
    state_bytes, step_bytes = 12_500, 2_000  # a little more than they are
    keeping = Keeping(2 * state_bytes + 5 * step_bytes)
    keeping.replicator.copy(ef.CopyState(SinkKind.MEMORY, 0, VIEW))
    keeping.replicator.wait_before_update()
    (told,) = keeping.events
    assert told == ev.StateProtected(0, "")
    found = [keeping.keep(index) for index in range(6)]
    # With this state, three steps and two more, there is room for another state.
    assert found == [False, False, False, True, True, True]
    assert keeping.events == [told]


def test_a_step_for_which_a_gpu_has_no_memory_is_not_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    keeping = Keeping()

    def fail(*_: object) -> int:
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(keeping.replicator, "_put", fail)
    assert keeping.keep(0)
    (told,) = keeping.events
    assert isinstance(told, ev.EventNoted)
    assert told.text == "step 0 is not kept: CUDA out of memory"


def test_a_step_without_room_is_told_once_until_there_is_some_again() -> None:
    needed = -(-Keeping().bytes_of_a_step() // 64) * 64
    keeping = Keeping(3 * needed)
    assert [keeping.keep(index) for index in range(3)] == [False, True, True]
    assert keeping.events == []
    assert keeping.keep(3)
    (told,) = keeping.events
    assert isinstance(told, ev.EventNoted)
    assert (told.kind, told.text.split(":")[0]) == ("memory", "step 3 is not kept")
    assert keeping.keep(4)
    assert keeping.events == [told]
    keeping.replicator.forget(ef.Forget(SinkKind.MEMORY, VIEW.number, 3))
    assert not keeping.keep(5)
    assert [keeping.keep(index) for index in (6, 7, 8)] == [True, True, True]
    assert len(keeping.events) == 2

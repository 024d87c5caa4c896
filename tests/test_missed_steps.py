"""What members keep for one that is late, and how it receives that: two of them, in threads."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from holdfast.core.errors import Aborted
from holdfast.testing.memory_transport import MemoryNetwork
from holdfast.testing.transports import GroupMember, run_contract_in_threads
from holdfast.train.monitor import Monitor
from holdfast.train.step import missed_steps
from holdfast.train.step.buckets import Gradients
from holdfast.train.step.missed_steps import MissedSteps
from holdfast.train.step.reduction import piece_of
from holdfast.train.step.step_data import StepData
from holdfast.train.step.step_table import Buffers, StepTable

VRANKS, DONORS, LATE = 4, [0, 1], 2


def data() -> StepData:
    """Return what a worker shares of a step, with nothing in it."""
    model = nn.Sequential(nn.Linear(40, 30), nn.BatchNorm1d(30))
    gradients = Gradients(model.named_parameters(), VRANKS, Monitor())
    gradients.attach()
    buffers = Buffers([("model", model)])
    buffers.remember()
    rest: Any = None
    table = StepTable(VRANKS, len(list(model.parameters())))
    return StepData(gradients, table, buffers, rest, rest)


def fill(step: StepData, index: int, left: bool = True) -> None:
    """Fill it with what follows from the step's number alone."""
    dice = torch.Generator().manual_seed(index)
    for bucket in step.gradients.buckets:
        bucket.result.data.copy_(torch.randn(bucket.result.data.shape, generator=dice))
    for vrank in range(VRANKS):
        step.table.put(vrank, 0.5 * index, index, 7 + vrank, (vrank, 1))
    step.table.used.copy_(torch.rand(step.table.used.shape, generator=dice) > 0.5)
    if left:
        step.buffers.receive(torch.arange(50 + index, dtype=torch.uint8))
    step.reduced_in = 3


def content(step: StepData) -> list[Any]:
    results = [bucket.result.data.tolist() for bucket in step.gradients.buckets]
    left = None if step.buffers.left is None else step.buffers.left.tolist()
    rows = step.table.rows.tolist()
    return [results, rows, step.table.used.tolist(), left, step.reduced_in]


@pytest.mark.parametrize("left", [True, False])
def test_who_is_late_receives_each_step_as_it_was(left: bool) -> None:
    received: list[list[Any]] = []

    def member(me: GroupMember) -> None:
        step = data()
        missed = MissedSteps(step)
        transport = me.open("missed")
        if me.rank in DONORS:
            for index in range(5, 9):
                fill(step, index, left)
                missed.keep(index, lambda numel: piece_of(me.rank, len(DONORS), numel))
            missed.send(transport, LATE, range(6, 9), first=me.rank == DONORS[0])
        else:
            for _ in range(6, 9):
                missed.receive(transport, DONORS)
                received.append(content(step))
        me.meet("done")

    network = MemoryNetwork()
    complaints = run_contract_in_threads(member, network.transport, len(DONORS) + 1)
    assert complaints == []
    expected = data()
    for index, found in zip(range(6, 9), received, strict=True):
        fill(expected, index, left)
        assert found == content(expected)


class Taken:
    """Takes everything that is sent."""

    def exchange(self, sends: Any, receives: Any, tag: int) -> Taken:
        assert all(to == LATE for to, _ in sends)
        return self

    def wait(self) -> None:
        return


def is_kept(missed: MissedSteps, index: int) -> bool:
    transport: Any = Taken()
    try:
        missed.send(transport, LATE, range(index, index + 1), first=True)
    except Aborted:
        return False
    return True


def test_only_so_much_is_kept_and_the_newest_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step = data()
    piece_bytes = sum(bucket.result.data.nbytes for bucket in step.gradients.buckets)
    monkeypatch.setattr(missed_steps, "KEPT_BYTES_MAX", 6 * piece_bytes)
    missed = MissedSteps(step)
    for index in range(10):
        fill(step, index)
        missed.keep(index, lambda numel: slice(0, numel))
    assert [is_kept(missed, index) for index in range(11)] == [False] * 4 + [True] * 6 + [False]
    missed.forget()
    assert not any(is_kept(missed, index) for index in range(11))
    for index in range(20, 26):  # what was forgotten takes no room
        missed.keep(index, lambda numel: slice(0, numel))
    assert all(is_kept(missed, index) for index in range(20, 26))
    monkeypatch.setattr(missed_steps, "KEPT_BYTES_MAX", 0)
    missed.keep(26, lambda numel: slice(0, numel))
    assert [is_kept(missed, index) for index in range(20, 27)] == [False] * 3 + [True] * 4
    monkeypatch.setattr(missed_steps, "KEPT_BYTES_MAX", 1 << 40)
    monkeypatch.setattr(missed_steps, "STEPS_MISSED_MAX", 5)
    for index in (27, 28):
        missed.keep(index, lambda numel: slice(0, numel))
    assert [is_kept(missed, index) for index in range(23, 29)] == [False] + [True] * 5

"""Steps that members keep for a late one, and its receiving them: two members, in threads."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.engine.core.errors import Aborted
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import SinkKind
from holdfast.engine.core.types import ViewNumber
from holdfast.engine.train.state import step_image
from holdfast.engine.train.state.step_image import MissedSteps
from holdfast.lab.contracts.memory_transport import MemoryNetwork
from holdfast.lab.contracts.transports import GroupMember, run_contract_in_threads
from step_data_kit import (
    content_of,
    fill_step,
    keep_missed,
    make_step,
    receive_missed,
    send_missed,
)

DONORS, LATE = [0, 1], 2


@pytest.mark.parametrize("left", [True, False])
def test_a_late_worker_receives_each_step_as_it_was(left: bool) -> None:
    received: list[list[Any]] = []

    def member(me: GroupMember) -> None:
        step = make_step()
        missed = MissedSteps(step)
        transport = me.open("missed")
        if me.rank in DONORS:
            for index in range(5, 9):
                fill_step(step, index, left)
                keep_missed(missed, index, me.rank, len(DONORS))
            send_missed(missed, transport, range(6, 9), me.rank, len(DONORS))
        else:
            for _ in range(6, 9):
                receive_missed(missed, transport, len(DONORS))
                received.append(content_of(step))
        me.meet("done")

    network = MemoryNetwork()
    complaints = run_contract_in_threads(member, network.transport, len(DONORS) + 1)
    assert complaints == []
    expected = make_step()
    for index, found in zip(range(6, 9), received, strict=True):
        fill_step(expected, index, left)
        assert found == content_of(expected)


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
        send_missed(missed, transport, range(index, index + 1), donors=LATE)
    except Aborted:
        return False
    return True


def test_only_so_much_is_kept_and_the_newest_of_it(monkeypatch: pytest.MonkeyPatch) -> None:
    step = make_step()
    piece_bytes = sum(bucket.result.data.nbytes for bucket in step.gradients.buckets)
    monkeypatch.setattr(step_image, "KEPT_BYTES_MAX", 6 * piece_bytes)
    missed = MissedSteps(step)
    for index in range(10):
        fill_step(step, index)
        keep_missed(missed, index)
    assert [is_kept(missed, index) for index in range(11)] == [False] * 4 + [True] * 6 + [False]
    missed.forget(ef.Forget(SinkKind.LATE, ViewNumber(1)))
    assert not any(is_kept(missed, index) for index in range(11))
    for index in range(20, 26):  # forgotten steps take no room
        keep_missed(missed, index)
    assert all(is_kept(missed, index) for index in range(20, 26))
    monkeypatch.setattr(step_image, "KEPT_BYTES_MAX", 0)
    keep_missed(missed, 26)
    assert [is_kept(missed, index) for index in range(20, 27)] == [False] * 3 + [True] * 4
    monkeypatch.setattr(step_image, "KEPT_BYTES_MAX", 1 << 40)
    monkeypatch.setattr(step_image, "STEPS_MISSED_MAX", 5)
    for index in (27, 28):
        keep_missed(missed, index)
    assert [is_kept(missed, index) for index in range(23, 29)] == [False] + [True] * 5

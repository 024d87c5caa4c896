"""The uses of a worker's time: how each is counted, and when lines are written."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import Purpose
from holdfast.engine.core.types import Incarnation, WorkerId
from holdfast.engine.core.worker_status import Phase, WorkerStatus
from holdfast.engine.records.time_lines import (
    ProcessHeader,
    SpentLine,
    TimesWriter,
    TimeUse,
    class_seconds,
    find_quantile,
    read_times,
    step_class,
    times_path,
)
from holdfast.engine.train.data.sources import NoDataset
from holdfast.engine.train.script.script_thread import EndsAtStep, EndsWithEpoch
from holdfast.engine.train.step.time_sheet import (
    LEFT_MAX,
    LINE_S_MAX,
    LINE_S_MIN,
    TimeSheet,
    process_age_s,
)


class Clock:
    """Stands still until it is advanced."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def after(self, seconds: float) -> None:
        self.now += seconds


class Lines(list[SpentLine]):
    """Keeps lines, or refuses them."""

    refuses = False

    def write(self, line: SpentLine) -> bool:
        if not self.refuses:
            self.append(line)
        return not self.refuses

    def total(self) -> dict[TimeUse, float]:
        found: dict[TimeUse, float] = {}
        for line in self:
            for use, seconds in line.spent.items():
                found[use] = found.get(use, 0.0) + seconds
        return found


def make(age_s: float = 0.0) -> tuple[TimeSheet, Clock, Lines]:
    clock, lines = Clock(), Lines()
    return TimeSheet(lines.write, age_s, clock), clock, lines


@pytest.mark.parametrize("first", ["the script", "the control thread"])
def test_the_time_of_a_frozen_process_is_no_time_of_its_task(first: str) -> None:
    clock, lines = Clock(), Lines()
    sheet = TimeSheet(lines.write, 0.0, clock, cpu=lambda: 5.0)
    sheet.note_alive()
    sheet.enter(TimeUse.TASK)
    clock.after(0.5)
    sheet.note_alive()
    clock.after(15.0)  # SIGSTOP; then either thread runs first
    if first == "the control thread":
        sheet.note_alive()
    clock.after(0.25)
    sheet.enter(TimeUse.UPDATE)
    sheet.close()
    frozen_s = 15.0 if first == "the control thread" else 15.25
    assert lines.total() == {TimeUse.TASK: 15.75 - frozen_s, TimeUse.FROZEN: frozen_s}
    assert [line.spent for line in lines if TimeUse.FROZEN in line.spent] == [
        {TimeUse.FROZEN: frozen_s}
    ]


def test_a_busy_process_without_a_sign_of_life_is_not_frozen() -> None:
    """A call that holds the interpreter lock keeps the control thread from running."""
    clock, lines = Clock(), Lines()
    sheet = TimeSheet(lines.write, 0.0, clock, cpu=clock)
    sheet.note_alive()
    sheet.enter(TimeUse.TASK)
    clock.after(15.0)
    sheet.note_alive()
    sheet.close()
    assert lines.total() == {TimeUse.TASK: 15.0}


def status(phase: Phase = Phase.WAITING, hosted: tuple[int, ...] = (0,)) -> WorkerStatus:
    worker, incarnation = WorkerId(0), Incarnation(1)
    return WorkerStatus(worker=worker, incarnation=incarnation, phase=phase, hosted=hosted)


def compute(step: int, vrank: int, purpose: Purpose = Purpose.HOSTED) -> ef.Compute:
    return ef.Compute(step, vrank, purpose)


def test_a_life_from_the_start_to_the_end() -> None:
    sheet, clock, lines = make(age_s=2.0)
    clock.after(1.0)
    sheet.wait(status())
    clock.after(0.5)
    sheet.expect(TimeUse.STALL)  # views change before it has begun: it is still joining
    clock.after(0.25)
    sheet.take(ef.Begin(0), view=1)
    clock.after(0.125)
    sheet.take(compute(0, 3), view=1)
    clock.after(1.0)
    assert sheet.enter(TimeUse.DATA) is TimeUse.TASK
    clock.after(4.0)
    sheet.enter(TimeUse.TASK)
    sheet.wait(status())
    clock.after(0.0625)
    sheet.take(ef.Commit(0), view=1)
    clock.after(8.0)
    sheet.close()
    assert lines.total() == {
        TimeUse.STARTING: 3.0,
        TimeUse.JOINING: 0.75,
        TimeUse.UPDATE: 8.125,
        TimeUse.TASK: 1.0,
        TimeUse.DATA: 4.0,
        TimeUse.WAIT: 0.0625,
    }
    assert lines[-1].step == 1


def test_a_wait_becomes_a_stall_and_a_transfer_and_a_wait_again() -> None:
    sheet, clock, lines = make()
    sheet.take(ef.Begin(0), view=1)
    sheet.wait(status())
    for use in (TimeUse.STALL, TimeUse.TRANSFER, TimeUse.WAIT):
        clock.after(1.0)
        sheet.expect(use)
    clock.after(0.5)
    sheet.take(compute(0, 0), view=2)
    sheet.expect(TimeUse.STALL)  # it computes: only its next wait is a stall
    clock.after(0.25)
    sheet.wait(status())
    clock.after(2.0)
    sheet.close()
    assert lines.total() == {
        TimeUse.WAIT: 1.5,
        TimeUse.STALL: 3.0,
        TimeUse.TRANSFER: 1.0,
        TimeUse.TASK: 0.25,
    }


def test_a_worker_without_tasks_is_a_spare_and_a_finished_one_waits_for_the_end() -> None:
    sheet, clock, lines = make()
    sheet.take(ef.Begin(0), view=1)
    for one in (status(hosted=()), status(phase=Phase.BOUNDARY, hosted=()), status(Phase.ENDED)):
        sheet.wait(one)
        clock.after(1.0)
    sheet.close()
    assert lines.total() == {TimeUse.SPARE: 1.0, TimeUse.WAIT: 1.0, TimeUse.END: 1.0}


def test_tasks_after_a_change_of_the_view_or_twice_are_computed_again() -> None:
    sheet, clock, lines = make()

    def task(step: int, vrank: int, view: int, purpose: Purpose = Purpose.HOSTED) -> None:
        sheet.take(compute(step, vrank, purpose), view)
        clock.after(1.0)

    task(0, 0, view=1)
    task(0, 1, view=1)
    task(0, 2, view=2)  # its host was lost
    task(0, 1, view=2)  # an error was found
    task(1, 1, view=2)
    task(1, 7, 2, Purpose.AUDITED)
    task(1, 6, 2, Purpose.SPECULATIVE)
    sheet.close()
    found = lines.total()
    assert found == {TimeUse.TASK: 3.0, TimeUse.AGAIN: 2.0, TimeUse.CHECK: 2.0}


@pytest.mark.slow
def test_ordinary_steps_write_lines_at_growing_distances() -> None:
    sheet, clock, lines = make()
    sheet.take(ef.Begin(0), view=1)
    for step in range(200_000):
        clock.after(0.01)
        sheet.take(ef.Commit(step), view=1)
    assert sum(sum(line.steps.values()) for line in lines) >= 199_000
    assert len(lines) < 200 + 2000 * 8  # a line each 0.1 s for 200 s, then one in 2000
    distances = [line.seconds for line in lines[1:]]
    assert min(distances) >= LINE_S_MIN * 0.99
    assert max(distances) <= LINE_S_MAX + 0.02
    assert distances[-1] == pytest.approx(1.0, rel=0.1)  # 2000 s have passed


def test_times_that_the_disk_refuses_are_written_with_the_next_line() -> None:
    sheet, clock, lines = make()
    sheet.take(ef.Begin(0), view=1)
    lines.refuses = True
    for step in range(5):
        clock.after(1.0)
        sheet.take(ef.Commit(step), view=1)
    lines.refuses = False
    clock.after(1.0)
    sheet.take(ef.Commit(5), view=1)
    assert lines.total() == {TimeUse.UPDATE: 6.0}
    assert sum(lines[-1].steps.values()) == 5  # the first one began before anything was committed
    assert lines[-1].step == 6


@given(st.lists(st.tuples(st.integers(0, 9), st.floats(0, 100)), max_size=60))
def test_the_uses_sum_up_to_the_life(calls: list[tuple[int, float]]) -> None:
    sheet, clock, lines = make(age_s=1.5)
    orders = [ef.Begin(0), compute(0, 1), ef.Commit(0), ef.Release(0), ef.Adopt(1)]
    for number, seconds in calls:
        clock.after(seconds)
        match number:
            case 0 | 1 | 2 | 3 | 4:
                sheet.take(orders[number], view=1)
            case 5:
                sheet.wait(status())
            case 6:
                sheet.wait(status(phase=Phase.ENDED))
            case 7:
                sheet.expect(TimeUse.STALL)
            case 8:
                sheet.expect(TimeUse.TRANSFER)
            case _:
                sheet.enter(TimeUse.DATA)
    sheet.close()
    assert sum(lines.total().values()) == pytest.approx(clock.now - 100.0 + 1.5)


def test_a_file_is_read_as_it_was_written(tmp_path: Path) -> None:
    path = times_path(tmp_path, 3, 2)
    lines = [
        SpentLine(step=1, spent={TimeUse.TASK: 0.5, TimeUse.WAIT: 0.25}, steps={40: 2}),
        SpentLine(step=9, spent={TimeUse.STALL: 1.0}),
    ]
    for half in lines:  # two processes of one incarnation would be a defect: the header counts once
        writer = TimesWriter(path, ProcessHeader(worker=3, incarnation=2, began=1e9))
        assert writer.append(half)
    with open(path, "ab") as file:
        file.write(b'{"kind":"spent","step":1,"spent":{"task":-1}}\n{"kind":"spe')
    (found,) = read_times(tmp_path)
    assert (found.worker, found.incarnation, found.began) == (3, 2, 1e9)
    assert found.lines == lines
    assert found.ended == 1e9 + 1.75


def test_a_full_disk_stops_nobody(tmp_path: Path) -> None:
    (tmp_path / "times").write_text("a file where the folder should be")
    writer = TimesWriter(
        times_path(tmp_path, 0, 1), ProcessHeader(worker=0, incarnation=1, began=0.0)
    )
    assert not writer.append(SpentLine(step=0, spent={}))
    assert read_times(tmp_path) == []


def test_a_disk_that_is_full_for_a_while_costs_no_line(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, write = times_path(tmp_path, 0, 1), os.write
    writer = TimesWriter(path, ProcessHeader(worker=0, incarnation=1, began=5.0))
    lines = [SpentLine(step=step, spent={TimeUse.TASK: 1.0}) for step in range(5)]
    room = 0

    def write_some(file: int, data: bytes) -> int:
        if not room:
            raise OSError(errno.ENOSPC, "No space left on device")
        return write(file, bytes(data)[:room])

    monkeypatch.setattr(os, "write", write_some)
    assert not writer.append(lines[0])  # not even the header
    room = 10
    assert not writer.append(lines[1])  # half a line
    room = 1 << 20
    assert writer.append(lines[2])
    room = 7
    assert not writer.append(lines[3])
    room = 1 << 20
    assert writer.append(lines[4])
    (found,) = read_times(tmp_path)
    assert found.lines == [lines[2], lines[4]]


@given(st.floats(1e-4, 1e5))
def test_classes_of_steps_are_right_to_five_percent(seconds: float) -> None:
    middle = class_seconds(step_class(seconds))
    assert middle / seconds == pytest.approx(1.0, abs=0.05)


def test_quantiles() -> None:
    counts = {step_class(0.01): 90, step_class(0.1): 9, step_class(1.0): 1}
    for share, expected in ((0.5, 0.01), (0.9, 0.01), (0.99, 0.1), (1.0, 1.0)):
        assert find_quantile(counts, share) == pytest.approx(expected, rel=0.05)
    assert find_quantile({}, 0.5) == 0.0


def test_the_age_of_a_process_counts_from_its_start() -> None:
    code = (
        "import sys; from holdfast.engine.train.step.time_sheet import process_age_s as a;"
        "x = a(); sys.stdin.read(1); print(a() - x, a())"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
    ) as process:
        out, _ = process.communicate("x", timeout=60)
    grown, age = map(float, out.split())
    assert 0 <= grown < age
    assert process_age_s() > 0
    assert os.getpid() != process.pid


def test_lines_have_the_number_of_steps_that_the_loop_still_has() -> None:
    sheet, clock, lines = make()
    for left in (7, 6, 1 << 60, 0):
        sheet.note_left(left)
        clock.after(LINE_S_MAX)
        sheet.take(ef.Release(0), 1)
    assert [line.left for line in lines[-4:]] == [7, 6, LEFT_MAX, 0]


def test_the_steps_left_of_a_loop_over_epochs() -> None:
    ends = EndsWithEpoch(NoDataset(2, 0), 3, 10)
    assert [ends.count_left(step) for step in (0, 9, 10, 29)] == [30, 21, 20, 1]
    assert EndsAtStep(12).count_left(5) == 7

"""Tests that the time of rank states is counted apart, and that slow ones are named."""

from __future__ import annotations

import pytest

from holdfast.engine.records.time_lines import SpentLine, TimeUse
from holdfast.engine.train.script.rank_states import COST_S_MIN, TASKS_MIN, StateCosts
from holdfast.engine.train.step.time_sheet import TimeSheet


class Clock:
    """Is moved by the test."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


class Tasks:
    """Computes tasks that use two states, and keeps the notes on them."""

    def __init__(self, tensors: int = 1000) -> None:
        self.clock = Clock()
        self.notes: list[str] = []
        self.lines: list[SpentLine] = []
        self.times = TimeSheet(self._keep, clock=self.clock)
        self.costs = StateCosts(self.times, self.notes.append, self.clock)
        self._tensors = tensors

    def _keep(self, line: SpentLine) -> bool:
        self.lines.append(line)
        return True

    def run(self, own_s: float, states_s: dict[str, float], count: int = TASKS_MIN) -> None:
        for _ in range(count):
            self.times.enter(TimeUse.TASK)
            self.costs.begin_task()
            for name, seconds in states_s.items():
                with self.costs.surround(name):
                    self.clock.now_s += seconds
            self.clock.now_s += own_s
            self.costs.end_task(lambda name: (self._tensors, 40_000))


def test_a_state_that_takes_longer_than_its_tasks_is_named_once() -> None:
    tasks = Tasks()
    tasks.run(1.0, {"buffer": 1.5}, TASKS_MIN - 1)
    assert tasks.notes == [], "the first tasks warm up"
    tasks.run(1.0, {"buffer": 1.5})
    (text,) = tasks.notes
    assert text.startswith(
        "the rank state 'buffer' takes 1500.0 ms of each task, which takes 1000.0 ms without it"
    )
    assert "its 1000 tensors (40 kB)" in text
    assert "one tensor for each field" in text


def test_a_large_state_of_few_tensors_has_another_remedy() -> None:
    tasks = Tasks(tensors=2)
    tasks.run(1.0, {"buffer": 1.5})
    assert tasks.notes[0].endswith("give `value` no more than that")


def test_of_several_states_the_slowest_is_named() -> None:
    tasks = Tasks()
    tasks.run(1.0, {"one": 0.6, "other": 0.7})
    assert ["'other'" in text for text in tasks.notes] == [True]


@pytest.mark.parametrize(
    ("own_s", "states_s"), [(1.0, 0.9), (COST_S_MIN / 8, COST_S_MIN / 2), (1.0, None)]
)
def test_a_cheap_state_is_not_named(own_s: float, states_s: float | None) -> None:
    tasks = Tasks()
    tasks.run(own_s, {} if states_s is None else {"buffer": states_s}, 3 * TASKS_MIN)
    assert tasks.notes == []


def test_the_time_of_states_is_no_time_of_tasks() -> None:
    tasks = Tasks()
    tasks.run(1.0, {"buffer": 0.25}, 4)
    tasks.times.close()
    spent = [line.spent for line in tasks.lines]
    assert sum(each.get(TimeUse.STATES, 0.0) for each in spent) == 1.0
    assert sum(each.get(TimeUse.TASK, 0.0) for each in spent) == 4.0

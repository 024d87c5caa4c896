"""Followed logs of many events: old routine ones are dropped, and no figure changes by that."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.records.goodput import share_times
from holdfast.engine.records.incidents import add_utc, list_incidents
from holdfast.engine.records.run_tail import RunTail
from holdfast.engine.records.time_lines import ProcessTimes, SpentLine, TimeUse

ROUTINE = ("slow", "copy", "save", "store", "balance")
NEWEST = 20


class LongRun:
    """Makes up the events of a run whose coordinator was replaced now and then."""

    def __init__(self, seed: int) -> None:
        self._chance = random.Random(seed)
        self._numbers: dict[int, int] = {}
        self._term, self._time, self._step = 1, 1e9, 0
        self.events: list[dict[str, Any]] = []

    def _tell(self, kind: str, *causes: str, **more: Any) -> str:
        number = self._numbers[self._term] = self._numbers.get(self._term, 0) + 1
        self._time += self._chance.random()
        name = f"{self._term}.{number}"
        said = {"time": self._time, "kind": kind, "text": f"{kind} {name}", "id": name}
        self.events.append({**said, "causes": causes, **more})
        return name

    def _tell_routine(self) -> None:
        for _ in range(self._chance.randrange(30)):
            self._tell(self._chance.choice(ROUTINE), worker=self._chance.randrange(4))

    def go_on(self) -> None:
        """Add a stretch of routine, and a fault with what follows from it."""
        chance = self._chance
        self._step += chance.randrange(1, 50)
        self._tell_routine()
        if chance.random() < 0.3:  # a change without a cause
            self._tell("view", step=max(self._step - chance.randrange(9), 0))
        worker = chance.randrange(4)
        first = self._tell(chance.choice(("silent", "wrong", "slow")), worker=worker)
        if chance.random() < 0.3:
            return
        lost = self._tell(chance.choice(("lost", "leave")), first, worker=worker)
        self._tell_routine()
        if chance.random() < 0.3:  # the next one knows of no causes, and records the loss again
            self._term += 1
            lost = self._tell("lost", worker=worker)
        view = self._tell("view", lost, step=max(self._step - chance.randrange(5), 0))
        self._tell("resumed", view, cost={"pause_s": chance.random(), "tasks": 1})
        if chance.random() < 0.5:
            self._tell("join", worker=worker)

    def processes(self) -> list[ProcessTimes]:
        """Return times of four workers from the second event on; some of them end early."""
        began, count = self.events[1]["time"], 40
        found = []
        for worker in range(4):
            pace = (self._time - began) / count * (1 - worker / 10)
            lines = [
                SpentLine(step=self._step * (n + 1) // count, spent={TimeUse.TASK: pace})
                for n in range(count)
            ]
            found.append(ProcessTimes(worker, 1, began, lines=lines))
        return found


@pytest.mark.parametrize("seed", range(20))
def test_incidents_and_goodput_of_a_long_log_are_those_of_all_its_events(
    tmp_path: Path, seed: int
) -> None:
    run, tail = LongRun(seed), RunTail(tmp_path, NEWEST)
    for _ in range(40):
        written = len(run.events)
        run.go_on()
        with open(tmp_path / "events.jsonl", "a") as log:
            log.writelines(json.dumps(each) + "\n" for each in run.events[written:])
        assert [each["id"] for each in tail.look()] == [e["id"] for e in run.events[written:]]
    incidents = list_incidents(run.events)
    assert [each.to_dict() for each in list_incidents(tail.events)] == [
        {**each.to_dict(), "events": [*map(add_utc, _as_read(each.events))]} for each in incidents
    ]
    full, kept = (share_times(run.processes(), each) for each in (run.events, tail.events))
    assert full is not None
    assert kept is not None
    assert kept.to_dict() == full.to_dict()
    routine = [each for each in tail.events if each["kind"] in ROUTINE]
    assert len(routine) < 3 * NEWEST < len([e for e in run.events if e["kind"] in ROUTINE])
    assert tail.events[-NEWEST:] == _as_read(run.events[-NEWEST:])


def _as_read(events: Any) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(json.dumps(list(events)))
    return found


def test_a_replaced_log_is_kept_from_its_own_beginning(tmp_path: Path) -> None:
    log, run, tail = tmp_path / "events.jsonl", LongRun(1), RunTail(tmp_path, NEWEST)
    for _ in range(30):
        run.go_on()
    log.write_text("".join(json.dumps(each) + "\n" for each in run.events))
    tail.look()
    log.write_text("".join(json.dumps(each) + "\n" for each in run.events[:30]))
    tail.look()
    assert tail.was_replaced
    assert tail.events[-NEWEST:] == _as_read(run.events[:30][-NEWEST:])
    assert tail.events[0] == _as_read(run.events[:1])[0]

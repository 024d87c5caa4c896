"""Records the events of a coordinator, for tests that read them again."""

from __future__ import annotations

from pathlib import Path

import pytest

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.membership import decision_loop
from holdfast.engine.core.membership.coordinator import CoordinatorMachine
from holdfast.engine.core.membership.coordinator_events import (
    ReportArrived,
    StopRequested,
)
from holdfast.engine.core.types import AgentId, Incarnation, Tick
from holdfast.engine.runtime.coordinate.black_box import Recorder
from support import SPEC

handle = decision_loop.DecisionLoop.handle


def report(seq: int) -> ReportArrived:
    return ReportArrived(
        AgentReport(agent=AgentId("a"), incarnation=Incarnation(1), seq=seq, slots=0)
    )


def record(folder: Path, events: int = 5, term: int = 3) -> CoordinatorMachine:
    """Record the messages that a coordinator gets from one node without workers."""
    machine = CoordinatorMachine(SPEC.policy(), term, None, 10.0)
    it = Recorder(folder, term, pytest.fail)
    it.begin(machine, 10.0)
    now = 10.0
    for event in [Tick(), *map(report, range(1, events - 1)), StopRequested("enough")]:
        it.hear(event, now)
        it.note(machine, handle(machine, event, now), now)
        now += 0.25
    it.close()
    return machine

"""The driver of a fleet carries out decisions between a cluster manager and a job, once each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.engine.core.errors import WorldError
from holdfast.engine.core.fleet.fleet import FleetMachine
from holdfast.engine.core.fleet.placements import (
    FleetPolicy,
    Holding,
    NodeSeen,
    Placement,
    PlacementId,
)
from holdfast.engine.fleet import fleet_process
from holdfast.engine.fleet.cluster_manager import StoppedByOperator
from holdfast.engine.fleet.fleet_process import FleetDriver, FleetPace

LOOKS = 5  # looks at a manager that has ended all placements, while the job saves


class EndedManager:
    """Is a manager whose operator has ended the job's placements."""

    def __init__(self) -> None:
        self.looks = 0

    async def observe(self) -> Sequence[Placement]:
        self.looks += 1
        raise StoppedByOperator("Slurm preempts job 7")


class SavingJob:
    """Is a job that ends after `LOOKS` looks at the manager, once it was asked to stop."""

    def __init__(self, manager: EndedManager, failures: int) -> None:
        self.stops: list[str] = []
        self._manager = manager
        self._failures = failures

    def is_over(self) -> bool:
        return bool(self.stops) and self._manager.looks >= LOOKS

    async def nodes(self) -> tuple[NodeSeen, ...]:
        return ()

    async def note_awaited(self, text: str) -> None:
        assert text == ""

    async def stop(self, reason: str) -> None:
        if self._failures:
            self._failures -= 1
            raise WorldError("the coordinator is away")
        self.stops.append(reason)


@pytest.mark.parametrize("failures", [0, 2])
def test_a_job_whose_placements_are_ended_is_asked_to_stop_once(failures: int) -> None:
    """A second order would end it at once, without its last checkpoint."""
    manager, told = EndedManager(), list[str]()
    job = SavingJob(manager, failures)
    doubles: tuple[Any, Any] = (manager, job)
    machine = FleetMachine(FleetPolicy(prefix="hf-", nodes=1, nodes_max=1), "e")
    pace = FleetPace(observe_s=0.01, hear_s=0.01)

    def order(*_: object) -> Any:
        raise AssertionError("nothing is asked for")

    asyncio.run(
        asyncio.wait_for(FleetDriver(machine, *doubles, order, told.append, pace).run(), 60)
    )
    assert manager.looks >= LOOKS
    assert job.stops == ["Slurm preempts job 7"]
    assert told.count("Slurm preempts job 7: the job ends") == 1


class ShortManager:
    """Is a manager that does not give the job's only node for some time."""

    def __init__(self) -> None:
        self.given = self.ended = False

    async def release(self, id_: PlacementId, handle: str) -> None:
        self.ended = True

    async def observe(self) -> Sequence[Placement]:
        if self.ended:
            return ()
        holding = Holding.RUNNING if self.given else Holding.WAITING
        return [Placement(id=PlacementId("hf-e-1"), handle="7", holding=holding, why="Resources")]


class PatientJob:
    """Is a job whose node is given once its status has shown that it waits."""

    def __init__(self, manager: ShortManager) -> None:
        self.shown: list[str] = []
        self._manager = manager

    def is_over(self) -> bool:
        return self.shown[-1:] == [""] and self._manager.given

    async def nodes(self) -> tuple[NodeSeen, ...]:
        return ()

    async def note_awaited(self, text: str) -> None:
        self.shown += [text] if self.shown[-1:] != [text] else []
        self._manager.given = self._manager.given or bool(text)


def test_what_a_job_waits_for_is_in_its_status_while_it_waits(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(fleet_process, "PATIENCE_S", 0.0)
    manager, told = ShortManager(), list[str]()
    job = PatientJob(manager)
    doubles: tuple[Any, Any] = (manager, job)
    machine = FleetMachine(FleetPolicy(prefix="hf-", nodes=1, nodes_max=1), "e")
    pace = FleetPace(observe_s=0.01, hear_s=0.01, release_s=0.01)

    def order(*_: object) -> Any:
        raise AssertionError("nothing is asked for")

    driver = FleetDriver(machine, *doubles, order, told.append, pace, "Slurm")
    asyncio.run(asyncio.wait_for(driver.run(), 60))
    line = "Slurm gives 0 of 1 nodes; Resources"
    assert [text for text in job.shown if text] == [line]
    assert job.shown[-1] == ""
    assert told.count(line) == 1

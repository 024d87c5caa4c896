"""The driver of a fleet carries out decisions between a cluster manager and a job, once each."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.core.errors import WorldError
from holdfast.core.fleet.fleet import FleetMachine
from holdfast.core.fleet.placements import FleetPolicy, NodeSeen, Placement
from holdfast.launch.cluster_manager import StoppedByOperator
from holdfast.launch.fleet_driver import FleetDriver, FleetPace

LOOKS = 5  # of a manager that has ended all placements, while the job saves


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

"""Defines the contract between a job and a cluster manager: the duties of an adapter, and its plan.

An adapter makes no decision. It remembers only facts that the manager has as well: a new adapter of
the same job gives the same answers. Its contract is written down as tests, in
holdfast.lab.contracts.cluster_contract. The plan is a file in the run directory.
"""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Protocol

from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.core.fleet.placements import FleetPolicy, Placement, PlacementId
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.runtime.rundir import RunDir, write_json
from holdfast.engine.state.store.regular_files import read_json


class StoppedByOperator(WorldError):
    """Reports that an operator of the cluster has ended a job's application, with all placements.

    The job ends, instead of asking for other placements.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOrder:
    """Describes a placement that is wanted: one process, on a host of its own.

    The manager should not start it again when it ends. `environment` is added to what the host
    has; it may hold the job's secret, so it must not be shown to other users.
    """

    id: PlacementId
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    #: Hosts that it must not get, as listings name them.
    avoid: tuple[str, ...] = ()


class ClusterManager(Protocol):
    """Asks one cluster manager for the nodes of one job.

    Each method raises WorldError or OSError when the manager cannot be asked or refuses; then the
    request may have been carried out or not. Each may be cancelled.
    """

    async def observe(self) -> Sequence[Placement]:
        """List all placements of this job that are waiting or running, with pending notices.

        Ended placements may be listed as such, with the host that they had, or not at all.
        It must never leave out a placement that was there when it was called, so a manager that is
        away is an error, not an empty list. StoppedByOperator: no placement is left, and none may
        be asked for. A placement that waits may have the reason (`Placement.why`).
        """
        ...

    async def request(self, order: PlacementOrder) -> None:
        """Ask for a placement; return once the manager has taken the request in.

        An order with an id that the manager still knows is the same request, made again: it must
        not make a second placement.
        """
        ...

    async def release(self, id_: PlacementId, handle: str) -> None:
        """End a placement and all its processes, whatever becomes of its host; do not wait.

        It is no error if there is none (any more).
        """
        ...

    async def close(self) -> None:
        """Close what the adapter holds open; placements stay."""
        ...


PLAN_FILE = "fleet.json"
STILL_RUNNING = 75  # exit status of a job's command while an earlier one still runs the job


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Keeps the settings of one job's fleet for its whole life, without the secret.

    `settings`: of this manager's adapter. `join`: the coordinator's address for agents.
    `run_dir`: as the nodes see it. `drain_s`: a node is left at least this long before it is taken.
    """

    manager: str
    run_dir: str
    nodes: int
    nodes_max: int
    join: str = ""
    drain_s: float = 60.0
    tls: str = ""
    agent_options: tuple[str, ...] = ()
    settings: Mapping[str, str] = field(default_factory=dict)

    def policy(self, spec: JobSpec) -> FleetPolicy:
        return FleetPolicy(
            prefix=job_prefix(spec.job),
            nodes=self.nodes,
            nodes_max=self.nodes_max,
            drain_lead_s=self.drain_s,
            lost_s=2 * spec.nodes.lease_s,
        )

    def order(self, id_: PlacementId, avoid: Sequence[str]) -> PlacementOrder:
        """Make the order of one more node, whose agent has the placement's id as its name."""
        return PlacementOrder(id=id_, command=self.agent(id_), avoid=tuple(avoid))

    def agent(self, id_: PlacementId) -> tuple[str, ...]:
        """Return the command of an agent whose node shares the run directory."""
        return (
            *(sys.executable, "-m", "holdfast.cli.main", "agent", "--join", self.join),
            *("--name", id_, "--run-dir", self.run_dir),
            *(("--tls", self.tls) if self.tls else ()),
            *self.agent_options,
        )

    def write(self) -> None:
        write_json(Path(self.run_dir, PLAN_FILE), asdict(self))


def read_plan(run_dir: RunDir) -> FleetPlan:
    """Read the plan of a job. UserError if there is none, or it cannot be read."""
    path = run_dir.path / PLAN_FILE
    try:
        return FleetPlan(**read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise UserError(f"{path} is no plan of a cluster's job: {error}") from None


def job_prefix(job: str) -> str:
    """Return the beginning of the names of all of a job's placements, fit for any manager."""
    return f"hf-{job[:8]}-"

"""Describes what a job asks of a cluster manager: the file in its run directory, and its orders."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.fleet.placements import FleetPolicy, PlacementId
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import PlacementOrder
from holdfast.engine.runtime.rundir import RunDir, write_json
from holdfast.engine.state.store.regular_files import read_json

PLAN_FILE = "fleet.json"
STILL_RUNNING = 75  # exit status of a job's command while an earlier one still runs the job


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetPlan:
    """Keeps the settings of one job's fleet for its whole life, without the secret.

    `settings`: those of this manager's adapter. `join`: the coordinator's address for agents.
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
    """Return what begins the names of all of a job's placements; good as any manager's name."""
    return f"hf-{job[:8]}-"

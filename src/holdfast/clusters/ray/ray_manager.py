"""Gets a job's nodes from Ray: each is a detached actor, whose name is the placement's id.

Ray makes no second actor of a name. It needs no placement groups: a group and its actor would be
two requests, between which we might end, and a group outlives the node that it was for.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

from holdfast.clusters.ray.ray_link import link_to
from holdfast.clusters.ray.ray_tables import RayTables, read_tables
from holdfast.engine.core.fleet.placements import Placement, PlacementId
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import PlacementOrder
from holdfast.engine.fleet.fleet_plan import FleetPlan, job_prefix
from holdfast.engine.net.secret import VARIABLE, read_run_dir

SHARED = "shared"


class RayAnswers(Protocol):
    """Answers the questions that ray_driver.py knows. Refused, or Unreachable."""

    def ask(self, word: str, *given: Any) -> Any: ...

    def close(self) -> None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class RayShare:
    """Sets each agent's share of its node. `environment` is added to that of orders.

    `label`: the label of nodes whose values are failure domains.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    environment: Mapping[str, str] = field(default_factory=dict)
    label: str = ""

    @property
    def resources(self) -> dict[str, float]:
        return {"CPU": self.cpus, **({"GPU": self.gpus} if self.gpus else {})}


class RayManager:
    """Starts, lists and kills the actors whose names begin with `prefix`.

    What agents print goes to files in `folder`, on their own nodes.
    """

    def __init__(self, link: RayAnswers, prefix: str, folder: Path, share: RayShare) -> None:
        self._link = link
        self._prefix = prefix
        self._folder = folder
        self._share = share

    async def observe(self) -> Sequence[Placement]:
        tables = await self._tables()
        label = self._share.label
        return tables.placements(self._prefix, time.monotonic(), time.time(), label)

    async def request(self, order: PlacementOrder) -> None:
        tables = await self._tables()
        given = {"HOLDFAST_PLACEMENT": order.id, **self._share.environment, **order.environment}
        wanted = {
            "name": order.id,
            "command": order.command,
            "environment": given,
            "output": str(self._folder / f"{order.id}.txt"),
            "cpus": self._share.cpus,
            "gpus": self._share.gpus,
            "unit": self._prefix,
            "avoid": tables.ids(order.avoid),
        }
        await self._ask("start", wanted)

    async def release(self, id_: PlacementId, handle: str) -> None:
        await self._ask("end", id_, handle)

    async def close(self) -> None:
        self._link.close()

    async def _tables(self) -> RayTables:
        return read_tables(await self._ask("tables"))

    async def _ask(self, word: str, *given: Any) -> Any:
        return await asyncio.to_thread(self._link.ask, word, *given)


def open_manager(plan: FleetPlan, spec: JobSpec) -> RayManager:
    """Open the manager of a plan, on a machine that is in the cluster."""
    logs, settings = Path(plan.run_dir, "logs"), plan.settings
    secret = {} if settings[SHARED] else {VARIABLE: read_run_dir(Path(plan.run_dir)).hex()}
    share = RayShare(
        cpus=float(settings["cpus"]),
        gpus=float(settings["gpus"]),
        environment=secret,
        label=settings["domain"],
    )
    link = link_to(settings["address"], logs / "ray.txt")
    return RayManager(link, job_prefix(spec.job), logs, share)

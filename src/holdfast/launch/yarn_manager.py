"""Gets a job's nodes from YARN: each is a container of one service, by YARN's services API.

The service has one component, whose containers YARN spreads over hosts and replaces as they end.
Orders are in the job's order book; a container claims one of them (yarn_place.py) and is that node
for as long as it lasts. A container in place of one that has ended is another node. Nodes are given
back by naming their container's instance, since a smaller number would end the newest ones.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.core.errors import Refused, Unreachable
from holdfast.core.fleet.placements import Holding, Notice, Placement, PlacementId
from holdfast.core.job_spec import JobSpec
from holdfast.launch.cluster_manager import PlacementOrder
from holdfast.launch.fleet_plan import FleetPlan, job_prefix
from holdfast.launch.order_book import ORDERS, BookEntry, OrderBook
from holdfast.launch.rest_link import NOT_JSON, UNKNOWN, RestAccess, RestAnswer, RestLink

NAME = "YARN"
SERVICES, NODES, VERSION = "/app/v1/services", "/ws/v1/cluster/nodes", "/app/v1/version"
COMPONENT = "node"
OVER = ("STOPPED", "FAILED", "SUCCEEDED")  # states of a service, and of a container
NO_RACK = "/default-rack"  # for nodes on a rack unknown to YARN
DECOMMISSIONED = "YARN decommissions its node"
IDLE_S = 30.0  # a container without an order is given back after this time
NEVER = "1000000"
# A long job must not end for failures that it survives; nor may YARN start a node again in place.
PROPERTIES = {
    "yarn.service.container-failure-per-component.threshold": NEVER,
    "yarn.service.node-blacklist.threshold": NEVER,
    "yarn.service.am-restart.max-attempts": NEVER,
    "yarn.service.container-failure.retry.max": "0",
}


@dataclass(frozen=True, slots=True, kw_only=True)
class YarnService:
    """Describes the service of one job, whose containers run `command`."""

    name: str
    command: str
    queue: str = ""
    cpus: int = 1
    memory_mb: int = 1024
    gpus: int = 0
    principal: str = ""
    keytab: str = ""

    @property
    def path(self) -> str:
        return f"{SERVICES}/{self.name}"

    def definition(self, containers: int) -> dict[str, Any]:
        """Return the document to post, by which YARN starts the service."""
        resource: dict[str, Any] = {"cpus": self.cpus, "memory": str(self.memory_mb)}
        if self.gpus:
            resource["additional"] = {"yarn.io/gpu": {"value": self.gpus}}
        apart = {"type": "ANTI_AFFINITY", "scope": "NODE", "target_tags": [COMPONENT]}
        keys = {"principal_name": self.principal, "keytab": self.keytab}
        return {
            "name": self.name,
            "version": "1",
            "lifetime": -1,
            **({"queue": self.queue} if self.queue else {}),
            **({"kerberos_principal": keys} if self.principal else {}),
            "configuration": {"properties": PROPERTIES},
            "components": [
                {
                    "name": COMPONENT,
                    "number_of_containers": containers,
                    "launch_command": self.command,
                    "resource": resource,
                    "restart_policy": "ALWAYS",
                    "placement_policy": {"constraints": [apart]},
                }
            ],
        }


class YarnManager:
    """Asks for, lists and gives back the containers of one service, by the orders in `book`."""

    def __init__(self, link: RestLink, service: YarnService, book: OrderBook) -> None:
        self._link = link
        self._service = service
        self._book = book
        self._alone = asyncio.Lock()
        self._idle_since: dict[str, float] = {}  # by container

    @property
    def name(self) -> str:
        """Return the name of the service."""
        return self._service.name

    async def observe(self) -> Sequence[Placement]:
        async with self._alone:
            # The book first: a container that has claimed an order by now is in the later answer.
            entries = self._book.entries()
            found = await self._find()
            await self._settle(found, entries)
            live, nodes = _containers(found), await self._nodes()
        claimed = [e for e in entries if e.holder and _is_of(found, e.holder)]
        if claimed and not _is_over(found) and not _has_master(found):
            raise Unreachable(f"the master of service {self.name} is being started")
        return [
            *(_placement(entry, nodes, running=entry.holder in live) for entry in claimed),
            *(_placement(entry, nodes, running=None) for entry in entries if entry.waits),
        ]

    async def request(self, order: PlacementOrder) -> None:
        async with self._alone:
            self._book.add(order)
            await self._settle(await self._find(), self._book.entries())

    async def release(self, id_: PlacementId, handle: str) -> None:
        async with self._alone:
            entry = self._book.find(id_)
            if entry is None or (entry.waits and self._book.withdraw(id_)):
                return
            entry = self._book.find(id_) or entry
            container = _containers(await self._find()).get(entry.holder or "")
            if container is not None:
                await self._decommission([container])

    async def close(self) -> None:
        pass

    # ------------------------------------------------------------ the service

    async def create(self, containers: int) -> None:
        """Have YARN start the service. Refused, with the reason that YARN gives."""
        answer = await self._link.ask("POST", SERVICES, self._service.definition(containers))
        if not answer.accepted:
            raise Refused(str(self._link.failure(answer)))  # also by status 500

    async def destroy(self) -> None:
        """Have YARN end the service and forget it, if there is one."""
        if await self._find() is not None:
            await self._link.ask_or_raise("DELETE", self._service.path)

    async def _find(self) -> dict[str, Any] | None:
        """Return YARN's description of the service; None if there is no service."""
        answer = await self._link.ask("GET", self._service.path)
        if answer.status == UNKNOWN and answer.document is not NOT_JSON:
            return None
        if not answer.accepted:
            raise self._link.failure(answer)
        found: dict[str, Any] = answer.document
        return found

    async def _settle(self, found: dict[str, Any] | None, entries: Sequence[BookEntry]) -> None:
        """Have a container for each order and node, and more where hosts are avoided."""
        waiting = [entry for entry in entries if entry.waits]
        if found is None or _is_over(found):
            if waiting:
                await self.destroy()
                await self.create(len(waiting))
            return
        if not _has_master(found):
            return  # the next look asks for more
        live, holders = _containers(found), {entry.holder for entry in entries}
        idle = [each for id_, each in live.items() if id_ not in holders]
        left = list(waiting)
        for each in idle:
            fit = next((e for e in left if each["bare_host"] not in e.order.avoid), None)
            if fit is not None:
                left.remove(fit)
        number = int(found["components"][0]["number_of_containers"])
        short = len(left) - max(number - len(live), 0)
        if short > 0:
            body = {"name": COMPONENT, "number_of_containers": number + short}
            await self._link.ask_or_raise(
                "PUT", f"{self._service.path}/components/{COMPONENT}", body
            )
        await self._drop([] if waiting else idle)

    async def _drop(self, idle: Sequence[Mapping[str, Any]]) -> None:
        """Give back containers that nobody has wanted for a while."""
        now = time.monotonic()
        self._idle_since = {each["id"]: self._idle_since.get(each["id"], now) for each in idle}
        old = [each for each in idle if now >= self._idle_since[each["id"]] + IDLE_S]
        if old:
            await self._decommission(old)

    async def _decommission(self, containers: Sequence[Mapping[str, Any]]) -> None:
        names = [each["component_instance_name"] for each in containers]
        component = {"name": COMPONENT, "decommissioned_instances": names}
        await self._link.ask_or_raise("PUT", self._service.path, {"components": [component]})

    async def _nodes(self) -> dict[str, Mapping[str, Any]]:
        """Return YARN's descriptions of its nodes, by host."""
        return {each["nodeHostName"]: each for each in await list_nodes(self._link)}


async def list_nodes(link: RestLink) -> list[Mapping[str, Any]]:
    found = await link.ask_or_raise("GET", NODES)
    listed: list[Mapping[str, Any]] = (found.get("nodes") or {}).get("node") or []
    return listed


def is_switched_off(answer: RestAnswer) -> bool:
    """Return whether a ResourceManager's answer to VERSION says that it has no services API."""
    return answer.status == UNKNOWN or answer.document is NOT_JSON


def _is_over(found: Mapping[str, Any] | None) -> bool:
    """Return whether a service and all its containers have ended."""
    return found is None or found.get("state") in OVER


def _has_master(found: Mapping[str, Any] | None) -> bool:
    """Return whether a service's master is up: only that knows of containers."""
    return bool((found or {}).get("components"))


def _containers(found: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the containers of a service that have not ended, by id."""
    components = (found or {}).get("components") or [{}]
    listed = components[0].get("containers") or []
    return {each["id"]: each for each in listed if each.get("state") not in OVER}


def _is_of(found: Mapping[str, Any] | None, container: str) -> bool:
    """Return whether a container can be one of the service as it was started last."""
    if found is None:
        return False
    number = str(found.get("id") or "").removeprefix("application_")
    return not number or f"_{number}_" in container


def _placement(
    entry: BookEntry, nodes: Mapping[str, Mapping[str, Any]], running: bool | None
) -> Placement:
    """Describe the placement of an order. `running`: None while no container has claimed it."""
    node = nodes.get(entry.host, {})
    rack = str(node.get("rack", NO_RACK))
    notice = None
    if running and node.get("state") == "DECOMMISSIONING":
        within_s = node.get("decommissioningTimeout")  # where YARN tells it
        until = time.monotonic() + within_s if within_s and within_s > 0 else None
        notice = Notice(reason=DECOMMISSIONED, until=until)
    holding = Holding.WAITING if running is None else Holding.RUNNING
    return Placement(
        id=entry.order.id,
        handle=entry.holder or "",
        holding=Holding.ENDED if running is False else holding,
        host=entry.host,
        notice=notice,
        domains=(f"rack={rack}",) if running and rack != NO_RACK else (),
    )


def access_of(told: Mapping[str, str]) -> RestAccess:
    """Return how YARN is reached, by the settings of a plan."""
    return RestAccess(
        address=told["rm"],
        user=told["user"],
        ca=told["ca"],
        kerberos=bool(told["kerberos"]),
    )


def open_manager(plan: FleetPlan, spec: JobSpec) -> YarnManager:
    """Open the manager of a plan; its service is named after the job, unless it has a name."""
    told = plan.settings
    service = YarnService(
        name=told["service"] or job_prefix(spec.job).rstrip("-"),
        command=shlex.join((sys.executable, "-m", "holdfast.launch.yarn_place", plan.run_dir)),
        queue=told["queue"],
        cpus=int(told["cpus"]),
        memory_mb=int(told["memory"]),
        gpus=int(told["gpus"]),
        principal=told["principal"],
        keytab=told["keytab"],
    )
    link = RestLink(access_of(told), NAME)
    return YarnManager(link, service, OrderBook(Path(plan.run_dir, ORDERS)))

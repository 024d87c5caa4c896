"""Gets a job's nodes from YARN: each is a container of one service, by YARN's services API.

The service has one component, whose containers YARN spreads over hosts and replaces as they end.
Orders are in the job's order book; a container claims one of them (yarn_place.py) and is that node
for as long as it lasts. A container that replaces an ended one is another node. Nodes are given
back by naming their container's instance, since a smaller number would end the newest ones.

A raise of the number replaces what YARN has still to allocate from an earlier raise. So orders that
come together are one raise, none is made while a container is outstanding, and a raise is repeated
when YARN has less to allocate than is missing.
"""

from __future__ import annotations

import asyncio
import shlex
import sys
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.clusters.order_book import ORDERS, BookEntry, OrderBook
from holdfast.clusters.rest_link import (
    FORBIDDEN,
    NOT_JSON,
    UNKNOWN,
    WHO_ASKS,
    RestAccess,
    RestAnswer,
    RestLink,
)
from holdfast.clusters.yarn.yarn_waiting import (
    Allocation,
    UnreadOrders,
    count_pending,
    describe_end,
    describe_master,
    shorten,
)
from holdfast.engine.core.errors import Refused, Unreachable
from holdfast.engine.core.fleet.placements import Holding, Notice, Placement, PlacementId
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import (
    FleetPlan,
    PlacementOrder,
    StoppedByOperator,
    job_prefix,
)

NAME = "YARN"
SERVICES, NODES, VERSION = "/app/v1/services", "/ws/v1/cluster/nodes", "/app/v1/services/version"
APPLICATIONS, ACTIVITIES = "/ws/v1/cluster/apps", "/ws/v1/cluster/scheduler/app-activities"
PLACE = (sys.executable, "-m", "holdfast.clusters.yarn.yarn_place")
COMPONENT = "node"
OVER = ("STOPPED", "FAILED", "SUCCEEDED")  # states of a service, and of a container
FAILED = "FAILED"
APPLICATION_OVER = ("FINISHED", "KILLED", FAILED)
GONE = ("LOST", "REBOOTED", "SHUTDOWN", "DECOMMISSIONED")  # a host that is back is listed again
NO_RACK = "/default-rack"  # for nodes on a rack unknown to YARN
DECOMMISSIONED = "YARN decommissions its node"
IDLE_S = 30.0  # a container without an order is given back after this time
AGAIN_S = 30.0  # a raise whose containers have not come by then may have been lost
RECOVERY_S = 12.0  # for a new master to list what the one before had started
NEVER = "1000000"
# A long job must not end for failures that it survives; nor may YARN start a node again in place.
PROPERTIES = {
    "yarn.service.container-failure-per-component.threshold": NEVER,
    "yarn.service.node-blacklist.threshold": NEVER,
    "yarn.service.am-restart.max-attempts": NEVER,
    # The ResourceManager has a limit of its own; failures older than this do not count for it.
    "yarn.service.am-failure.validity-interval-ms": "600000",
    # Until a new master asks for replacements of containers that it does not find again.
    "yarn.service.container-recovery.timeout.ms": "10000",
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


class NameTaken(Refused):
    """Reports that YARN has a service of this name."""


class QueueRefused(Refused):
    """Reports that YARN has no such queue, or does not allow the user to use it."""


class YarnManager:
    """Asks for, lists and gives back the containers of one service, by the orders in `book`.

    `run_dir`: where the containers look for their orders.
    """

    def __init__(
        self, link: RestLink, service: YarnService, book: OrderBook, run_dir: str = ""
    ) -> None:
        self._link = link
        self._service = service
        self._book = book
        self._alone = asyncio.Lock()
        self._application = ""  # id of the service as it was seen last
        self._failure = ""  # why a service was started again for the orders that wait
        self._idle_since: dict[str, float] = {}  # by container
        self._ended: set[str] = set()  # containers that have had orders
        self._absent_at: float | None = None  # since when a claimed container is not listed
        self._new_until = float("-inf")  # until then a master may be new
        self._raised = (0, frozenset[str]())  # the number and the containers of the last look
        self._raised_at = float("-inf")  # when these changed
        self._unread = UnreadOrders(run_dir, sys.executable)
        self._allocation = Allocation(COMPONENT, f"holdfast resume {run_dir}")

    @property
    def name(self) -> str:
        """Return the name of the service."""
        return self._service.name

    async def observe(self) -> Sequence[Placement]:
        async with self._alone:
            # The book first: a container that has claimed an order by now is in the later answer.
            entries = self._book.entries()
            found = await self._find()
            why = await self._settle(found, entries)
            live, nodes = _containers(found), await self._nodes()
        claimed = [e for e in entries if e.holder and _is_of(found, e.holder)]
        if claimed and not _is_over(found):
            await self._check_master(found or {}, {str(entry.holder) for entry in claimed})
        return [
            *(self._place(e, nodes, running=e.holder in live) for e in claimed),
            *(_placement(e, nodes, running=None, why=why) for e in entries if e.waits),
        ]

    def _place(
        self, entry: BookEntry, nodes: Mapping[str, Mapping[str, Any]], *, running: bool
    ) -> Placement:
        """Describe a claimed order, with the reason why its container has ended."""
        why = ""
        if not running:
            excess = self._book.read_note(entry.order.id)
            why = describe_end(nodes.get(entry.host, {}), excess)
        return _placement(entry, nodes, running=running, why=why)

    async def request(self, order: PlacementOrder) -> None:
        self._book.add(order)  # before the orders that come with it are asked for
        async with self._alone:
            found = await self._find()
            await self._settle(found, self._book.entries())

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

    async def create(self, containers: int) -> bool:
        """Ask YARN to start the service; return True. Refused, with the reason that YARN gives."""
        answer = await self._link.ask("POST", SERVICES, self._service.definition(containers))
        if not answer.accepted:
            reason = str(self._link.failure(answer))
            kinds = {"already": NameTaken, "queue": QueueRefused}
            # YARN also refuses by status 500.
            raise next((kind for word, kind in kinds.items() if word in reason), Refused)(reason)
        return True

    async def create_again(self, containers: int) -> bool:
        """Ask YARN to start the service unless it runs; return whether it had to. Refused."""
        found = await self._find()
        if not _is_over(found):
            return False
        await self.destroy()
        return await self.create(containers)

    async def destroy(self) -> None:
        """Ask YARN to end the service and forget it, if there is one."""
        if await self._find() is not None:
            await self._link.ask_or_raise("DELETE", self._service.path)
        self._application = ""

    async def _find(self) -> dict[str, Any] | None:
        """Return YARN's description of the service; None if there is no service."""
        answer = await self._link.ask("GET", self._service.path)
        if _says_unknown(answer):
            return None
        if not answer.accepted:
            self._new_until = time.monotonic() + RECOVERY_S
            raise self._link.failure(answer)
        found: dict[str, Any] = answer.document
        self._application = str(found.get("id") or self._application)
        return found

    async def _describe(self, application: str) -> dict[str, Any]:
        """Return the ResourceManager's description of an application; {} if it knows none."""
        answer = await self._link.ask("GET", f"{APPLICATIONS}/{application}")
        if answer.status == UNKNOWN:
            return {}
        if not answer.accepted:
            raise self._link.failure(answer)
        found: dict[str, Any] = answer.document["app"]
        return found

    async def _settle(self, found: dict[str, Any] | None, entries: Sequence[BookEntry]) -> str:
        """Ask for a container for each order, and for more where hosts are avoided.

        Returns YARN's reason why orders wait, or "".
        """
        waiting = [entry for entry in entries if entry.waits]
        if found is None or _is_over(found):
            await self._replace(found, entries, len(waiting))
            return ""
        if not waiting:
            self._failure = ""
        if not _has_master(found):  # the next look asks for more
            master = describe_master(await self._describe(self._application)) if waiting else ""
            return "; ".join(filter(None, (self._failure, master)))
        live, holders = _containers(found), {entry.holder for entry in entries}
        idle = [each for id_, each in live.items() if id_ not in holders]
        left, fitting = _match(waiting, idle)
        unread: set[str] = set()
        if waiting:
            ended = [e for e in _list_all(found) if e["state"] in OVER and e["id"] not in holders]
            unread = self._unread.observe(fitting, ended, time.monotonic())
            left, _ = _match(waiting, [each for each in idle if each["id"] not in unread])
        else:
            self._unread.forget()
        await self._raise(found, len(left))
        await self._drop([] if waiting else idle)
        reasons = [self._failure, *self._unread.describe(unread), await self._explain(left, live)]
        return "; ".join(filter(None, reasons))

    async def _replace(
        self, found: dict[str, Any] | None, entries: Sequence[BookEntry], wanted: int
    ) -> None:
        """Start a service that has failed again, if orders wait. StoppedByOperator."""
        application = self._application or _find_application(entries)
        about = await self._describe(application) if application else {}
        if about and about["state"] not in APPLICATION_OVER:
            raise Unreachable(f"service {self.name} is being ended")
        if about and FAILED not in (about["state"], about["finalStatus"]):
            command = "stop" if found is not None else "destroy"
            ended = f"app -{command} {self.name}"
            if about["state"] == "KILLED":
                ended = f"application -kill {application}"
            said = shorten(about["diagnostics"])
            raise StoppedByOperator(
                f"YARN has ended service {self.name}, as by `yarn {ended}` ({said})"
            )
        if wanted:
            if application:
                why = shorten(about.get("diagnostics")) or "YARN does not know it any more"
                self._failure = f"service {self.name} has failed and is started again ({why})"
            await self.destroy()
            await self.create(wanted)

    async def _raise(self, found: Mapping[str, Any], left: int) -> None:
        """Ask for `left` more containers, unless YARN has them to allocate already."""
        live, number = frozenset(_containers(found)), _number(found)
        now, missing = time.monotonic(), number - len(live)
        if (number, live) != self._raised:
            self._raised, self._raised_at = (number, live), now
        if not left:
            return
        if missing > 0:
            if now < self._raised_at + AGAIN_S:
                return
            about = await self._describe(self._application)
            if count_pending(about, COMPONENT) >= min(missing, left):
                return
        path = f"{self._service.path}/components/{COMPONENT}"
        body = {"name": COMPONENT, "number_of_containers": number + left}
        await self._link.ask_or_raise("PUT", path, body)
        self._raised_at = now

    async def _explain(self, left: Sequence[BookEntry], live: Mapping[str, Any]) -> str:
        """Return the reason of YARN's scheduler why orders have no container yet, or ""."""
        now = time.monotonic()
        if not left:
            self._allocation.forget()
        elif self._allocation.is_due(now):
            answer = await self._link.ask("GET", f"{ACTIVITIES}/{self._application}")
            held = {each["bare_host"] for each in live.values()}
            return self._allocation.explain(answer.document if answer.accepted else {}, held, now)
        return self._allocation.last

    async def _check_master(self, found: Mapping[str, Any], claimed: set[str]) -> None:
        """Raise Unreachable unless the master is up and knows the containers that YARN runs.

        A new master is up for some seconds before it lists the containers of the one before.
        `claimed`: containers that have had orders; a container that is not listed has ended.
        """
        now = time.monotonic()
        if not _has_master(found):
            self._new_until = now + RECOVERY_S
            raise Unreachable(f"the master of service {self.name} is being started")
        absent = claimed - {each["id"] for each in _list_all(found)} - self._ended
        if not absent:
            self._absent_at = None
            return
        self._absent_at = now if self._absent_at is None else self._absent_at
        about = await self._describe(self._application)
        running = int(about.get("runningContainers", 0)) - 1  # the master's own is one of them
        more = running > len(_containers(found)) and now < self._absent_at + AGAIN_S
        if more or now < self._new_until:
            raise Unreachable(f"the master of service {self.name} does not list all containers")
        self._ended |= absent
        self._absent_at = None

    async def _drop(self, idle: Sequence[Mapping[str, Any]]) -> None:
        """Give back containers that have been without an order for a while."""
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
        """Return YARN's descriptions of its nodes, by host; a node that is not lost comes first."""
        listed = await list_nodes(self._link)
        listed = sorted(listed, key=lambda node: node.get("state") in GONE, reverse=True)
        return {each["nodeHostName"]: each for each in listed}


async def list_nodes(link: RestLink) -> list[Mapping[str, Any]]:
    found = await link.ask_or_raise("GET", NODES)
    listed: list[Mapping[str, Any]] = (found.get("nodes") or {}).get("node") or []
    return listed


def is_switched_off(answer: RestAnswer) -> bool:
    """Return whether this answer to VERSION comes from a ResourceManager without a services API.

    Where that is off, its web server answers by itself: status 500 at first, then 404.
    """
    document = answer.document
    if answer.status in (WHO_ASKS, FORBIDDEN) or answer.refusal:  # the API has not been asked yet
        return False
    by_server = isinstance(document, dict) and "servlet" in document
    return by_server or answer.status == UNKNOWN or document is NOT_JSON


def _says_unknown(answer: RestAnswer) -> bool:
    """Return whether the services API, and not only its web server, knows no such service."""
    document = answer.document
    return answer.status == UNKNOWN and isinstance(document, dict) and "diagnostics" in document


def _is_over(found: Mapping[str, Any] | None) -> bool:
    """Return whether a service and all its containers have ended."""
    return found is None or found.get("state") in OVER


def _has_master(found: Mapping[str, Any] | None) -> bool:
    """Return whether a service's master is up: only that knows of containers."""
    return bool((found or {}).get("components"))


def _list_all(found: Mapping[str, Any] | None) -> list[Mapping[str, Any]]:
    """Return all containers that YARN lists of a service."""
    components = (found or {}).get("components") or [{}]
    listed: list[Mapping[str, Any]] = components[0].get("containers") or []
    return listed


def _containers(found: Mapping[str, Any] | None) -> dict[str, Mapping[str, Any]]:
    """Return the containers of a service that have not ended, by id."""
    return {each["id"]: each for each in _list_all(found) if each.get("state") not in OVER}


def _number(found: Mapping[str, Any]) -> int:
    """Return the number of containers that a service should have."""
    return int(found["components"][0]["number_of_containers"])


def _match(
    waiting: Iterable[BookEntry], idle: Iterable[Mapping[str, Any]]
) -> tuple[list[BookEntry], list[Mapping[str, Any]]]:
    """Return the orders that no idle container may take, and the containers that may take one."""
    left, fitting = list(waiting), []
    for each in idle:
        fit = next((e for e in left if each["bare_host"] not in e.order.avoid), None)
        if fit is not None:
            left.remove(fit)
            fitting.append(each)
    return left, fitting


def _find_application(entries: Iterable[BookEntry]) -> str:
    """Return the newest application whose containers have claimed orders; "" if none has."""
    # A name is container_e01_17_0002_01_000003, or the same without the e01.
    holders = [entry.holder.split("_")[-4:-2] for entry in entries if entry.holder]
    newest = max(holders, key=lambda parts: [int(part) for part in parts], default=[])
    return "_".join(["application", *newest]) if newest else ""


def _is_of(found: Mapping[str, Any] | None, container: str) -> bool:
    """Return whether a container can be one of the service as it was started last."""
    if found is None:
        return False
    number = str(found.get("id") or "").removeprefix("application_")
    return not number or f"_{number}_" in container


def _placement(
    entry: BookEntry, nodes: Mapping[str, Mapping[str, Any]], running: bool | None, why: str = ""
) -> Placement:
    """Describe the placement of an order. `running`: None while no container has claimed it."""
    node = nodes.get(entry.host, {})
    rack = str(node.get("rack", NO_RACK))
    notice = None
    if running and node.get("state") == "DECOMMISSIONING":
        within_s = node.get("decommissioningTimeout")  # where YARN gives it
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
        why=why,
    )


def access_of(settings: Mapping[str, str]) -> RestAccess:
    """Return the way to YARN, by the settings of a plan."""
    return RestAccess(
        address=settings["rm"],
        user=settings["user"],
        ca=settings["ca"],
        kerberos=bool(settings["kerberos"]),
    )


def open_manager(plan: FleetPlan, spec: JobSpec) -> YarnManager:
    """Open the manager of a plan; its service is named after the job, unless it has a name."""
    settings = plan.settings
    service = YarnService(
        name=settings["service"] or job_prefix(spec.job).rstrip("-"),
        command=shlex.join((*PLACE, plan.run_dir, settings["memory"])),
        queue=settings["queue"],
        cpus=int(settings["cpus"]),
        memory_mb=int(settings["memory"]),
        gpus=int(settings["gpus"]),
        principal=settings["principal"],
        keytab=settings["keytab"],
    )
    link = RestLink(access_of(settings), NAME)
    return YarnManager(link, service, OrderBook(Path(plan.run_dir, ORDERS)), plan.run_dir)

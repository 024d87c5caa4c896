"""Plays a cluster manager on this machine, which a test can order to behave like any real one.

The placements are real processes (local_manager.py). The orders to the fake are in files as well,
so the fleet of a running job obeys a test in another process.
"""

from __future__ import annotations

import asyncio
import dataclasses
import json
import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.clusters.local.local_manager import LocalManager
from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import Unreachable
from holdfast.engine.core.fleet.placements import Notice, Placement, PlacementId
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import FleetPlan, PlacementOrder, job_prefix
from holdfast.engine.host.lifetime import start_time

ORDERS = "told"


class FakeManager:
    """Adapts the fake: a LocalManager that misbehaves by the orders to its cluster."""

    def __init__(self, inner: LocalManager, folder: Path) -> None:
        self._inner = inner
        self._folder = folder
        self._asked = 0

    async def observe(self) -> Sequence[Placement]:
        told = self._read_orders()
        found = []
        for each in await self._inner.observe():
            if each.id in told.get("lost", ()):
                continue
            each = dataclasses.replace(each, domains=domain_of(each.host))
            notice = told.get("notices", {}).get(each.host)
            if notice is not None:
                reason, at = notice
                until = None if at is None else time.monotonic() + at - time.time()
                each = dataclasses.replace(each, notice=Notice(reason=reason, until=until))
            found.append(each)
        return found

    async def request(self, order: PlacementOrder) -> None:
        told = self._read_orders()
        if told.get("hang"):
            await asyncio.Event().wait()
        closed = tuple(sorted({*order.avoid, *told.get("notices", {}), *told.get("dead", ())}))
        await self._inner.request(dataclasses.replace(order, avoid=closed))
        self._asked += 1
        if self._asked <= told.get("deaf", 0):
            raise Unreachable("the answer was lost")

    async def release(self, id_: PlacementId, handle: str) -> None:
        self._read_orders()
        await self._inner.release(id_, handle)

    async def close(self) -> None:
        await self._inner.close()

    def _read_orders(self) -> dict[str, Any]:
        told = read_orders(self._folder)
        if told.get("away"):
            raise Unreachable("the manager is away")
        return told


class FakeCluster:
    """Is the hand on the fake manager: a harness for the contract suite, and for tests of jobs."""

    def __init__(self, folder: Path, hosts: int = 3, keeper: int | None = None) -> None:
        self.folder = folder
        self.hosts = tuple(f"host{number}" for number in range(hosts))
        self.domains = {host: domain_of(host) for host in self.hosts}
        self._keeper = keeper or os.getpid()

    def manager(self, job: str = "hf-fake-") -> FakeManager:
        self.folder.mkdir(parents=True, exist_ok=True)
        inner = LocalManager(self.folder, self.hosts, self._keeper, job)
        return FakeManager(inner, self.folder)

    def tell(self, **orders: Any) -> None:
        """Change the manager's behaviour.

        `away`: it does not answer. `hang`: it takes requests in and never answers. `deaf`: the
        answers to this many first requests of an adapter are lost, though they are carried out.
        `lost`: ids that it believes have ended. `dead`: hosts that take no placement.
        """
        self.folder.mkdir(parents=True, exist_ok=True)
        temporary = self.folder / f".{ORDERS}"
        temporary.write_text(json.dumps({**read_orders(self.folder), **orders}))
        temporary.rename(self.folder / ORDERS)

    def notify(self, host: str, reason: str, within_s: float | None = None) -> None:
        """Announce that a host is to be left, within a time if one is given."""
        notices = read_orders(self.folder).get("notices", {})
        at = None if within_s is None else time.time() + within_s
        self.tell(notices={**notices, host: (reason, at)})

    def drain(self, host: str, reason: str) -> None:
        self.notify(host, reason)

    def kill(self, host: str) -> None:
        """End a host with all its processes; it takes no further placement."""
        self.tell(dead=[*read_orders(self.folder).get("dead", []), host])
        for pid in self.processes_on(host):
            kill_tree(pid)

    def away(self, away: bool) -> None:
        self.tell(away=away)

    def processes(self, id_: PlacementId) -> list[int]:
        return [pid for each, _, pid in self._placements() if each == id_]

    def processes_on(self, host: str) -> list[int]:
        return [pid for _, each, pid in self._placements() if each == host]

    def close(self) -> None:
        """End everything that runs on its hosts."""
        for _, _, pid in self._placements():
            kill_tree(pid)

    def _placements(self) -> list[tuple[str, str, int]]:
        found = []
        for path in sorted(self.folder.glob("*.json")):
            record = json.loads(path.read_text())
            if "pid" in record and start_time(record["pid"]) == record["started"]:
                found.append((record["id"], record["host"], record["pid"]))
        return found


def open_manager(plan: FleetPlan, spec: JobSpec) -> FakeManager:
    """Open the fake of a running job; the launcher is our parent."""
    cluster = FakeCluster(Path(plan.settings["folder"]), int(plan.settings["hosts"]), os.getppid())
    return cluster.manager(job_prefix(spec.job))


def domain_of(host: str) -> Domains:
    """Put two hosts into each rack."""
    return (f"rack={int(host.removeprefix('host')) // 2}",)


def read_orders(folder: Path) -> dict[str, Any]:
    try:
        found: dict[str, Any] = json.loads((folder / ORDERS).read_text())
        return found
    except FileNotFoundError:
        return {}


def kill_tree(pid: int) -> None:
    """Kill a process and its descendants, the youngest first."""
    found = [pid]
    for each in found:
        try:
            os.kill(each, signal.SIGSTOP)  # so that it has no more children
            found += map(int, Path(f"/proc/{each}/task/{each}/children").read_text().split())
        except (ProcessLookupError, FileNotFoundError):
            continue
    for each in reversed(found):
        try:
            os.kill(each, signal.SIGKILL)
        except ProcessLookupError:
            continue

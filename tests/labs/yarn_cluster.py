"""Uses a real ResourceManager as a harness of the contract: a lab's, or the one at an address.

HOLDFAST_YARN_RM may name the address. Its node managers run on this machine, where the containers'
processes are looked for. Only the hosts and the manager of a lab (yarn_lab.py) can be ended.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.clusters.launch_application import own_user
from holdfast.clusters.order_book import ORDERS, OrderBook
from holdfast.clusters.rest_link import RestAccess, RestLink
from holdfast.clusters.yarn.yarn_manager import (
    DECOMMISSIONED,
    NO_RACK,
    SERVICES,
    YarnManager,
    YarnService,
    list_nodes,
)
from holdfast.engine.core.domains import Domains
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.lab.contracts.cluster_contract import PREFIX
from labs.slurm_cluster import our_processes
from labs.yarn_lab import YarnLab

RM_VARIABLE = "HOLDFAST_YARN_RM"
REGISTERED_S = 60.0


class YarnCluster:
    """Opens managers of services on a real YARN; at the end it destroys the services.

    `folder` is a new one; it stays after a failure, to look for the reason.
    """

    def __init__(self, lab: YarnLab | None = None) -> None:
        self._lab = lab
        self.url = lab.url if lab is not None else os.environ[RM_VARIABLE]
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-yarn-"))
        self._link = RestLink(RestAccess(address=self.url, user=own_user()), "YARN")
        self._managers: dict[str, YarnManager] = {}
        self.hosts: Sequence[str] = ()
        self.domains: Mapping[str, Domains] = {}

    def __enter__(self) -> YarnCluster:
        nodes = [n for n in asyncio.run(list_nodes(self._link)) if n["state"] == "RUNNING"]
        self.domains = {n["nodeHostName"]: domains_of(n) for n in nodes}
        self.hosts = sorted(self.domains)
        return self

    def __exit__(self, *exc: object) -> None:
        for manager in self._managers.values():
            asyncio.run(manager.destroy())

    def manager(self, job: str = PREFIX) -> YarnManager:
        name = f"{job.rstrip('-')}-{os.getpid()}"
        folder = self.folder / name
        command = shlex.join(
            (sys.executable, "-m", "holdfast.clusters.yarn.yarn_place", str(folder))
        )
        service = YarnService(name=name, command=command, memory_mb=512)
        folder.mkdir(exist_ok=True)
        manager = YarnManager(self._link, service, OrderBook(folder / ORDERS), str(folder))
        self._managers.setdefault(name, manager)
        return manager

    def has_operator(self) -> bool:
        return self._lab is not None

    @property
    def lab(self) -> YarnLab:
        assert self._lab is not None, "only a lab has an operator"
        return self._lab

    def kill(self, host: str) -> None:
        """End a host, which may run a service's master as well.

        A new master releases a container that the one before has not registered, with its address,
        some seconds after it was started: so that is waited for.
        """
        deadline = time.monotonic() + REGISTERED_S
        while not self._are_registered():
            assert time.monotonic() < deadline, "the masters register their containers"
            time.sleep(0.2)
        self.lab.kill(host)

    def _are_registered(self) -> bool:
        """Return whether each container of all services has an address."""
        found = [self._link.ask_now("GET", f"{SERVICES}/{name}") for name in self._managers]
        components = [c for each in found if each.accepted for c in each.document["components"]]
        return all("ip" in container for c in components for container in c["containers"])

    def drain(self, host: str, reason: str) -> str:
        self.lab.drain(host)
        return DECOMMISSIONED

    def away(self, away: bool) -> None:
        self.lab.away(away)

    def stop(self, name: str) -> None:
        """Stop a service as an operator does."""
        asyncio.run(self._link.ask_or_raise("PUT", f"{SERVICES}/{name}", {"state": "STOPPED"}))

    def processes(self, id_: PlacementId) -> list[int]:
        return our_processes(f"HOLDFAST_PLACEMENT={id_}")


def domains_of(node: Mapping[str, Any]) -> Domains:
    return (f"rack={node['rack']}",) if node["rack"] != NO_RACK else ()

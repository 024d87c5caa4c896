"""Uses a real ResourceManager, which HOLDFAST_YARN_RM names, as a harness of the contract.

Its node managers run on this machine, where the containers' processes are looked for. Nobody is
there to end a host or the manager itself, so these cases cannot be run.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.core.domains import Domains
from holdfast.core.fleet.placements import PlacementId
from holdfast.launch.order_book import ORDERS, OrderBook
from holdfast.launch.rest_link import RestAccess, RestLink
from holdfast.launch.yarn_manager import NO_RACK, YarnManager, YarnService, list_nodes
from holdfast.testing.cluster_contract import PREFIX
from labs.slurm_cluster import our_processes

RM_VARIABLE = "HOLDFAST_YARN_RM"


class YarnCluster:
    """Opens managers of services on a real YARN; at the end it destroys the services.

    `folder` is a new one; it stays after a failure, to look for the reason.
    """

    def __init__(self) -> None:
        self.url = os.environ[RM_VARIABLE]
        self.folder = Path(tempfile.mkdtemp(prefix="holdfast-yarn-"))
        self._link = RestLink(RestAccess(address=self.url, user=os.environ.get("USER", "")), "YARN")
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
        command = shlex.join((sys.executable, "-m", "holdfast.launch.yarn_place", str(folder)))
        service = YarnService(name=name, command=command, memory_mb=512)
        manager = YarnManager(self._link, service, OrderBook(folder / ORDERS))
        self._managers.setdefault(name, manager)
        return manager

    def kill(self, host: str) -> None:
        raise NotImplementedError("nobody can end a host here")

    def drain(self, host: str, reason: str) -> str | None:
        raise NotImplementedError("nobody can drain a host here")

    def away(self, away: bool) -> None:
        raise NotImplementedError("nobody can end the ResourceManager here")

    def processes(self, id_: PlacementId) -> list[int]:
        return our_processes(f"HOLDFAST_PLACEMENT={id_}")


def domains_of(node: Mapping[str, Any]) -> Domains:
    return (f"rack={node['rack']}",) if node["rack"] != NO_RACK else ()

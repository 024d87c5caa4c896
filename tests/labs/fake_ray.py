"""Plays the output of a driver of Ray, and the cluster behind it: without Ray, with real processes.

It stands where RayLink does, and is a harness for the contract of adapters. An actor is a process
of this machine that makes the same object as a real one.

None of its answers is a recording: they have the shape that ray_driver.py gives to Ray's. The same
cases run against a real cluster of Ray 2.60 (test_ray_cluster.py). They compare with it:

- the contract of adapters: names that are taken, nodes that are killed, drained or avoided;
- the reasons to wait, made of the demands that Ray lists and of the use of each node.

These are guesses, by Ray's source or documents, and no test compares them:

- the first node in order is taken, and an actor is placed at once when it is looked at;
- an actor that waits has the state PENDING_CREATION, never DEPENDENCIES_UNREADY;
- an actor of a lost node is gone at once; a real one is listed until Ray misses the node.

It knows neither Ray's autoscaler, its head node, memory, GPUs nor custom resources.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.clusters.local.fake_cluster import kill_tree
from holdfast.clusters.ray.ray_manager import RayManager, RayShare
from holdfast.clusters.ray.ray_tables import (
    DRAINED,
    NODE_LABEL,
    RUNNING_STATE,
    WAITING_STATES,
    selector,
)
from holdfast.engine.core.errors import Unreachable
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.lab.contracts.cluster_contract import PREFIX
from labs.slurm_cluster import our_processes

CPUS = 1.0  # each node has these
ACTOR = """
import json, sys, threading
from holdfast.clusters.ray.ray_place import RayPlace
RayPlace(*json.loads(sys.argv[1]))
threading.Event().wait()
"""


@dataclass(slots=True, kw_only=True)
class FakeActor:
    """Records an actor, which waits until it has a node."""

    id: str
    order: Mapping[str, Any]
    node: str = ""
    process: subprocess.Popen[bytes] | None = None

    def ended(self) -> bool:
        return self.process is not None and self.process.poll() is not None


class FakeRay:
    """Answers as ray_driver.py does; nodes are called `n0`, `n1`, ... and their ids `id-n0`."""

    def __init__(self, folder: Path, hosts: int = 3) -> None:
        self.folder = folder
        self.hosts: Sequence[str] = tuple(f"n{number}" for number in range(hosts))
        self.domains = {host: (f"rack={host}",) for host in self.hosts}
        self._actors: dict[str, FakeActor] = {}
        self._numbers = itertools.count(1)
        self._down: set[str] = set()
        self._drained: dict[str, float] = {}
        self._away = False

    # ------------------------------------------------------------ link

    def ask(self, word: str, *given: Any) -> Any:
        if self._away:
            raise Unreachable("Ray does not answer")
        answers: dict[str, Callable[..., Any]] = {
            "hello": self._hello,
            "tables": self._tables,
            "start": self._start,
            "end": self._end,
        }
        return answers[word](*given)

    def close(self) -> None:
        pass

    def _hello(self) -> dict[str, str]:
        return {"host": "127.0.0.1", "version": "fake"}

    def _tables(self) -> dict[str, Any]:
        for name, actor in list(self._actors.items()):
            if actor.ended():
                del self._actors[name]
        for actor in self._actors.values():
            if actor.process is None:
                self._place(actor)
        waits = any(actor.process is None for actor in self._actors.values())
        return {
            "actors": [
                {
                    "id": actor.id,
                    "name": name,
                    "state": RUNNING_STATE if actor.process else WAITING_STATES[-1],
                    "node": f"id-{actor.node or self.hosts[0]}",  # where it waits
                }
                for name, actor in self._actors.items()
            ],
            "nodes": [
                {
                    "id": f"id-{host}",
                    "name": host,
                    "resources": {"CPU": CPUS},
                    "labels": {"rack": host},
                    "drains": host in self._drained,
                    "drained_at": self._drained.get(host, 0.0),
                    **(self._use(host) if waits else {}),
                }
                for host in self.hosts
                if host not in self._down
            ],
            "demands": [
                {
                    "unit": actor.order["unit"],
                    "resources": {"CPU": actor.order["cpus"]},
                    "avoid": actor.order["avoid"],
                }
                for actor in self._actors.values()
                if actor.process is None
            ],
        }

    def _use(self, host: str) -> dict[str, Any]:
        there = [a.order for a in self._actors.values() if a.process and a.node == host]
        free = CPUS - sum(order["cpus"] for order in there)
        return {"free": {"CPU": free} if free else {}, "taken": [o["unit"] for o in there]}

    def _start(self, order: Mapping[str, Any]) -> None:
        name = order["name"]
        if name not in self._actors or self._actors[name].ended():
            self._actors[name] = FakeActor(id=f"{next(self._numbers):032x}", order=order)

    def _end(self, name: str, handle: str) -> None:
        actor = self._actors.get(name)
        if actor is not None and actor.id == handle:
            del self._actors[name]
            if actor.process is not None:
                actor.process.kill()
                actor.process.wait()

    def _place(self, actor: FakeActor) -> None:
        order = actor.order
        near = [a.node for a in self._actors.values() if a.order["unit"] == order["unit"]]
        barred = selector(order["avoid"]).get(NODE_LABEL, "")
        for host in self.hosts:
            taken = host in near or host in self._down or host in self._drained
            taken = taken or self._use(host)["free"].get("CPU", 0.0) < order["cpus"]
            if not taken and f"id-{host}" not in barred:
                given = json.dumps([order["command"], order["environment"], order["output"]])
                actor.node = host
                actor.process = subprocess.Popen([sys.executable, "-c", ACTOR, given])
                return

    # ------------------------------------------------------------ harness

    def manager(self, job: str = PREFIX, cpus: float = 0.5) -> RayManager:
        return RayManager(self, job, self.folder, RayShare(label="rack", cpus=cpus))

    def kill(self, host: str) -> None:
        self._down.add(host)
        for name, actor in list(self._actors.items()):
            if actor.node == host:
                for pid in self.processes(PlacementId(name)):
                    kill_tree(pid)
                self._end(name, actor.id)

    def drain(self, host: str, reason: str, within_s: float | None = None) -> str:
        self._drained[host] = 0.0 if within_s is None else time.time() + within_s
        return DRAINED

    def away(self, away: bool) -> None:
        self._away = away

    def processes(self, id_: PlacementId) -> list[int]:
        return our_processes(f"HOLDFAST_PLACEMENT={id_}")

    def __enter__(self) -> FakeRay:
        return self

    def __exit__(self, *exc: object) -> None:
        with contextlib.ExitStack() as stack:
            for name, actor in list(self._actors.items()):
                stack.callback(self._end, name, actor.id)

"""Plays masters of Mesos with the v1 scheduler HTTP API, and the agents behind them, by real HTTP.

It keeps frameworks, offers and tasks as Mesos' own code does where that matters, and starts a real
process for each task. No answer is a recording, and no test has ever compared one with a real
Mesos: shapes and words are from the documents and sources of Mesos 1.11, which these names cite
where they are used:

* `API`: https://mesos.apache.org/documentation/latest/scheduler-http-api/
* `scheduler.proto`, `mesos.proto`: include/mesos/v1/ of https://github.com/apache/mesos
* `Master`: src/master/master.cpp and src/master/http.cpp there
* `Maintenance`: https://mesos.apache.org/documentation/latest/maintenance/
* `Operator`: https://mesos.apache.org/documentation/latest/operator-http-api/

It guesses: all times; that each agent is offered whole, to one framework at a time; the order of
events; which messages a master loses when it ends; how long agents take to come again.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.clusters.local.fake_cluster import kill_tree
from holdfast.clusters.mesos.mesos_manager import MAINTENANCE, NAME, PROOF, MesosManager
from holdfast.clusters.mesos.mesos_session import FRAMEWORK, MesosFramework, MesosSession
from holdfast.clusters.order_book import ORDERS, OrderBook
from holdfast.clusters.rest_link import RestAccess, RestLink
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.lab.contracts.cluster_contract import PREFIX
from labs.fake_mesos_http import MesosMaster
from labs.fake_mesos_state import (
    CLUSTER,
    CPUS,
    FakeAgent,
    FakeMesosFramework,
    FakeTask,
    MesosKnobs,
    end_task,
)
from labs.slurm_cluster import our_processes

ACT_S = 0.02


class FakeMesos:
    """Keeps agents, frameworks and tasks; used as a context manager it serves them at `url`.

    It is the harness of the contract as well. All masters know the same, as through the registry
    and the agents that come again; one leads, and the other ones send callers there.
    """

    def __init__(self, folder: Path, hosts: int = 4, masters: int = 1) -> None:
        self.folder = folder
        self.hosts: Sequence[str] = tuple(f"agent{number}" for number in range(hosts))
        self.agents = {
            host: FakeAgent(id=f"{CLUSTER}-S{n}", host=host, region="eu", zone=f"z{n // 2}")
            for n, host in enumerate(self.hosts)
        }
        self.domains = {a.host: (f"region={a.region}", f"zone={a.zone}") for a in self._agents()}
        self.knobs = MesosKnobs()
        self.frameworks: dict[str, FakeMesosFramework] = {}
        self.removed: list[str] = []
        self.calls: list[str] = []
        self.leader = 0
        self.lock = threading.RLock()
        self._numbers = iter(range(1, 1_000_000))
        self._masters = [MesosMaster(self, number) for number in range(masters)]
        self._over = threading.Event()
        self._actor = threading.Thread(target=self._act, daemon=True)

    def __enter__(self) -> FakeMesos:
        for master in self._masters:
            master.start()
        self._actor.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._actor.join()
        for framework in list(self.frameworks.values()):
            self.remove(framework)
        for master in self._masters:
            master.stop()

    def _agents(self) -> list[FakeAgent]:
        return list(self.agents.values())

    @property
    def urls(self) -> list[str]:
        return [master.url for master in self._masters]

    @property
    def url(self) -> str:
        return ",".join(self.urls)

    def new_id(self, letter: str) -> str:
        return f"{CLUSTER}-{letter}{next(self._numbers)}"

    # ------------------------------------------------------------ agents and tasks

    def _act(self) -> None:
        while not self._over.wait(ACT_S):
            with self.lock:
                if self.knobs.away:
                    continue
                now = time.monotonic()
                for framework in list(self.frameworks.values()):
                    if framework.events is None:
                        limit_s = float(framework.info.get("failover_timeout", 0.0))
                        if now > framework.left_at + limit_s:
                            self.remove(framework)
                        continue
                    self._offer(framework, now)
                    self._ask_back(framework, now)
                    for task in list(framework.tasks.values()):
                        self._watch(framework, task)

    def _offer(self, framework: FakeMesosFramework, now: float) -> None:
        for agent in self._agents():
            held = agent in framework.offers.values()
            refused = framework.refused.get(agent.id, 0.0) > now
            if held or refused or not agent.up or agent.back_at > now:
                continue
            tasks = [t for f in self.frameworks.values() for t in f.tasks.values()]
            used = [t for t in tasks if t.agent is agent and t.state == "TASK_RUNNING"]
            cpus = CPUS - sum(t.cpus for t in used)
            memory_mb = agent.memory_mb - sum(t.memory_mb for t in used)
            id_ = self.new_id("O")
            framework.offers[id_] = agent
            # mesos.proto, Offer and DomainInfo.
            place = {"region": {"name": agent.region}, "zone": {"name": agent.zone}}
            offer = {
                "id": {"value": id_},
                "framework_id": {"value": framework.id},
                "agent_id": {"value": agent.id},
                "hostname": agent.host,
                "domain": {"fault_domain": place},
                "allocation_info": {"role": framework.role},
                "resources": agent.resources(cpus, memory_mb, framework.role),
                **agent.unavailability(),
            }
            framework.tell("OFFERS", offers=[offer])

    def _ask_back(self, framework: FakeMesosFramework, now: float) -> None:
        """Send inverse offers for the agents in maintenance that the framework uses."""
        for agent in self._agents():
            used = any(t.agent is agent for t in framework.tasks.values())
            asked = agent in framework.inverse.values()
            refused = framework.refused_inverse.get(agent.id, 0.0) > now
            if agent.leaves_at is None or not used or asked or refused:
                continue
            id_ = self.new_id("O")
            framework.inverse[id_] = agent
            # mesos.proto, InverseOffer.
            about = {"id": {"value": id_}, "framework_id": {"value": framework.id}}
            about |= {"agent_id": {"value": agent.id}, **agent.unavailability()}
            framework.tell("INVERSE_OFFERS", inverse_offers=[about])

    def _watch(self, framework: FakeMesosFramework, task: FakeTask) -> None:
        """Send one update when a task has ended."""
        if not task.agent.up or task.agent.back_at > time.monotonic():
            return
        code = task.process.poll()
        if code is not None and task.state == "TASK_RUNNING":
            task.state = "TASK_FINISHED" if code == 0 else "TASK_FAILED"
            task.state = "TASK_KILLED" if task.killed else task.state
            # The command executor, src/launcher/executor.cpp.
            said = f"Command exited with status {code}"
            said = f"Command terminated with signal {-code}" if code < 0 else said
            failed = {"reason": "REASON_COMMAND_EXECUTOR_FAILED"} if code else {}
            task.unacknowledged = task.status(
                task.state, message=said, uuid=self.new_id("U"), data="", **failed
            )
            framework.update(task.unacknowledged)

    def run(self, framework: FakeMesosFramework, agent: FakeAgent, info: dict[str, Any]) -> None:
        """Start a task as an agent's command executor does: with little in its environment."""
        id_, command = info["task_id"]["value"], info["command"]
        folder = self.folder / "sandboxes" / f"{framework.id}-{id_}"
        folder.mkdir(parents=True)
        assert not command["shell"]
        with open(folder / "stdout", "wb") as output:
            process = subprocess.Popen(
                command["arguments"],
                executable=command["value"],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={"PATH": os.environ["PATH"], "MESOS_SANDBOX": str(folder)},
                start_new_session=True,
            )
        used = dict.fromkeys(("cpus", "mem"), 0.0)
        for each in info["resources"]:
            used[each["name"]] += each["scalar"]["value"]
        task = FakeTask(
            id=id_, agent=agent, cpus=used["cpus"], memory_mb=used["mem"], process=process
        )
        framework.tasks[id_] = task
        task.unacknowledged = task.status("TASK_RUNNING", uuid=self.new_id("U"), data="")
        framework.update(task.unacknowledged)

    def remove(self, framework: FakeMesosFramework) -> None:
        """Forget a framework for good, and end its tasks (Master::removeFramework)."""
        framework.leave(time.monotonic())
        for task in framework.tasks.values():
            end_task(task)
        del self.frameworks[framework.id]
        self.removed.append(framework.id)

    # ------------------------------------------------------------ harness

    def manager(self, job: str = PREFIX) -> MesosManager:
        name = job.rstrip("-")
        folder = self.folder / name
        folder.mkdir(exist_ok=True)
        command = (sys.executable, "-m", "holdfast.clusters.mesos.mesos_place", str(folder))
        framework = MesosFramework(name=name, user="me", command=command)
        link = RestLink(RestAccess(address=self.url), NAME, PROOF)
        session = MesosSession(link, framework, folder / FRAMEWORK)
        return MesosManager(session, framework, OrderBook(folder / ORDERS))

    def kill(self, host: str) -> None:
        """Make a host die; the master notices at once (Master::removeSlave)."""
        with self.lock:
            agent = self.agents[host]
            agent.up = False
            for framework in self.frameworks.values():
                for id_ in [id_ for id_, each in framework.offers.items() if each is agent]:
                    del framework.offers[id_]
                    framework.tell("RESCIND", offer_id={"value": id_})
                for task in [t for t in framework.tasks.values() if t.agent is agent]:
                    kill_tree(task.process.pid)
                    task.process.wait()
                    del framework.tasks[task.id]
                    said = {"source": "SOURCE_MASTER", "reason": "REASON_AGENT_REMOVED"}
                    said["message"] = f"Agent {host} removed: health check timed out"
                    framework.update({**task.status("TASK_LOST"), **said})
                framework.tell("FAILURE", agent_id={"value": agent.id})

    def drain(self, host: str, reason: str, within_s: float = 30.0) -> str:
        """Schedule maintenance of a host, so that its offers come again, with the time."""
        with self.lock:
            self._schedule(host, time.time() + within_s)
        return MAINTENANCE

    def call_off(self, host: str) -> None:
        with self.lock:
            self._schedule(host, None)

    def _schedule(self, host: str, leaves_at: float | None) -> None:
        agent = self.agents[host]
        agent.leaves_at = leaves_at
        for framework in self.frameworks.values():
            framework.refused.pop(agent.id, None)
            for id_ in [id_ for id_, each in framework.offers.items() if each is agent]:
                del framework.offers[id_]
                framework.tell("RESCIND", offer_id={"value": id_})
            for id_ in [id_ for id_, each in framework.inverse.items() if each is agent]:
                del framework.inverse[id_]
                framework.tell("RESCIND_INVERSE_OFFER", inverse_offer_id={"value": id_})

    def away(self, away: bool) -> None:
        with self.lock:
            self.knobs.away = away
            if away:
                self._disconnect()

    def fail_over(self, known_in_s: float = 0.0) -> None:
        """Make the next master lead, which knows the agents after a while."""
        with self.lock:
            self.leader = (self.leader + 1) % len(self._masters)
            for agent in self._agents():
                agent.back_at = time.monotonic() + known_in_s
            self._disconnect()

    def mute(self) -> None:
        """Silence the present subscriptions, as behind a broken network."""
        with self.lock:
            self.knobs.muted += [each.stream for each in self.frameworks.values()]

    def _disconnect(self) -> None:
        for framework in self.frameworks.values():
            framework.leave(time.monotonic())

    def processes(self, id_: PlacementId) -> list[int]:
        return our_processes(f"HOLDFAST_PLACEMENT={id_}")

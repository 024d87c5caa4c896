"""Plays a ResourceManager with its services API and the node managers behind it, over real HTTP.

It treats services as Hadoop's own code does in the points that matter, starts a real process for
each container, and replaces those that end. Shapes and words are from Hadoop 3.3 and later:

* `API`: hadoop-yarn-services-api, YARN-Simplified-V1-API-Layer-For-Services.yaml, and
  https://hadoop.apache.org/docs/stable/hadoop-yarn/hadoop-yarn-site/ (YarnServiceAPI.html)
* `Server`: org.apache.hadoop.yarn.service.webapp.ApiServer
* `Client`: org.apache.hadoop.yarn.service.client.ServiceClient
* `Component`: org.apache.hadoop.yarn.service.component.Component (states of the service's master)
* `RM`: https://hadoop.apache.org/docs/stable/hadoop-yarn/hadoop-yarn-site/ResourceManagerRest.html
"""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any
from urllib.parse import parse_qs, urlsplit

from holdfast.core.fleet.placements import PlacementId
from holdfast.launch.order_book import ORDERS, OrderBook
from holdfast.launch.rest_link import RestAccess, RestLink
from holdfast.launch.yarn_manager import DECOMMISSIONED, YarnManager, YarnService
from holdfast.testing.cluster_contract import PREFIX
from holdfast.testing.fake_cluster import kill_tree
from labs.slurm_cluster import our_processes

ACT_S = 0.02
CLUSTER = 1458061340047  # when the ResourceManager started: a part of all ids
FAILURES = "yarn.service.container-failure-per-component.threshold"
FAILURES_MAX = 10  # Configurations.md: "Default is 10"
MEMORY_MB, CORES = 8192, 8
SWITCHED_OFF = b"<html><title>Error 404 Not Found</title></html>"


class HttpProblem(Exception):
    """Carries an answer that is no success: its status, and the words in `diagnostics`."""

    def __init__(self, status: int, diagnostics: str) -> None:
        super().__init__(diagnostics)
        self.status = status


@dataclass(slots=True, kw_only=True)
class FakeContainer:
    id: str
    instance: str
    host: str
    process: subprocess.Popen[bytes]

    def describe(self) -> dict[str, Any]:
        # API, Container: id, launch_time, ip, hostname, bare_host, state, component_instance_name.
        return {
            "id": self.id,
            "launch_time": 1458061340047,
            "ip": "127.0.0.1",
            "hostname": self.id.replace("container_", "ctr-").replace("_", "-"),
            "bare_host": self.host,
            "state": "READY",
            "component_instance_name": self.instance,
        }


@dataclass(slots=True, kw_only=True)
class FakeService:
    """Describes a service and its master, which is up from `up_at` on."""

    definition: dict[str, Any]
    id: str
    up_at: float
    state: str = "ACCEPTED"
    pending: list[str] = field(default_factory=list)  # instances that have no container
    containers: dict[str, FakeContainer] = field(default_factory=dict)  # by instance
    instances: int = 0  # names given so far
    launched: int = 1  # containers so far: the first one is the master's
    failures: int = 0
    decommissioned: list[str] = field(default_factory=list)

    @property
    def component(self) -> dict[str, Any]:
        found: dict[str, Any] = self.definition["components"][0]
        return found

    def is_up(self) -> bool:
        return self.state in ("STARTED", "STABLE") and time.monotonic() >= self.up_at

    def add(self, number: int) -> None:
        # Component.createOneCompInstance: names of decommissioned instances are left out.
        for _ in range(number):
            while f"{self.component['name']}-{self.instances}" in self.decommissioned:
                self.instances += 1
            self.pending.append(f"{self.component['name']}-{self.instances}")
            self.instances += 1

    def describe(self) -> dict[str, Any]:
        # Client.getStatus: no components until the master is up, nor once it has ended.
        about = {"name": self.definition["name"], "id": self.id, "state": self.state}
        if not self.is_up():
            return {**about, "lifetime": -1, "components": []}
        containers = [each.describe() for each in self.containers.values()]
        extra = {"state": "FLEXING" if self.pending else "STABLE", "containers": containers}
        component = {**self.component, "decommissioned_instances": self.decommissioned, **extra}
        return {**self.definition, **about, "components": [component]}


class FakeYarn:
    """Keeps all services and nodes; used as a context manager it serves them at `url`.

    It is the harness of the contract as well. `away`: it answers nothing. `off`: the services API
    is switched off. `failing`: the number of the next requests, which all fail. `start_s`: until a
    master is up. `timeouts`: of decommissioning nodes, in seconds.
    """

    def __init__(self, folder: Path, hosts: int = 4, start_s: float = 0.1) -> None:
        self.folder = folder
        self.hosts: Sequence[str] = tuple(f"nm{number}" for number in range(hosts))
        self.domains = {host: (f"rack=/r{number // 2}",) for number, host in enumerate(self.hosts)}
        self.queues = ["default", "gpu"]
        self.off = False
        self.failing = 0
        self.start_s = start_s
        self.asked_by: list[str] = []
        self.requests: list[str] = []
        self.timeouts: dict[str, int] = {}
        self.services: dict[str, FakeService] = {}
        self._away = threading.Event()
        self._over = threading.Event()
        self._down: set[str] = set()
        self._leaving: set[str] = set()
        self._apps = 0
        self.lock = threading.RLock()
        self._server: ThreadingHTTPServer | None = None
        self._actor = threading.Thread(target=self._act, daemon=True)

    def __enter__(self) -> FakeYarn:
        fake = self

        class YarnAnswers(BaseHTTPRequestHandler):
            protocol_version = "HTTP/1.1"

            def do_GET(self) -> None:
                _answer(self, fake)

            do_POST = do_PUT = do_DELETE = do_GET  # noqa: N815

            def handle(self) -> None:
                with contextlib.suppress(ConnectionError):
                    super().handle()

            def log_message(self, format: str, *args: Any) -> None:  # noqa: A002
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), YarnAnswers)
        self._server.daemon_threads = True
        threading.Thread(target=self._server.serve_forever, daemon=True).start()
        self._actor.start()
        return self

    def __exit__(self, *exc: object) -> None:
        self._over.set()
        self._actor.join()
        assert self._server is not None
        self._server.shutdown()
        self._server.server_close()
        for service in self.services.values():
            self.end(service, "STOPPED")

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    # ------------------------------------------------------------ requests

    def handle(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Carry out one request; raise HttpProblem with the reason if it is refused."""
        with self.lock:
            if self.failing:
                self.failing -= 1
                raise HttpProblem(500, "Call From rm to nn failed on connection exception")
            match [method, *path.strip("/").split("/")]:
                case ["GET", "ws", "v1", "cluster", "nodes"]:
                    return 200, {"nodes": {"node": [self._node(host) for host in self.hosts]}}
                case ["GET", "app", "v1", "version"]:
                    return 200, {"hadoop_version": "3.5.0"}  # Server.getVersion
                case ["POST", "app", "v1", "services"]:
                    return self._create(body)
                case ["GET", "app", "v1", "services", name]:
                    return 200, self._service(name).describe()
                case ["PUT", "app", "v1", "services", name, "components", _]:
                    return self._flex(self._running(name, "flex"), body)
                case ["PUT", "app", "v1", "services", name]:
                    return self._update(name, body)
                case ["DELETE", "app", "v1", "services", name]:
                    # Server.deleteService: stops it first. It is gone for good afterwards.
                    self.end(self._service(name), "STOPPED")
                    del self.services[name]
                    return 200, {"diagnostics": f"Successfully destroyed service {name}"}
        raise HttpProblem(404, f"no resource {path}")

    def _service(self, name: str) -> FakeService:
        if name not in self.services:  # Server.getService
            raise HttpProblem(404, f"Service {name} not found")
        return self.services[name]

    def _running(self, name: str, word: str) -> FakeService:
        service = self._service(name)
        if not service.is_up():  # Client.flexComponents, actionDecommissionInstances
            text = f"{name} is at {service.state} state, {word} can only be invoked when service"
            raise HttpProblem(400, f"{text} is running")
        return service

    def _create(self, definition: dict[str, Any]) -> tuple[int, Any]:
        name, queue = definition["name"], definition.get("queue", "default")
        if name in self.services:  # Server.createService
            raise HttpProblem(500, f"Service name {name} is already taken.")
        if int(definition["components"][0]["resource"]["memory"]) > MEMORY_MB:
            raise HttpProblem(500, f"Component {name} resource size is larger than the maximum")
        self._apps += 1
        app = f"application_{CLUSTER}_{self._apps:04d}"
        if queue not in self.queues:  # CapacityScheduler.addApplication, through submitApplication
            text = f"Failed to submit {app} to YARN : Application {app} submitted by user "
            raise HttpProblem(500, f"{text}{self.asked_by[-1]} to unknown queue: {queue}")
        up_at = time.monotonic() + self.start_s
        service = FakeService(definition=definition, id=app, up_at=up_at, state="STARTED")
        service.add(service.component["number_of_containers"])
        self.services[name] = service
        # API: 202 with a ServiceStatus. Server.createService.
        about = {"diagnostics": f"Application ID: {app}", "state": "ACCEPTED"}
        return 202, {**about, "uri": f"/v1/services/{name}"}

    def _flex(self, service: FakeService, body: dict[str, Any]) -> tuple[int, Any]:
        # Component.FlexComponentTransition; the service's restart policy must be ALWAYS.
        assert service.component["restart_policy"] == "ALWAYS"
        before, after = service.component["number_of_containers"], body["number_of_containers"]
        service.component["number_of_containers"] = after
        service.add(max(after - before, 0))
        newest = [*service.containers, *service.pending]
        newest.sort(key=lambda name: -int(name.rpartition("-")[2]))
        for instance in newest[: max(before - after, 0)]:  # the most recent ones are destroyed
            self._destroy(service, instance)
        text = f"Updating component ({body['name']}) size from {before} to {after}"
        return 200, {"diagnostics": text}

    def _update(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        # Server.updateService: a state first, else instances to decommission, else nothing.
        if body.get("state") == "STOPPED":
            self.end(self._service(name), "STOPPED")
            return 200, {"diagnostics": f"Successfully stopped service {name}"}
        named = [i for c in body.get("components", ()) for i in c["decommissioned_instances"]]
        if not named:
            return 204, None
        service = self._running(name, "decommission")
        for instance in named:  # Component.DecommissionInstanceTransition
            if instance not in service.decommissioned:
                service.decommissioned.append(instance)
                if instance in service.containers or instance in service.pending:
                    service.component["number_of_containers"] -= 1
                    self._destroy(service, instance)
        text = f"Service {name} has successfully decommissioned instances."
        return 202, {"diagnostics": text, "state": "ACCEPTED"}

    def _node(self, host: str) -> dict[str, Any]:
        # RM, "Elements of the node object".
        state = "DECOMMISSIONING" if host in self._leaving else "RUNNING"
        number = sum(host == c.host for s in self.services.values() for c in s.containers.values())
        return {
            "rack": self.domains[host][0].removeprefix("rack="),
            "state": "LOST" if host in self._down else state,
            "id": f"{host}:45454",
            "nodeHostName": host,
            "nodeHTTPAddress": f"{host}:8042",
            "healthReport": "",
            "numContainers": number,
            "usedMemoryMB": 1024 * number,
            "availMemoryMB": MEMORY_MB - 1024 * number,
            "usedVirtualCores": number,
            "availableVirtualCores": CORES - number,
            # Not in RM: told of a node elsewhere (NodeReport), and by some distributions here.
            **({"decommissioningTimeout": self.timeouts[host]} if host in self.timeouts else {}),
        }

    # ------------------------------------------------------------ the master and the nodes

    def _act(self) -> None:
        while not self._over.wait(ACT_S):
            with self.lock:
                for service in self.services.values():
                    if service.is_up():
                        self._replace_ended(service)
                        self._place(service)

    def _replace_ended(self, service: FakeService) -> None:
        """Ask for another container in place of one that has ended, as restart_policy ALWAYS."""
        properties = service.definition.get("configuration", {}).get("properties", {})
        for instance, container in list(service.containers.items()):
            if container.process.poll() is None:
                continue
            del service.containers[instance]
            service.pending.append(instance)  # ComponentInstance: "Reinsert back to pending list"
            service.failures += container.process.returncode != 0
            if service.failures > int(properties.get(FAILURES, FAILURES_MAX)):
                self.end(service, "FAILED")  # "exceeded the limit. Shutting down now"

    def _place(self, service: FakeService) -> None:
        apart = service.component["placement_policy"]["constraints"][0]
        assert (apart["type"], apart["scope"]) == ("ANTI_AFFINITY", "NODE")
        taken = {each.host for each in service.containers.values()}
        free = [h for h in self.hosts if h not in taken | self._down | self._leaving]
        for instance, host in zip(list(service.pending), free, strict=False):
            service.pending.remove(instance)
            service.launched += 1
            number = service.id.removeprefix("application_")
            id_ = f"container_e01_{number}_01_{service.launched:06d}"
            process = self._launch(id_, host, service.component["launch_command"])
            container = FakeContainer(id=id_, instance=instance, host=host, process=process)
            service.containers[instance] = container

    def _launch(self, id_: str, host: str, command: str) -> subprocess.Popen[bytes]:
        """Run a container's command as a node manager does: with little in its environment."""
        folder = self.folder / "containers" / id_
        folder.mkdir(parents=True)
        # ContainerLaunch.sanitizeEnv, and yarn.nodemanager.env-whitelist.
        given = {"CONTAINER_ID": id_, "NM_HOST": host, "LOG_DIRS": str(folder), "USER": "me"}
        with open(folder / "stdout.txt", "wb") as output:
            return subprocess.Popen(
                ["/bin/bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={"PATH": os.environ["PATH"], "HOME": str(folder), **given},
                start_new_session=True,  # ContainerExecutor: setsid, so that a group can be killed
            )

    def _destroy(self, service: FakeService, instance: str) -> None:
        if instance in service.pending:
            service.pending.remove(instance)
        if instance in service.containers:
            end_group(service.containers.pop(instance).process)

    def end(self, service: FakeService, state: str) -> None:
        service.state = state
        for instance in [*service.containers, *service.pending]:
            self._destroy(service, instance)

    # ------------------------------------------------------------ harness

    def manager(self, job: str = PREFIX) -> YarnManager:
        name = job.rstrip("-")
        command = f"{sys.executable} -m holdfast.launch.yarn_place {self.folder / name}"
        link = RestLink(RestAccess(address=self.url, user="me"), "YARN")
        book = OrderBook(self.folder / name / ORDERS)
        return YarnManager(link, YarnService(name=name, command=command), book)

    def kill(self, host: str) -> None:
        with self.lock:
            self._down.add(host)
            for service in self.services.values():
                for container in service.containers.values():
                    if container.host == host:
                        kill_tree(container.process.pid)

    def restart_master(self, service: FakeService, within_s: float) -> None:
        """Have a service's master fail; its containers go on until the next one takes them over."""
        service.up_at = time.monotonic() + within_s

    def drain(self, host: str, reason: str, within_s: int = 0) -> str:
        self._leaving.add(host)
        if within_s:
            self.timeouts[host] = within_s
        return DECOMMISSIONED

    def away(self, away: bool) -> None:
        (self._away.set if away else self._away.clear)()

    def is_away(self) -> bool:
        return self._away.is_set()

    def processes(self, id_: PlacementId) -> list[int]:
        return our_processes(f"HOLDFAST_PLACEMENT={id_}")


def end_group(process: subprocess.Popen[bytes]) -> None:
    """End a container's group of processes, as a node manager does at last."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.wait()


def _answer(request: BaseHTTPRequestHandler, fake: FakeYarn) -> None:
    length = int(request.headers.get("Content-Length") or 0)
    text = request.rfile.read(length)
    if fake.is_away():
        request.close_connection = True
        return
    parts = urlsplit(request.path)
    fake.requests.append(f"{request.command} {parts.path}")
    fake.asked_by.append(parse_qs(parts.query).get("user.name", [""])[0])
    kind, data = "application/json;charset=utf-8", b""
    if fake.off and parts.path.startswith("/app/"):
        code, kind, data = 404, "text/html", SWITCHED_OFF
    else:
        try:
            code, found = fake.handle(request.command, parts.path, json.loads(text or b"null"))
        except HttpProblem as problem:
            code, found = problem.status, {"diagnostics": str(problem)}  # API, ServiceStatus
        data = b"" if found is None else json.dumps(found).encode()
    request.send_response(code)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    with contextlib.suppress(ConnectionError):
        request.wfile.write(data)

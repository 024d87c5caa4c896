"""Plays a ResourceManager with its services API and the node managers behind it, over real HTTP.

Every document that it serves was recorded from a real ResourceManager, Hadoop 3.4.2, and differs in
names, states and numbers only: yarn_answers.json has each, with its request and status. What no
real one was seen to answer is 404. A real process runs for each container, and is replaced when it
ends. These rules were seen, too:

* A raise of the number of containers, and a container that ends, replace those still pending.
* A decommissioned instance lowers the number; its name is not used again.
* A stopped service is STOPPED, its application FINISHED; after a kill they are STOPPED and KILLED,
  after two failures of the master FAILED and FAILED. The application of a destroyed service stays.
* Where the services API is off, the web server answers by itself: 500 at first, then 404.

It guesses: all times, which are shorter here; the racks; which host is chosen; that a master which
starts again finds all containers; the answers to calls that fail for other reasons (`failing`).
"""

from __future__ import annotations

import contextlib
import json
import os
import re
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

from holdfast.clusters.local.fake_cluster import kill_tree
from holdfast.clusters.order_book import ORDERS, OrderBook
from holdfast.clusters.rest_link import RestAccess, RestLink
from holdfast.clusters.yarn.yarn_manager import DECOMMISSIONED, YarnManager, YarnService
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.lab.contracts.cluster_contract import PREFIX
from labs.slurm_cluster import our_processes

ACT_S = 0.02
CLUSTER = 1458061340047  # when the ResourceManager started: a part of all ids
FAILURES = "yarn.service.container-failure-per-component.threshold"
FAILURES_MAX = 10  # Hadoop's default
MEMORY_MB, CORES = 8192, 8
ANSWERS: dict[str, dict[str, Any]] = json.loads(
    Path(__file__).with_name("yarn_answers.json").read_text()
)
SERVICE, HOSTS = "hf-job", ("yarn-nm1", "yarn-nm2")  # names in the recorded answers


def recorded(name: str, **names: str) -> tuple[int, Any]:
    """Return a recorded answer: its status and document. `names`: in place of recorded ones."""
    text = json.dumps(ANSWERS[name]["answer"])
    for old, new in names.items():
        text = text.replace(old.replace("_", "-"), new)
    return int(ANSWERS[name]["status"]), json.loads(text)


def recorded_of(name: str, service: str) -> tuple[int, Any]:
    return recorded(name, **{SERVICE: service})


class Answered(Exception):
    """Carries a recorded answer that is no success."""

    def __init__(self, answer: tuple[int, Any]) -> None:
        super().__init__(str(answer))
        self.answer = answer


@dataclass(slots=True, kw_only=True)
class FakeContainer:
    id: str
    instance: str
    host: str
    process: subprocess.Popen[bytes]

    def describe(self, template: dict[str, Any]) -> dict[str, Any]:
        ended = self.process.poll() is not None
        return {
            **template,
            "id": self.id,
            "bare_host": self.host,
            "state": "FAILED" if ended else "READY",
            "component_instance_name": self.instance,
        }


@dataclass(slots=True, kw_only=True)
class FakeService:
    """Describes a service, its application and its master, which is up from `up_at` on."""

    definition: dict[str, Any]
    id: str
    up_at: float
    state: str = "STARTED"
    asked: int = 0  # containers that the scheduler has still to allocate
    pending: list[str] = field(default_factory=list)  # instances that have no container
    containers: dict[str, FakeContainer] = field(default_factory=dict)  # by instance
    instances: int = 0  # names given so far
    launched: int = 1  # containers so far: the first one is the master's
    failures: int = 0
    decommissioned: list[str] = field(default_factory=list)
    end: str = ""  # how it ended: stopped, killed or failed
    listed_at: float = 0.0  # until then a new master does not list the containers

    @property
    def name(self) -> str:
        return str(self.definition["name"])

    @property
    def component(self) -> dict[str, Any]:
        found: dict[str, Any] = self.definition["components"][0]
        return found

    def is_up(self) -> bool:
        return not self.end and time.monotonic() >= self.up_at

    def add(self, number: int) -> None:
        for _ in range(number):
            while f"{self.component['name']}-{self.instances}" in self.decommissioned:
                self.instances += 1
            self.pending.append(f"{self.component['name']}-{self.instances}")
            self.instances += 1
        self.asked = number or self.asked

    def describe(self) -> tuple[int, Any]:
        """Describe the service; it has no components until its master is up, or once it ended."""
        about = {"name": self.name, "id": self.id}
        if not self.is_up():
            status, found = recorded(f"service-{self.end}" if self.end else "service-accepted")
            return status, {**found, **about}
        status, found = recorded("service-running")
        component = found["components"][0]
        template = component["containers"][0]
        given = {
            key: value
            for key, value in self.component.items()
            if key in ("name", "number_of_containers", "launch_command")
        }
        component["resource"].update(self.component["resource"])
        component.update(
            given,
            state="FLEXING" if self.pending else "STABLE",
            containers=[
                each.describe(template)
                for each in self.containers.values()
                if time.monotonic() >= self.listed_at
            ],
            decommissioned_instances=self.decommissioned,
        )
        return status, {**found, **about, "state": "STABLE" if not self.pending else "STARTED"}

    def describe_application(self) -> tuple[int, Any]:
        kind = "waiting" if self.is_up() else "master-waits"
        status, found = recorded_of(f"application-{self.end or kind}", self.name)
        found = name_application(found, self.id)
        alive = [each for each in self.containers.values() if each.process.poll() is None]
        found["app"]["runningContainers"] = 1 + len(alive)
        for request in found["app"].get("resourceRequests", ()):
            request["numContainers"] = self.asked
        return status, found


class FakeYarn:
    """Keeps all services and nodes; used as a context manager it serves them at `url`.

    It is the harness of the contract as well. `away`: it never answers. `off`: the services API is
    switched off. `failing`: the number of the next requests, which all fail. `start_s`: until a
    master is up. `full`: no container is allocated; the scheduler then answers `activities`, a
    recorded answer, of the hosts `described`. `blind`: hosts whose containers do not see the run
    directory.
    """

    def __init__(self, folder: Path, hosts: int = 4, start_s: float = 0.1) -> None:
        self.folder = folder
        self.hosts: Sequence[str] = tuple(f"nm{number}" for number in range(hosts))
        self.domains = {host: (f"rack=/r{number // 2}",) for number, host in enumerate(self.hosts)}
        self.queues = ["default", "gpu"]
        self.off = self.off_seen = False
        self.failing = 0
        self.start_s = start_s
        self.asked_by: list[str] = []
        self.requests: list[str] = []
        self.services: dict[str, FakeService] = {}
        self.applications: dict[str, FakeService] = {}
        self.full = False
        self.activities = "activities-full-queue"
        self.described = self.hosts
        self.blind: set[str] = set()
        self._away = threading.Event()
        self._over = threading.Event()
        self._down: set[str] = set()
        self.unhealthy: dict[str, str] = {}  # hosts, with their reports
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
            self.end(service, "stopped")

    @property
    def url(self) -> str:
        assert self._server is not None
        return f"http://127.0.0.1:{self._server.server_address[1]}"

    # ------------------------------------------------------------ requests

    def handle(self, method: str, path: str, body: Any) -> tuple[int, Any]:
        """Carry out one request; raise Answered with the recorded answer if it is refused."""
        with self.lock:
            if self.failing:
                self.failing -= 1
                return recorded("service-master-lost")
            match [method, *path.strip("/").split("/")]:
                case ["GET", "ws", "v1", "cluster", "nodes"]:
                    status, found = recorded("nodes")
                    template = found["nodes"]["node"][0]
                    found["nodes"]["node"] = [self._node(host, template) for host in self.hosts]
                    return status, found
                case ["GET", "ws", "v1", "cluster", "apps", id_]:
                    if id_ not in self.applications:
                        return recorded("application-unknown", application_1_0001=id_)
                    return self.applications[id_].describe_application()
                case ["GET", "ws", "v1", "cluster", "scheduler", "app-activities", id_]:
                    names = dict(zip(HOSTS, self.described, strict=False))
                    return recorded(self.activities, **names)
                case ["PUT", "ws", "v1", "cluster", "apps", id_, "state"]:
                    self.end(self.applications[id_], "killed")
                    return recorded("killed")
                case ["GET", "app", "v1", "services", "version"]:
                    return recorded("version")
                case ["POST", "app", "v1", "services"]:
                    return self._create(body)
                case ["GET", "app", "v1", "services", name]:
                    return self._service(name).describe()
                case ["PUT", "app", "v1", "services", name, "components", _]:
                    return self._flex(self._running(name, "raise-refused"), body)
                case ["PUT", "app", "v1", "services", name]:
                    return self._update(name, body)
                case ["DELETE", "app", "v1", "services", name]:
                    if name not in self.services:
                        raise Answered(recorded_of("destroy-refused", name))
                    self.end(self.services.pop(name), "stopped")
                    return recorded_of("destroyed", name)
        raise Answered(recorded("version-elsewhere"))

    def _service(self, name: str) -> FakeService:
        if name not in self.services:
            raise Answered(recorded("unknown", nobody=name))
        return self.services[name]

    def _running(self, name: str, refusal: str) -> FakeService:
        service = self._service(name)
        if not service.is_up():
            raise Answered(recorded_of(refusal, name))
        return service

    def _create(self, definition: dict[str, Any]) -> tuple[int, Any]:
        name, queue = definition["name"], definition.get("queue", "default")
        if name in self.services:
            raise Answered(recorded_of("name-taken", name))
        memory = definition["components"][0]["resource"]["memory"]
        if int(memory) > MEMORY_MB:
            raise Answered(recorded("too-large", **{"9000": memory, "5000": str(MEMORY_MB)}))
        self._apps += 1
        app = f"application_{CLUSTER}_{self._apps:04d}"
        if queue not in self.queues:
            status, found = recorded("unknown-queue", cpu=queue)
            raise Answered((status, name_application(found, app)))
        up_at = time.monotonic() + self.start_s
        service = FakeService(definition=definition, id=app, up_at=up_at)
        service.add(service.component["number_of_containers"])
        self.services[name] = self.applications[app] = service
        status, found = recorded_of("created", name)
        return status, name_application(found, app)

    def _flex(self, service: FakeService, body: dict[str, Any]) -> tuple[int, Any]:
        before, after = service.component["number_of_containers"], body["number_of_containers"]
        assert after > before, "a smaller number would end the newest containers"
        service.component["number_of_containers"] = after
        service.add(after - before)
        return recorded("raised", **{"from 1 to 3": f"from {before} to {after}"})

    def _update(self, name: str, body: dict[str, Any]) -> tuple[int, Any]:
        if body.get("state") == "STOPPED":
            self.end(self._service(name), "stopped")
            return recorded_of("stopped", name)
        service = self._running(name, "decommission-refused")
        for instance in [i for c in body["components"] for i in c["decommissioned_instances"]]:
            if instance not in service.decommissioned:
                service.decommissioned.append(instance)
                if instance in service.containers or instance in service.pending:
                    service.component["number_of_containers"] -= 1
                    self._destroy(service, instance)
        return recorded_of("decommissioned", name)

    def _node(self, host: str, template: dict[str, Any]) -> dict[str, Any]:
        state = "DECOMMISSIONING" if host in self._leaving else "RUNNING"
        state = "UNHEALTHY" if host in self.unhealthy else state
        number = sum(host == c.host for s in self.services.values() for c in s.containers.values())
        return {
            **template,
            "rack": self.domains[host][0].removeprefix("rack="),
            "state": "LOST" if host in self._down else state,
            "healthReport": self.unhealthy.get(host, ""),
            "id": f"{host}:45454",
            "nodeHostName": host,
            "nodeHTTPAddress": f"{host}:8042",
            "numContainers": number,
            "usedMemoryMB": 1024 * number,
            "availMemoryMB": MEMORY_MB - 1024 * number,
            "usedVirtualCores": number,
            "availableVirtualCores": CORES - number,
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
        """Ask for another container in place of each that has ended."""
        properties = service.definition.get("configuration", {}).get("properties", {})
        for instance, container in list(service.containers.items()):
            if container.process.poll() is None:
                continue
            del service.containers[instance]
            service.pending.append(instance)
            service.asked = 1
            service.failures += container.process.returncode != 0
            if service.failures > int(properties.get(FAILURES, FAILURES_MAX)):
                self.end(service, "failed")

    def _place(self, service: FakeService) -> None:
        apart = service.component["placement_policy"]["constraints"][0]
        assert (apart["type"], apart["scope"]) == ("ANTI_AFFINITY", "NODE")
        taken = {each.host for each in service.containers.values()}
        free = [h for h in self.hosts if h not in taken | self._down | self._leaving]
        free = [] if self.full else free[: service.asked]
        for instance, host in zip(list(service.pending), free, strict=False):
            service.pending.remove(instance)
            service.asked -= 1
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
        if host in self.blind:  # the path of the run directory is the command's last word
            command += "-elsewhere"
        given = {"CONTAINER_ID": id_, "NM_HOST": host, "LOG_DIRS": str(folder), "USER": "me"}
        with open(folder / "stdout.txt", "wb") as output:
            return subprocess.Popen(
                ["/bin/bash", "-c", command],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                cwd=folder,
                env={"PATH": os.environ["PATH"], "HOME": str(folder), **given},
                start_new_session=True,  # so that a group can be killed
            )

    def _destroy(self, service: FakeService, instance: str) -> None:
        if instance in service.pending:
            service.pending.remove(instance)
        if instance in service.containers:
            end_group(service.containers.pop(instance).process)

    def end(self, service: FakeService, how: str) -> None:
        """End a service and its application: stopped, killed or failed."""
        service.end = service.end or how
        for instance in [*service.containers, *service.pending]:
            self._destroy(service, instance)

    # ------------------------------------------------------------ harness

    def manager(self, job: str = PREFIX) -> YarnManager:
        name = job.rstrip("-")
        command = f"{sys.executable} -m holdfast.clusters.yarn.yarn_place {self.folder / name}"
        link = RestLink(RestAccess(address=self.url, user="me"), "YARN")
        book = OrderBook(self.folder / name / ORDERS)
        service = YarnService(name=name, command=command)
        return YarnManager(link, service, book, str(self.folder / name))

    def kill(self, host: str) -> None:
        with self.lock:
            self._down.add(host)
            for service in self.services.values():
                for container in service.containers.values():
                    if container.host == host:
                        kill_tree(container.process.pid)

    def restart_master(self, service: FakeService, within_s: float) -> None:
        """Make a service's master fail; its containers continue until the next one takes over."""
        service.up_at = time.monotonic() + within_s

    def stop(self, name: str) -> None:
        """Stop a service as an operator does."""
        with self.lock:
            self.end(self.services[name], "stopped")

    def drain(self, host: str, reason: str) -> str:
        self._leaving.add(host)
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


def name_application(found: Any, app: str) -> Any:
    """Put an application's id in place of the recorded one."""
    return json.loads(re.sub(r"application_\d+_\d+", app, json.dumps(found)))


def _answer(request: BaseHTTPRequestHandler, fake: FakeYarn) -> None:
    length = int(request.headers.get("Content-Length") or 0)
    text = request.rfile.read(length)
    if fake.is_away():
        request.close_connection = True
        return
    parts = urlsplit(request.path)
    fake.requests.append(f"{request.command} {parts.path}")
    fake.asked_by.append(parse_qs(parts.query).get("user.name", [""])[0])
    if fake.off and parts.path.startswith("/app/"):
        answer = recorded("switched-off" if fake.off_seen else "switched-off-first")
        fake.off_seen = True
    else:
        try:
            answer = fake.handle(request.command, parts.path, json.loads(text or b"null"))
        except Answered as answered:
            answer = answered.answer
    code, found = answer
    plain = isinstance(found, str)
    kind = "text/plain;charset=utf-8" if plain else "application/json;charset=utf-8"
    data = found.encode() if plain else json.dumps(found).encode()
    request.send_response(code)
    request.send_header("Content-Type", kind)
    request.send_header("Content-Length", str(len(data)))
    request.end_headers()
    with contextlib.suppress(ConnectionError):
        request.wfile.write(data)

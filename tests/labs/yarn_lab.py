"""Runs Hadoop's own ResourceManager with its services API, on this machine and its loopback.

HOLDFAST_YARN_JARS names a folder with the jars of Hadoop 3.4 and its libraries; `make yarn-lab`
fills one. It needs Java 17 and about 2 GiB of memory. The hosts are NodeManagers with names of
their own, which only these processes know; ZooKeeper keeps the services' registry.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import socket
import subprocess
import time
import urllib.request
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from holdfast.clusters.local.fake_cluster import kill_tree

JARS_VARIABLE = "HOLDFAST_YARN_JARS"
UP_S = 120.0
OVER = ("FINISHED", "FAILED", "KILLED")  # states of an application
SILENT_MS = 10_000  # a host that is silent for so long is lost
RESOURCE_MANAGER = "org.apache.hadoop.yarn.server.resourcemanager.ResourceManager"
NODE_MANAGER = "org.apache.hadoop.yarn.server.nodemanager.NodeManager"
ZOOKEEPER = "org.apache.zookeeper.server.ZooKeeperServerMain"
ADMIN = "org.apache.hadoop.yarn.client.cli.RMAdminCLI"
REGISTRY_CLIENT = "org.apache.zookeeper.ZooKeeperMain"
CAPACITY = "yarn.scheduler.capacity."
LOG4J = """log4j.rootLogger=INFO,A
log4j.appender.A=org.apache.log4j.ConsoleAppender
log4j.appender.A.layout=org.apache.log4j.PatternLayout
log4j.appender.A.layout.ConversionPattern=%d{HH:mm:ss} %p %c{1}: %m%n
"""


def missing() -> str:
    """Return the reason why it cannot run here, or ""."""
    if not list(jars().glob("hadoop-yarn-services-api-*.jar")):
        return f"{JARS_VARIABLE} names no folder with Hadoop's jars: `make yarn-lab` gets them"
    return "" if shutil.which("java") else "there is no java (package openjdk-17-jre-headless)"


def jars() -> Path:
    """Return the folder of Hadoop's jars."""
    return Path(os.environ.get(JARS_VARIABLE) or "/nowhere")


class YarnLab:
    """Keeps the servers of one cluster; used as a context manager. `folder`: theirs.

    `settings`: further properties. The beginning of a name gives the file to which it belongs;
    those of core-site.xml are the ResourceManager's alone.
    """

    def __init__(
        self, folder: Path, hosts: int = 3, settings: Mapping[str, str] | None = None
    ) -> None:
        self.folder = folder
        self.hosts = tuple(f"nm{number}" for number in range(hosts))
        self._settings = dict(settings or {})
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        names = ("zookeeper", "web", "scheduler", "tracker", "admin", "client")
        self._ports = dict(zip(names, free_ports(len(names)), strict=True))
        self._names = folder / "hosts"

    def __enter__(self) -> YarnLab:
        self.folder.mkdir(parents=True)
        addresses = {socket.gethostname(): "127.0.0.1", "localhost": "127.0.0.1"}
        addresses |= {host: f"127.0.1.{number + 1}" for number, host in enumerate(self.hosts)}
        self._names.write_text("".join(f"{there} {name}\n" for name, there in addresses.items()))
        self._configure("")
        port = str(self._ports["zookeeper"])
        self._start("zookeeper", ZOOKEEPER, port, str(self.folder / "zookeeper"))
        self._start("manager", RESOURCE_MANAGER)
        try:
            self.until(self.answers, "the ResourceManager answers")
            for host in self.hosts:
                self.start(host)
            self.until(lambda: self.running() == {*self.hosts}, "all hosts are there")
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for host in self.hosts:
            self.kill(host)
        for name in ("manager", "zookeeper"):
            self._end(name)

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self._ports['web']}"

    def answers(self) -> bool:
        """Return whether the services API answers."""
        return bool(self._get("/app/v1/services/version"))

    def running(self) -> set[str]:
        """Return the hosts that the ResourceManager calls running."""
        nodes = (self._get("/ws/v1/cluster/nodes").get("nodes") or {}).get("node") or []
        return {node["nodeHostName"] for node in nodes if node["state"] == "RUNNING"}

    def start(self, host: str) -> None:
        self._configure(host)
        self._start(host, NODE_MANAGER)

    def kill(self, host: str) -> None:
        """End a host with all its processes, a service's master as well."""
        self._end(host)
        for pid in self.containers(host):
            kill_tree(pid)

    def drain(self, host: str) -> None:
        """Decommission a host, which may take an hour."""
        self._exclude([*self._excluded(), host])

    def bring_back(self, host: str) -> None:
        """Make a host that was killed or drained take part again."""
        if host in self._excluded():
            self._exclude([each for each in self._excluded() if each != host])
        process = self._processes.get(host)
        if process is None or process.poll() is not None:  # it ends once it is decommissioned
            self.start(host)

    def _excluded(self) -> list[str]:
        return (self.folder / "exclude").read_text().split()

    def _exclude(self, hosts: Sequence[str]) -> None:
        (self.folder / "exclude").write_text("".join(f"{host}\n" for host in hosts))
        command = self._java("", ADMIN, "-refreshNodes", "-g", "3600", "-server")
        subprocess.run(command, env=self._environment(""), check=True, timeout=UP_S)

    def break_disk(self, host: str) -> None:
        """Take a host's local directory away: a file has its place."""
        local = self.folder / host / "local"
        local.rename(self.folder / host / "local-before")
        local.touch()

    def registry(self) -> list[str]:
        """Return the names of all services in the registry, by ZooKeeper's own client."""
        server = f"127.0.0.1:{self._ports['zookeeper']}"
        command = self._java("", REGISTRY_CLIENT, "-server", server, "ls", "-R", "/")
        done = subprocess.run(
            command,
            env=self._environment(""),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            check=True,
            timeout=UP_S,
        )
        found = (line.partition("/yarn-service/")[2] for line in done.stdout.splitlines())
        return sorted({name.partition("/")[0] for name in found if name})

    def service_files(self) -> list[Path]:
        """Return the nodes that services have left below their base path."""
        return sorted(path for path in (self.folder / "services").rglob("*") if path.is_file())

    def applications(self) -> list[str]:
        """Return the applications that have not ended."""
        found = (self._get("/ws/v1/cluster/apps").get("apps") or {}).get("app") or []
        return [each["id"] for each in found if each["state"] not in OVER]

    def containers(self, host: str = "") -> list[int]:
        """Return all processes of containers, also those whose parents have ended.

        `host`: of one host's containers.
        """
        names = ["CONTAINER_ID=", f"HADOOP_CONF_DIR={self.folder}/"]
        names += [f"NM_HOST={host}\0"] if host else []
        return [
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/environ")
            if all(name in read(path) for name in names)
        ]

    def container_files(self) -> list[Path]:
        """Return the files that containers have left in the hosts' local directories."""
        return sorted(self.folder.glob("nm*/local/usercache/*/appcache/*"))

    def away(self, away: bool) -> None:
        """End the ResourceManager, or start it again and wait until it knows the hosts."""
        if away:
            self._end("manager")
            return
        before = {host for host in self.hosts if host in self._processes} - {*self._excluded()}
        self._start("manager", RESOURCE_MANAGER)
        self.until(lambda: self.running() >= before, "the hosts have found their manager")

    def master(self) -> int:
        """Return the process of the one service's master."""
        (pid,) = (
            int(path.parent.name)
            for path in Path("/proc").glob("[0-9]*/cmdline")
            if is_master(path) and f"{self.folder}/" in read(path)
        )
        return pid

    # ------------------------------------------------------------ processes

    def _configure(self, host: str) -> None:
        """Write the configuration of the ResourceManager and clients, or of a host."""
        conf = self._conf(host)
        conf.mkdir(exist_ok=True)
        folder = self.folder
        here = {name: f"127.0.0.1:{port}" for name, port in self._ports.items()}
        (folder / "exclude").touch()
        write_xml(
            conf / "core-site.xml",
            {
                "fs.defaultFS": "file:///",
                "hadoop.registry.zk.quorum": here["zookeeper"],
                "hadoop.tmp.dir": f"{folder}/tmp/{host}",
                **({} if host else self._given("hadoop.")),
            },
        )
        (conf / "log4j.properties").write_text(LOG4J)
        write_xml(
            conf / "capacity-scheduler.xml",
            {
                "yarn.scheduler.capacity.root.queues": "default",
                "yarn.scheduler.capacity.root.default.capacity": "100",
                "yarn.scheduler.capacity.maximum-am-resource-percent": "0.9",
                **self._given(CAPACITY),
            },
        )
        manager, node, service = "yarn.resourcemanager", "yarn.nodemanager", "yarn.service"
        found = {
            f"{manager}.hostname": "127.0.0.1",
            f"{manager}.webapp.address": here["web"],
            f"{manager}.scheduler.address": here["scheduler"],
            f"{manager}.resource-tracker.address": here["tracker"],
            f"{manager}.admin.address": here["admin"],
            f"{manager}.address": here["client"],
            f"{manager}.placement-constraints.handler": "scheduler",
            f"{manager}.nodes.exclude-path": f"{folder}/exclude",
            f"{manager}.recovery.enabled": "true",
            f"{manager}.store.class": f"{RESOURCE_MANAGER.rpartition('.')[0]}.recovery."
            "FileSystemRMStateStore",
            f"{manager}.fs.state-store.uri": f"file://{folder}/state",
            "yarn.webapp.api-service.enable": "true",
            "yarn.scheduler.minimum-allocation-mb": "128",
            "yarn.nm.liveness-monitor.expiry-interval-ms": str(SILENT_MS),
            # A master whose host came back before it counted as lost is missed by this alone.
            "yarn.am.liveness-monitor.expiry-interval-ms": str(2 * SILENT_MS),
            f"{service}.base.path": f"{folder}/services",
            f"{service}.am-resource.memory": "512",
            f"{service}.am.java.opts": f"-Xmx256m -Djdk.net.hosts.file={self._names}",
            "yarn.application.classpath": f"{jars()}/*",
            f"{node}.vmem-check-enabled": "false",
            f"{node}.pmem-check-enabled": "false",
            f"{node}.resource.memory-mb": "4096",
            f"{node}.resource.cpu-vcores": "8",
            f"{node}.disk-health-checker.enable": "false",
            f"{node}.env-whitelist": "JAVA_HOME,HADOOP_CONF_DIR,PATH,LANG",
            f"{node}.admin-env": f"MALLOC_ARENA_MAX=1,CLASSPATH={jars()}/*",
            **self._given("yarn."),
        }
        if host:
            localizer, web, address = free_ports(3)
            found |= {
                f"{node}.hostname": host,
                f"{node}.address": f"{host}:{address}",
                f"{node}.localizer.address": f"{host}:{localizer}",
                f"{node}.webapp.address": f"{host}:{web}",
                f"{node}.local-dirs": f"{folder}/{host}/local",
                f"{node}.log-dirs": f"{folder}/{host}/log",
            }
        write_xml(conf / "yarn-site.xml", found)

    def _given(self, begin: str) -> dict[str, str]:
        """Return the properties of a test that belong in the file of such names."""
        files = (CAPACITY, "hadoop.", "yarn.")
        return {
            name: value
            for name, value in self._settings.items()
            if next(each for each in files if name.startswith(each)) == begin
        }

    def _conf(self, host: str) -> Path:
        return self.folder / f"conf-{host or 'manager'}"

    def _environment(self, host: str) -> dict[str, str]:
        java = Path(shutil.which("java") or "").resolve().parents[1]
        given = {"HADOOP_CONF_DIR": str(self._conf(host)), "JAVA_HOME": str(java), "LC_ALL": "C"}
        return {**os.environ, **given}

    def _java(self, host: str, *words: str) -> list[str]:
        path = f"{self._conf(host)}:{jars()}/*"
        options = (
            f"-Djdk.net.hosts.file={self._names}",
            "--add-opens",
            "java.base/java.lang=ALL-UNNAMED",
        )
        return ["java", "-Xmx300m", *options, "-cp", path, *words]

    def _start(self, name: str, *words: str) -> None:
        host = name if name in self.hosts else ""
        with open(self.folder / f"{name}.log", "ab") as log:
            self._processes[name] = subprocess.Popen(
                self._java(host, *words),
                env=self._environment(host),
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
                start_new_session=True,
            )

    def _end(self, name: str) -> None:
        if name in self._processes:
            process = self._processes.pop(name)
            process.send_signal(signal.SIGKILL)
            process.wait()

    def _get(self, path: str) -> dict[str, Any]:
        try:
            with urllib.request.urlopen(self.url + path, timeout=10.0) as answer:
                found: dict[str, Any] = json.loads(answer.read())
                return found
        except (OSError, ValueError):
            return {}

    def until(self, ready: Callable[[], object], what: str) -> None:
        deadline = time.monotonic() + UP_S
        while not ready():
            assert time.monotonic() < deadline, f"not in {UP_S:g} s: {what} ({self.folder})"
            time.sleep(0.2)


def is_master(path: Path) -> bool:
    return "org.apache.hadoop.yarn.service.ServiceMaster" in read(path) and "java\0" in read(path)


def read(path: Path) -> str:
    with contextlib.suppress(OSError):
        return path.read_text(errors="replace")
    return ""


def free_ports(number: int) -> list[int]:
    """Return ports that are free now."""
    with contextlib.ExitStack() as stack:
        listeners = [
            stack.enter_context(socket.create_server(("127.0.0.1", 0))) for _ in range(number)
        ]
        return [listener.getsockname()[1] for listener in listeners]


def write_xml(path: Path, properties: Mapping[str, str]) -> None:
    """Write a configuration file of Hadoop."""
    lines = (
        f"<property><name>{name}</name><value>{escape(value)}</value></property>\n"
        for name, value in properties.items()
    )
    path.write_text(f"<configuration>\n{''.join(lines)}</configuration>\n")

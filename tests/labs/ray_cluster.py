"""Runs a real Ray cluster on this machine: a head that takes no agents, and several raylets.

It is for tests of jobs on Ray, and a harness for the contract of adapters. The head keeps its
tables on disk, as a head that may be restarted must, and soon considers a node lost.
"""

from __future__ import annotations

import contextlib
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.clusters.local.fake_cluster import kill_tree
from holdfast.clusters.ray.ray_manager import RayLink, RayManager, RayShare, link_to
from holdfast.clusters.ray.ray_tables import DRAINED, NAMESPACE, RayTables, read_tables
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.lab.contracts.cluster_contract import PREFIX
from labs.slurm_cluster import free_ports, our_processes

WAIT_S = 60.0
CLUSTER, NODE = "HOLDFAST_RAY_CLUSTER", "HOLDFAST_RAY_NODE"  # in its processes' environment
HOST, HEAD = "127.0.0.1", "head"
STORE_BYTES = 80_000_000  # nearly the least that Ray accepts
SETTINGS = {
    "health_check_initial_delay_ms": 1000,
    "health_check_period_ms": 1000,
    "health_check_timeout_ms": 3000,
    "health_check_failure_threshold": 5,
}


class RayCluster:
    """Starts a cluster of `hosts` hosts for the length of a with statement."""

    def __init__(self, hosts: int = 5) -> None:
        self.hosts: Sequence[str] = tuple(f"node{number}" for number in range(hosts))
        self.domains = {host: (f"rack={host}",) for host in self.hosts}
        self.address = ""
        self.folder = Path()  # a short path, for the sockets in it
        self._links: list[RayLink] = []
        self._asked: RayLink | None = None
        self._gcs: tuple[list[str], dict[str, str]] | None = None

    @staticmethod
    def missing() -> str:
        """Return the programs that are missing here; empty if all are here."""
        return "" if importlib.util.find_spec("ray") else "Ray is not installed: holdfast[ray]"

    def __enter__(self) -> RayCluster:
        self.folder = Path(tempfile.mkdtemp(prefix="hf-ray-"))
        try:
            self._start_all()
        except BaseException:
            self.__exit__()
            raise
        return self

    def __exit__(self, *exc: object) -> None:
        for link in self._links:
            link.close()
        while found := [*our_processes(f"{CLUSTER}={self.folder}"), *self._titled()]:
            for pid in found:
                kill_tree(pid)
        shutil.rmtree(self.folder, ignore_errors=True)

    def _start_all(self) -> None:
        port, dashboard, client = free_ports(3)
        head = self._start(
            HEAD,
            *("--head", f"--port={port}", "--num-cpus=0", "--include-dashboard=false"),
            *(f"--dashboard-port={dashboard}", f"--ray-client-server-port={client}"),
            f"--system-config={json.dumps(SETTINGS)}",
        )
        assert head.wait(WAIT_S) == 0, self._log(HEAD)
        self.address = f"{HOST}:{port}"
        # Two at a time: a node must start within 30 s, and starts processes of its own.
        for pair in zip(self.hosts[::2], [*self.hosts[1::2], ""], strict=False):
            started = {host: self._start_host(host) for host in filter(None, pair)}
            for host, node in started.items():
                assert node.wait(WAIT_S) == 0, self._log(host)
        self.until(lambda: len(self.tables().nodes) > len(self.hosts), "all nodes are there")

    def _start_host(self, host: str) -> subprocess.Popen[bytes]:
        options = (f"--address={self.address}", "--num-cpus=1", f"--labels=rack={host}")
        return self._start(host, *options)

    def _start(self, name: str, *options: str) -> subprocess.Popen[bytes]:
        command = [sys.executable, "-m", "ray.scripts.scripts", "start", f"--node-name={name}"]
        command += [
            f"--temp-dir={self.folder}/{name}",  # two that start at once must not share one
            f"--node-ip-address={HOST}",
            "--min-worker-port=0",
            "--max-worker-port=0",
            "--disable-usage-stats",
        ]
        with open(self.folder / f"{name}.out", "ab") as output:
            return subprocess.Popen(
                [*command, f"--object-store-memory={STORE_BYTES}", *options],
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                env={
                    **os.environ,
                    CLUSTER: str(self.folder),
                    NODE: f"{self.folder.name}-{name}",
                    "RAY_gcs_storage": "rocksdb",
                    "RAY_gcs_storage_path": f"{self.folder}/store",
                },
            )

    def _log(self, name: str) -> str:
        return (self.folder / f"{name}.out").read_text()[-3000:]

    def link(self) -> RayLink:
        self._links.append(link_to(self.address, self.folder / "driver.out"))
        return self._links[-1]

    def tables(self) -> RayTables:
        """Return Ray's tables of its nodes and our actors."""
        if self._asked is None:
            self._asked = self.link()
        return read_tables(self._asked.ask("tables"))

    def until(self, ready: Callable[[], Any], what: str, within_s: float = WAIT_S) -> Any:
        deadline = time.monotonic() + within_s
        while not (found := ready()):
            assert time.monotonic() < deadline, f"not in {within_s:g} s: {what}"
            time.sleep(0.05)
        return found

    # ------------------------------------------------------------ harness

    def manager(self, job: str = PREFIX, cpus: float = 0.5) -> RayManager:
        share = RayShare(cpus=cpus, label="rack")
        return RayManager(self.link(), job, self.folder / "placements", share)

    def raylet(self, host: str) -> int:
        """Return the process that makes a host part of the cluster."""
        (found,) = [pid for pid in self.processes_on(host) if _is(pid, "raylet")]
        return found

    def kill(self, host: str) -> None:
        found = self.processes_on(host)
        for pid in sorted(found, key=lambda pid: not _is(pid, "raylet")):
            kill_tree(pid)

    def kill_actor(self, name: str) -> None:
        """Make Ray kill an actor, as any of its users could."""
        script = "import sys, ray; ray.init(sys.argv[1], namespace=sys.argv[2]); "
        script += "ray.kill(ray.get_actor(sys.argv[3]))"
        self._run("-c", script, self.address, NAMESPACE, name)

    def drain(self, host: str, reason: str, within_s: float | None = None) -> str:
        """Drain a host by Ray's own command; return its answer about the reason."""
        deadline = [] if within_s is None else [f"--deadline-remaining-seconds={within_s:.0f}"]
        self._run(
            *("-m", "ray.scripts.scripts", "drain-node", f"--address={self.address}"),
            *(f"--node-id={self.tables().ids([host])[0]}", *deadline),
            *("--reason=DRAIN_NODE_REASON_PREEMPTION", f"--reason-message={reason}"),
        )
        return DRAINED

    def bring_back(self, host: str) -> None:
        """Start a host again that was killed or drained."""
        self.kill(host)  # Ray ends a drained one itself, once no task runs there
        assert self._start_host(host).wait(WAIT_S) == 0, self._log(host)

    def away(self, away: bool) -> None:
        """End the head's server of tables, or start it again as it was."""
        if away:
            (pid,) = [pid for pid in self.processes_on(HEAD) if _is(pid, "gcs_server")]
            found = (_words(pid, "cmdline"), dict(w.split("=", 1) for w in _words(pid, "environ")))
            self._gcs = found
            kill_tree(pid)
        else:
            assert self._gcs is not None
            command, environment = self._gcs
            with open(self.folder / "gcs.out", "ab") as output:
                subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    env=environment,
                    start_new_session=True,
                )

    def _run(self, *command: str) -> None:
        subprocess.run([sys.executable, *command], capture_output=True, check=True, timeout=WAIT_S)

    def processes(self, id_: PlacementId) -> list[int]:
        return our_processes(f"HOLDFAST_PLACEMENT={id_}")

    def _titled(self) -> list[int]:
        """Find processes that overwrote their environment with a title: they have a log open."""
        found = []
        for name in filter(str.isdigit, os.listdir("/proc")):
            with contextlib.suppress(OSError):
                if Path("/proc", name, "cmdline").read_bytes().startswith(b"ray::"):
                    files = [os.readlink(fd) for fd in Path("/proc", name, "fd").iterdir()]
                    if any(file.startswith(f"{self.folder}/") for file in files):
                        found.append(int(name))
        return found

    def processes_on(self, host: str) -> list[int]:
        return our_processes(f"{NODE}={self.folder.name}-{host}")


def _is(pid: int, program: str) -> bool:
    words = _words(pid, "cmdline")
    return bool(words) and Path(words[0]).name == program


def _words(pid: int, file: str) -> list[str]:
    with contextlib.suppress(OSError):
        return Path(f"/proc/{pid}/{file}").read_bytes().decode().split("\0")[:-1]
    return []

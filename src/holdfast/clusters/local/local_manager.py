"""Keeps a job's nodes as processes of this machine: to try things out, and to test with.

It plays a cluster of a few hosts, each with room for one placement. Its knowledge is in files, one
for each placement, so any number of these objects and any restart find the same. Its launcher is
`holdfast launch local`.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

from holdfast.engine.commands.launch_command import launch_parser, make_run_dir
from holdfast.engine.core.errors import Refused, WorldError
from holdfast.engine.core.fleet.placements import Holding, Placement, PlacementId
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_job import launch_cluster_job
from holdfast.engine.fleet.cluster_manager import FleetPlan, PlacementOrder, job_prefix
from holdfast.engine.host.lifetime import start_time
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.state.store.regular_files import append_regular, read_json

FOLDER = "placements"


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlacement:
    """Records a placement: the process that keeps it, which is known by pid and start time."""

    id: PlacementId
    host: str
    pid: int
    started: int

    @property
    def handle(self) -> str:
        return f"{self.pid}.{self.started}"

    def runs(self) -> bool:
        return start_time(self.pid) == self.started


class LocalManager:
    """Starts and ends the placements whose ids begin with `prefix`.

    `keeper`: pid of the process with which all of them end.
    """

    def __init__(self, folder: Path, hosts: Sequence[str], keeper: int, prefix: str) -> None:
        self._folder = folder
        self._hosts = tuple(hosts)
        self._keeper = keeper
        self._prefix = prefix

    async def observe(self) -> Sequence[Placement]:
        return [
            Placement(id=each.id, handle=each.handle, holding=Holding.RUNNING, host=each.host)
            for each in self.list_running()
        ]

    async def request(self, order: PlacementOrder) -> None:
        with self._alone():
            known = self._folder / f"{order.id}.json"
            if known.exists():
                return
            host = self.free_host(order.avoid)
            placement = self.start(order, host)
            temporary = known.with_suffix(".new")
            fields = {f: getattr(placement, f) for f in ("id", "host", "pid", "started")}
            temporary.write_text(json.dumps(fields))
            temporary.rename(known)

    async def release(self, id_: PlacementId, handle: str) -> None:
        for each in self.list_running():
            if each.id == id_ and each.handle == handle:
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each.pid, signal.SIGTERM)

    async def close(self) -> None:
        pass

    def list_running(self) -> list[LocalPlacement]:
        """Return this job's placements that run, in the order of their ids."""
        return [each for each in self._all() if each.id.startswith(self._prefix) and each.runs()]

    def free_host(self, avoid: Sequence[str]) -> str:
        """Return a host with room. Refused if there is none."""
        taken = {each.host for each in self._all() if each.runs()}
        free = [host for host in self._hosts if host not in taken and host not in avoid]
        if not free:
            raise Refused(f"all {len(self._hosts)} hosts are taken or avoided")
        return free[0]

    def start(self, order: PlacementOrder, host: str) -> LocalPlacement:
        """Start a placement; a process of ours keeps it, and ends with the job's launcher."""
        command = [sys.executable, "-m", "holdfast.clusters.local.local_place", str(self._keeper)]
        popen = subprocess.Popen(
            [*command, *order.command],
            stdin=subprocess.DEVNULL,
            env={**os.environ, **order.environment},
            start_new_session=True,
        )
        started = start_time(popen.pid) or 0
        return LocalPlacement(id=order.id, host=host, pid=popen.pid, started=started)

    def _all(self) -> list[LocalPlacement]:
        self._folder.mkdir(exist_ok=True)
        paths = sorted(self._folder.glob("*.json"))
        return [_read(path) for path in paths]

    @contextlib.contextmanager
    def _alone(self) -> Iterator[None]:
        """Keep other managers of the same folder from starting a placement at the same time."""
        self._folder.mkdir(exist_ok=True)
        with open(append_regular(self._folder / "lock"), "w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            yield


def _read(path: Path) -> LocalPlacement:
    """Read the description of a placement. WorldError."""
    try:
        return LocalPlacement(**read_json(path))
    except (OSError, ValueError, TypeError) as error:
        raise WorldError(f"{path} describes no placement: {error}; remove it") from None


def open_manager(plan: FleetPlan, spec: JobSpec) -> LocalManager:
    """Open the manager of a job's run directory; the launcher is our parent."""
    hosts = [f"local{number}" for number in range(plan.nodes_max + 1)]
    return LocalManager(Path(plan.run_dir, FOLDER), hosts, os.getppid(), job_prefix(spec.job))


def main(argv: list[str]) -> int:
    """Run a job to its end. Returns the exit status."""
    options = launch_parser(
        "local",
        "Run a training script on several nodes that are processes of this machine, and replace "
        "those that are lost, as the other launchers do on a cluster.",
    ).parse_args(argv)
    return go_on(make_run_dir(options, "local", {}), options.host, options.port)


def go_on(run_dir: RunDir, host: str, port: int) -> int:
    """Run a job, or continue it, from here."""
    return launch_cluster_job(run_dir, host, port)

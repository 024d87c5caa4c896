"""Runs jobs on the nodes of a cluster manager, a fake or a real one, for the tests.

A job goes on slowly until a test lets it go; then it ends with the digest that all such jobs have.
"""

from __future__ import annotations

import contextlib
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from conftest import SCRIPTS, finish
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.lab.contracts.cluster_contract import serving_nodes
from labs.slurm_cluster import our_processes

SCRIPT, STEPS = str(SCRIPTS / "paced.py"), "600"
OPTIONS = ["--nproc", "1", "--virtual", "4"]
JOB_S = 240.0


class ClusterRun:
    """Runs a job that goes on slowly until it is let go, on the nodes of a cluster manager.

    `asked`: the words after `holdfast launch`, which name the manager and where it is.
    """

    def __init__(self, tmp_path: Path, asked: Sequence[str], *options: str) -> None:
        self.go, self.folder = tmp_path / "go", tmp_path / "run"
        command = ("launch", *asked, "--host", "127.0.0.1", "--memory", "1024")
        command += ("--run-dir", str(self.folder), *options)
        script = [SCRIPT, str(self.go), STEPS]
        self.run = LocalRun(self.folder, OPTIONS, script, command=command)

    def serving(self, number: int, without: Sequence[str] = ()) -> list[str]:
        """Wait until that number of agents train, and none in `without`; return their names."""

        def complete() -> list[str]:
            with contextlib.suppress(HoldfastError, OSError):
                found = serving_nodes(self.run.status())
                return found if len(found) == number and not set(without) & set(found) else []
            return []

        found: list[str] = self.until(complete, f"{number} nodes without {without}")
        return found

    def until(self, ready: Callable[[], Any], what: str) -> Any:
        try:
            return self.run.until(ready, JOB_S, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.written()}") from None

    def written(self) -> str:
        """Return what agents and workers have printed."""
        return "\n".join(path.read_text() for path in self.folder.glob("logs/hf-*.txt"))

    def digest(self) -> str:
        """Let the job finish, and return its digest. Check that no process is left."""
        self.go.touch()
        finish(self.run)
        (found,) = re.findall("^[0-9a-f]{64}$", self.written(), re.MULTILINE)
        return str(found)

    def lose(self, name: str) -> None:
        """Kill all processes of a node's agent, and its container or task with them."""
        for pid in our_processes(f"HOLDFAST_PLACEMENT={name}"):
            strike(pid)

    def lose_fleet(self) -> None:
        """Kill the process that asks the manager for nodes."""
        strike(self.until(self._fleet, "the fleet's process"))

    def _fleet(self) -> int:
        for pid in self.run.leftovers():
            with contextlib.suppress(OSError):
                if (
                    b"holdfast.engine.fleet.fleet_process"
                    in Path(f"/proc/{pid}/cmdline").read_bytes()
                ):
                    return pid
        return 0


def run_undisturbed(folder: Path, *words: str, script: str = SCRIPT) -> str:
    """Run the same job on this machine alone; return its digest. `words`: of the script."""
    go = folder / "go"
    go.touch()
    with LocalRun(folder / "run", OPTIONS, [script, str(go), *(words or (STEPS,))]) as run:
        return finish(run)


def assert_ends_with_its_service(
    folder: Path, asked: Sequence[str], undisturbed: str, stop: Callable[[str], None]
) -> None:
    """Run a job whose service is stopped, and resume it. `stop`: as an operator, by its name."""
    store = ("--store", str(folder / "store"), "--save-every", "10")
    job = ClusterRun(folder, asked, "--nodes", "2", "--wait-for-nodes", *store)
    with job.run:
        job.serving(2)
        name = job.run.run_dir.spec().job[:8]
        stop(f"hf-{name}")
        assert job.run.wait(JOB_S) == 1
    said = f"YARN has ended service hf-{name}, as by `yarn app -stop hf-{name}` (Stopped by user "
    reason = [line for line in job.run.err if said in line]
    assert any("the job ends" in line for line in reason), job.run.err
    assert any(f"`holdfast resume {job.folder}` continues it" in line for line in reason), reason
    job.run = LocalRun(job.folder, [], [], command=("resume", str(job.folder)))
    with job.run:
        job.serving(2)
        assert job.digest() == undisturbed


def host_of(name: str) -> str:
    """Return the host of a node, by the environment of its agent."""
    return environment_of(our_processes(f"HOLDFAST_PLACEMENT={name}")[0])["NM_HOST"]


def environment_of(pid: int) -> dict[str, str]:
    words = Path(f"/proc/{pid}/environ").read_text(errors="replace").split("\0")
    return dict(word.split("=", 1) for word in words if "=" in word)

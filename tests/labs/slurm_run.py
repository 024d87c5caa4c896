"""Submits jobs to a lab's Slurm, and watches them."""

from __future__ import annotations

import contextlib
import re
import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.cli.main import main
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from holdfast.lab.contracts.cluster_contract import serving_nodes
from labs.cluster_run import OPTIONS, SCRIPT, STEPS
from labs.slurm_cluster import SlurmCluster

JOB_S = 150.0

# `sbatch --wait` considers a requeued job ended.
SUBMIT = """
id=$(env "$@" sbatch --parsable "$0") || exit 1
echo "$id"
while true; do
  case "$(scontrol show job "$id" | grep -o 'JobState=[A-Z_]*')" in
    *COMPLETED) exit 0 ;;
    *FAILED | *CANCELLED | *TIMEOUT | *NODE_FAIL) exit 1 ;;
  esac
  sleep 0.2
done
"""


class SlurmRun:
    """Runs a job under Slurm; its LocalRun submits the job and waits for the end."""

    def __init__(
        self,
        tmp_path: Path,
        slurm: SlurmCluster,
        *options: str,
        script: str = SCRIPT,
        steps: Sequence[str] = (STEPS,),
    ) -> None:
        self.run_dir, self.go, self.slurm = tmp_path / "run", tmp_path / "go", slurm
        self.environment: list[str] = []  # variables that the user of sbatch has set
        words = ["--run-dir", str(self.run_dir), "--host", "127.0.0.1", "--write-script"]
        words += [*options, *OPTIONS, script, str(self.go), *steps]
        assert main(["launch", "slurm", *words]) == 0

        def submit(command: list[str], **how: Any) -> subprocess.Popen[str]:
            script = str(self.run_dir / "slurm_job.sh")
            return subprocess.Popen(["bash", "-c", SUBMIT, script, *self.environment], **how)

        self.run = LocalRun(self.run_dir, [], [], popen=submit)

    def until(self, ready: Callable[[], Any], what: str) -> Any:
        try:
            return self.run.until(ready, JOB_S, what)
        except AssertionError as error:
            raise AssertionError(f"{error}\n{self.log()}") from None

    def begin(self) -> str:
        """Return the id of the job, once Slurm has taken it in."""
        self.until(lambda: self.run.out, "the submission")
        self.slurm.allocation = self.run.out[0]
        return self.slurm.allocation

    def serving(self) -> list[str]:
        with contextlib.suppress(HoldfastError):
            return serving_nodes(self.run.status())
        return []

    def script_host(self) -> str:
        return self.slurm.slurm(
            "squeue", "--noheader", f"--jobs={self.slurm.allocation}", "--format=%B"
        )

    def further_jobs(self) -> dict[str, str]:
        """Return the names of the further jobs that run, with their ids."""
        text = self.slurm.slurm("squeue", "--noheader", "--states=R", "--format=%j %i")
        jobs = dict(line.split() for line in text.splitlines())
        return {name: id_ for name, id_ in jobs.items() if name.count("-") > 1}

    def steps_saved(self) -> bool:
        return bool(Checkpoints(open_storage(str(self.run_dir.parent / "store"))).steps())

    def digest(self, within_s: float = JOB_S) -> str:
        """Let the job go on to its end, and return its output."""
        self.go.touch()
        assert self.run.wait(within_s) == 0, self.log()
        written = "\n".join(p.read_text() for p in self.outputs())
        (found,) = re.findall("^[0-9a-f]{64}$", written, re.MULTILINE)
        return str(found)

    def outputs(self) -> list[Path]:
        return [*self.run_dir.glob("slurm-*.txt"), *self.run_dir.glob("logs/hf-*.txt")]

    def log(self) -> str:
        jobs = self.slurm.slurm("squeue", "--all", "--format=%i %j %T %R")
        nodes = self.slurm.slurm("sinfo", "--Node", "--format=%N %T %E")
        written = (f"{p.name}: {p.read_text()[-3000:]}" for p in self.outputs())
        return "\n".join((*written, jobs, nodes))

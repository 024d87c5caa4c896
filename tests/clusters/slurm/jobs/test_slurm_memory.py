"""Slurm holds steps to their memory by control groups: jobs lose a worker or a node to them.

The kernel's groups must be of version 1, with the controllers `freezer` and `memory`.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import SCRIPTS
from holdfast.engine.runtime.node import fork_server
from labs.cluster_run import run_undisturbed
from labs.slurm_cluster import CONTROLLERS, SlurmCluster
from labs.slurm_run import SlurmRun

SCRIPT = str(SCRIPTS / "hungry.py")
HOST_MB, STEP_MB = 4000, 2000  # a node without a hungry worker has some 1,000 MB


def missing() -> str:
    """Return why Slurm cannot confine steps here; empty if it can."""
    lacking = [name for name in ("freezer", "memory") if not (CONTROLLERS / name).is_dir()]
    none = f"there are no control groups of version 1: {', '.join(lacking)}" if lacking else ""
    return SlurmCluster.missing() or none


pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(missing()), reason=missing()),
]


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SlurmCluster]:
    monkeypatch.delenv(fork_server.VARIABLE)  # its workers would be outside of Slurm's groups
    with SlurmCluster(tmp_path / "slurm", hosts=3, memory_mb=HOST_MB) as made:
        yield made


def test_a_step_that_has_used_up_its_memory_loses_a_worker(
    tmp_path: Path, cluster: SlurmCluster
) -> None:
    alone = tmp_path / "alone"
    alone.mkdir()
    undisturbed = run_undisturbed(alone, script=SCRIPT)
    job = SlurmRun(tmp_path, cluster, "--nodes", "2", f"--sbatch=--mem={STEP_MB}", script=SCRIPT)
    with job.run:
        job.begin()
        job.until(lambda: len(job.serving()) == 2, "two nodes")
        members = job.run.members()
        (tmp_path / "go.eat").write_text(str(max(members)))
        named = f"worker {max(members)} was lost: killed by the kernel for lack of memory"
        job.until(lambda: named in job.log(), named)
        job.until(lambda: len(job.serving()) == 2, "two nodes again")
        assert job.digest() == undisturbed

"""Jobs in a real Kubernetes cluster: drained by kubectl, with silent nodes, stopped and resumed."""

from __future__ import annotations

import itertools
import json
import re
import shutil
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Node
from test_kubernetes_jobs import STEPS, launched, stop

from conftest import SCRIPTS, finish
from holdfast.cli.main import main
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.engine.runtime.local_run import LocalRun
from labs import control_plane
from labs.control_plane import ControlPlane
from labs.kubernetes_cluster import KubernetesCluster
from labs.kubernetes_run import STEP_S, KubernetesRun

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(control_plane.missing()), reason=control_plane.missing()),
    pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed"),
]
SILENT_S = 14.0  # longer than a kubelet's lease, shorter than pods tolerate its absence


@pytest.fixture
def real(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[KubernetesCluster]:
    with (
        ControlPlane(tmp_path) as plane,
        KubernetesCluster(tmp_path, plane.config, plane.away, nodes=5) as found,
    ):
        monkeypatch.setenv("KUBECONFIG", str(plane.config))
        yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("undisturbed")
    (folder / "go").touch()
    script = [str(SCRIPTS / "paced.py"), str(folder / "go"), STEPS]
    with LocalRun(folder / "run", ["--nproc", "1", "--virtual", "4"], script) as run:
        return finish(run)


def test_nodes_are_drained_by_kubectl_and_may_be_silent(
    real: KubernetesCluster, undisturbed: str
) -> None:
    """Neither a drain needs --force, nor does a kubelet that is silent for a moment cost a node."""
    run, go = launched(real)
    run.until(lambda: len(run.serving()) == 3, STEP_S, "three nodes")

    before = set(run.serving())
    silent = run.host(min(before))
    real.freeze(silent)
    until = time.monotonic() + SILENT_S
    run.until(lambda: is_unreachable(real, silent), SILENT_S, "that the node is known to be away")
    run.until(lambda: time.monotonic() >= until, 2 * SILENT_S, "the end of the silence")
    real.thaw(silent)
    run.until(lambda: not is_unreachable(real, silent), STEP_S, "that the node is there again")
    assert set(run.serving()) == before

    drained = min(before)
    words = ["drain", run.host(drained), "--ignore-daemonsets", "--delete-emptydir-data"]
    done = subprocess.run(["kubectl", *words], check=False, capture_output=True, timeout=STEP_S)
    assert done.returncode == 0, done.stderr
    run.until_replaced(drained)
    assert not real.processes(PlacementId(drained))
    go.touch()
    assert run.finish() == undisturbed


def is_unreachable(cluster: KubernetesCluster, host: str) -> bool:
    taints = cluster.client.get(Node, host).to_dict().get("spec", {}).get("taints", ())
    return any(each["key"] == "node.kubernetes.io/unreachable" for each in taints)


def test_a_late_node_is_taken_back_later_each_time(
    real: KubernetesCluster, undisturbed: str
) -> None:
    """Neither its pod nor its worker is lost."""
    run, go = launched(real)
    run.until(lambda: len(run.serving()) == 3, STEP_S, "three nodes")
    run.until(lambda: run.status()["step"] >= 20, STEP_S, "that the usual time of steps is known")
    before = set(run.serving())
    worker = min(each["id"] for each in run.status()["workers"])
    late = Path(f"{go}.late")
    late.write_text(str(worker))
    run.until(lambda: len(late_steps(run, worker)) >= 4, STEP_S, "that it is late four times")
    late.unlink()
    run.until(lambda: set(run.serving()) == before, STEP_S, "that it is taken back")
    steps = late_steps(run, worker)
    held = [after - step for step, after in itertools.pairwise(steps)]
    assert all(each >= 1 << number for number, each in enumerate(held) if number), steps
    go.touch()
    assert run.finish() == undisturbed


def late_steps(run: KubernetesRun, worker: int) -> list[int]:
    """Return the steps in which the others have gone on without a worker."""
    told = [json.loads(line)["text"] for line in run.run_dir.events.read_text().splitlines()]
    found = re.findall(rf"worker {worker} is late in step (\d+) and is suspended", "\n".join(told))
    return sorted({int(step) for step in found})


def test_a_job_is_resumed_before_its_job_has_failed_and_after_it_was_deleted(
    real: KubernetesCluster, undisturbed: str
) -> None:
    """A Job stays FailureTarget while one of its pods is on a lost node."""
    run, go = launched(real, "--store", str(real.folder / "store"), "--save-every", "5")
    run.until(lambda: len(run.serving()) == 3, STEP_S, "three nodes")
    run.until_saved()
    before = set(run.serving())
    words = ["kubectl", "delete", "job", run.name]
    subprocess.run(words, check=True, capture_output=True, timeout=STEP_S)
    assert main(["launch", "k8s", "--resume", run.name]) == 0
    run.until(lambda: are_others(run, before), STEP_S, "three other nodes")

    lost = run.coordinator()
    real.kill(run.host(lost))
    run.until(lambda: run.coordinator() != lost, STEP_S, "a coordinator elsewhere")
    run.until(lambda: len(run.serving()) == 3, STEP_S, "that all nodes are known, or replaced")
    before = set(run.serving())
    stop(run)
    assert ends(real, run.name) == ["FailureTarget"]
    assert main(["launch", "k8s", "--resume", run.name]) == 0
    run.until(lambda: are_others(run, before), STEP_S, "three other nodes")
    go.touch()
    assert run.finish() == undisturbed
    assert run.run_dir.events.read_text().count("from the checkpoint of step") >= 2


def ends(cluster: KubernetesCluster, name: str) -> list[str]:
    status = cluster.client.get(Job, name).to_dict()["status"]
    return [each["type"] for each in status["conditions"] if each["status"] == "True"]


def are_others(run: KubernetesRun, before: set[str]) -> bool:
    serving = run.serving()
    return len(serving) == 3 and not before & set(serving)

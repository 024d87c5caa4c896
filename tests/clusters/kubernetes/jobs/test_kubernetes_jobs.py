"""Jobs in Kubernetes survive faults of nodes and pods: against a fake, and a real one."""

from __future__ import annotations

import json
import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightkube.resources.batch_v1 import Job
from lightkube.types import CascadeType

from certificates import make_certificates
from conftest import SCRIPTS, finish
from holdfast.cli.main import main
from holdfast.clusters.kubernetes.kubectl import job_again
from holdfast.clusters.kubernetes.kubernetes_manifests import COORDINATOR
from holdfast.engine.core.errors import Refused
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.lab.contracts.cluster_contract import CLUSTER_CASES, assert_survives, run_cluster_case
from labs import control_plane
from labs.control_plane import ControlPlane
from labs.fake_kubernetes import FakeKubernetes
from labs.kubelet import UNMOUNTED
from labs.kubernetes_cluster import (
    KubernetesCluster,
    write_kubeconfig,
)
from labs.kubernetes_run import STEP_S, JobHarness, KubernetesRun

pytestmark = pytest.mark.timeout(600)
STEPS = "1000"  # steps of 0.3 s each, until everything has happened
needs_binaries = pytest.mark.skipif(bool(control_plane.missing()), reason=control_plane.missing())


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[KubernetesCluster]:
    with FakeKubernetes() as api:

        def away(away: bool) -> None:
            (api.away.set if away else api.away.clear)()

        config = write_kubeconfig(tmp_path / "config", api.url)
        with KubernetesCluster(tmp_path, config, away, nodes=9) as found:
            yield found


@pytest.fixture
def real(tmp_path: Path) -> Iterator[KubernetesCluster]:
    with ControlPlane(tmp_path) as plane:
        print(f"control plane {plane.version()}")
        with KubernetesCluster(tmp_path, plane.config, plane.away, nodes=9) as found:
            yield found


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Return the digest of the job on one worker, of one machine."""
    folder = tmp_path_factory.mktemp("undisturbed")
    go = folder / "go"
    go.touch()
    options = ["--nproc", "1", "--virtual", "4"]
    with LocalRun(folder / "run", options, [str(SCRIPTS / "paced.py"), str(go), STEPS]) as run:
        return finish(run)


def launched(cluster: KubernetesCluster, *options: str) -> tuple[KubernetesRun, Path]:
    """Launch a job of three nodes; it trains until the returned file appears."""
    run = KubernetesRun(cluster, "--nodes", "3", "--drain-s", "10", *options)
    go = cluster.folder / "go"
    run.launch(str(SCRIPTS / "paced.py"), str(go), STEPS)
    return run, go


def lose_and_drain(run: KubernetesRun) -> None:
    watched: Any = run  # it behaves like a LocalRun
    assert_survives(watched, JobHarness(run), lambda: None)


@pytest.mark.slow
def test_a_job_survives_in_a_fake(fake: KubernetesCluster, undisturbed: str) -> None:
    run, go = launched(fake)
    lose_and_drain(run)
    go.touch()
    assert run.finish() == undisturbed


@pytest.mark.slow
def test_a_node_is_left_without_the_controller(fake: KubernetesCluster, undisturbed: str) -> None:
    """The hook of its pod leaves it; the next controller finds that a node is missing.

    All connections are encrypted.
    """
    tls = fake.folder / "volume" / "tls"  # where the Secret would be mounted
    tls.mkdir(parents=True)
    make_certificates(tls, "127.0.0.1")
    run, go = launched(fake, "--tls-secret", "certificates")
    run.tls = tls
    run.until(lambda: len(run.serving()) == 3, STEP_S, "three nodes")
    (fleet,) = run.processes("holdfast.engine.fleet.fleet_process")
    os.kill(fleet, signal.SIGSTOP)
    deleted = min(run.serving())
    fake.delete(deleted)
    run.until(lambda: not fake.processes(PlacementId(deleted)), STEP_S, "the end of its pod")
    run.until(lambda: len(run.serving()) == 2, STEP_S, "two nodes")
    told = [json.loads(line) for line in run.run_dir.events.read_text().splitlines()]
    drains = [each["text"] for each in told if each["kind"] == "drain"]
    assert "its pod is being deleted" in drains[0]
    os.kill(fleet, signal.SIGKILL)
    run.until_replaced(deleted)
    go.touch()
    assert run.finish() == undisturbed


@pytest.mark.slow
def test_a_job_that_is_stopped_is_not_tried_again_until_it_is_resumed(
    fake: KubernetesCluster, undisturbed: str
) -> None:
    run, go = launched_and_saved(fake)
    stop(run)
    assert len(fake.pods(run.prefix, COORDINATOR)) == 1
    job = fake.client.get(Job, run.name).to_dict()
    go.touch()
    fake.client.delete(Job, run.name, cascade=CascadeType.BACKGROUND)
    fake.client.create(Job.from_dict(job_again(job)))
    assert run.finish() == undisturbed
    assert "from the checkpoint of step" in run.run_dir.events.read_text()


@pytest.mark.slow
def test_a_job_whose_job_was_deleted_goes_on_when_it_is_applied_again(
    fake: KubernetesCluster, undisturbed: str
) -> None:
    """The nodes of the time before are gone, and nothing waits for them."""
    run, go = launched_and_saved(fake)
    job = fake.client.get(Job, run.name).to_dict()
    before = set(run.serving())
    fake.client.delete(Job, run.name, cascade=CascadeType.BACKGROUND)
    fake.apply([{key: job[key] for key in ("apiVersion", "kind", "metadata", "spec")}])

    def are_others() -> bool:
        serving = run.serving()
        return len(serving) == 3 and not before & set(serving)

    run.until(are_others, STEP_S, "three other nodes")
    go.touch()
    assert run.finish() == undisturbed
    assert "from the checkpoint of step" in run.run_dir.events.read_text()


def launched_and_saved(fake: KubernetesCluster) -> tuple[KubernetesRun, Path]:
    """Start a job with a store, and return once three nodes have come beyond a checkpoint."""
    run, go = launched(fake, "--store", str(fake.folder / "store"), "--save-every", "5")
    run.until(lambda: len(run.serving()) == 3, STEP_S, "three nodes")
    run.until_saved()
    return run, go


def stop(run: KubernetesRun) -> None:
    """Stop a job as Ctrl-C does, and wait until nothing of it is left."""
    first = [
        pid for pid in run.processes("holdfast.clusters.kubernetes.kubernetes_job") if _first(pid)
    ]
    os.kill(first[0], signal.SIGINT)
    assert run.ended() == "Failed"
    assert run.run_dir.outcome() == "interrupted"
    run.cluster.until(lambda: not run.alive(), "no pod is left")


def _first(pid: int) -> bool:
    """Return whether this is the pod's own process, which has no parent in the pod."""
    return "--inside" not in Path(f"/proc/{pid}/cmdline").read_text().split("\0")


@pytest.mark.slow
@pytest.mark.clusters
@needs_binaries
def test_a_job_survives_in_a_real_cluster(real: KubernetesCluster, undisturbed: str) -> None:
    """Its nodes die and are cordoned, tainted and cut off; its pods are deleted and evicted."""
    run, go = launched(real)
    lose_and_drain(run)

    deleted = min(run.serving())
    real.delete(deleted)
    run.until_replaced(deleted)

    coordinator = run.coordinator()
    real.delete(coordinator)
    run.until(lambda: run.coordinator() != coordinator, STEP_S, "another pod of the coordinator")
    run.until(lambda: len(run.serving()) == 3, STEP_S, "that all nodes are known again")

    tainted = min(run.serving())
    real.taint(run.host(tainted), "maintenance", "NoExecute")
    run.until_replaced(tainted)

    evicted, spared = sorted(run.serving())[:2]
    real.evict(evicted)
    with pytest.raises(Refused, match="disruption budget"):
        real.evict(spared)
    run.until_replaced(evicted)

    cut_off = min(run.serving())
    real.freeze(run.host(cut_off))
    run.until_replaced(cut_off)

    coordinator = run.coordinator()
    real.kill(real.pods(run.prefix, COORDINATOR)[coordinator]["spec"]["nodeName"])
    run.until(lambda: run.coordinator() != coordinator, STEP_S, "a coordinator elsewhere")
    run.until(lambda: len(run.serving()) == 3, STEP_S, "that all nodes are known, or replaced")
    go.touch()
    assert run.finish() == undisturbed


@pytest.mark.slow
@pytest.mark.clusters
@needs_binaries
def test_a_node_that_cannot_mount_a_volume_is_replaced_in_a_real_cluster(
    real: KubernetesCluster, undisturbed: str
) -> None:
    lose_a_node_to_a_volume(real, undisturbed)


@pytest.mark.slow
def test_a_node_that_cannot_mount_a_volume_is_replaced(
    fake: KubernetesCluster, undisturbed: str
) -> None:
    lose_a_node_to_a_volume(fake, undisturbed)


def lose_a_node_to_a_volume(cluster: KubernetesCluster, undisturbed: str) -> None:
    """Lose a node while only one other takes pods, which mounts nothing; then others take them."""
    run, go = launched(cluster)
    run.until(lambda: len(run.serving()) == 3, STEP_S, "three nodes")
    coordinates = run.host(run.coordinator())
    used = {coordinates, *(run.host(pod) for pod in run.serving())}
    broken, *free = sorted(set(cluster.hosts) - used)
    cluster.break_mounts(broken)
    for host in free:
        cluster.taint(host, "full", "NoSchedule")
    # Another pod of the coordinator would have to go to the node that mounts nothing.
    lost = min(pod for pod in run.serving() if run.host(pod) != coordinates)
    cluster.kill(run.host(lost))

    def tried() -> bool:
        return any(p["spec"].get("nodeName") == broken for p in cluster.pods(run.prefix).values())

    run.until(tried, STEP_S, "a pod on the node that mounts nothing")
    reason = f"FailedMount on {broken}: {UNMOUNTED}"
    run.until(lambda: reason in run.status()["awaited"], STEP_S, "the reason in the status")
    for host in free:
        cluster.untaint(host)
    run.until_replaced(lost)
    assert f"it is kept waiting ({reason})" in run.log()
    run.until(lambda: not run.status()["awaited"], STEP_S, "that nothing is waited for")
    go.touch()
    assert run.finish() == undisturbed


@pytest.mark.slow
@pytest.mark.clusters
@needs_binaries
@pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed")
def test_a_job_is_applied_and_resumed_by_kubectl(
    real: KubernetesCluster, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    run, go = KubernetesRun(real, "--apply"), real.folder / "go"
    monkeypatch.setenv("KUBECONFIG", str(real.config))
    run.launch(str(SCRIPTS / "paced.py"), str(go), STEPS)
    run.name = next(iter(real.client.list(Job))).to_dict()["metadata"]["name"]
    run.until(lambda: len(run.serving()) == 1, STEP_S, "a node")
    stop(run)
    go.touch()
    assert main(["launch", "k8s", "--resume", run.name]) == 0
    assert run.finish() == undisturbed


@pytest.mark.slow
@pytest.mark.clusters
@needs_binaries
def test_a_real_cluster_keeps_the_contract(real: KubernetesCluster) -> None:
    for case in CLUSTER_CASES:
        run_cluster_case(case, real)

"""A job in Kubernetes finds its next coordinator: against a fake, and a real control plane."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightkube import AsyncClient, KubeConfig
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import Pod

from holdfast.clusters.kubernetes import kubernetes_job, kubernetes_manager
from holdfast.clusters.kubernetes.kubernetes_manager import KubernetesManager
from holdfast.clusters.kubernetes.kubernetes_manifests import (
    COORDINATOR,
    POD_VARIABLE,
    TRACKING,
    labels_of,
)
from holdfast.engine.core.fleet.placements import PlacementId
from labs import control_plane
from labs.control_plane import ControlPlane
from labs.fake_kubernetes import FakeKubernetes
from labs.kubernetes_cluster import NAMESPACE, PREFIX, KubernetesCluster, write_kubeconfig

pytestmark = pytest.mark.timeout(600)
NAME = PREFIX.rstrip("-")
REPLACED_S = 30.0  # a real Job waits for 320 s after the sixth failure


@pytest.fixture
def fake(tmp_path: Path) -> Iterator[KubernetesCluster]:
    with FakeKubernetes() as api:
        api.backoff_s = 3600.0
        config = write_kubeconfig(tmp_path / "config", api.url)
        with KubernetesCluster(tmp_path, config, lambda away: None) as found:
            yield found


@pytest.fixture
def real(tmp_path: Path) -> Iterator[KubernetesCluster]:
    with (
        ControlPlane(tmp_path) as plane,
        KubernetesCluster(tmp_path, plane.config, plane.away) as found,
    ):
        yield found


def begin(cluster: KubernetesCluster) -> None:
    """Create a Job whose pod sleeps."""
    container = {"name": COORDINATOR, "image": "none", "command": ["sleep", "600"]}
    pod = {"containers": [container], "restartPolicy": "Never", "terminationGracePeriodSeconds": 1}
    template = {"metadata": {"labels": labels_of(PREFIX, COORDINATOR)}, "spec": pod}
    job = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": NAME, "namespace": NAMESPACE, "labels": labels_of(PREFIX)},
        "spec": {"backoffLimit": 100, "template": template},
    }
    cluster.apply([job])


def wait_for_coordinator(cluster: KubernetesCluster) -> str:
    """Return the pod that runs and is not being deleted."""

    def find() -> str:
        pods = cluster.pods(PREFIX, COORDINATOR).items()
        left = {name: pod for name, pod in pods if "deletionTimestamp" not in pod["metadata"]}
        return next((n for n, pod in left.items() if pod["status"]["phase"] == "Running"), "")

    found: str = cluster.until(find, "a coordinator", REPLACED_S)
    return found


async def serve(cluster: KubernetesCluster, pod: str) -> None:
    """Look at the job's nodes once, as the controller does in the coordinator's pod."""
    client = AsyncClient(KubeConfig.from_file(cluster.config), namespace=NAMESPACE)
    manager = KubernetesManager(client, NAMESPACE, PREFIX, pod=pod)
    await manager.observe()
    await manager.close()


def lose_six_coordinators(cluster: KubernetesCluster, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lose the coordinator's pod again and again, each time after it has served for long enough.

    Then the job ends in the seventh pod, and its end counts.
    """
    monkeypatch.setattr(kubernetes_manager, "FORGIVE_S", 0.0)
    begin(cluster)
    for _ in range(6):
        pod = wait_for_coordinator(cluster)
        asyncio.run(serve(cluster, pod))
        cluster.delete(pod)
    last = wait_for_coordinator(cluster)
    asyncio.run(serve(cluster, last))
    assert TRACKING not in finalizers(cluster, last)
    monkeypatch.setenv("KUBECONFIG", str(cluster.config))
    monkeypatch.setenv(POD_VARIABLE, last)
    asyncio.run(kubernetes_job.finish_job(NAMESPACE, PREFIX, 1))
    assert TRACKING in finalizers(cluster, last)
    for pid in cluster.processes(PlacementId(last)):
        os.kill(pid, 9)
    cluster.until(lambda: "Failed" in ends(cluster), "the end of the Job")
    assert [*cluster.pods(PREFIX, COORDINATOR)] == [last]


def finalizers(cluster: KubernetesCluster, pod: str) -> list[str]:
    found: dict[str, Any] = cluster.client.get(Pod, pod).to_dict()
    return list(found["metadata"].get("finalizers", ()))


def ends(cluster: KubernetesCluster) -> list[str]:
    status = cluster.client.get(Job, NAME).to_dict().get("status", {})
    return [each["type"] for each in status.get("conditions", ()) if each["status"] == "True"]


def test_lost_coordinators_are_replaced_at_once(
    fake: KubernetesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_six_coordinators(fake, monkeypatch)


def test_a_coordinator_that_is_lost_at_once_counts(fake: KubernetesCluster) -> None:
    """Otherwise one that always fails would be tried without a pause."""
    begin(fake)
    pod = wait_for_coordinator(fake)
    asyncio.run(serve(fake, pod))
    assert TRACKING in finalizers(fake, pod)


@pytest.mark.slow
@pytest.mark.clusters
@pytest.mark.skipif(bool(control_plane.missing()), reason=control_plane.missing())
def test_lost_coordinators_are_replaced_at_once_in_a_real_cluster(
    real: KubernetesCluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    lose_six_coordinators(real, monkeypatch)

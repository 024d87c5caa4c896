"""A job in a queue of a real Kueue waits, is admitted, preempted and evicted, with equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightkube.resources.batch_v1 import Job
from lightkube.types import CascadeType
from test_kubernetes_jobs import STEPS, undisturbed

from conftest import SCRIPTS
from labs import control_plane, kueue
from labs.control_plane import ControlPlane
from labs.kubernetes_cluster import KubernetesCluster
from labs.kubernetes_run import STEP_S, KubernetesRun
from labs.kueue import QUEUE, URGENT, Kueue

NODES = 3
__all__ = ["undisturbed"]  # a fixture
MISSING = control_plane.missing() or kueue.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(MISSING), reason=MISSING),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[tuple[KubernetesCluster, Kueue]]:
    with (
        ControlPlane(tmp_path) as plane,
        Kueue(tmp_path / "kueue", plane.config, cores=NODES) as queues,
        KubernetesCluster(tmp_path, plane.config, plane.away, nodes=6) as nodes,
    ):
        yield nodes, queues


def urgent(name: str, cores: int) -> dict[str, Any]:
    """Return a Job of another team, for which Kueue preempts ours."""
    container = {
        "name": name,
        "image": "none",
        "command": ["sleep", "10000"],
        "resources": {"requests": {"cpu": str(cores)}},
    }
    labels = {"kueue.x-k8s.io/queue-name": QUEUE, "kueue.x-k8s.io/priority-class": URGENT}
    spec = {
        "containers": [container],
        "restartPolicy": "Never",
        "terminationGracePeriodSeconds": 1,
    }
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {"name": name, "namespace": "default", "labels": labels},
        "spec": {"template": {"spec": spec}},
    }


def test_a_job_in_a_queue_waits_is_preempted_and_evicted_with_equal_bits(
    cluster: tuple[KubernetesCluster, Kueue], tmp_path: Path, undisturbed: str
) -> None:
    nodes, queues = cluster
    store = ("--store", str(tmp_path / "store"), "--save-every", "100000")
    nodes_of = ("--nodes", str(NODES), "--nodes-min", "1", "--queue", QUEUE, "--cpu", "1")
    # A coordinator that was evicted as well waits so long for agents that it does not hear.
    patience = ("--drain-s", "10", "--abandon-s", "30")
    run = KubernetesRun(nodes, *nodes_of, *patience, *store)
    queues.apply(urgent("earlier", 2))
    nodes.until(lambda: is_admitted(nodes, "earlier"), "the earlier Job is admitted")
    go = tmp_path / "go"
    run.launch(str(SCRIPTS / "paced.py"), str(go), STEPS)

    def serve(count: int, gone: set[str] = frozenset()) -> list[str]:
        def found() -> list[str]:
            serving = run.serving()
            return serving if len(serving) == count and not gone & {*serving} else []

        return run.until(found, STEP_S, f"{count} nodes, other than {sorted(gone)}")

    serve(1)
    run.until(lambda: "insufficient unused quota" in run.log(), STEP_S, "Kueue's reason")
    end(nodes, "earlier")
    first = {*serve(NODES)}

    queues.apply(urgent("part", 1))
    left = {*serve(NODES - 1)}
    assert left < first
    end(nodes, "part")
    serve(NODES)

    queues.apply(urgent("whole", NODES))
    run.until(lambda: not run.alive(), STEP_S, "all agents have left")
    assert "is saved" in run.log()
    nodes.until(lambda: is_admitted(nodes, "whole"), "the urgent Job is admitted")
    end(nodes, "whole")
    second = {*serve(NODES, gone=first)}

    coordinator = run.coordinator()
    queues.stop_queue("HoldAndDrain")
    run.until(lambda: not run.alive(), STEP_S, "all agents have been evicted")
    run.until(lambda: not nodes.pods(run.prefix, "coordinator"), STEP_S, "no coordinator is left")
    queues.stop_queue("None")
    serve(NODES, gone=second)
    assert run.coordinator() != coordinator
    go.touch()
    assert run.finish() == undisturbed


def is_admitted(nodes: KubernetesCluster, name: str) -> bool:
    job = nodes.client.get(Job, name).to_dict()
    return not job["spec"].get("suspend")


def end(nodes: KubernetesCluster, name: str) -> None:
    nodes.client.delete(Job, name, cascade=CascadeType.BACKGROUND)

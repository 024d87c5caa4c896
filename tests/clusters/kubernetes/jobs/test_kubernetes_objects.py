"""Others change a job's objects in a real Kubernetes: the job goes on, with equal bits."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import ConfigMap, Secret
from test_kubernetes_jobs import STEPS, stop, undisturbed

from conftest import SCRIPTS
from holdfast.cli.main import main
from holdfast.clusters.kubernetes.kubernetes_manifests import AGENT, COMPONENT, labels_of
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.engine.runtime.local_run import strike
from labs import control_plane
from labs.commands import run_kubectl
from labs.control_plane import ControlPlane
from labs.kubernetes_cluster import KitNode, KubernetesCluster
from labs.kubernetes_run import STEP_S, KubernetesRun

NODES = 3
__all__ = ["undisturbed"]  # a fixture
API = "admissionregistration.k8s.io/v1"
# Adds a container to each agent's pod, as service meshes and collectors of logs do.
INJECTION = f"""\
apiVersion: {API}
kind: MutatingAdmissionPolicy
metadata: {{name: injection}}
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    resourceRules:
    - {{apiGroups: [""], apiVersions: [v1], operations: [CREATE], resources: [pods]}}
  matchConditions:
  - name: agents
    expression: object.metadata.labels[?"{COMPONENT}"].orValue("") == "{AGENT}"
  mutations:
  - patchType: JSONPatch
    jsonPatch:
      expression: >
        [JSONPatch{{op: "add", path: "/spec/containers/-",
        value: Object.spec.containers{{name: "injected", image: "none"}}}}]
---
apiVersion: {API}
kind: MutatingAdmissionPolicyBinding
metadata: {{name: injection}}
spec: {{policyName: injection}}
"""
# Has Kubernetes remove each Job soon after its end, as operators of large clusters do.
FINISHED_S = 5
REMOVAL = f"""\
apiVersion: {API}
kind: MutatingAdmissionPolicy
metadata: {{name: removal}}
spec:
  failurePolicy: Fail
  reinvocationPolicy: Never
  matchConstraints:
    resourceRules:
    - {{apiGroups: [batch], apiVersions: [v1], operations: [CREATE], resources: [jobs]}}
  mutations:
  - patchType: ApplyConfiguration
    applyConfiguration:
      expression: "Object{{spec: Object.spec{{ttlSecondsAfterFinished: {FINISHED_S}}}}}"
---
apiVersion: {API}
kind: MutatingAdmissionPolicyBinding
metadata: {{name: removal}}
spec: {{policyName: removal}}
"""
# Seconds by which the clocks of the nodes are wrong: a day ahead, three days behind, an hour ahead.
CLOCKS = (90_000, -259_200, 5_400, 0)
SHIM = Path(control_plane.__file__).with_name("wrong_clock.c")

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(control_plane.missing()), reason=control_plane.missing()),
    pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed"),
]


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[KubernetesCluster]:
    with (
        ControlPlane(tmp_path) as plane,
        KubernetesCluster(tmp_path, plane.config, plane.away, nodes=6) as found,
    ):
        yield found


def apply(cluster: KubernetesCluster, policy: str) -> None:
    run_kubectl(cluster.config, "apply", "--filename=-", given=policy)


def has_removal(cluster: KubernetesCluster) -> bool:
    """Return whether the policy is in force: the API server learns of it some time later."""
    words = ("create", "job", "probe", "--image=none", "--dry-run=server")
    field = "--output=jsonpath={.spec.ttlSecondsAfterFinished}"
    return run_kubectl(cluster.config, *words, field) == str(FINISHED_S)


def test_containers_are_added_a_secret_is_deleted_and_a_node_is_out_of_service(
    cluster: KubernetesCluster, undisturbed: str
) -> None:
    apply(cluster, INJECTION)
    run = KubernetesRun(cluster, "--nodes", str(NODES), "--drain-s", "10")
    go = cluster.folder / "go"
    run.launch(str(SCRIPTS / "paced.py"), str(go), STEPS)
    run.until(lambda: len(run.serving()) == NODES, STEP_S, "all nodes")
    pods = cluster.pods(run.prefix)
    assert all(len(pods[pod]["spec"]["containers"]) == 2 for pod in run.serving())

    # The added container goes on, so Kubernetes still calls the pod running.
    first, second, third = run.serving()
    for pid in cluster.processes(PlacementId(first)):
        strike(pid)
    run.until_replaced(first)
    run.until(lambda: first not in cluster.pods(run.prefix), STEP_S, "the end of its pod")

    secret = cluster.client.get(Secret, run.name).to_dict()
    cluster.client.delete(Secret, run.name)
    cluster.delete(second)
    reason = f'CreateContainerConfigError on {{}}: secret "{run.name}" not found'

    def waiting() -> list[str]:
        hosts = [pod["spec"].get("nodeName") for pod in cluster.pods(run.prefix).values()]
        awaited = run.status()["awaited"]
        return [host for host in hosts if host and reason.format(host) in awaited]

    run.until(waiting, STEP_S, reason)
    kept = {key: secret["metadata"][key] for key in ("name", "namespace", "labels")}
    made = {key: secret[key] for key in ("data", "type")}
    cluster.client.create(Secret.from_dict({"metadata": kept, **made}))
    run.until_replaced(second)

    host = run.host(third)
    cluster.kill(host)
    cluster.taint(host, "node.kubernetes.io/out-of-service", "NoExecute")
    run.until_replaced(third)
    run.until(lambda: third not in cluster.pods(run.prefix), STEP_S, "the end of its pod's object")
    go.touch()
    assert run.finish() == undisturbed


def test_a_job_whose_job_is_removed_soon_after_its_end_is_resumed(
    cluster: KubernetesCluster, undisturbed: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    apply(cluster, REMOVAL)
    cluster.until(lambda: has_removal(cluster), "the policy is in force")
    monkeypatch.setenv("KUBECONFIG", str(cluster.config))
    store = ("--store", str(cluster.folder / "store"), "--save-every", "5")
    run, go = KubernetesRun(cluster, "--nodes", "2", *store), cluster.folder / "go"
    run.launch(str(SCRIPTS / "paced.py"), str(go), STEPS)
    run.until(lambda: len(run.serving()) == 2, STEP_S, "two nodes")
    run.until_saved()
    stop(run)
    run.until(lambda: not is_there(run), STEP_S, "the end of the Job's object")
    go.touch()
    assert main(["launch", "k8s", "--resume", run.name]) == 0
    assert run.finish() == undisturbed
    assert "from the checkpoint of step" in run.run_dir.events.read_text()
    run.until(lambda: not is_there(run), STEP_S, "the end of the Job's object")
    run.until(lambda: not cluster.pods(run.prefix), STEP_S, "the end of its pods")
    owned: Any = labels_of(run.prefix, AGENT)
    run.until(lambda: not list(cluster.client.list(ConfigMap, labels=owned)), STEP_S, "their owner")


def is_there(run: KubernetesRun) -> bool:
    return any(job.metadata.name == run.name for job in run.cluster.client.list(Job))


@pytest.mark.skipif(not shutil.which("cc"), reason="there is no compiler for C (gcc)")
def test_machines_whose_clocks_are_wrong(tmp_path: Path, undisturbed: str) -> None:
    """No two nodes agree about the time of day; nodes are lost and deleted, a coordinator too."""
    library = tmp_path / "wrong_clock.so"
    subprocess.run(["cc", "-shared", "-fPIC", "-o", str(library), str(SHIM)], check=True)

    def make(host: str, zone: str) -> KitNode:
        wrong_by = CLOCKS[int(host.removeprefix("node"))]
        clock = {"LD_PRELOAD": str(library), "WRONG_BY": str(wrong_by)}
        return KitNode(host, zone, tmp_path, plane.config, clock)

    with (
        ControlPlane(tmp_path) as plane,
        KubernetesCluster(tmp_path, plane.config, plane.away, len(CLOCKS), make) as cluster,
    ):
        run, go = KubernetesRun(cluster, "--nodes", str(NODES), "--drain-s", "10"), tmp_path / "go"
        run.launch(str(SCRIPTS / "paced.py"), str(go), STEPS)
        run.until(lambda: len(run.serving()) == NODES, STEP_S, "all nodes")
        first, second, _ = run.serving()
        cluster.delete(first)
        run.until_replaced(first)
        for pid in cluster.processes(PlacementId(second)):
            strike(pid)
        run.until_replaced(second)
        coordinator = run.coordinator()
        cluster.delete(coordinator)
        run.until(lambda: run.coordinator() != coordinator, STEP_S, "another coordinator")
        run.until(lambda: len(run.serving()) == NODES, STEP_S, "all nodes again")
        go.touch()
        assert run.finish() == undisturbed

"""Others change a job's objects in a real Kubernetes: the job goes on, with equal bits."""

from __future__ import annotations

import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from lightkube.resources.core_v1 import Secret

from conftest import SCRIPTS
from holdfast.core.fleet.placements import PlacementId
from holdfast.launch.kubernetes_names import AGENT, COMPONENT
from holdfast.testing.local_run import strike
from labs import control_plane
from labs.control_plane import ControlPlane
from labs.kubernetes_cluster import KubernetesCluster
from labs.kubernetes_run import STEP_S, KubernetesRun
from test_kubernetes_jobs import STEPS, undisturbed

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


def test_containers_are_added_a_secret_is_deleted_and_a_node_is_out_of_service(
    cluster: KubernetesCluster, undisturbed: str
) -> None:
    command = ["kubectl", f"--kubeconfig={cluster.config}", "apply", "--filename=-"]
    subprocess.run(command, input=INJECTION, text=True, check=True, capture_output=True)
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

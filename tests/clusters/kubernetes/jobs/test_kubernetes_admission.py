"""A real Kubernetes cluster with rules takes jobs that keep them; each refusal is explained."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import (
    Namespace,
    PersistentVolumeClaim,
    Pod,
    PodTemplate,
    Secret,
    ServiceAccount,
)
from lightkube.resources.rbac_authorization_v1 import (
    ClusterRole,
    ClusterRoleBinding,
    Role,
    RoleBinding,
)
from lightkube.types import PatchType
from test_kubernetes_jobs import STEPS

from conftest import SCRIPTS
from holdfast.cli.main import main
from labs import control_plane
from labs.control_plane import ControlPlane
from labs.etcd_cluster import free_ports
from labs.kubernetes_cluster import KubernetesCluster
from labs.kubernetes_run import STEP_S, KubernetesRun, volume

pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.timeout(600),
    pytest.mark.skipif(bool(control_plane.missing()), reason=control_plane.missing()),
    pytest.mark.skipif(not shutil.which("kubectl"), reason="kubectl is not installed"),
]
LEVEL = "pod-security.kubernetes.io/enforce"
QUOTA = {
    "apiVersion": "v1",
    "kind": "ResourceQuota",
    "metadata": {"name": "all", "namespace": "default"},
    "spec": {"hard": {"requests.cpu": "8", "limits.memory": "16Gi", "pods": "10"}},
}
RESOURCES = "    resources: {requests: {cpu: 1, memory: 1Gi}, limits: {cpu: 1, memory: 2Gi}}\n"
SHAPE = f"""\
spec:
  securityContext: {{runAsNonRoot: true, runAsUser: 1000, fsGroup: 1000,
    seccompProfile: {{type: RuntimeDefault}}}}
  containers:
  - name: NAME
{RESOURCES}\
    securityContext: {{allowPrivilegeEscalation: false, capabilities: {{drop: [ALL]}}}}
"""
WIDE = (ClusterRole, ClusterRoleBinding)
KINDS = (Job, Pod, Secret, ServiceAccount, PersistentVolumeClaim, PodTemplate, Role, RoleBinding)


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> Iterator[KubernetesCluster]:
    folder = tmp_path_factory.mktemp("rules")
    with (
        ControlPlane(folder) as plane,
        KubernetesCluster(folder, plane.config, plane.away) as found,
    ):
        yield found


@pytest.fixture
def strict(real: KubernetesCluster, monkeypatch: pytest.MonkeyPatch) -> KubernetesCluster:
    """Give the cluster a namespace of the level `restricted` that has a quota."""
    monkeypatch.setenv("KUBECONFIG", str(real.config))
    label: Any = {"metadata": {"labels": {LEVEL: "restricted"}}}
    real.client.patch(Namespace, "default", label, patch_type=PatchType.MERGE)
    real.apply([QUOTA])
    return real


def templates(folder: Path) -> Iterator[str]:
    """Write templates of pods that the rules permit; return the options that name them."""
    for option, name in (("--pod", "agent"), ("--coordinator-pod", "coordinator")):
        path = folder / f"{name}.yaml"
        path.write_text(SHAPE.replace("NAME", name))
        yield from (option, str(path))


def launch(run: KubernetesRun, *options: str) -> int:
    port = str(free_ports(1)[0])
    command = ["launch", "k8s", "--image", "none", "--workdir", str(SCRIPTS), "--port", port]
    command += ["--host", "127.0.0.1", "--run-dir", str(run.run_dir.path), *options, "--apply"]
    script = [str(SCRIPTS / "paced.py"), str(run.cluster.folder / "go"), STEPS]
    return main([*command, "--nodes", "2", "--nproc", "1", "--virtual", "4", *script])


def jobs(cluster: KubernetesCluster) -> list[str]:
    return [str(job.to_dict()["metadata"]["name"]) for job in cluster.client.list(Job)]


def test_a_coordinator_that_the_rules_forbid_is_named(
    strict: KubernetesCluster, capsys: pytest.CaptureFixture[str]
) -> None:
    before = objects(strict)
    assert launch(KubernetesRun(strict)) == 2
    told = capsys.readouterr().err
    assert "Kubernetes refuses the coordinator's pod" in told
    assert 'violates PodSecurity "restricted:latest"' in told
    (removal,) = re.findall(r"or remove the job \((.*?)\)", told)
    subprocess.run(shlex.split(removal), check=True, capture_output=True, timeout=60)
    strict.until(lambda: objects(strict) == before, "nothing is left of the job")


def test_a_coordinator_without_the_resources_that_a_quota_asks_for_is_named(
    strict: KubernetesCluster, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    shaped = tmp_path / "coordinator.yaml"
    shaped.write_text(SHAPE.replace("NAME", "coordinator").replace(RESOURCES, ""))
    assert launch(KubernetesRun(strict), "--coordinator-pod", str(shaped)) == 2
    told = capsys.readouterr().err
    assert "Kubernetes refuses the coordinator's pod" in told
    assert "failed quota: all: must specify limits.memory" in told
    (removal,) = re.findall(r"or remove the job \((.*?)\)", told)
    subprocess.run(shlex.split(removal), check=True, capture_output=True, timeout=60)


def test_pods_that_the_rules_permit_are_shaped_by_templates(
    strict: KubernetesCluster, tmp_path: Path
) -> None:
    run = KubernetesRun(strict)
    strict.apply([volume(strict.folder)])
    before = set(jobs(strict))
    assert launch(run, *templates(tmp_path)) == 0
    (run.name,) = set(jobs(strict)) - before
    run.until(lambda: len(run.serving()) == 2, STEP_S, "two nodes")


def test_a_missing_namespace_is_one_error_and_leaves_nothing(
    real: KubernetesCluster, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("KUBECONFIG", str(real.config))
    before = objects(real)
    assert launch(KubernetesRun(real), "--namespace", "ml") == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert line == 'holdfast: kubectl apply has failed: namespaces "ml" not found'
    assert objects(real) == before


def objects(cluster: KubernetesCluster) -> set[str]:
    """Return the names of all objects of the kinds that a job has, in all namespaces."""
    found = set()
    for kind in (*KINDS, *WIDE):
        place: Any = {} if kind in WIDE else {"namespace": "*"}
        names = {each.metadata.name for each in cluster.client.list(kind, **place)}
        found |= {f"{kind.__name__} {name}" for name in names if name.startswith("hf-")}
    return found

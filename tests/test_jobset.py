"""A job as a JobSet, by the manifest of examples/kubernetes, on a real controller and kubelets."""

from __future__ import annotations

import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from holdfast.core.errors import HoldfastError
from holdfast.testing.cluster_contract import serving_nodes
from labs import jobset
from labs.container_run import SIGNALS, ContainerCluster, mount_shared, open_cluster
from labs.controller import Controller
from labs.jobset import open_jobset
from labs.kubernetes_cluster import NAMESPACE
from labs.kubernetes_run import STEP_S
from test_containers import JOB, MISSING, images
from test_kubernetes_jobs import STEPS, undisturbed

WHY = MISSING or jobset.missing()
pytestmark = [
    pytest.mark.slow,
    pytest.mark.clusters,
    pytest.mark.timeout(1200),
    pytest.mark.skipif(bool(WHY), reason=WHY),
]
__all__ = ["images", "undisturbed"]  # fixtures

NAME, SECRET, RUN = "train", "c" * 64, "/run7"
MANIFEST = Path(__file__).parents[1] / "examples" / "kubernetes" / "jobset.yaml"


@pytest.fixture
def cluster(images: list[Path]) -> Iterator[ContainerCluster]:
    with (
        tempfile.TemporaryDirectory(prefix="hfk-") as folder,
        open_cluster(Path(folder), images, nodes=3) as found,
    ):
        yield found


@pytest.fixture
def controller(cluster: ContainerCluster) -> Iterator[Controller]:
    with open_jobset(cluster.folder / "jobset", cluster.config) as found:
        yield found


class JobSetRun:
    """Applies the manifest with the tests' image, script and folders, and watches the job."""

    def __init__(self, cluster: ContainerCluster, controller: Controller) -> None:
        self.cluster = cluster
        self.folders = {place: cluster.folder / place.strip("/") for place in (SIGNALS, RUN)}
        for folder in self.folders.values():
            folder.mkdir()
            folder.chmod(0o777)
        about = {"name": NAME, "namespace": NAMESPACE}
        secret = {"apiVersion": "v1", "kind": "Secret", "stringData": {"secret": SECRET}}
        controller.apply({**secret, "metadata": about}, self._adapt())

    def _adapt(self) -> dict[str, Any]:
        made: dict[str, Any] = yaml.safe_load(MANIFEST.read_text())
        mounts, volumes = mount_shared(*self.folders.items())
        for job in made["spec"]["replicatedJobs"]:
            pod = job["template"]["spec"]["template"]["spec"]
            pod["volumes"] = volumes
            (container,) = pod["containers"]
            container |= {"image": JOB, "volumeMounts": mounts}
            script = f"paced.py {SIGNALS}/go {STEPS}"
            container["args"] = [word.replace("train.py", script) for word in container["args"]]
        return made

    def pods(self, job: str) -> list[str]:
        """Return the pods of a part of the job that run and are not being deleted."""
        chosen = f"--selector=jobset.sigs.k8s.io/replicatedjob-name={job}"
        found = json.loads(self.cluster.kubectl("get", "pods", chosen, "--output=json"))["items"]
        return [
            pod["metadata"]["name"]
            for pod in found
            if pod["status"].get("phase") == "Running"
            and "deletionTimestamp" not in pod["metadata"]
        ]

    def serving(self) -> list[str]:
        """Return the nodes that have work; none while nobody answers."""
        words = ("holdfast", "status", "--run-dir", f"{RUN}/job", "--json")
        try:
            (first,) = self.pods("first")
            return serving_nodes(json.loads(self.cluster.kubectl("exec", first, "--", *words)))
        except (HoldfastError, ValueError):
            return []

    def until_training(self, gone: str = "") -> None:
        def training() -> bool:
            pods = [*self.pods("first"), *self.pods("nodes")]
            return len(self.serving()) == 3 and len(pods) == 3 and gone not in pods

        self.cluster.until(training, f"three nodes\n{self.cluster.printed(NAME)}", STEP_S)


def test_a_jobset_loses_a_node_and_its_first_pod(
    cluster: ContainerCluster, controller: Controller, undisturbed: str
) -> None:
    run = JobSetRun(cluster, controller)
    run.until_training()
    lost = run.pods("nodes")[0]
    cluster.delete(lost)
    run.until_training(lost)

    (first,) = run.pods("first")
    cluster.delete(first)
    run.until_training(first)
    (run.folders[SIGNALS] / "go").touch()

    def end() -> bool:
        shown = cluster.kubectl("get", "jobset", NAME, "--output=jsonpath={.status.terminalState}")
        return shown == "Completed"

    cluster.until(end, "the end of the JobSet", STEP_S)
    printed = re.findall("^[0-9a-f]{64}$", cluster.printed(NAME), re.MULTILINE)
    assert printed == [undisturbed]

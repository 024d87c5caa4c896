"""Runs a real JobSet controller next to the control plane of a test, and a job as a JobSet.

The folder that HOLDFAST_JOBSET names has its program and manifests, as `build_controller.sh` leaves
them.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from holdfast.engine.core.errors import HoldfastError
from holdfast.lab.contracts.cluster_contract import serving_nodes
from labs.container_run import SIGNALS, ContainerCluster, mount_shared
from labs.controller import Controller
from labs.kubernetes_cluster import NAMESPACE
from labs.kubernetes_run import STEP_S

FOLDER = "HOLDFAST_JOBSET"
NAME, SECRET, RUN = "train", "c" * 64, "/run7"
MANIFEST = Path(__file__).parents[2] / "examples" / "kubernetes" / "jobset.yaml"


def missing() -> str:
    """Return the reason that JobSet cannot run here, or an empty string."""
    folder = os.environ.get(FOLDER, "")
    if not folder or not os.access(Path(folder, "jobset"), os.X_OK):
        return f"{FOLDER} names no folder with JobSet: `make kubernetes-lab` builds it"
    return "" if shutil.which("kubectl") else "kubectl is not installed"


@contextlib.contextmanager
def open_jobset(folder: Path, config: Path) -> Iterator[Controller]:
    """Run the controller. `config`: a kubeconfig file of an administrator."""
    made = Controller("jobset", folder, config, Path(os.environ[FOLDER]))
    try:
        made.start({"apiVersion": "config.jobset.x-k8s.io/v1alpha1", "kind": "Configuration"})
        yield made
    finally:
        made.stop()


class JobSetRun:
    """Applies the manifest with an image and script of the tests, and watches the job.

    `script`: the words after `holdfast run` in place of the manifest's `train.py`.
    """

    def __init__(
        self, cluster: ContainerCluster, controller: Controller, image: str, script: str
    ) -> None:
        self.cluster = cluster
        self._image = image
        self._script = script
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
            container |= {"image": self._image, "volumeMounts": mounts}
            args = [word.replace("train.py", self._script) for word in container["args"]]
            container["args"] = args
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
        """Return the nodes that have work; while the coordinator does not answer, none."""
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

    def ended(self) -> bool:
        """Return whether the JobSet has succeeded."""
        words = ("get", "jobset", NAME, "--output=jsonpath={.status.terminalState}")
        return self.cluster.kubectl(*words) == "Completed"

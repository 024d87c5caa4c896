"""Runs a real Kueue next to the control plane of a test, with one queue.

The folder that HOLDFAST_KUEUE names has its program and manifests, as `build_controller.sh`
leaves them.
"""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from certificates import make_certificates
from labs.controller import HOST, Controller

FOLDER = "HOLDFAST_KUEUE"
QUEUE, CLUSTER_QUEUE, URGENT = "training", "team", "urgent"
API = "kueue.x-k8s.io/v1beta2"
# The place of the certificate of Kueue's metrics cannot be set.
METRICS = "/etc/kueue/metrics/certs"


def missing() -> str:
    """Return the reason why Kueue cannot run here; empty if it can."""
    folder = os.environ.get(FOLDER, "")
    if not folder or not os.access(Path(folder, "kueue"), os.X_OK):
        return f"{FOLDER} names no folder with Kueue: `make kubernetes-lab` builds it"
    if os.geteuid() != 0:
        return "Kueue's certificates are mounted in /etc, which needs root"
    return "" if shutil.which("kubectl") else "kubectl is not installed"


class Kueue:
    """Runs Kueue with a queue of some cores, while used as a context manager.

    `config`: a kubeconfig file of an administrator. The queue is called `training`, and works of
    the priority `urgent` preempt all other works.
    """

    def __init__(self, folder: Path, config: Path, cores: int) -> None:
        built = Path(os.environ[FOLDER])
        self._controller = Controller("kueue", folder, config, built, _is_needed)
        self._cores = cores

    def __enter__(self) -> Kueue:
        settings = {
            "apiVersion": "config.kueue.x-k8s.io/v1beta2",
            "kind": "Configuration",
            "namespace": "kueue-system",
            "integrations": {"frameworks": ["batch/job", "pod"]},
            "featureGates": {"VisibilityOnDemand": False},
        }
        self._controller.start(settings, self._mount_certificates(self._controller.folder))
        self._controller.apply(*self._queues())
        return self

    def __exit__(self, *exc: object) -> None:
        self._controller.stop()

    def apply(self, *objects: Mapping[str, Any]) -> None:
        self._controller.apply(*objects)

    def kubectl(self, *words: str) -> str:
        return self._controller.kubectl(*words)

    def stop_queue(self, policy: str) -> None:
        """Set what the queue does: `None` (it admits), `Hold`, or `HoldAndDrain` (it evicts)."""
        change = json.dumps({"spec": {"stopPolicy": policy}})
        self.kubectl("patch", "clusterqueue", CLUSTER_QUEUE, "--type=merge", f"--patch={change}")

    def _mount_certificates(self, folder: Path) -> list[str]:
        """Return a command that runs Kueue, for which alone /etc has the certificates."""
        upper, work = folder / "etc", folder / "work"
        certificates = Path(f"{upper}{METRICS.removeprefix('/etc')}")
        for each in (work, certificates):
            each.mkdir(parents=True)
        make_certificates(certificates, HOST)
        layers = f"lowerdir=/etc,upperdir={upper},workdir={work}"
        command = f'mount -t overlay overlay -o {layers} /etc && exec "$@"'
        return ["unshare", "--mount", "bash", "-c", command, "bash"]

    def _queues(self) -> list[dict[str, Any]]:
        quota = {"name": "cpu", "nominalQuota": self._cores}
        group = {
            "coveredResources": ["cpu"],
            "flavors": [{"name": "default", "resources": [quota]}],
        }
        return [
            {"apiVersion": API, "kind": "ResourceFlavor", "metadata": {"name": "default"}},
            {
                "apiVersion": API,
                "kind": "ClusterQueue",
                "metadata": {"name": CLUSTER_QUEUE},
                "spec": {
                    "namespaceSelector": {},
                    "resourceGroups": [group],
                    "preemption": {"withinClusterQueue": "LowerPriority"},
                },
            },
            {
                "apiVersion": API,
                "kind": "LocalQueue",
                "metadata": {"name": QUEUE, "namespace": "default"},
                "spec": {"clusterQueue": CLUSTER_QUEUE},
            },
            {
                "apiVersion": API,
                "kind": "WorkloadPriorityClass",
                "metadata": {"name": URGENT},
                "value": 1000,
            },
        ]


def _is_needed(rules: Sequence[dict[str, Any]]) -> bool:
    """Return whether a webhook is called for Jobs, pods or Kueue's own types."""
    resources = {
        (group, name) for rule in rules for group in rule["apiGroups"] for name in rule["resources"]
    }
    ours = {("", "pods"), ("batch", "jobs")}
    return any(each in ours or each[0] == "kueue.x-k8s.io" for each in resources)

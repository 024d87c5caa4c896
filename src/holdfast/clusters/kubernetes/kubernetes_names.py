"""Names what belongs to a job in Kubernetes: labels, and the parts that they tell apart."""

from __future__ import annotations

ZONE = "topology.kubernetes.io/zone"  # label of nodes
AGENT = "agent"
COORDINATOR = "coordinator"
# Kubernetes labels the pods of a Job with its uid, and keeps the Job's count of failures by this
# finalizer of pods.
JOB_UID, TRACKING = "controller-uid", "batch.kubernetes.io/job-tracking"
QUEUE = "kueue.x-k8s.io/queue-name"  # label by which Kueue admits a Job or a pod
UNCOUNTED = "holdfast/uncounted"  # annotation of a pod from which we have removed the finalizer
NAME, INSTANCE, COMPONENT = (
    f"app.kubernetes.io/{key}" for key in ("name", "instance", "component")
)


def labels_of(prefix: str, component: str = "") -> dict[str, str]:
    """Return the labels of a part of the job whose placements' ids begin with `prefix`.

    Kubernetes recommends these keys, so its tools show them.
    """
    labels = {NAME: "holdfast", INSTANCE: instance_of(prefix)}
    return {**labels, COMPONENT: component} if component else labels


def instance_of(prefix: str) -> str:
    """Return the name of each object that a job has once."""
    return prefix.rstrip("-")

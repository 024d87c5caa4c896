"""Checks a user's pod template: it may not set fields by which something of ours would be lost.

Everything else is joined with what Holdfast sets (kubernetes_manifests.py). Pure.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from holdfast.clusters.kubernetes.kubernetes_names import (
    COMPONENT,
    COORDINATOR,
    INSTANCE,
    JOB_UID,
    NAME,
)
from holdfast.engine.core.errors import UserError

OURS = "HOLDFAST_"  # begins the names of the variables that Holdfast gives its containers
LABELS = (NAME, INSTANCE, COMPONENT, JOB_UID, "job-name")
POD_FIELDS = {
    "activeDeadlineSeconds": "Kubernetes would end the pod without a notice",
    "nodeName": "pods are scheduled, each on a node of its own; use nodeSelector or affinity",
}
CONTAINER_FIELDS = {
    "command": "Holdfast's own command runs there",
    "args": "Holdfast's own command runs there",
    "restartPolicy": "a pod of Holdfast is replaced, never restarted",
}
COORDINATOR_FIELDS = {
    "serviceAccountName": "the coordinator has an account with the rights that it needs",
    "serviceAccount": "the coordinator has an account with the rights that it needs",
    "shareProcessNamespace": "the job is stopped by a signal to process 1 of the pod",
}


def check_template(
    pod: Mapping[str, Any], name: str, option: str, image: str, drain_s: float
) -> None:
    """Raise UserError for the first field that a pod template may not set.

    `name`: of the container that Holdfast completes. `option`: of the template's file, for people.
    """
    try:
        problem = next(_find_problems(pod, name, image, drain_s), "")
    except (AttributeError, TypeError):
        problem = "it has not the shape of a pod template"
    if problem:
        raise UserError(f"{option}: {problem}")


def _find_problems(pod: Mapping[str, Any], name: str, image: str, drain_s: float) -> Iterator[str]:
    metadata, spec = pod.get("metadata", {}), pod.get("spec", {})
    for key in metadata:
        if key not in ("labels", "annotations"):
            yield f"metadata.{key} is not for you to set, only labels and annotations are"
    for key in metadata.get("labels", {}):
        if key in LABELS:
            yield f"the label {key} is set by Holdfast, which finds its pods by it: leave it out"
    refused = POD_FIELDS if name != COORDINATOR else POD_FIELDS | COORDINATOR_FIELDS
    for key, why in refused.items():
        if spec.get(key):
            yield f"spec.{key}: leave it out, {why}"
    if spec.get("restartPolicy", "Never") != "Never":
        yield f"spec.restartPolicy {spec['restartPolicy']}: {CONTAINER_FIELDS['restartPolicy']}"
    grace_s = spec.get("terminationGracePeriodSeconds")
    if grace_s is not None and grace_s < drain_s:
        yield (
            f"spec.terminationGracePeriodSeconds {grace_s} is less than --drain-s {drain_s:g}, for "
            "which a node is left before its pod ends: leave it out"
        )
    if name == COORDINATOR and spec.get("automountServiceAccountToken") is False:
        yield "spec.automountServiceAccountToken: the coordinator needs the API: leave it out"
    for container in spec.get("containers", ()):
        if container.get("name") == name:
            yield from _find_own(container, name, image)
        elif not container.get("name"):
            yield f"a container has no name: {name} is the one that Holdfast completes"
        elif name == COORDINATOR:
            yield (
                f"the container {container['name']} would keep the job from ending: use an init "
                "container with restartPolicy: Always"
            )


def _find_own(container: Mapping[str, Any], name: str, image: str) -> Iterator[str]:
    """Find what the container that Holdfast completes may not set."""
    for key, why in CONTAINER_FIELDS.items():
        if container.get(key):
            yield f"{key} of the container {name}: leave it out, {why}"
    if container.get("image", image) != image:
        yield f"image {container['image']} of the container {name} is not that of --image: {image}"
    if container.get("lifecycle", {}).get("preStop"):
        yield f"lifecycle.preStop of the container {name}: by it Holdfast leaves the node"
    for variable in container.get("env", ()):
        if variable["name"].startswith(OURS):
            yield f"the variable {variable['name']} of the container {name} is set by Holdfast"


def drop_empty(value: Any) -> Any:
    """Return a template without fields that are null: Kubernetes takes them as not given."""
    if isinstance(value, dict):
        return {key: drop_empty(each) for key, each in value.items() if each is not None}
    return [drop_empty(each) for each in value] if isinstance(value, list) else value

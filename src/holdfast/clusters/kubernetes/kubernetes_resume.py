"""Makes the Job again of a job in Kubernetes that was stopped, has failed or was deleted.

A Job cannot be started twice. Another one of the same name finds the run directory on its claim.
Its uid differs from the uid that the run directory has recorded, so the job goes on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.clusters.kubernetes.kubernetes_manifests import TRIES_MAX
from holdfast.clusters.kubernetes.kubernetes_names import COORDINATOR
from holdfast.engine.core.errors import UserError

GIVEN_LABELS = ("controller-uid", "job-name")  # by Kubernetes, also with a prefix
KEPT = ("name", "namespace", "labels")
# Since Kubernetes 1.31 a Job has the first condition of each pair until its pods have ended.
FAILED, COMPLETE = ("FailureTarget", "Failed"), ("SuccessCriteriaMet", "Complete")


def job_again(job: Mapping[str, Any]) -> dict[str, Any]:
    """Make the Job that goes on, of the one that Kubernetes lists. UserError if it has not failed.

    The caller deletes the old Job first, but does not wait for its pods: one on a lost node would
    stay. The next coordinator waits for the earlier one's lock, and for the end of its agents.
    """
    name = job["metadata"]["name"]
    conditions = job.get("status", {}).get("conditions", ())
    ended = {each["type"] for each in conditions if each["status"] == "True"}
    if not ended.intersection(FAILED):
        how = "has succeeded" if ended.intersection(COMPLETE) else "is running"
        raise UserError(f"the job {name} {how}: there is nothing to resume")
    made: dict[str, Any] = json.loads(json.dumps(dict(job)))
    metadata, spec, template = made["metadata"], made["spec"], made["spec"]["template"]
    if all(each["name"] != COORDINATOR for each in template["spec"]["containers"]):
        raise UserError(f"the job {name} is none of Holdfast's: it has no {COORDINATOR}")
    for labels in (metadata.get("labels", {}), template["metadata"].get("labels", {})):
        for key in [key for key in labels if key.rpartition("/")[2] in GIVEN_LABELS]:
            del labels[key]
    template["metadata"].pop("creationTimestamp", None)
    spec.pop("selector", None)
    spec["backoffLimit"] = TRIES_MAX
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": {key: metadata[key] for key in KEPT if key in metadata},
        "spec": spec,
    }

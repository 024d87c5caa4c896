"""Makes the Job again of a job in Kubernetes that was stopped or has failed, so that it goes on.

A Job cannot be started twice. Another one of the same name finds the run directory on its claim,
and a word in its environment that the run directory does not know tells it to go on.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from holdfast.core.errors import UserError
from holdfast.launch.kubernetes_manifests import TRIES_MAX
from holdfast.launch.kubernetes_names import COORDINATOR

RESUME_VARIABLE = "HOLDFAST_RESUME"
GIVEN_LABELS = ("controller-uid", "job-name")  # by Kubernetes, also with a prefix
KEPT = ("name", "namespace", "labels")


def job_again(job: Mapping[str, Any], word: str) -> dict[str, Any]:
    """Make the Job that goes on, of the one that Kubernetes lists. UserError if it has not failed.

    `word`: a new one for each time.
    """
    name = job["metadata"]["name"]
    ended = [
        c["type"] for c in job.get("status", {}).get("conditions", ()) if c["status"] == "True"
    ]
    if "Failed" not in ended:
        how = "has succeeded" if "Complete" in ended else "is running"
        raise UserError(f"the job {name} {how}: there is nothing to resume")
    made: dict[str, Any] = json.loads(json.dumps(dict(job)))
    metadata, spec, template = made["metadata"], made["spec"], made["spec"]["template"]
    containers = template["spec"]["containers"]
    found = next((each for each in containers if each["name"] == COORDINATOR), None)
    if found is None:
        raise UserError(f"the job {name} is none of Holdfast's: it has no {COORDINATOR}")
    old = [each for each in found["env"] if each["name"] != RESUME_VARIABLE]
    found["env"] = [*old, {"name": RESUME_VARIABLE, "value": word}]
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

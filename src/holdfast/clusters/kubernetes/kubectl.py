"""Runs kubectl for `holdfast launch k8s`: applies a job's objects, and resumes a job.

The user's kubeconfig counts. kubectl's preferences (kuberc) and its other variables would change
its output or its acts, and do not count.
"""

from __future__ import annotations

import base64
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from holdfast.clusters.kubernetes.kubernetes_manifests import (
    COORDINATOR,
    COORDINATOR_KEY,
    INSTANCE,
    TRIES_MAX,
    Manifest,
)
from holdfast.engine.core.errors import UserError
from holdfast.engine.net.standard_streams import print_plain

ADMIT_S = 15.0  # for Kubernetes to create the coordinator's pod, or to refuse it
LOOK_S = 0.5
PREAMBLE = re.compile(r'^(error: )?(Error from server \(\w+\): )?(error when creating "STDIN": )?')
ALTERNATIVE = (
    "; if you may not create cluster roles, write the manifests with --out FILE, and apply them "
    "without the ClusterRole and its binding"
)


def run_kubectl(*words: str, given: str = "") -> str:
    """Run kubectl and return its output. UserError with the reason that it gives."""
    kept = {name: value for name, value in os.environ.items() if not name.startswith("KUBECTL_")}
    try:
        found = subprocess.run(
            ["kubectl", *words],
            input=given,
            capture_output=True,
            text=True,
            check=False,
            env={**kept, "KUBERC": "off"},
        )
    except OSError as error:
        raise UserError(f"kubectl cannot be run ({error.strerror}): use --out FILE") from None
    lines = found.stderr.strip().splitlines()
    if found.returncode:
        # A missing namespace makes one line for each object: the first is enough.
        reason = PREAMBLE.sub("", lines[0]) if lines else f"status {found.returncode}"
        raise UserError(f"kubectl {words[0]} has failed: {reason}")
    if lines:
        print_plain("\n".join(lines), file=sys.stderr)
    return found.stdout


def apply(
    objects: Sequence[Manifest], name: str, namespace: str, as_yaml: Callable[[Any], str]
) -> None:
    """Apply all objects of a new job, or none. UserError, also if its coordinator is refused."""
    print_plain(
        run_kubectl("apply", "-f", "-", given=as_yaml(objects[:1])), end="", file=sys.stderr
    )
    try:
        print_plain(
            run_kubectl("apply", "-f", "-", given=as_yaml(objects[1:])), end="", file=sys.stderr
        )
    except UserError as error:
        everything = as_yaml(objects)
        run_kubectl("delete", "--ignore-not-found", "--wait=false", "-f", "-", given=everything)
        remedy = ALTERNATIVE if "clusterrole" in str(error) else ""
        raise UserError(f"{error}: nothing is left of the job{remedy}") from None
    if refusal := find_refusal(name, namespace):
        raise UserError(
            f"Kubernetes refuses the coordinator's pod ({refusal}) and goes on trying: allow it, "
            f"or remove the job ({say_removal(objects, name, namespace)}) and shape the pod with "
            "--coordinator-pod"
        )


def say_removal(objects: Sequence[Manifest], name: str, namespace: str) -> str:
    """Return the command that removes all objects of a job."""
    kinds = ",".join(dict.fromkeys(each["kind"].lower() for each in objects))
    return f"kubectl -n {namespace} delete {kinds} -l {INSTANCE}={name}"


def find_refusal(name: str, namespace: str) -> str:
    """Return Kubernetes' reason for not creating the pod of a new Job; empty: it creates it."""
    until = time.monotonic() + ADMIT_S
    chosen = f"involvedObject.kind=Job,involvedObject.name={name},reason=FailedCreate"
    while time.monotonic() < until:
        job = _look("job", name, "--namespace", namespace)
        status = job.get("status", {}) if job is not None else {"conditions": "not known"}
        if status.get("active") or status.get("conditions"):
            return ""
        events = _look("events", "--namespace", namespace, f"--field-selector={chosen}")
        if events is not None and events.get("items"):
            return str(events["items"][-1].get("message", ""))
        time.sleep(LOOK_S)
    return ""


def _look(*words: str) -> Mapping[str, Any] | None:
    """Return the object that kubectl gets; None if it may not, or cannot."""
    try:
        found = json.loads(run_kubectl("get", *words, "--output=json"))
    except (UserError, ValueError):
        return None
    return found if isinstance(found, dict) else None


def resume(name: str, namespace: str) -> int:
    """Start the Job of a job again, also if it was deleted. Returns the exit status. UserError."""
    place = (name, "--namespace", namespace)
    text = run_kubectl("get", "job", *place, "--ignore-not-found", "--output=json")
    if text.strip():
        again = job_again(json.loads(text))
        run_kubectl("delete", "job", *place, "--cascade=background", "--wait")
    else:
        again = deleted_job(*place)
    try:
        run_kubectl("create", "-f", "-", given=json.dumps(again))
    except UserError as error:
        kept = Path(f"{name}.json")
        kept.write_text(json.dumps(again))
        raise UserError(f"{error}: the Job is in {kept}, for `kubectl create -f`") from None
    return 0


def deleted_job(name: str, *place: str) -> dict[str, Any]:
    """Return the Job of a job whose other objects are still there. UserError."""
    secret = ("secret", name, *place)
    text = run_kubectl("get", *secret, "--ignore-not-found", "--output=json")
    kept = json.loads(text).get("data", {}).get(COORDINATOR_KEY) if text.strip() else None
    if kept is None:
        raise UserError(
            f"there is no job {name} in the namespace {place[-1]}, nor its Secret, from which it "
            "could be made again: is --namespace right?"
        )
    found: dict[str, Any] = json.loads(base64.b64decode(kept))
    return found


GIVEN_LABELS = ("controller-uid", "job-name")  # by Kubernetes, also with a prefix
KEPT = ("name", "namespace", "labels")
# Since Kubernetes 1.31 a Job has the first condition of each pair until its pods have ended.
FAILED, COMPLETE = ("FailureTarget", "Failed"), ("SuccessCriteriaMet", "Complete")


def job_again(job: Mapping[str, Any]) -> dict[str, Any]:
    """Make a Job that continues an ended one, which Kubernetes lists. UserError: it has not failed.

    A Job cannot be started twice. Another Job of the same name finds the run directory on its
    claim. Its uid differs from the uid that the run directory has recorded, so the job is resumed.

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

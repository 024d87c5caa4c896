"""`holdfast launch k8s` writes the manifests of a job for Kubernetes, or applies them.

A user's pod template is checked: it may not set fields by which something of ours would be lost.
All its other fields are joined with Holdfast's own (kubernetes_manifests.py).
"""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import json
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path, PurePosixPath
from typing import Any

from holdfast.clusters.kubernetes import kubectl
from holdfast.clusters.kubernetes.kubernetes_manifests import (
    AGENT,
    AGENT_OPTIONS,
    COMPONENT,
    COORDINATOR,
    INSTANCE,
    JOB_UID,
    NAME,
    ZONE,
    KubernetesSite,
    Manifest,
    instance_of,
    manifests,
    service_host,
)
from holdfast.engine.commands import run_command
from holdfast.engine.commands.launch_command import (
    agent_options,
    hide_options,
    launch_parser,
    make_launch,
    prefer,
)
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_problems import as_flag, find_unheeded
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import FleetPlan, job_prefix
from holdfast.engine.net.standard_streams import print_line, print_plain
from holdfast.engine.state.store.regular_files import read_named

POD_VALUES_MAX = 10_000
PORT = 29600
# Kubernetes lets the next pod of a Job wait for up to 600 s, and another 30 s until it takes pods
# from a node that is away.
ABANDON_S = 900.0
RUN_DIR = "/holdfast/run"
KEPT_BACK = {  # options of `holdfast run` that mean this machine
    "tls": "--tls names a folder of this machine: with Kubernetes use --tls-secret",
    "faults": "--faults has no place in Kubernetes: try it with `holdfast run`",
}
CLAIM = (
    "a volume claim that all pods share (ReadWriteMany), for the run directory with all logs; "
    "without it only the coordinator's part outlives its pod, on a new claim"
)
TLS = (
    "encrypt all connections of the job with the certificates of this Secret: tls.crt and tls.key, "
    "good for *.NAMESPACE.svc, and ca.crt"
)
QUEUE = "have Kueue admit the job: this LocalQueue takes its coordinator and each agent's pod"
SPREAD = "failure domains: spread agents over the values of this label of nodes"
POD = (
    "a pod template in YAML (metadata, spec) that agents' pods are made from, for tolerations, "
    "node selectors, volumes; a container `agent` in it is ours"
)
COORDINATOR_POD = (
    "the same for the coordinator's pod, such as resources and a security context; a container "
    "`coordinator` in it is ours"
)
RESUME = (
    "go on with this job of --namespace, which was stopped or has failed, from its newest "
    "checkpoint; without a script or other options"
)
OUT = "write the manifests to a new file that only you can read (default: print them)"


# What these options must look like, and what to write.
_NAME = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_NAMES = rf"(?=.{{1,253}}$){_NAME}(\.{_NAME})*"
_SIZE = r"(?=.*[1-9])\d{1,15}(\.\d{1,3})?([kMGTPE]|[KMGTPE]i)?"
VALUES = {
    "image": (r"[\w./:@-]{1,1000}", "name one such as registry/holdfast:1"),
    "namespace": (_NAME, "use small letters, digits and inner hyphens, 63 characters at most"),
    "claim": (_NAMES, "give the name of a PersistentVolumeClaim"),
    "tls-secret": (_NAMES, "give the name of a Secret"),
    "queue": (_NAMES, "give the name of a LocalQueue"),
    "cpu": (
        r"(?=.*[1-9])(\d{1,6}(\.\d{1,3})?|\d{1,9}m)",
        "give a number of cores, such as 8 or 500m",
    ),
    "memory": (_SIZE, "give a size such as 64Gi"),
    "storage": (_SIZE, "give a size such as 1Gi"),
    "gpus": (r"[1-9]\d{0,3}", "give a whole number from 1 to 9999"),
    "spread": (
        rf"({_NAMES}/)?[A-Za-z0-9]([\w.-]{{0,61}}[A-Za-z0-9])?",
        f"give a label such as {ZONE}",
    ),
}


def main(argv: list[str]) -> int:
    """Print the manifests, write them to a file, or apply them. Returns the exit status."""
    options = parser().parse_args(argv)
    if options.resume:
        return kubectl.resume(options.resume, options.namespace)
    _check_values(options)
    for name, problem in KEPT_BACK.items():
        if getattr(options, name) is not None:
            raise UserError(problem)
    prefer(options, "nodes.abandon_s", ABANDON_S)
    spec, wanted = make_launch(options, make_spec)
    run_dir = PurePosixPath(options.run_dir or RUN_DIR)
    if not run_dir.is_absolute() or len(run_dir.parts) < 3:
        raise UserError(f"--run-dir {run_dir} must be a path such as {RUN_DIR}, below a volume")
    site = KubernetesSite(
        namespace=options.namespace,
        image=options.image,
        volume=str(run_dir.parent),
        port=options.port,
        claim=options.claim,
        storage=options.storage,
        spread=options.spread,
        resources=resources(options),
        pod=shape(options, AGENT),
        coordinator_pod=shape(options, COORDINATOR),
        certificates=options.tls_secret,
        queue=options.queue,
    )
    address = f"{options.host or service_host(spec, site.namespace)}:{site.port}"
    plan = FleetPlan(
        manager="kubernetes",
        run_dir=str(run_dir),
        nodes=wanted,
        nodes_max=wanted + 1,
        join=spec.nodes.election or address,
        drain_s=options.drain_s,
        tls=site.tls,
        agent_options=(*AGENT_OPTIONS, *agent_options(options)),
        settings={"namespace": site.namespace, "address": address, "domain": site.spread},
    )
    name = instance_of(job_prefix(spec.job))
    deliver(options, name, manifests(site, spec, plan, run_command.make_secret(options)))
    here = f"kubectl -n {site.namespace}"
    certificates = f" --tls {site.tls}" if site.tls else ""
    print_line(
        f"job {name}\n"
        f"holdfast: its events: {here} logs -f job/{name}\n"
        f"holdfast: its output: {here} logs -f -l {INSTANCE}={name},{COMPONENT}={AGENT}\n"
        f"holdfast: its state: {here} exec job/{name} -- "
        f"holdfast status --run-dir {plan.run_dir}{certificates}"
    )
    return 0


def _check_values(options: argparse.Namespace) -> None:
    """Raise UserError for a value that Kubernetes would refuse, or could never satisfy."""
    if not options.image:
        raise UserError("there is no image: name one that holds Holdfast and the script, --image")
    for name, (pattern, example) in VALUES.items():
        given = getattr(options, name.replace("-", "_"))
        if given and not re.fullmatch(pattern, given):
            raise UserError(f"--{name} {given[:100]!r} cannot be right: {example}")
    if options.port == 0:
        raise UserError(f"--port 0: pods must know the port, so name one such as {PORT}")


def parser() -> argparse.ArgumentParser:
    found = launch_parser(
        "k8s",
        "Write the manifests of a job for Kubernetes: a coordinator, which keeps the number of "
        "agents' pods that the job needs, and replaces lost ones. They hold the job's secret.",
        {
            "--host": "the name of the job's service",
            "--port": str(PORT),
            "--run-dir": RUN_DIR,
            "--abandon-s": f"{ABANDON_S:g}",
        },
    )
    found.set_defaults(port=PORT)
    hide_options(found, *(f"--{name}" for name in KEPT_BACK))
    group = found.add_argument_group("Kubernetes")

    for name, metavar, default, text in (
        ("image", "IMAGE", "", "image with Python, Holdfast and the script"),
        ("workdir", "DIR", "/workspace", "where the script is in the image"),
        ("namespace", "NAME", "default", "namespace of everything that belongs to the job"),
        ("cpu", "N", "", "processor cores of each agent's pod, such as 8 or 500m"),
        ("memory", "SIZE", "", "memory of each agent's pod, such as 64Gi"),
        ("gpus", "N", "", "NVIDIA GPUs of each agent's pod"),
        ("claim", "NAME", "", CLAIM),
        ("storage", "SIZE", "1Gi", "size of the coordinator's new claim"),
        ("tls-secret", "NAME", "", TLS),
        ("spread", "LABEL", ZONE, SPREAD),
        ("queue", "NAME", "", QUEUE),
        ("resume", "JOB", "", RESUME),
    ):
        shown = f"{text} (default: {default})" if default else text
        group.add_argument(f"--{name}", metavar=metavar, default=default, help=shown)
    group.add_argument("--pod", type=Path, metavar="FILE", help=POD)
    group.add_argument("--coordinator-pod", type=Path, metavar="FILE", help=COORDINATOR_POD)
    group.add_argument("--out", type=Path, metavar="FILE", help=OUT)
    group.add_argument("--apply", action="store_true", help="apply them with kubectl instead")
    return found


def make_spec(options: argparse.Namespace) -> JobSpec:
    """Make the job, whose script is looked for in the image. UserError."""
    store = vars(options).get("checkpoints.store", "")
    if store and "://" not in store and not store.startswith("/"):
        raise UserError(f"--store {store} must be a full path in the pods, or a bucket's URL")
    spec = run_command.make_job(options)
    if problem := find_unheeded(spec, as_flag):
        raise UserError(problem)
    if not spec.script:
        raise UserError("there is no script to run: name one after the options, or in --config")
    if not options.workdir.startswith("/"):
        raise UserError(f"--workdir {options.workdir} must be a full path in the image")
    return dataclasses.replace(spec, cwd=options.workdir)


def resources(options: argparse.Namespace) -> dict[str, str]:
    asked = {"cpu": options.cpu, "memory": options.memory, "nvidia.com/gpu": options.gpus}
    return {name: value for name, value in asked.items() if value}


def is_small(value: object) -> bool:
    """Return whether a value of YAML stays small when its aliases are written out."""
    waiting, count = [value], 0
    while waiting and count <= POD_VALUES_MAX:
        each, count = waiting.pop(), count + 1
        if isinstance(each, dict):
            waiting += each.values()
        elif isinstance(each, list):
            waiting += each
    return count <= POD_VALUES_MAX


def shape(options: argparse.Namespace, part: str) -> dict[str, Any]:
    """Return the user's template for pods of a part; empty: there is none. UserError."""
    name = "--pod" if part == AGENT else "--coordinator-pod"
    path = options.pod if part == AGENT else options.coordinator_pod
    pod = read_pod(path, name) if path is not None else {}
    # Only the pods of agents have a hook that leaves the node.
    drain_s = options.drain_s if part == AGENT else 0.0
    check_template(pod, part, f"{name} {path}", options.image, drain_s)
    return pod


def read_pod(path: Path, option: str = "--pod") -> dict[str, Any]:
    """Read the user's pod template. UserError."""
    yaml = import_yaml()
    try:
        found = yaml.safe_load(read_named(path).decode())
        if not is_small(found):
            raise ValueError(f"it has more than {POD_VALUES_MAX} values, with all its aliases")
    except (OSError, ValueError, RecursionError, yaml.YAMLError) as error:
        raise UserError(f"{option} {path} cannot be read: {error}") from None
    pod = drop_empty(found) if isinstance(found, dict) else {"": None}
    for key in ("apiVersion", "kind"):
        pod.pop(key, None)
    if not all(k in ("metadata", "spec") and isinstance(part, dict) for k, part in pod.items()):
        raise UserError(f"{option} {path} is no pod template: it has parts `metadata` and `spec`")
    return pod


def as_yaml(objects: Sequence[Manifest]) -> str:
    apart = json.loads(json.dumps(objects))  # else equal parts would become aliases
    text: str = import_yaml().safe_dump_all(apart, sort_keys=False, width=100)
    return text


def import_yaml() -> Any:
    try:
        return importlib.import_module("yaml")
    except ImportError:
        raise UserError(
            "launching in Kubernetes needs more packages: pip install 'holdfast[kubernetes]'"
        ) from None


def deliver(options: argparse.Namespace, name: str, objects: list[Manifest]) -> None:
    """Print, write or apply the manifests, by the options. UserError."""
    text = as_yaml(objects)
    if options.out is not None:
        try:
            descriptor = os.open(options.out, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(text)
        except OSError as error:
            raise UserError(f"--out {options.out} cannot be written: {error.strerror}") from None
    if options.apply:
        kubectl.apply(objects, name, options.namespace, as_yaml)
    elif options.out is None:
        print_plain(text, end="")


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

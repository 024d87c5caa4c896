"""Writes the Kubernetes objects of one job, with their labels, as plain values for YAML. Pure.

The coordinator, and the controller that keeps the nodes, are one pod of a Job. The agents' pods are
created by the controller from the PodTemplate that is made here.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import FleetPlan, job_prefix
from holdfast.engine.net.secret import VARIABLE
from holdfast.engine.wire.job_document import encode_job

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


Manifest = dict[str, Any]

JOB_VARIABLE, PLAN_VARIABLE = "HOLDFAST_JOB", "HOLDFAST_PLAN"
POD_VARIABLE, ADDRESS_VARIABLE = "HOLDFAST_POD", "HOLDFAST_POD_IP"
UID_VARIABLE = "HOLDFAST_JOB_UID"
# Kubernetes puts the value in. What the coordinator sees may be the address of a node.
AGENT_OPTIONS = ("--host", f"$({ADDRESS_VARIABLE})")
SECRET_KEY, JOB_KEY, PLAN_KEY = "secret", "job.json", "fleet.json"
COORDINATOR_KEY = "coordinator.json"  # the Job, from which --resume makes another one
HOSTNAME = "kubernetes.io/hostname"
AWAY_S = 30  # a node that is not ready for so long loses its pods; the job's lease is quicker
SPARE_S = 15  # after a drain, before the kubelet kills
TRIES_MAX = 100  # pods of the coordinator, one after the other
READABLE = 0o444  # also for a user other than root; a pod has no other users
GROUP = 1000  # the Dockerfile's user is in it
SHARED = ("imagePullSecrets", "securityContext")  # all pods take them from the user's template


@dataclass(frozen=True, slots=True, kw_only=True)
class KubernetesSite:
    """Describes a job's place in Kubernetes, and its resources.

    `claim`: a volume claim that all pods share; without one the coordinator alone gets a new one.
    `volume`: its mount point. `spread`: the label of nodes over whose values pods are spread.
    `resources`: limits of an agent. `pod`: a pod template that the agents' pods are made from, and
    `coordinator_pod` one for the coordinator's; both are checked (launch_k8s.py).
    `certificates`: a Secret with all pods' certificates, for TLS. `queue`: the LocalQueue in which
    the coordinator's Job and each agent's pod wait for Kueue to admit them.
    """

    namespace: str
    image: str
    volume: str
    port: int
    claim: str = ""
    storage: str = "1Gi"
    spread: str = ZONE
    resources: Mapping[str, str] = field(default_factory=dict)
    pod: Mapping[str, Any] = field(default_factory=dict)
    coordinator_pod: Mapping[str, Any] = field(default_factory=dict)
    certificates: str = ""
    queue: str = ""

    @property
    def queue_label(self) -> dict[str, str]:
        return {QUEUE: self.queue} if self.queue else {}

    @property
    def tls(self) -> str:
        """Return the folder of the certificates in pods; empty without TLS."""
        return f"{self.volume}/tls" if self.certificates else ""


def service_host(spec: JobSpec, namespace: str) -> str:
    """Return the name by which pods find the coordinator, wherever it is."""
    return f"{instance_of(job_prefix(spec.job))}.{namespace}.svc"


def manifests(
    site: KubernetesSite, spec: JobSpec, plan: FleetPlan, secret: bytes
) -> list[Manifest]:
    """Write all objects of a job, in the order in which they should be created."""
    name, prefix = instance_of(job_prefix(spec.job)), job_prefix(spec.job)

    def make_manifest(api: str, kind: str, **parts: Any) -> Manifest:
        about = {"name": name, "namespace": site.namespace, "labels": labels_of(prefix)}
        return {"apiVersion": api, "kind": kind, "metadata": about, **parts}

    held = {
        SECRET_KEY: secret.hex(),
        JOB_KEY: encode_job(spec).decode(),
        PLAN_KEY: json.dumps(dataclasses.asdict(plan)),
    }
    coordinator = labels_of(prefix, COORDINATOR)
    described = _coordinator_job(site, name, plan.run_dir, coordinator)
    job = make_manifest("batch/v1", "Job", spec=described)
    job["metadata"]["labels"] |= site.queue_label
    held[COORDINATOR_KEY] = json.dumps(job)
    found = [
        make_manifest("v1", "Secret", type="Opaque", stringData=held),
        make_manifest("v1", "ServiceAccount"),
        *_rights(site, name, make_manifest),
        make_manifest(
            "v1",
            "Service",
            spec={
                "clusterIP": "None",
                "selector": coordinator,
                "publishNotReadyAddresses": True,
                "ports": [{"name": "holdfast", "port": site.port}],
            },
        ),
    ]
    if spec.nodes.min > 1:  # pods that Kubernetes does not keep itself are only counted
        chosen = {"matchLabels": labels_of(prefix, AGENT)}
        budget = {"minAvailable": spec.nodes.min - 1, "selector": chosen}
        found.append(make_manifest("policy/v1", "PodDisruptionBudget", spec=budget))
    if not site.claim:
        storage = {"requests": {"storage": site.storage}}
        claim = {"accessModes": ["ReadWriteOnce"], "resources": storage}
        found.append(make_manifest("v1", "PersistentVolumeClaim", spec=claim))
    found.append(make_manifest("v1", "PodTemplate", template=agent_template(site, spec, plan)))
    return [*found, job]


def _rights(site: KubernetesSite, name: str, make_manifest: Any) -> list[Manifest]:
    """Allow the controller to keep pods, and to see nodes, whose taints announce events."""
    account = [{"kind": "ServiceAccount", "name": name, "namespace": site.namespace}]
    group = "rbac.authorization.k8s.io"
    wide = f"{name}-{site.namespace}"
    found = []
    for kind, rules in (
        (
            "Role",
            [
                _rule("", "pods", "create", "get", "list", "delete", "patch"),
                _rule("", "events", "list"),
                _rule("", "configmaps", "create", "get"),
                {**_rule("", "podtemplates", "get"), "resourceNames": [name]},
                {**_rule("batch", "jobs", "get", "patch"), "resourceNames": [name]},
            ],
        ),
        ("ClusterRole", [_rule("", "nodes", "list")]),
    ):
        role = make_manifest(f"{group}/v1", kind, rules=rules)
        reference = {"apiGroup": group, "kind": kind, "name": name if kind == "Role" else wide}
        binding = make_manifest(
            f"{group}/v1", f"{kind}Binding", roleRef=reference, subjects=account
        )
        for each in (role, binding):
            if kind == "ClusterRole":
                del each["metadata"]["namespace"]
                each["metadata"]["name"] = wide
            found.append(each)
    return found


def _rule(group: str, resource: str, *verbs: str) -> dict[str, list[str]]:
    return {"apiGroups": [group], "resources": [resource], "verbs": list(verbs)}


def _coordinator_job(
    site: KubernetesSite, name: str, run_dir: str, labels: Mapping[str, str]
) -> Manifest:
    pod, container = _complete(site, site.coordinator_pod, COORDINATOR, labels)
    container |= {
        "command": ["python3", "-m", "holdfast.clusters.kubernetes.kubernetes_job", run_dir],
        "env": [
            *container.get("env", ()),
            _from_secret(VARIABLE, name, SECRET_KEY),
            _from_secret(JOB_VARIABLE, name, JOB_KEY),
            _from_secret(PLAN_VARIABLE, name, PLAN_KEY),
            _from_pod(ADDRESS_VARIABLE, "status.podIP"),
            _from_pod(POD_VARIABLE, "metadata.name"),
            _from_pod(UID_VARIABLE, f"metadata.labels['{JOB_UID}']"),
        ],
        "ports": [*container.get("ports", ()), {"name": "holdfast", "containerPort": site.port}],
    }
    spec, agents = pod["spec"], site.pod.get("spec", {})
    for key in SHARED:
        if key in agents:
            spec.setdefault(key, agents[key])
    if not site.claim:
        # A new volume belongs to root: this lets a pod that does not run as root write there.
        volume_group = {"fsGroup": GROUP, "fsGroupChangePolicy": "OnRootMismatch"}
        spec.setdefault("securityContext", volume_group)
    spec["serviceAccountName"] = name
    _mount_all(site, spec, container, site.claim or name)
    _mount_temporary(spec, container)
    return {"backoffLimit": TRIES_MAX, "template": pod}


def _complete(
    site: KubernetesSite, template: Mapping[str, Any], name: str, labels: Mapping[str, str]
) -> tuple[Manifest, Manifest]:
    """Return a pod made from a user's template, and its container of this name, not yet complete.

    The pod already has the parts that are common to all pods of a job.
    """
    pod: Manifest = json.loads(json.dumps(dict(template)))
    metadata, spec = pod.setdefault("metadata", {}), pod.setdefault("spec", {})
    metadata["labels"] = {**metadata.get("labels", {}), **labels}
    containers = spec.setdefault("containers", [])
    container = next((each for each in containers if each.get("name") == name), None)
    if container is None:
        containers.append(container := {"name": name})
    container["image"] = site.image
    spec["restartPolicy"] = "Never"
    spec["tolerations"] = [*spec.get("tolerations", ()), *_tolerate_absence()]
    if spec.get("hostNetwork"):  # else pods could not find the job's service by its name
        spec.setdefault("dnsPolicy", "ClusterFirstWithHostNet")
    return pod, container


def agent_template(site: KubernetesSite, job: JobSpec, plan: FleetPlan) -> Manifest:
    """Make the common part of all agents' pods, on top of the user's own template."""
    prefix = job_prefix(job.job)
    name = instance_of(prefix)
    labels = labels_of(prefix, AGENT)
    pod, agent = _complete(site, site.pod, AGENT, labels | site.queue_label)
    spec = pod["spec"]
    leave = ["python3", "-m", "holdfast.clusters.kubernetes.kubernetes_leave"]
    leave += [plan.join, f"{plan.drain_s:g}", job.job, *([plan.tls] if plan.tls else [])]
    agent.setdefault("lifecycle", {})["preStop"] = {"exec": {"command": leave}}
    agent["env"] = [
        *agent.get("env", ()),
        _from_secret(VARIABLE, name, SECRET_KEY),
        _from_pod(ADDRESS_VARIABLE, "status.podIP"),
        _from_pod(POD_VARIABLE, "metadata.name"),
    ]
    if site.resources:
        given = agent.setdefault("resources", {})
        for part in ("limits", "requests"):
            given[part] = {**given.get(part, {}), **site.resources}
    _mount_all(site, spec, agent, site.claim)
    _mount(spec, agent, "/dev/shm", {"name": "holdfast-memory", "emptyDir": {"medium": "Memory"}})
    _mount_temporary(spec, agent)
    spec.setdefault("automountServiceAccountToken", False)
    given_s = spec.get("terminationGracePeriodSeconds", 0)
    spec["terminationGracePeriodSeconds"] = max(round(plan.drain_s) + SPARE_S, given_s)
    _spread(spec, site.spread, labels)
    return pod


def _mount_all(site: KubernetesSite, spec: Manifest, container: Manifest, claim: str) -> None:
    """Mount a place for the run directory, on a claim or not, and certificates in a pod."""
    shared = {"persistentVolumeClaim": {"claimName": claim}} if claim else {"emptyDir": {}}
    _mount(spec, container, site.volume, {"name": "holdfast-run", **shared})
    if site.tls:
        held = {"secretName": site.certificates, "defaultMode": READABLE}
        _mount(spec, container, site.tls, {"name": "holdfast-tls", "secret": held})


def _mount_temporary(spec: Manifest, container: Manifest) -> None:
    """Mount a place for temporary files if the container's own file system is read-only."""
    if container.get("securityContext", {}).get("readOnlyRootFilesystem"):
        _mount(spec, container, "/tmp", {"name": "holdfast-temporary", "emptyDir": {}})


def _mount(spec: Manifest, container: Manifest, path: str, volume: Manifest) -> None:
    """Mount a volume, unless the user's template has one there."""
    mounts = container.setdefault("volumeMounts", [])
    if all(each["mountPath"].rstrip("/") != path for each in mounts):
        mounts.append({"name": volume["name"], "mountPath": path})
        spec.setdefault("volumes", []).append(volume)


def _spread(spec: Manifest, key: str, labels: Mapping[str, str]) -> None:
    """Give each agent a host of its own, and spread them over failure domains where possible."""
    chosen = {"matchLabels": dict(labels)}
    apart = spec.setdefault("affinity", {}).setdefault("podAntiAffinity", {})
    alone = {"labelSelector": chosen, "topologyKey": HOSTNAME}
    required = "requiredDuringSchedulingIgnoredDuringExecution"
    apart[required] = [*apart.get(required, ()), alone]
    domain = {"topologyKey": key, "whenUnsatisfiable": "ScheduleAnyway"}
    given = spec.setdefault("topologySpreadConstraints", [])
    if not any(domain.items() <= each.items() for each in given):  # Kubernetes takes no second one
        given.append({"maxSkew": 1, **domain, "labelSelector": chosen})


def _tolerate_absence() -> list[Manifest]:
    return [
        {
            "key": f"node.kubernetes.io/{what}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": AWAY_S,
        }
        for what in ("not-ready", "unreachable")
    ]


def _from_secret(variable: str, name: str, key: str) -> Manifest:
    return {"name": variable, "valueFrom": {"secretKeyRef": {"name": name, "key": key}}}


def _from_pod(variable: str, field_path: str) -> Manifest:
    return {"name": variable, "valueFrom": {"fieldRef": {"fieldPath": field_path}}}

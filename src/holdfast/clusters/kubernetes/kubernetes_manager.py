"""Asks Kubernetes for a job's nodes: each is a pod, whose name is the placement's id.

A pod that exists already cannot be created again, so a request may be repeated. All knowledge is
in the cluster: pods are found by their labels, never remembered. Only the age of an
announcement is counted here, by our own clock.

Kubernetes lets the next pod of a Job wait for twice as long after each lost pod, up to 10 minutes,
and never forgets a loss. A coordinator that has served for a while is therefore no longer counted:
the loss of its pod is replaced at once. Its Job does so without the finalizer of the pod.
"""

from __future__ import annotations

import contextlib
import copy
import os
import time
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from httpx2 import HTTPError
from lightkube import ApiError, AsyncClient
from lightkube.models.meta_v1 import ObjectMeta, OwnerReference
from lightkube.resources.batch_v1 import Job
from lightkube.resources.core_v1 import ConfigMap, Event, Node, Pod, PodTemplate
from lightkube.types import PatchType

from holdfast.clusters.kubernetes.kubernetes_manifests import (
    AGENT,
    POD_VARIABLE,
    TRACKING,
    UNCOUNTED,
    instance_of,
    labels_of,
)
from holdfast.clusters.kubernetes.kubernetes_notices import (
    PENDING,
    Sightings,
    find_failures,
    find_queue_reasons,
    is_queued,
    is_starting,
    placement_of,
)
from holdfast.engine.core.errors import Refused, Unreachable, first_line
from holdfast.engine.core.fleet.placements import Placement, PlacementId
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import FleetPlan, PlacementOrder, job_prefix
from holdfast.engine.net.standard_streams import print_line

START_S = 10.0  # a pod may be started for so long before its events are asked for
FORGIVE_S = 60.0  # the coordinator's pod is not counted if it is lost after it has served so long
RELEASE_S = 10  # for what runs in a pod that is given back to end by itself
FORBIDDEN, MISSING, CONFLICT, TOO_MANY, BROKEN = 403, 404, 409, 429, 500


class KubernetesManager:
    """Creates, lists and deletes the pods of one job's agents, in one namespace.

    The ids of its placements begin with `prefix`. They are made from the PodTemplate of the job's
    name; they go when the Job of that name goes. `label`: the label of nodes whose values are
    failure domains. `pod`: the coordinator's pod, if this process is in one.
    """

    def __init__(
        self, client: AsyncClient, namespace: str, prefix: str, label: str = "", pod: str = ""
    ) -> None:
        self._client = client
        self._namespace = namespace
        self._prefix = prefix
        self._label = label
        # Nodes may not be listed, and a line about that has been printed.
        self._blind = False
        self._sightings = Sightings()
        self._pod = pod  # empty once it is not counted
        self._served_since: float | None = None

    async def observe(self) -> Sequence[Placement]:
        with told_apart():
            labels: Any = labels_of(self._prefix, AGENT)
            listed = self._client.list(Pod, namespace=self._namespace, labels=labels)
            pods = [pod async for pod in listed]
            nodes = await self._nodes() if pods else {}
            now = time.monotonic()
            self._sightings.begin(now)
            failures = await self._failures(pods)
        self._served_since = now if self._served_since is None else self._served_since
        if self._pod and now >= self._served_since + FORGIVE_S:
            await self._forgive()
            self._served_since = now  # until the next try, if this one has failed
        return [
            placement_of(pod, nodes, self._sightings, self._label, failures.get(uid_of(pod), ""))
            for pod in pods
        ]

    async def request(self, order: PlacementOrder) -> None:
        name, namespace = instance_of(self._prefix), self._namespace
        with told_apart():
            job = await self._client.get(Job, name, namespace=namespace)
            template = await self._client.get(PodTemplate, name, namespace=namespace)
            pod = fill(template.to_dict()["template"], order)
            owner = reference(await self._owner(job), controller=True)
            pod["metadata"]["ownerReferences"] = [owner.to_dict()]
            create: Any = self._client.create  # its types do not fit those of from_dict
            try:
                await create(Pod.from_dict(pod), namespace=namespace)
            except ApiError as error:
                if error.response.status_code != CONFLICT:
                    raise

    async def release(self, id_: PlacementId, handle: str) -> None:
        with told_apart():
            try:
                found = await self._client.get(Pod, id_, namespace=self._namespace)
                if found.metadata is not None and found.metadata.uid == handle:
                    await self._client.delete(
                        Pod, id_, namespace=self._namespace, grace_period=RELEASE_S
                    )
            except ApiError as error:
                if error.response.status_code != MISSING:
                    raise

    async def close(self) -> None:
        await self._client.close()

    async def _owner(self, job: Job) -> ConfigMap:
        """Return the object that owns a Job's agents, and goes with the Job; make it if need be.

        It shows `kubectl drain` that a controller replaces these pods. A Job that was named as
        their controller would disown them, because it does not select them.
        """
        owner = reference(job)
        create: Any = self._client.create  # its types do not fit
        about = ObjectMeta(
            name=f"{owner.name}-{owner.uid[:8]}",
            namespace=self._namespace,
            labels=labels_of(self._prefix, AGENT),
            ownerReferences=[owner],
        )
        try:
            made: ConfigMap = await create(ConfigMap(metadata=about), namespace=self._namespace)
        except ApiError as error:
            if error.response.status_code != CONFLICT:
                raise
            return await self._client.get(ConfigMap, about.name or "", namespace=self._namespace)
        return made

    async def _forgive(self) -> None:
        """Take the coordinator's pod from the pods whose loss its Job counts."""
        pod = self._pod
        with contextlib.suppress(ApiError, HTTPError):
            found = await self._client.get(Pod, pod, namespace=self._namespace)
            kept = (found.metadata.finalizers if found.metadata is not None else None) or []
            if TRACKING in kept:
                change = {
                    "finalizers": [each for each in kept if each != TRACKING],
                    "annotations": {UNCOUNTED: "true"},
                }
                await self._client.patch(
                    *(Pod, pod, {"metadata": change}),
                    namespace=self._namespace,
                    patch_type=PatchType.MERGE,
                )
            self._pod = ""

    async def _failures(self, pods: Sequence[Pod]) -> dict[str, str]:
        """Return the problems that keep pods from starting, by uid; none if we may not see them."""
        found: dict[str, str] = {}
        if self._wait_long([pod for pod in pods if is_starting(pod)]):
            found = find_failures(await self._events({"involvedObject.kind": "Pod"}))
        queued = [pod for pod in pods if is_queued(pod)]
        if self._wait_long(queued):
            waits = {"involvedObject.kind": "Workload", "reason": PENDING}
            reasons = find_queue_reasons(await self._events(waits))
            names = {uid_of(pod): pod.metadata.name for pod in queued if pod.metadata is not None}
            found |= {uid: reasons.get(name or "", "") for uid, name in names.items()}
        return found

    def _wait_long(self, pods: Sequence[Pod]) -> bool:
        """Return whether one of these pods, which wait for something, has done so for long."""
        seen = [self._sightings.see(f"start of {uid_of(pod)}") for pod in pods]
        return min(seen, default=self._sightings.now) <= self._sightings.now - START_S

    async def _events(self, fields: dict[str, str]) -> list[Event]:
        """List the events that have these fields; none if we may not see them."""
        chosen: Any = fields
        try:
            listed = self._client.list(Event, namespace=self._namespace, fields=chosen)
            return [event async for event in listed]
        except ApiError as error:
            if error.response.status_code != FORBIDDEN:
                raise
            return []  # an earlier release has made the job's role

    async def _nodes(self) -> dict[str, Node]:
        """Return the cluster's nodes by name; none if we may not see them."""
        try:
            found = [node async for node in self._client.list(Node)]
        except ApiError as error:
            if error.response.status_code != FORBIDDEN:
                raise
            if not self._blind:
                self._blind = True
                print_line(
                    "nodes may not be listed, so taints are not seen; pods' evictions and"
                    " deletions are"
                )
            return {}
        return {node.metadata.name: node for node in found if node.metadata and node.metadata.name}


def uid_of(pod: Pod) -> str:
    return (pod.metadata.uid if pod.metadata is not None else None) or ""


def reference(owner: Job | ConfigMap, *, controller: bool | None = None) -> OwnerReference:
    """Return the reference that makes an object go when its owner goes."""
    assert owner.metadata is not None
    name, uid = owner.metadata.name or "", owner.metadata.uid or ""
    version, kind = ("batch/v1", "Job") if isinstance(owner, Job) else ("v1", "ConfigMap")
    return OwnerReference(apiVersion=version, kind=kind, name=name, uid=uid, controller=controller)


def fill(template: Mapping[str, Any], order: PlacementOrder) -> dict[str, Any]:
    """Make the pod of an order, on none of the hosts to avoid."""
    pod: dict[str, Any] = copy.deepcopy(dict(template))
    pod["metadata"]["name"] = order.id
    spec = pod["spec"]
    agent = next(each for each in spec["containers"] if each["name"] == AGENT)
    agent["command"] = list(order.command)
    given = [{"name": name, "value": value} for name, value in order.environment.items()]
    agent["env"] = [*agent.get("env", ()), *given]
    if order.avoid:
        elsewhere = [
            {"key": "metadata.name", "operator": "NotIn", "values": [host]} for host in order.avoid
        ]
        node = spec.setdefault("affinity", {}).setdefault("nodeAffinity", {})
        required = node.setdefault("requiredDuringSchedulingIgnoredDuringExecution", {})
        for term in required.setdefault("nodeSelectorTerms", [{}]):
            term["matchFields"] = [*term.get("matchFields", ()), *elsewhere]
    return pod


@contextlib.contextmanager
def told_apart() -> Iterator[None]:
    """Raise Refused if Kubernetes declines, and Unreachable if a request may yet succeed."""
    try:
        yield
    except ApiError as error:
        code = error.response.status_code
        kind = Unreachable if code >= BROKEN or code == TOO_MANY else Refused
        raise kind(f"Kubernetes says: {first_line(error)}") from None
    except HTTPError as error:
        raise Unreachable(f"Kubernetes does not answer ({first_line(error)})") from None


def open_manager(plan: FleetPlan, spec: JobSpec) -> KubernetesManager:
    """Open the manager of a plan, inside a pod or with the user's own kubeconfig."""
    namespace = plan.settings["namespace"]
    client, label = AsyncClient(namespace=namespace), plan.settings.get("domain", "")
    pod = os.environ.get(POD_VARIABLE, "")
    return KubernetesManager(client, namespace, job_prefix(spec.job), label, pod)

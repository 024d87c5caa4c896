"""Reads a job's pods, their nodes and events as placements with notices and reasons. Pure.

A notice is any sign that a pod will have to go: its deletion or eviction, whose deadline is the end
of its grace period; a taint that it does not tolerate, or for a time only; a cordoned node. Events
have the reason why Kubernetes cannot start a pod on its node. Its status is ContainerCreating then,
the same as while an image is pulled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping
from datetime import datetime, timezone
from typing import TYPE_CHECKING

from holdfast.clusters.kubernetes.kubernetes_manifests import AGENT
from holdfast.engine.core.domains import Domains
from holdfast.engine.core.fleet.placements import Holding, Notice, Placement, PlacementId

if TYPE_CHECKING:
    from lightkube.models.core_v1 import Taint, Toleration
    from lightkube.resources.core_v1 import Event, Node, Pod

# Reasons of events, after which Kubernetes tries the same again on the same node.
FAILURES = frozenset(
    ("FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox")
)
# Reasons of events that a pod has once these failures are over.
PROGRESS = frozenset(
    ("SuccessfulAttachVolume", "Pulling", "Pulled", "BackOff", "Failed", "Created", "Started")
)
# Kueue holds a pod back by this gate, and gives the reason in the events of the pod's Workload.
KUEUE_GATE = "kueue.x-k8s.io/admission"
PENDING = "Pending"
WORKLOAD_OF_POD = re.compile(r"pod-(.+)-[0-9a-f]+")
NEVER = datetime.min.replace(tzinfo=timezone.utc)


def is_starting(pod: Pod) -> bool:
    """Return whether a pod has a node, where it does not run yet."""
    phase = pod.status.phase if pod.status is not None else None
    return bool(pod.spec is not None and pod.spec.nodeName and phase in (None, "Pending"))


def is_queued(pod: Pod) -> bool:
    """Return whether Kueue has not admitted a pod."""
    gates = (pod.spec.schedulingGates if pod.spec is not None else None) or ()
    return any(gate.name == KUEUE_GATE for gate in gates)


def find_queue_reasons(events: Iterable[Event]) -> dict[str, str]:
    """Return, by the names of pods, why Kueue does not admit each, by the events of Workloads."""
    newest: dict[str, tuple[datetime, str]] = {}
    for event in events:
        named = WORKLOAD_OF_POD.fullmatch(event.involvedObject.name or "")
        if named and event.reason == PENDING and event.message:
            found = (_moment(event), f"Kueue: {' '.join(event.message.split())}")
            newest[named[1]] = max(newest.get(named[1], found), found)
    return {pod: reason for pod, (_, reason) in newest.items()}


def find_failures(events: Iterable[Event]) -> dict[str, str]:
    """Return, by the uids of pods, the failure that keeps each from being started.

    A failure that progress has followed is over.
    """
    newest: dict[str, tuple[datetime, bool, str]] = {}
    for event in events:
        uid, reason = event.involvedObject.uid or "", event.reason or ""
        if reason in FAILURES or reason in PROGRESS:
            message = " ".join((event.message or "").split())
            text = f"{reason}: {message}" if reason in FAILURES else ""
            found = (_moment(event), reason in PROGRESS, text)
            newest[uid] = max(newest.get(uid, found), found)
    return {uid: text for uid, (_, _, text) in newest.items() if text}


def _moment(event: Event) -> datetime:
    """Return when an event was last seen."""
    last = event.series.lastObservedTime if event.series is not None else None
    return (
        last or event.lastTimestamp or event.eventTime or event.metadata.creationTimestamp or NEVER
    )


REASON = "holdfast/reason"  # an operator's own words, as an annotation of a node
# After its grace period a pod counts as ended, if its end is not confirmed for so long: a node that
# is away never does, and another one may still be taking its volumes from it.
OVERDUE_AWAY_S, OVERDUE_S = 2.0, 60.0
OVER = ("Succeeded", "Failed")
# Kubernetes' reason for a container's end after an OOM kill.
OOM_KILLED = "OOMKilled"
STARTING = ("ContainerCreating", "PodInitializing")  # reasons to wait that are no errors
# Reasons to wait that are faults of the job's objects. The pod starts as soon as they are mended,
# on this node as on any other.
OF_JOB = ("CreateContainerConfigError", "InvalidImageName")
UNSCHEDULABLE, UNREACHABLE = (
    f"node.kubernetes.io/{name}" for name in ("unschedulable", "unreachable")
)
# They come and go by themselves, while the agent may well answer the job. Once a pod does not
# tolerate one of them any longer, Kubernetes deletes it, and the deletion is a notice.
PASSING = frozenset(
    f"node.kubernetes.io/{name}"
    for name in (
        *("not-ready", "unreachable", "network-unavailable"),
        *("memory-pressure", "disk-pressure", "pid-pressure"),
    )
)


class Sightings:
    """Knows for how long each announcement has been seen, by the machine's own clock.

    Moments that Kubernetes shows are by its clock. Ours may differ from it, so the two are never
    compared: an announcement is as old as our first sight of it. Call `begin` before each look.
    """

    def __init__(self) -> None:
        self.now = 0.0
        self._first: dict[str, float] = {}
        self._before: dict[str, float] = {}

    def begin(self, now: float) -> None:
        """Begin a look at all pods; announcements that the last one did not see are forgotten."""
        self.now = now
        self._before, self._first = self._first, {}

    def see(self, what: str) -> float:
        """Return the moment of the first sight of an announcement, which may be this one."""
        first = self._first.get(what, self._before.get(what, self.now))
        self._first[what] = first
        return first


def placement_of(
    pod: Pod, nodes: Mapping[str, Node], sightings: Sightings, label: str = "", failure: str = ""
) -> Placement:
    """Return the placement that a pod is. `label`: of nodes, whose values are failure domains.

    `failure`: what keeps it from being admitted, or started on its node, by events.
    """
    assert pod.metadata is not None
    assert pod.spec is not None
    host = pod.spec.nodeName or ""
    node, why = nodes.get(host), _reason_to_wait(pod, failure)
    holding = _holding(pod, node, sightings)
    return Placement(
        id=PlacementId(pod.metadata.name or ""),
        handle=pod.metadata.uid or "",
        holding=holding,
        host=host,
        notice=_notice(pod, node, sightings),
        domains=_domains(node, label),
        why=_reason_to_end(pod) if holding is Holding.ENDED else why,
        stuck=bool(why and host) and not why.startswith(OF_JOB),
    )


def _reason_to_wait(pod: Pod, failure: str) -> str:
    """Return Kubernetes' reason why a pod does not run yet, or "" if it only takes its time."""
    status = pod.status
    if status is None or status.phase not in (None, "Pending"):
        return ""
    if failure and is_queued(pod):
        return failure
    for each in status.conditions or ():
        if each.type == "PodScheduled" and each.status == "False":
            return each.message or each.reason or ""
    host = pod.spec.nodeName if pod.spec is not None else ""
    for container in (*(status.initContainerStatuses or ()), *(status.containerStatuses or ())):
        waiting = container.state.waiting if container.state is not None else None
        if waiting is not None and waiting.reason and waiting.reason not in STARTING:
            said = f": {waiting.message}" if waiting.message else ""
            return f"{waiting.reason} on {host}{said}"
    what, _, message = failure.partition(": ")
    return f"{what} on {host}: {message}" if failure else ""


def _reason_to_end(pod: Pod) -> str:
    """Return Kubernetes' reason why a pod has ended, if that was not its own doing.

    By the source of Kubernetes 1.37, the kernel kills all of a container whose memory is used up,
    where control groups are of version 2: then no process in the pod is left to report it.
    """
    status = pod.status
    if status is None:
        return ""
    if status.reason:  # Evicted, for example
        said = " ".join((status.message or "").split())
        return f"{status.reason}: {said}" if said else status.reason
    for each in status.containerStatuses or ():
        ended = each.state.terminated if each.state is not None else None
        if ended is not None and ended.reason == OOM_KILLED:
            limit = "--memory sets" if each.name == AGENT else "the template sets"
            return f"{OOM_KILLED}: {each.name} needs more memory than its limit, which {limit}"
    return ""


def _domains(node: Node | None, label: str) -> Domains:
    labels = (node.metadata.labels if node is not None and node.metadata is not None else {}) or {}
    return (f"{label}={labels[label]}",) if labels.get(label) else ()


def _holding(pod: Pod, node: Node | None, sightings: Sightings) -> Holding:
    assert pod.metadata is not None
    phase = pod.status.phase if pod.status is not None else None
    going = _end_of_grace(pod, sightings)
    taints = (node.spec.taints if node is not None and node.spec is not None else None) or ()
    away = any(taint.key == UNREACHABLE for taint in taints)
    overdue_s = OVERDUE_AWAY_S if away else OVERDUE_S
    if phase in OVER or (going is not None and sightings.now > going + overdue_s):
        return Holding.ENDED
    return Holding.WAITING if phase in (None, "Pending") else Holding.RUNNING


def _notice(pod: Pod, node: Node | None, sightings: Sightings) -> Notice | None:
    """Return the most urgent announcement of the pod's end."""
    found = [
        *_of_pod(pod, sightings),
        *(_of_node(pod, node, sightings) if node is not None else ()),
    ]
    return min(found, key=lambda n: float("inf") if n.until is None else n.until, default=None)


def _end_of_grace(pod: Pod, sightings: Sightings) -> float | None:
    """Return when the grace period of a pod that is being deleted ends; else None."""
    assert pod.metadata is not None
    about = pod.metadata
    if about.deletionTimestamp is None:
        return None
    first = sightings.see(f"pod {about.uid} {about.deletionTimestamp}")
    return first + (about.deletionGracePeriodSeconds or 0)


def _of_pod(pod: Pod, sightings: Sightings) -> Iterator[Notice]:
    going = _end_of_grace(pod, sightings)
    conditions = (pod.status.conditions if pod.status is not None else None) or ()
    why = ""
    for each in conditions:
        if each.type == "DisruptionTarget" and each.status == "True":
            why = each.message or each.reason or "its pod is to be disrupted"
    if going is not None:
        yield Notice(reason=why or "its pod is being deleted", until=going)
    elif why:
        yield Notice(reason=why)


def _of_node(pod: Pod, node: Node, sightings: Sightings) -> Iterator[Notice]:
    assert node.metadata is not None
    words = (node.metadata.annotations or {}).get(REASON, "")
    named = f" ({words})" if words else ""
    if node.metadata.deletionTimestamp is not None:
        yield Notice(reason=f"its node is being deleted{named}")
    if node.spec is None:
        return
    if node.spec.unschedulable:
        yield Notice(reason=f"its node is cordoned{named}")
    tolerations = (pod.spec.tolerations if pod.spec is not None else None) or []
    for taint in node.spec.taints or ():
        if taint.key in PASSING:
            continue
        value = f"={taint.value}" if taint.value else ""
        reason = f"its node is tainted {taint.key}{value}:{taint.effect}{named}"
        bearable_s = [t.tolerationSeconds for t in tolerations if tolerates(t, taint)]
        if taint.effect == "NoExecute" and None not in bearable_s:
            limited_s = min((s for s in bearable_s if s is not None), default=0)
            first = sightings.see(f"taint {node.metadata.name} {taint.key} {taint.timeAdded}")
            yield Notice(reason=reason, until=first + limited_s)
        elif taint.effect == "NoSchedule" and not bearable_s:
            if taint.key != UNSCHEDULABLE:  # a cordon, which is handled above
                yield Notice(reason=reason)


def tolerates(toleration: Toleration, taint: Taint) -> bool:
    """Return whether a toleration is meant for a taint, as the scheduler sees it."""
    if toleration.effect and toleration.effect != taint.effect:
        return False
    if toleration.key and toleration.key != taint.key:
        return False
    if (toleration.operator or "Equal") == "Exists":
        return True
    return bool(toleration.key) and (toleration.value or "") == (taint.value or "")

"""Reads from the events of pods why Kubernetes cannot start one on its node. Pure.

The status of such a pod is no more than ContainerCreating, as it is while an image is pulled.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from datetime import datetime, timezone
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from lightkube.resources.core_v1 import Event, Pod

# Reasons of events, after which Kubernetes tries the same again on the same node.
FAILURES = frozenset(
    ("FailedMount", "FailedAttachVolume", "FailedMapVolume", "FailedCreatePodSandBox")
)
# Reasons of events that a pod has once these failures are over.
PROGRESS = frozenset(
    ("SuccessfulAttachVolume", "Pulling", "Pulled", "BackOff", "Failed", "Created", "Started")
)
# Kueue holds a pod back by this gate, and says why in the events of the pod's Workload.
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

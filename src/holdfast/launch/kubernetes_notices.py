"""Reads what Kubernetes says of a job's pods and their nodes, as placements with notices. Pure.

A notice is whatever means that a pod will have to go: its deletion or eviction, whose deadline is
the end of its grace period; a taint that it does not tolerate, or for a time only; a cordoned node.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime
from typing import TYPE_CHECKING

from holdfast.core.domains import Domains
from holdfast.core.fleet.placements import Holding, Notice, Placement, PlacementId

if TYPE_CHECKING:
    from lightkube.models.core_v1 import Taint, Toleration
    from lightkube.resources.core_v1 import Node, Pod

REASON = "holdfast/reason"  # an operator's own words, as an annotation of a node
# After its grace period a pod counts as ended, if nobody has confirmed it for so long: a node that
# is away never does, and another one may still be taking its volumes from it.
OVERDUE_AWAY_S, OVERDUE_S = 2.0, 60.0
OVER = ("Succeeded", "Failed")
UNSCHEDULABLE, UNREACHABLE = (
    f"node.kubernetes.io/{name}" for name in ("unschedulable", "unreachable")
)
# They come and go by themselves; those of them that evict have the effect NoExecute too.
PASSING = frozenset(
    f"node.kubernetes.io/{name}"
    for name in (
        *("not-ready", "unreachable", "network-unavailable"),
        *("memory-pressure", "disk-pressure", "pid-pressure"),
    )
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TwoClocks:
    """Pairs one moment by the wall clock, which Kubernetes shows, with that by the machine's."""

    wall: float
    monotonic: float

    def age(self, moment: datetime) -> float:
        """Return for how many seconds a moment has been past."""
        return self.wall - moment.timestamp()

    def to_monotonic(self, moment: datetime, later_s: float = 0.0) -> float:
        """Return a moment, and some seconds, by the machine's clock."""
        return self.monotonic - self.age(moment) + later_s


def placement_of(
    pod: Pod, nodes: Mapping[str, Node], clocks: TwoClocks, label: str = ""
) -> Placement:
    """Return the placement that a pod is. `label`: of nodes, whose values are failure domains."""
    assert pod.metadata is not None
    assert pod.spec is not None
    host = pod.spec.nodeName or ""
    node = nodes.get(host)
    return Placement(
        id=PlacementId(pod.metadata.name or ""),
        handle=pod.metadata.uid or "",
        holding=_holding(pod, node, clocks),
        host=host,
        notice=_notice(pod, node, clocks),
        domains=_domains(node, label),
    )


def _domains(node: Node | None, label: str) -> Domains:
    labels = (node.metadata.labels if node is not None and node.metadata is not None else {}) or {}
    return (f"{label}={labels[label]}",) if labels.get(label) else ()


def _holding(pod: Pod, node: Node | None, clocks: TwoClocks) -> Holding:
    assert pod.metadata is not None
    phase = pod.status.phase if pod.status is not None else None
    deleted = pod.metadata.deletionTimestamp
    taints = (node.spec.taints if node is not None and node.spec is not None else None) or ()
    away = any(taint.key == UNREACHABLE for taint in taints)
    overdue_s = OVERDUE_AWAY_S if away else OVERDUE_S
    if phase in OVER or (deleted is not None and clocks.age(deleted) > overdue_s):
        return Holding.ENDED
    return Holding.WAITING if phase in (None, "Pending") else Holding.RUNNING


def _notice(pod: Pod, node: Node | None, clocks: TwoClocks) -> Notice | None:
    """Return the most urgent announcement of the pod's end."""
    found = [*_of_pod(pod, clocks), *(_of_node(pod, node, clocks) if node is not None else ())]
    return min(found, key=lambda n: float("inf") if n.until is None else n.until, default=None)


def _of_pod(pod: Pod, clocks: TwoClocks) -> Iterator[Notice]:
    assert pod.metadata is not None
    deleted = pod.metadata.deletionTimestamp
    conditions = (pod.status.conditions if pod.status is not None else None) or ()
    why = ""
    for each in conditions:
        if each.type == "DisruptionTarget" and each.status == "True":
            why = each.message or each.reason or "its pod is to be disrupted"
    if deleted is not None:
        yield Notice(reason=why or "its pod is being deleted", until=clocks.to_monotonic(deleted))
    elif why:
        yield Notice(reason=why)


def _of_node(pod: Pod, node: Node, clocks: TwoClocks) -> Iterator[Notice]:
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
        value = f"={taint.value}" if taint.value else ""
        reason = f"its node is tainted {taint.key}{value}:{taint.effect}{named}"
        bearable_s = [t.tolerationSeconds for t in tolerations if tolerates(t, taint)]
        if taint.effect == "NoExecute" and None not in bearable_s:
            limited_s = min((s for s in bearable_s if s is not None), default=0)
            added = taint.timeAdded
            now = clocks.monotonic
            until = clocks.to_monotonic(added, limited_s) if added is not None else now + limited_s
            yield Notice(reason=reason, until=until)
        elif taint.effect == "NoSchedule" and not bearable_s and taint.key not in PASSING:
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

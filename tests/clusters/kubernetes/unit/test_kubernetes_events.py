"""What keeps a pod of a job from running is read from events."""

from __future__ import annotations

from typing import Any

import pytest
from lightkube.resources.core_v1 import Event, Pod
from test_kubernetes import UNPLACED, later

from holdfast.clusters.kubernetes.kubernetes_notices import (
    KUEUE_GATE,
    Sightings,
    find_failures,
    find_queue_reasons,
    placement_of,
)
from holdfast.engine.core.fleet.placements import Holding


def event(reason: str, at_s: float, uid: str = "u", **more: Any) -> Event:
    about = {"name": f"{uid}{reason}", "namespace": "ml"}
    given = {"involvedObject": {"uid": uid}, "reason": reason, "message": "it\n fails"}
    when = {"lastTimestamp": later(at_s)}
    made: Event = Event.from_dict({"metadata": about, **given, **(more or when)})
    return made


@pytest.mark.parametrize(
    ("events", "failure"),
    [
        ([event("FailedMount", 5)], "FailedMount: it fails"),
        ([event("FailedMount", 5), event("Pulling", 5)], ""),
        ([event("Pulling", 6), event("FailedMount", 5)], ""),
        ([event("FailedAttachVolume", 5), event("SuccessfulAttachVolume", 6)], ""),
        ([event("SuccessfulAttachVolume", 6), event("FailedMount", 7)], "FailedMount: it fails"),
        ([event("FailedCreatePodSandBox", 5), event("SandboxChanged", 6)],
         "FailedCreatePodSandBox: it fails"),
        ([event("FailedMount", 5), event("Scheduled", 9)], "FailedMount: it fails"),
        ([event("FailedMount", 0, eventTime=later(5)), event("Pulled", 4)],
         "FailedMount: it fails"),
        ([event("FailedMount", 0, firstTimestamp=later(5))], "FailedMount: it fails"),
        ([event("Pulled", 4), event("FailedMount", 0, eventTime=later(1),
          series={"lastObservedTime": later(5)})], "FailedMount: it fails"),
    ],
)  # fmt: skip
def test_what_keeps_a_pod_from_being_started_is_in_its_events(
    events: list[Event], failure: str
) -> None:
    found = find_failures([*events, event("Pulled", 99, uid="other")])
    assert found == ({"u": failure} if failure else {})


def test_why_kueue_does_not_admit_a_pod_is_in_the_events_of_its_workload() -> None:
    """The newest event counts, as Kueue 0.17 writes it."""

    def pending(name: str, at_s: float, why: str, reason: str = "Pending") -> Event:
        about = {"metadata": {"name": f"{name}.{at_s}", "namespace": "ml"}, "reason": reason}
        given = {"involvedObject": {"kind": "Workload", "name": name}, "message": why}
        made: Event = Event.from_dict({**about, **given, "lastTimestamp": later(at_s)})
        return made

    reasons = find_queue_reasons(
        [
            pending("pod-hf-1-2-0a1b2", 5, "insufficient\n quota"),
            pending("pod-hf-1-2-0a1b2", 3, "no flavor"),
            pending("pod-hf-1-2-0a1b2", 9, "Quota reserved", reason="QuotaReserved"),
            pending("job-hf-1-cc1b2", 5, "insufficient quota"),
        ]
    )
    assert reasons == {"hf-1-2": "Kueue: insufficient quota"}
    gate = {"name": KUEUE_GATE}
    made = {
        "metadata": {"name": "hf-1-2", "uid": "u"},
        "spec": {"containers": [], "schedulingGates": [gate]},
        "status": {"phase": "Pending", "conditions": [{**UNPLACED, "message": "gated"}]},
    }
    typed: Any = Pod.from_dict(made)
    for failure, why in ((reasons["hf-1-2"], reasons["hf-1-2"]), ("", "gated")):
        found = placement_of(typed, {}, Sightings(), failure=failure)
        assert (found.why, found.stuck, found.holding) == (why, False, Holding.WAITING)

"""Each incident begins with its first cause, and ends with the party at fault and advice."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.records.diagnoses import CAUSES, Party
from holdfast.engine.records.incidents import (
    STOPPING,
    TELLING,
    Incident,
    list_incidents,
    tell_story,
)
from places import ROOT, TESTS

SOURCE = ROOT / "src" / "holdfast" / "engine"
STORIES = TESTS / "stories"
STATE = "the state of worker 1 is not that of the others in step 30"
SIGNALS = ("SIGKILL", "SIGSEGV", "SIGBUS", "SIGABRT", "SIGILL", "SIGFPE")
LINE = re.compile(r"coordinator: ([a-z_]+): (.*(?:\n    .*)*)")


def event(name: int, kind: str, text: str, *causes: int, **more: Any) -> dict[str, Any]:
    ids = [f"1.{cause}" for cause in causes]
    return {
        "time": float(name),
        "kind": kind,
        "text": text,
        "id": f"1.{name}",
        "causes": ids,
    } | more


def only(*events: dict[str, Any]) -> Incident:
    (found,) = list_incidents(events)
    return found


def test_every_phrase_of_the_table_is_in_the_texts_that_are_logged() -> None:
    parts = ("core", "train", "runtime")
    source = "".join(p.read_text() for part in parts for p in (SOURCE / part).rglob("*.py"))
    source = re.sub(r'"\s*\n\s*f?"', "", source)  # texts that continue in the next line
    phrases = {cause.phrase for cause in CAUSES} - {f"ended by {name}" for name in SIGNALS}
    phrases -= {"on every worker)"}  # the kind of process is put in
    assert [phrase for phrase in phrases if phrase not in source] == []


@pytest.mark.parametrize("story", sorted(STORIES.glob("*.txt")), ids=lambda path: path.stem)
def test_the_incidents_of_all_stories_have_a_cause(story: Path) -> None:
    """Faults without a known first cause would make an incident of their own."""
    told = [(kind, " ".join(text.split())) for kind, text in LINE.findall(story.read_text())]
    lines = [(kind, text) for kind, text in told if kind in TELLING]
    if not lines:
        return
    events = [event(n, kind, text, *range(n)) for n, (kind, text) in enumerate(lines)]
    found = only(*events).diagnosis
    assert found.fault is not Party.UNKNOWN, (found, lines)


def test_a_wrong_state_is_the_headline_and_not_the_end_of_its_worker() -> None:
    found = only(
        event(1, "wrong", "what differs in step 30: model.weight"),
        event(
            2, "wrong", "the state of worker 1 is not that of the others in step 30", 1, worker=1
        ),
        event(3, "stop_view", "view 1 is stopped: worker 0 lost its connection to worker 1", 1, 2),
        event(4, "lost", "worker 1 was lost: ended by SIGKILL", 1, 2, worker=1, node="far"),
        event(5, "view", "view 2: workers 0", 3, 4),
        event(6, "resumed", "step 30 is committed", 5, cost={"pause_s": 0.5, "missing": 1}),
    )
    assert found.title == STATE
    assert tell_story(found)[-4:] == [
        "Cost: 0.50 s until the next step, 1 worker fewer.",
        f"Cause: {STATE}.",
        "At fault: the machine.",
        "What to do: run `holdfast doctor` there; if it happens again, take the machine out of the "
        "job.",
    ]


FAULTS = [
    ("lost", "worker 2 was lost: ended by SIGKILL", Party.KILLER),
    (
        "lost",
        "worker 2 was lost: the agent of node far ended, and the worker with it",
        Party.KILLER,
    ),
    ("lost", "worker 2 was lost: ended by SIGSEGV", Party.MACHINE_OR_SCRIPT),
    ("lost", "worker 2 was lost: node far was silent for 2.7 s", Party.MACHINE_OR_NETWORK),
    ("late", "worker 1 is late in step 33", Party.MACHINE),
    ("straggler", "worker 1 is a straggler: a task took it 3 times as long", Party.MACHINE),
    ("straggler", "for 64 steps by now, the link from worker 1 to worker 0", Party.NETWORK),
    ("rot", "the checkpoint of step 60 is not used: its digest is another", Party.STORAGE),
    ("record", "record 48 is quarantined: on worker 0 it differs", Party.STORAGE),
    ("failed", "worker 0 failed: ValueError: bad", Party.SCRIPT),
    ("failed", "worker 0 failed: record 48 of the dataset raises Damaged", Party.STORAGE),
    ("stop_view", "view 1 is stopped: worker 0 lost its connection to worker 2", Party.NETWORK),
]


@pytest.mark.parametrize(("kind", "text", "fault"), FAULTS)
def test_each_fault_is_an_incident_with_a_party_at_fault(
    kind: str, text: str, fault: Party
) -> None:
    found = only(event(1, kind, text, worker=2, node="far"))
    assert found.title == text
    assert found.diagnosis.fault is fault
    assert found.to_dict()["node"] == "far"
    price = next(line for line in tell_story(found) if line.startswith("Cost: "))
    expected = "its end was not recorded" if kind in STOPPING else "no worker had to stop"
    assert price == f"Cost: {'the job ended' if kind == 'failed' else expected}."


def test_the_losses_after_all_processes_had_ended_belong_to_the_resumption() -> None:
    found = only(
        event(1, "resume", "the job is resumed: all of its processes had ended"),
        event(2, "lost", "worker 0 was lost: the agent of node node0 ended", worker=0),
        event(3, "lost", "worker 1 was lost: the agent of node node0 ended", worker=1),
        event(4, "view", "view 2: workers 0, 1", 2, 3),
    )
    assert found.title == "the job is resumed: all of its processes had ended"


def test_a_resumption_that_lost_no_worker_is_no_incident() -> None:
    resumed = event(1, "resume", "the job is resumed: all of its processes had ended")
    assert list_incidents([resumed, event(2, "view", "view 2: workers 0, 1")]) == []

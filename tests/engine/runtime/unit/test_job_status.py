"""A job's status and its events have one form, which every reader gets back as it was made."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from holdfast.engine.core.errors import WireError
from holdfast.engine.core.job_record import JobRecord, Slot
from holdfast.engine.core.membership.coordinator_events import CoordinatorSnapshot
from holdfast.engine.core.membership.roster import NodeSnapshot
from holdfast.engine.core.worker_status import Stage, WorkerStatus
from holdfast.engine.runtime.job_events import EventSink, LoggedEvent, read_events
from holdfast.engine.runtime.job_status import (
    CoordinatorStatus,
    JobPhase,
    JobStatus,
    MemoryStatus,
    NodeStatus,
    ProcessPhase,
    ProcessStatus,
    encode_status,
    parse_status,
    processes_of,
)
from holdfast.engine.runtime.outlet import flush_outlets

STATUS = JobStatus(
    view=3,
    step=17,
    state=JobPhase.TRAINING,
    coordinator=CoordinatorStatus(pid=10, term=2),
    agents=(
        NodeStatus(id="a", incarnation=1, pid=11, domains=("rack=1",), members=1),
        NodeStatus(id="b\udcff", silent=True, draining="the operator asked"),
    ),
    workers=(
        ProcessStatus(
            id=0, pid=12, agent="a", state=ProcessPhase.CHANGING_VIEW, virtual_ranks=(0, 1), step=17
        ),
    ),
    leader=0,
    memory=MemoryStatus(redundancy="2 copies", step=16, bytes=1000),
)


def test_a_status_is_read_as_it_was_made() -> None:
    assert parse_status(encode_status(STATUS)) == STATUS
    found = STATUS.to_dict()
    assert found == json.loads(encode_status(STATUS))
    assert list(found) == (
        "view step state coordinator agents workers leader group memory "
        "servers servers_held servers_wanted awaited".split()
    )
    assert found["workers"] == [
        {
            "id": 0,
            "pid": 12,
            "agent": "a",
            "incarnation": 1,
            "state": "changing view",
            "virtual_ranks": [0, 1],
            "step": 17,
            "detail": "",
        }
    ]
    assert (found["state"], found["leader"], found["group"]) == ("training", 0, False)


def test_a_node_is_found_by_its_name() -> None:
    assert STATUS.node("a") is STATUS.agents[0]
    assert STATUS.node("c") is None


@pytest.mark.parametrize(
    "text",
    ["", "hello", "[]", "{}", encode_status(STATUS).replace("changing view", "dreaming")],
)
def test_an_answer_of_another_version_is_refused_in_one_sentence(text: str) -> None:
    with pytest.raises(WireError, match=r"^the coordinator's status cannot be read \(.*same ver"):
        parse_status(text)


def test_every_stage_that_ends_a_process_has_a_phase() -> None:
    shown = [stage.value for stage in Stage if stage is not Stage.READY]
    assert [ProcessPhase(text).hosts for text in shown] == [False] * len(shown)


def test_an_event_is_one_line_with_the_fields_that_it_has(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = EventSink(tmp_path / "events.jsonl")
    assert read_events(tmp_path / "events.jsonl") == []
    sink.write(LoggedEvent(time=1.5, kind="lost", text="worker 2 is lost", worker=2, step=0))
    sink.write(LoggedEvent(time=2.0, kind="failed", text="b\udcff\nfailed"))
    flush_outlets()
    assert read_events(tmp_path / "events.jsonl") == [
        {"time": 1.5, "kind": "lost", "text": "worker 2 is lost", "worker": 2, "step": 0},
        {"time": 2.0, "kind": "failed", "text": "b\udcff\nfailed"},
    ]
    assert capsys.readouterr().err == "holdfast: worker 2 is lost\n"


def test_a_log_that_cannot_be_written_stops_nobody(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    sink = EventSink(tmp_path / "missing" / "events.jsonl")
    sink.write(LoggedEvent(time=1.0, kind="view", text="view 2 begins"))
    flush_outlets()
    shown = capsys.readouterr().err
    assert "holdfast: view 2 begins\n" in shown
    assert "lacks lines from here on: No such file or directory" in shown


def test_a_worker_on_a_silent_node_is_lost_and_no_spare() -> None:
    found = processes_of(
        CoordinatorSnapshot(
            record=JobRecord(
                term=1,
                slots=tuple(
                    Slot(worker=i, agent=name, incarnation=1) for i, name in enumerate("abc")
                ),
            ),
            step=0,
            stop_view=0,
            pending_view=0,
            agents=tuple(
                NodeSnapshot(
                    agent=name, incarnation=1, pid=1, silent=silent, draining="", domains=()
                )
                for name, silent in (("a", False), ("b", True))
            ),
            workers=tuple(
                WorkerStatus(worker=i, incarnation=1, stage=Stage.READY) for i in range(3)
            ),
            finished=False,
        )
    )
    phases = [process.state for process in found]
    assert phases == [ProcessPhase.SPARE, ProcessPhase.LOST, ProcessPhase.LOST]

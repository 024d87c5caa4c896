"""Callbacks at the end of a step: by one worker, once for each step, whichever worker dies."""

from __future__ import annotations

import collections
import re
from pathlib import Path
from typing import Any

import pytest

from conftest import finish
from example_kit import EXAMPLES
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.types import WorkerId
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.job import Job
from holdfast.engine.train.script.job_step import Step
from loop_kit import dataset, protected, step_once
from support import SPEC
from thread_cluster import Killed, ThreadCluster, ThreadWorker

STEPS = 8
Call = tuple[int, float, Any]  # step, its loss, the script's own value


def calls_of(
    workers: int, kill_at: dict[int, int] | None = None, dies_in: tuple[int, ...] = ()
) -> tuple[list[Call], ThreadCluster]:
    """Run a job; returns all calls that were made. `dies_in`: steps whose caller dies in the call.

    The first loop is left by `break`, and within the second all exchange values.
    """
    calls: list[Call] = []

    def run(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)

        def called(step: Step) -> None:
            if not me.alive:
                raise Killed  # as a process would be dead by now
            calls.append((step.index, step.loss, step.metrics["added"]))
            if step.index in dies_in and me.incarnation == 1:
                raise Killed

        job.on_step_end(called)
        for step in job.steps(job.batches(dataset(), 3), until=5):
            step_once(step, model, optimizer)
            step.metrics["added"] = step.index * 2
            if step.index == 3:
                break
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            step_once(step, model, optimizer)
            step.metrics["added"] = job.agree(step.index * 2)
        job._loops.end_open_loop()

    settings = {"workers.nproc": workers, "workers.virtual": 4}
    at = {WorkerId(worker): number for worker, number in (kill_at or {}).items()}
    cluster = ThreadCluster(with_settings(SPEC, settings), run, at, waits=True)
    assert cluster.run() == ""
    assert not cluster.errors
    return calls, cluster


def test_one_worker_is_called_once_for_each_step() -> None:
    expected, _ = calls_of(1)
    assert [call[0] for call in expected] == list(range(STEPS))
    assert [call[2] for call in expected] == [2 * step for step in range(STEPS)]
    for workers in (2, 4):
        assert calls_of(workers)[0] == expected


@pytest.mark.parametrize(
    "worker", [pytest.param(0, marks=pytest.mark.slow), pytest.param(1, marks=pytest.mark.slow)]
)
def test_no_step_is_called_twice_and_none_left_out_but_one_in_which_the_leader_dies(
    worker: int,
) -> None:
    expected, _ = calls_of(1)
    left_out = 0
    for death in range(4, 40, 4):
        calls, cluster = calls_of(3, {worker: death})
        assert cluster.workers[WorkerId(worker)].incarnation > 1 or death > 30
        assert set(calls) <= set(expected)
        assert max(collections.Counter(calls).values()) == 1, cluster.events
        assert len(calls) >= STEPS - (worker == 0)
        left_out += STEPS - len(calls)
    assert left_out < 9, "it is rare that the leader dies between a step's sum and its call"


def test_a_call_is_not_made_again_if_the_leader_dies_within_it() -> None:
    expected, _ = calls_of(1)
    calls, _ = calls_of(3, dies_in=(2, 5))
    assert max(collections.Counter(calls).values()) == 1
    # Workers that are a step ahead of the leader cannot know whether it made the call of that step.
    left_out = [call[0] for call in expected if call not in calls]
    assert set(left_out) <= {3, 6}
    assert [call for call in expected if call[0] not in left_out] == calls


# ---------------------------------------------------------------- the example


def scalars(logs: Path) -> dict[str, list[tuple[int, float]]]:
    """Return the values written for each tag, by all writers, in order of steps."""
    loader = pytest.importorskip("tensorboard.backend.event_processing.event_file_loader")
    found: dict[str, list[tuple[int, float]]] = collections.defaultdict(list)
    for path in sorted(logs.glob("events.*")):
        for event in loader.EventFileLoader(str(path)).Load():
            for value in event.summary.value:
                found[value.tag].append((event.step, value.tensor.float_val[0]))
    return {tag: sorted(values) for tag, values in found.items()}


@pytest.mark.slow
def test_tensorboard_gets_each_step_once_though_leaders_die(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    faults = tmp_path / "faults.txt"
    faults.write_text("worker 0 step 4 kill\nworker 1 step 9 kill\n")
    last, written = [], []
    for name, options in (
        ("alone", ["--nproc", "1"]),
        ("deaths", ["--nproc", "3", "--faults", str(faults)]),
    ):
        logs = tmp_path / f"logs-{name}"
        script = [str(EXAMPLES / "logged.py"), "--steps", "14", "--logs", str(logs)]
        with LocalRun(tmp_path / name, [*options, "--virtual", "4"], script) as run:
            last.append(finish(run))
        written.append(scalars(logs))
    assert re.fullmatch("[0-9a-f]{64}", last[0])
    assert last[0] == last[1]
    assert len(run.events("lost")) == 2
    assert written[0] == written[1]
    assert [step for step, _ in written[1]["loss"]] == list(range(14))
    assert len(list(logs.glob("events.*"))) > 1, "the leader did not change"

"""Epochs with spares, workers that are fed, lost leaders, shared optimizers and resumed jobs."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.engine.train.data.sampling import plan_of
from holdfast.engine.train.job import Job
from loop_kit import Script, dataset, digest, protected, results, step_once
from places import TESTS
from support import until
from thread_cluster import Killed, ThreadWorker

SCRIPT = str(TESTS / "scripts" / "epochs.py")
RUN_S = 120.0
EPOCHS = 12
LENGTH = 6  # steps of an epoch


def score(job: Job, model: Any) -> float:
    found: float = job.evaluate(lambda batch: model(batch[0]).square().mean(), dataset(20), 4)
    return found


def dies(job: Job, me: ThreadWorker, epoch: int) -> None:
    """Lose the leader in the lines between two epochs, once."""
    if epoch == 3 and me.incarnation == 1 and job.is_leader and not job.values.get("dead"):
        raise Killed


def loops(job: Job, me: ThreadWorker, loses_leader: bool = False) -> Any:
    model, optimizer = protected(job)
    data = job.batches(dataset(70), 3)
    for epoch in range(EPOCHS):
        for step in job.steps(data, until=(epoch + 1) * LENGTH):
            step_once(step, model, optimizer)
        if loses_leader:
            dies(job, me, epoch)
        job.values["score"] = score(job, model)
    return digest(model), job.values["score"]


def epochs(job: Job, me: ThreadWorker, loses_leader: bool = False) -> Any:
    model, optimizer = protected(job)
    data = job.batches(dataset(70), 3)
    assert data.steps_per_epoch == LENGTH
    for epoch in job.epochs(data, until=EPOCHS):
        assert job.agree(epoch.index) == epoch.index
        for step in epoch:
            step_once(step, model, optimizer)
        if loses_leader:
            dies(job, me, epoch.index)
        job.values["score"] = score(job, model)
    return digest(model), job.values["score"]


KINDS: dict[str, dict[str, Any]] = {
    "hot": {"workers.spares": 1, "workers.hot_spares": True},
    "warm": {"workers.spares": 1},
    "fed": {"nodes.join_pause": 0, "silent_errors.fingerprint_steps": 4},
}


@pytest.mark.slow
@pytest.mark.parametrize("script", [loops, epochs])
@pytest.mark.parametrize("kind", KINDS)
def test_another_worker_takes_over_in_a_later_epoch(kind: str, script: Script) -> None:
    (expected,) = results(script, 1)
    found = results(script, 2, {0: 40, 1: 90}, KINDS[kind])  # one of these may be the spare
    assert set(found) == {expected}


@pytest.mark.slow
@pytest.mark.parametrize("form", [loops, epochs])
def test_the_leader_is_lost_between_two_epochs(form: Any) -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        return form(job, me, loses_leader=True)

    (expected,) = results(form, 1)
    for workers in (2, 3):
        assert set(results(script, workers, {0: 10_000})) == {expected}


# ---------------------------------------------------------------- real processes


def last_lines(run: LocalRun) -> list[str]:
    report = verify(run.run_dir.path, plan_of)
    assert report.ok, report.findings
    return [line for line in run.out if not line.startswith("STEP")]


def until_step(run: LocalRun, step: int) -> None:
    run.until(lambda: any(line.endswith(f" {step}") for line in run.out), RUN_S, f"step {step}")


@pytest.mark.slow
@pytest.mark.parametrize("form", ["loops", "epochs"])
def test_workers_that_share_out_the_optimizer_come_back(form: str, tmp_path: Path) -> None:
    options = ["--nproc", "2", "--virtual", "4", "--shard-optimizer"]
    found = []
    for kills in ((), (60,)):
        where = tmp_path / str(len(kills))
        store = ["--store", str(where / "store"), "--save-every", "20"]
        with LocalRun(where, [*options, *store], [SCRIPT, form]) as run:
            for step in kills:
                members = run.until_members(2)
                until_step(run, step)
                strike(members[1])
            assert run.wait(RUN_S) == 0, run.log()
        found += last_lines(run)
    assert len(set(found)) == 1, found


@pytest.mark.slow
@pytest.mark.parametrize("form", ["loops", "epochs"])
def test_a_job_is_resumed_in_a_later_epoch(form: str, tmp_path: Path) -> None:
    options = ["--nproc", "2", "--virtual", "4"]
    with LocalRun(tmp_path / "quiet", options, [SCRIPT, form]) as quiet:
        assert quiet.wait(RUN_S) == 0, quiet.log()
    store = ["--store", str(tmp_path / "store"), "--save-every", "20"]
    with LocalRun(tmp_path / "run", [*options, *store], [SCRIPT, form]) as run:
        until_step(run, 110)
        strike(run.pid)
        until(lambda: not run.leftovers(), "the end of all processes")
    path = run.run_dir.path
    with LocalRun(path, [], [], command=("resume", str(path))) as again:
        assert again.wait(RUN_S) == 0, again.log()
    assert set(last_lines(again)) == set(last_lines(quiet))

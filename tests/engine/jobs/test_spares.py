"""Tests workers that are held back, and replace lost workers."""

from __future__ import annotations

import contextlib
import math
import signal
from pathlib import Path
from typing import Any

import pytest

from conftest import RUN_S
from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.job_problems import find_problem
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.membership.changes import AddSlot, OrderNext, WantSpares
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.live_roster import LiveRoster
from holdfast.engine.core.membership.reserve import Reserve, ReservePolicy, spares_needed
from holdfast.engine.core.membership.roster import SlotState
from holdfast.engine.core.types import AgentId, Incarnation, WorkerId
from holdfast.engine.core.worker_status import Stage, WorkerStatus
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.engine.train.job import Job
from loop_kit import dataset, digest, protected, step_once
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

STEPS = 150


def plain(job: Job, me: ThreadWorker) -> str:
    model, optimizer = protected(job)
    for step in job.steps(job.batches(dataset(), batch_size=3), until=STEPS):
        step_once(step, model, optimizer)
    return digest(model)


def run(
    workers: int, kill_at: dict[int, int] | None = None, **settings: Any
) -> tuple[list[str], ThreadCluster]:
    """Run a job; returns what its scripts return, and the cluster."""
    found: dict[WorkerId, str] = {}

    def runs(job: Job, me: ThreadWorker) -> None:
        found[me.worker] = plain(job, me)

    given = {"workers.nproc": workers, "workers.virtual": 4}
    spec = with_settings(SPEC, given | {k.replace("__", "."): v for k, v in settings.items()})
    assert not find_problem(spec)
    at = {WorkerId(worker): number for worker, number in (kill_at or {}).items()}
    cluster = ThreadCluster(spec, runs, at)
    outcome = cluster.run()
    assert not cluster.errors, cluster.errors
    assert outcome == ""
    return list(found.values()), cluster


HOT = {"workers__spares": 1, "workers__hot_spares": True}
WARM = {"workers__spares": 1}


@pytest.fixture(scope="module")
def undisturbed() -> str:
    (found,), _ = run(1)
    return found


@pytest.mark.slow
def test_a_hot_spare_takes_over_from_the_only_worker(undisturbed: str) -> None:
    found, cluster = run(1, {0: 25}, **HOT)
    assert set(found) == {undisturbed}
    assert not any("every worker was lost" in text for text in cluster.views)
    assert any("is redone for the lost" in text for text in cluster.views)


@pytest.mark.slow
@pytest.mark.parametrize("killed", [0, 1])
def test_a_hot_spare_takes_over_from_one_of_two(killed: int, undisturbed: str) -> None:
    found, _ = run(2, {killed: 30}, **HOT)
    assert set(found) == {undisturbed}


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_a_warm_spare_waits_until_it_is_needed(workers: int, undisturbed: str) -> None:
    found, cluster = run(workers, **WARM)
    assert set(found) == {undisturbed}
    assert not any(text.endswith((" joins", " join")) for text in cluster.views), cluster.views


@pytest.mark.slow
def test_a_warm_spare_joins_when_another_is_lost(undisturbed: str) -> None:
    found, cluster = run(2, {0: 20, 1: 200}, **WARM)  # one of these may be the spare
    assert set(found) == {undisturbed}
    assert any(text.endswith((" joins", " join")) for text in cluster.views)


# ---------------------------------------------------------------- how many


def test_the_number_of_spares_follows_from_losses() -> None:
    assert spares_needed(0.0) == 0
    assert spares_needed(0.005) == 0
    assert spares_needed(0.1) == 1
    for mean in (0.5, 3.0, 40.0):
        count = spares_needed(mean)
        terms = [math.exp(-mean) * mean**k / math.factorial(k) for k in range(count + 1)]
        assert sum(terms) >= 0.99 > sum(terms[:-1])
    assert spares_needed(1e6) > 1e6


NODE = AgentId("n")


def roster_of(statuses: tuple[WorkerStatus, ...], roster: LiveRoster | None = None) -> LiveRoster:
    roster = roster or LiveRoster(None, 0.0)
    node = roster.nodes.get(NODE)
    seq = 1 if node is None else node.report.seq + 1
    report = AgentReport(
        agent=NODE, incarnation=Incarnation(1), seq=seq, slots=16, spares=8, workers=statuses
    )
    roster.hear(report, 0.0)
    return roster


def ready(worker: int, incarnation: int = 1) -> WorkerStatus:
    number = WorkerId(worker)
    return WorkerStatus(worker=number, incarnation=Incarnation(incarnation), stage=Stage.READY)


def reviewed(reserve: Reserve, roster: LiveRoster, now: float) -> tuple[Reserve, list[str]]:
    """Review the nodes, and want that number of spares; return the lines."""
    reserve, plan = reserve.review(roster, None, now)
    for change in plan:
        if isinstance(change, WantSpares):
            roster.apply(change)
    return reserve, [change.text for change in plan if isinstance(change, Announce)]


def test_more_spares_are_kept_the_more_workers_are_lost() -> None:
    """A fast job of eight workers, where one is away for 100 s in each 250 s."""
    roster = roster_of(tuple(ready(w) for w in range(8)))
    reserve = Reserve(policy=ReservePolicy(virtual_ranks=8, spares=None), looked_at=0.0)
    for _ in range(8):
        roster.apply(AddSlot(SlotState(NODE, Incarnation(1))))
    reserve, (line,) = reviewed(reserve, roster, 0.0)
    assert line.startswith(
        "0 spares are kept on all nodes together: 0 losses in 0 hours of workers"
    )
    lines, incarnation = [], 1
    for loss in range(400):
        worker, at = WorkerId(loss % 8), 250.0 * loss
        incarnation += worker == 0
        roster.apply(OrderNext(worker))
        reserve = reserve.count_loss(worker, roster, at)
        roster_of((ready(worker, roster.slots[worker].incarnation),), roster)
        reserve, news = reviewed(reserve, roster, at + 100.0)
        lines += news
    assert roster.nodes[NODE].spares_wanted == spares_needed(0.4)
    assert lines[-1].startswith("2 spares are kept on all nodes together: ")
    assert "and 100 s to replace one: more are away for less than 1% of the time" in lines[-1]
    assert roster.nodes[NODE].processes_for == 10


def test_settings_that_contradict_each_other() -> None:
    hot = with_settings(SPEC, {"workers.hot_spares": True})
    assert "needs spares" in str(find_problem(hot))
    both = with_settings(
        SPEC,
        {
            "workers.nproc": 2,
            "workers.virtual": 4,
            "workers.hot_spares": True,
            "workers.spares": 1,
            "stragglers.backup": 1,
        },
    )
    assert "exclude each other" in str(find_problem(both))


# ---------------------------------------------------------------- real processes

SCRIPT = """
import sys, torch, holdfast
job = holdfast.join()
model = torch.nn.Linear(8, 8)
optimizer = torch.optim.AdamW(model.parameters())
job.protect(model=model, optimizer=optimizer)
data = job.batches(torch.utils.data.TensorDataset(torch.randn(64, 8)), batch_size=4)
told = open(sys.argv[1], "a", buffering=1)
for step in job.steps(data, until=100_000):
    for (x,) in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    print(step.index, job.worker, file=told)
"""


@pytest.mark.slow
def test_the_only_worker_is_killed_and_no_step_is_lost(tmp_path: Path) -> None:
    (tmp_path / "train.py").write_text(SCRIPT)
    told = tmp_path / "told"
    flags = ["--nproc", "1", "--spares", "1", "--hot-spares"]
    with LocalRun(tmp_path / "run", flags, [str(tmp_path / "train.py"), str(told)]) as job:
        spare = job.until(lambda: _workers(job, "hot spare"), RUN_S, "a hot spare")[0]
        working = next(w for w in job.status()["workers"] if w["id"] != spare["id"])
        assert (working["virtual_ranks"], spare["virtual_ranks"]) == ([0], [])
        assert strike(working["pid"], 9)
        job.until(lambda: any(e["worker"] == working["id"] for e in job.events("lost")), RUN_S, "")
        again = {"id": working["id"], "state": "hot spare"}.items()
        job.until(lambda: any(again <= w.items() for w in _workers(job, "hot spare")), RUN_S, "it")
        job.signal(signal.SIGTERM)
        job.wait(RUN_S)
        views = [event["text"] for event in job.events("view")]
    assert not any("every worker was lost" in text for text in views)
    steps: dict[int, set[int]] = {}
    for line in told.read_text().splitlines():
        step, worker = map(int, line.split())
        steps.setdefault(worker, set()).add(step)
    first = min(steps[spare["id"]])
    assert first <= max(steps[working["id"]]) + 1, "the spare has taken every step"


def _workers(job: LocalRun, state: str) -> list[dict[str, Any]]:
    with contextlib.suppress(HoldfastError):
        return [w for w in job.status()["workers"] if w["state"] == state]
    return []

"""Tests workers that are fed while the others train, and join by one change of the view."""

from __future__ import annotations

from typing import Any

import pytest

from holdfast.core.job_spec import with_settings
from holdfast.core.types import WorkerId
from holdfast.train.job import Job
from loop_kit import dataset, digest, protected, step_once
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

FED = {"nodes.join_pause": 0, "silent_errors.fingerprint_steps": 4}
STEPS = 150


def plain(job: Job, me: ThreadWorker) -> str:
    model, optimizer = protected(job)
    for step in job.steps(job.batches(dataset(), batch_size=3), until=STEPS):
        step_once(step, model, optimizer)
    return digest(model)


def run(
    script: Any, workers: int, kill_at: dict[int, int] | None = None, **settings: Any
) -> tuple[list[str], ThreadCluster]:
    found: dict[WorkerId, str] = {}

    def runs(job: Job, me: ThreadWorker) -> None:
        returned = script(job, me)
        job._end_open_loop()
        found[me.worker] = returned

    given = {"workers.nproc": workers, "workers.virtual": 4, **FED, **settings}
    spec = with_settings(SPEC, given)
    at = {WorkerId(worker): number for worker, number in (kill_at or {}).items()}
    cluster = ThreadCluster(spec, runs, at)
    outcome = cluster.run()
    assert not cluster.errors, cluster.errors
    assert outcome == ""
    return list(found.values()), cluster


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_who_joins_is_fed_and_the_result_is_the_same(workers: int) -> None:
    (expected,) = run(plain, 1)[0]
    found, cluster = run(plain, workers, {1: 30})
    for kind, text in cluster.events:
        print(kind, text)
    assert set(found) == {expected}
    assert len(found) == workers
    assert any("receives the state while" in text for text in cluster.told("join"))

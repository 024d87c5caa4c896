"""Tests that machines which compute wrongly end no job, as long as other machines can prove it."""

from __future__ import annotations

import random

import pytest
from torch import nn

from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.types import WorkerId
from holdfast.engine.train.job import Job
from loop_kit import dataset, digest, protected, results
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

STEPS = 12
SETTINGS = {
    "workers.virtual": 5,
    "silent_errors.fingerprint_steps": 4,
    "silent_errors.repeat_steps": 4,
}


class Faults:
    """Makes a factor for the results of a machine that computes wrongly in one of these ways."""

    def __init__(self, kind: str, worker: int) -> None:
        self._kind = kind
        self._worker = worker
        self._random = random.Random(worker)
        self._calls = 0

    def factor(self) -> float:
        self._calls += 1
        match self._kind:
            case "each time otherwise":
                return 1.0 + self._random.random()
            case "now and then" if self._random.random() < 0.3:
                return 1.0 + self._random.random()
            case "once" if self._calls == 2:
                return 1.5
            case "always in the same way":
                return 1.5 + self._worker
        return 1.0


def trains(job: Job, faults: Faults | None) -> str:
    model, optimizer = protected(job)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        for x, y in step:
            loss = nn.functional.mse_loss(model(x), y)
            step.backward(loss if faults is None else loss * faults.factor())
        optimizer.step()
    return digest(model)


def run(kind: str, workers: int, faulty: int) -> tuple[set[str], ThreadCluster]:
    """Run a job in which some machines are faulty from the start; returns its digests."""
    found: dict[WorkerId, str] = {}

    def script(job: Job, me: ThreadWorker) -> None:
        is_ill = me.worker >= workers - faulty and me.incarnation == 1
        ended = trains(job, Faults(kind, me.worker) if is_ill else None)
        job._loops.end_open_loop()
        job._loops.wait_for_others()
        found[me.worker] = ended

    cluster = ThreadCluster(with_settings(SPEC, SETTINGS | {"workers.nproc": workers}), script)
    outcome = cluster.run()
    assert outcome == "", (outcome, cluster.errors, cluster.told("wrong"))
    return set(found.values()), cluster


@pytest.mark.parametrize(
    ("kind", "workers", "faulty"),
    [
        pytest.param("once", 2, 1, marks=pytest.mark.slow),
        pytest.param("now and then", 2, 1, marks=pytest.mark.slow),
        ("each time otherwise", 2, 1),
        pytest.param("now and then", 5, 2, marks=pytest.mark.slow),
        pytest.param("each time otherwise", 5, 2, marks=pytest.mark.slow),
        pytest.param("always in the same way", 3, 1, marks=pytest.mark.slow),
        pytest.param("always in the same way", 5, 2, marks=pytest.mark.slow),
    ],
)
def test_fewer_than_half_of_the_machines_may_compute_wrongly(
    kind: str, workers: int, faulty: int
) -> None:
    sound = results(lambda job, me: trains(job, None), 1, settings=SETTINGS)
    found, cluster = run(kind, workers, faulty)
    assert found == set(sound)
    assert kind == "once" or any("wrongly" in text for text in cluster.told("wrong"))

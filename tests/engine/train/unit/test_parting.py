"""Workers whose scripts part ways are stopped by one sentence with both places in the script."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.train.job import Job
from loop_kit import dataset, net
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

Habit = Callable[[Job, int], Any]


def evaluates(job: Job, size: int) -> Any:
    return job.evaluate(lambda batch: batch[0].mean(), dataset(), batch_size=size)


def outcome(habit: Habit, workers: int = 2, *, shards: bool = False) -> str:
    """Train, with a habit that is called between steps with the worker's number of the view.

    `shards`: the workers share out the optimizer's state.
    """

    def script(job: Job, me: ThreadWorker) -> None:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.protect(model=model, optimizer=optimizer)
        for step in job.steps(job.batches(dataset(), 3), until=8):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            if step.index == 3 and habit(job, me.worker) == "break":
                break
        job._loops.end_open_loop()
        job._loops.wait_for_others()

    settings = {"workers.nproc": workers, "workers.virtual": 4, "workers.shard_optimizer": shards}
    spec = with_settings(SPEC, settings)
    return ThreadCluster(spec, script).run()


@pytest.mark.parametrize(
    ("habit", "words"),
    [
        (lambda job, me: me == 0 and evaluates(job, 4), "worker 0 calls job.evaluate (70 samples"),
        (lambda job, me: me == 1 and job.agree(3), "where worker 1 calls job.agree (test_parting"),
        (
            lambda job, me: evaluates(job, 4) if me else job.agree(3),
            "worker 0 calls job.agree (test_parting.py, line",
        ),
        (lambda job, me: evaluates(job, 4 + me), "samples in batches of 5"),
    ],
    ids=["one evaluates", "one agrees", "evaluate against agree", "other batches"],
)
def test_calls_that_differ_are_named(habit: Habit, words: str) -> None:
    told = outcome(habit)
    assert words in told
    assert "must come in the same order on all workers" in told
    assert told.count("test_parting.py, line") >= 2


def test_the_others_are_told_too_where_most_agree() -> None:
    assert "calls job.agree" in outcome(lambda job, me: me == 2 and job.agree(3), workers=3)


@pytest.mark.slow_with("0-shares", "1-copies", "1-shares")
@pytest.mark.parametrize("shards", [False, True], ids=["copies", "shares"])
@pytest.mark.parametrize("leaves", [0, 1])
def test_a_loop_that_one_worker_leaves_is_named(leaves: int, shards: bool) -> None:
    told = outcome(lambda job, me: "break" if me == leaves else "", shards=shards)
    assert f"worker {leaves} has left its loop after step 4 (test_parting.py, line" in told
    assert f"worker {1 - leaves} begins another step (test_parting.py, line" in told

"""The step's driver within one process: whole jobs over the transport in memory, and deaths."""

from __future__ import annotations

import hashlib
from collections.abc import Callable

import pytest
import torch
from torch import nn

from holdfast.core.job_spec import JobSpec, with_settings
from holdfast.core.types import WorkerId
from holdfast.train.checkpoint import state
from holdfast.train.job import Job
from support import SPEC
from thread_cluster import Killed, ThreadCluster, ThreadWorker

STEPS = 6
EXCHANGES = 60  # more than a worker begins in a run


def spec(workers: int) -> JobSpec:
    settings = {"workers.nproc": workers, "workers.virtual": 4}
    return with_settings(SPEC, settings)


def build(width: int) -> nn.Module:
    """A model that does not depend on torch's own generator, which belongs to all threads."""
    model = nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2)
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def train(job: Job, dies: Callable[[int], None], width: int) -> str:
    """Train a small model; returns the digest of all that is protected."""
    model = build(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    inputs = torch.randn(70, 6, generator=torch.Generator().manual_seed(5))
    dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :2].sin())
    for step in job.steps(job.batches(dataset, batch_size=3), until=STEPS):
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        dies(step.index)
        optimizer.step()
        optimizer.zero_grad()
    skeleton, tensors = state.capture({"model": model, "optimizer": optimizer})
    found = hashlib.sha256(skeleton)
    for tensor in tensors:
        found.update(state.as_bytes(tensor).numpy().tobytes())
    return found.hexdigest()


class Run:
    """One job, and the digest of each worker that ended."""

    def __init__(
        self,
        workers: int,
        kill_at: dict[int, int] | None = None,
        dies: tuple[int, int] = (-1, -1),
        wide: int = -1,
    ) -> None:
        self.digests: dict[WorkerId, str] = {}
        at = {WorkerId(worker): number for worker, number in (kill_at or {}).items()}
        self._dies = dies  # worker and step: between the commit and the optimizer's step
        self._wide = wide  # the worker with another model
        self.cluster = ThreadCluster(spec(workers), self._script, at)
        self.outcome = self.cluster.run()

    def _script(self, job: Job, me: ThreadWorker) -> None:
        def dies(step: int) -> None:
            if me.incarnation == 1 and (me.worker, step) == self._dies:
                raise Killed

        self.digests[me.worker] = train(job, dies, 41 if me.worker == self._wide else 40)

    @property
    def counts(self) -> list[int]:
        return [worker.exchanges for worker in self.cluster.workers.values()]


@pytest.fixture(scope="module")
def expected() -> str:
    return Run(1).digests[WorkerId(0)]


@pytest.mark.parametrize("workers", [2, 3, 4])
def test_the_result_does_not_depend_on_the_number_of_workers(workers: int, expected: str) -> None:
    run = Run(workers)
    assert (run.outcome, run.cluster.errors) == ("", [])
    assert set(run.digests.values()) == {expected}
    assert len(run.digests) == workers
    assert max(run.counts) < EXCHANGES


@pytest.mark.parametrize("number", range(1, EXCHANGES, 3))
def test_a_death_at_any_exchange_changes_nothing(number: int, expected: str) -> None:
    run = Run(3, {number % 3: number})
    assert (run.outcome, run.cluster.errors) == ("", [])
    assert set(run.digests.values()) == {expected}


@pytest.mark.parametrize("step", [0, STEPS - 1])
def test_a_death_after_a_commit_changes_nothing(step: int, expected: str) -> None:
    run = Run(2, dies=(1, step))
    assert (run.outcome, run.cluster.errors) == ("", [])
    assert set(run.digests.values()) == {expected}


def test_two_deaths_in_one_exchange_change_nothing(expected: str) -> None:
    run = Run(4, {1: 17, 2: 17})
    assert (run.outcome, run.cluster.errors) == ("", [])
    assert set(run.digests.values()) == {expected}


@pytest.mark.parametrize("attempt", range(5))
def test_a_worker_with_another_model_says_so_before_it_is_missed(attempt: int) -> None:
    run = Run(2, wide=1)
    assert "StateMismatch" in run.outcome
    assert len(run.cluster.views) == 1

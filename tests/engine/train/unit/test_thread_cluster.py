"""The step's driver within one process: whole jobs over the transport in memory, and deaths."""

from __future__ import annotations

import hashlib
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.core.job_spec import JobSpec, with_settings
from holdfast.engine.core.types import WorkerId
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.exchange.seam import Waits
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.job import Job
from support import SPEC, until
from thread_cluster import Killed, ThreadCluster, ThreadWorker

STEPS = 6
EXCHANGES = 80  # more than a worker begins in a run


def spec(workers: int, settings: dict[str, Any]) -> JobSpec:
    return with_settings(SPEC, {"workers.nproc": workers, "workers.virtual": 4, **settings})


def build(width: int) -> nn.Module:
    """Return a model that does not depend on torch's own generator, which all threads share."""
    model = nn.Sequential(
        nn.Linear(6, width), nn.BatchNorm1d(width), nn.Tanh(), nn.Linear(width, 2)
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def samples() -> tuple[torch.Tensor, torch.Tensor]:
    inputs = torch.randn(70, 6, generator=torch.Generator().manual_seed(5))
    return inputs, inputs[:, :2].sin()


def train(
    job: Job,
    dies: Callable[[int], None],
    width: int,
    computes: Callable[[int], None] = lambda step: None,
    losses: list[float] | None = None,
) -> str:
    """Train a small model; return the digest of everything protected."""
    model = build(width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    dataset = torch.utils.data.TensorDataset(*samples())
    for step in job.steps(job.batches(dataset, batch_size=3), until=STEPS):
        for x, y in step:
            computes(step.index)
            step.backward(nn.functional.mse_loss(model(x), y))
        dies(step.index)
        if losses is not None:
            losses.append(step.loss)
        optimizer.step()
        optimizer.zero_grad()
    skeleton, tensors = state.capture({"model": model, "optimizer": optimizer})
    found = hashlib.sha256(skeleton)
    for tensor in tensors:
        found.update(as_bytes(tensor).numpy().tobytes())
    return found.hexdigest()


class Run:
    """Is one job, with the digest of each worker that ended."""

    def __init__(
        self,
        workers: int,
        kill_at: dict[int, int] | None = None,
        dies: tuple[int, int] = (-1, -1),
        wide: int = -1,
        late: int = -1,
        damage_at: tuple[int, int] = (-1, -1),
        settings: dict[str, Any] | None = None,
    ) -> None:
        self.digests: dict[WorkerId, str] = {}
        self.losses: dict[WorkerId, list[float]] = {}  # losses of each step
        at = {WorkerId(worker): number for worker, number in (kill_at or {}).items()}
        self._dies = dies  # worker and step: between the commit and the optimizer's step
        self._wide = wide  # the worker with another model
        self._late = late  # the worker that computes each step once other workers have committed it
        self.committed = [threading.Event() for _ in range(STEPS)]
        self.cluster = ThreadCluster(spec(workers, settings or {}), self._script, at, damage_at)
        self.outcome = self.cluster.run()

    def _script(self, job: Job, me: ThreadWorker) -> None:
        def dies(step: int) -> None:
            self.committed[step].set()
            if me.incarnation == 1 and (me.worker, step) == self._dies:
                raise Killed

        def computes(step: int) -> None:
            if me.worker == self._late:
                until(lambda: self.committed[step].is_set() or self._lost_one, "a commit")

        losses = self.losses[me.worker] = []
        width = 41 if me.worker == self._wide else 40
        self.digests[me.worker] = train(job, dies, width, computes, losses)

    @property
    def _lost_one(self) -> bool:
        """Return whether a worker has died: then a late one may be needed."""
        return not all(w.alive and w.incarnation == 1 for w in self.cluster.workers.values())

    @property
    def counts(self) -> list[int]:
        return [worker.exchanges for worker in self.cluster.workers.values()]


@pytest.fixture(scope="module")
def expected() -> str:
    return Run(1).digests[WorkerId(0)]


@pytest.mark.parametrize(
    "workers", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_the_result_does_not_depend_on_the_number_of_workers(workers: int, expected: str) -> None:
    run = Run(workers)
    assert (run.outcome, run.cluster.errors) == ("", [])
    assert set(run.digests.values()) == {expected}
    assert len(run.digests) == workers
    assert max(run.counts) < EXCHANGES


def test_the_loss_of_a_step_is_the_mean_over_all_its_samples() -> None:
    run = Run(2)
    first, second = run.losses.values()
    assert first == second
    plan = SamplePlan(length=70, batch_size=3, virtual_ranks=4, seed=0)
    model = build(40)
    inputs, targets = samples()
    parts = [
        nn.functional.mse_loss(model(inputs[task]), targets[task]).item()
        for task in plan.step_tasks(0)
    ]
    assert first[0] == pytest.approx(sum(parts) / 4)


@pytest.mark.slow_with("1", "10", "19", "22", "28")
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


def test_connections_of_older_views_are_closed(expected: str) -> None:
    run = Run(3, {1: 20})
    assert set(run.digests.values()) == {expected}
    groups = [worker.transports for worker in run.cluster.workers.values()]
    assert max(map(len, groups)) > 1
    assert all(transport.closed for each in groups for transport in each[:-1])


def test_waits_are_counted_from_one_vote_to_the_next(
    monkeypatch: pytest.MonkeyPatch, expected: str
) -> None:
    begun: list[Waits] = []
    plain = Waits.begin
    monkeypatch.setattr(Waits, "begin", lambda self: (begun.append(self), plain(self)))
    run = Run(2, settings={"silent_errors.audit": 1.0})
    assert set(run.digests.values()) == {expected}
    # The first exchanges begin with a view, and a busy machine may need another view.
    most = 2 * (STEPS + len(run.cluster.views))
    assert 2 * (STEPS + 1) <= len(begun) <= most, run.cluster.views


@pytest.mark.slow
def test_two_deaths_in_one_exchange_change_nothing(expected: str) -> None:
    run = Run(4, {1: 17, 2: 17})
    assert (run.outcome, run.cluster.errors) == ("", [])
    assert set(run.digests.values()) == {expected}


@pytest.mark.parametrize("attempt", range(5))
def test_a_worker_with_another_model_says_so_before_it_is_missed(attempt: int) -> None:
    run = Run(2, wide=1)
    assert "StateMismatch" in run.outcome
    assert len(run.cluster.views) == 1


def test_with_every_task_computed_twice_the_result_is_the_same(expected: str) -> None:
    run = Run(3, settings={"silent_errors.audit": 1.0})
    assert (run.outcome, run.cluster.errors) == ("", [])
    assert set(run.digests.values()) == {expected}


@pytest.mark.parametrize("late", range(3))
def test_a_backup_worker_is_not_waited_for_and_replicas_stay_alike(late: int) -> None:
    """It may even be the worker that settles whose results count."""
    run = Run(3, late=late, settings={"stragglers.backup": 1})
    assert (run.outcome, run.cluster.errors) == ("", [])
    assert len(run.digests) == 3
    assert len(set(run.digests.values())) == 1


@pytest.mark.slow_with("17", "20", "22")
@pytest.mark.parametrize("number", range(16, 23))
def test_a_death_while_results_are_settled_leaves_replicas_alike(number: int) -> None:
    """Worker 0 settles that, and dies at any exchange of a step: the step counts, or is redone."""
    run = Run(4, {0: number}, late=2, settings={"stragglers.backup": 1})
    assert (run.outcome, run.cluster.errors) == ("", [])
    assert len(run.digests) >= 3
    assert len(set(run.digests.values())) == 1
    assert [text for text in run.cluster.told("lost") if "worker 0 " in text]


@pytest.mark.parametrize("number", range(2, 34, 3))
def test_a_bit_flipped_in_any_message_is_put_right(number: int, expected: str) -> None:
    run = Run(3, damage_at=(1, number), settings={"silent_errors.audit": 1.0})
    assert (run.outcome, run.cluster.errors) == ("", [])
    assert set(run.digests.values()) == {expected}
    assert [transport.damages_next for transport in run.cluster.damaging] == [False]


@pytest.mark.parametrize("workers", [1, 3])
def test_the_loss_of_a_step_is_the_mean_over_its_samples(workers: int) -> None:
    """The last step of an epoch is no exception: there virtual ranks have unequal numbers."""
    values = torch.arange(10.0).square()
    data = torch.utils.data.TensorDataset(values[:, None])
    found: list[tuple[float, float]] = []

    def script(job: Job, me: ThreadWorker) -> None:
        weight = nn.Linear(1, 1, bias=False)
        nn.init.ones_(weight.weight)
        optimizer = torch.optim.SGD(weight.parameters(), lr=0.0)
        job.protect(weight=weight, optimizer=optimizer)
        for step in job.steps(job.batches(data, 2, shuffle=False), until=2):
            for (given,) in step:
                step.backward(weight(given).mean())
            expected = values[:8] if step.index == 0 else values[8:]
            found.append((step.loss, expected.mean().item()))
            optimizer.step()
            optimizer.zero_grad()
        job._loops.end_open_loop()
        job._loops.wait_for_others()

    cluster = ThreadCluster(spec(workers, {}), script)
    assert (cluster.run(), cluster.errors) == ("", [])
    assert len(found) == 2 * workers
    assert all(loss == expected for loss, expected in found)

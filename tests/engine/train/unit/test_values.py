"""Values that workers exchange and scripts keep, in jobs of threads."""

from __future__ import annotations

from typing import Any

import msgspec
import numpy as np
import pytest
import torch
from torch import nn
from torch.utils.data import DataLoader

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.job import Job
from holdfast.engine.train.step.values import StepValues
from loop_kit import dataset, digest, everywhere, net, protected, results, step_once
from thread_cluster import ThreadWorker


def with_values(job: Job, me: ThreadWorker) -> Any:
    """Values that are agreed on, evaluated and kept decide how training continues."""
    model, optimizer = protected(job)
    job.values["best"] = 1e9
    job.values["seen"] = []
    held_out = dataset(23)

    def measure(batch: Any) -> dict[str, Any]:
        x, y = batch
        error = (model(x) - y).square().mean(dim=1)
        return {"error": error.mean(), "large": ((error > 1).sum(), len(x))}

    for step in job.steps(job.batches(dataset(), 3), until=6):
        if step.index == 2:
            optimizer.param_groups[0]["lr"] *= job.agree(0.5)
        step_once(step, model, optimizer)
        if step.index % 2:
            found = job.evaluate(measure, held_out, 5)
            job.values["best"] = min(job.values["best"], found["error"])
            job.values["seen"].append(found["large"])
    after = job.evaluate(lambda batch: (model(batch[0]) - batch[1]).square().mean(), held_out, 4)
    return digest(model), job.values["best"], list(job.values["seen"]), after


@pytest.mark.slow
def test_values_are_a_part_of_the_state() -> None:
    _, best, seen, after = everywhere(with_values)
    assert len(seen) == 3
    assert after == pytest.approx(best, rel=1e-5)


def test_all_members_keep_the_values_of_a_step_as_the_same_bytes() -> None:
    """Each has its own first; different members cut pieces for the nodes' memory."""
    found = set()
    for mine in range(3):
        values = StepValues()
        values.told = {mine: b"x" * mine}
        for other in range(3):
            values.receive(msgspec.msgpack.encode({other: b"x" * other}) if other != mine else b"")
        found.add(values.encode())
    (data,) = found
    assert msgspec.msgpack.decode(data) == {0: b"", 1: b"x", 2: b"xx"}


def test_an_evaluation_is_the_mean_over_all_samples() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model = net()
        model.append(nn.Dropout(0.5))
        job.protect(model=model)
        loader = DataLoader(dataset(23), batch_size=4)

        def error(batch: Any) -> torch.Tensor:
            assert not torch.is_grad_enabled()
            return (model(batch[0]) - batch[1]).square().mean()

        found = job.evaluate(error, loader)
        assert model.training
        return found

    (found,) = results(script, 1)
    with torch.no_grad():
        x, y = dataset(23).tensors
        assert found == pytest.approx((net()(x) - y).square().mean().item(), rel=1e-6)
    assert results(script, 3) == [found] * 3


@pytest.mark.slow
def test_values_may_be_told_before_the_gradients_are_used() -> None:
    def script(job: Job, me: ThreadWorker, tells: bool = True) -> Any:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=3):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            if tells:
                job.agree(1)
                job.evaluate(lambda batch: model(batch[0]).mean(), dataset(9), 2)
            optimizer.step()
            optimizer.zero_grad()
        return digest(model)

    plain = results(lambda job, me: script(job, me, tells=False), 1)
    assert results(script, 1) == plain
    assert results(script, 3) == plain * 3


def test_an_evaluation_that_counts_its_batches_begins_again_on_each_virtual_rank() -> None:
    class Counts(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.inner = net()
            self.register_buffer("seen", torch.zeros(1))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.seen += len(x)
            found: torch.Tensor = self.inner(x).square().mean() + self.seen
            return found

    def script(job: Job, me: ThreadWorker) -> Any:
        model = Counts()
        job.protect(model=model)
        found = job.evaluate(lambda batch: model(batch[0]), dataset(23), 2)
        return found, model.seen.item()

    (expected,) = results(script, 1)
    assert expected[1] == 0
    assert results(script, 3) == [expected] * 3


@pytest.mark.slow
def test_workers_agree_on_the_value_of_the_leader() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        found = [job.agree({"at": job.worker})]
        for step in job.steps(until=3):
            for task in step:
                x = torch.full((2, 6), float(task.vrank))
                step.backward(model(x).square().mean())
            optimizer.step()
            found.append(job.agree([job.worker, job.is_leader]))
        found.append(job.agree(job.worker))
        return found

    assert results(script, 3) == [[{"at": 0}, *[[0, True]] * 3, 0]] * 3
    for death in (5, 15, 25):
        first, *others = [found[-1] for found in results(script, 3, {0: death})]
        assert others == [first] * len(others), "all workers hear the same, whoever leads"


def test_values_that_cannot_travel_are_refused() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, _ = protected(job)
        with pytest.raises(UserError, match="Holdfast uses that name"):
            job.protect(holdfast=model)
        with pytest.raises(UserError, match=r"job.values\['a'\]\[1\] is a torch.Tensor"):
            job.values["a"] = [1, torch.zeros(2)]
        with pytest.raises(UserError, match=r"is a numpy.ndarray"):
            job.values["b"] = np.zeros(2)
        with pytest.raises(UserError, match="more than 64 bits"):
            job.agree(1 << 70)
        assert job.agree([np.float64(1.5), {"a": True}]) == [1.5, {"a": True}]
        with pytest.raises(UserError, match="batch_size=0"):
            job.evaluate(lambda batch: 1.0, dataset(), 0)
        loader = DataLoader(dataset(), sampler=torch.utils.data.SubsetRandomSampler([1, 2]))
        with pytest.raises(UserError, match="this DataLoader has a sampler of its own"):
            job.evaluate(lambda batch: 1.0, loader)
        for _ in job.steps(until=1):
            with pytest.raises(UserError, match="within the loop"):
                next(job.steps(until=1))
            break
        job._loops.step = None
        with pytest.raises(UserError, match=r"agree.*Sequential"):
            job.agree(model)
        return True

    assert results(script, 1) == [True]


def test_a_function_that_evaluates_to_nothing_is_told() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        protected(job)
        return job.evaluate(lambda batch: "good", dataset(), 3)

    with pytest.raises(AssertionError, match="returned str: return a number"):
        results(script, 1)

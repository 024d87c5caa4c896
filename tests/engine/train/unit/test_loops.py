"""Losses, rounds and early ends of loops, in jobs of threads: exact with and without deaths."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.job import Job
from loop_kit import Script, dataset, digest, everywhere, net, protected, results, step_once
from thread_cluster import MortalTransport, ThreadWorker

# ---------------------------------------------------------------- losses


def weight_of(x: torch.Tensor) -> torch.Tensor:
    return (x[:, 0] > 0).float()  # how many count differs from batch to batch


def weighted(job: Job, me: ThreadWorker) -> Any:
    model, optimizer = protected(job)
    losses = []
    for step in job.steps(job.batches(dataset(), 3), until=5):
        for x, y in step:
            weight = weight_of(x)
            loss = ((model(x) - y).square().mean(dim=1) * weight).sum()
            step.backward(loss, weight=weight.sum())
        losses.append(step.loss)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model), losses[-1:]


@pytest.mark.slow
def test_weighted_losses_are_divided_by_the_weight_of_the_whole_step() -> None:
    _, (last,) = everywhere(weighted)
    model, data, losses = net(), dataset(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    plan = SamplePlan(length=70, batch_size=3, virtual_ranks=4, seed=0)
    for step in range(5):
        x, y = data[[int(i) for task in plan.step_tasks(step) for i in task]]
        weight = weight_of(x)
        loss = ((model(x) - y).square().mean(dim=1) * weight).sum() / weight.sum()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert last == pytest.approx(losses[-1], rel=1e-4)


def in_parts(job: Job, me: ThreadWorker) -> Any:
    """Train each batch in two parts: the weighted sums add up to the sums of the whole batch."""
    model, optimizer = protected(job)
    for step in job.steps(job.batches(dataset(), 4), until=4):
        for x, y in step:
            parts = list(zip(x.split(2), y.split(2), strict=True))
            for i, (a, b) in enumerate(parts):
                loss = (model(a) - b).square().sum()
                step.backward(loss, weight=len(a), last=i == len(parts) - 1)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model)


def through_parts_of_the_model(job: Job, me: ThreadWorker) -> Any:
    """Train so that the second backward reaches another part of the model than the first."""
    first, second = net(6, 3), net(2, 4)
    optimizer = torch.optim.SGD([*first.parameters(), *second.parameters()], lr=1e-2)
    job.protect(first=first, second=second, optimizer=optimizer)
    for step in job.steps(job.batches(dataset(), 3), until=4):
        for x, y in step:
            hidden = first(x)
            step.backward(hidden.square().mean(), last=False)
            step.backward((second(hidden.detach()) - y).square().mean())
        assert all(p.grad is not None for p in [*first.parameters(), *second.parameters()])
        optimizer.step()
        optimizer.zero_grad()
    return digest(first, second)


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(in_parts, marks=pytest.mark.slow),
        pytest.param(through_parts_of_the_model, marks=pytest.mark.slow),
    ],
)
def test_a_batch_may_have_several_backward_passes(script: Script) -> None:
    everywhere(script)


def test_wrong_calls_of_backward_are_told() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, _ = protected(job)
        found: list[str] = []

        def fails(call: Callable[[], None]) -> None:
            with pytest.raises(UserError) as error:
                call()
            found.append(str(error.value))

        for step in job.steps(job.batches(dataset(), 3), until=1):
            for x, y in step:
                loss = nn.functional.mse_loss(model(x), y)
                fails(lambda loss=loss, step=step: step.backward(loss.expand(2)))
                fails(lambda loss=loss, step=step: step.backward(loss, weight=-1.0))
                fails(lambda loss=loss, step=step: step.backward(loss, weight=torch.ones(2)))
                break
            break
        return found

    scalar, weight, sums = results(lambda job, me: _ignoring_its_end(job, script(job, me)), 1)[0]
    assert "scalar" in scalar
    assert "weight=-1.0" in weight
    assert "give their sum" in sums


class Full(torch.autograd.Function):
    """Ends a backward pass as a GPU without memory does, where its second argument is true."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, now: bool) -> torch.Tensor:
        ctx.now = now
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        if ctx.now:
            raise RuntimeError("out of memory\nwith some advice")
        return grad, None


@pytest.mark.parametrize("habit", ["skips the batch", "tries it again"])
@pytest.mark.parametrize("last", [True, False])
def test_a_backward_that_failed_does_not_count_as_computed(habit: str, last: bool) -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model = nn.Sequential(nn.Linear(6, 6), nn.Linear(6, 2))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.protect(model=model, optimizer=optimizer)
        for step in job.steps(job.batches(dataset(), 3), until=2):
            for x, y in step:
                fails = step.index == 1 and step.virtual_rank == 2
                try:
                    hidden = Full.apply(model[0](x), fails)
                    step.backward(nn.functional.mse_loss(model[1](hidden), y), last=last)
                except RuntimeError:
                    if habit == "tries it again":
                        step.backward(nn.functional.mse_loss(model(x), y))
                    continue
                if not last:
                    step.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()

    for workers in (1, 2):
        with pytest.raises(
            AssertionError, match=r"caught an error in step.backward \(out of memory\)"
        ):
            results(script, workers)


def _ignoring_its_end(job: Job, found: Any) -> Any:
    job._loops.step = None
    return found


# ---------------------------------------------------------------- rounds


def gan(
    job: Job,
    me: ThreadWorker,
    spoil: Callable[[ThreadWorker, int, str], float] = lambda me, step, name: 1.0,
) -> Any:
    """Train with two optimizers in turn: each round reduces the gradients of one module."""
    critic, generator = net(6, 3), net(6, 4)
    for_critic = torch.optim.AdamW(critic.parameters(), lr=1e-2)
    for_generator = torch.optim.AdamW(generator.parameters(), lr=1e-2)
    job.protect(critic=critic, generator=generator, a=for_critic, b=for_generator)
    losses = []
    for step in job.steps(job.batches(dataset(), 3), until=4):
        for x, _ in step.round("critic"):
            noise = x.flip(1)  # threads share torch's generator
            loss = critic(x).mean() - generator(noise).square().mean()
            step.backward(loss * spoil(me, step.index, "critic"))
        assert all(p.grad is None for p in generator.parameters())
        for_critic.step()
        losses.append(step.loss)
        for x, _ in step.round("generator"):
            noise = x.flip(1)
            loss = generator(noise).square().mean() + critic(x).square().mean()
            step.backward(loss * spoil(me, step.index, "generator"))
        assert all(p.grad is None for p in critic.parameters())
        for_generator.step()
        losses.append(step.loss)
    return digest(critic, generator), losses[-1:]


@pytest.mark.slow
def test_a_step_may_have_several_rounds() -> None:
    everywhere(gan)


@pytest.mark.slow
@pytest.mark.parametrize("spoiled", ["critic", "generator"])
def test_a_round_that_is_computed_again_sums_what_it_did_before(spoiled: str) -> None:
    (expected,) = results(gan, 1)
    once: list[int] = []

    def spoil(me: ThreadWorker, step: int, name: str) -> float:
        """Return the factor of a worker's first loss of a round: not a number, once."""
        strikes = (me.worker, step, name) == (1, 2, spoiled) and not once
        once.extend([step] * strikes)
        return float("nan") if strikes else 1.0

    def script(job: Job, me: ThreadWorker) -> Any:
        return gan(job, me, spoil)

    assert results(script, 3) == [expected] * 3
    assert once == [2]


@pytest.mark.slow
@pytest.mark.parametrize("script", [gan, weighted])
def test_rounds_go_where_all_exchanges_keep_their_order(
    script: Script, monkeypatch: pytest.MonkeyPatch
) -> None:
    """NCCL needs this order, because its messages have no tags."""
    (expected,) = results(script, 1)
    monkeypatch.setattr(MortalTransport, "ordered", True)
    assert results(script, 3) == [expected] * 3


def test_a_round_names_modules() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=1):
            with pytest.raises(UserError, match="protected under that name, but model"):
                next(step.round("optimizer"))
            for x, _ in step:
                step.backward(
                    x.sum() * 0 + sum(p.sum() for p in job._protected["model"].parameters())
                )
        return True

    assert results(script, 1) == [True]


# ---------------------------------------------------------------- ends


def stops(job: Job, me: ThreadWorker) -> Any:
    model, optimizer = protected(job)
    taken = []
    for until in (9, 20):
        for step in job.steps(job.batches(dataset(), 3), until=until):
            step_once(step, model, optimizer)
            taken.append(step.index)
            if step.index == 3:
                job.stop()
    return digest(model), job.stopped


@pytest.mark.slow
def test_all_loops_end_after_the_step_that_follows_a_stop() -> None:
    def alone(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=5):
            step_once(step, model, optimizer)
        return digest(model), True

    assert results(alone, 1) == [everywhere(stops)]


@pytest.mark.slow
@pytest.mark.parametrize("again", [True, False])
def test_a_stop_within_a_step_counts_from_the_next_also_if_it_is_computed_again(
    again: bool,
) -> None:
    once = [] if again else [0]

    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=9):
            for x, y in step:
                if step.index == 3:
                    job.stop()
                strikes = (me.worker, step.index) == (1, 3) and not once
                once.extend([1] * strikes)
                loss = nn.functional.mse_loss(model(x), y)
                step.backward(loss * float("nan") if strikes else loss)
            optimizer.step()
            optimizer.zero_grad()
        return job._progress.steps, digest(model)

    first, *others = results(script, 3)
    assert first[0] == 5
    assert others == [first, first]


def test_one_workers_stop_is_enough() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        last = -1
        for step in job.steps(job.batches(dataset(), 3), until=9):
            step_once(step, model, optimizer)
            last = step.index
            if step.index == 2 and job.worker == 1:
                job.stop()
        return last

    assert results(script, 3) == [3, 3, 3]


def breaks(job: Job, me: ThreadWorker) -> Any:
    model, optimizer = protected(job)
    first = job.batches(dataset(), 3)
    for step in job.steps(first, until=9):
        step_once(step, model, optimizer)
        if step.index == 2:
            break
    found = [job.agree("between")]
    for step in job.steps(job.batches(dataset(40), 2), until=8):  # the first loop might have 9
        found.append(step.step_in_epoch)
        step_once(step, model, optimizer)
        if len(found) > 1 and step.index == 6:
            break
    return digest(model)


def keeps_the_iterator(job: Job, me: ThreadWorker) -> Any:
    """Does what workers do together after a loop that Python does not know to be over."""
    model, optimizer = protected(job)
    loop = job.steps(job.batches(dataset(), 3), until=9)
    for step in loop:
        step_once(step, model, optimizer)
        if step.index == 4:
            break
    found = job.agree("after"), job.evaluate(lambda batch: model(batch[0]).mean(), dataset(20), 4)
    del loop
    return digest(model), found


@pytest.mark.parametrize(
    "script",
    [
        pytest.param(breaks, marks=pytest.mark.slow),
        pytest.param(keeps_the_iterator, marks=pytest.mark.slow),
    ],
)
def test_a_loop_may_be_left_by_break(script: Script) -> None:
    everywhere(script)


def test_a_step_that_was_left_early_is_told() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, _ = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=9):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
                break
            break
        with pytest.raises(UserError, match="step 0 was left early"):
            job._loops.end_open_loop()
        job._loops.step = None
        return True

    assert results(script, 1) == [True]

"""Scripts' uses of parameters and gradients, each with equal bits on any workers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn
from torch.utils.checkpoint import checkpoint

from gradients_kit import seeded
from holdfast.engine.core.errors import UserError
from holdfast.engine.train.job import Job
from loop_kit import Script, dataset, digest, everywhere, net, results
from thread_cluster import ThreadWorker

STEPS = 4
mse = nn.functional.mse_loss


class Tied(nn.Module):
    """One weight twice, in two layers of one model; and one layer that is called twice."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 6), nn.Linear(6, 6)
        self.out.weight = self.into.weight
        self.last = nn.Linear(6, 2)
        seeded(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.last(self.out(self.into(self.into(x).tanh()).tanh()))


def tied(job: Job, me: ThreadWorker) -> Any:
    model = Tied()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        for x, y in step:
            step.backward(mse(model(x), y))
        optimizer.step()
    assert model.into.weight is model.out.weight
    return digest(model)


def tied_between_modules(job: Job, me: ThreadWorker) -> Any:
    """Both rounds train the weight that both modules have, and each its own."""
    first, second = seeded(nn.Linear(6, 6)), seeded(nn.Linear(6, 6), 4)
    second.weight = first.weight
    optimizers = [torch.optim.AdamW(m.parameters(), lr=1e-2) for m in (first, second)]
    job.protect(first=first, second=second, a=optimizers[0], b=optimizers[1])
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        for name, optimizer, other in zip(
            ("first", "second"), optimizers, (second, first), strict=True
        ):
            for x, _ in step.round(name):
                step.backward(mse(second(first(x)), x))
            assert first.weight.grad is not None
            assert other.bias.grad is None
            optimizer.step()
        for x, _ in step:
            step.backward(mse(first(x), x))
        assert first.weight.grad is not None
        assert second.bias.grad is None  # no task has used it
        optimizers[0].step()
    return digest(first, second)


def averaged(job: Job, me: ThreadWorker) -> Any:
    """An average of the model is protected, too, and is not trained."""
    model = nn.Sequential(net(), nn.BatchNorm1d(2))
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(model=model, average=average, optimizer=optimizer)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        for x, y in step:
            step.backward(mse(model(x), y))
        optimizer.step()
        average.update_parameters(model)
    script = job._loops.script
    assert script is not None
    buckets = script._data.gradients.buckets
    assert {owner for bucket in buckets for owner in bucket.owners} == {"model"}
    return digest(model, average)


class Mixed(nn.Module):
    """Parameters of many dtypes; some of them cannot be trained."""

    def __init__(self) -> None:
        super().__init__()
        self.short = nn.Linear(6, 6).bfloat16()
        self.wave = nn.Parameter(torch.zeros(6, dtype=torch.complex64))
        self.wide = nn.Parameter(torch.zeros(6, dtype=torch.float64))
        self.last = nn.Linear(6, 2)
        self.count = nn.Parameter(torch.arange(6), requires_grad=False)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        seeded(self)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.seen += len(x)
        hidden = self.short(x.bfloat16()).float() * self.wave
        return self.last((hidden.abs() + self.wide * self.count).float())


def many_dtypes(job: Job, me: ThreadWorker) -> Any:
    model = Mixed()
    optimizer = torch.optim.SGD([p for p in model.parameters() if p.requires_grad], lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        for x, y in step:
            step.backward(mse(model(x), y))
        grads = [p.grad for p in model.parameters() if p.requires_grad]
        assert {g.dtype for g in grads if g is not None} == {
            *(torch.bfloat16, torch.complex64, torch.float64, torch.float32)
        }
        optimizer.step()
    return digest(model.float()), int(model.seen)


class Cube(torch.autograd.Function):
    """Is an autograd function of the script's own."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x)
        return x**3

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        (x,) = ctx.saved_tensors
        return 3 * x.square() * grad


def checkpointed(job: Job, me: ThreadWorker) -> Any:
    """Reentrant checkpointing, each parameter in one part only, and a function of one's own."""
    first, second = seeded(nn.Linear(6, 6)), seeded(nn.Linear(6, 2), 4)
    model = nn.ModuleList([first, second])
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        for x, y in step:
            x.requires_grad_(True)
            hidden = checkpoint(lambda x: Cube.apply(first(x)), x, use_reentrant=True)
            found = checkpoint(second, hidden, use_reentrant=True)
            step.backward(mse(found, y))
        optimizer.step()
    return digest(model)


def hooked(job: Job, me: ThreadWorker) -> Any:
    """Hooks of one's own see each task's gradient, also those registered after `protect`."""
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    seen: list[torch.Size] = []

    def halve(param: torch.Tensor) -> None:
        assert param.grad is not None
        seen.append(param.grad.shape)
        param.grad.mul_(0.5)

    model[0].weight.register_post_accumulate_grad_hook(halve)
    job.protect(model=model, optimizer=optimizer)
    model[0].bias.register_hook(lambda grad: grad.clamp(-0.01, 0.01))
    job.agree(1)  # the buckets are there now, and their hooks
    for param in model[2].parameters():
        param.register_post_accumulate_grad_hook(halve)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        for x, y in step:
            seen.clear()
            step.backward(mse(model(x), y))
            assert len(seen) == 3
        optimizer.step()
    return digest(model)


def again_through_the_same_graph(job: Job, me: ThreadWorker) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        for x, y in step:
            found = model(x)
            (slope,) = torch.autograd.grad(found.sum(), model[0].weight, create_graph=True)
            step.backward(mse(found, y), last=False, retain_graph=True)
            step.backward(found.square().mean() + slope.square().mean())
        optimizer.step()
    return digest(model)


def scaled(job: Job, me: ThreadWorker) -> Any:
    """Autocast and a scaler whose first scale is too great for a step."""
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**126, growth_interval=2)
    job.protect(model=model, optimizer=optimizer, scaler=scaler)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS + 3):
        for x, y in step:
            with torch.autocast("cpu", dtype=torch.bfloat16):
                loss = mse(model(x), y * 30)
            step.backward(loss, scaler)
        scaler.unscale_(optimizer)
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return digest(model), scaler.get_scale() < 2.0**126, scaler.get_scale()


SLOW = (many_dtypes, again_through_the_same_graph, tied, averaged, checkpointed, scaled)


@pytest.mark.slow_with("hooked", "tied_between_modules")
@pytest.mark.parametrize(
    "script",
    [
        *(tied_between_modules, hooked),
        *(pytest.param(each, marks=pytest.mark.slow) for each in SLOW),
    ],
)
def test_scripts_come_to_the_same_on_any_workers_and_through_deaths(script: Script) -> None:
    everywhere(script)


@pytest.mark.parametrize("script", SLOW)
def test_scripts_come_to_the_same_on_any_workers(script: Script) -> None:
    (expected,) = results(script, 1)
    assert results(script, 2) == [expected] * 2


def test_gradients_of_two_passes_are_those_of_their_sum() -> None:
    def in_one(job: Job, me: ThreadWorker) -> Any:
        model = net()
        job.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
        for step in job.steps(job.batches(dataset(), 3), until=1):
            for x, y in step:
                found = model(x)
                step.backward(mse(found, y) + found.square().mean())
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    def in_two(job: Job, me: ThreadWorker) -> Any:
        model = net()
        job.protect(model=model, optimizer=torch.optim.SGD(model.parameters(), lr=1e-2))
        for step in job.steps(job.batches(dataset(), 3), until=1):
            for x, y in step:
                found = model(x)
                step.backward(mse(found, y), last=False, retain_graph=True)
                step.backward(found.square().mean())
        return [p.grad.clone() for p in model.parameters() if p.grad is not None]

    for one, two in zip(*results(in_one, 1), *results(in_two, 1), strict=True):
        assert torch.allclose(one, two, rtol=1e-5)


def wrong(use: Any) -> str:
    def script(job: Job, me: ThreadWorker) -> str:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        job.protect(model=model, optimizer=optimizer)
        try:
            for step in job.steps(job.batches(dataset(), 3), until=1):
                for x, y in step:
                    use(step, model, optimizer, x, y)
        except UserError as error:
            job._loops.step = None
            return str(error)
        return ""

    return results(script, 1)[0]


def test_a_weight_in_two_reentrant_checkpoints_is_refused() -> None:
    def use(step: Any, model: nn.Module, optimizer: Any, x: Any, y: Any) -> None:
        x = x.requires_grad_(True)
        two = [checkpoint(model, part, use_reentrant=True) for part in (x, x)]
        step.backward(mse(two[0] + two[1], y))

    assert "got a gradient twice in one backward pass: use non-reentrant" in wrong(use)


def test_a_hook_that_takes_the_gradient_away_is_refused() -> None:
    """Hooks that apply an optimizer within the backward pass are refused as well."""

    def use(step: Any, model: nn.Module, optimizer: Any, x: Any, y: Any) -> None:
        def apply(param: torch.Tensor) -> None:
            param.grad = None

        handle = model[0].weight.register_post_accumulate_grad_hook(apply)
        try:
            step._steps._data.gradients._hooks.move_last()
            step.backward(mse(model(x), y))
        finally:
            handle.remove()

    assert "model.0.weight has no gradient any more when it is to be summed" in wrong(use)


class HeldScaler:
    """Keeps a scaler in an object of its own, as libraries of models do."""

    def __init__(self) -> None:
        self.inner = torch.amp.GradScaler("cpu", init_scale=8.0, growth_interval=2)

    def state_dict(self) -> dict[str, Any]:
        return self.inner.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.inner.load_state_dict(state)


def test_a_worker_without_samples_uses_a_scaler_that_another_object_holds() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, scaler = net(), HeldScaler()
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
        job.protect(model=model, optimizer=optimizer, scaler=scaler)
        for step in job.steps(job.batches(dataset(2), 3), until=3):
            for x, y in step:
                step.backward((model(x) - y).square().mean(), scaler.inner)
            scaler.inner.step(optimizer)
            scaler.inner.update()
            optimizer.zero_grad()
        return digest(model), scaler.inner.get_scale()

    (expected,) = results(script, 1)
    assert results(script, 2) == [expected] * 2

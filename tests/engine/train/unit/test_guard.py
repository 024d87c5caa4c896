"""Tests that a script which breaks the promise is made right, or refused with a remedy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.utils import prune
from torch.utils.data import TensorDataset

from guard_kit import STEPS, told
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.types import WorkerId
from holdfast.engine.train.job import Job
from holdfast.engine.train.step.module_attributes import ModuleAttributes
from loop_kit import dataset, digest, everywhere, net, protected, results, step_once
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker


def trains(
    job: Job,
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    each: Callable[[Any], None] = lambda step: None,
    data: Any = None,
) -> str:
    for step in job.steps(data or job.batches(dataset(), 3), until=STEPS):
        step_once(step, model, optimizer)
        each(step)
    return digest(model.float())


# ---------------------------------------------------------------- what becomes right


class Tempered(nn.Module):
    """A model with plain attributes, modes and a buffer that is in no state_dict."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.bent = nn.Softplus(beta=1.0)
        self.temperature = 1.0
        self.calls = 0
        self.hidden: torch.Tensor | None = None
        self.register_buffer("scale", torch.ones(2), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        found = self.bent(self.inner(x)) * self.temperature * self.scale
        if self.hidden is not None:
            found = found + 0.1 * self.hidden.mean()
        self.hidden = found.detach()
        return found + 0.001 * self.calls if self.training else 0.5 * found


def tempered(change: Callable[[Tempered, int], None]) -> Callable[[Job, ThreadWorker], Any]:
    def script(job: Job, me: ThreadWorker) -> Any:
        model = Tempered()
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
        job.protect(model=model, optimizer=optimizer)
        trains(job, model, optimizer, lambda step: change(model, step.index))
        return (
            digest(model),
            model.temperature,
            model.training,
            model.bent.beta,
            model.scale.tolist(),
        )

    return script


def cools(model: Tempered, step: int) -> None:
    model.temperature *= 0.9


def evaluates_from_step_2(model: Tempered, step: int) -> None:
    if step == 2:
        model.eval()


def bends(model: Tempered, step: int) -> None:
    model.bent.beta *= 0.8


def scales(model: Tempered, step: int) -> None:
    model.scale.mul_(0.9)


@pytest.mark.parametrize(
    "change",
    [
        pytest.param(cools, marks=pytest.mark.slow),
        pytest.param(evaluates_from_step_2, marks=pytest.mark.slow),
        pytest.param(bends, marks=pytest.mark.slow),
        pytest.param(scales, marks=pytest.mark.slow),
    ],
)
def test_attributes_that_modules_keep_besides_their_state_are_carried(
    change: Callable[[Tempered, int], None],
) -> None:
    """And what tasks change of it (calls, hidden) does not reach the tasks after them."""
    everywhere(tempered(change))


def test_weights_that_hooks_compute_are_nobodys_state() -> None:
    """A worker without tasks, or with a forward pass of its own, has different ones then."""
    model: Any = net()
    prune.l1_unstructured(model[0], "weight", amount=0.3)  # type: ignore[no-untyped-call]
    attributes = ModuleAttributes([("model", model)])
    attributes.begin()
    with torch.no_grad():
        model[0].weight_orig.mul_(0.5)
    model(torch.ones(1, 6))
    model.steps = 1
    assert attributes.state_dict() == {"attributes": {"model.steps": 1}, "buffers": {}}


@pytest.mark.slow
def test_lines_between_loops_are_not_done_twice_to_what_a_joiner_received() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        data = job.batches(dataset(), 3)
        for loop in range(3):
            for step in job.steps(data, until=3 * (loop + 1)):
                step_once(step, model, optimizer)
            for group in optimizer.param_groups:
                group["lr"] *= 0.5
            with torch.no_grad():
                model[0].bias.mul_(0.9)  # type: ignore[index, union-attr]
            job.values["loops"] = job.values.get("loops", 0) + 1
        return digest(model), job.values["loops"], optimizer.param_groups[0]["lr"]

    everywhere(script)


@pytest.mark.slow
def test_an_optimizers_state_keeps_its_precision_on_a_joiner() -> None:
    class Wide(torch.optim.Optimizer):
        """Keeps float32 averages of bfloat16 parameters."""

        def __init__(self, params: Any) -> None:
            super().__init__(params, {"lr": 0.05})

        @torch.no_grad()
        def step(self, closure: Any = None) -> None:
            for group in self.param_groups:
                for p in group["params"]:
                    state = self.state[p]
                    master = state.setdefault("master", p.float().clone())
                    master.add_(p.grad.float(), alpha=-group["lr"])
                    p.copy_(master)

    def script(job: Job, me: ThreadWorker) -> Any:
        model = net().bfloat16()
        optimizer = Wide(model.parameters())
        job.protect(model=model, optimizer=optimizer)
        inputs = dataset().tensors[0].bfloat16()
        trains(job, model, optimizer, data=job.batches(TensorDataset(inputs, inputs[:, :2]), 3))
        master = optimizer.state[next(model.parameters())]["master"]
        return master.dtype, [round(v, 9) for v in master.flatten().tolist()]

    everywhere(script)


# ---------------------------------------------------------------- what is told


@pytest.mark.slow
def test_a_rate_that_only_the_leader_has_set_is_named() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)

        def slows(step: Any) -> None:
            if job.is_leader:
                optimizer.param_groups[0]["lr"] *= 0.5

        trains(job, model, optimizer, slows)

    assert "optimizer.param_groups[0]['lr'] is 0.0" in told(script)
    assert "optimizer.param_groups[0]['lr'] is 0.0" in told(script, workers=3)


def test_a_rate_from_a_batchs_own_loss_is_named() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                loss = nn.functional.mse_loss(model(x), y)
                step.backward(loss)
            optimizer.param_groups[0]["lr"] = loss.item() / 100
            optimizer.step()

    assert "optimizer.param_groups[0]['lr'] is" in told(script)


def test_values_that_differ_are_named() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        trains(job, model, optimizer, lambda step: job.values.update(mine=job.worker))

    assert "job.values['mine'] is 0 on worker 0 and 1 on worker 1" in told(script)


def test_attributes_that_differ_are_named() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        trains(job, model, optimizer, lambda step: setattr(model, "mine", 10 + job.worker))

    assert "model.mine is 10 on worker 0 and 11 on worker 1" in told(script)


@pytest.mark.slow
def test_an_update_by_a_batchs_own_loss_is_told_and_blames_nobody() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                loss = nn.functional.mse_loss(model(x), y)
                step.backward(loss)
            optimizer.step()
            with torch.no_grad():
                for p in model.parameters():
                    p.mul_(1 - loss.item() / 1000)

    for workers in (2, 3, 4):
        assert "the script updates them by something" in told(
            script, workers, **{"silent_errors.fingerprint_steps": 1}
        )


def test_a_buffer_that_takes_the_last_batch_is_told_and_blames_nobody() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        model.register_buffer("queue", torch.zeros(3, 6))
        # Full batches only, in every epoch: after a first tie one worker continues alone until
        # another has joined, and only the second tie is reported.
        for step in job.steps(job.batches(dataset(72), 3), until=40):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            optimizer.step()
            model.queue.copy_(x)  # type: ignore[operator]

    found = told(script, **{"silent_errors.fingerprint_steps": 1})
    assert "model.queue differ between workers" in found


def test_other_samples_at_the_same_places_are_named() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        inputs, targets = dataset().tensors
        order = torch.arange(len(inputs)).roll(job.worker)  # as a directory's listing may differ
        data = job.batches(TensorDataset(inputs[order], targets[order]), 3)
        trains(job, model, optimizer, data=data)

    assert "datasets must hold the same samples in the same order" in told(script)


class Counted(TensorDataset):
    """Gives a sample that depends on how many were asked for before."""

    calls = 0

    def __getitem__(self, index: int) -> Any:
        self.calls += 1
        x, y = super().__getitem__(index)
        return x + 0.01 * self.calls, y


class Noisy(TensorDataset):
    """Draws noise from a generator of its own."""

    def __init__(self, *tensors: torch.Tensor) -> None:
        super().__init__(*tensors)
        self.generator = torch.Generator().manual_seed(1)

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x + torch.randn(x.shape, generator=self.generator), y


@pytest.mark.parametrize("kind", [Counted, Noisy])
@pytest.mark.parametrize("workers", [1, 2])
def test_a_dataset_that_gives_another_sample_each_time_is_told(kind: Any, workers: int) -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        trains(job, model, optimizer, data=job.batches(kind(*dataset().tensors), 3))

    found = told(script, workers)
    assert "derive a sample from its index" in found


def test_a_generator_of_the_models_own_is_told() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        generator = torch.Generator().manual_seed(2)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                noise = torch.randn(x.shape, generator=generator)
                step.backward(nn.functional.mse_loss(model(x + noise), y))
            optimizer.step()

    assert "came to another gradient each time" in told(script, 1)
    assert "came to another gradient each time" in told(script, 2)


def test_a_running_average_in_the_loss_is_told() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        baseline = 1.0
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                loss = nn.functional.mse_loss(model(x), y)
                step.backward(loss * baseline)
                baseline = 0.5 * baseline + 0.5 * loss.item()
            optimizer.step()

    assert "came to another gradient each time" in told(script, 1)


class Renormed(nn.Embedding):
    """A table whose rows are made shorter in the forward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.embedding(x, self.weight, max_norm=1.0)


def test_an_embedding_that_changes_weights_in_forward_is_told() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        torch.manual_seed(3)
        model = nn.Sequential(Renormed(20, 6), nn.Flatten(), net(12))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.protect(model=model, optimizer=optimizer)
        numbers = torch.arange(80).view(40, 2) % 20
        data = TensorDataset(numbers, torch.ones(40, 2))
        trains(job, model, optimizer, data=job.batches(data, 3))

    assert "parameter model.0.weight was changed while tasks were computed" in told(script, 1)


# ---------------------------------------------------------------- what is refused at once


def refused(script: Callable[[Job, ThreadWorker], Any], text: str) -> None:
    for workers in (1, 2):
        assert text in told(script, workers)


def test_an_optimizer_within_the_loop_over_batches_is_refused() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
                optimizer.step()

    refused(script, "AdamW.step() was called within the loop over a step's batches")


@pytest.mark.parametrize(
    "backward", ["loss.backward()", pytest.param("step.backward(loss)", marks=pytest.mark.slow)]
)
def test_a_closure_or_a_second_pass_with_the_last_batch_is_refused(backward: str) -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model = net()
        optimizer = torch.optim.LBFGS(model.parameters())
        job.protect(model=model, optimizer=optimizer)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))

            def closure(x: Any = x, y: Any = y, step: Any = step) -> Any:
                loss = nn.functional.mse_loss(model(x), y)
                if backward == "loss.backward()":
                    loss.backward()  # type: ignore[no-untyped-call]
                else:
                    step.backward(loss)
                return loss

            optimizer.step(closure)

    if backward == "loss.backward()":
        refused(script, "a backward pass outside of a task has reached parameter model.")
    else:
        refused(script, "step.backward was called without a new batch")


def test_an_optimizer_or_a_scheduler_that_is_not_protected_is_refused() -> None:
    def bare(job: Job, me: ThreadWorker) -> None:
        model = net()
        job.protect(model=model)
        trains(job, model, torch.optim.SGD(model.parameters(), lr=0.1))

    def unscheduled(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        trains(job, model, optimizer, lambda step: scheduler.step())

    refused(bare, "SGD, which updates model.0.weight, is not protected")
    refused(unscheduled, "a learning rate scheduler of AdamW is not protected")


def test_a_second_module_that_is_trained_but_not_protected_is_refused() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, head = net(), nn.Linear(2, 2)
        optimizer = torch.optim.SGD([*model.parameters(), *head.parameters()], lr=0.1)
        job.protect(model=model, optimizer=optimizer)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                step.backward(nn.functional.mse_loss(head(model(x)), y))
            optimizer.step()

    refused(script, "SGD updates a parameter of shape [2, 2] that belongs to no protected module")


def test_a_protected_scheduler_is_accepted() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model = net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 2)
        job.protect(model=model, optimizer=optimizer, scheduler=scheduler)
        return trains(job, model, optimizer, lambda step: scheduler.step())

    assert len(set(map(repr, results(script, 2) + results(script, 1)))) == 1


# ---------------------------------------------------------------- workers that join


def keeps_a_variable(job: Job, me: ThreadWorker) -> Any:
    """Scales its loss by a variable that every step changes, on all workers alike."""
    model, optimizer = protected(job)
    scale = 1.0
    for step in job.steps(job.batches(dataset(), 3), until=12):
        for x, y in step:
            step.backward(scale * nn.functional.mse_loss(model(x), y))
        optimizer.step()
        scale *= 0.9
    return digest(model)


def with_deaths(script: Any, workers: int, kill_at: dict[int, int]) -> tuple[str, ThreadCluster]:
    found: list[Any] = []
    spec = with_settings(SPEC, {"workers.nproc": workers, "workers.virtual": 4})
    at = {WorkerId(worker): number for worker, number in kill_at.items()}

    def run(job: Job, me: ThreadWorker) -> None:
        returned = script(job, me)
        job._loops.end_open_loop()
        job._loops.wait_for_others()
        found.append(returned)

    cluster = ThreadCluster(spec, run, at, waits=True)
    return cluster.run() or found[0], cluster


@pytest.mark.slow
@pytest.mark.parametrize("workers", [2, 3])
def test_a_joiner_that_lacks_what_the_script_keeps_leaves_and_nothing_of_it_is_used(
    workers: int,
) -> None:
    expected = results(keeps_a_variable, 1)[0]
    assert results(keeps_a_variable, workers) == [expected] * workers
    outcome, cluster = with_deaths(keeps_a_variable, workers, {1: 20})
    assert outcome == expected
    texts = cluster.told("wrong")
    assert "worker 1 joined before step" in texts[0]
    assert "the script keeps something that the job's state lacks" in texts[0]
    assert not any("has computed virtual rank" in text for text in texts)


@pytest.mark.slow
def test_two_joiners_that_compute_otherwise_are_the_scripts_doing() -> None:
    outcome, cluster = with_deaths(keeps_a_variable, 4, {1: 16, 2: 24})
    assert "as another machine does: the script keeps something" in repr(cluster.errors)
    assert outcome


class LostCoordinator(ThreadCluster):
    """Has no coordinator from the view on in which the second joiner is to be refused."""

    def on_view(self, text: str) -> None:
        if "join" in text and (self.told("wrong") or "workers 1, 2 join" in text):
            self.lose_coordinator()


@pytest.mark.slow
def test_two_refused_joiners_end_the_job_while_the_coordinator_is_away() -> None:
    spec = with_settings(SPEC, {"workers.nproc": 4, "workers.virtual": 4})
    deaths = {WorkerId(1): 16, WorkerId(2): 24}
    cluster = LostCoordinator(spec, keeps_a_variable, deaths, waits=True)
    outcome = cluster.run()
    assert "as another machine does: the script keeps something" in outcome
    assert cluster.term == 2, cluster.events  # the outcome is of a coordinator that was not there


class Epochs(TensorDataset):
    """Gives other samples in each epoch, which the script sets."""

    epoch = 0

    def __getitem__(self, index: int) -> Any:
        x, y = super().__getitem__(index)
        return x * (1 + self.epoch), y


def test_an_epoch_that_a_joiner_was_not_told_is_named() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        data = Epochs(*dataset().tensors)
        for step in job.steps(job.batches(data, 3), until=80):
            if step.index == 5:
                data.epoch = 1
            if step.index == 7 and me.worker == 1 and me.incarnation == 1:
                me.die()
            step_once(step, model, optimizer)

    assert "not from calls or epochs that a new worker has missed" in told(script, 2)


def test_a_counter_around_break_that_a_joiner_lacks_is_told() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        taken: list[int] = []
        for step in job.steps(job.batches(dataset(), 3), until=30):
            step_once(step, model, optimizer)
            taken.append(step.index)
            if len(taken) == 12:
                break

    outcome, _ = with_deaths(script, 2, {1: 20})
    assert "worker 0 has left its loop after step 12" in outcome
    assert results(script, 2) == [None, None]  # without a joiner all is well


def test_data_parallel_modules_are_refused() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model = nn.DataParallel(net())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.protect(model=model, optimizer=optimizer)
        trains(job, model, optimizer)

    refused(script, "a DataParallel exchanges gradients by itself; protect the module inside it")

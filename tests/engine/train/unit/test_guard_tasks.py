"""Tests that a task which depends on earlier ones, or changes weights, ends the job with a name."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any

import pytest
import torch
from test_guard import STEPS, told
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.engine.train.job import Job
from loop_kit import dataset, digest, everywhere, net, protected, step_once
from thread_cluster import ThreadWorker

Model = nn.Module
mse = nn.functional.mse_loss


def refused_everywhere(script: Callable[[Job, ThreadWorker], Any], *texts: str) -> None:
    """Check that a script ends with all of these texts on 1 to 3 workers, and where one dies."""
    for workers, death in ((1, None), (2, None), (3, None), (2, {1: 3})):
        found = told(script, workers, death)
        for text in texts:
            assert text in found, found


# ---------------------------------------------------------------- state in variables


class WordModel(nn.Module):
    """Is a recurrent model as in the word language model of PyTorch's examples."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.embedding = nn.Embedding(20, 8)
        self.rnn = nn.LSTM(8, 8, batch_first=True)
        self.head = nn.Linear(8, 20)

    def forward(self, words: Any, hidden: Any) -> Any:
        found, hidden = self.rnn(self.embedding(words), hidden)
        return self.head(found), hidden


@pytest.mark.slow
def test_a_hidden_state_that_is_kept_from_batch_to_batch_is_named() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model = WordModel()
        optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
        job.protect(model=model, optimizer=optimizer)
        words = torch.arange(80 * 6).view(80, 6) * 7 % 20
        hidden = (torch.zeros(1, 4, 8), torch.zeros(1, 4, 8))
        total = 0.0
        for step in job.steps(job.batches(TensorDataset(words), 4, drop_last=True), until=STEPS):
            for (batch,) in step:
                hidden = tuple(each.detach() for each in hidden)
                output, hidden = model(batch[:, :-1], hidden)
                loss = nn.functional.cross_entropy(output.flatten(0, 1), batch[:, 1:].flatten())
                step.backward(loss)
                total += loss.item()
            optimizer.step()

    refused_everywhere(script, "came to another gradient each time", "carries hidden from one")


@pytest.mark.parametrize(
    "weight",
    [pytest.param(0.9, marks=pytest.mark.slow), pytest.param(0.999, marks=pytest.mark.slow)],
)
def test_a_running_average_that_settles_at_once_is_named(weight: float) -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        baseline = 1.0
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                loss = mse(model(x), y)
                baseline = (1 - weight) * baseline + weight * loss.item()
                step.backward(loss / baseline)
            optimizer.step()

    refused_everywhere(script, "came to another gradient each time", "carries baseline from one")


@pytest.mark.slow
@pytest.mark.parametrize("period", [2, 3, 4])
def test_a_task_that_depends_on_a_counter_is_no_fault_of_a_machine(period: int) -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        turn = [0]
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                turn[0] += 1
                step.backward(mse(model(x), y) * (1 + turn[0] % period))
            optimizer.step()

    refused_everywhere(script, "came to another gradient each time", "turn[0]")


@pytest.mark.slow
def test_a_variable_of_a_function_that_the_loop_calls_is_named() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        scale = 1.0

        def scaled(loss: Any) -> Any:
            nonlocal scale
            scale *= 0.9
            return loss * scale

        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                step.backward(scaled(mse(model(x), y)))
            optimizer.step()

    refused_everywhere(script, "came to another gradient each time", "carries scale from one")


# ---------------------------------------------------------------- weights that tasks change


def momentum(kind: str, key: Any, query: Any, rate: float = 0.9) -> None:
    """Update a momentum encoder's weights in one of the ways that scripts have."""
    for k, q in zip(key.parameters(), query.parameters(), strict=True):
        if kind == "replaced data":
            k.data = k.data * rate + q.data * (1 - rate)
        elif kind == "data in place":
            k.data.mul_(rate).add_(q.data, alpha=1 - rate)
        elif kind == "set":
            k.set_(k.detach() * rate + q.detach() * (1 - rate))
        elif kind == "numpy":
            k.detach().numpy()[...] *= rate
    if kind == "swapped":
        other = {n: nn.Parameter(p.detach() * rate) for n, p in key[0].named_parameters()}
        for name, each in other.items():
            setattr(key[0], name, each.requires_grad_(False))
    elif kind == "loaded":
        key.load_state_dict({n: v * rate for n, v in key.state_dict().items()})


class Contrast(nn.Module):
    """A query encoder, and a key encoder that follows it in each forward pass, as MoCo has them."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.query, self.key = net(seed=3), net(seed=4)
        for p in self.key.parameters():
            p.requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            momentum(self.kind, self.key, self.query)
            keys = self.key(x)
        return (self.query(x) - keys).square().mean()


@pytest.mark.slow
@pytest.mark.parametrize(
    "kind", ["replaced data", "data in place", "set", "numpy", "swapped", "loaded"]
)
def test_weights_that_a_task_changes_are_named(kind: str) -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model = Contrast(kind)
        optimizer = torch.optim.SGD(model.query.parameters(), lr=0.1)
        job.protect(model=model, optimizer=optimizer)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, _ in step:
                step.backward(model(x))
            optimizer.step()

    refused_everywhere(script, "parameter model.key.0.", "was changed while tasks were computed")


@pytest.mark.slow
def test_a_layer_that_a_task_adds_is_named() -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                step.backward(mse(model(x), y))
                model[0].extra = nn.Linear(1, 1)  # type: ignore[index, union-attr]
            optimizer.step()

    refused_everywhere(script, "parameter model.0.extra.weight was added while tasks were computed")


class Moco(nn.Module):
    """Momentum contrast as its authors have it: an update of weights and a queue in forward.

    `updates`: forward changes the key encoder; else the script does, after each step.
    """

    def __init__(self, *, updates: bool) -> None:
        super().__init__()
        self.updates = updates
        self.encoder_q, self.encoder_k = net(seed=3), net(seed=4)
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data.copy_(q.data)
            k.requires_grad = False
        self.register_buffer("queue", torch.linspace(-1, 1, 24).view(2, 12))
        self.register_buffer("queue_ptr", torch.zeros(1, dtype=torch.long))

    @torch.no_grad()
    def follow(self, m: float = 0.9) -> None:
        for q, k in zip(self.encoder_q.parameters(), self.encoder_k.parameters(), strict=True):
            k.data = k.data * m + q.data * (1.0 - m)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query = nn.functional.normalize(self.encoder_q(x), dim=1)
        with torch.no_grad():
            if self.updates:
                self.follow()
            key = nn.functional.normalize(self.encoder_k(x), dim=1)
        near = (query * key).sum(1, keepdim=True)
        logits = torch.cat([near, query @ self.queue.clone().detach()], dim=1)
        place = int(self.queue_ptr)
        self.queue[:, place] = key.mean(0)
        self.queue_ptr[0] = (place + 1) % self.queue.shape[1]
        return nn.functional.cross_entropy(logits, torch.zeros(len(x), dtype=torch.long))


def trains_moco(updates: bool) -> Callable[[Job, ThreadWorker], str]:
    def script(job: Job, me: ThreadWorker) -> str:
        model = Moco(updates=updates)
        optimizer = torch.optim.SGD(model.encoder_q.parameters(), lr=0.1)
        job.protect(model=model, optimizer=optimizer)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, _ in step:
                step.backward(model(x))
            optimizer.step()
            optimizer.zero_grad()
            if not updates:
                model.follow()
        return digest(model)

    return script


@pytest.mark.slow
def test_momentum_contrast_as_its_authors_have_it_is_named_with_the_cure() -> None:
    texts = "parameter model.encoder_k.", "change parameters after the loop over a step's batches"
    refused_everywhere(trains_moco(updates=True), *texts)


@pytest.mark.slow
def test_momentum_contrast_whose_encoder_follows_after_the_step_is_exact() -> None:
    everywhere(trains_moco(updates=False))


# ---------------------------------------------------------------- what modules keep in containers


class Metered(nn.Module):
    """Is a model that counts and remembers in containers, which it changes in place."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = net()
        self.meter = [0]
        self.state = {"calls": 0}
        self.seen: set[int] = set()
        self.recent: deque[torch.Tensor] = deque(maxlen=2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.meter[0] += 1
        self.state["calls"] += 1
        self.seen.add(self.meter[0])
        found = self.inner(x) * (1 + 0.1 * self.meter[0] + 0.1 * self.state["calls"])
        found = found * (1 + 0.1 * len(self.seen))
        if self.recent:
            found = found + 0.1 * self.recent[-1].mean()
        self.recent.append(found.detach())
        return found


@pytest.mark.slow
def test_changes_that_tasks_make_to_containers_of_a_model_are_set_back() -> None:
    def script(job: Job, me: ThreadWorker) -> str:
        model = Metered()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
        job.protect(model=model, optimizer=optimizer)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            step_once(step, model, optimizer)
            model.meter[0] = step.index  # between steps it may change its values
        return digest(model)

    everywhere(script)


# ---------------------------------------------------------------- backward passes of the script's


@pytest.mark.parametrize("first", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_backward_pass_beside_the_steps_own_is_refused(first: bool) -> None:
    def script(job: Job, me: ThreadWorker) -> None:
        model, other = net(seed=3), net(seed=4)
        both = [*model.parameters(), *other.parameters()]
        optimizer = torch.optim.SGD(both, lr=0.1)
        job.protect(model=model, other=other, optimizer=optimizer)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            for x, y in step:
                auxiliary = other(x).square().mean()
                if first:
                    auxiliary.backward()
                step.backward(mse(model(x), y))
                if not first:
                    auxiliary.backward()
            optimizer.step()

    refused_everywhere(script, "parameter other.", "step.backward(loss, last=False)")

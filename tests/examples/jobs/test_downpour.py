"""Downpour SGD: it does what a plain program does, and a job has the same bits on any workers."""

from __future__ import annotations

import copy
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from downpour import Downpour
from lbfgs import LBFGS
from torch import nn
from torch.nn import functional as F

from conftest import SCRIPTS, Start, finish, has_checkpoint
from holdfast.cli.main import main
from holdfast.engine.core.errors import UserError
from holdfast.engine.runtime.local_run import LocalRun, strike
from holdfast.tables import SGD, Adagrad, EmbeddingBag, LazyAdam
from lone_step import LoneStep, train_step

STEPS, VRANKS, LR, LOCAL_LR = 6, 3, 0.1, 0.05


def make_model() -> nn.Sequential:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 1))


def batch_of(step: int, rank: int) -> tuple[torch.Tensor, torch.Tensor]:
    dice = torch.Generator().manual_seed(100 * step + rank)
    inputs = torch.randn(10, 4, generator=dice)
    return inputs, inputs.prod(1, keepdim=True)


def train(downpour: Downpour, steps: range) -> list[float]:
    """Train with this optimizer; return the mean loss that each task reported."""
    losses = []
    for index in steps:
        batches = [batch_of(index, rank) for rank in range(VRANKS)]
        losses += train_step(downpour, index, batches, F.mse_loss)
    return losses


def train_plainly(model: nn.Module, *, n_push: int, n_fetch: int, warm_start: int) -> None:
    """Do the same with a module for each replica and an optimizer of PyTorch."""
    optimizer = torch.optim.Adagrad(model.parameters(), lr=LR)
    replicas = [copy.deepcopy(model) for _ in range(VRANKS)]
    for index in range(STEPS):
        pushes = []
        for rank in range(VRANKS):
            worker = copy.deepcopy(replicas[rank])
            local = torch.optim.SGD(worker.parameters(), lr=LOCAL_LR)
            push = [torch.zeros_like(p) for p in worker.parameters()]
            whole = batch_of(index, rank)
            for x, y in zip(*(each.split(10 // n_push) for each in whole), strict=True):
                local.zero_grad()
                F.mse_loss(worker(x), y).backward()
                push = [a + p.grad for a, p in zip(push, worker.parameters(), strict=True)]
                local.step()
            pushes.append(push)
        warm = index < warm_start
        for push in (
            [[sum(each) / VRANKS for each in zip(*pushes, strict=True)]] if warm else pushes
        ):
            for p, grad in zip(model.parameters(), push, strict=True):
                p.grad = grad
            optimizer.step()
        for rank, replica in enumerate(replicas):
            if warm or (index + 1 + rank) % (n_fetch // n_push) == 0:
                replica.load_state_dict(model.state_dict())
            else:
                for p, grad in zip(replica.parameters(), pushes[rank], strict=True):
                    p.data -= LOCAL_LR * grad


@pytest.mark.parametrize(
    ("n_push", "n_fetch", "warm_start"), [(1, 1, 0), (2, 2, 0), (1, 3, 0), (2, 4, 2), (5, 5, 6)]
)
def test_it_does_what_a_plain_program_does(n_push: int, n_fetch: int, warm_start: int) -> None:
    plain, model = make_model(), make_model()
    train_plainly(plain, n_push=n_push, n_fetch=n_fetch, warm_start=warm_start)
    settings = {"n_push": n_push, "n_fetch": n_fetch, "warm_start": warm_start}
    train(Downpour(model, Adagrad(lr=LR), local_lr=LOCAL_LR, **settings), range(STEPS))
    for mine, theirs in zip(model.parameters(), plain.parameters(), strict=True):
        assert torch.allclose(mine, theirs, rtol=1e-5, atol=1e-7)


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    model, other = make_model(), make_model()
    first = Downpour(model, LazyAdam(lr=LR), n_push=2, n_fetch=6)
    train(first, range(4))
    second = Downpour(other, LazyAdam(lr=LR), n_push=2, n_fetch=6)
    other.load_state_dict(model.state_dict())
    second.load_state_dict(copy.deepcopy(first.state_dict()))
    for downpour in (first, second):
        train(downpour, range(4, 9))
    for mine, theirs in zip(model.parameters(), other.parameters(), strict=True):
        assert torch.equal(mine, theirs)


def test_the_rate_follows_a_scheduler() -> None:
    model = make_model()
    before = [p.clone() for p in model.parameters()]
    downpour = Downpour(model, SGD(lr=1.0))
    torch.optim.lr_scheduler.LambdaLR(downpour, lambda _: 0.0)
    train(downpour, range(2))
    assert all(map(torch.equal, before, model.parameters()))


def test_tasks_report_the_mean_of_their_minibatches() -> None:
    model = make_model()
    told = train(Downpour(model, SGD(lr=0.0), n_push=3), range(1))
    wanted = [F.mse_loss(model(x), y).item() for x, y in (batch_of(0, r) for r in range(VRANKS))]
    assert told == pytest.approx(wanted)


def test_odd_parameters_and_batches_are_trained() -> None:
    model = nn.Sequential(nn.Conv2d(2, 3, 1).to(memory_format=torch.channels_last))
    model.register_parameter("scale", nn.Parameter(torch.ones(())))
    model.register_parameter("unused", nn.Parameter(torch.ones(2)))
    model.register_parameter("frozen", nn.Parameter(torch.ones(2), requires_grad=False))
    before = {name: p.clone() for name, p in model.named_parameters()}
    downpour = Downpour(model, Adagrad(lr=0.1), n_push=2, n_fetch=4)
    step: Any = LoneStep(0)
    sizes = []
    batch = {"x": torch.ones(3, 2, 2, 2), "n": [torch.ones(3)]}
    for part in downpour.minibatches(step, batch):
        sizes.append((len(part["x"]), len(part["n"][0])))
        downpour.backward((downpour(part["x"]) * downpour._replica[0]).mean())
    downpour.step(step)
    assert sizes == [(2, 2), (1, 1)]
    changed = {n for n, p in model.named_parameters() if not torch.equal(p, before[n])}
    assert changed == {"scale", "0.weight", "0.bias"}


# ---------------------------------------------------------------- mistakes


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"n_push": 0}, "n_push=0"),
        ({"n_push": 2, "n_fetch": 3}, "n_fetch=3): give a multiple of n_push, 2"),
        ({"n_fetch": 0}, "n_fetch=0"),
        ({"warm_start": -1}, "warm_start=-1"),
        ({"local_lr": -0.5}, "local_lr=-0.5"),
        ({"local_lr": float("nan")}, "local_lr=nan"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, Any], text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        Downpour(make_model(), Adagrad(lr=0.1), **settings)


def test_models_and_optimizers_that_do_not_fit_are_refused() -> None:
    model = make_model()
    with pytest.raises(UserError, match="LBFGS is no rule for rows"):
        Downpour(model, LBFGS(model.parameters()))  # type: ignore[arg-type]
    with pytest.raises(UserError, match="no parameter of the model"):
        Downpour(model.requires_grad_(False), Adagrad(lr=0.1))
    with pytest.raises(UserError, match=r"contains holdfast\.tables\.EmbeddingBag"):
        Downpour(nn.Sequential(EmbeddingBag(8, 2)), Adagrad(lr=0.1))


def test_calls_out_of_turn_are_refused() -> None:
    downpour, step = Downpour(make_model(), Adagrad(lr=0.1), n_push=2), LoneStep(0)
    x, y = batch_of(0, 0)
    with pytest.raises(UserError, match="without a minibatch"):
        downpour(x)
    with pytest.raises(UserError, match="without a minibatch"):
        downpour.backward(torch.tensor(0.0))
    with pytest.raises(UserError, match="needs a step of the job"):
        downpour.step(step)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="takes no closure"):
        downpour.step(lambda: 0.0)  # type: ignore[arg-type]
    with pytest.raises(UserError, match="a minibatch had 0 calls"):
        list(downpour.minibatches(step, (x, y)))  # type: ignore[arg-type]
    part, _ = next(downpour.minibatches(step, (x, y)))  # type: ignore[arg-type]
    with pytest.raises(UserError, match=r"scalar loss, not \[5, 1\]"):
        downpour.backward(downpour(part))


@pytest.mark.parametrize(
    "batch", ["text", (), [torch.ones(4), "text"], (torch.ones(4), torch.ones(6))]
)
def test_batches_that_cannot_be_cut_are_refused(batch: Any) -> None:
    downpour, step = Downpour(make_model(), Adagrad(lr=0.1), n_push=2), LoneStep(0)
    with pytest.raises(UserError, match="Downpour cannot cut a batch"):
        next(iter(downpour.minibatches(step, batch)))  # type: ignore[arg-type]


# ---------------------------------------------------------------- in a job

VIRTUAL = ("--virtual", "6")


@pytest.mark.slow
@pytest.mark.parametrize("fetch", ["2", "6"])
def test_the_bits_of_a_job_depend_neither_on_its_workers_nor_on_their_deaths(
    fetch: str, start: Start
) -> None:
    words = ("--n-fetch", fetch)
    with start(*words, nproc=1, script="downpour.py", options=VIRTUAL) as run:
        found = finish(run)
        assert float(run.out[-2].split()[1]) < 0.35, run.out
    with start(*words, "--task-s", "0.02", nproc=3, script="downpour.py", options=VIRTUAL) as run:
        run.until_members(3)
        run.until(lambda: run.status()["step"] >= 8, 60, "step 8")
        assert strike(run.members()[1])
        assert finish(run) == found


def run_disturbed(place: Path) -> Path:
    """Return the directory of a run in which a worker was killed, with a checkpoint of step 20."""
    for number in range(5):
        folder = place / str(number)
        options = ["--nproc", "2", *VIRTUAL, "--store", str(folder / "store")]
        words = [str(SCRIPTS / "downpour.py"), "--task-s", "0.02", "--steps", "40"]
        with LocalRun(folder / "run", [*options, "--save-every", "10"], words) as run:
            members = run.until_members(2)
            run.until(lambda run=run: run.status()["step"] >= 5, 60, "some steps")
            assert strike(members[1])
            finish(run)
        if has_checkpoint(folder / "store", 20):
            return folder / "run"
    raise AssertionError("no run of five has saved step 20")


@pytest.mark.slow
def test_steps_of_a_disturbed_run_are_computed_again(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run = run_disturbed(tmp_path)
    assert main(["ledger", "verify", str(run)]) == 0
    capsys.readouterr()
    assert main(["replay", str(run), "--step", "3", "--step", "25"]) == 0
    out = capsys.readouterr().out
    assert "10 steps computed again, with the recorded result: 0-3, 20-25" in out

"""L-BFGS over all samples: it finds minima, and a job has the same bits on any workers."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable

import pytest
import torch
from lbfgs import LBFGS
from torch import nn

from conftest import Start, finish
from holdfast.engine.core.errors import UserError
from holdfast.engine.runtime.local_run import strike

Loss = Callable[[], torch.Tensor]


def evaluate(optimizer: torch.optim.Optimizer, loss: Loss) -> torch.Tensor:
    optimizer.zero_grad()
    value = loss()
    value.backward()
    return value.detach()


def minimize(optimizer: LBFGS, loss: Loss, steps: int) -> int:
    """Return after how many evaluations the gradient had vanished."""
    for count in range(1, steps + 1):
        optimizer.step(evaluate(optimizer, loss))
        if optimizer.is_converged:
            return count
    raise AssertionError(f"not converged after {steps} evaluations: {float(loss()):g}")


def rosenbrock() -> tuple[nn.Parameter, Loss]:
    point = nn.Parameter(torch.tensor([-1.2, 1.0], dtype=torch.float64))
    return point, lambda: (1 - point[0]) ** 2 + 100 * (point[1] - point[0] ** 2) ** 2


def test_the_minimum_of_a_bent_valley_is_found() -> None:
    point, loss = rosenbrock()
    assert minimize(LBFGS([point]), loss, 100) < 70
    assert torch.allclose(point, torch.ones(2, dtype=torch.float64), atol=1e-6)


def regression() -> tuple[nn.Linear, Loss]:
    dice = torch.Generator().manual_seed(0)
    inputs = torch.randn(300, 12, generator=dice).double()
    noise = torch.randn(300, generator=dice).double()
    wanted = (inputs @ torch.randn(12, generator=dice).double() + noise > 0).double()
    torch.manual_seed(1)
    model = nn.Linear(12, 1).double()

    def loss() -> torch.Tensor:
        fit = nn.functional.binary_cross_entropy_with_logits(model(inputs)[:, 0], wanted)
        return fit + 1e-3 * sum(p.square().sum() for p in model.parameters())

    return model, loss


def test_our_lbfgs_ends_where_that_of_torch_does() -> None:
    model, loss = regression()
    twin = copy.deepcopy(model.state_dict())
    minimize(LBFGS(model.parameters(), tolerance_grad=1e-9), loss, 80)
    found = float(loss().detach())
    model.load_state_dict(twin)
    theirs = torch.optim.LBFGS(
        model.parameters(), line_search_fn="strong_wolfe", max_iter=80, tolerance_grad=1e-9
    )
    theirs.step(lambda: evaluate(theirs, loss))
    assert found == pytest.approx(float(loss().detach()), rel=1e-7)


def test_a_saved_state_goes_on_as_if_nothing_had_happened() -> None:
    point, loss = rosenbrock()
    optimizer = LBFGS([point], history_size=3)
    for _ in range(12):
        optimizer.step(evaluate(optimizer, loss))
    other, its_loss = rosenbrock()
    other.data.copy_(point.data)
    again = LBFGS([other], history_size=3)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for _ in range(12):
        optimizer.step(evaluate(optimizer, loss))
        again.step(evaluate(again, its_loss))
        assert torch.equal(point, other)


def test_the_best_point_is_kept() -> None:
    point, loss = rosenbrock()
    optimizer, best = LBFGS([point]), float("inf")
    for _ in range(25):
        best = min(best, float(optimizer.step(evaluate(optimizer, loss))))
    optimizer.settle()
    assert float(loss().detach()) == best


@pytest.mark.parametrize("wrong", [float("nan"), float("inf")])
def test_a_step_to_where_there_is_no_loss_is_shortened(wrong: float) -> None:
    point = nn.Parameter(torch.tensor([1.0]))
    optimizer = LBFGS([point], lr=100.0)
    optimizer.step(evaluate(optimizer, lambda: point.square().sum()))
    before = point.item()
    point.grad = torch.tensor([wrong])
    optimizer.step(wrong)
    assert abs(point.item() - 1.0) == pytest.approx(0.1 * abs(before - 1.0), rel=1e-5)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"lr": 0.0}, "lr=0.0"),
        ({"history_size": 0}, "history_size=0"),
        ({"tolerance_grad": -1.0}, "tolerance_grad=-1.0"),
    ],
)
def test_settings_that_make_no_sense_are_refused(settings: dict[str, float], text: str) -> None:
    with pytest.raises(UserError, match=re.escape(text)):
        LBFGS([nn.Parameter(torch.zeros(2))], **settings)  # type: ignore[arg-type]


def test_parameters_of_two_types_and_closures_are_refused() -> None:
    two = [nn.Parameter(torch.zeros(2)), nn.Parameter(torch.zeros(2, dtype=torch.float64))]
    with pytest.raises(UserError, match="one type"):
        LBFGS(two)
    with pytest.raises(UserError, match="no closure"):
        LBFGS(two[:1]).step(lambda: 0.0)  # type: ignore[arg-type]


@pytest.mark.slow
def test_the_bits_of_a_job_depend_neither_on_its_workers_nor_on_their_deaths(start: Start) -> None:
    virtual = ("--virtual", "16")
    with start(nproc=1, script="full_batch.py", options=virtual) as run:
        found = finish(run)
        assert float(run.out[-2].split()[1]) < 0.02, run.out
    pace = ("--task-s", "0.01")
    with start(*pace, nproc=3, script="full_batch.py", options=virtual) as run:
        run.until_members(3)
        run.until(lambda: run.status()["step"] >= 8, 60, "step 8")
        assert strike(run.members()[1])
        assert finish(run) == found

"""Tests the judgement over repeated tasks, where kernels are exact and where they are noisy."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.train.script.repeated_tasks import (
    RUNS_CLOSE,
    RUNS_MAX,
    RUNS_ODD,
    RUNS_SUSPECTED,
    RepeatedTasks,
    RunMark,
    count_tasks_before,
)
from holdfast.engine.train.step.gradient_digest import TaskDigest

TASK = "the task of virtual rank 0 in step 0"
ELEMENTS = 500
Run = Callable[[int], torch.Tensor]  # batch -> gradient


def repeats(told: list[str], *, is_exact: bool, suspects: str = "") -> RepeatedTasks:
    return RepeatedTasks(1, 1, 0.01, told.append, lambda: is_exact, lambda: suspects)


def mark(gradient: torch.Tensor, batch: int = 1) -> RunMark:
    digest = TaskDigest()
    digest.begin(bits=True, sketch=True)
    digest.note(0, gradient)
    return RunMark(batch=batch, result=digest.bits, sketch=digest.sketch)


def judge(judged: RepeatedTasks, run: Run, step: int = 0) -> int:
    """Run a task as often as is asked for, with other tasks in between; return that number."""
    assert judged.is_due(step, 0)
    runs = [mark(run(0)), mark(run(0))]
    while not judged.judge_runs(runs, TASK):
        for other in range(count_tasks_before(len(runs))):
            run(1 + other)
        runs.append(mark(run(0)))
    return len(runs)


def gradient(batch: int) -> torch.Tensor:
    return torch.randn(ELEMENTS, generator=torch.Generator().manual_seed(batch))


def noisy(seed: int, amount: float) -> Run:
    """Return a task on kernels that sum in another order each time."""
    dice = torch.Generator().manual_seed(seed)
    return lambda batch: gradient(batch) + amount * torch.randn(ELEMENTS, generator=dice)


def averaging(weight: float, noise: float) -> Run:
    """Return a task that divides its loss by a running average of the losses before."""
    dice = torch.Generator().manual_seed(3)
    average = 1.0

    def run(batch: int) -> torch.Tensor:
        nonlocal average
        average = (1 - weight) * average + weight * (2 + 0.7 * batch)
        found = gradient(batch) / average
        return found + noise * torch.randn(ELEMENTS, generator=dice)

    return run


@pytest.mark.parametrize("is_exact", [True, False])
def test_runs_with_the_same_bits_are_decided_at_once(is_exact: bool) -> None:
    judged = repeats([], is_exact=is_exact)
    assert judge(judged, gradient) == RUNS_CLOSE
    assert judge(judged, gradient, step=1) == 2


def test_a_worker_that_joins_later_runs_its_first_task_only_twice() -> None:
    assert judge(repeats([], is_exact=True), gradient, step=100) == 2


def test_a_task_of_each_early_step_is_repeated_and_later_one_in_a_cycle() -> None:
    judged = RepeatedTasks(8, 2, 0.01, lambda text: None, lambda: True, lambda: "")
    due = [(step, vrank) for step in range(25) for vrank in range(2) if judged.is_due(step, vrank)]
    assert due == [(0, 0), (1, 1), (2, 0), (3, 1), (8, 1), (16, 0), (24, 1)]


def counting(period: int, loud: int) -> Run:
    """Return a task whose gradient is doubled in one call out of `period`."""
    calls = 0

    def run(batch: int) -> torch.Tensor:
        nonlocal calls
        calls += 1
        return gradient(batch) * (2 if calls % period == loud else 1)

    return run


@pytest.mark.parametrize("loud", [2, 3])
@pytest.mark.parametrize("period", [5, 6, 7, 8])
def test_a_script_that_counts_its_calls_is_no_fault_of_a_machine(period: int, loud: int) -> None:
    with pytest.raises(UserError, match="came to another gradient each time"):
        judge(repeats([], is_exact=True), counting(period, loud))


def test_noise_where_there_can_be_none_is_the_scripts() -> None:
    with pytest.raises(UserError, match="came to another gradient each time"):
        judge(repeats([], is_exact=True), noisy(1, 1e-7))


@pytest.mark.parametrize("seed", range(20))
def test_noise_is_told_once_and_tasks_are_repeated_after_it(seed: int) -> None:
    told: list[str] = []
    judged = repeats(told, is_exact=False)
    run = noisy(seed, 10.0 ** random.Random(seed).uniform(-7, -4))
    assert judge(judged, run) == RUNS_MAX
    assert len(told) == 1
    assert "slightly other bits" in told[0]
    assert judge(judged, run, step=1) == 2
    assert len(told) == 1
    with pytest.raises(UserError, match="came to another gradient each time"):
        judge(judged, averaging(0.9, 1e-6), step=2)


@pytest.mark.parametrize("weight", [0.9, 0.99, 0.5, 0.2])
@pytest.mark.parametrize("noise", [0.0, 1e-6])
def test_an_average_that_settles_is_found_on_noisy_kernels(weight: float, noise: float) -> None:
    with pytest.raises(UserError, match="came to another gradient each time"):
        judge(repeats([], is_exact=False), averaging(weight, noise))


def odd(number: int) -> Run:
    """Return a task with another result in one run."""
    count = 0

    def run(batch: int) -> torch.Tensor:
        nonlocal count
        count += batch == 0
        return gradient(batch) + (count == number + 1) * (batch == 0)

    return run


def test_one_run_that_differs_is_a_machines_fault() -> None:
    judged = repeats([], is_exact=True)
    judge(judged, gradient)
    with pytest.raises(WorldError, match="wrongly here once, and rightly 13 times"):
        judge(judged, odd(1), step=1)
    assert judge(judged, odd(0), step=2) == RUNS_ODD
    assert judge(judged, odd(2), step=3) == 2


def rarely_odd(every: int) -> Run:
    """Return a task with another result in the second run of each `every` runs."""
    count = 0

    def run(batch: int) -> torch.Tensor:
        nonlocal count
        count += batch == 0
        return gradient(batch) + (count % every == 2) * (batch == 0)

    return run


def test_a_script_that_draws_is_suspected_before_its_machine() -> None:
    judged = repeats([], is_exact=True, suspects="; it uses gc.get_objects() in line 5")
    judge(judged, gradient)
    with pytest.raises(UserError, match="each time that this worker computed it; it uses gc"):
        judge(judged, rarely_odd(20), step=1)
    with pytest.raises(WorldError, match=f"wrongly here once, and rightly {RUNS_SUSPECTED - 1}"):
        judge(judged, odd(1), step=2)


def test_a_first_run_that_differs_from_all_others_is_the_scripts() -> None:
    with pytest.raises(UserError, match="came to another gradient each time"):
        judge(repeats([], is_exact=True), odd(0))


def test_another_batch_is_the_datasets_doing() -> None:
    judged = repeats([], is_exact=False)
    assert judged.is_due(0, 0)
    runs = [mark(gradient(0), batch=number) for number in range(RUNS_MAX)]
    with pytest.raises(UserError, match="derive a sample from its index"):
        judged.judge_runs(runs, TASK)

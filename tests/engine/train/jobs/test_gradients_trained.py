"""Parameters that are frozen, thawed, added or replaced between two steps, while workers join."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import SCRIPTS, finish
from holdfast.engine.core.errors import StateMismatch, UserError
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.types import WorkerId
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.job import Job
from holdfast.engine.train.step.trained import TrainedParameters
from loop_kit import Script, dataset, digest, everywhere, net, protected, results, step_once
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

STEPS = 7
mse = nn.functional.mse_loss


def freezing(at_step: Callable[[int, nn.Module], None], *, after: bool = False) -> Script:
    """Return a script that changes something in each step, before its batches or after them."""

    def script(job: Job, me: ThreadWorker) -> Any:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            if not after:
                at_step(step.index, model)
            step_once(step, model, optimizer)
            if after:
                at_step(step.index, model)
        return digest(model), [p.requires_grad for p in model.parameters()]

    return script


def by_step(step: int, model: nn.Module) -> None:
    if step in (1, 4):
        model[0].requires_grad_(step == 4)


def in_turn(step: int, model: nn.Module) -> None:
    model[0].requires_grad_(step % 2 == 0)
    model[2].weight.requires_grad_(step % 3 == 0)


@pytest.mark.parametrize(
    ("change", "after"),
    [
        pytest.param(by_step, True, marks=pytest.mark.slow),
        pytest.param(by_step, False, marks=pytest.mark.slow),
        pytest.param(in_turn, False, marks=pytest.mark.slow),
    ],
)
def test_parameters_may_be_frozen_and_thawed(
    change: Callable[[int, nn.Module], None], after: bool
) -> None:
    found, _ = everywhere(freezing(change, after=after))
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def alone(job: Job, me: ThreadWorker) -> Any:
        """Remove frozen parameters' gradients by hand."""
        job.protect(model=model, optimizer=optimizer)
        twin = net()
        for step in job.steps(job.batches(dataset(), 3), until=STEPS):
            if not after:
                change(step.index, twin)
            for x, y in step:
                step.backward(nn.functional.mse_loss(model(x), y))
            for p, q in zip(model.parameters(), twin.parameters(), strict=True):
                p.grad = p.grad if q.requires_grad else None
            optimizer.step()
            if after:
                change(step.index, twin)
        return digest(model)

    assert results(alone, 1) == [found]


def rounds(job: Job, me: ThreadWorker) -> Any:
    """Freeze the parameters that a round does not train, as GANs often do."""
    critic, maker = net(6, 3), net(6, 4)
    for_critic = torch.optim.AdamW(critic.parameters(), lr=1e-2)
    for_maker = torch.optim.AdamW(maker.parameters(), lr=1e-2)
    job.protect(critic=critic, maker=maker, a=for_critic, b=for_maker)
    plans: set[int] = set()
    for step in job.steps(job.batches(dataset(), 3), until=4):
        critic.requires_grad_(True)
        for x, _ in step.round("critic"):
            step.backward(critic(x).mean() - maker(x).square().mean())
        for_critic.step()
        critic.requires_grad_(False)
        for x, _ in step.round("maker"):
            step.backward(maker(x).square().mean() + critic(x).square().mean())
        for_maker.step()
        script = job._loops.script
        assert script is not None
        plans.add(id(script._data.gradients.buckets[0]))
    assert len(plans) == 1, "what a round does not train is no reason for other buckets"
    return digest(critic, maker)


def test_parameters_that_a_round_does_not_train_may_be_frozen_in_it() -> None:
    (expected,) = results(rounds, 1)
    assert results(rounds, 2) == [expected] * 2


def beside_rounds(job: Job, me: ThreadWorker) -> Any:
    """Freeze modules that no round names next to the other modules, and these for a while."""
    model, idle = net(6, 3), net(6, 4)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(idle=idle, model=model, optimizer=optimizer)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        idle.requires_grad_(step.index % 3 == 0)
        model[0].requires_grad_(step.index != 2)
        for x, y in step.round("model"):
            step.backward(mse(model(x) + idle(x), y))
        optimizer.step()
    return digest(model, idle)


def replaced(job: Job, me: ThreadWorker) -> Any:
    """Replace a layer by another of its kind, with a statistic of its own."""
    model = nn.Sequential(net(), nn.BatchNorm1d(2))
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        if step.index == 3:
            model[0] = net(seed=9)
            model[1] = nn.BatchNorm1d(2)
            optimizer.param_groups[0]["params"] = list(model.parameters())
        step_once(step, model, optimizer)
    return digest(model)


def test_a_layer_may_be_replaced() -> None:
    (expected,) = results(replaced, 1)
    assert results(replaced, 2) == [expected] * 2


@pytest.mark.slow
def test_a_job_that_begins_from_a_checkpoint_trains_what_it_did(tmp_path: Path) -> None:
    """All workers are lost after the layer was frozen; the optimizer's state is sparse, too."""
    faults = tmp_path / "faults.txt"
    faults.write_text("worker 0 step 12 kill\nworker 1 step 12 kill\n")
    store, last = str(tmp_path / "store"), []
    lost = ["--nproc", "2", "--no-rebalance", "--faults", str(faults)]
    lost += ["--store", store, "--save-every", "4"]
    for name, options, words in (("alone", ["--nproc", "1"], []), ("lost", lost, [store])):
        script = [str(SCRIPTS / "frozen.py"), *words]
        with LocalRun(tmp_path / name, [*options, "--virtual", "4"], script) as run:
            last.append(finish(run))
    assert last[0] == last[1]
    assert len(run.events("lost")) == 2
    assert any("checkpoint" in str(event["text"]) for event in run.events("view"))


@pytest.mark.slow
@pytest.mark.parametrize("script", [rounds, beside_rounds, replaced])
def test_deaths_change_nothing(script: Script) -> None:
    everywhere(script)


def outcome(script: Script, workers: int, kill_at: dict[int, int] | None = None) -> str:
    """Run a script that fails; return the job's outcome."""
    spec = with_settings(SPEC, {"workers.nproc": workers, "workers.virtual": 4})
    at = {WorkerId(worker): number for worker, number in (kill_at or {}).items()}

    def run(job: Job, me: ThreadWorker) -> None:
        script(job, me)
        job._loops.end_open_loop()
        job._loops.wait_for_others()

    return ThreadCluster(spec, run, at, waits=True).run()


def grows(job: Job, me: ThreadWorker) -> Any:
    model, optimizer = protected(job)
    for step in job.steps(job.batches(dataset(), 3), until=20):
        if step.index == 2:
            model.append(nn.Linear(2, 2))
            nn.init.eye_(model[-1].weight)
            nn.init.zeros_(model[-1].bias)
            optimizer.add_param_group({"params": list(model[-1].parameters())})
        step_once(step, model, optimizer)
    return digest(model)


def test_a_model_may_grow_but_a_later_joiner_is_told_to_build_it_whole() -> None:
    (expected,) = results(grows, 1)
    assert results(grows, 2) == [expected] * 2
    text = outcome(grows, 2, {1: 40})
    assert "model.3.weight is missing on this worker" in text
    assert "before the first step" in text


def thaws_a_layer_of_its_own(job: Job, me: ThreadWorker) -> Any:
    model, optimizer = protected(job)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        if step.index == 2 and me.worker == 1:
            model[0].requires_grad_(False)
        step_once(step, model, optimizer)


def test_workers_that_train_different_parameters_are_told() -> None:
    assert "trains other parameters" in outcome(thaws_a_layer_of_its_own, 2)


def test_parameters_that_only_the_job_has_are_told() -> None:
    trained = TrainedParameters()
    model = nn.Linear(2, 2)
    trained.watch({"model": model})
    both: list[str] | None = ["model.weight", "model.bias"]
    with pytest.raises(StateMismatch, match=r"the job trains model\.new, which this worker"):
        trained.load_state_dict({"now": ["model.weight", "model.new"], "planned": None})
    trained.load_state_dict({"now": ["model.bias"], "planned": both})
    assert trained.state_dict() == {"now": ["model.bias"], "planned": both}
    assert not model.weight.requires_grad
    found = trained.look([])  # a round that does not name it
    assert found is not None
    assert [name for name, _ in found] == both
    found = trained.look()
    assert found is not None
    assert [name for name, _ in found] == ["model.bias"]
    assert trained.state_dict() == {"now": ["model.bias"], "planned": None}
    assert trained.look() is None


def test_a_table_that_changes_its_rows_while_it_is_used_is_refused() -> None:
    trained = TrainedParameters()
    with pytest.raises(UserError, match="max_norm"):
        trained.watch({"model": nn.Embedding(3, 2, max_norm=1.0)})
    with pytest.raises(UserError, match=r"model\.weight has no shape yet: call the model once"):
        trained.watch({"model": nn.LazyLinear(2)})

"""Batches that a script leaves out: the step's means are those of its other batches."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.records.ledger import (
    HeaderLine,
    LedgerEntry,
    LedgerWriter,
    Place,
    ledger_path,
)
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.job import Job
from loop_kit import Script, dataset, digest, net, protected, results
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

STEPS = 6
EMPTY_AT = (2, 4)  # steps in which no batch counts
PLAN = SamplePlan(length=70, batch_size=3, virtual_ranks=4, seed=0)


def alike(script: Script) -> Any:
    """Run a script alone, on two workers, and on three with a death; return the common result."""
    (expected,) = results(script, 1)
    assert results(script, 2) == [expected] * 2
    assert set(map(repr, results(script, 3, {1: 9}))) == {repr(expected)}
    return expected


def counts(x: torch.Tensor) -> bool:
    return bool(x[0, 0] > 0)


def per_sample(model: torch.nn.Module, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    found: torch.Tensor = (model(x) - y).square().mean(dim=1)
    return found


def skipping(job: Job, me: ThreadWorker) -> Any:
    model, optimizer = protected(job)
    losses = []
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        for x, y in step:
            if counts(x):
                step.backward(per_sample(model, x, y).mean())
            else:
                step.skip()
        losses.append(step.loss)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model), losses[-1:]


def weighing(job: Job, me: ThreadWorker) -> Any:
    """Leaves out batches by their weight, where the loss is no number."""
    model, optimizer = protected(job)
    losses = []
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        for x, y in step:
            kept = counts(x)
            loss = per_sample(model, x, y).sum() if kept else per_sample(model, x, y)[:0].mean()
            step.backward(loss, weight=len(x) if kept else 0)
        losses.append(step.loss)
        optimizer.step()
        optimizer.zero_grad()
    return digest(model), losses[-1:]


@pytest.mark.parametrize("script", [skipping, weighing])
def test_the_means_are_those_of_the_batches_that_count(script: Script) -> None:
    _, (last,) = alike(script)
    model, data, losses = net(), dataset(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    for step in range(STEPS):
        tasks = [data[task.tolist()] for task in PLAN.step_tasks(step)]
        kept = [per_sample(model, x, y) for x, y in tasks if len(x) and counts(x)]
        loss = torch.cat(kept).mean()
        losses.append(loss.item())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    assert last == pytest.approx(losses[-1], rel=1e-4)
    assert any(not counts(data[task.tolist()][0]) for task in PLAN.step_tasks(0))


def sometimes_empty(job: Job, me: ThreadWorker) -> Any:
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-2)
    scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
    job.protect(model=model, optimizer=optimizer, scaler=scaler)
    for step in job.steps(job.batches(dataset(), 3), until=STEPS):
        empty = step.index in EMPTY_AT
        for x, y in step:
            if step.index == EMPTY_AT[0]:
                step.skip()
            else:
                step.backward(
                    per_sample(model, x, y)[: 0 if empty else None].sum(),
                    scaler,
                    weight=0 if empty else len(x),
                )
        before = digest(model)
        scaler.step(optimizer)
        scaler.update()
        assert (digest(model) == before) == empty == math.isnan(step.loss)
        optimizer.zero_grad()
    return digest(model), scaler.state_dict()


def test_a_step_in_which_no_batch_counts_has_gradients_of_zeros() -> None:
    alike(sometimes_empty)


def test_the_first_step_in_which_no_batch_counts_is_named() -> None:
    def run(job: Job, me: ThreadWorker) -> None:
        sometimes_empty(job, me)
        job._loops.end_open_loop()
        job._loops.wait_for_others()

    spec = with_settings(SPEC, {"workers.nproc": 2, "workers.virtual": 4, "nodes.lease_s": 20.0})
    cluster = ThreadCluster(spec, run, {})
    assert cluster.run() == ""
    (told,) = (text for text in cluster.told("script") if "no batch" in text)
    assert told.startswith(f"no batch of step {EMPTY_AT[0]} counts")


def test_a_batch_is_left_out_once_and_in_place_of_backward() -> None:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, _ = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=1):
            with pytest.raises(UserError, match="without a new batch"):
                step.skip()
            for x, y in step:
                loss = per_sample(model, x, y).mean()
                if step.virtual_rank == 0:
                    step.skip()
                    with pytest.raises(UserError, match="without a new batch"):
                        step.skip()
                    with pytest.raises(UserError, match="without a new batch"):
                        step.backward(loss)
                else:
                    step.backward(loss, last=False, retain_graph=True)
                    with pytest.raises(UserError, match=r"in place of step\.backward"):
                        step.skip()
                    step.backward(loss)
        return True

    assert results(script, 1) == [True]


def test_the_ledger_counts_the_samples_that_were_left_out(tmp_path: Any) -> None:
    writer = LedgerWriter(ledger_path(tmp_path, 0, 1))
    writer.begin(HeaderLine(seed=0, virtual_ranks=4, plan=PLAN.to_dict(), worker=0, incarnation=1))
    for step in range(3):
        tasks = PLAN.step_tasks(step)
        writer.append(
            LedgerEntry(
                place=Place(step, step),
                view=1,
                hosts=[(0, 1)] * 4,
                counts=list(map(len, tasks)),
                digests=list(map(PLAN.digest_of, tasks)),
                loss=1.0,
                losses=[math.nan, 1.0, math.nan, 2.0] if step else [1.0] * 4,
            )
        )
    writer.close()
    found = verify(tmp_path, SamplePlan.from_dict)
    assert found.ok, found.findings
    assert (found.skipped, found.skipped_in, found.dropped) == (12, 2, 0)

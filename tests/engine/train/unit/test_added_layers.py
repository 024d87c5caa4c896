"""Tests that a layer which is added between steps is named long before a worker joins."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from holdfast.engine.core.errors import StateMismatch
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.train.job import Job
from loop_kit import dataset, protected, step_once
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

ADDED_AT = 3


def events(workers: int, what: str) -> list[str]:
    """Run a script that adds something at a step; returns the lines of the event log about it."""

    def script(job: Job, me: ThreadWorker) -> None:
        model, optimizer = protected(job)
        for step in job.steps(job.batches(dataset(), 3), until=6):
            if step.index == ADDED_AT and what == "layer":
                extra = nn.Linear(2, 2)
                model.add_module("extra", extra)
                optimizer.add_param_group({"params": list(extra.parameters())})
            elif step.index == ADDED_AT and what == "buffer":
                model.register_buffer("mean", torch.zeros(2))
            elif step.index == ADDED_AT:
                next(model.parameters()).requires_grad_(False)
            step_once(step, model, optimizer)

    given = {"workers.nproc": workers, "workers.virtual": 4}
    cluster = ThreadCluster(with_settings(SPEC, given), script)
    if cluster.run():  # a worker that a busy machine starts late is the joiner of the event
        assert what != "freeze", cluster.errors
        assert all(isinstance(error, StateMismatch) for error in cluster.errors), cluster.errors
    return [text for text in cluster.told("script") if "after its first step" in text]


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.slow), 3])
def test_a_layer_that_a_step_adds_is_named_once(workers: int) -> None:
    (text,) = events(workers, "layer")
    assert "model.extra.weight" in text


def test_a_buffer_that_a_step_adds_is_named() -> None:
    (text,) = events(2, "buffer")
    assert "model.mean" in text


def test_a_parameter_that_is_frozen_is_no_new_one() -> None:
    assert not events(2, "freeze")

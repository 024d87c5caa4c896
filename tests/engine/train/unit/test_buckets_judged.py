"""Gradients of several types travel in several buckets: each of them is judged."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.train.job import Job
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

BROKEN = 3  # this step has a gradient that is not finite


@pytest.mark.parametrize("workers", [1, 2])
@pytest.mark.parametrize("broken", [torch.float32, torch.float64])
def test_a_number_that_is_none_is_noticed_in_any_bucket(broken: torch.dtype, workers: int) -> None:
    data = TensorDataset(torch.arange(48.0).reshape(24, 2))

    def script(job: Job, me: ThreadWorker) -> None:
        layers = nn.ModuleList([nn.Linear(2, 1), nn.Linear(2, 1, dtype=torch.float64)])
        optimizer = torch.optim.SGD(layers.parameters(), lr=1e-3)
        job.protect(layers=layers, optimizer=optimizer)
        for step in job.steps(job.batches(data, 2), until=5):
            for (given,) in step:
                loss = given.new_zeros(())
                for layer in layers:
                    kind = layer.weight.dtype
                    found = layer(given.to(kind)).mean()
                    if step.index == BROKEN and kind == broken:
                        found = found * float("inf") * 0.0
                    loss = loss + found.float()
                step.backward(loss)
            if step.index != BROKEN:
                optimizer.step()
            optimizer.zero_grad()
        job._loops.end_open_loop()
        job._loops.wait_for_others()

    settings = {"workers.nproc": workers, "workers.virtual": 4}
    cluster = ThreadCluster(with_settings(SPEC, settings), script)
    assert cluster.run() == ""
    assert cluster.errors == []
    told = [text for _, text in cluster.events if "not finite" in text]
    assert len(told) == 1
    assert told[0].startswith(f"the gradient of step {BROKEN} is not finite")

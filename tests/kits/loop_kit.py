"""Runs a script as a whole job in threads: alone, on several workers, with deaths in between."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.types import WorkerId
from holdfast.engine.train.job import Job
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

Script = Callable[[Job, ThreadWorker], Any]
LEASE_S = 20.0
DEATHS = 6  # at exchanges all over a run


def results(
    script: Script,
    workers: int,
    kill_at: dict[int, int] | None = None,
    settings: dict[str, Any] | None = None,
    *,
    all_return: bool = True,
    waits: bool = False,
    may_survive: bool = False,
) -> list[Any]:
    """Run a script; return its results on the workers that have finished it.

    `settings`: options of the job, besides the number of workers. `all_return`: without deaths all
    workers must reach the end. `waits`: wait for dead workers, until they have joined again.
    `may_survive`: a run may end before the death that it is to have."""
    found: dict[WorkerId, Any] = {}

    def run(job: Job, me: ThreadWorker) -> None:
        returned = script(job, me)
        job._loops.end_open_loop()
        job._loops.wait_for_others()
        found[me.worker] = returned

    # No node goes silent here, so threads that a busy machine holds up keep their lease.
    given = {"workers.nproc": workers, "workers.virtual": 4, "nodes.lease_s": LEASE_S}
    given |= settings or {}
    spec = with_settings(SPEC, given)
    at = {WorkerId(worker): number for worker, number in (kill_at or {}).items()}
    cluster = ThreadCluster(spec, run, at, waits=waits)
    outcome = cluster.run()
    assert not cluster.errors, cluster.errors
    assert outcome == ""
    newest = [worker.incarnation for worker in cluster.workers.values()]
    made = {worker.worker: worker.exchanges for worker in cluster.workers.values()}
    died = max(newest) > 1 or len(found) < workers
    assert died or not kill_at or may_survive, (kill_at, made)
    assert found
    # A worker that dies at the end may not be needed again.
    assert kill_at or not all_return or len(found) == workers, cluster.events
    return list(found.values())


def everywhere(script: Script) -> Any:
    """Run a script alone, on 2 and 4 workers and with deaths; return their common result."""
    (expected,) = results(script, 1)
    for workers in (2, 4):
        assert results(script, workers) == [expected] * workers
    exchanges = count_exchanges(script, expected)
    for i in range(DEATHS):
        death = 3 + i * (exchanges - 5) // (DEATHS - 1)  # the last but one is not too late for one
        # A run that makes some exchanges less may end before the last of these deaths.
        late = i == DEATHS - 1
        found = results(script, 3, {i % 3: death}, may_survive=late)
        assert set(map(repr, found)) == {repr(expected)}
    return expected


def count_exchanges(script: Script, expected: Any) -> int:
    """Run a script on 3 workers; return the exchanges of the worker that makes the fewest.

    The number differs by some per cent from run to run, with the turns that sums are made in.
    """
    found: list[int] = []

    def counts(job: Job, me: ThreadWorker) -> Any:
        returned = script(job, me)
        found.append(me.exchanges)
        return returned

    assert results(counts, 3) == [expected] * 3
    return min(found)


def net(inputs: int = 6, seed: int = 3) -> nn.Module:
    """Return a model that does not depend on torch's own generator, which all threads share."""
    model = nn.Sequential(nn.Linear(inputs, 9), nn.Tanh(), nn.Linear(9, 2))
    generator = torch.Generator().manual_seed(seed)
    for parameter in model.parameters():
        nn.init.normal_(parameter, generator=generator)
    return model


def dataset(count: int = 70) -> TensorDataset:
    inputs = torch.randn(count, 6, generator=torch.Generator().manual_seed(5))
    return TensorDataset(inputs, inputs[:, :2].sin())


def digest(*modules: nn.Module) -> str:
    found = hashlib.sha256()
    for module in modules:
        for value in module.state_dict().values():
            found.update(value.numpy().tobytes())
    return found.hexdigest()[:16]


def protected(job: Job) -> tuple[nn.Module, torch.optim.Optimizer]:
    model = net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    return model, optimizer


def step_once(step: Any, model: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    for x, y in step:
        step.backward(nn.functional.mse_loss(model(x), y))
    optimizer.step()
    optimizer.zero_grad()

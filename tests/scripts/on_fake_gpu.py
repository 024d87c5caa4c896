"""A training script whose parameters lie on the fake GPU of tests/kits/fake_gpu.py, or on the host.

--kill STEP:WORKERS kills the first incarnations of those workers in that step; after the step
--rejoin, steps are slow until there are again all the members of the beginning.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

import holdfast

sys.path.insert(0, str(Path(__file__).parents[1] / "kits"))
import fake_gpu

PATIENCE_S = 3.0  # for each slow step


def digest(tensors: list[torch.Tensor]) -> str:
    found = hashlib.sha256()
    for each in tensors:
        found.update(each.detach().cpu().contiguous().numpy().tobytes())
    return found.hexdigest()


def kill(words: str, step: int, job: holdfast.Job) -> None:
    at, _, workers = words.partition(":")
    first = os.environ.get("HOLDFAST_INCARNATION") == "1"
    if first and step == int(at) and str(job.worker) in workers.split(","):
        os.kill(os.getpid(), signal.SIGKILL)


def wait_for_all(job: holdfast.Job) -> None:
    deadline = time.monotonic() + PATIENCE_S
    wanted = job._environment.spec.workers.nproc
    while (view := job._driver.view) is not None and len(view.members) < wanted:
        if job._driver.pending or time.monotonic() > deadline:
            return
        time.sleep(0.005)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--host", action="store_true")
    parser.add_argument("--kill", default="-1:")
    parser.add_argument("--rejoin", type=int, default=1 << 30)
    options = parser.parse_args()
    patch = pytest.MonkeyPatch()
    if not options.host:
        fake_gpu.install(patch)
    job = holdfast.join()
    model = nn.Sequential(nn.Linear(6, 64), nn.BatchNorm1d(64), nn.Tanh(), nn.Linear(64, 2))
    if not options.host:
        fake_gpu.move(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    inputs = torch.randn(200, 6, generator=torch.Generator().manual_seed(5))
    data = job.batches(torch.utils.data.TensorDataset(inputs), batch_size=3)
    for step in job.steps(data, until=options.steps):
        for (x,) in step:
            x = x if options.host else fake_gpu.on_gpu(x)
            step.backward(model(x).square().mean())
            kill(options.kill, step.index, job)
        optimizer.step()
        optimizer.zero_grad()
        if step.index >= options.rejoin:
            wait_for_all(job)
    if job.is_leader:
        kept = [v for held in optimizer.state.values() for v in held.values()]
        print(digest([*model.state_dict().values(), *kept]), flush=True)


if __name__ == "__main__":
    main()

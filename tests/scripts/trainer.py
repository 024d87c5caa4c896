"""The training script of the process tests: every kind of state, and faults at exact points.

--fault SIGNAL:POINT:STEP:WORKERS strikes the first incarnations of those workers with a real signal
when they reach that point of that step (several: repeat it). EXIT instead of a signal calls
os._exit(0), FULL writes to a full disk; EXITS and FULLS do so in every incarnation. --rejoin STEP
waits after that step until a lost worker is ready to come back, so that short runs see joins;
--until-members STEP COUNT waits after that step until there are COUNT members, or are about to be;
--hold STEP FILE until there is that file. The last line printed is the SHA-256 of everything
protected.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import signal
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

import holdfast
from holdfast.engine.train.checkpoint import state, transfer
from holdfast.engine.train.checkpoint.sharded_optimizers import GatheredState, ShardedOptimizers
from holdfast.engine.train.checkpoint.state import PROTECTED_AS, Extent
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.step import bucket_sums, engine
from holdfast.engine.train.step import reduction as exchange

STATE_POINTS = ("donate", "receive", "load", "open")


class Net(nn.Module):
    """BatchNorm, dropout, two dtypes, a parameter used now and then and one never used."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(20, 64)
        self.norm = nn.BatchNorm1d(64)
        self.drop = nn.Dropout(0.2)
        self.rare = nn.Linear(64, 64)
        self.never = nn.Linear(3, 3)
        self.low = nn.Linear(64, 64).to(torch.bfloat16)
        self.last = nn.Linear(64, 5)
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += len(x)
        hidden = self.drop(torch.relu(self.norm(self.first(x))))
        if x[0, 0] > 0:
            hidden = hidden + self.rare(hidden)
        hidden = hidden + self.low(hidden.to(torch.bfloat16)).float()
        return self.last(hidden)


class Faults:
    """Strikes this process when it reaches a named point."""

    def __init__(self, specs: list[str], job: holdfast.Job) -> None:
        self.step = -1
        self._mine: list[tuple[str, str, int]] = []
        first = os.environ.get("HOLDFAST_INCARNATION") == "1"
        for spec in specs:
            name, point, step, workers = spec.split(":")
            theirs = point in ("receive", "load")  # only a later incarnation ever receives
            second = os.environ.get("HOLDFAST_INCARNATION") == "2"
            strikes = name in ("EXITS", "FULLS") or (second if theirs else first)
            if str(job.worker) in workers.split(",") and strikes:
                self._mine.append((name, point, int(step)))

    def at(self, point: str) -> None:
        for name, where, step in self._mine:
            if where == point and (step == self.step or point in STATE_POINTS):
                if name in ("EXIT", "EXITS"):
                    os._exit(0)
                if name in ("FULL", "FULLS"):
                    Path("/dev/full").write_text("a line of a log")
                os.kill(os.getpid(), getattr(signal, name))

    def install(self, model: nn.Module) -> None:
        """Wrap the library's own steps, so that the strike is at an exact place inside them."""
        model.last.weight.register_hook(lambda grad: self.at("backward"))
        _wrap(bucket_sums.BucketSum, "begin", after=lambda: self.at("gather"))
        _wrap(bucket_sums.BucketSum, "advance", after=lambda: self.at("spread"))
        _wrap(exchange.TableGather, "begin", after=lambda: self.at("table"))
        gather = engine.all_gather

        def gather_votes(transport: object, layout: object, mine: object, tag: int) -> object:
            votes = tag == engine.TAG_VOTE
            self.at("vote" if votes else "gather_other")
            found = gather(transport, layout, mine, tag)
            self.at("voted" if votes else "gathered_other")
            return found

        engine.all_gather = gather_votes
        _wrap(transfer.StateSync, "_donate", before=lambda: self.at("donate"))
        _wrap(transfer.StateSync, "_receive", before=lambda: self.at("receive"))
        _wrap(state, "apply", before=lambda: self.at("load"))
        _wrap(ShardedOptimizers, "exchange", lambda: self.at("update"), lambda: self.at("updated"))
        original = engine.Engine._open

        def open_view(engine_self: engine.Engine, view: object, *rest: object) -> None:
            if view.number > 1:
                self.at("open")
            original(engine_self, view, *rest)

        engine.Engine._open = open_view


def _wrap(owner: object, name: str, before=lambda: None, after=lambda: None) -> None:
    original = getattr(owner, name)

    def wrapped(*args: object, **kwargs: object) -> object:
        before()
        result = original(*args, **kwargs)
        after()
        return result

    setattr(owner, name, wrapped)


def digest(trees: dict[str, Any]) -> str:
    """Digest the states of all objects, in whatever order an optimizer keeps its own."""
    kept = trees["optimizer"]["state"]
    trees["optimizer"]["state"] = {place: kept[place] for place in sorted(kept)}
    skeleton, tensors = state.flatten(trees, "state")
    found = hashlib.sha256(skeleton)
    for tensor in tensors:
        found.update(as_bytes(tensor).numpy().tobytes())
    return found.hexdigest()


def gathered(job: holdfast.Job) -> dict[str, Any]:
    """Return the whole state, of which this worker has a share; all workers do so together."""
    sharding = job._loops.script._data.sharding
    skeleton, found = GatheredState(sharding).capture(
        lambda _, tensors, __: [Extent(i, 0, each.nbytes) for i, each in enumerate(tensors)]
    )
    return state.restore(skeleton, [each.tensor.clone() for each in found])


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=12)
    parser.add_argument("--task-s", type=float, default=0.0)
    parser.add_argument("--fault", action="append", default=[])
    parser.add_argument("--rejoin", type=int, action="append", default=[])
    parser.add_argument("--until-members", nargs=2, type=int, default=(-1, 0))
    parser.add_argument("--hold", nargs=2, default=("-1", ""))
    parser.add_argument("--loaders", type=int, default=0)
    parser.add_argument("--all", action="store_true", help="every worker prints its digest")
    parser.add_argument("--gather", action="store_true", help="workers hold shares of the state")
    options = parser.parse_args()
    job = holdfast.join()
    model = Net()
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    schedule = torch.optim.lr_scheduler.MultiStepLR(optimizer, [4, 8])
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, growth_interval=3)
    parts = dict(model=model, optimizer=optimizer, schedule=schedule, scaler=scaler)
    job.protect(**parts)
    generator = torch.Generator().manual_seed(7)
    inputs = torch.randn(203, 20, generator=generator)
    dataset = torch.utils.data.TensorDataset(inputs, inputs[:, :5].argmax(1))
    data = job.batches(dataset, batch_size=6, num_workers=options.loaders)
    faults = Faults(options.fault, job)
    faults.install(model)
    whole = ""
    for step in job.steps(data, until=options.steps):
        faults.step = step.index
        for x, y in step:
            faults.at("forward")
            time.sleep(options.task_s)  # the work of a task
            step.backward(nn.functional.cross_entropy(model(x), y), scaler=scaler)
        faults.at("optimizer")
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
        schedule.step()
        optimizer.zero_grad()
        faults.at("stepped")
        if options.gather and step.index == options.steps - 1:
            found = gathered(job)
            found.pop(PROTECTED_AS)
            whole = digest(found)
        while step.index == int(options.hold[0]) and not os.path.exists(options.hold[1]):
            time.sleep(0.005)
        if step.index == options.until_members[0]:
            while len(job._driver.view.members) < options.until_members[1]:
                if job._driver.pending:
                    break
                time.sleep(0.005)
        if step.index in options.rejoin:
            view, everyone = job._driver.view, job._environment.spec.workers.nproc
            while len(view.members) < everyone and not job._driver.pending:
                if job._driver.view.number != view.number:
                    break
                time.sleep(0.005)
    if job.is_leader or options.all:
        faults.at("end")
        states = {name: each.state_dict() for name, each in parts.items()}
        print(whole or digest(states), flush=True)


if __name__ == "__main__":
    main()

"""Trains a recurrent model whose hidden state, and whose source of data, belong to virtual ranks.

Each virtual rank has a simulator with a generator of its own, and a hidden state that goes on from
one step to the next. The losses of all tasks are gathered, and chained in `job.values`.

--hold STEP FILE makes every worker wait within its first task of that step, after the task has
changed its states, until there is FILE; meanwhile FILE.WORKER has the worker's process id.
--rejoin STEP waits after that step until a lost worker is ready to come back. The last line printed
is the SHA-256 of everything that the job carries.
"""

from __future__ import annotations

import argparse
import hashlib
import os
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

import holdfast
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.exchange.tensor_bytes import as_bytes

WIDTH, BATCH, LENGTH = 16, 3, 5


class Source:
    """Makes sequences [LENGTH, BATCH, 2] of points that wander on."""

    def __init__(self, vrank: int) -> None:
        self.random = np.random.default_rng([7, vrank])
        self.at = np.zeros((BATCH, 2), np.float32)
        self.moves = 0

    def sequence(self) -> torch.Tensor:
        found = []
        for _ in range(LENGTH):
            noise = self.random.normal(size=self.at.shape).astype(np.float32)
            self.at = 0.9 * self.at + 0.3 * noise + 0.1 * np.float32(self.moves % 3)
            self.moves += 1
            found.append(self.at)
        return torch.from_numpy(np.stack(found))

    def state_dict(self) -> dict[str, Any]:
        return {"random": self.random.bit_generator.state, "at": self.at, "moves": self.moves}

    def load_state_dict(self, kept: dict[str, Any]) -> None:
        self.random.bit_generator.state = kept["random"]
        self.at, self.moves = kept["at"], kept["moves"]


class Model(nn.Module):
    """Predicts where a point goes next from its earlier positions."""

    def __init__(self) -> None:
        super().__init__()
        self.gru = nn.GRU(2, WIDTH)
        self.drop = nn.Dropout(0.1)
        self.out = nn.Linear(WIDTH, 2)

    def forward(self, x: torch.Tensor, hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        outputs, hidden = self.gru(x, hidden)
        return self.out(self.drop(outputs)), hidden.detach()


def digest(trees: dict[str, Any]) -> str:
    skeleton, tensors = state.flatten(trees, "state")
    found = hashlib.sha256(skeleton)
    for tensor in tensors:
        found.update(as_bytes(tensor).numpy().tobytes())
    return found.hexdigest()


def hold(job: holdfast.Job, file: Path) -> None:
    mark = Path(f"{file}.{job.worker}")
    written = Path(f"{mark}.{os.getpid()}")
    written.write_text(str(os.getpid()))
    written.rename(mark)  # so that it is never seen half written
    while not file.exists():
        time.sleep(0.005)


def wait_for_lost(job: holdfast.Job) -> None:
    view, everyone = job._driver.view, job._environment.spec.workers.nproc
    while len(view.members) < everyone and not job._driver.pending:
        if job._driver.view.number != view.number:
            break
        time.sleep(0.005)


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=16)
    parser.add_argument("--task-s", type=float, default=0.0)
    parser.add_argument("--hold", nargs=2, default=("-1", ""))
    parser.add_argument("--rejoin", type=int, default=-1)
    parser.add_argument("--forget", action="store_true", help="begin each step's hidden state anew")
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    model = Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    job.protect(model=model, optimizer=optimizer)
    job.values["chain"] = ""
    hidden = job.rank_state("hidden", lambda vrank: 0.1 * torch.randn(1, BATCH, WIDTH))
    sources = job.rank_state("source", Source)
    for step in job.steps(until=options.steps):
        for _ in step:
            x = sources.value.sequence()
            before = torch.zeros_like(hidden.value) if options.forget else hidden.value
            predicted, hidden.value = model(x[:-1], before)
            if step.index == int(options.hold[0]):
                hold(job, Path(options.hold[1]))
            time.sleep(options.task_s)  # the work of a task
            loss = (predicted - x[1:]).square().mean()
            step.gather("loss", {"vrank": step.virtual_rank, "loss": loss})
            step.backward(loss)
        told = [(each["vrank"], each["loss"].item().hex()) for each in step.gathered["loss"]]
        chain = job.values["chain"] + repr(told)
        job.values["chain"] = hashlib.sha256(chain.encode()).hexdigest()
        optimizer.step()
        optimizer.zero_grad()
        if step.index == options.rejoin:
            wait_for_lost(job)
    if job.is_leader:
        kept = {
            "model": model.state_dict(),
            "optimizer": optimizer.state_dict(),
            "chain": job.values["chain"],
            "hidden": [hidden[vrank] for vrank in range(len(hidden))],
            "source": [sources[vrank] for vrank in range(len(sources))],
        }
        print(digest(kept), flush=True)


if __name__ == "__main__":
    main()

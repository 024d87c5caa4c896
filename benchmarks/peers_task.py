"""The training that all scripts of `make bench-peers` share: model, data, pace and records.

It needs torch alone, because the peers' environment has no Holdfast. Each process writes a file of
records, one JSON object a line, with the machine's monotonic clock:

    begin   it has read a batch for a step: `samples`, and `number`, which counts its batches
    commit  the step of its batches `first` to `number` is part of the model: `parts` batches of all
            processes went into the step, and `counted` states whether these did
    drop    the framework gave that step up
    end     the training is over: `digest` of the parameters
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn

WORKERS = 3
BATCH = 8
WIDTH = 256
PACE_S = 0.2  # every step rests for this long, besides its arithmetic
CHECKPOINT_STEPS = 10
SEED = 17
COLLECTIVE_S = 10.0  # torchrun and Ray Train: the time-out of gloo


def folder() -> Path:
    """Return the folder of this run, where records and checkpoints go."""
    return Path(os.environ["PEERS_FOLDER"])


def step_count() -> int:
    """Return the number of steps of the run: one epoch."""
    return int(os.environ["PEERS_STEPS"])


def make_data(steps: int) -> torch.utils.data.TensorDataset:
    """Return one epoch's samples: each is its own number, and a vector made from the seed."""
    count = steps * WORKERS * BATCH
    values = torch.randn(count, WIDTH, generator=torch.Generator().manual_seed(SEED))
    return torch.utils.data.TensorDataset(torch.arange(count), values)


def make_model() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model and its optimizer, with the same first parameters in all processes."""
    torch.manual_seed(SEED)
    model = nn.Sequential(nn.Linear(WIDTH, 1024), nn.ReLU(), nn.Linear(1024, WIDTH))
    return model, torch.optim.AdamW(model.parameters())


def paced_loss(model: nn.Module, values: torch.Tensor) -> torch.Tensor:
    """Return a batch's loss after the fixed time that a step takes."""
    loss = (model(values) - values).square().mean()
    time.sleep(PACE_S)
    return loss


def digest_of(model: nn.Module) -> str:
    """Return the SHA-256 of a model's parameters and buffers."""
    sums = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        sums.update(name.removeprefix("module.").encode())
        sums.update(tensor.contiguous().numpy().tobytes())
    return sums.hexdigest()


def save_whole(state: dict[str, Any], path: Path) -> None:
    """Save a state so that a kill leaves the old file or the new one."""
    partial = path.with_suffix(f".{os.getpid()}")
    torch.save(state, partial)
    os.replace(partial, path)


class Records:
    """Writes down the steps of one process, for the figures of the sheet."""

    def __init__(self, worker: int, attempt: int = 0) -> None:
        """Prepare the file. `attempt` grows when a framework starts all processes again."""
        self._path = folder() / "records" / f"{os.getpid()}.jsonl"
        self._common = {"worker": worker, "pid": os.getpid(), "attempt": attempt}
        self._number = 0
        self._first = 1

    def begin(self, step: int, samples: torch.Tensor) -> None:
        """Record a batch whose computing begins."""
        self._number += 1
        self._write(kind="begin", step=step, samples=samples.tolist())

    def commit(self, step: int, parts: int = WORKERS, counted: bool = True) -> None:
        """Record that the step of the newest batches is part of the model."""
        self._write(kind="commit", step=step, first=self._first, parts=parts, counted=counted)
        self._first = self._number + 1

    def drop(self, step: int) -> None:
        """Record that the newest batches were computed without use."""
        self._write(kind="drop", step=step, first=self._first)
        self._first = self._number + 1

    def end(self, step: int, model: nn.Module) -> None:
        """Record the model that has come out."""
        self._write(kind="end", step=step, digest=digest_of(model))

    def _write(self, **values: object) -> None:
        line = {"at": time.monotonic(), **self._common, "number": self._number, **values}
        self._path.parent.mkdir(parents=True, exist_ok=True)
        with self._path.open("ab", buffering=0) as file:
            file.write(json.dumps(line).encode() + b"\n")

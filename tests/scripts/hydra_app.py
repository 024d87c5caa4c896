"""Trains under @hydra.main, which may change the working directory; the tests give the config.

`data` is a file in the directory from which the job starts, `best` one in the present directory. It
fails at step `bug` or `wrong`, and waits at step `hold` for a file named `go` next to this script.
The last line printed is the SHA-256 of the model.
"""

from __future__ import annotations

import hashlib
import os
import time
from pathlib import Path

import hydra
import torch
from omegaconf import DictConfig
from torch import nn
from torch.utils.data import TensorDataset

import holdfast


@hydra.main(version_base=None, config_path="conf", config_name="config")
def main(config: DictConfig) -> None:
    job = holdfast.join()
    rows = torch.load(hydra.utils.to_absolute_path(config.data), weights_only=True)
    model = nn.Linear(6, 1)
    optimizer = torch.optim.AdamW(model.parameters(), lr=config.lr)
    job.protect(model=model, optimizer=optimizer)
    for step in job.steps(job.batches(TensorDataset(rows), 4), until=config.steps):
        for (x,) in step:
            step.backward((model(x) - x.sum(1, keepdim=True)).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if step.index == config.bug:
            raise RuntimeError("a bug of the script")
        if step.index == config.wrong:
            job.batches(TensorDataset(rows), -1)
        while step.index == config.hold and not Path(__file__).with_name("go").exists():
            time.sleep(0.01)
    if job.is_leader:
        torch.save(model.state_dict(), config.best)
        digest = hashlib.sha256()
        for value in model.state_dict().values():
            digest.update(value.numpy().tobytes())
        print("folder", os.getcwd())
        print(digest.hexdigest())


if __name__ == "__main__":
    main()

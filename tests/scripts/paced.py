"""Trains slowly until a file appears, then as fast as it can; the last line is the digest.

paced.py FILE [STEPS [PACE_S]]

The worker whose number FILE.late holds is late in every step that it computes. The first one that
finds FILE.hungry removes it, and takes as many bytes of memory as it says.
"""

from __future__ import annotations

import hashlib
import os
import sys
import time
from pathlib import Path

import torch

import holdfast

PACE_S, LATE_S = 0.3, 5.0  # seconds for each step, and for each task of a late worker


def is_late(path: str, worker: int) -> bool:
    """Return whether a file holds a worker's number."""
    try:
        return Path(path).read_text() == str(worker)
    except FileNotFoundError:
        return False


def take_memory(path: str) -> bytearray | None:
    """Take the memory that a file asks for, once among all workers."""
    mine = f"{path}.{os.getpid()}"
    try:
        os.rename(path, mine)
    except FileNotFoundError:
        return None
    return bytearray(b"x") * int(Path(mine).read_text())


def main(go: str, steps: int = 300, pace_s: float = PACE_S) -> None:
    torch.manual_seed(0)
    job = holdfast.join()
    model = torch.nn.Sequential(torch.nn.Linear(20, 40), torch.nn.Dropout(0.2), torch.nn.ReLU())
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    taken = None
    dataset = torch.utils.data.TensorDataset(torch.randn(256, 20))
    for step in job.steps(job.batches(dataset, batch_size=4), until=steps):
        taken = taken or take_memory(f"{go}.hungry")
        for (x,) in step:
            if is_late(f"{go}.late", job.worker):
                time.sleep(LATE_S)
            step.backward((model(x) - 1).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        if not os.path.exists(go):
            time.sleep(pace_s)
    if job.is_leader:
        digest = hashlib.sha256()
        for value in model.state_dict().values():
            digest.update(value.numpy().tobytes())
        print(digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main(sys.argv[1], *map(int, sys.argv[2:3]), *map(float, sys.argv[3:]))

"""Trains on records of a file that is verified: python records.py FILE INDEX [MIRROR] [--raise]."""

from __future__ import annotations

import hashlib
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch

import holdfast
from holdfast import VerifiedFiles

RECORD = 64  # bytes
HELD = 10  # after this step it waits for the file of --hold=FILE


class Records:
    """Records of a file, read through its index."""

    def __init__(self, file: str, index: str, mirrors: list[str]) -> None:
        self.files = VerifiedFiles(file, index, mirrors)

    def __len__(self) -> int:
        return self.files.size() // RECORD

    def __getitem__(self, record: int) -> Any:
        data = np.frombuffer(self.files.read(record * RECORD, RECORD), np.uint8)
        return torch.from_numpy(data / 255).float()


def main() -> None:
    job = holdfast.join()
    hold = next((Path(arg[7:]) for arg in sys.argv if arg.startswith("--hold=")), None)
    file, index, *mirrors = [arg for arg in sys.argv[1:] if not arg.startswith("--")]
    model = torch.nn.Linear(RECORD, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
    job.protect(model=model, optimizer=optimizer)
    on_error = "raise" if "--raise" in sys.argv else "quarantine"
    data = job.batches(Records(file, index, mirrors), 4, on_error=on_error, num_workers=1)
    for step in job.steps(data, until=20):
        for batch in step:
            step.backward(model(batch).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        while step.index == HELD and hold is not None and not hold.exists():
            time.sleep(0.01)
    found = hashlib.sha256(model.weight.detach().numpy().tobytes())
    if job.is_leader:
        print(found.hexdigest())


if __name__ == "__main__":
    main()

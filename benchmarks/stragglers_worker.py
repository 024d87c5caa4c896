"""The training script of benchmarks/stragglers.py: STEPS TASK_S OUT.

A task waits, as a host does for its GPU, so that four workers fit on two cores. The leader writes
when each step ended, and the digest of the parameters.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path

import torch
from torch import nn

import holdfast
from holdfast.lab.demo.gpt import digest


def main() -> None:
    steps, task_s, out = int(sys.argv[1]), float(sys.argv[2]), Path(sys.argv[3])
    job = holdfast.join()
    model = nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    job.protect(model=model, optimizer=optimizer)
    data = job.batches(torch.utils.data.TensorDataset(torch.randn(4096, 256)), batch_size=4)
    ended = []
    for step in job.steps(data, until=steps):
        for (x,) in step:
            time.sleep(task_s)
            step.backward((model(x) - x).square().mean())
        optimizer.step()
        optimizer.zero_grad()
        ended.append(time.time())
    if job.is_leader:
        out.write_text(json.dumps({"ended": ended, "digest": digest(model.state_dict())}))


if __name__ == "__main__":
    main()

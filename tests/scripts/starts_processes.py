"""Trains, and has started processes that sleep: a child, one in a session of its own, a daemon.

They name a path under the first argument. Training ends once there is the file that the second
argument names.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time

import torch
from torch import nn

import holdfast

folder, go = sys.argv[1:]
job = holdfast.join()
sleep = ["sh", "-c", "sleep 1000; exit", f"{folder}/of-{job.worker}"]
subprocess.Popen(sleep)
subprocess.Popen(sleep, start_new_session=True)
subprocess.run(["sh", "-c", 'setsid "$@" >&- 2>&- & exit', "sh", *sleep], check=True)
model = nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.01)
job.protect(model=model, optimizer=optimizer)
dataset = torch.utils.data.TensorDataset(torch.ones(64, 2))
for step in job.steps(job.batches(dataset, batch_size=2), until=100000):
    for (x,) in step:
        step.backward(model(x).square().mean())
    optimizer.step()
    optimizer.zero_grad()
    time.sleep(0.01)
    if job.agree(os.path.exists(go)):
        break

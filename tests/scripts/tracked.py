"""A training script that logs by the trackers that it is asked for: tracked.py KIND DIR STEPS."""

from __future__ import annotations

import signal
import sys
import time
from pathlib import Path

import torch

import holdfast
from holdfast.reports import trackers
from holdfast.reports.otel import OpenTelemetry

kind, where, steps = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
job = holdfast.join(seed=3)
model = torch.nn.Linear(3, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
if kind == "tensorboard":
    trackers.TensorBoard(job, where)
elif kind == "mlflow":
    trackers.MLflow(job, tracking_uri=f"file://{where}/mlruns")
elif kind == "otel":
    OpenTelemetry(job)
else:
    trackers.WandB(job, mode="offline", dir=where, project="tests")
x = torch.arange(192.0).reshape(64, 3) / 64
data = job.batches(torch.utils.data.TensorDataset(x, x.sum(1, keepdim=True)), batch_size=4)
for step in job.steps(data, until=steps):
    for inputs, targets in step:
        step.backward(torch.nn.functional.mse_loss(model(inputs), targets))
    optimizer.step()
    optimizer.zero_grad()
    step.metrics["rate"] = 0.1 * step.index
    if step.index == steps // 2 and job.is_leader and not (where / "struck").exists():
        (where / "struck").touch()
        signal.raise_signal(signal.SIGKILL)
    if step.index == steps - 2 and job.is_leader:
        while '"resumed"' not in (job.run_dir / "events.jsonl").read_text():
            time.sleep(0.01)

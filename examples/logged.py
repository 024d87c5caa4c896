"""Log to TensorBoard from a job whose workers come and go: each step once, by whoever leads.

    python examples/logged.py --logs logs                       alone
    holdfast run --nproc 4 examples/logged.py --logs logs       on four workers; kill any
    tensorboard --logdir logs

The last line printed is the SHA-256 of the model, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

try:
    from torch.utils.tensorboard import SummaryWriter
except ImportError:
    sys.exit("logged.py needs TensorBoard: pip install tensorboard")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=16, help="samples per virtual rank")
    parser.add_argument("--logs", default="logs", help="where all workers can write")
    options = parser.parse_args()

    job = holdfast.join()
    model = nn.Sequential(nn.Linear(8, 32), nn.Tanh(), nn.Linear(32, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.steps)
    job.protect(model=model, optimizer=optimizer, scheduler=scheduler)
    inputs = torch.randn(4096, 8, generator=torch.Generator().manual_seed(1))
    data = job.batches(TensorDataset(inputs, inputs.sum(1, keepdim=True).sin()), options.batch_size)
    writers: list[SummaryWriter] = []

    def log(step: holdfast.Step) -> None:
        """Write the results of a step; each worker that becomes leader has its own file."""
        if not writers:
            writers.append(SummaryWriter(options.logs))
        writer = writers[0]
        writer.add_scalar("loss", step.loss, step.index)
        for name, value in step.metrics.items():
            writer.add_scalar(name, value, step.index)
        writer.flush()  # lines still in memory are lost with the worker

    job.on_step_end(log)
    for step in job.steps(data, until=options.steps):
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        step.metrics["lr"] = scheduler.get_last_lr()[0]
        optimizer.step()
        optimizer.zero_grad()
        scheduler.step()
    if job.is_leader:
        digest = hashlib.sha256()
        for value in model.state_dict().values():
            digest.update(value.numpy().tobytes())
        print(digest.hexdigest(), flush=True)


if __name__ == "__main__":
    main()

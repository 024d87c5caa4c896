"""Scripts with one mistake each: the first argument names it."""

from __future__ import annotations

import os
import signal
import socket
import sys
import time

import torch
from torch import nn

import holdfast


class Stateless:
    pass


def fill_the_disk_under_the_ledger() -> None:
    """Have this process's next line of the ledger meet a full disk."""
    full = os.open("/dev/full", os.O_WRONLY)
    for name in os.listdir("/proc/self/fd"):
        if "/ledger/" in os.path.realpath(f"/proc/self/fd/{name}"):
            os.dup2(full, int(name))


def main(mistake: str) -> None:
    job = holdfast.join()
    again = os.environ.get("HOLDFAST_INCARNATION") != "1"
    other = job.worker == 1
    width = 7 if (mistake == "other-model" and other) or (mistake == "join" and again) else 8
    model = nn.Linear(8, width)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    job.protect(model=model, optimizer=optimizer)
    if mistake == "again":
        holdfast.join()
    if mistake == "stateless":
        job.protect(thing=Stateless())
    samples = torch.zeros(0 if mistake == "empty" else 64, 8)
    data = job.batches(torch.utils.data.TensorDataset(samples), batch_size=2)
    for step in job.steps(data, until=10):
        if mistake == "raise" and other and step.index == 3:
            raise ValueError("the user's own mistake")
        if step.index == 9 and (mistake == "full" or (mistake == "full for one" and other)):
            fill_the_disk_under_the_ledger()
        if mistake == "exit" and other and step.index == 3:
            sys.exit(7)
        if mistake == "channel" and other and not again and step.index == 3:
            job._driver._link._channel.shutdown(socket.SHUT_RDWR)
            signal.pause()
        if mistake == "join" and step.index == 3:
            if other and not again:
                os.kill(os.getpid(), 9)
            while not job._driver.pending:
                time.sleep(0.005)
        for (x,) in step:
            if mistake == "no-backward":
                continue
            step.backward(model(x).square().mean())
            if mistake == "twice":
                step.backward(model(x).square().mean())
        if mistake == "hang":
            print("step", step.index, flush=True)
            time.sleep(3600)
        if mistake == "crash":
            os.kill(os.getpid(), 11)
        optimizer.step()
        optimizer.zero_grad()
    if mistake == "late" and job.is_leader:
        raise RuntimeError("after the loop")


if __name__ == "__main__":
    main(sys.argv[1])

"""One process of benchmarks/step_cost.py, as a member of a Holdfast job or of a DDP group.

Both train the same model on the same dataset with the same optimizer, each as its users would write
it. The costs of a process are read at the end of a warm-up step and again at the end of the last.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import resource
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from ddp_member import endless_batches, join_group
from torch import nn
from whole_batches import WholeBatches, as_is

import holdfast
from holdfast.lab.demo.gpt import digest

Loss = Callable[[nn.Module, torch.Tensor, torch.Tensor], torch.Tensor]


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """A model and the shape of its inputs; it has ten classes."""

    make: Callable[[], nn.Module]
    shape: tuple[int, ...]
    batch: int
    steps: int
    adam: bool = False


def made_up(shape: tuple[int, ...]) -> WholeBatches:
    """Return inputs of a shape, and ten classes for them."""
    dice = torch.Generator().manual_seed(0)
    inputs = torch.randn(4096, *shape, generator=dice)
    return WholeBatches(inputs, torch.randint(0, 10, (4096,), generator=dice))


def mlp() -> nn.Module:
    """Make a model of 5.6 million parameters in fourteen tensors."""
    inner = [layer for _ in range(5) for layer in (nn.Linear(1024, 1024), nn.ReLU())]
    return nn.Sequential(nn.Linear(320, 1024), nn.ReLU(), *inner, nn.Linear(1024, 10))


def conv() -> nn.Module:
    """Make a small convolutional net with BatchNorm."""

    def block(before: int, after: int) -> list[nn.Module]:
        return [nn.Conv2d(before, after, 3, padding=1), nn.BatchNorm2d(after), nn.ReLU()]

    layers = [*block(3, 32), *block(32, 32), nn.MaxPool2d(2), *block(32, 64), *block(64, 64)]
    head = [nn.MaxPool2d(2), *block(64, 128), nn.AdaptiveAvgPool2d(1), nn.Flatten()]
    return nn.Sequential(*layers, *head, nn.Linear(128, 10))


def small() -> nn.Module:
    """Make a model with steps of about 4 ms, which show the costs that do not grow with it."""
    inner = [layer for _ in range(3) for layer in (nn.Linear(256, 256), nn.ReLU())]
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), *inner, nn.Linear(256, 10))


TASKS = {
    "mlp": Task(make=mlp, shape=(320,), batch=64, steps=30, adam=True),
    "conv": Task(make=conv, shape=(3, 16, 16), batch=32, steps=30),
    "small": Task(make=small, shape=(256,), batch=64, steps=200),
}


class Meter:
    """Reads the costs of this process since the end of step `warm_up` - 1."""

    def __init__(self, steps: int, warm_up: int) -> None:
        self.spent: dict[str, float] = {}  # for each step: seconds, and page faults
        self._counts = steps, warm_up
        self._before: tuple[float, ...] = ()

    def step_ended(self, index: int) -> None:
        steps, warm_up = self._counts
        if index == warm_up - 1:
            self._before = _spent()
        if index == steps - 1:
            names = ("wall_s", "cpu_s", "system_s", "faults")
            pairs = zip(names, self._before, _spent(), strict=True)
            self.spent = {name: (now - then) / (steps - warm_up) for name, then, now in pairs}
            self.spent |= _held()


def _spent() -> tuple[float, ...]:
    used = resource.getrusage(resource.RUSAGE_SELF)  # counts all threads
    cpu_s = used.ru_utime + used.ru_stime
    return time.perf_counter(), cpu_s, used.ru_stime, float(used.ru_minflt)


def _held() -> dict[str, float]:
    """Return the numbers of threads and connections, and the memory of this process alone."""
    sockets = Path("/proc/self/net/tcp").read_text().splitlines()[1:]
    ours = set()
    for each in os.listdir("/proc/self/fd"):
        with contextlib.suppress(FileNotFoundError):  # the folder's own
            ours.add(os.readlink(f"/proc/self/fd/{each}"))
    established = [line.split() for line in sockets if line.split()[3] == "01"]
    rollup = Path("/proc/self/smaps_rollup").read_text().split()
    return {
        "threads": len(list(Path("/proc/self/task").iterdir())),
        "connections": sum(f"socket:[{fields[9]}]" in ours for fields in established),
        "private_mb": int(rollup[rollup.index("Private_Dirty:") + 1]) / 1024,
    }


def _optimizer(task: Task, model: nn.Module) -> torch.optim.Optimizer:
    if task.adam:
        return torch.optim.AdamW(model.parameters(), lr=1e-4)
    return torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9)


def with_holdfast(task: Task, meter: Meter, steps: int) -> tuple[int, nn.Module]:
    job = holdfast.join()
    model = task.make()
    optimizer = _optimizer(task, model)
    job.protect(model=model, optimizer=optimizer)
    data = job.batches(made_up(task.shape), task.batch, drop_last=True, collate_fn=as_is)
    for step in job.steps(data, until=steps):
        for x, y in step:
            step.backward(nn.functional.cross_entropy(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
        meter.step_ended(step.index)
    return job.worker, model


def with_ddp(task: Task, meter: Meter, steps: int) -> tuple[int, nn.Module]:
    rank, world = join_group()
    torch.manual_seed(0)
    model = nn.parallel.DistributedDataParallel(task.make())
    optimizer = _optimizer(task, model)
    batches = endless_batches(made_up(task.shape), task.batch, rank, world, collate_fn=as_is)
    for index, (x, y) in zip(range(steps), batches, strict=False):
        loss = nn.functional.cross_entropy(model(x), y)
        loss.backward()
        loss.item()
        optimizer.step()
        optimizer.zero_grad()
        meter.step_ended(index)
    dist.barrier()
    return rank, model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--library", choices=("ddp", "holdfast"), required=True)
    parser.add_argument("--model", choices=TASKS, required=True)
    parser.add_argument("--out", type=Path, required=True, help="folder for one file a process")
    parser.add_argument("--warm-up", type=int, default=10)
    parser.add_argument("--steps", type=int, help="steps after those; default: by the model")
    options = parser.parse_args()
    task = TASKS[options.model]
    steps = (options.steps or task.steps) + options.warm_up
    meter = Meter(steps, options.warm_up)
    train = with_ddp if options.library == "ddp" else with_holdfast
    rank, model = train(task, meter, steps)
    parameters = sum(p.numel() for p in model.parameters())
    found = {**meter.spent, "parameters": parameters, "digest": digest(model.state_dict())}
    (options.out / f"{rank}.json").write_text(json.dumps(found))


if __name__ == "__main__":
    os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    main()

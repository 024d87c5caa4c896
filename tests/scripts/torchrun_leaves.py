"""A DDP script whose group is destroyed before its model, which no thread may keep from ending."""

import sys

import torch
import torch.distributed as dist
from torch import nn


def main() -> None:
    dist.init_process_group("gloo")
    model = nn.parallel.DistributedDataParallel(nn.Linear(4, 4))
    sys.setswitchinterval(1000.0)  # gloo's thread gets no turn unless this one waits for something
    for _ in range(3):
        model(torch.ones(2, 4)).sum().backward()
    dist.all_reduce(torch.ones(4))
    dist.destroy_process_group()


main()

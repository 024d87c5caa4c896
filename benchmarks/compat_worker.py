"""This is a DDP script as people write them for torchrun; it prints a line after each step."""

import os
import time

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel


def main() -> None:
    dist.init_process_group("gloo")
    model = DistributedDataParallel(torch.nn.Linear(256, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    while True:
        optimizer.zero_grad()
        model(torch.randn(8, 256)).square().mean().backward()
        optimizer.step()
        line = f"{time.time()} {dist.get_rank()} {os.getpid()}\n"
        os.write(1, line.encode())
        time.sleep(0.05)


if __name__ == "__main__":
    main()

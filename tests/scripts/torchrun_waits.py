"""A script for torchrun whose processes meet, and wait until a file is there."""

import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
if dist.get_rank() == 0:
    print("here", flush=True)
while not Path(sys.argv[1]).exists():
    time.sleep(0.01)
dist.barrier()
dist.destroy_process_group()

"""A script for torchrun that saves when it is asked to end.

    torchrun_saves.py FOLDER HOW

HOW: "agrees": all ranks agree to end, and rank 0 saves; "alone": each rank saves by itself, as it
waits; "stubborn": a rank writes that it was asked, and goes on.
"""

import os
import signal
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

folder, how = Path(sys.argv[1]), sys.argv[2]
asked: list[int] = []


def ask(number: int, frame: object) -> None:
    asked.append(number)
    if how != "agrees":
        (folder / f"asked-{rank}-{signal.Signals(number).name}").touch()
    if how == "alone":
        sys.exit(0)


dist.init_process_group("gloo")
rank, restarts = dist.get_rank(), int(os.environ["TORCHELASTIC_RESTART_COUNT"])
for each in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
    signal.signal(each, ask)
print(f"pid {rank} {os.getpid()} {restarts}", flush=True)
if how != "agrees":
    while restarts == 0:
        time.sleep(0.01)
for step in range(1 if restarts else 100_000):
    flag = torch.tensor([len(asked)])
    dist.all_reduce(flag)
    if flag.item():
        if rank == 0:
            (folder / "saved").write_text(str(step))
        break
    time.sleep(0.01)
dist.destroy_process_group()

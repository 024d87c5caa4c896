"""A script for torchrun that goes wrong in the way that its first argument says."""

import json
import os
import sys
import threading
import time

import torch
import torch.distributed as dist

NAMES = (
    *("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "GROUP_RANK", "ROLE_RANK"),
    *("GROUP_WORLD_SIZE", "ROLE_WORLD_SIZE", "ROLE_NAME", "TORCHELASTIC_RESTART_COUNT"),
    *("TORCHELASTIC_MAX_RESTARTS", "TORCHELASTIC_USE_AGENT_STORE", "OMP_NUM_THREADS"),
)
how, *rest = sys.argv[1:]
rank, restarts = int(os.environ["RANK"]), int(os.environ["TORCHELASTIC_RESTART_COUNT"])

if how == "import" and rank == 1:
    import no_such_package  # noqa: F401
dist.init_process_group("gloo")
dist.all_reduce(torch.ones(1))
first = restarts == 0
if how == "tell":
    for name in ("MASTER_ADDR", "MASTER_PORT", "TORCHELASTIC_RUN_ID"):
        assert os.environ[name], name
    said = {name: os.environ.get(name) for name in NAMES}
    ours = [name for name in os.environ if name.startswith("HOLDFAST_")]
    print(json.dumps([said, sys.argv, sys.path[0], ours]), flush=True)
elif how == "count":  # ends by an exit code of its own until it has been restarted twice
    if restarts < 2 and rank == 1:
        sys.exit(7)
elif how == "raise":
    if rank == 1:
        raise ValueError("these data are not to be trained on")
elif how == "hang":  # the others wait in a collective, this one for a lock
    if first and rank == 1:
        threading.Event().wait()
elif how == "spin":  # never idle: only the file tells that no step is done
    step = 0
    while True:
        step += 1
        with open(os.environ["HOLDFAST_HEARTBEAT"], "w") as file:
            file.write(str(step))
        dist.all_reduce(torch.ones(1))
        while first and step == 3:
            pass
        if step == 6:
            break
elif how == "join":
    import holdfast

    holdfast.join()
elif how == "wait":
    print(f"pid {rank} {os.getpid()} 0", flush=True)
    if not os.path.exists(rest[0]):
        time.sleep(1000)
elif how == "thread":
    threading.Thread(target=lambda: (time.sleep(0.5), print("thread ended", flush=True))).start()
dist.barrier()
if how == "quit":
    os._exit(0)
if how != "thread":
    dist.destroy_process_group()
print(f"done {rank} of {dist.get_world_size() if how == 'thread' else ''} {restarts}", flush=True)

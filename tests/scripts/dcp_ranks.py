"""The ranks of test_dcp.py: FOLDER STORE STEP save:RANKS|load:RANKS...

They are forked from this process, which has imported torch, and meet in FOLDER. They save or load
a tensor sharded over all ranks by rows, one by columns, a replicated one, a small module with its
optimizer, and plain values; the loaded values must equal the saved ones on any number of ranks.
"""

from __future__ import annotations

import os
import sys
import traceback

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Replicate, Shard, distribute_tensor

from holdfast.engine.train.checkpoint.dcp import HoldfastReader, HoldfastWriter

ROWS, COLUMNS = 24, 1000


def whole(seed: int) -> torch.Tensor:
    return torch.randn(ROWS, COLUMNS, generator=torch.Generator().manual_seed(seed))


def make(step: int) -> dict[str, object]:
    mesh = init_device_mesh("cpu", (dist.get_world_size(),))
    torch.manual_seed(step)
    model = nn.Sequential(nn.Linear(10, 7), nn.BatchNorm1d(7))
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.randn(4, 10)).sum().backward()
    optimizer.step()
    return {
        "rows": distribute_tensor(whole(step), mesh, [Shard(0)]),
        "columns": distribute_tensor(whole(step + 1), mesh, [Shard(1)]),
        "same": distribute_tensor(whole(step + 2), mesh, [Replicate()]),
        "model": model.state_dict(),
        "optimizer": optimizer.state_dict(),
        "epoch": step,
    }


def flat(state: object, path: str = "") -> dict[str, object]:
    if isinstance(state, dict):
        found: dict[str, object] = {}
        for key, value in state.items():
            found |= flat(value, f"{path}.{key}")
        return found
    if isinstance(state, DTensor):
        state = state.full_tensor()
    return {path: state}


def run(rank: int, world: int, rendezvous: str, store: str, what: str, step: int) -> None:
    dist.init_process_group("gloo", init_method=f"file://{rendezvous}", rank=rank, world_size=world)
    wanted = make(step)
    if what == "save":
        dcp.save(wanted, storage_writer=HoldfastWriter(store, step=step))
    else:
        state = make(step + 1000)
        dcp.load(state, storage_reader=HoldfastReader(store))
        found, expected = flat(state), flat(wanted)
        assert list(found) == list(expected)
        for name, value in expected.items():
            if isinstance(value, torch.Tensor):
                assert torch.equal(found[name], value), name  # type: ignore[arg-type]
            elif name == ".epoch":
                assert found[name] == value
    dist.barrier()
    dist.destroy_process_group()


def forked(rank: int, world: int, rendezvous: str, store: str, what: str, step: int) -> int:
    """Start a rank; return its process id."""
    pid = os.fork()
    if pid == 0:
        try:
            run(rank, world, rendezvous, store, what, step)
        except BaseException:  # noqa: BLE001 - this process must not go on as its parent
            traceback.print_exc()
            os._exit(1)
        os._exit(0)
    return pid


def main() -> None:
    folder, store, step, *phases = sys.argv[1:]
    for number, phase in enumerate(phases):
        what, world = phase.split(":")
        rest = (int(world), f"{folder}/meeting-{number}", store, what, int(step))
        pids = [forked(rank, *rest) for rank in range(int(world))]
        codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
        if any(codes):
            sys.exit(f"{phase}: the ranks end with {codes}")


if __name__ == "__main__":
    main()

"""A script for torchrun that shards its model with fully_shard, and saves by DCP."""

import argparse
import hashlib
import os
from pathlib import Path

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.state_dict import get_state_dict, set_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--steps", type=int, default=6)
    parser.add_argument("--folder", type=Path, default=Path("checkpoints"))
    options = parser.parse_args()
    dist.init_process_group("gloo")
    rank, world = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(5)
    layers = [torch.nn.Linear(16, 32), torch.nn.ReLU(), torch.nn.Linear(32, 4)]
    model = torch.nn.Sequential(*layers)
    mesh = init_device_mesh("cpu", (world,))
    for layer in (*layers[::2], model):
        fully_shard(layer, mesh=mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    latest = options.folder / "latest"
    begin = int(latest.read_text()) if latest.exists() else 0
    if begin:
        model_state, optimizer_state = get_state_dict(model, optimizer)
        parts = {"model": model_state, "optimizer": optimizer_state}
        dcp.load(parts, checkpoint_id=options.folder / str(begin))
        set_state_dict(
            model,
            optimizer,
            model_state_dict=parts["model"],
            optim_state_dict=parts["optimizer"],
        )
    for step in range(begin, options.steps):
        generator = torch.Generator().manual_seed(1000 * step + rank)
        loss = model(torch.randn(8, 16, generator=generator)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        model_state, optimizer_state = get_state_dict(model, optimizer)
        parts = {"model": model_state, "optimizer": optimizer_state}
        dcp.save(parts, checkpoint_id=options.folder / str(step + 1))
        if rank == 0:
            latest.write_text(str(step + 1))
        dist.barrier()
        print(f"pid {rank} {os.getpid()} {step}", flush=True)
    digest = hashlib.sha256()
    for name, tensor in sorted(model.state_dict().items()):
        digest.update(name.encode() + tensor.full_tensor().detach().numpy().tobytes())
    if rank == 0:
        print(f"digest {digest.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

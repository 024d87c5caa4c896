"""A script as people write them for torchrun: DDP, a snapshot, and no word of Holdfast."""

import argparse
import hashlib
import os
import time
from pathlib import Path

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel as DDP  # noqa: N817 - as people write it
from torch.utils.data import DataLoader, Dataset
from torch.utils.data.distributed import DistributedSampler


class Numbers(Dataset):
    def __init__(self, size):
        generator = torch.Generator().manual_seed(7)
        self.data = [
            (torch.rand(20, generator=generator), torch.rand(1, generator=generator))
            for _ in range(size)
        ]

    def __len__(self):
        return len(self.data)

    def __getitem__(self, index):
        return self.data[index]


class Trainer:
    def __init__(self, model, loader, optimizer, options):
        self.rank = int(os.environ["LOCAL_RANK"])
        self.model = model
        self.loader = loader
        self.optimizer = optimizer
        self.options = options
        self.snapshot = Path(options.snapshot)
        self.epochs_run = 0
        if self.snapshot.exists():
            found = torch.load(self.snapshot, weights_only=True)
            self.model.load_state_dict(found["MODEL_STATE"])
            self.optimizer.load_state_dict(found["OPTIMIZER_STATE"])
            self.epochs_run = found["EPOCHS_RUN"]
        self.model = DDP(self.model)

    def train(self):
        for epoch in range(self.epochs_run, self.options.epochs):
            self.loader.sampler.set_epoch(epoch)
            for x, y in self.loader:
                self.optimizer.zero_grad()
                torch.nn.functional.mse_loss(self.model(x), y).backward()
                self.optimizer.step()
                time.sleep(self.options.step_s)
            if int(os.environ["RANK"]) == 0:
                parts = {
                    "MODEL_STATE": self.model.module.state_dict(),
                    "OPTIMIZER_STATE": self.optimizer.state_dict(),
                    "EPOCHS_RUN": epoch + 1,
                }
                torch.save(parts, f"{self.snapshot}.new")
                os.replace(f"{self.snapshot}.new", self.snapshot)
                restarts = os.environ["TORCHELASTIC_RESTART_COUNT"]
                world = dist.get_world_size()
                print(f"epoch {epoch} world {world} restarts {restarts}", flush=True)
            dist.barrier()
            print(f"pid {os.environ['RANK']} {os.getpid()} {epoch}", flush=True)


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--step-s", type=float, default=0.0)
    parser.add_argument("--snapshot", default="snapshot.pt")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    torch.manual_seed(3)
    model = torch.nn.Sequential(torch.nn.Linear(20, 8), torch.nn.Tanh(), torch.nn.Linear(8, 1))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    data = Numbers(64)
    loader = DataLoader(data, batch_size=8, sampler=DistributedSampler(data))
    Trainer(model, loader, optimizer, options).train()
    if dist.get_rank() == 0:
        digest = hashlib.sha256()
        for name, tensor in sorted(model.state_dict().items()):
            digest.update(name.encode() + tensor.numpy().tobytes())
        print(f"digest {digest.hexdigest()}", flush=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

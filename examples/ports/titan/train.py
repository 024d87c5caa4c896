"""Train by a spec, with layers sharded over the processes of each worker, with Holdfast.

It accumulates over virtual ranks, and `--store` keeps checkpoints:

    holdfast run --nproc 2 --procs-per-worker 2 --virtual 4 --store checkpoints train.py
"""

import torch
from model import SPECS, digest, parse_config
from torch.utils.data import DataLoader

import holdfast


class Trainer:
    """Trains what a spec has built."""

    def __init__(self, config):
        self.job = holdfast.join()
        self.config, self.spec = config, SPECS[config.spec]
        self.model = self.spec.parallelize(self.spec.build_model(), self.job.mesh)
        self.optimizer = self.spec.build_optimizer(self.model)
        self.scheduler = self.spec.build_scheduler(self.optimizer, config.steps)
        self.loader = DataLoader(self.spec.build_dataset(), config.batch_size, shuffle=True)
        parts = {"optimizer": self.optimizer, "scheduler": self.scheduler}
        self.job.protect(model=self.model, **parts)

    def train_step(self, batches):
        self.optimizer.zero_grad()
        for words, following in batches:
            batches.backward(self.spec.loss(self.model(words), following))
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        return batches.loss, norm.full_tensor()

    def train(self):
        for step in self.job.steps(self.job.batches(self.loader), until=self.config.steps):
            loss, norm = self.train_step(step)
            if (step.index + 1) % self.config.print_every == 0 and self.job.is_leader:
                print(f"step {step.index + 1}: loss {loss:.4f}, norm {norm:.4f}")
        found = digest(self.model)
        if self.job.is_leader:
            print(found)


if __name__ == "__main__":
    Trainer(parse_config()).train()

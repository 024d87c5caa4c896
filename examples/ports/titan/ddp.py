"""Train by a spec, with layers sharded over all processes of torchrun, with plain FSDP2."""

import torch
import torch.distributed as dist
from model import SPECS, Checkpoints, batches_of, digest, parse_config
from torch.distributed.device_mesh import init_device_mesh
from torch.utils.data import DataLoader, DistributedSampler


class Trainer:
    """Trains what a spec has built."""

    def __init__(self, config):
        torch.manual_seed(0)
        self.config, self.spec = config, SPECS[config.spec]
        self.mesh = init_device_mesh("cpu", (dist.get_world_size(),))
        self.model = self.spec.parallelize(self.spec.build_model(), self.mesh)
        self.optimizer = self.spec.build_optimizer(self.model)
        self.scheduler = self.spec.build_scheduler(self.optimizer, config.steps)
        dataset = self.spec.build_dataset()
        self.loader = DataLoader(dataset, config.batch_size, sampler=DistributedSampler(dataset))
        self.checkpoints = Checkpoints(config, self)
        config.accumulate //= dist.get_world_size()

    def train_step(self, batches):
        self.optimizer.zero_grad()
        total = torch.zeros(())
        for _ in range(self.config.accumulate):
            words, following = next(batches)
            loss = self.spec.loss(self.model(words), following) / self.config.accumulate
            loss.backward()
            total += loss.detach()
        norm = torch.nn.utils.clip_grad_norm_(self.model.parameters(), self.config.max_norm)
        self.optimizer.step()
        self.scheduler.step()
        dist.all_reduce(total)
        return total / dist.get_world_size(), norm

    def train(self):
        begin, batches = self.checkpoints.load(), batches_of(self.loader)
        for step in range(begin + 1, self.config.steps + 1):
            loss, norm = self.train_step(batches)
            self.checkpoints.save(step)
            norm = norm.full_tensor()
            if step % self.config.print_every == 0 and dist.get_rank() == 0:
                print(f"step {step}: loss {loss:.4f}, norm {norm:.4f}")
        found = digest(self.model)
        if dist.get_rank() == 0:
            print(found)


if __name__ == "__main__":
    dist.init_process_group("gloo")
    Trainer(parse_config()).train()
    dist.destroy_process_group()

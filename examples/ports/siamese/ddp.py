"""Train a siamese network with DistributedDataParallel."""

import random

import torch
import torch.distributed as dist
from model import Pairs, Siamese, contrastive, digest, parse_options
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adadelta
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = Pairs(options.images, seed=2)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, options.batch_size, sampler=sampler)
    test_set = Pairs(options.images // 4, seed=3)
    test_sampler = DistributedSampler(test_set, shuffle=False)
    test_loader = DataLoader(test_set, options.batch_size, sampler=test_sampler)
    model = DistributedDataParallel(Siamese())
    optimizer = Adadelta(model.parameters(), lr=1.0)
    scheduler = StepLR(optimizer, step_size=1, gamma=0.7)
    torch.manual_seed(dist.get_rank())
    random.seed(dist.get_rank())
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for one, other, same in loader:
            loss = contrastive(model(one, other), same)
            optimizer.zero_grad()
            loss.backward()
            optimizer.step()
        scheduler.step()
        model.eval()
        right = torch.zeros(2)
        with torch.no_grad():
            for one, other, same in test_loader:
                right[0] += ((model(one, other) < 0.5) == same.bool()).sum()
                right[1] += len(same)
        dist.all_reduce(right)
        accuracy = right[0] / right[1]
        dist.all_reduce(loss.detach())
        loss /= dist.get_world_size()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {loss:.4f}, accuracy {accuracy:.3f}")
    if dist.get_rank() == 0:
        print(digest(model.module))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

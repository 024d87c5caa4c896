"""Fit sine waves with LBFGS and DistributedDataParallel."""

import torch
import torch.distributed as dist
from model import Sequence, digest, parse_options, waves
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import LBFGS


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    rank, ranks = dist.get_rank(), dist.get_world_size()
    torch.manual_seed(0)
    inputs, targets = waves(options.waves, options.length, seed=1).tensors
    inputs, targets = inputs[rank::ranks], targets[rank::ranks]
    test_inputs, test_targets = waves(4, options.length, seed=2).tensors
    model = DistributedDataParallel(Sequence().double())
    criterion = nn.MSELoss()
    optimizer = LBFGS(model.parameters(), lr=0.8)
    for step in range(options.steps):

        def closure() -> float:
            optimizer.zero_grad()
            loss = criterion(model(inputs), targets)
            loss.backward()
            mean = loss.detach() / ranks
            dist.all_reduce(mean)
            return mean.item()

        loss = optimizer.step(closure)
        with torch.no_grad():
            test_loss = criterion(model.module(test_inputs), test_targets)
        if rank == 0:
            print(f"step {step}: loss {loss:.6f}, test loss {test_loss:.6f}")
    if rank == 0:
        print(digest(model.module))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train with sharpness-aware minimization with DistributedDataParallel."""

import torch
import torch.distributed as dist
from model import SAM, digest, hold_running_stats, network, parse_options, rings
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.optim import SGD
from torch.optim.lr_scheduler import StepLR
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = rings(options.samples, seed=1)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, options.batch_size, sampler=sampler)
    inputs, labels = rings(256, seed=2).tensors
    model = DistributedDataParallel(network())
    optimizer = SAM(model.parameters(), SGD, options.rho, lr=0.1, momentum=0.9)
    scheduler = StepLR(optimizer, step_size=2, gamma=0.5)
    torch.manual_seed(dist.get_rank())
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        model.train()
        for points, rings_of in loader:
            hold_running_stats(model, False)
            loss = F.cross_entropy(model(points), rings_of, label_smoothing=0.1)
            loss.backward()
            optimizer.first_step()
            hold_running_stats(model, True)
            F.cross_entropy(model(points), rings_of, label_smoothing=0.1).backward()
            optimizer.second_step()
        scheduler.step()
        mean = loss.detach() / dist.get_world_size()
        dist.all_reduce(mean)
        model.eval()
        with torch.no_grad():
            accuracy = (model.module(inputs).argmax(1) == labels).float().mean()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: loss {mean:.4f}, accuracy {accuracy:.3f}")
    if dist.get_rank() == 0:
        print(digest(model.module))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

"""Train a DCGAN with DistributedDataParallel."""

import torch
import torch.distributed as dist
from model import (
    NOISE,
    critic_network,
    digest,
    generator_network,
    images,
    init_weights,
    parse_options,
)
from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim import Adam
from torch.utils.data import DataLoader, DistributedSampler


def main() -> None:
    options = parse_options()
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    dataset = images(options.images)
    sampler = DistributedSampler(dataset)
    loader = DataLoader(dataset, options.batch_size, sampler=sampler)
    generator = DistributedDataParallel(generator_network().apply(init_weights))
    critic = DistributedDataParallel(critic_network().apply(init_weights))
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(16, NOISE, 1, 1)
    for_critic = Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for_generator = Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    torch.manual_seed(dist.get_rank())
    for epoch in range(options.epochs):
        sampler.set_epoch(epoch)
        for (real,) in loader:
            # The critic: more for real images, less for made ones.
            critic.zero_grad()
            fake = generator(torch.randn(len(real), NOISE, 1, 1))
            with critic.no_sync():
                loss_real = criterion(critic(real), torch.ones(len(real)))
                loss_real.backward()
            loss_fake = criterion(critic(fake.detach()), torch.zeros(len(real)))
            loss_fake.backward()
            for_critic.step()
            critic_loss = loss_real.item() + loss_fake.item()
            # The generator: what the critic takes for real.
            generator.zero_grad()
            loss = criterion(critic(fake), torch.ones(len(real)))
            loss.backward()
            for_generator.step()
        losses = torch.tensor([critic_loss, loss.item()]) / dist.get_world_size()
        dist.all_reduce(losses)
        critic_loss, loss = losses.tolist()
        with torch.no_grad():
            brightness = generator.module(fixed_noise).mean()
        if dist.get_rank() == 0:
            print(f"epoch {epoch}: losses {critic_loss:.4f} {loss:.4f}, {brightness:.3f}")
    if dist.get_rank() == 0:
        print(digest(generator.module, critic.module))
    dist.destroy_process_group()


if __name__ == "__main__":
    main()

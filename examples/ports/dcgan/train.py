"""Train a DCGAN with Holdfast."""

import torch
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
from torch.optim import Adam
from torch.utils.data import DataLoader

import holdfast


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    data = job.batches(DataLoader(images(options.images), options.batch_size, shuffle=True))
    generator = generator_network().apply(init_weights)
    critic = critic_network().apply(init_weights)
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(16, NOISE, 1, 1)
    for_critic = Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for_generator = Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    job.protect(generator=generator, critic=critic, gopt=for_generator, copt=for_critic)
    for epoch in job.epochs(data, until=options.epochs):
        for step in epoch:
            # The critic: more for real images, less for made ones.
            critic.zero_grad()
            for (real,) in step.round("critic"):
                fake = generator(torch.randn(len(real), NOISE, 1, 1))
                loss_real = criterion(critic(real), torch.ones(len(real)))
                step.backward(loss_real, last=False)
                loss_fake = criterion(critic(fake.detach()), torch.zeros(len(real)))
                step.backward(loss_fake)
            for_critic.step()
            critic_loss = step.loss
            # The generator: what the critic takes for real.
            generator.zero_grad()
            for (real,) in step.round("generator"):
                fake = generator(torch.randn(len(real), NOISE, 1, 1))
                loss = criterion(critic(fake), torch.ones(len(real)))
                step.backward(loss)
            for_generator.step()
            loss = step.loss
        with torch.no_grad():
            brightness = generator(fixed_noise).mean()
        if job.is_leader:
            print(f"epoch {epoch.index}: losses {critic_loss:.4f} {loss:.4f}, {brightness:.3f}")
    if job.is_leader:
        print(digest(generator, critic))


if __name__ == "__main__":
    main()

"""Train a DCGAN in one process."""

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


def main() -> None:
    options = parse_options()
    torch.manual_seed(0)
    loader = DataLoader(images(options.images), options.batch_size, shuffle=True)
    generator = generator_network().apply(init_weights)
    critic = critic_network().apply(init_weights)
    criterion = nn.BCELoss()
    fixed_noise = torch.randn(16, NOISE, 1, 1)
    for_critic = Adam(critic.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for_generator = Adam(generator.parameters(), lr=2e-4, betas=(0.5, 0.999))
    for epoch in range(options.epochs):
        for (real,) in loader:
            # The critic: more for real images, less for made ones.
            critic.zero_grad()
            fake = generator(torch.randn(len(real), NOISE, 1, 1))
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
        with torch.no_grad():
            brightness = generator(fixed_noise).mean()
        print(f"epoch {epoch}: losses {critic_loss:.4f} {loss:.4f}, {brightness:.3f}")
    print(digest(generator, critic))


if __name__ == "__main__":
    main()

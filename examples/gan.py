"""Train a GAN on points around a circle: two optimizers in turn, in rounds of each step.

    python examples/gan.py                      alone
    holdfast run --nproc 4 examples/gan.py      on four workers; kill any: the same result

Training stops early once the distance has not become better for a while. The last line printed is
the SHA-256 of the whole training state, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import math

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

NOISE = 8  # inputs of the generator


def points(count: int, seed: int) -> torch.Tensor:
    """Return points [count, 2] near a circle of radius 1."""
    dice = torch.Generator().manual_seed(seed)
    angle = 2 * math.pi * torch.rand(count, generator=dice)
    circle = torch.stack([angle.cos(), angle.sin()], dim=1)
    return circle + 0.05 * torch.randn(count, 2, generator=dice)


def network(inputs: int, outputs: int) -> nn.Sequential:
    return nn.Sequential(
        *(nn.Linear(inputs, 64), nn.LeakyReLU(0.2)),
        *(nn.Linear(64, 64), nn.LeakyReLU(0.2)),
        nn.Linear(64, outputs),
    )


def digest(*modules: nn.Module) -> str:
    found = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--batch-size", type=int, default=32, help="samples per virtual rank")
    parser.add_argument("--patience", type=int, default=5, help="evaluations without a better one")
    options = parser.parse_args()

    job = holdfast.join()
    critic, generator = network(2, 1), network(NOISE, 2)
    for_critic = torch.optim.Adam(critic.parameters(), lr=1e-3, betas=(0.5, 0.9))
    for_generator = torch.optim.Adam(generator.parameters(), lr=1e-3, betas=(0.5, 0.9))
    job.protect(
        critic=critic, generator=generator, for_critic=for_critic, for_generator=for_generator
    )
    job.values["best"], job.values["worse"] = math.inf, 0
    held_out = TensorDataset(points(512, seed=2))

    def distance(batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the mean distance of the generator's points from the circle."""
        made = generator(torch.randn(len(batch[0]), NOISE))
        return (made.norm(dim=1) - batch[0].norm(dim=1)).abs().mean()

    data = job.batches(TensorDataset(points(4096, seed=1)), options.batch_size)
    for step in job.steps(data, until=options.steps):
        for (real,) in step.round("critic"):
            fake = generator(torch.randn(len(real), NOISE)).detach()
            loss = F.softplus(-critic(real)).mean() + F.softplus(critic(fake)).mean()
            step.backward(loss)
        for_critic.step()
        for (real,) in step.round("generator"):
            fake = generator(torch.randn(len(real), NOISE))
            step.backward(F.softplus(-critic(fake)).mean())
        for_generator.step()

        if step.index % 20 == 19:
            found = job.evaluate(distance, held_out, batch_size=64)
            worse = found >= job.values["best"]
            job.values["worse"] = job.values["worse"] + 1 if worse else 0
            job.values["best"] = min(job.values["best"], found)
            if job.is_leader:
                print(f"step {step.index}: distance {found:.4f}", flush=True)
            if job.values["worse"] >= options.patience:
                job.stop()
    if job.is_leader:
        print(f"best distance: {job.values['best']:.4f}")
        print(digest(critic, generator), flush=True)


if __name__ == "__main__":
    main()

"""Train Lightning's autoencoder, or a GAN with two optimizers, by giving its Trainer a strategy.

    python examples/lightning_module.py                      alone
    holdfast run --nproc 4 examples/lightning_module.py      on four workers; kill any

The last line printed is the SHA-256 of the model, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import sys
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import holdfast

try:
    import lightning as L
except ImportError:
    sys.exit("lightning_module.py needs lightning: pip install 'holdfast[lightning]'")

from holdfast.trainers.lightning import Strategy

PIXELS = 64


def images(count: int, seed: int) -> TensorDataset:
    """Return pictures of waves, [count, 64]."""
    dice = torch.Generator().manual_seed(seed)
    frequency, phase = 3 * torch.rand(2, count, 1, generator=dice)
    return TensorDataset((frequency * torch.linspace(0, 6, PIXELS) + phase).sin())


class AutoEncoder(L.LightningModule):
    """Squeezes pictures into three numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.encoder = nn.Sequential(nn.Linear(PIXELS, 32), nn.ReLU(), nn.Linear(32, 3))
        self.decoder = nn.Sequential(nn.Linear(3, 32), nn.Dropout(0.05), nn.ReLU())
        self.decoder.append(nn.Linear(32, PIXELS))

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        (x,) = batch
        loss = F.mse_loss(self.decoder(self.encoder(x)), x)
        self.log("train_loss", loss, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        (x,) = batch
        self.log("val_loss", F.mse_loss(self.decoder(self.encoder(x)), x))

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.Adam(self.parameters(), lr=3e-3)
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, gamma=0.9)]


class Adversaries(L.LightningModule):
    """Makes pictures, with two optimizers that the module steps by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, PIXELS))
        self.critic = nn.Sequential(nn.Linear(PIXELS, 32), nn.LeakyReLU(), nn.Linear(32, 1))

    def training_step(self, batch: Any, batch_idx: int) -> None:
        (real,) = batch
        for_generator, for_critic = self.optimizers()
        fake = self.generator(torch.randn(len(real), 8))
        self.toggle_optimizer(for_generator)
        loss = F.softplus(-self.critic(fake)).mean()
        self.log("generator", loss)
        for_generator.zero_grad()
        self.manual_backward(loss)
        for_generator.step()
        self.untoggle_optimizer(for_generator)
        self.toggle_optimizer(for_critic)
        loss = F.softplus(-self.critic(real)).mean() + F.softplus(self.critic(fake.detach())).mean()
        self.log("critic", loss)
        for_critic.zero_grad()
        self.manual_backward(loss)
        for_critic.step()
        self.untoggle_optimizer(for_critic)

    def configure_optimizers(self) -> Any:
        return [torch.optim.Adam(m.parameters(), 1e-3) for m in (self.generator, self.critic)]


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--samples", type=int, default=2000)
    parser.add_argument("--batch-size", type=int, default=16, help="pictures per virtual rank")
    parser.add_argument("--gan", action="store_true", help="two optimizers")
    parser.add_argument("--output", help="directory of Lightning's checkpoints")
    options = parser.parse_args()

    job = holdfast.join()  # before the model: so that it begins with the same parameters everywhere
    model = Adversaries() if options.gan else AutoEncoder()
    train = DataLoader(images(options.samples, seed=1), options.batch_size, shuffle=True)
    validate = DataLoader(images(200, seed=2), batch_size=100)
    trainer = L.Trainer(
        strategy=Strategy(),
        accelerator="cpu",
        devices=1,
        max_epochs=options.epochs,
        gradient_clip_val=None if options.gan else 1.0,
        default_root_dir=options.output,
        enable_checkpointing=bool(options.output),
        logger=False,
        enable_progress_bar=False,
        enable_model_summary=False,
    )
    trainer.fit(model, train, None if options.gan else validate)
    if job.is_leader:
        print(f"epoch {trainer.current_epoch}, step {trainer.global_step}")
        print(digest(model), flush=True)


if __name__ == "__main__":
    main()

"""Trains in float16 with a scaler by one of the trainers: half.py TRAINER; prints a digest.

The first scale is far too large, and it grows after three updates: some updates are left out.
The digest is of the model, the scaler and the learning rate.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from typing import Any

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

import holdfast

STEPS = 12
SCALE: dict[str, Any] = {"init_scale": 2.0**22, "growth_interval": 3}


def make_model() -> nn.Module:
    return nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Dropout(0.1), nn.Linear(32, 2))


def samples() -> TensorDataset:
    inputs = torch.randn(300, 8, generator=torch.Generator().manual_seed(1))
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


def make_optimizer(model: nn.Module) -> tuple[torch.optim.Optimizer, Any]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.LinearLR(optimizer, 1.0, 0.1, total_iters=200)


def report(model: nn.Module, scaler: torch.amp.GradScaler, optimizer: Any, leads: bool) -> None:
    updates = int(next(iter(optimizer.state.values()))["step"])
    assert 3 < updates < STEPS - 3, f"{STEPS - updates} updates were left out"
    state, rate = scaler.state_dict(), optimizer.param_groups[0]["lr"]
    content = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    if leads:
        print(f"{updates} updates, scale {state['scale']:g}, rate {rate:g}")
        print(hashlib.sha256(content + repr((state, rate)).encode()).hexdigest(), flush=True)


def accelerate() -> None:
    from accelerate.utils import GradScalerKwargs

    from holdfast.trainers.accelerate import Accelerator

    accelerator = Accelerator(
        mixed_precision="fp16", kwargs_handlers=[GradScalerKwargs(**SCALE)], max_steps=STEPS
    )
    model = make_model()
    optimizer, scheduler = make_optimizer(model)
    loader = DataLoader(samples(), shuffle=True, batch_size=4)
    model, optimizer, loader, scheduler = accelerator.prepare(model, optimizer, loader, scheduler)
    for inputs, labels in loader:
        loss = nn.functional.cross_entropy(model(inputs), labels)
        accelerator.backward(loss)
        accelerator.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        scheduler.step()
        optimizer.zero_grad()
    report(model, accelerator.scaler, optimizer, accelerator.is_main_process)


class Wrapped(nn.Module):
    """Is a model whose forward pass takes what Hugging Face's Trainer gives it."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = make_model()

    def forward(self, inputs: torch.Tensor, labels: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": nn.functional.cross_entropy(self.inner(inputs), labels)}


def transformers() -> None:
    from transformers import TrainingArguments

    from holdfast.trainers.transformers import Trainer

    data = [{"inputs": inputs, "labels": label} for inputs, label in samples()]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=4,
        save_strategy="no", report_to=[], use_cpu=True, fp16=True, learning_rate=1e-2,
    )  # fmt: skip
    trainer = Trainer(model=Wrapped(), args=arguments, train_dataset=data)
    trainer.accelerator.scaler = scaler = torch.amp.GradScaler("cpu", **SCALE)
    trainer.train()
    report(trainer.model, scaler, trainer.optimizer, trainer.job.is_leader)


def lightning() -> None:
    import lightning as L
    from lightning.pytorch.plugins import MixedPrecision

    from holdfast.trainers.lightning import Strategy

    class Module(L.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.inner = make_model()

        def training_step(self, batch: Any, index: int) -> torch.Tensor:
            return nn.functional.cross_entropy(self.inner(batch[0]), batch[1])

        def configure_optimizers(self) -> Any:
            optimizer, scheduler = make_optimizer(self)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    scaler = torch.amp.GradScaler("cpu", **SCALE)
    trainer = L.Trainer(
        strategy=Strategy(), accelerator="cpu", devices=1, max_steps=STEPS, logger=False,
        plugins=[MixedPrecision("16-mixed", "cpu", scaler)], gradient_clip_val=1.0,
        enable_checkpointing=False, enable_progress_bar=False, enable_model_summary=False,
    )  # fmt: skip
    module = Module()
    trainer.fit(module, DataLoader(samples(), batch_size=4, shuffle=True))
    report(module, scaler, trainer.optimizers[0], trainer.is_global_zero)


if __name__ == "__main__":
    holdfast.join()
    {"accelerate": accelerate, "transformers": transformers, "lightning": lightning}[sys.argv[1]]()

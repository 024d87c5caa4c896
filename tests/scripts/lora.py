"""Trains adapters on a frozen base: lora.py plain|peft STEPS; prints the adapters' digest.

`plain`: an adapter written here, and a loop of its own. `peft`: PEFT, and Hugging Face's Trainer,
which takes the best adapter at the end.
"""

from __future__ import annotations

import hashlib
import sys
import tempfile
from typing import Any

import torch
from torch import nn

import holdfast

STEPS = int(sys.argv[2])
WIDTH = 512


class Adapted(nn.Module):
    """Adds a product of two thin matrices, which are trained, to a frozen layer."""

    def __init__(self, base: nn.Linear, rank: int = 2) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.down = nn.Parameter(torch.randn(rank, base.in_features) / base.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(base.out_features, rank))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        found: torch.Tensor = self.base(inputs) + inputs @ self.down.T @ self.up.T
        return found


def make_model(width: int = WIDTH) -> nn.Module:
    layers = [Adapted(nn.Linear(width, width)) for _ in range(4)]
    return nn.Sequential(*layers[:2], nn.Tanh(), nn.Dropout(0.1), *layers[2:])


def trained(model: nn.Module) -> dict[str, torch.Tensor]:
    return {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}


def plain(job: holdfast.Job) -> nn.Module:
    model = make_model()
    optimizer = torch.optim.AdamW(p for p in model.parameters() if p.requires_grad)
    job.protect(model=model, optimizer=optimizer)
    inputs = torch.randn(200, WIDTH, generator=torch.Generator().manual_seed(1))
    data = job.batches(torch.utils.data.TensorDataset(inputs, inputs.flip(1)), batch_size=4)
    for step in job.steps(data, until=STEPS):
        for x, y in step:
            step.backward(nn.functional.mse_loss(model(x), y))
        optimizer.step()
        optimizer.zero_grad()
    return model


def peft(job: holdfast.Job) -> nn.Module:
    from peft import LoraConfig, get_peft_model
    from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

    from holdfast.trainers.transformers import Trainer

    config = GPT2Config(vocab_size=50, n_embd=64, n_layer=2, n_head=2, n_positions=16)
    adapters = LoraConfig(r=2, target_modules=["c_attn"], lora_dropout=0.1, fan_in_fan_out=True)
    model: Any = get_peft_model(GPT2LMHeadModel(config), adapters)
    words = torch.randint(50, (240, 12), generator=torch.Generator().manual_seed(1))
    lines = [{"input_ids": line, "labels": line} for line in words]
    arguments = TrainingArguments(
        output_dir=tempfile.mkdtemp(), max_steps=STEPS, per_device_train_batch_size=4,
        learning_rate=1e-2, eval_strategy="steps", eval_steps=4, save_steps=4,
        load_best_model_at_end=True, report_to=[], use_cpu=True,
    )  # fmt: skip
    trainer = Trainer(model, args=arguments, train_dataset=lines[40:], eval_dataset=lines[:40])
    trainer.train()
    assert trainer._kept.best.keys() == trained(model).keys()
    return model


if __name__ == "__main__":
    joined = holdfast.join()
    found = {"plain": plain, "peft": peft}[sys.argv[1]](joined)
    if joined.is_leader:
        content = b"".join(value.numpy().tobytes() for value in trained(found).values())
        print(hashlib.sha256(content).hexdigest(), flush=True)

"""Trains with Hugging Face's Trainer until evaluation gets no better, and predicts by the best."""

from __future__ import annotations

import hashlib
import sys
from typing import Any

import torch
from torch.utils.data import Dataset
from transformers import EarlyStoppingCallback, GPT2Config, GPT2LMHeadModel, TrainingArguments

import holdfast
from holdfast.trainers.transformers import Trainer

STEPS_MAX = 24


class Words(Dataset):
    """Gives sentences of twelve words at random, the same for the same index."""

    def __init__(self, count: int, first: int = 0) -> None:
        self.count = count
        self.first = first

    def __len__(self) -> int:
        return self.count

    def __getitem__(self, index: int) -> Any:
        generator = torch.Generator().manual_seed(self.first + index)
        words = torch.randint(50, (12,), generator=generator)
        return {"input_ids": words, "labels": words}


holdfast.join()
config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)
model = GPT2LMHeadModel(config)
arguments = TrainingArguments(
    output_dir=sys.argv[1],
    max_steps=STEPS_MAX,
    per_device_train_batch_size=4,
    learning_rate=5e-2,
    eval_strategy="steps",
    eval_steps=3,
    save_strategy="steps",
    save_steps=3,
    load_best_model_at_end=True,
    metric_for_best_model="eval_loss",
    report_to=[],
)
trainer = Trainer(
    model,
    args=arguments,
    train_dataset=Words(64),
    eval_dataset=Words(20, 1000),
    callbacks=[EarlyStoppingCallback(2)],
)
trainer.train()
assert trainer.state.global_step < STEPS_MAX, "it has not stopped early"
predicted = trainer.predict(Words(10, 5000))
found = hashlib.sha256(predicted.predictions.tobytes())
for parameter in model.parameters():
    found.update(parameter.detach().numpy().tobytes())
print(found.hexdigest(), flush=True)

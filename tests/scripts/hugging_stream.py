"""Trains with Hugging Face's Trainer on a stream of Hugging Face's `datasets`."""

from __future__ import annotations

import hashlib

import torch
from datasets import Dataset
from transformers import GPT2Config, GPT2LMHeadModel, TrainingArguments

import holdfast
from holdfast.trainers.transformers import Trainer

STEPS = 12

job = holdfast.join()
generator = torch.Generator().manual_seed(3)
words = torch.randint(50, (160, 12), generator=generator).tolist()
stream = Dataset.from_dict({"input_ids": words, "labels": words}).to_iterable_dataset(num_shards=8)
config = GPT2Config(vocab_size=50, n_embd=16, n_layer=1, n_head=2, n_positions=16)
arguments = TrainingArguments(
    output_dir="unused",
    max_steps=STEPS,
    per_device_train_batch_size=4,
    learning_rate=5e-3,
    save_strategy="no",
    report_to=[],
    disable_tqdm=True,
)
trainer = Trainer(
    GPT2LMHeadModel(config), args=arguments, train_dataset=stream.with_format("torch")
)
trainer.train()
if job.is_leader:
    found = hashlib.sha256()
    for name, value in trainer.model.state_dict().items():
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    print(found.hexdigest(), flush=True)

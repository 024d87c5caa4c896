"""Composes small models and epochs whose tasks fill other gradients, or the same in another order.

A model is a few layers, registered in another order than they are used in. Each seed decides which
of them share a weight, are frozen, are used by some batches only, or by none, and whether there is
an embedding with sparse gradients. Epochs leave some virtual ranks, or whole workers, without
samples.
"""

from __future__ import annotations

import random
from typing import Any

import torch
from torch import nn
from torch.utils.data import TensorDataset

from holdfast.engine.train.job import Job
from loop_kit import digest
from thread_cluster import ThreadWorker

WIDTH = 16
WORDS = 7


class OddModel(nn.Module):
    """Is the model of one seed. `uses`: its layers by name, in the order in which they are used."""

    def __init__(self, seed: int) -> None:
        super().__init__()
        dice = random.Random(seed)
        names = [f"layer{i}" for i in range(dice.randint(2, 5))]
        self.uses = tuple(names)
        self.sometimes = tuple(name for name in names if dice.random() < 0.3)
        dice.shuffle(names)
        for name in names:
            self.add_module(name, nn.Linear(WIDTH, WIDTH))
        if dice.random() < 0.6:
            one, other = dice.sample(names, 2)
            self.get_submodule(one).weight = self.get_submodule(other).weight
        if dice.random() < 0.4:
            self.get_submodule(dice.choice(names)).requires_grad_(False)
        if dice.random() < 0.4:
            self.add_module("unused", nn.Linear(WIDTH, WIDTH))
        self.words = nn.Embedding(WORDS, WIDTH, sparse=dice.random() < 0.5)
        self.head = nn.Linear(WIDTH, WORDS, bias=False)
        if not self.words.sparse and dice.random() < 0.6:
            self.head.weight = self.words.weight
        generator = torch.Generator().manual_seed(seed)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator) / 3)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        hidden = self.words(words)
        for name in self.uses:
            if name not in self.sometimes or int(words.sum()) % 2:
                hidden = self.get_submodule(name)(hidden).tanh()
        return self.head(hidden)


def train_odd_model(seed: int, steps: int = 5) -> Any:
    """Return a script that trains the model of this seed for some steps."""
    dice = random.Random(-seed)
    samples, batch_size = dice.randint(3, 20), dice.randint(1, 3)
    words = torch.randint(0, WORDS, (samples,), generator=torch.Generator().manual_seed(seed))

    def script(job: Job, me: ThreadWorker) -> Any:
        model = OddModel(seed)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.protect(model=model, optimizer=optimizer)
        for step in job.steps(job.batches(TensorDataset(words), batch_size), until=steps):
            for (batch,) in step:
                step.backward(nn.functional.cross_entropy(model(batch), batch))
            optimizer.step()
            optimizer.zero_grad()
        return digest(model)

    return script

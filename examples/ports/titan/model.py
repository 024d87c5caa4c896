"""A small language model with its spec and config, for a loop of torchtitan's shape.

In that shape (https://github.com/pytorch/torchtitan, BSD-3) a spec names the functions that build a
model, divide it over a mesh and make its optimizer, and one trainer works for all specs.
"""

from __future__ import annotations

import argparse
import hashlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    get_state_dict,
    set_state_dict,
)
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.optim.lr_scheduler import LambdaLR
from torch.utils.data import DataLoader, TensorDataset

WORDS, LENGTH = 32, 12


@dataclass(frozen=True, kw_only=True)
class TrainSpec:
    """Names what a trainer needs to know of one kind of model."""

    build_model: Callable[[], nn.Module]
    parallelize: Callable[[nn.Module, DeviceMesh], nn.Module]
    build_optimizer: Callable[[nn.Module], torch.optim.Optimizer]
    build_scheduler: Callable[[torch.optim.Optimizer, int], LambdaLR]
    build_dataset: Callable[[], TensorDataset]
    loss: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]


def parse_config() -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    parser.add_argument("--spec", choices=SPECS, default="small")
    parser.add_argument("--steps", type=int, default=30)
    parser.add_argument("--batch-size", type=int, default=8)
    parser.add_argument("--accumulate", type=int, default=4, help="batches for each step")
    parser.add_argument("--max-norm", type=float, default=1.0)
    parser.add_argument("--print-every", type=int, default=10)
    parser.add_argument("--folder", type=Path, help="of checkpoints")
    parser.add_argument("--save-every", type=int, default=10)
    return parser.parse_args()


class Layer(nn.Module):
    """Lets each word see the words before it."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.look = nn.LayerNorm(width), nn.Linear(width, 3 * width)
        self.work = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Dropout(0.1))
        self.out = nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.look(self.norm(x)).chunk(3, -1)
        x = x + F.scaled_dot_product_attention(query, key, value, is_causal=True)
        return x + self.out(self.work(x))


class LanguageModel(nn.Module):
    """Gives a score to each word that may follow."""

    def __init__(self, width: int, layers: int) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, width)
        self.layers = nn.ModuleList(Layer(width) for _ in range(layers))
        self.head = nn.Linear(width, WORDS)

    def forward(self, words: torch.Tensor) -> torch.Tensor:
        x = self.words(words)
        for layer in self.layers:
            x = layer(x)
        return self.head(x.flatten(0, 1))


def shard(model: nn.Module, mesh: DeviceMesh) -> nn.Module:
    """Divide each layer, and then the rest, over the processes of a mesh."""
    for layer in model.layers:
        fully_shard(layer, mesh=mesh)
    return fully_shard(model, mesh=mesh)


def warm_up_and_decay(optimizer: torch.optim.Optimizer, steps: int) -> LambdaLR:
    """Raise the rate for a tenth of the steps, and lower it in a line for the rest."""
    warmup = max(steps // 10, 1)
    return LambdaLR(optimizer, lambda at: min((at + 1) / warmup, (steps - at) / (steps - warmup)))


def sentences() -> TensorDataset:
    """Return sentences in which every word follows from the word before it."""
    words = torch.randint(WORDS, (256, 1), generator=torch.Generator().manual_seed(1))
    for _ in range(LENGTH):
        words = torch.cat([words, (5 * words[:, -1:] + 3) % WORDS], 1)
    return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())


def next_word_loss(scores: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
    return F.cross_entropy(scores, following.flatten())


SPECS = {
    "small": TrainSpec(
        build_model=lambda: LanguageModel(width=16, layers=2),
        parallelize=shard,
        build_optimizer=lambda model: torch.optim.AdamW(model.parameters(), lr=3e-3),
        build_scheduler=warm_up_and_decay,
        build_dataset=sentences,
        loss=next_word_loss,
    )
}


def batches_of(loader: DataLoader[Any]) -> Iterator[Any]:
    """Yield batches for ever, epoch after epoch."""
    while True:
        yield from loader


class Checkpoints:
    """Saves the state of a trainer every few steps, and loads the newest one."""

    def __init__(self, config: argparse.Namespace, trainer: Any) -> None:
        self._folder, self._every, self._trainer = config.folder, config.save_every, trainer

    def _state(self) -> dict[str, Any]:
        model, optimizer = get_state_dict(self._trainer.model, self._trainer.optimizer)
        scheduler = self._trainer.scheduler.state_dict()
        return {"model": model, "optimizer": optimizer, "scheduler": scheduler}

    def load(self) -> int:
        """Load the newest checkpoint, and return its step; 0 if there is none."""
        found = [int(path.name) for path in self._folder.glob("*")] if self._folder else []
        if not found:
            return 0
        state = self._state()
        dcp.load(state, checkpoint_id=self._folder / str(max(found)))
        trainer = self._trainer
        set_state_dict(
            trainer.model,
            trainer.optimizer,
            model_state_dict=state["model"],
            optim_state_dict=state["optimizer"],
        )
        trainer.scheduler.load_state_dict(state["scheduler"])
        return max(found)

    def save(self, step: int) -> None:
        if self._folder and step % self._every == 0:
            dcp.save(self._state(), checkpoint_id=self._folder / str(step))


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of the whole model; all processes that share it call this together."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found = hashlib.sha256()
    for name, value in sorted(whole.items()):
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()

"""Train a small transformer whose layers are sharded over the processes of each worker.

    python examples/fsdp.py                                                   alone
    holdfast run --nproc 2 --procs-per-worker 2 --virtual 4 examples/fsdp.py  two workers of two

Any process may be killed. The last line printed is the SHA-256 of the whole model, so that runs can
be compared: it depends on --procs-per-worker and --virtual, and not on the number of workers.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions, get_model_state_dict
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

WORDS, WIDTH, LENGTH = 64, 32, 24


class Block(nn.Module):
    """Attends to the words before each word, and processes the result."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(WIDTH), nn.LayerNorm(WIDTH)
        self.query = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.think = nn.Sequential(nn.Linear(WIDTH, 4 * WIDTH), nn.GELU())
        self.say = nn.Linear(4 * WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = self.query(self.first(x)).view(*x.shape[:2], 3, 4, WIDTH // 4)
        q, k, v = parts.permute(2, 0, 3, 1, 4)
        found = F.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.out(found.transpose(1, 2).reshape(x.shape))
        return x + self.say(self.think(self.second(x)))


class Transformer(nn.Module):
    """Predicts the next of 64 words."""

    def __init__(self) -> None:
        super().__init__()
        self.words = nn.Embedding(WORDS, WIDTH)
        self.places = nn.Parameter(0.02 * torch.randn(LENGTH, WIDTH))
        self.blocks = nn.ModuleList(Block() for _ in range(2))
        self.head = nn.Linear(WIDTH, WORDS)

    def forward(self, words: torch.Tensor, following: torch.Tensor) -> torch.Tensor:
        """Return the loss of predicting the words that follow."""
        x = self.words(words) + self.places[: words.shape[1]]
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(x).flatten(0, 1), following.flatten())


def sentences() -> TensorDataset:
    """Return 512 made sentences in which every word follows from the two before it."""
    dice = torch.Generator().manual_seed(1)
    words = torch.randint(WORDS, (512, LENGTH + 1), generator=dice)
    for i in range(2, LENGTH + 1):
        words[:, i] = (3 * words[:, i - 1] + words[:, i - 2]) % WORDS
    return TensorDataset(words[:, :-1].contiguous(), words[:, 1:].contiguous())


def digest(model: nn.Module) -> str:
    """Return the SHA-256 of the whole model; all processes of a worker call it together."""
    whole = get_model_state_dict(model, options=StateDictOptions(full_state_dict=True))
    found = hashlib.sha256()
    for name, value in sorted(whole.items()):
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--batch-size", type=int, default=8, help="sentences per virtual rank")
    options = parser.parse_args()

    job = holdfast.join()
    model = Transformer()
    for block in model.blocks:
        fully_shard(block, mesh=job.mesh)
    fully_shard(model, mesh=job.mesh)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    job.protect(model=model, optimizer=optimizer)
    data = job.batches(sentences(), options.batch_size)
    for step in job.steps(data, until=options.steps):
        for words, following in step:
            step.backward(model(words, following))
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)  # the norm over all shards
        optimizer.step()
        if step.index % 10 == 9 and job.is_leader:
            print(f"step {step.index + 1}: loss {step.loss:.4f}", flush=True)
    found = digest(model)
    if job.is_leader:
        print(found, flush=True)


if __name__ == "__main__":
    main()

"""Train a small language model on a stream of documents, packed into sequences on the fly.

    python examples/stream.py                      alone
    holdfast run --nproc 4 examples/stream.py      on four workers; kill any: the same result

The documents are the source files of Python's standard library. Each virtual rank reads a shard of
them, in order; where a document ends within a sequence the next one begins. The last line printed
is the SHA-256 of the whole training state, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import holdfast

END = 0  # the byte between two documents


def documents() -> list[Path]:
    """Return the files of the standard library's top level, in an order that never changes."""
    return sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))


def packed(shard: int, shards: int, length: int) -> Iterator[torch.Tensor]:
    """Yield sequences [length + 1] of bytes from every `shards`-th document."""
    rest = bytearray()
    for path in documents()[shard::shards]:
        rest += path.read_bytes() + bytes([END])
        while len(rest) > length:
            yield torch.tensor(list(rest[: length + 1]))
            del rest[:length]  # the last byte is the first input of the next sequence


class LanguageModel(nn.Module):
    """Predicts the next byte."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.embed = nn.Embedding(256, width)
        self.recurrent = nn.GRU(width, width, batch_first=True)
        self.head = nn.Linear(width, 256)

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        states, _ = self.recurrent(self.embed(inputs))
        found: torch.Tensor = self.head(states)
        return found


def digest(model: nn.Module) -> str:
    found = hashlib.sha256()
    for name, value in model.state_dict().items():
        found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="sequences per virtual rank")
    parser.add_argument("--length", type=int, default=64, help="bytes in a sequence")
    parser.add_argument("--width", type=int, default=64)
    options = parser.parse_args()

    job = holdfast.join()
    model = LanguageModel(options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3)
    job.protect(model=model, optimizer=optimizer)

    def shard_of(shard: int, shards: int) -> Iterator[torch.Tensor]:
        return packed(shard, shards, options.length)

    for step in job.steps(job.stream(shard_of, options.batch_size), until=options.steps):
        for batch in step:
            inputs, targets = batch[:, :-1], batch[:, 1:].flatten()
            counts = targets != END  # the end of a document is not to be learned
            losses = F.cross_entropy(model(inputs).flatten(0, 1), targets, reduction="none")
            step.backward((losses * counts).sum(), weight=counts.sum())
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        if job.is_leader and step.index % 20 == 19:
            print(f"step {step.index}: {step.loss:.3f} nats a byte", flush=True)
    if job.is_leader:
        print(digest(model), flush=True)


if __name__ == "__main__":
    main()

"""Train a small byte-level GPT on the source code of Python's standard library.

    python lab/demo/gpt.py                      alone
    holdfast run --nproc 4 lab/demo/gpt.py      on four workers; kill any: the same result

The last line printed is the SHA-256 of the whole training state, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import sysconfig
import time
from pathlib import Path

import torch
from torch import nn
from torch.nn import functional as F

import holdfast


class Block(nn.Module):
    def __init__(self, width: int, heads: int = 4, dropout: float = 0.1) -> None:
        super().__init__()
        self.heads, self.dropout = heads, dropout
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.mlp = nn.Sequential(
            nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width), nn.Dropout(dropout)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        shape = (*x.shape[:2], self.heads, -1)
        q, k, v = (t.view(shape).transpose(1, 2) for t in self.qkv(self.norm1(x)).chunk(3, dim=-1))
        dropout = self.dropout if self.training else 0.0
        mixed = F.scaled_dot_product_attention(q, k, v, dropout_p=dropout, is_causal=True)
        x = x + self.out(mixed.transpose(1, 2).reshape(x.shape))
        return x + self.mlp(self.norm2(x))


class GPT(nn.Module):
    def __init__(self, width: int, layers: int, context: int) -> None:
        super().__init__()
        self.context = context
        self.bytes, self.places = nn.Embedding(256, width), nn.Embedding(context, width)
        for table in (self.bytes, self.places):
            nn.init.normal_(table.weight, std=0.2)
        self.blocks = nn.Sequential(*(Block(width) for _ in range(layers)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, 256)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        places = torch.arange(x.shape[1], device=x.device)
        return self.head(self.norm(self.blocks(self.bytes(x) + self.places(places))))


def standard_library(context: int, bytes_max: int = 2_000_000) -> torch.utils.data.Dataset:
    """Return windows of `context` bytes, each with the same window one byte later as its target."""
    paths = sorted(Path(sysconfig.get_path("stdlib")).glob("*.py"))
    text = b"\n".join(path.read_bytes() for path in paths)[:bytes_max]
    windows = torch.tensor(list(text)).unfold(0, context + 1, context)
    return torch.utils.data.TensorDataset(windows[:, :-1], windows[:, 1:])


@torch.no_grad()
def write(model: GPT, prompt: bytes, length: int) -> str:
    """Continue `prompt` with the model, sampling with a fixed seed."""
    dice = torch.Generator().manual_seed(0)
    text = torch.tensor([list(prompt)])
    for _ in range(length):
        odds = F.softmax(model(text[:, -model.context :])[0, -1] / 0.8, dim=-1)
        text = torch.cat([text, torch.multinomial(odds, 1, generator=dice)[None]], dim=1)
    return bytes(text[0].tolist()).decode("ascii", "replace")


def digest(state: object) -> str:
    """Compute SHA-256 over every name, number and tensor in nested lists and dictionaries."""
    if isinstance(state, torch.Tensor):
        content = state.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(f"{state.dtype} {list(state.shape)} ".encode() + content).hexdigest()
    if isinstance(state, dict):
        state = list(state.items())
    text = str([digest(s) for s in state]) if isinstance(state, list | tuple) else repr(state)
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--batch-size", type=int, default=8, help="windows per virtual rank")
    parser.add_argument("--width", type=int, default=96)
    parser.add_argument("--layers", type=int, default=2)
    parser.add_argument("--context", type=int, default=64, help="bytes the model looks back")
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS")
    parser.add_argument(
        "--stop", type=Path, metavar="FILE", help="end after the step that this file names, or soon"
    )
    options = parser.parse_args()

    job = holdfast.join()
    model = GPT(options.width, options.layers, options.context)
    optimizer = torch.optim.AdamW(model.parameters(), lr=8e-3, betas=(0.9, 0.95))
    schedule = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.99)
    job.protect(model=model, optimizer=optimizer, schedule=schedule)
    data = job.batches(standard_library(options.context), options.batch_size)
    for step in job.steps(data, until=options.steps):
        for x, y in step:
            step.backward(F.cross_entropy(model(x).flatten(0, 1), y.flatten()))
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        schedule.step()
        optimizer.zero_grad()
        if job.is_leader and (step.index + 1) % options.print_every == 0:
            print(f"step {step.index} loss {step.loss:.4f} time {time.time():.4f}", flush=True)
        if job.is_leader and options.stop is not None and options.stop.exists():
            if step.index >= int(options.stop.read_text()):
                job.stop()
    if job.is_leader:
        print("sample:", write(model.eval(), b"def ", length=300), sep="\n")
        print(digest([part.state_dict() for part in (model, optimizer, schedule)]), flush=True)


if __name__ == "__main__":
    main()

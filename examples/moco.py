"""Train an encoder without labels by momentum contrast (He, Fan, Wu, Xie and Girshick 2020).

    python examples/moco.py                      alone
    holdfast run --nproc 4 examples/moco.py      on four workers; kill any: the same result

Two views of an image should be alike, and unlike those in a queue of earlier images. The keys that
tasks compute are gathered, and put into the queue by all workers once the step is committed. The
last line printed is the SHA-256 of all modules, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

SIZE, CLASSES = 12, 8  # width and height of an image, and kinds of patterns


class Encoder(nn.Module):
    """Encodes images [count, 1, SIZE, SIZE] as vectors [count, width] of length 1."""

    def __init__(self, width: int = 32) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.GroupNorm(4, 16), nn.ReLU()),
            *(nn.Conv2d(16, 32, 3, stride=2, padding=1), nn.GroupNorm(4, 32), nn.ReLU()),
            *(nn.Flatten(), nn.Linear(32 * (SIZE // 4) ** 2, 64), nn.ReLU(), nn.Linear(64, width)),
        )

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        return F.normalize(self.layers(images), dim=1)


class Queue(nn.Module):
    """Keeps the newest keys, [size, width]; a multiple of the keys of one step fits best."""

    def __init__(self, size: int, width: int = 32) -> None:
        super().__init__()
        self.register_buffer("keys", F.normalize(torch.randn(size, width), dim=1))

    def put(self, keys: torch.Tensor) -> None:
        self.keys.copy_(torch.cat([keys, self.keys])[: len(self.keys)])


def images_of(count: int, seed: int) -> TensorDataset:
    """Return images of a few patterns, noisy and not equally bright, and their classes."""
    dice = torch.Generator().manual_seed(17)
    patterns = torch.randn(CLASSES, 1, SIZE, SIZE, generator=dice)
    dice = torch.Generator().manual_seed(seed)
    classes = torch.randint(CLASSES, (count,), generator=dice)
    bright = 0.5 + torch.rand(count, 1, 1, 1, generator=dice)
    noise = torch.randn(count, 1, SIZE, SIZE, generator=dice)
    return TensorDataset(patterns[classes] * bright + noise, classes)


def view(images: torch.Tensor) -> torch.Tensor:
    """Return the images shifted by a pixel or two, dimmed, and with noise, each in its own way."""
    rows, columns = torch.randint(-1, 2, (2, len(images))).tolist()
    moved = [
        each.roll((row, column), dims=(1, 2))
        for each, row, column in zip(images, rows, columns, strict=True)
    ]
    dimmed = torch.stack(moved) * (0.6 + 0.8 * torch.rand(len(images), 1, 1, 1))
    return dimmed + 0.3 * torch.randn_like(images)


def digest(*modules: nn.Module) -> str:
    found = hashlib.sha256()
    for module in modules:
        for name, value in module.state_dict().items():
            found.update(name.encode() + value.contiguous().numpy().tobytes())
    return found.hexdigest()


def parse_options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=8)
    parser.add_argument("--images", type=int, default=2048)
    parser.add_argument("--batch-size", type=int, default=32, help="images per virtual rank")
    parser.add_argument("--queue", type=int, default=512, help="keys in the queue")
    parser.add_argument("--momentum", type=float, default=0.99)
    return parser.parse_args()


def main() -> None:
    options = parse_options()
    job = holdfast.join()
    encoder, teacher = Encoder(), Encoder().requires_grad_(False)
    teacher.load_state_dict(encoder.state_dict())
    queue = Queue(options.queue)
    optimizer = torch.optim.Adam(encoder.parameters(), lr=1e-3)
    job.protect(encoder=encoder, teacher=teacher, queue=queue, optimizer=optimizer)
    known, held_out = images_of(512, seed=2), images_of(512, seed=3)

    def accuracy(batch: list[torch.Tensor]) -> torch.Tensor:
        """Return the share of images whose nearest known image is of the same class."""
        images, classes = batch
        nearest = (encoder(images) @ encoder(known.tensors[0]).t()).argmax(1)
        return (known.tensors[1][nearest] == classes).float().mean()

    data = job.batches(images_of(options.images, seed=1), options.batch_size)
    for epoch in job.epochs(data, until=options.epochs):
        for step in epoch:
            for images, _ in step:
                queries, keys = encoder(view(images)), teacher(view(images))
                step.gather("keys", keys)
                same = (queries * keys).sum(dim=1, keepdim=True)
                likeness = torch.cat([same, queries @ queue.keys.t()], dim=1) / 0.2
                step.backward(F.cross_entropy(likeness, torch.zeros(len(images)).long()))
            optimizer.step()
            optimizer.zero_grad()
            queue.put(torch.cat(step.gathered["keys"]))
            with torch.no_grad():
                for mine, learnt in zip(teacher.parameters(), encoder.parameters(), strict=True):
                    mine.lerp_(learnt, 1 - options.momentum)
        found = job.evaluate(accuracy, held_out, batch_size=64)
        if job.is_leader:
            print(f"epoch {epoch.index}: loss {step.loss:.3f}, accuracy {found:.3f}", flush=True)
    if job.is_leader:
        print(digest(encoder, teacher, queue), flush=True)


if __name__ == "__main__":
    main()

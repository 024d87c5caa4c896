"""Recognise handwritten digits (scikit-learn's) with convolutions, BatchNorm and dropout.

    python examples/digits.py                      alone
    holdfast run --nproc 4 examples/digits.py      on four workers; kill any: the same result

The last line printed is the SHA-256 of the whole training state, so that runs can be compared.
"""

from __future__ import annotations

import argparse
import hashlib
import sys

import torch
from torch import nn
from torch.nn import functional as F
from torch.utils.data import TensorDataset

import holdfast

TEST_SAMPLES = 360  # taken from the 1,797 samples; never trained on


def load() -> tuple[TensorDataset, TensorDataset]:
    """Return training and test data: images of 1 x 8 x 8 in 0..1 and their digits."""
    try:
        from sklearn.datasets import load_digits
    except ImportError:
        sys.exit("digits.py needs scikit-learn: pip install scikit-learn")
    digits = load_digits()
    images = torch.tensor(digits.images, dtype=torch.float32)[:, None] / 16
    labels = torch.tensor(digits.target)
    train, test = slice(TEST_SAMPLES, None), slice(TEST_SAMPLES)
    return TensorDataset(images[train], labels[train]), TensorDataset(images[test], labels[test])


def convolution(inputs: int, outputs: int) -> nn.Sequential:
    # No bias: BatchNorm would take it out again.
    layer = nn.Conv2d(inputs, outputs, kernel_size=3, padding=1, bias=False)
    return nn.Sequential(layer, nn.BatchNorm2d(outputs), nn.ReLU())


def make_model(width: int) -> nn.Sequential:
    return nn.Sequential(
        convolution(1, width),
        convolution(width, width),
        nn.MaxPool2d(2),
        convolution(width, 2 * width),
        nn.AdaptiveAvgPool2d(2),
        nn.Flatten(),
        nn.Dropout(0.3),
        nn.Linear(8 * width, 10),
    )


def digest(state: object) -> str:
    """SHA-256 of every name, number and tensor in nested lists and dictionaries."""
    if isinstance(state, torch.Tensor):
        content = state.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        return hashlib.sha256(f"{state.dtype} {list(state.shape)} ".encode() + content).hexdigest()
    if isinstance(state, dict):
        state = list(state.items())
    text = str([digest(s) for s in state]) if isinstance(state, list | tuple) else repr(state)
    return hashlib.sha256(text.encode()).hexdigest()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--epochs", type=int, default=5)
    parser.add_argument("--batch-size", type=int, default=16, help="images per virtual rank")
    parser.add_argument("--width", type=int, default=16)
    parser.add_argument("--print-every", type=int, default=10, metavar="STEPS")
    options = parser.parse_args()

    train, test = load()
    job = holdfast.join()
    model = make_model(options.width)
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, options.epochs)
    job.protect(model=model, optimizer=optimizer, schedule=schedule)
    data = job.batches(train, options.batch_size)

    def accuracy(batch: list[torch.Tensor]) -> torch.Tensor:
        images, labels = batch
        return (model(images).argmax(1) == labels).float().mean()

    for epoch in job.epochs(data, until=options.epochs):
        for step in epoch:
            for images, labels in step:
                step.backward(F.cross_entropy(model(images), labels))
            nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            if job.is_leader and (step.index + 1) % options.print_every == 0:
                print(f"epoch {epoch.index} step {step.index} loss {step.loss:.4f}", flush=True)
        schedule.step()
        score = job.evaluate(accuracy, test, batch_size=60)  # shared by all workers
        if job.is_leader:
            print(f"epoch {epoch.index} test accuracy {score:.1%}", flush=True)
    if job.is_leader:
        print(digest([part.state_dict() for part in (model, optimizer, schedule)]), flush=True)


if __name__ == "__main__":
    main()

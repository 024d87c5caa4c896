"""A script in the shape of Accelerate's own examples, on random data; prints the model's digest.

The last step of an epoch has two samples: some virtual ranks have none.
"""

from __future__ import annotations

import hashlib
import sys

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

from holdfast.trainers.accelerate import Accelerator


def main() -> None:
    epochs = int(sys.argv[1])
    accelerator = Accelerator()
    inputs = torch.randn(146, 8, generator=torch.Generator().manual_seed(1))
    samples = TensorDataset(inputs, (inputs.sum(1) > 0).long())
    train_loader = DataLoader(samples, shuffle=True, batch_size=6)
    eval_loader = DataLoader(samples, shuffle=False, batch_size=50)
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 32), nn.LayerNorm(32), nn.Dropout(0.1), nn.ReLU())
    model.append(nn.Linear(32, 2))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    scheduler = torch.optim.lr_scheduler.LinearLR(
        optimizer, 1.0, 0.1, total_iters=len(train_loader) * epochs
    )
    model, optimizer, train_loader, eval_loader, scheduler = accelerator.prepare(
        model, optimizer, train_loader, eval_loader, scheduler
    )
    for epoch in range(epochs):
        model.train()
        for inputs, labels in train_loader:
            with accelerator.accumulate(model):
                loss = nn.functional.cross_entropy(model(inputs), labels)
                accelerator.backward(loss)
                accelerator.clip_grad_norm_(model.parameters(), 1.0)
                optimizer.step()
                scheduler.step()
                optimizer.zero_grad()
        model.eval()
        right = 0
        for inputs, labels in eval_loader:
            with torch.no_grad():
                found = model(inputs).argmax(1)
            found, labels = accelerator.gather_for_metrics((found, labels))
            right += int((found == labels).sum())
        accelerator.print(f"epoch {epoch}: {right} right, rate {scheduler.get_last_lr()[0]:.6f}")
    accelerator.wait_for_everyone()
    content = b"".join(v.numpy().tobytes() for v in model.state_dict().values())
    accelerator.print(hashlib.sha256(content).hexdigest())


if __name__ == "__main__":
    main()

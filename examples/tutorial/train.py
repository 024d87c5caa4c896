"""Learn the sign of a product, as a job."""

import hashlib

import torch
from torch import nn
from torch.utils.data import TensorDataset

import holdfast

job = holdfast.join()
torch.manual_seed(0)
points = torch.randn(4000, 8)
labels = (points[:, 0] * points[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

job.protect(model=model, optimizer=optimizer)
data = job.batches(TensorDataset(points, labels), batch_size=16)
for epoch in job.epochs(data, until=32):
    for step in epoch:
        for inputs, targets in step:
            loss = nn.functional.cross_entropy(model(inputs), targets)
            step.backward(loss)
        optimizer.step()
        optimizer.zero_grad()
    if job.is_leader and epoch.index % 8 == 7:
        print(f"epoch {epoch.index}: loss {step.loss:.4f}")

if job.is_leader:
    state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
    print("model", hashlib.sha256(state).hexdigest()[:16])

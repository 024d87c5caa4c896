"""Learn the sign of a product, in one process."""

import hashlib

import torch
from torch import nn
from torch.utils.data import DataLoader, TensorDataset

torch.manual_seed(0)
points = torch.randn(4000, 8)
labels = (points[:, 0] * points[:, 1] > 0).long()
model = nn.Sequential(nn.Linear(8, 64), nn.ReLU(), nn.Linear(64, 2))
optimizer = torch.optim.Adam(model.parameters(), lr=3e-3)

data = DataLoader(TensorDataset(points, labels), batch_size=64, shuffle=True)
for epoch in range(32):
    for inputs, targets in data:
        loss = nn.functional.cross_entropy(model(inputs), targets)
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    if epoch % 8 == 7:
        print(f"epoch {epoch}: loss {loss.item():.4f}")

state = b"".join(value.numpy().tobytes() for value in model.state_dict().values())
print("model", hashlib.sha256(state).hexdigest()[:16])

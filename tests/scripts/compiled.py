"""A compiled model whose batches have several lengths: arguments are the backend and dynamic=.

The last line printed is the SHA-256 of the model.
"""

from __future__ import annotations

import hashlib
import sys

import torch
import torch._dynamo
from torch import nn

import holdfast

LENGTHS = (3, 5, 7, 12)
STEPS = 8


class Net(nn.Module):
    """Sums over each batch's length, which is where kernels differ."""

    def __init__(self) -> None:
        super().__init__()
        self.into, self.out = nn.Linear(6, 8), nn.Linear(8, 1)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.into(x).exp()
        return self.out((hidden.softmax(1) * hidden.var(1, keepdim=True)).sum(1))


backend, dynamic = sys.argv[1], {"auto": None, "True": True, "False": False}[sys.argv[2]]
job = holdfast.join()
torch.set_num_threads(1)
torch._dynamo.config.fail_on_recompile_limit_hit = True
model = Net()
if backend == "in place":
    model.compile(backend="aot_eager", dynamic=dynamic)
    net: nn.Module = model
else:
    net = torch.compile(model, backend=backend, dynamic=dynamic)
optimizer = torch.optim.SGD(model.parameters(), lr=1e-2, momentum=0.9)
job.protect(net=net, optimizer=optimizer)
for step in job.steps(until=STEPS):
    for task in step.round("net"):
        length = LENGTHS[(task.step + task.vrank) % len(LENGTHS)]
        step.backward(net(torch.randn(4, length, 6)).square().mean())
    optimizer.step()
if job.is_leader:
    digest = hashlib.sha256()
    for value in model.state_dict().values():
        digest.update(value.numpy().tobytes())
    sys.stdout.write(digest.hexdigest() + "\n")

"""Tests that state which a script keeps beside the job is told, in a process of its own."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

ALONE = """
import copy, torch, holdfast
from torch import nn
job = holdfast.join()
model, teacher = nn.Linear(4, 2), nn.Linear(4, 2)
{average}
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer{protect})
for step in job.steps(job.batches(torch.utils.data.TensorDataset(torch.ones(64, 4)), 8), until=8):
    for (x,) in step:
        step.backward((model(x) - teacher(x).detach()).square().mean())
    optimizer.step()
    {update}
print("ended")
"""


# The average of weights that diffusion trainers have, as an object of the script's own.
OBJECT = """
class Average:
    def __init__(self, model):
        self.shadow = {n: p.detach().clone() for n, p in model.named_parameters()}
        self.copy = copy.deepcopy(model)
    def update(self, model):
        for name, p in model.named_parameters():
            self.shadow[name].mul_(0.9).add_(p.detach(), alpha=0.1)
        self.copy.load_state_dict(model.state_dict())
    def state_dict(self):
        return {"shadow": self.shadow, "copy": self.copy.state_dict()}
    def load_state_dict(self, state):
        self.shadow = state["shadow"]
        self.copy.load_state_dict(state["copy"])
ema = Average(model)
"""


def test_an_average_in_a_protected_object_of_the_scripts_own_is_protected(tmp_path: Path) -> None:
    found = run_alone(tmp_path, OBJECT, "ema.update(model)", ", ema=ema")
    assert "ended" in found.stdout, found.stderr


@pytest.mark.parametrize(
    ("average", "update", "told"),
    [
        ("", "", ""),
        pytest.param(
            "ema = torch.optim.swa_utils.AveragedModel(model)",
            "ema.update_parameters(model)",
            "the script changes the parameters of a AveragedModel that is not protected",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "first = {name: p.detach().clone() for name, p in model.named_parameters()}",
            "best = {name: p.detach().clone() for name, p in model.named_parameters()}",
            "",
            marks=pytest.mark.slow,
        ),
        (
            "ema = {name: p.detach().clone() for name, p in model.named_parameters()}",
            "ema.update({n: 0.9 * ema[n] + 0.1 * p.detach() for n, p in model.named_parameters()})",
            "the script changes a dictionary of tensors with names of parameters (weight, ...)",
        ),
        pytest.param(
            "ema = copy.deepcopy(model)",
            "torch._foreach_lerp_([p.data for p in ema.parameters()], "
            "[p.data for p in model.parameters()], 0.1)",
            "the script changes the parameters of a Linear that is not protected",
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "torch.distributed.init_process_group('gloo', store=torch.distributed.HashStore(), "
            "rank=0, world_size=1)",
            "",
            "torch.distributed is initialised",
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_script_keeps_beside_the_job_is_told(
    average: str, update: str, told: str, tmp_path: Path
) -> None:
    found = run_alone(tmp_path, average, update)
    assert told in found.stderr
    assert ("ended" in found.stdout) == (not told)


def run_alone(
    path: Path, average: str, update: str, protect: str = ""
) -> subprocess.CompletedProcess[str]:
    script = path / "train.py"
    script.write_text(ALONE.format(average=average, update=update, protect=protect))
    return subprocess.run(
        [sys.executable, str(script)], check=False, capture_output=True, text=True, timeout=100
    )

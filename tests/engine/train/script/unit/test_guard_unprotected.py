"""Tests that a script's own state outside the job is reported, in a process of its own."""

from __future__ import annotations

import contextlib
import copy
import itertools
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.script.script_guard import UnprotectedModules
from loop_kit import net

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


@pytest.mark.slow
def test_an_average_in_a_protected_object_of_the_scripts_own_is_protected(tmp_path: Path) -> None:
    found = run_alone(tmp_path, OBJECT, "ema.update(model)", ", ema=ema")
    assert "ended" in found.stdout, found.stderr


NORMS = "{n: torch.zeros(()) for n, _ in model.named_parameters()}"
ADDS = "for n, p in model.named_parameters(): norms[n].mul_(0.9).add_(p.grad.norm(), alpha=0.1)"


@pytest.mark.slow
def test_averages_for_the_scripts_own_plots_are_its_own(tmp_path: Path) -> None:
    found = run_alone(tmp_path, f"norms = job.scratch['norms'] = {NORMS}", ADDS)
    assert "ended" in found.stdout, found.stderr


class Average:
    """Keeps an average of weights; its state has copies of all of them, or of a few."""

    def __init__(self, model: nn.Module, kind: str, kept: int | None = None) -> None:
        self._model = model
        self._kept = kept
        self.copy = copy.deepcopy(model).requires_grad_(False)
        self.table = {name: p.detach().clone() for name, p in model.named_parameters()}
        self.values = [*(self.table.values() if kind == "table" else self.copy.parameters())]

    def state_dict(self) -> dict[str, Any]:
        first = itertools.islice(self.values, self._kept)
        return {"average": [each.clone() for each in first]}

    def update(self) -> None:
        for each in self.values:
            each.mul_(0.9).add_(0.1)


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["table", "module"])
@pytest.mark.parametrize("kept", [None, 1])
def test_an_average_whose_state_holds_copies_is_protected_if_all_are_in_it(
    kind: str, kept: int | None
) -> None:
    model = net()
    average = Average(model, kind, kept)
    others = UnprotectedModules([average])
    told = contextlib.nullcontext() if kept is None else pytest.raises(UserError, match="protect")
    with told:
        for _ in range(6):
            others.look([model])
            average.update()


class Meter:
    """Keeps running averages by the names of parameters, as scripts do for their plots."""

    def __init__(self, model: nn.Module) -> None:
        self.norms = {name: torch.zeros(3) for name, _ in model.named_parameters()}
        self.copy = copy.deepcopy(model)

    def update(self) -> None:
        for each in (*self.norms.values(), *self.copy.state_dict().values()):
            each.add_(1.0)


@pytest.mark.parametrize(
    "place",
    [
        pytest.param("meter", marks=pytest.mark.slow),
        pytest.param("meters", marks=pytest.mark.slow),
        "norms",
    ],
)
def test_values_in_scratch_are_not_looked_at(place: str) -> None:
    model, scratch = net(), dict[str, Any]()
    meter = Meter(model)
    others = UnprotectedModules(scratch=scratch)
    kept = {"meter": meter, "meters": [{"first": (meter,)}], "norms": [meter.norms, meter.copy]}
    for i in range(6):
        others.look([model])
        meter.update()
        if i == 1:  # the first look was before the script has put it there
            scratch["mine"] = kept[place]


def test_values_outside_scratch_are_looked_at() -> None:
    model = net()
    meter = Meter(model)
    others = UnprotectedModules(scratch={"mine": {"step": 1}})
    others.look([model])
    meter.update()
    others.look([model])
    meter.update()
    with pytest.raises(UserError, match=r"or, if no result depends on them, in job\.scratch"):
        others.look([model])


@pytest.mark.parametrize(
    ("average", "update", "told"),
    [
        pytest.param("", "", "", marks=pytest.mark.slow),
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
        pytest.param(
            "ema = {name: p.detach().clone() for name, p in model.named_parameters()}",
            "ema.update({n: 0.9 * ema[n] + 0.1 * p.detach() for n, p in model.named_parameters()})",
            "the script changes a dictionary of tensors with names of parameters (weight, ...)",
            marks=pytest.mark.slow,
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
def test_unprotected_tensors_that_a_script_updates_are_reported(
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

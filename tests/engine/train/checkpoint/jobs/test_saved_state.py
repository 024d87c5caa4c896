"""A job can begin from another job's checkpoint: it takes the state, or explains a refusal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from conftest import finish
from holdfast.engine.core.errors import UserError
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.train.state.restorer import load_saved

SCRIPT = """
import torch, holdfast
job = holdfast.join()
torch.manual_seed(4)
net = torch.nn.Linear(3, 2)
optimizer = torch.optim.Adam(net.parameters())
job.protect(net=net, optimizer=optimizer)
for step in job.steps(until=4):
    for task in step:
        step.backward(net(torch.ones(3)).sum())
    optimizer.step()
    job.values["best"] = 0.5
"""


@pytest.fixture(scope="module")
def store(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("saved")
    (path / "train.py").write_text(SCRIPT)
    flags = ["--nproc", "1", "--virtual", "2", "--store", str(path / "store"), "--save-every", "2"]
    with LocalRun(path / "run", flags, [str(path / "train.py")]) as run:
        finish(run)
    return str(path / "store")


def objects(rows: int = 2) -> dict[str, Any]:
    net = nn.Linear(3, rows)
    return {"net": net, "optimizer": torch.optim.Adam(net.parameters())}


def test_all_of_it_is_taken_over(store: str) -> None:
    here = objects()
    found = load_saved(store, 2, here)
    assert (found.steps, found.values) == (2, {"best": 0.5})
    (state, *_) = here["optimizer"].state.values()
    assert state["step"] == 2
    assert load_saved(store, None, objects()).steps >= 2


def test_a_saved_state_that_does_not_fit_is_refused(store: str, tmp_path: Path) -> None:
    with pytest.raises(UserError, match=r"holds \['net', 'optimizer'\].*protects \['model'\]"):
        load_saved(store, 2, {"model": nn.Linear(3, 2)})
    with pytest.raises(UserError, match=r"net.weight is \[5, 3\] of float32 on this worker and"):
        load_saved(store, 2, objects(5))
    with pytest.raises(UserError, match=r"the checkpoint of step 77 .* cannot be used"):
        load_saved(store, 77, objects())
    with pytest.raises(UserError, match="holds no checkpoint"):
        load_saved(str(tmp_path), None, objects())


@pytest.mark.slow
def test_begin_from_must_be_called_after_protect(store: str) -> None:
    code = f"import holdfast; holdfast.join().begin_from({store!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], check=False, capture_output=True, text=True, timeout=100
    )
    assert "call it after job.protect(...)" in done.stderr

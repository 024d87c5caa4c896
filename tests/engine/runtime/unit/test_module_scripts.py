"""Jobs whose script is a module, as `python -m` runs it."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from conftest import RUN_S
from holdfast.engine.runtime.user_script import find_source, is_present, name_of_module

TRAIN = """
import sys

import torch

import holdfast

from . import width

job = holdfast.join()
model = torch.nn.Linear(width.WIDTH, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
data = torch.utils.data.TensorDataset(torch.ones(16, width.WIDTH))
for step in job.steps(job.batches(data, 2), until=2):
    for (x,) in step:
        step.backward(model(x).mean())
    optimizer.step()
if job.is_leader:
    print("argv", sys.argv[1:], __name__, __package__, sys.argv[0].endswith("train.py"))
"""


FAR = """
import os

os.chdir("/")
print(os.path.abspath(__file__))
print(os.path.abspath((lambda: 0).__code__.co_filename))
"""


@pytest.fixture
def package(tmp_path: Path) -> Path:
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "width.py").write_text("WIDTH = 3\n")
    (tmp_path / "models" / "train.py").write_text(TRAIN)
    return tmp_path


@pytest.mark.parametrize("options", [(), ("--faults", "faults.txt")])
def test_a_module_is_run_as_by_python(package: Path, options: tuple[str, ...]) -> None:
    (package / "faults.txt").write_text("worker 0 step 1 kill\n")
    command = ("run", "--nproc", "1", *options, "-m", "models.train", "--rate", "1")
    done = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", *command],
        cwd=package,
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
    )
    assert done.returncode == 0, done.stderr
    assert "argv ['--rate', '1'] __main__ models True" in done.stdout


def test_a_script_finds_its_files_from_another_folder(tmp_path: Path) -> None:
    """Its own path is whole, as it is where python runs the script."""
    (tmp_path / "train.py").write_text(FAR)
    command = [sys.executable, "-m", "holdfast.cli.main", "run", "--nproc", "1", "train.py"]
    done = subprocess.run(
        command, cwd=tmp_path, capture_output=True, text=True, check=False, timeout=RUN_S
    )
    assert done.stdout.splitlines() == [str(tmp_path / "train.py")] * 2, done.stderr


def test_a_modules_source_is_found_without_importing_it(package: Path) -> None:
    train = package / "models" / "train.py"
    assert find_source(package, "-m models.train") == train
    assert find_source(package, "models/train.py") == train
    assert find_source(package, "-m models.absent") is None
    (package / "models" / "__main__.py").write_text("raise SystemExit(3)\n")
    assert find_source(package, "-m models") == package / "models" / "__main__.py"
    assert name_of_module("train.py") == ""
    assert is_present(package, "-m json.tool")
    assert not is_present(package, "-m absent.train")
    assert not is_present(package, "-m ../train")

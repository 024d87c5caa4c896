"""Each process of a node is given a GPU of its own, as far as there are enough."""

from __future__ import annotations

from pathlib import Path

import pytest

from conftest import RUN_S
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.runtime.node.gpu_shares import free_place, share_of_gpus, visible_gpus

SCRIPT = """
import os, holdfast, torch
job = holdfast.join()
model = torch.nn.Linear(1, 1)
job.protect(model=model)
print("has", os.environ.get("CUDA_VISIBLE_DEVICES"), flush=True)
for step in job.steps(until=1):
    for task in step:
        step.backward(model(torch.ones(1)).sum())
"""


@pytest.mark.parametrize(
    ("variable", "found"),
    [
        (None, ("0", "1", "2")),
        ("", ()),
        ("-1", ()),
        ("2,0", ("2", "0")),
        ("1, 3,-1,2", ("1", "3")),
        ("GPU-8a56,MIG-17", ("GPU-8a56", "MIG-17")),
    ],
)
def test_visible_gpus_are_those_of_the_variable_or_all_that_the_machine_has(
    variable: str | None, found: tuple[str, ...], tmp_path: Path
) -> None:
    for name in ("0000:01:00.0", "0000:02:00.0", "0000:03:00.0"):
        (tmp_path / name).mkdir()
    environ = {} if variable is None else {"CUDA_VISIBLE_DEVICES": variable}
    assert visible_gpus(environ, tmp_path) == found
    if variable is None:
        assert visible_gpus(environ, tmp_path / "none") == ()


def test_places_are_used_again() -> None:
    assert free_place([]) == 0
    assert free_place([0, 1, 3]) == 2
    assert free_place([2, 0, 1]) == 3


def test_workers_take_turns_only_where_gpus_are_few() -> None:
    gpus = ("a", "b", "c", "d")
    assert [share_of_gpus(gpus, place, 1) for place in range(5)] == [*zip(gpus), ("a",)]
    assert [share_of_gpus(gpus, place, 2) for place in range(2)] == [("a", "b"), ("c", "d")]
    assert share_of_gpus(("a",), 3, 2) == ("a", "a")
    assert share_of_gpus((), 3, 2) == ()


@pytest.mark.parametrize(("nproc", "procs"), [(4, 1), pytest.param(2, 2, marks=pytest.mark.slow)])
def test_every_process_has_its_own(
    nproc: int, procs: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Torch sees no GPU in this test; the variables given to each process count."""
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    script = tmp_path / "train.py"
    script.write_text(SCRIPT)
    flags = ["--nproc", str(nproc), "--procs-per-worker", str(procs)]
    with LocalRun(tmp_path / "run", flags, [str(script)]) as run:
        assert run.wait(RUN_S) == 0, run.log()
        told = sorted(line for line in run.out if line.startswith("has"))
    assert told == ["has 4", "has 5", "has 6", "has 7"]

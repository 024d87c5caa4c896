"""What people bring to their scripts: the same bits with it, whatever dies."""

from __future__ import annotations

import shutil
import signal
from pathlib import Path

import pytest
import torch

from conftest import RUN_S, SCRIPTS, Start, finish, has_checkpoint
from holdfast.engine.runtime.local_run import LocalRun
from support import until

KILLS = "worker 1 step 2 kill\nworker 0 step 5 kill\n"


@pytest.fixture
def faults(tmp_path: Path) -> tuple[str, str]:
    """Return the options of a run in which the first worker and then the other one is killed."""
    path = tmp_path / "faults.txt"
    path.write_text(KILLS)
    return "--faults", str(path)


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_activation_checkpoints_draw_the_same_dropout_again(
    start: Start, faults: tuple[str, str]
) -> None:
    """Kept or computed again, by either way and after deaths, activations are the same."""
    last = []
    for reentrant, nproc, options in (
        ("none", 1, ()),
        ("False", 2, faults),
        ("True", 2, faults),
    ):
        with start(reentrant, nproc=nproc, script="recomputed.py", options=options) as run:
            last.append(finish(run))
    assert last == last[:1] * 3
    assert len(run.events("lost")) == 2


@pytest.mark.slow
@pytest.mark.timeout(420)
def test_a_loader_of_torchdata_gives_the_batches_of_pytorchs(
    start: Start, faults: tuple[str, str]
) -> None:
    """The job's state has the place in the data, whatever state the loader has."""
    pytest.importorskip("torchdata.stateful_dataloader")
    last = []
    for kind, nproc, options in (("torch", 1, ()), ("torchdata", 2, faults)):
        with start(kind, nproc=nproc, script="stateful_loader.py", options=options) as run:
            last.append(finish(run))
    assert last == last[:1] * 2
    assert len(run.events("lost")) == 2


CONFIG = """
data: rows.pt
best: best.pt
lr: 0.01
steps: 12
hold: -1
bug: -1
wrong: -1
hydra:
  job:
    chdir: true
"""


@pytest.fixture
def hydra_app(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """Return a script for Hydra in the present folder, by a relative path, with its files."""
    pytest.importorskip("hydra", reason="Hydra is not installed (pip install hydra-core)")
    monkeypatch.chdir(tmp_path)
    (tmp_path / "app" / "conf").mkdir(parents=True)
    (tmp_path / "app" / "conf" / "config.yaml").write_text(CONFIG)
    shutil.copy(SCRIPTS / "hydra_app.py", tmp_path / "app" / "train.py")
    torch.save(torch.randn(50, 6, generator=torch.Generator().manual_seed(1)), "rows.pt")
    return "app/train.py"


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_hydra_changes_the_folder_through_a_kill_and_a_resume(hydra_app: str) -> None:
    with LocalRun(
        Path("alone"), ["--nproc", "1", "--virtual", "4"], [hydra_app, "hydra.job.chdir=false"]
    ) as run:
        expected = finish(run)
    assert Path("best.pt").exists()
    Path("faults.txt").write_text("worker 1 step 3 kill\n")
    options = ["--nproc", "2", "--virtual", "4", "--store", "kept", "--save-every", "2"]
    with LocalRun(Path("run"), [*options, "--faults", "faults.txt"], [hydra_app, "hold=7"]) as run:
        run.until(
            lambda: (
                run.status()["step"] >= 6
                and any(has_checkpoint(Path("kept"), step) for step in range(2, 9))
            ),
            RUN_S,
            "a checkpoint, and steps after the death",
        )
        run.signal(signal.SIGKILL)
        run.wait(RUN_S)
        until(lambda: not run.leftovers(), "the end of all processes")
    assert len(run.events("lost")) == 1
    Path("app", "go").touch()
    with LocalRun(Path("run"), [], [], command=("resume", "run")) as again:
        assert finish(again) == expected
    assert any("checkpoint" in each["text"] for each in again.events("view")), again.events()
    (folder,) = (line.removeprefix("folder ") for line in again.out if "folder" in line)
    assert folder.startswith(str(Path("outputs").resolve()))
    assert Path(folder, "best.pt").exists()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("given", "words"),
    [
        ("bug=1", "RuntimeError: a bug of the script"),
        ("wrong=1", "batch_size=-1 is not a size: give 1 or more samples (app/train.py, line "),
        ("--multirun", "start one run for each job"),
    ],
)
def test_what_fails_under_hydra_is_named_in_one_place(
    hydra_app: str, given: str, words: str
) -> None:
    """Hydra itself would print the failure, and end the script with status 1."""
    script = [hydra_app, given, "lr=0.1,0.2" if given == "--multirun" else "lr=0.1"]
    with LocalRun(Path("run"), ["--nproc", "2"], script) as run:
        assert run.wait(RUN_S) == 1
    told = "\n".join(run.err)
    assert told.count(words) == 1, told
    assert told.count("Traceback") == (given == "bug=1"), told

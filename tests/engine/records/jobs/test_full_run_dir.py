"""Jobs whose run directory, which all workers share, lies on a disk that is full for a while."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS, finish
from full_disk import fill, mount_small_disk
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.train.data.sampling import SamplePlan

OPTIONS = ["--nproc", "2", "--save-every", "1000"]
FOUR = ["--virtual", "4"]
MANY = ["--virtual", "64"]  # a line of the ledger has nearly 4096 bytes, as a block of the disk


@pytest.fixture
def disk(tmp_path: Path) -> Iterator[Path]:
    with mount_small_disk(tmp_path / "disk") as path:
        yield path


def undisturbed(tmp_path: Path, steps: int, options: list[str]) -> str:
    """Return the last line of an undisturbed run; the file `go` is there."""
    script = [str(SCRIPTS / "paced.py"), str(tmp_path / "go"), str(steps)]
    with LocalRun(tmp_path / "undisturbed", [*OPTIONS, *options], script) as run:
        return finish(run)


def paced(disk: Path, store: Path, steps: int, options: list[str]) -> LocalRun:
    """Return a slow run in a directory on the disk; it is fast once the file `go` is there."""
    script = [str(SCRIPTS / "paced.py"), str(store.parent / "go"), str(steps)]
    return LocalRun(disk / "run", [*OPTIONS, *options, "--store", str(store)], script)


def newest(store: Path) -> Callable[[], int]:
    """Return a function that finds the step of the newest durable checkpoint; 0: there is none."""
    return lambda: max(Checkpoints(open_storage(str(store))).steps(), default=0)


def lines_with(run: LocalRun, words: str) -> list[str]:
    return [line for line in run.err if words in line]


def details(run: LocalRun) -> list[str]:
    """Return the text of the status for each worker."""
    return [worker["detail"] for worker in run.status()["workers"]]


@pytest.mark.parametrize("workers", [pytest.param(1, marks=pytest.mark.slow), 2])
def test_workers_save_their_state_and_wait_for_room(
    workers: int, disk: Path, tmp_path: Path
) -> None:
    store = tmp_path / "store"
    with paced(disk, store, 60, [*FOUR, "--nproc", str(workers)]) as run:
        run.until(lambda: run.status()["step"] > 3, RUN_S, "some steps")
        filler = fill(disk)
        run.until(lambda: lines_with(run, "waits for room"), RUN_S, "the wait")
        step = run.until(newest(store), RUN_S, "a checkpoint")
        assert run.until(lambda: all(details(run)), RUN_S, "its status")
        waits = "waits for room in the run directory: free space there"
        assert details(run) == [waits] * workers
        assert run.status()["step"] == step
        filler.unlink()
        (tmp_path / "go").touch()
        digest = finish(run)
    assert len(lines_with(run, "(No space left on device): training waits for room there")) == 1
    assert len(lines_with(run, "can grow again: training goes on")) == 1
    assert not lines_with(run, "was lost")
    assert verify(run.run_dir.path, SamplePlan.from_dict).ok
    assert digest == undisturbed(tmp_path, 60, FOUR)


@pytest.mark.slow
def test_a_job_that_waits_for_room_can_be_stopped(disk: Path, tmp_path: Path) -> None:
    store = tmp_path / "store"
    with paced(disk, store, 60, FOUR) as run:
        run.until(lambda: run.status()["step"] > 3, RUN_S, "some steps")
        fill(disk)
        run.until(newest(store), RUN_S, "a checkpoint")
        run.signal(signal.SIGINT)
        assert run.wait(RUN_S) == 130
        assert run.leftovers() == []


@pytest.mark.slow
def test_a_job_whose_last_lines_have_no_room_does_not_end(disk: Path, tmp_path: Path) -> None:
    with paced(disk, tmp_path / "store", 12, MANY) as run:
        run.until(lambda: run.status()["step"] > 9, RUN_S, "all but the last two steps")
        filler = fill(disk)
        run.until(lambda: lines_with(run, "waits for room"), RUN_S, "the wait")
        run.until(lambda: run.status()["step"] == 12, RUN_S, "the last step")
        assert run.status()["state"] == "training"
        filler.unlink()
        digest = finish(run)
    assert verify(run.run_dir.path, SamplePlan.from_dict).ok
    (tmp_path / "go").touch()
    assert digest == undisturbed(tmp_path, 12, MANY)

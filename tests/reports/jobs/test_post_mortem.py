"""The bundle of an incident: its story, the recordings of the coordinator, stacks of workers."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

from conftest import RUN_S, Start, finish
from dashboard_kit import write_crashed_run
from holdfast.cli.main import main
from holdfast.engine.runtime.coordinate import black_box
from holdfast.engine.runtime.coordinate.black_box import keep_bundle, write_bundle
from holdfast.engine.runtime.local_run import strike
from holdfast.engine.runtime.rundir import RunDir

HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")


def call(*words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [*HOLDFAST, *words],
        capture_output=True,
        text=True,
        check=False,
        timeout=RUN_S,
        env={**os.environ, **variables},
    )


def bundle_of(folder: Path, story: str) -> Path | None:
    """Return the bundle that contains this story: a busy machine may have had another incident."""
    for path in folder.glob("*.zip"):
        with zipfile.ZipFile(path) as bundle:
            if story in bundle.read("README.txt").decode():
                return path
    return None


@pytest.mark.slow
def test_an_incident_leaves_a_bundle_that_can_be_replayed(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    words = ("--steps", "60", "--task-s", "0.01", "--hold", "40", str(go))
    with start(*words, nproc=2) as run:
        members = run.until_members(2)
        run.until(lambda: run.status()["step"] >= 5, RUN_S, "some steps")
        assert strike(members[1])
        bundles = run.run_dir.path / "post-mortem"
        kept = run.until(lambda: bundle_of(bundles, "worker 1 was lost"), RUN_S, "a bundle")
        run.until(lambda: run.status()["step"] >= 40, RUN_S, "the script waits")
        dumped = tmp_path / "dumped.zip"
        told = call("dump", str(run.run_dir.path), "--output", str(dumped))
        assert (told.returncode, told.stderr) == (0, "")
        go.touch()
        finish(run)
    (lost,) = run.events("lost")
    with zipfile.ZipFile(kept) as bundle:
        story = bundle.read("README.txt").decode()
        assert f"Incident {kept.stem}: " in story
        assert lost["text"] in story
        assert "view 1 ends" in bundle.read("stacks/worker-0-1.txt").decode()
        secret = run.run_dir.secret_file.read_text().strip()
        assert all(secret.encode() not in bundle.read(name) for name in bundle.namelist())
    with zipfile.ZipFile(dumped) as bundle:
        stacks = bundle.read("stacks/worker-0-1.txt").decode()
        assert "an operator asks" in stacks
        assert 'trainer.py", line' in stacks.partition("an operator asks")[2]
    for source in (kept, run.run_dir.path):
        for seed in ("1", "2"):  # the order of sets must not count
            found = call("incident", "replay", str(source), "--json", PYTHONHASHSEED=seed)
            assert found.returncode == 0, found.stdout + found.stderr
    announced = [each for told in json.loads(found.stdout) for each in told["announced"]]
    told_ids = [event["id"] for event in run.events() if ".s" not in event["id"]]
    assert [each["id"] for each in announced] == told_ids


def test_a_failure_leaves_a_bundle_too(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "fails.py"
    script.write_text("import holdfast\njob = holdfast.join()\nraise ValueError('as planned')\n")
    with start(nproc=1, script=str(script)) as run:
        assert run.wait(RUN_S) == 1
    (kept,) = (run.run_dir.path / "post-mortem").glob("*.zip")
    with zipfile.ZipFile(kept) as bundle:
        assert "worker 0 failed: Traceback" in bundle.read("README.txt").decode()
        assert "ValueError: as planned" in bundle.read("events.jsonl").decode()
    assert call("incident", "replay", str(kept)).returncode == 0


@pytest.mark.parametrize("procs", [1, pytest.param(2, marks=pytest.mark.slow)])
def test_where_the_processes_of_a_worker_hang_is_seen(
    start: Start, tmp_path: Path, procs: int
) -> None:
    script = tmp_path / "hangs.py"
    script.write_text(
        "import ctypes, holdfast\njob = holdfast.join()\nprint('NOW', flush=True)\n"
        "def hang_for_ever():\n    ctypes.CDLL(None).pause()\n"
        "while True:\n    hang_for_ever()\n"
    )
    options = ("--procs-per-worker", str(procs))
    with start(nproc=1, script=str(script), options=options) as run:
        run.until(lambda: run.log().count("NOW") == procs, RUN_S, "the script hangs")
        path = run.run_dir.path / "stacks" / "worker-0-1.txt"
        dumped = tmp_path / "dumped.zip"
        told = call("dump", str(run.run_dir.path), "--output", str(dumped))
        assert told.returncode == 0, told.stderr
        run.until(lambda: path.read_text().count("hang_for_ever") == procs, RUN_S, "the stacks")
        assert ("(process 1)" in path.read_text()) is (procs == 2)
        run.signal(signal.SIGKILL)


@pytest.fixture
def crashed(tmp_path: Path) -> Path:
    path = tmp_path / "crashed"
    write_crashed_run(path)
    return path


def test_a_crashed_run_can_be_dumped(
    crashed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "found.zip"
    assert main(["dump", str(crashed), "--output", str(path)]) == 0
    assert "without new stacks of the workers" in capsys.readouterr().err
    with zipfile.ZipFile(path) as bundle:
        assert "worker 1 was lost" in bundle.read("README.txt").decode()
        assert bundle.read("logs/worker-0-1.log").startswith(b"line 0\n")
    assert main(["incident", "replay", str(path)]) == 2
    assert "holds no recording of a coordinator" in capsys.readouterr().err


def test_files_that_have_no_room_in_a_bundle_are_named(
    crashed: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(black_box, "BUNDLE_BYTES_MAX", 3000)
    path = tmp_path / "found.zip"
    left_out = write_bundle(RunDir(crashed), path)
    assert "logs/worker-0-1.log" in left_out
    with zipfile.ZipFile(path) as bundle:
        assert sum(each.file_size for each in bundle.infolist() if each.filename != "README.txt")
        assert "Left out for lack of room: " in bundle.read("README.txt").decode()
        assert "events.jsonl" in bundle.namelist()


def test_old_bundles_are_removed(crashed: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(black_box, "BUNDLES_MAX", 2)
    run_dir = RunDir(crashed)
    paths = []
    for number, name in enumerate(("1.2", "7.1", "7.2", "7.10")):
        paths.append(keep_bundle(run_dir, name))
        os.utime(paths[-1], (10**9 - number, 10**9 - number))  # the clock goes back
    assert [path.exists() for path in paths] == [False, False, True, True]
    assert list((crashed / "post-mortem").glob(".*")) == []


@pytest.mark.parametrize("words", [("dump", "none"), ("incident", "replay", "none")])
def test_a_missing_run_or_recording_is_refused_in_one_sentence(
    words: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    *first, last = words
    assert main([*first, str(tmp_path / last)]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_a_place_that_cannot_be_written_is_named(
    crashed: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "no" / "found.zip"
    assert main(["dump", str(crashed), "--output", str(path)]) == 2
    assert f"{path} cannot be written: No such file" in capsys.readouterr().err

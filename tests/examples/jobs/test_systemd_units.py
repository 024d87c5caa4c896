"""The units in examples/systemd are valid, and their commands begin, save, resume and end a job."""

from __future__ import annotations

import functools
import os
import re
import shlex
import shutil
import signal
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from conftest import RUN_S, SCRIPTS, finish
from example_kit import add_command
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from places import ROOT

UNITS = ROOT / "examples" / "systemd"


@pytest.mark.parametrize("name", ["holdfast", "holdfast-node"])
def test_systemd_accepts_the_unit(name: str, tmp_path: Path) -> None:
    if shutil.which("systemd-analyze") is None:
        pytest.skip("`systemd-analyze` is not installed (package systemd)")
    unit = tmp_path / f"{name}@train.service"
    shutil.copy(UNITS / f"{name}@.service", unit)
    done = subprocess.run(
        ["systemd-analyze", "verify", unit], capture_output=True, text=True, check=False
    )
    assert (done.returncode, done.stdout + done.stderr) == (0, "")


def read_command(name: str, key: str) -> list[str]:
    """Return the words of a command of a unit, as systemd splits them."""
    text = (UNITS / name).read_text().replace("\\\n", " ")
    (line,) = re.findall(rf"^{key}=(.*)$", text, re.MULTILINE)
    return shlex.split(line)


def make_start(folder: Path, store: Path, gate: Path) -> dict[str, str]:
    """Return the environment that systemd would give to the unit's commands."""
    script = f"{SCRIPTS / 'trainer.py'} --steps 20 --hold 9 {gate}"
    return {
        **os.environ,
        "PATH": add_command(folder / "bin"),
        "FOLDER": str(ROOT),
        "RESUME": "--plain",
        "OPTIONS": f"--nproc 2 --virtual 4 --store {store} --save-every 5 {script}",
        "STATE_DIRECTORY": str(folder),
    }


@pytest.mark.slow
def test_the_unit_saves_when_it_is_stopped_resumes_and_is_not_started_after_its_end(
    tmp_path: Path, reference: Callable[[int], str]
) -> None:
    store, gate = tmp_path / "store", tmp_path / "gate"
    environment = make_start(tmp_path, store, gate)
    condition = read_command("holdfast@.service", "ExecCondition")
    command = read_command("holdfast@.service", "ExecStart")
    may_start = functools.partial(subprocess.run, condition, env=environment, check=False)

    def start(_: list[str], **fields: Any) -> subprocess.Popen[str]:
        return subprocess.Popen(command, env=environment, **fields)

    run_dir = tmp_path / "run"
    assert may_start().returncode == 0
    with LocalRun(run_dir, [], [], popen=start) as run:
        run.until(lambda: run.status()["step"] >= 9, RUN_S, "step 9")
        run.signal(signal.SIGTERM)
        gate.touch()
        assert run.wait(RUN_S) == 130, run.log()
    assert max(Checkpoints(open_storage(str(store))).steps()) >= 9
    assert may_start().returncode == 0
    with LocalRun(run_dir, [], [], popen=start) as again:
        assert finish(again) == reference(20)
        assert again.events("resume")
    assert may_start().returncode == 1

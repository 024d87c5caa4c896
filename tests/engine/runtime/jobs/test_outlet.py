"""Output without a reader, slow disks, and closed descriptors."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS
from holdfast.engine.runtime.local_run import processes_that_name
from holdfast.engine.runtime.outlet import LogFile, Outlet, write_all
from holdfast.engine.runtime.rundir import RunDir
from support import until

WAIT_S = 30.0
CHATTY = str(SCRIPTS / "chatty.py")


def read_lines(descriptor: int, last: str) -> list[str]:
    """Read until there is this line."""
    data = b""
    while not data.endswith(last.encode() + b"\n"):
        data += os.read(descriptor, 1 << 16)
    return data.decode().splitlines()


@pytest.mark.slow
def test_an_outlet_never_waits_and_counts_what_it_drops() -> None:
    read, write = os.pipe()
    outlet = Outlet(
        lambda data: write_all(write, data),
        lambda lost: f"{lost} are missing\n",
        waiting_bytes_max=1 << 20,
    )
    line = b"x" * 1023 + b"\n"
    for _ in range(3000):  # no byte is read yet
        outlet.put(line)
    began = time.monotonic()
    outlet.flush(began + WAIT_S)  # gives up, because no write makes progress
    assert time.monotonic() < began + WAIT_S
    lines: list[str] = []
    reader = threading.Thread(target=lambda: lines.extend(read_lines(read, "after")))
    reader.start()
    outlet.flush(time.monotonic() + WAIT_S)
    outlet.put(b"after\n")
    reader.join(WAIT_S)
    *whole, missing, after = lines
    assert set(whole) == {"x" * 1023}
    assert (missing, after) == (f"{3000 - len(whole)} are missing", "after")
    assert 1024 <= len(whole) < 1200
    outlet.close()
    os.close(write)
    os.close(read)


def test_a_log_goes_on_when_its_disk_does(tmp_path: Path) -> None:
    said: list[str] = []
    log = LogFile(tmp_path / "folder" / "log", said.append)
    for _ in range(2):
        log.write(b"lost\n")
    until(lambda: said, "the complaint")
    (tmp_path / "folder").mkdir()
    log.write(b"kept\n")
    log.close()
    until((tmp_path / "folder" / "log").exists, "the file")
    until(lambda: (tmp_path / "folder" / "log").read_text() == "kept\n", "the line")
    assert said == [f"{tmp_path}/folder/log lacks lines from here on: No such file or directory"]


@pytest.mark.slow
def test_a_reader_that_pauses_holds_up_no_job(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    command = [sys.executable, "-m", "holdfast.cli.main", "run", "--run-dir", str(run_dir.path)]
    words = ["--nproc", "2", "--virtual", "2", CHATTY, str(1 << 20), "12"]
    with subprocess.Popen(
        [*command, *words],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    ) as run:
        until_step(run_dir)
        until(lambda: has_ended(run_dir), "the last step")
        out, err = run.communicate(timeout=RUN_S)
        assert run.returncode == 0
    lines = out.splitlines()
    assert all(line.startswith("step ") and len(line) == 999 for line in lines if line != "the end")
    (missing,) = [line for line in err.splitlines() if "were not shown" in line]
    assert missing.endswith(f"because their reader paused; they are in {run_dir.logs}")
    logged = sum(path.read_text().count("\n") for path in run_dir.logs.glob("worker-*.log"))
    shown = len(lines) + sum(line.startswith("[") for line in err.splitlines())
    assert int(missing.split()[1]) == logged - shown > 0


def has_ended(run_dir: RunDir) -> bool:
    """Return whether the logs of both workers have the last line of standard output."""
    logs = list(run_dir.logs.glob("worker-*.log"))
    return len(logs) == 2 and all(b"the end\n" in log.read_bytes()[-99:] for log in logs)


def until_step(run_dir: RunDir) -> None:
    """Wait until a step is done. The first job of a test session waits for an import of torch."""
    until((run_dir.path / "coordinator.json").exists, "a coordinator")
    until(lambda: list(run_dir.path.glob("logs/worker-*.log")), "a worker's process")
    until(lambda: list(run_dir.path.glob("ledger/*")), "a step")


@pytest.mark.parametrize(
    "closed",
    [
        "<&- >&- 2>&-",
        *(
            pytest.param(each, marks=pytest.mark.slow)
            for each in ("<&-", ">&-", "2>&-", "<&- >&-", "<&- 2>&-", ">&- 2>&-")
        ),
    ],
)
def test_closed_descriptors_are_not_taken_by_files_and_sockets(closed: str, tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path / "run")
    options = ["--run-dir", str(run_dir.path), "--nproc", "1", "--store", str(tmp_path / "store")]
    command = [sys.executable, "-m", "holdfast.cli.main", "run", *options]
    with subprocess.Popen(
        ["sh", "-c", f'exec "$@" {closed}', "sh", *command, CHATTY, "2000", "100000"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
    ) as run:
        try:
            until_step(run_dir)
            assert run.poll() is None
            every = {run.pid, *processes_that_name(run_dir.path)}
            assert len(every) >= 5
            taken = [os.readlink(f"/proc/{pid}/fd/{n}") for pid in every for n in range(3)]
            assert {each for each in taken if each != "/dev/null" and "pipe:" not in each} == set()
        finally:
            run.kill()

"""Signals that ask for an end, to the launcher or to every process of a job at once."""

from __future__ import annotations

import os
import pty
import signal
import subprocess
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS, finish
from holdfast.engine.host.lifetime import SAME_S, EndRequests
from holdfast.engine.runtime.local_run import LocalRun, processes_that_name, strike
from holdfast.engine.runtime.node import fork_server
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from support import until

TERM, HUP, USR1, INT = signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGINT
TRAINER, STARTER = str(SCRIPTS / "trainer.py"), str(SCRIPTS / "starts_processes.py")


def saving(tmp_path: Path, popen: Callable[..., subprocess.Popen[str]]) -> LocalRun:
    """Return a job that saves no checkpoint before its end, with data workers."""
    store = ("--store", str(tmp_path / "store"), "--save-every", "100000")
    options = ["--nproc", "2", "--virtual", "4", *store]
    words = [TRAINER, "--steps", "100000", "--task-s", "0.02", "--loaders", "1"]
    return LocalRun(tmp_path / "run", options, words, popen)


def until_step(run: LocalRun, step: int) -> None:
    run.until(lambda: run.members() and run.status()["step"] > step, RUN_S, f"step {step}")


def saved_steps(tmp_path: Path) -> list[int]:
    return Checkpoints(open_storage(str(tmp_path / "store"))).steps()


@pytest.mark.parametrize(
    "number",
    [pytest.param(TERM, marks=pytest.mark.slow), pytest.param(USR1, marks=pytest.mark.slow)],
)
def test_a_signal_to_every_process_of_a_job_is_one_request_to_save_and_stop(
    number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv(fork_server.VARIABLE)  # so that the job has a fork server of its own
    with saving(tmp_path, subprocess.Popen) as run:
        until_step(run, 3)
        every = [run.pid, *processes_that_name(run.run_dir.path), *fork_servers(run)]
        assert len(every) > 7  # coordinator, agent, writer, fork server, workers, data workers
        assert not any(blocked_signals(pid) for pid in run.members().values())
        for pid in [*every, run.pid]:  # a wrapper forwards its own copy to the launcher
            strike(pid, number)
        assert run.wait(RUN_S) == 130, run.log()
        assert run.leftovers() == []
    (step,) = saved_steps(tmp_path)
    assert step > 3
    assert any(signal.Signals(number).name in line for line in run.err)


def blocked_signals(pid: int) -> int:
    status = Path(f"/proc/{pid}/status").read_text()
    return int(status.split("SigBlk:")[1].split()[0], 16)


def fork_servers(run: LocalRun) -> list[int]:
    """Return the fork servers below a run's launcher."""
    found: list[int] = []
    for pid in processes_that_name(run.run_dir.path):
        children = Path(f"/proc/{pid}/task/{pid}/children")
        for child in children.read_text().split() if children.exists() else ():
            command = Path(f"/proc/{child}/cmdline")
            if command.exists() and fork_server.MODULE.encode() in command.read_bytes():
                found.append(int(child))
    assert found
    return found


@pytest.mark.slow
def test_a_closed_terminal_stops_the_job_in_order(tmp_path: Path) -> None:
    ours, theirs = pty.openpty()

    def start(command: list[str], **options: object) -> subprocess.Popen[str]:
        login = "import fcntl, os, sys, termios; fcntl.ioctl(0, termios.TIOCSCTTY, 0); "
        login += "os.execv(sys.argv[1], sys.argv[1:])"  # the launcher leads the terminal's session
        popen = subprocess.Popen(
            [sys.executable, "-c", login, *command],
            stdin=theirs,
            stdout=theirs,
            stderr=theirs,
            text=True,
            start_new_session=True,
        )
        popen.stdout = popen.stderr = open(os.devnull)  # noqa: SIM115 - for LocalRun, which reads
        return popen

    with saving(tmp_path, start) as run:
        os.close(theirs)
        until_step(run, 3)
        os.close(ours)
        assert run.wait(RUN_S) == 130
        assert run.leftovers() == []
    (step,) = saved_steps(tmp_path)
    assert step > 3


@pytest.mark.slow
def test_a_job_that_ignores_hangups_goes_on(
    tmp_path: Path, reference: Callable[[int], str]
) -> None:
    script = [TRAINER, "--steps", "12", "--hold", "5", str(tmp_path / "go")]
    ignoring = partial(subprocess.Popen, preexec_fn=partial(signal.signal, HUP, signal.SIG_IGN))
    with LocalRun(tmp_path / "run", ["--nproc", "1", "--virtual", "4"], script, ignoring) as run:
        until_step(run, 4)
        run.signal(HUP)
        (tmp_path / "go").touch()
        assert finish(run) == reference(12)


@pytest.mark.parametrize(
    ("arrivals", "count"),
    [
        ([(TERM, 0.0)], 1),
        ([(TERM, 0.0), (TERM, 0.01), (TERM, 0.02)], 1),  # copies of one signal
        ([(INT, 0.0), (INT, SAME_S)], 2),
        ([(INT, 0.0), (INT, SAME_S), (INT, 3 * SAME_S)], 3),
        ([(USR1, 0.0), (TERM, 60.0), (HUP, 60.0)], 1),  # one end, asked for in several ways
        ([(TERM, 0.0), (HUP, 0.0), (TERM, 9.0)], 2),
    ],
)
def test_which_signals_are_one_request(arrivals: list[tuple[int, float]], count: int) -> None:
    requests = EndRequests()
    for number, at in arrivals:
        requests.add(number, at)
    assert (requests.first, requests.count) == (arrivals[0][0], count)


@pytest.mark.slow
def test_what_a_script_has_started_ends_with_its_worker(tmp_path: Path) -> None:
    def started(worker: int) -> list[int]:
        return processes_that_name(tmp_path / f"of-{worker}")

    go = tmp_path / "go"
    options = ["--nproc", "2", "--virtual", "2"]
    with LocalRun(tmp_path / "run", options, [STARTER, str(tmp_path), str(go)]) as run:
        members = run.until_members(2)
        run.until(lambda: [len(started(w)) for w in (0, 1)] == [3, 3], RUN_S, "all of them")
        before = started(0)
        strike(members[1])
        run.until(lambda: set(started(1)).isdisjoint(members), RUN_S, "nothing")
        until(lambda: len(started(1)) == 3 and started(0) == before, "those of the next process")
        agent = run.status()["agents"][0]["pid"]
        strike(agent)
        until(lambda: not set(before) & set(started(0)), "their end")
        go.touch()
        assert run.wait(RUN_S) == 0, run.log()
        assert started(0) == started(1) == []

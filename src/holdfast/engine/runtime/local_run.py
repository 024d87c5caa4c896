"""Starts real runs for tests as a user would, disturbs them from outside and watches them end.

It is shipped so that users can test their own scripts. No function here reaches inside the job: it
reads the status, the events file and the output, and sends signals to processes.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.host import lifetime
from holdfast.engine.net.tls import client_of
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.job_events import read_events
from holdfast.engine.runtime.rundir import RunDir

POLL_S = 0.01
# The states of workers that are members of the view.
ACTIVE = ("computing", "waiting", "ended", "hot spare")


class RunEnded(AssertionError):
    """Reports that the run ended before an awaited event."""


class LocalRun:
    """Runs one `holdfast run` in a process of its own, which ends with the context manager."""

    def __init__(
        self,
        run_dir: Path,
        options: Sequence[str],
        script: Sequence[str],
        popen: Callable[..., subprocess.Popen[str]] = subprocess.Popen,
        tls: Path | None = None,
        command: Sequence[str] = (),
        bound: bool = False,
    ) -> None:
        """Prepare a run. `command`: another than `run`, with arguments, that works in `run_dir`.

        `bound`: it ends with the thread that enters the context, also if that is killed.
        """
        self._bound = bound
        self._command = list(command)
        self.run_dir = RunDir(run_dir)
        self.tls = tls
        self.out: list[str] = []  # lines of standard output so far
        self.err: list[str] = []
        self._options = list(options)
        self._script = list(script)
        self._start = popen
        self._popen: subprocess.Popen[str] | None = None
        self._readers: list[threading.Thread] = []

    def __enter__(self) -> LocalRun:
        command = self._command or ["run", "--run-dir", str(self.run_dir.path)]
        first = (lifetime.__name__, str(os.getpid())) if self._bound else ()
        self._popen = self._start(
            [
                *(sys.executable, "-m", *first, "holdfast.cli.main", *command),
                *(("--tls", str(self.tls)) if self.tls is not None else ()),
                *(*self._options, *self._script),
            ],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )
        for pipe, lines in ((self._popen.stdout, self.out), (self._popen.stderr, self.err)):
            reader = threading.Thread(target=_read_lines, args=(pipe, lines), daemon=True)
            reader.start()
            self._readers.append(reader)
        return self

    def __exit__(self, *exc: object) -> None:
        if self._popen is not None and self._popen.poll() is None:
            self._popen.kill()
        self.wait(30.0)

    @property
    def pid(self) -> int:
        """Return the launcher's process id."""
        return self._process().pid

    def wait(self, timeout_s: float) -> int:
        """Wait for the exit status. Raises subprocess.TimeoutExpired."""
        code = self._process().wait(timeout_s)
        for reader in self._readers:
            reader.join(timeout_s)
        return code

    def is_running(self) -> bool:
        return self._process().poll() is None

    def signal(self, number: int) -> None:
        """Send a signal to the launcher, as a terminal or a scheduler would."""
        self._process().send_signal(number)

    def status(self) -> dict[str, Any]:
        """Return the status as `holdfast status --json` prints it. HoldfastError: no answer."""
        tls = client_of(self.tls)
        return job_status(self.run_dir, tls).to_dict()

    def members(self) -> dict[int, int]:
        """Return worker -> pid of the members of the view; empty while there is no answer."""
        with contextlib.suppress(HoldfastError):
            workers = self.status()["workers"]
            return {w["id"]: w["pid"] for w in workers if w["state"] in ACTIVE}
        return {}

    def until(self, ready: Callable[[], Any], timeout_s: float, what: str) -> Any:
        """Poll until `ready()` is truthy and return it; RunEnded if the run ends before.

        A HoldfastError counts as "not yet": there is no answer while the coordinator is replaced.
        """
        deadline, problem = time.monotonic() + timeout_s, ""
        while True:
            try:
                if found := ready():
                    return found
            except HoldfastError as error:
                problem = f" ({error})"
            if not self.is_running():
                raise RunEnded(f"the run ended before {what}{problem}:\n{self.log()}")
            assert time.monotonic() < deadline, (
                f"not in {timeout_s} s: {what}{problem}\n{self.log()}"
            )
            time.sleep(POLL_S)

    def until_members(self, count: int, timeout_s: float = 60.0) -> dict[int, int]:
        def enough_members() -> dict[int, int] | None:
            members = self.members()
            return members if len(members) >= count else None

        found: dict[int, int] = self.until(enough_members, timeout_s, f"{count} members")
        return found

    def events(self, kind: str | None = None) -> list[dict[str, Any]]:
        """Return the job's event log so far (events.jsonl), or its events of one kind."""
        return [e for e in read_events(self.run_dir.events) if kind is None or e["kind"] == kind]

    def leftovers(self) -> list[int]:
        """Find live processes of this run, which name its directory."""
        return [pid for pid in processes_that_name(self.run_dir.path) if pid != self.pid]

    def log(self) -> str:
        return "\n".join([*self.err[-40:], *self.out[-10:]])

    def _process(self) -> subprocess.Popen[str]:
        if self._popen is None:
            raise RuntimeError("the run has not been started: use it in a with statement")
        return self._popen


def processes_that_name(path: Path) -> list[int]:
    """Find other live processes that name a path in environment or arguments, or hold it open."""
    mark = str(path.resolve())
    others = [name for name in os.listdir("/proc") if name.isdigit() and int(name) != os.getpid()]
    return [int(name) for name in others if _names(Path("/proc", name), mark)]


def _names(process: Path, mark: str) -> bool:
    """Return whether a process, a directory of /proc, names `mark`; False once it has ended."""
    with contextlib.suppress(OSError):
        for part in ("environ", "cmdline"):
            if mark.encode() in (process / part).read_bytes():
                return True
        for descriptor in os.listdir(process / "fd"):
            with contextlib.suppress(FileNotFoundError):
                if os.readlink(process / "fd" / descriptor).startswith(mark):
                    return True
    return False


def strike(pid: int, number: int = signal.SIGKILL) -> bool:
    """Send a signal to a process that may have ended; return whether it existed."""
    with contextlib.suppress(ProcessLookupError):
        os.kill(pid, number)
        return True
    return False


def _read_lines(pipe: Any, lines: list[str]) -> None:
    for line in pipe:
        lines.append(line.rstrip("\n"))

"""Keeps a scratch copy of the tree, plants one bug at a time in it and runs checks on it.

Checks run in a forked process with a session of its own. When that process ends, everything that it
has started ends with it, whatever the bug did.
"""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import signal
import sys
import time
import traceback
from collections.abc import Callable
from dataclasses import asdict
from multiprocessing.connection import wait
from pathlib import Path
from typing import Any

from mutants import checks
from mutants.planting import Mutant

LEFT_OUT = shutil.ignore_patterns(
    ".git", ".venv", ".mutants", ".*_cache", ".hypothesis", "__pycache__", "holdfast-*", "*.log"
)


class Bench:
    """Runs one piece of work at a time in its copy of the tree."""

    def __init__(self, root: Path, scratch: Path) -> None:
        self.scratch = scratch
        self._root = root
        self._planted: tuple[Path, bytes, int] | None = None
        self._pid = 0  # the process of the running work; 0: no work runs
        self._reads = -1
        self._heard = b""
        self._deadline = 0.0

    def make(self) -> None:
        """Copy the tree."""
        shutil.copytree(self._root, self.scratch, ignore=LEFT_OUT, dirs_exist_ok=True)

    # ------------------------------------------------------------ bugs

    def plant(self, mutant: Mutant) -> None:
        """Put the bug into the copy; `mend` takes it out again."""
        file = self.scratch / mutant.path
        source, made_ns = file.read_bytes(), file.stat().st_mtime_ns
        self._planted = file, source, made_ns
        file.write_bytes(mutant.planted(source))

    def mend(self) -> None:
        """Restore the file, with its date, by which the compiled modules stay valid."""
        if self._planted is not None:
            file, source, made_ns = self._planted
            file.write_bytes(source)
            os.utime(file, ns=(made_ns, made_ns))
            self._planted = None

    # ------------------------------------------------------------ work

    def start(self, work: Callable[[Path], Any], limit_s: float, *, keep: bool = False) -> None:
        """Begin work in a process of its own. `keep`: the modules it compiles."""
        reads, writes = os.pipe()
        self._heard, self._reads = b"", reads
        self._deadline = time.monotonic() + limit_s
        sys.stdout.flush()
        self._pid = os.fork()
        if self._pid:
            os.close(writes)
            return
        code = 1
        try:
            os.setsid()
            self._quieten()
            sys.dont_write_bytecode = not keep
            if not keep:
                os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
            checks.enter(self.scratch)
            answer = json.dumps(work(self.scratch)).encode() + b"\n"
            with os.fdopen(writes, "wb") as out:
                out.write(answer)
            code = 0
        except BaseException:  # noqa: BLE001 - this process has nobody else to tell
            traceback.print_exc()
        finally:
            sys.stderr.flush()
            os._exit(code)

    def _quieten(self) -> None:
        log = os.open(self.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(log, 1)
        os.dup2(log, 2)
        os.dup2(os.open(os.devnull, os.O_RDONLY), 0)

    @property
    def log(self) -> Path:
        """Return the file with the output of the newest work."""
        return self.scratch.with_name(f"{self.scratch.name}.log")

    @property
    def reads(self) -> int:
        """Return the descriptor that becomes readable when there may be something to `poll`."""
        return self._reads

    def poll(self) -> tuple[bool, Any]:
        """Return whether the work is over, and its answer; None if it gave none in time."""
        over = time.monotonic() > self._deadline
        if wait([self._reads], 0):
            heard = os.read(self._reads, 1 << 20)
            self._heard += heard
            over = over or not heard or self._heard.endswith(b"\n")
        if not over:
            return False, None
        self.end()
        shutil.rmtree(self.scratch / ".hypothesis", ignore_errors=True)
        return True, json.loads(self._heard) if self._heard.endswith(b"\n") else None

    def end(self) -> None:
        """End the work, and every process that it has started."""
        if self._pid:
            os.close(self._reads)
            with contextlib.suppress(ProcessLookupError, PermissionError):
                os.killpg(self._pid, signal.SIGKILL)
            os.waitpid(self._pid, 0)
            self._pid = 0

    def do(self, work: Callable[[Path], Any], limit_s: float, *, keep: bool = False) -> Any:
        """Do the work and wait for its answer."""
        self.start(work, limit_s, keep=keep)
        over, answer = False, None
        while not over:
            wait([self._reads], 0.2)
            over, answer = self.poll()
        return answer


def checked(plan: checks.Plan) -> Callable[[Path], dict[str, Any]]:
    """Return the work of running the checks of a plan."""
    return lambda root: asdict(checks.run(plan, root))

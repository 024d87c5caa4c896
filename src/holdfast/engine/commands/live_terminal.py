"""Shows one line on a running job at the bottom of a terminal; all other output scrolls above it.

The job's processes write to pipes then, which are copied here. It reads the run's files and asks
the coordinator, in a thread of its own; only the terminal waits for it.
"""

from __future__ import annotations

import contextlib
import os
import ssl
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path

from rich.live import Live
from rich.text import Text

from holdfast.engine.commands.plain_console import ScriptConsole
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.core.plain_text import escape_controls
from holdfast.engine.net.tls import client_of
from holdfast.engine.records.run_tail import RunTail
from holdfast.engine.records.summary import describe_left, describe_workers
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.job_status import JobStatus
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.runtime.supervise import Streams

LOOK_S = 1.0
END_S = 5.0  # for the copying of the last lines
CHUNK_BYTES = 64 << 10


@contextlib.contextmanager
def live_terminal(run_dir: RunDir, tls: Path | None) -> Iterator[Streams | None]:
    """Yield the streams for a job's processes; None if standard error is no terminal."""
    console = ScriptConsole(stderr=True)
    if not console.is_terminal:
        yield None
        return
    live = Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False)
    live.start()
    line = StatusLine(run_dir, client_of(tls))
    over = threading.Event()
    looking = threading.Thread(target=_keep_up, args=(live, line, over), daemon=True)
    looking.start()
    out, err = _Copy(console, sys.stdout.isatty()), _Copy(console, shown=True)
    try:
        yield Streams(out.fd, err.fd)
    finally:
        over.set()
        out.close()
        err.close()
        looking.join()
        with contextlib.suppress(OSError):  # the terminal is gone
            live.stop()


class StatusLine:
    """Makes the line. A coordinator that does not answer leaves it as it is."""

    def __init__(self, run_dir: RunDir, tls: ssl.SSLContext | None) -> None:
        self._run_dir = run_dir
        self._tls = tls
        self._tail = RunTail(run_dir.path)
        self._status: JobStatus | None = None

    def draw(self) -> Text:
        """Return the line as it is now."""
        self._tail.look()
        self._tail.look_at_loss()
        with contextlib.suppress(HoldfastError):
            self._status = job_status(self._run_dir, self._tls)
            self._tail.note_step(self._status.step, time.monotonic())
        text = escape_controls(self._describe())
        return Text(text, style="bold cyan", no_wrap=True, overflow="ellipsis")

    def _describe(self) -> str:
        status, tail = self._status, self._tail
        if status is None:
            return "starting"
        rate, loss = tail.steps_per_s, tail.loss
        parts = [
            f"{status.state.value}: step {status.step}",
            "" if rate is None else f"{rate:.3g} steps/s",
            "" if loss is None else f"loss {loss:.4g}",
            describe_workers(sum(worker.state.hosts for worker in status.workers)),
        ]
        if (left_s := tail.estimate_left_s()) is not None:
            parts.append(describe_left(left_s))
        if incidents := tail.incidents:
            ago_s = max(time.time() - incidents[-1].began_at, 0.0)
            parts.append(f"{incidents[-1].title} ({ago_s:.0f} s ago)")
        return ", ".join(part for part in parts if part)


def _keep_up(live: Live, line: StatusLine, over: threading.Event) -> None:
    with contextlib.suppress(OSError):  # the terminal is gone
        while not over.wait(LOOK_S):
            live.update(line.draw(), refresh=True)


class _Copy:
    """Copies a pipe to the terminal above the line, or to standard output if that is a file.

    It continues to read when the terminal is gone: the job's processes would wait for it.
    """

    def __init__(self, console: ScriptConsole, shown: bool) -> None:
        read_fd, self.fd = os.pipe2(os.O_CLOEXEC)
        self._console = console if shown else None
        self._rest = b""  # a line that has not ended
        self._thread = threading.Thread(target=self._run, args=(read_fd,), daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Wait until the last lines are copied: the job's processes have ended."""
        os.close(self.fd)
        self._thread.join(END_S)

    def _run(self, read_fd: int) -> None:
        write = _write_all if self._console is None else self._show
        while data := os.read(read_fd, CHUNK_BYTES):
            try:
                write(data)
            except OSError:
                write = _drop
        with contextlib.suppress(OSError):
            if self._rest:
                self._show_line(self._rest)
        os.close(read_fd)

    def _show(self, data: bytes) -> None:
        *lines, self._rest = (self._rest + data).replace(b"\r", b"\n").split(b"\n")
        for each in lines:
            self._show_line(each)

    def _show_line(self, line: bytes) -> None:
        assert self._console is not None
        text = Text.from_ansi(line.decode(errors="replace"))
        self._console.print(text, soft_wrap=True, highlight=False)


def _write_all(data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(sys.stdout.fileno(), view) :]


def _drop(data: bytes) -> None:
    """Drop data for a terminal that is gone."""

"""Keeps processes alive until the job is over: restarts what crashes, passes Ctrl-C on.

Everything it starts dies with it. It knows nothing of jobs: which exit status means an ordinary end
is told by whoever starts it.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

RESTARTS_MAX = 10  # of one process within RESTART_WINDOW_S
RESTART_WINDOW_S = 60.0
FAREWELL_S = 10.0
INTERRUPTS_MAX = 2  # the one after kills


@dataclass(slots=True)
class Kept:
    """A process that is started again when it crashes. `command` is told how often it started."""

    name: str
    command: Callable[[int], list[str]]
    ends_with: Collection[int] = (0,)
    excused: Collection[int] = ()  # it is started again after these, however often
    pass_fds: Sequence[int] = ()
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)  # none or one
    pidfd: int = -1
    starts: int = 0
    crashes: list[float] = field(default_factory=list)
    code: int | None = None  # with which it ended last


class Supervisor:
    """`run` blocks until one of the processes has ended in order. The first one hears of Ctrl-C."""

    def __init__(self, kept: Sequence[Kept]) -> None:
        self._kept = kept
        self._interrupts = 0

    def run(self) -> bool:
        """Returns whether it was interrupted. Nothing that it started is left."""
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = signal.set_wakeup_fd(wake_write)
        handlers = {s: signal.signal(s, self._interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            for kept in self._kept:
                self._start(kept)
            self._supervise(wake_read)
            return self._interrupts > 0
        finally:
            signal.set_wakeup_fd(previous)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for kept in self._kept:
                for popen in kept.running:
                    popen.kill()
                    popen.wait()
            for each in (wake_read, wake_write):
                os.close(each)

    def _interrupt(self, number: int, frame: object) -> None:
        self._interrupts += 1

    def _supervise(self, wake_read: int) -> None:
        passed_on = 0
        while True:
            readable, _, _ = select.select([wake_read, *(k.pidfd for k in self._kept)], [], [])
            if wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            if self._interrupts > passed_on:
                passed_on = self._interrupts
                if passed_on > INTERRUPTS_MAX:
                    return
                _say("stopping (Ctrl-C twice more to kill)")
                for popen in self._kept[0].running:
                    popen.send_signal(signal.SIGTERM)
            for kept in self._kept:
                if kept.pidfd in readable and self._ended(kept):
                    return

    def _ended(self, kept: Kept) -> bool:
        """One process has gone: start it again, or let the others end as well."""
        os.close(kept.pidfd)
        code = kept.code = kept.running.pop().wait()
        if code in kept.ends_with:
            deadline = time.monotonic() + FAREWELL_S
            for other in self._kept:
                for popen in other.running:
                    with contextlib.suppress(subprocess.TimeoutExpired):
                        other.code = popen.wait(max(deadline - time.monotonic(), 0.1))
            return True
        if code not in kept.excused:
            now = time.monotonic()
            kept.crashes = [t for t in kept.crashes if t > now - RESTART_WINDOW_S] + [now]
            if len(kept.crashes) > RESTARTS_MAX:
                count = len(kept.crashes)
                raise SystemExit(f"holdfast: the {kept.name} died {count} times in a minute")
            _say(f"the {kept.name} died ({code}) and is restarted")
        self._start(kept)
        return False

    def _start(self, kept: Kept) -> None:
        kept.starts += 1
        popen = subprocess.Popen(
            kept.command(kept.starts),
            stdin=subprocess.DEVNULL,
            pass_fds=kept.pass_fds,
            start_new_session=True,
        )
        kept.running.append(popen)
        kept.pidfd = os.pidfd_open(popen.pid)


def _say(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr, flush=True)

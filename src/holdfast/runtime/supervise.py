"""Keeps processes alive until the job is over: restarts what crashes, passes signals to end on.

Everything it starts dies with it. It knows nothing of jobs: the caller says which exit status means
an ordinary end.
"""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field

from holdfast.core.errors import WorldError
from holdfast.net.readiness import wait_readable

RESTARTS_MAX = 10  # restarts of one process within RESTART_WINDOW_S
RESTART_WINDOW_S = 60.0
FAREWELL_S = 10.0
FINISH_S = 30.0  # for serving processes to finish their work
INTERRUPTS_MAX = 2  # the next one kills


@dataclass(slots=True)
class Kept:
    """Describes a process that is started again when it crashes.

    `command` is told how often it has been started. `excused`: exit statuses after which it is
    started again however often, and what to say then. `serves`: the others can do without it, and
    it is told to end when they have ended. `spared`: they can do without it, too, but it ends by
    itself. `has_told`: whether the others are told to end, by it or
    by another one, once it has ended with some status; if not, they are not waited for.
    """

    name: str
    command: Callable[[int], list[str]]
    ends_with: Collection[int] = (0,)
    excused: Mapping[int, str] = field(default_factory=dict)
    pass_fds: Sequence[int] = ()
    serves: bool = False
    spared: bool = False
    give_up: Callable[[], None] = lambda: None  # lets others stop waiting for it
    has_told: Callable[[int], bool] = lambda code: True
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)  # none or one
    pidfd: int = -1
    starts: int = 0
    crashes: list[float] = field(default_factory=list)
    code: int | None = None  # exit status of its last end


@dataclass(frozen=True, slots=True)
class Streams:
    """Names the descriptors to which processes write their output instead of ours."""

    out: int
    err: int


class Supervisor:
    """Runs processes until the first one ends in order, and receives the signals.

    Another one that ends in order is not started again. After a signal any end is final.
    """

    def __init__(self, kept: Sequence[Kept], streams: Streams | None = None) -> None:
        self._kept = kept
        self._streams = streams
        self._signals: list[int] = []

    def run(self) -> int:
        """Run, and return the first signal that asked for the end, or 0. No process is left.

        WorldError if a process crashes again and again.
        """
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = signal.set_wakeup_fd(wake_write)
        handlers = {s: signal.signal(s, self._interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            for kept in self._kept:
                self._start(kept)
            self._supervise(wake_read)
            return self._signals[0] if self._signals else 0
        finally:
            signal.set_wakeup_fd(previous)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for kept in self._kept:
                for popen in kept.running:
                    popen.kill()
                    popen.wait()
                    os.close(kept.pidfd)
            for each in (wake_read, wake_write):
                os.close(each)

    def _interrupt(self, number: int, frame: object) -> None:
        self._signals.append(number)

    def _supervise(self, wake_read: int) -> None:
        passed_on = 0
        while self._kept[0].running:
            pidfds = [kept.pidfd for kept in self._kept if kept.running]
            readable = wait_readable([wake_read, *pidfds])
            if wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            if len(self._signals) > passed_on:
                passed_on = len(self._signals)
                if passed_on > INTERRUPTS_MAX:
                    return
                _say("stopping (Ctrl-C twice more to kill)")
                self._kept[0].running[0].terminate()
            for kept in self._kept:
                if kept.running and kept.pidfd in readable:
                    self._handle_end(kept)
        ended_at, first = time.monotonic(), self._kept[0]
        assert first.code is not None
        told = first.has_told(first.code)
        for kept in self._kept:
            for popen in kept.running:
                if kept.serves:
                    popen.terminate()
                elif not told:
                    popen.kill()
                deadline = ended_at + (FINISH_S if kept.serves else FAREWELL_S)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    popen.wait(max(deadline - time.monotonic(), 0.1))

    def _handle_end(self, kept: Kept) -> None:
        """Handle a process that has ended: start it again, unless that was its ordinary end."""
        os.close(kept.pidfd)
        code = kept.code = kept.running.pop().wait()
        if code in kept.ends_with or self._signals:
            return
        if code not in kept.excused:
            now = time.monotonic()
            kept.crashes = [t for t in kept.crashes if t > now - RESTART_WINDOW_S] + [now]
            is_spared = kept.serves or (kept.spared and kept is not self._kept[0])
            if len(kept.crashes) > RESTARTS_MAX and is_spared:
                _say(f"the {kept.name} died {len(kept.crashes)} times in a minute: it is given up")
                kept.give_up()
                return
            if len(kept.crashes) > RESTARTS_MAX:
                raise WorldError(f"the {kept.name} died {len(kept.crashes)} times in a minute")
        why = kept.excused.get(code, f"the {kept.name} died ({code}) and is restarted")
        if why:
            _say(why)
        self._start(kept)

    def _start(self, kept: Kept) -> None:
        kept.starts += 1
        popen = subprocess.Popen(
            kept.command(kept.starts),
            stdin=subprocess.DEVNULL,
            stdout=self._streams.out if self._streams else None,
            stderr=self._streams.err if self._streams else None,
            pass_fds=kept.pass_fds,
            start_new_session=True,
        )
        kept.running.append(popen)
        kept.pidfd = os.pidfd_open(popen.pid)


def _say(text: str) -> None:
    print(f"holdfast: {text}", file=sys.stderr, flush=True)

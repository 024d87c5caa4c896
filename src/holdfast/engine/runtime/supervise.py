"""Keeps processes alive until the job is over: restarts crashed ones, passes signals to end on.

All its processes die with it. It does not know jobs: the caller names the exit statuses of an
ordinary end.
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

from holdfast.engine.core.errors import WorldError
from holdfast.engine.host.lifetime import (
    ENDING,
    ORDERS,
    EndRequests,
    adopt_orphans,
    end_all_orphans,
    end_orphans,
    held_back,
    list_children,
)
from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.runtime.outlet import STALLED_S, Outlet

RESTARTS_MAX = 10  # restarts of one process within RESTART_WINDOW_S
RESTART_WINDOW_S = 60.0
FAREWELL_S = 10.0
FINISH_S = 30.0  # for serving processes to finish their work
INTERRUPTS_MAX = 2  # the next one kills


@dataclass(slots=True)
class Kept:
    """Describes a process that is started again when it crashes.

    `command` gets the number of its starts so far. `excused`: exit statuses after which it is
    started again however often, each with a line to print. `serves`: the other processes can do
    without it, and it is ordered to end when they have ended. `spared`: they can do without it,
    too, but it ends by itself. `has_told`: returns, by its exit status, whether the other processes
    get an order to end from it or from its successor; if not, they are not waited for.
    """

    name: str
    command: Callable[[int], list[str]]
    ends_with: Collection[int] = (0,)
    excused: Mapping[int, str] = field(default_factory=dict)
    pass_fds: Sequence[int] = ()
    serves: bool = False
    spared: bool = False
    give_up: Callable[[], None] = lambda: None  # ends the wait of the other processes for it
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

    A further process that ends in order is not started again. After a signal any end is final.
    """

    def __init__(
        self, kept: Sequence[Kept], streams: Streams | None = None, *, adopts: bool = False
    ) -> None:
        """Prepare to run processes. `adopts`: no process of theirs is to outlive them."""
        self._kept = kept
        self._streams = streams
        self._adopts = adopts
        self._lines = Outlet(lambda line: say(line.decode()), lambda lost: "")
        self._requests = EndRequests()

    def run(self) -> int:
        """Run, and return the first signal that asked for the end, or 0. No process is left.

        WorldError if a process crashes again and again.
        """
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = signal.set_wakeup_fd(wake_write)
        handlers = {
            number: signal.signal(number, self._interrupt)
            for number in ENDING
            if number != signal.SIGHUP or signal.getsignal(number) is not signal.SIG_IGN  # nohup
        }
        handlers[signal.SIGCHLD] = signal.signal(signal.SIGCHLD, lambda number, frame: None)
        adopt_orphans(adopt=self._adopts)
        earlier = list_children()
        try:
            for kept in self._kept:
                self._start(kept)
            self._supervise(wake_read, earlier)
            return self._requests.first
        finally:
            signal.set_wakeup_fd(previous)
            for number, handler in handlers.items():
                # Further copies of a signal that asked for the end must not cut that short.
                if not self._requests.count or number == signal.SIGCHLD:
                    signal.signal(number, handler)
            for kept in self._kept:
                for popen in kept.running:
                    popen.kill()
                    popen.wait()
                    os.close(kept.pidfd)
            if self._adopts:
                end_all_orphans(earlier, FAREWELL_S)
                adopt_orphans(adopt=False)
            self._lines.flush(time.monotonic() + STALLED_S)
            self._lines.close()
            for each in (wake_read, wake_write):
                os.close(each)

    def _say(self, text: str) -> None:
        """Print a line soon: a paused terminal must not keep a process from starting again."""
        self._lines.put(text.encode())

    def _interrupt(self, number: int, frame: object) -> None:
        self._requests.add(number, time.monotonic())

    def _supervise(self, wake_read: int, earlier: Sequence[int]) -> None:
        passed_on = 0
        while self._kept[0].running:
            pidfds = [kept.pidfd for kept in self._kept if kept.running]
            readable = wait_readable([wake_read, *pidfds])
            if wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            if self._requests.count > passed_on:
                passed_on = self._requests.count
                if passed_on > INTERRUPTS_MAX:
                    return
                asked = self._requests.first
                self._kept[0].running[0].send_signal(ORDERS[asked])
                hint = " (Ctrl-C twice more to kill)" if asked == signal.SIGINT else ""
                self._say(f"{signal.Signals(asked).name}: stopping{hint}")
            for kept in self._kept:
                if kept.running and kept.pidfd in readable:
                    self._handle_end(kept)
            if self._adopts:
                ours = [popen.pid for kept in self._kept for popen in kept.running]
                end_orphans([*earlier, *ours])
        ended_at, first = time.monotonic(), self._kept[0]
        assert first.code is not None
        told = first.has_told(first.code)
        for kept in self._kept:
            for popen in kept.running:
                if kept.serves:
                    popen.send_signal(ORDERS[signal.SIGTERM])
                elif not told:
                    popen.kill()
                deadline = ended_at + (FINISH_S if kept.serves else FAREWELL_S)
                with contextlib.suppress(subprocess.TimeoutExpired):
                    popen.wait(max(deadline - time.monotonic(), 0.1))

    def _handle_end(self, kept: Kept) -> None:
        """Handle a process that has ended: start it again, unless that was its ordinary end."""
        os.close(kept.pidfd)
        code = kept.code = kept.running.pop().wait()
        if code in kept.ends_with or self._requests.count:
            return
        if code not in kept.excused:
            now = time.monotonic()
            kept.crashes = [t for t in kept.crashes if t > now - RESTART_WINDOW_S] + [now]
            is_spared = kept.serves or (kept.spared and kept is not self._kept[0])
            if len(kept.crashes) > RESTARTS_MAX and is_spared:
                times = f"{len(kept.crashes)} times in a minute"
                self._say(f"the {kept.name} died {times}: it is given up")
                kept.give_up()
                return
            if len(kept.crashes) > RESTARTS_MAX:
                raise WorldError(f"the {kept.name} died {len(kept.crashes)} times in a minute")
        why = kept.excused.get(code, f"the {kept.name} died ({code}) and is restarted")
        if why:
            self._say(why)
        self._start(kept)

    def _start(self, kept: Kept) -> None:
        kept.starts += 1
        with held_back():
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


def say(text: str) -> None:
    """Print a line for people. A terminal that is gone, or a closed pipe, is no failure."""
    try:
        print_line(text)
    except OSError:
        # What stays in the stream's buffer would make the end of this process fail.
        with contextlib.suppress(OSError, ValueError):
            null = os.open(os.devnull, os.O_WRONLY)
            os.dup2(null, sys.stderr.fileno())
            os.close(null)

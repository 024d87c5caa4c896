"""One machine's launcher: starts coordinator and agent, keeps them alive, ends with the job.

It holds the coordinator's listening socket, so a coordinator that dies comes back at the same
address. Everything it starts dies with it. Exit status: 0 when the job succeeded, 1 when it failed,
130 after Ctrl-C.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import subprocess
import sys
import time
from dataclasses import dataclass, field

from holdfast.runtime.rundir import JobSpec, RunDir

AGENT = "node0"
RESTARTS_MAX = 10  # of one kind of process within RESTART_WINDOW_S
RESTART_WINDOW_S = 60.0
FAREWELL_S = 10.0
HOST = "127.0.0.1"


@dataclass(slots=True)
class _Kept:
    """A process that is started again when it crashes."""

    name: str
    running: list[subprocess.Popen[bytes]] = field(default_factory=list)  # none or one
    pidfd: int = -1
    starts: list[float] = field(default_factory=list)


class Launcher:
    """`run` blocks until the job is over and nothing of it is left."""

    def __init__(self, run_dir: RunDir, spec: JobSpec) -> None:
        self._run_dir = run_dir
        self._spec = spec
        self._coordinator = _Kept("coordinator")
        self._agent = _Kept("agent")
        self._interrupts = 0

    def run(self) -> int:
        listener = socket.create_server((HOST, 0), backlog=4096)
        listener.set_inheritable(True)
        wake_read, wake_write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        previous = signal.set_wakeup_fd(wake_write)
        handlers = {s: signal.signal(s, self._interrupt) for s in (signal.SIGINT, signal.SIGTERM)}
        try:
            self._start(self._coordinator, listener)
            self._start(self._agent, listener)
            return self._supervise(listener, wake_read)
        finally:
            signal.set_wakeup_fd(previous)
            for number, handler in handlers.items():
                signal.signal(number, handler)
            for kept in (self._agent, self._coordinator):
                for popen in kept.running:
                    popen.kill()
                    popen.wait()
            for each in (wake_read, wake_write):
                os.close(each)
            listener.close()

    def _interrupt(self, number: int, frame: object) -> None:
        self._interrupts += 1

    def _supervise(self, listener: socket.socket, wake_read: int) -> int:
        passed_on = 0
        while True:
            waiting = [wake_read, self._coordinator.pidfd, self._agent.pidfd]
            readable, _, _ = select.select(waiting, [], [])
            if wake_read in readable:
                with contextlib.suppress(BlockingIOError):
                    os.read(wake_read, 4096)
            if self._interrupts > passed_on:
                passed_on = self._interrupts
                if passed_on > 2:
                    return 130
                print("holdfast: stopping (Ctrl-C twice more to kill)", file=sys.stderr, flush=True)
                for popen in self._coordinator.running:
                    popen.send_signal(signal.SIGTERM)
            if self._coordinator.pidfd in readable:
                code = self._reap(self._coordinator)
                if code in (0, 1):
                    return self._finish(passed_on > 0)
                self._restart(self._coordinator, code, listener)
            if self._agent.pidfd in readable:
                code = self._reap(self._agent)
                if code == 0:
                    return self._finish(passed_on > 0)
                self._restart(self._agent, code, listener)

    def _finish(self, interrupted: bool) -> int:
        """One of the two has ended because the job has: let the other end as well."""
        deadline = time.monotonic() + FAREWELL_S
        for kept in (self._agent, self._coordinator):
            for popen in kept.running:
                with contextlib.suppress(subprocess.TimeoutExpired):
                    popen.wait(max(deadline - time.monotonic(), 0.1))
        outcome = self._run_dir.outcome()
        record = self._run_dir.load_record()
        if outcome is None and record is not None:  # decided and journaled, but not yet written out
            outcome = record.outcome
        if outcome:
            print(f"holdfast: {outcome}", file=sys.stderr, flush=True)
        if interrupted:
            return 130
        return 0 if outcome == "" else 1

    def _start(self, kept: _Kept, listener: socket.socket) -> None:
        kept.starts.append(time.monotonic())
        port, me = listener.getsockname()[1], os.getpid()
        run_dir = str(self._run_dir.path)
        module = f"holdfast.runtime.{kept.name}"
        args, fds = [run_dir, str(listener.fileno()), str(me)], [listener.fileno()]
        if kept is self._agent:
            args, fds = [run_dir, HOST, str(port), AGENT, str(len(kept.starts)), str(me)], []
        popen = subprocess.Popen(
            [sys.executable, "-m", module, *args],
            stdin=subprocess.DEVNULL,
            pass_fds=fds,
            start_new_session=True,
        )
        kept.running.append(popen)
        kept.pidfd = os.pidfd_open(popen.pid)

    def _reap(self, kept: _Kept) -> int:
        os.close(kept.pidfd)
        return kept.running.pop().wait()

    def _restart(self, kept: _Kept, code: int, listener: socket.socket) -> None:
        recent = [t for t in kept.starts if t > time.monotonic() - RESTART_WINDOW_S]
        if len(recent) > RESTARTS_MAX:
            raise SystemExit(f"holdfast: the {kept.name} died {len(recent)} times in a minute")
        text = f"holdfast: the {kept.name} died ({code}) and is restarted"
        print(text, file=sys.stderr, flush=True)
        self._start(kept, listener)

"""Keeps one coordinator process of an elected job, and its address, for as long as the job lasts.

A coordinator that is not certain to be in office ends at once; here it is started again, and stands
by. So an outage of etcd costs a job no candidate. Nothing is decided here.
"""

from __future__ import annotations

import ipaddress
import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Sequence

from holdfast.core.errors import UserError, WorldError
from holdfast.runtime.coordinator_server import CONNECTING_MAX, DEPOSED, tell
from holdfast.runtime.rundir import RunDir

CRASHES_MAX = 10  # within CRASH_WINDOW_S
CRASH_WINDOW_S = 60.0


class Standby:
    """`run` blocks until the job is over or a signal ends it; returns the exit status."""

    def __init__(self, run_dir: RunDir, host: str, port: int, arguments: Sequence[str]) -> None:
        self._run_dir = run_dir
        self._host = host
        self._port = port
        self._arguments = list(arguments)
        self._running: subprocess.Popen[bytes] | None = None
        self._signals: list[int] = []  # that asked for the end
        self._crashes: list[float] = []

    def run(self) -> int:
        signals = (signal.SIGTERM, signal.SIGINT)
        before = {number: signal.signal(number, self._on_signal) for number in signals}
        try:
            with listen(self._host, self._port) as listener:
                return self._keep(listener)
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)
            if self._running is not None:
                self._running.kill()
                self._running.wait()

    def _keep(self, listener: socket.socket) -> int:
        while not self._signals:
            self._running = self._start(listener)
            if self._signals:  # it came too early to be passed on
                self._running.terminate()
            code = self._running.wait()
            self._running = None
            if code in (0, 1):
                return code
            if code == -signal.SIGALRM:
                tell("this coordinator stood still until its term was over")
            elif code != DEPOSED and not self._signals:
                self._count_crash(code)
        return 130 if signal.SIGINT in self._signals else 0

    def _start(self, listener: socket.socket) -> subprocess.Popen[bytes]:
        module = (sys.executable, "-m", "holdfast.runtime.coordinator")
        given = (str(self._run_dir.path), str(listener.fileno()), str(os.getpid()))
        return subprocess.Popen(
            [*module, *given, "--guest", *self._arguments],
            stdin=subprocess.DEVNULL,
            pass_fds=[listener.fileno()],
            start_new_session=True,
        )

    def _on_signal(self, number: int, frame: object) -> None:
        self._signals.append(number)
        if self._running is not None:
            self._running.terminate()

    def _count_crash(self, code: int) -> None:
        now = time.monotonic()
        self._crashes = [t for t in self._crashes if t > now - CRASH_WINDOW_S] + [now]
        if len(self._crashes) > CRASHES_MAX:
            raise WorldError(f"the coordinator died {len(self._crashes)} times in a minute")
        tell(f"the coordinator died ({code}) and is restarted")


def listen(host: str, port: int) -> socket.socket:
    """A listening socket at an address that others can be told. UserError."""
    try:
        if ipaddress.ip_address(host).is_unspecified:
            raise UserError(f"--host {host} is no machine: give the address that agents reach")
    except ValueError:
        pass  # a name
    if not 0 <= port <= 65535:
        raise UserError(f"--port {port} must be from 0 to 65535")
    try:
        kind, _, _, _, address = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        return socket.create_server(address[:2], family=kind, backlog=CONNECTING_MAX)
    except OSError as error:
        raise UserError(
            f"cannot listen on {host}:{port}: {error.strerror}; give an address of this machine "
            "with --host, and a free --port"
        ) from None

"""Makes the processes of a worker, where it has several, and has them live and die together.

The one that an agent has started forks the others of its node before the script begins, and watches
them. They are in its session, so that the agent stops and kills all of them at once, and the kernel
kills them when it ends. If the worker is spread over several nodes there is such a process on each;
those on further nodes are watched by that of shard 0 (spread_processes.py).
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.membership.liveness import FreezeDetector, FreezePolicy
from holdfast.engine.core.membership.process_ends import QUIT
from holdfast.engine.host.ending_signals import leave_ending_signals
from holdfast.engine.host.lifetime import die_with_parent
from holdfast.engine.host.procfs import sample_process
from holdfast.engine.net.readiness import wait_readable
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.runtime.node.gpu_shares import VARIABLE, visible_gpus
from holdfast.engine.runtime.node.spread_processes import (
    DONE,
    END_S,
    LIFE,
    ORDERS,
    Gathering,
    SpreadPlace,
    connect,
    end_together,
    wait_to_be_ended,
)

GRACE_S = 3.0  # after a failure, wait this long for a loss that explains it
READ_BYTES = 1 << 16
REST_S = 0.1  # for the rest of a message that has come in part
TOLD_BYTES_MAX = 12 << 10
FOR_USER = "UserError: "  # begins a sentence on what the user can mend, until the agent has it
BY_MACHINE = "\nMachineError: "  # begins the last line of a report on a machine's own error


@dataclass(frozen=True, slots=True)
class _Other:
    """Is this process's record of another process of the worker."""

    shard: int
    pid: int  # 0: it is on another node, and so are those that it watches
    ended: int  # a descriptor that is readable once it has
    told: int  # descriptor that yields the reason of its failure, or DONE


class ShardProcesses:
    """Watches the other processes of this worker; any of them that fails ends all.

    When one process is lost, the scripts of the others fail, since they cannot reach it. So a
    failure is reported only after GRACE_S without a loss that explains it. `first`: this process is
    shard 0 and reports to the agent; the others report to it.
    """

    def __init__(self, others: list[_Other], failure_fd: int, *, first: bool = True) -> None:
        self._others = others
        self._failure_fd = failure_fd
        self._first = first
        self._lock = threading.Lock()
        self._failures: list[bytes] = []  # failures of the other processes, the earliest first
        self._here = False  # this process's script has failed as well
        self._watch = threading.Thread(target=self._look, name="holdfast-shards", daemon=True)
        self._watch.start()

    def wait(self) -> None:
        """Wait until their scripts have ended, for as long as they take."""
        self._watch.join()

    def tell(self, text: str) -> None:
        """Report a failure of the script to the agent: that of the process which failed first."""
        with self._lock:
            said = wait_readable((other.told for other in self._others), 0.0)
            first = not self._failures and not said
            self._here = True
        self._watch.join(END_S)
        own = text.encode(errors="replace")
        self._tell([own, *self._failures] if first else [*self._failures, own])

    def end(self, code: int) -> None:
        """Wait, at the end of the script, until all processes of this worker may end together.

        Others would take one that went first for lost. After a good end this reports it to the
        agent, or to the process of shard 0. `code`: the script's; after a failure those
        on further nodes wait to be ended, as the reason may be a loss that is yet to be heard of.
        """
        if not code:
            self.wait()
            for other in self._others if self._first else ():
                if not other.pid:
                    with contextlib.suppress(OSError):
                        os.write(other.told, DONE)
            os.write(self._failure_fd, DONE)
        if not self._first:
            wait_to_be_ended(float("inf") if not code else END_S)

    def _tell(self, failures: Sequence[bytes]) -> None:
        """Report the first failure; prefer a sentence for the user to a traceback."""
        sentences = [text for text in failures if FOR_USER.encode() in text.split(b"\n")[0]]
        tell_failure(self._failure_fd, (sentences or list(failures))[0])

    def _look(self) -> None:
        policy = FreezePolicy()
        # Nobody tells here which of them have joined the job.
        running = [(other, FreezeDetector(policy, joined=False)) for other in self._others]
        given_up_s = math.inf
        while time.monotonic() < given_up_s and (running or (self._failures and not self._here)):
            looked = [fd for other, _ in running for fd in (other.ended, other.told)]
            ready = wait_readable(looked, policy.sample_s)
            for other, detector in list(running):
                if other.told in ready or other.ended in ready:
                    self._find_end(other)
                    running.remove((other, detector))
                    continue
                sample = sample_process(other.pid) if other.pid else None
                reason = None if sample is None else detector.observe(sample)
                if reason is not None:
                    self._give_up(f"process {other.shard} of this worker is {reason}")
            with self._lock:
                if self._failures or self._here:
                    given_up_s = min(given_up_s, time.monotonic() + GRACE_S)
        with self._lock:
            if not self._failures or self._here:
                return
            self._tell(self._failures)
        if not self._first:
            wait_to_be_ended(END_S)
        os._exit(1)

    def _find_end(self, other: _Other) -> None:
        """Find out how another process has ended, and read its report."""
        # Those of another node name themselves, unless it is the first one there.
        prefix = b"process %d of the worker: " % other.shard
        with self._lock:
            text = _read(other.told)
            if text and text != DONE:
                named = not other.pid and text.startswith(b"process ")
                self._failures.append(text if named else prefix + text)
        if text == DONE:
            return
        if not other.pid:
            if not text:
                self._give_up(f"process {other.shard} of this worker, on another node, was lost")
            return
        _, status = os.waitpid(other.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            name = signal.Signals(-code).name
            self._give_up(f"process {other.shard} of this worker was ended by {name}")
        if not text and not code:
            self._give_up(f"in process {other.shard} of this worker {QUIT}")
        if not text:
            with self._lock:
                self._failures.append(prefix + b"the script ended with exit code %d" % code)

    def _give_up(self, text: str) -> None:
        """Report to the agent why, and end this process, which is lost with the other one."""
        print_plain(f"holdfast: {text}: it ends", file=sys.stderr)
        sys.stderr.flush()
        if self._first:
            tell_failure(self._failure_fd, text.encode())
        os.kill(os.getpid(), signal.SIGKILL)


def _read(descriptor: int) -> bytes:
    """Read all bytes that are available at once."""
    os.set_blocking(descriptor, False)
    data = b""
    with contextlib.suppress(OSError):  # nothing is, or the connection was reset
        while wait_readable([descriptor], REST_S if data else 0.0):
            more = os.read(descriptor, READ_BYTES)
            data += more
            if not more or data == DONE:
                break
    return data


def tell_failure(failure_fd: int, text: bytes) -> None:
    """Send the end of a failure's text to the agent, or to the process of shard 0."""
    with contextlib.suppress(OSError):
        os.write(failure_fd, text[-TOLD_BYTES_MAX:])


def read_told(text: bytes) -> tuple[str, MachineError | None]:
    """Return a failure as people read it, and the machine's own error that it was, if any."""
    told, _, name = text.decode(errors="replace").strip().partition(BY_MACHINE)
    error = next((each for each in MachineError if each.value == name), None)
    return told.replace(FOR_USER, "", 1), error


def make_shards(failure_fd: int) -> ShardProcesses | LoneShard:
    """Make the other processes of a worker on this node, and meet those on others.

    Each process gets the object that reports a failure of its script, and that waits for the others
    at its end. The processes must not have begun any thread.
    """
    place = SpreadPlace.read(os.environ)
    key = bytes.fromhex(os.environ.get("HOLDFAST_PEER_KEY", ""))
    listener = _descriptor("HOLDFAST_MEETING_FD")
    for name in ("PROCS", "SPREAD", "PLACE", "MEETING_FD"):
        os.environ.pop(f"HOLDFAST_{name}", None)
    meets_at = os.environ.pop("HOLDFAST_MEETS_AT", "")
    for stream in (sys.stdout, sys.stderr):  # all processes share them: write whole lines
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    others, ends, told = _fork(place.shards, failure_fd)
    shard = place.shards[0] + (0 if others is not None else int(os.environ["HOLDFAST_SHARD"]))
    os.environ["HOLDFAST_SHARD"] = str(shard)
    _take_gpu(shard - place.shards[0])
    if others is None and listener is not None:
        os.close(listener)
    if place.place:
        orders = connect(meets_at, key, place, shard, ORDERS)
        os.environ["HOLDFAST_SHARD_FDS"] = str(orders.detach())
        if others is None:
            return LoneShard(told)
        life = connect(meets_at, key, place, shard, LIFE).detach()
        end_together(life, failure_fd)
        return ShardProcesses(others, life, first=False)
    if others is None:
        os.environ["HOLDFAST_SHARD_FDS"] = str(ends[0].detach())
        return LoneShard(told)
    if listener is not None:
        gathering = Gathering(socket.socket(fileno=listener), key, place)
        orders_of, lives = gathering.connections()
        ends += orders_of
        for first, connection in lives.items():
            descriptor = connection.detach()
            others.append(_Other(first, 0, descriptor, descriptor))
    os.environ["HOLDFAST_SHARD_FDS"] = " ".join(str(end.detach()) for end in ends)
    return ShardProcesses(others, failure_fd)


def _fork(shards: range, failure_fd: int) -> tuple[list[_Other] | None, list[socket.socket], int]:
    """Make the processes of all these shards but the first.

    Returns in that one the others, and ends of channels to them; in each other one no others, its
    end, and where it tells of a failure.
    """
    parent = os.getpid()
    ends: list[socket.socket] = []
    others: list[_Other] = []
    for number in range(1, len(shards)):
        ours, theirs = socket.socketpair()
        failure_read, failure_write = os.pipe()
        pid = os.fork()
        if pid == 0:
            for end in (*ends, ours):
                end.close()
            for other in others:
                os.close(other.ended)
                os.close(other.told)
            os.close(failure_read)
            os.close(failure_fd)
            die_with_parent(parent)
            leave_ending_signals()
            os.close(int(os.environ.pop("HOLDFAST_FD")))  # the way to the agent
            os.environ["HOLDFAST_SHARD"] = str(number)
            return None, [theirs], failure_write
        theirs.close()
        os.close(failure_write)
        ends.append(ours)
        others.append(_Other(shards[number], pid, os.pidfd_open(pid), failure_read))
    return others, ends, failure_fd


class LoneShard:
    """Connects a process that was forked on this node to the process that forked it.

    `told_fd`: descriptor for reports of a failure or a good end.
    """

    def __init__(self, told_fd: int) -> None:
        self._told_fd = told_fd

    def tell(self, text: str) -> None:
        """Report that the script has failed."""
        tell_failure(self._told_fd, text.encode(errors="replace"))

    def end(self, code: int) -> None:
        """Wait, after a good end, to be ended with the others."""
        if code:
            return
        os.write(self._told_fd, DONE)
        while True:
            signal.pause()  # until the kernel ends it with the process that has forked it


def _descriptor(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text else None


def _take_gpu(number: int) -> None:
    """Use one of the GPUs that the worker was given on this node."""
    if gpus := visible_gpus(os.environ):
        os.environ[VARIABLE] = gpus[number % len(gpus)]

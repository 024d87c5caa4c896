"""Makes the processes of a worker, where it has several, and has them live and die together.

The one that the agent has started forks the others before the script begins, and watches them. They
are in its session, so that the agent stops and kills all of them at once, and the kernel kills them
when it ends.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import select
import signal
import socket
import sys
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.membership.liveness import FreezeDetector, FreezePolicy
from holdfast.health.measure.lifetime import die_with_parent
from holdfast.health.measure.procfs import sample_process
from holdfast.runtime.node.gpu_shares import VARIABLE, visible_gpus

GRACE_S = 3.0  # in which a loss may turn out to be the reason for a failure
END_S = 60.0  # for the others to end after this one
READ_BYTES = 1 << 16
TOLD_BYTES_MAX = 12 << 10
DONE = b"\0"  # a script has ended well


@dataclass(frozen=True, slots=True)
class _Other:
    """Holds one of the other processes."""

    shard: int
    pid: int
    ended: int  # a descriptor that is readable once it has
    told: int  # what it has failed for comes there, or DONE


class ShardProcesses:
    """Watches the other processes of this worker; any of them that fails ends all.

    When one of them is lost the scripts of the others fail, since they can reach it no more. So a
    failure is told only once no loss has explained it for a while.
    """

    def __init__(self, others: list[_Other], failure_fd: int) -> None:
        self._others = others
        self._failure_fd = failure_fd
        self._lock = threading.Lock()
        self._failures: list[bytes] = []  # of the others, the first one first
        self._here = False  # this process's script has failed as well
        self._watch = threading.Thread(target=self._look, name="holdfast-shards", daemon=True)
        self._watch.start()

    def wait(self) -> None:
        """Wait until their scripts have ended."""
        self._watch.join(END_S)

    def tell(self, text: str) -> None:
        """Tell the agent that the script has failed: of the process in which it failed first."""
        with self._lock:
            said = select.select([other.told for other in self._others], [], [], 0)[0]
            first = not self._failures and not said
            self._here = True
        self._watch.join(END_S)
        own = text.encode(errors="replace")
        self._tell([own, *self._failures] if first else [*self._failures, own])

    def _tell(self, failures: Sequence[bytes]) -> None:
        """Tell the first one; or a sentence for the user, which explains more than a traceback."""
        sentences = [text for text in failures if b"UserError: " in text.split(b"\n")[0]]
        tell_failure(self._failure_fd, (sentences or list(failures))[0])

    def _look(self) -> None:
        policy = FreezePolicy()
        running = [(other, FreezeDetector(policy)) for other in self._others]
        given_up_s = math.inf
        while time.monotonic() < given_up_s and (running or (self._failures and not self._here)):
            looked = [fd for other, _ in running for fd in (other.ended, other.told)]
            ready = select.select(looked, [], [], policy.sample_s)[0]
            for other, detector in list(running):
                if other.told in ready or other.ended in ready:
                    self._ended(other)
                    running.remove((other, detector))
                    continue
                sample = sample_process(other.pid)
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
            os._exit(1)

    def _ended(self, other: _Other) -> None:
        """Find out how one of them has ended, and what it has said."""
        prefix = b"process %d of the worker: " % other.shard
        with self._lock:
            text = _read(other.told)
            if text and text != DONE:
                self._failures.append(prefix + text)
        if text == DONE:
            return
        _, status = os.waitpid(other.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            name = signal.Signals(-code).name
            self._give_up(f"process {other.shard} of this worker was ended by {name}")
        if not text:
            with self._lock:
                self._failures.append(prefix + b"the script ended with exit code %d" % code)

    def _give_up(self, text: str) -> None:
        sys.stderr.write(f"holdfast: {text}: it ends\n")
        sys.stderr.flush()
        os.kill(os.getpid(), signal.SIGKILL)


def _read(descriptor: int) -> bytes:
    """Return what is there to read by now."""
    os.set_blocking(descriptor, False)
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, READ_BYTES)
    return b""


def tell_failure(failure_fd: int, text: bytes) -> None:
    """Tell the agent, or the process of shard 0, what a script has failed for: the end of it."""
    with contextlib.suppress(OSError):
        os.write(failure_fd, text[-TOLD_BYTES_MAX:])


def fork_shards(count: int, failure_fd: int) -> tuple[ShardProcesses | None, int]:
    """Make the other processes of a worker of `count`, each with an environment of its own.

    Returns in the process of shard 0 what watches the others, and in each the descriptor to which a
    failure is written. The processes must not have begun any thread.
    """
    for stream in (sys.stdout, sys.stderr):  # which all of them share: whole lines at a time
        if isinstance(stream, io.TextIOWrapper):
            stream.reconfigure(line_buffering=True, write_through=False)
    parent = os.getpid()
    ends: list[socket.socket] = []
    others: list[_Other] = []
    for shard in range(1, count):
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
            _become(shard, parent, theirs.detach())
            return None, failure_write
        theirs.close()
        os.close(failure_write)
        ends.append(ours)
        others.append(_Other(shard, pid, os.pidfd_open(pid), failure_read))
    os.environ["HOLDFAST_SHARD_FDS"] = " ".join(str(end.detach()) for end in ends)
    _take_gpu(0)
    return ShardProcesses(others, failure_fd), failure_fd


def wait_for_all(others: ShardProcesses | None, failure_fd: int) -> None:
    """Wait, at the end of the script, until those of all processes of this worker have ended.

    Then all end together: others would take one that went first for lost.
    """
    if others is not None:
        others.wait()
        return
    os.write(failure_fd, DONE)
    while True:
        signal.pause()  # until the kernel ends it with the process of shard 0


def _become(shard: int, parent: int, descriptor: int) -> None:
    """Be one of the other processes: with no way to the agent, nor to what the first one has."""
    die_with_parent(parent)
    os.close(int(os.environ.pop("HOLDFAST_FD")))
    os.environ["HOLDFAST_SHARD"] = str(shard)
    _take_gpu(shard)
    os.environ["HOLDFAST_SHARD_FDS"] = str(descriptor)


def _take_gpu(shard: int) -> None:
    """Use one of the GPUs that the worker was given."""
    if gpus := visible_gpus(os.environ):
        os.environ[VARIABLE] = gpus[shard % len(gpus)]

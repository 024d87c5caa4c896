"""Makes the processes of a worker, where it has several, and has them live and die together.

The one that the agent has started forks the others before the script begins, and watches them. They
are in its session, so that the agent stops and kills all of them at once, and the kernel kills them
when it ends.
"""

from __future__ import annotations

import contextlib
import os
import select
import signal
import socket
import sys
import threading
import time
from dataclasses import dataclass

from holdfast.core.membership.liveness import FreezeDetector, FreezePolicy
from holdfast.health.measure.lifetime import die_with_parent
from holdfast.health.measure.procfs import sample_process

GRACE_S = 3.0  # for this process to say itself what one of the others has failed for
END_S = 60.0  # for the others to end after this one
READ_BYTES = 1 << 16
DONE = b"\0"  # a script has ended well


@dataclass(frozen=True, slots=True)
class _Other:
    """Holds one of the other processes."""

    shard: int
    pid: int
    ended: int  # a descriptor that is readable once it has
    told: int  # what it has failed for comes there, or DONE


class ShardProcesses:
    """Watches the other processes of this worker; any of them that fails ends all."""

    def __init__(self, others: list[_Other], failure_fd: int) -> None:
        self._others = others
        self._failure_fd = failure_fd
        self._watch = threading.Thread(target=self._look, name="holdfast-shards", daemon=True)
        self._watch.start()

    def wait(self) -> None:
        """Wait until their scripts have ended."""
        self._watch.join(END_S)

    def _look(self) -> None:
        policy = FreezePolicy()
        running = [(other, FreezeDetector(policy)) for other in self._others]
        while running:
            looked = [fd for other, _ in running for fd in (other.ended, other.told)]
            ready = select.select(looked, [], [], policy.sample_s)[0]
            for other, detector in list(running):
                if other.told in ready or other.ended in ready:
                    text = _read(other.told)
                    if text != DONE:
                        self._ended(other, text)
                    running.remove((other, detector))
                    continue
                sample = sample_process(other.pid)
                reason = None if sample is None else detector.observe(sample)
                if reason is not None:
                    self._give_up(f"process {other.shard} of this worker is {reason}")

    def _ended(self, other: _Other, text: bytes) -> None:
        """Wait for the end of one that has failed, and said why in `text`, or without a word."""
        _, status = os.waitpid(other.pid, 0)
        code = os.waitstatus_to_exitcode(status)
        if code < 0:
            name = signal.Signals(-code).name
            self._give_up(f"process {other.shard} of this worker was ended by {name}")
        if code > 0:
            time.sleep(GRACE_S)  # in most cases all processes fail for the same reason
            text += _read(other.told)
            with contextlib.suppress(OSError):
                text = b"process %d of the worker: " % other.shard + (
                    text or b"exit code %d" % code
                )
                os.write(self._failure_fd, text)
            os._exit(code)

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


def fork_shards(count: int, failure_fd: int) -> tuple[ShardProcesses | None, int]:
    """Make the other processes of a worker of `count`, each with an environment of its own.

    Returns in the process of shard 0 what watches the others, and in each the descriptor to which a
    failure is written. The processes must not have begun any thread.
    """
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
    os.environ["HOLDFAST_SHARD_FDS"] = str(descriptor)

"""Makes the processes of a worker, where it has several, which live and die together.

The first process of a node is started by the agent. It forks the further ones before the script
begins, and watches them. They are in its session, so that the agent stops and kills all of them at
once, and the kernel kills them when it ends. If the worker is spread over several nodes there is
such a process on each.

Then the process of shard 0 listens, at an address that the coordinator passes on, and watches the
first processes of further nodes. Each process there connects to it before the script begins, for
orders; the first one of a node has a second connection, for reports of the ends of the processes
there, and of the worker. These are never encrypted, because another process takes over their
descriptors.
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
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import NoReturn

from holdfast.engine.core.errors import WireError, first_line
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.membership.liveness import FreezeDetector, FreezePolicy
from holdfast.engine.core.membership.node_process import QUIT
from holdfast.engine.host.lifetime import (
    die_with_parent,
    end_lost,
    leave_ending_signals,
    sample_process,
)
from holdfast.engine.net import peer_stream
from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.net.peer_listener import PeerListener
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.net.tcp import tune
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.runtime.node.gpu_shares import VARIABLE, visible_gpus

MAGIC = b"hspread\1"
ORDERS, LIFE = 0, 1  # the purposes of connections
DONE = b"\0"  # the script has ended well
LOOK_S = 0.05
DEAD_S = 5.0  # after this silence of a machine a connection counts as ended
END_S = 60.0  # for the process of shard 0 to end this one, after a failure


@dataclass(frozen=True, slots=True, kw_only=True)
class SpreadPlace:
    """Names this node among a worker's (`place`, of `nodes`), and the shards here."""

    place: int = 0
    nodes: int = 1
    procs: int = 1  # the number in the whole worker
    incarnation: int = 0

    @property
    def shards(self) -> range:
        each = self.procs // self.nodes
        return range(self.place * each, (self.place + 1) * each)

    @classmethod
    def read(cls, environ: Mapping[str, str]) -> SpreadPlace:
        """Take it from the variables of a process."""
        return cls(
            place=int(environ.get("HOLDFAST_PLACE", "0")),
            nodes=int(environ.get("HOLDFAST_SPREAD", "1")),
            procs=int(environ.get("HOLDFAST_PROCS", "1")),
            incarnation=int(environ.get("HOLDFAST_INCARNATION", "0")),
        )


class Gathering:
    """Waits, in the process of shard 0, for the processes on further nodes."""

    def __init__(self, listener: socket.socket, key: bytes, place: SpreadPlace) -> None:
        self._listener = listener
        self._key = key
        self._place = place
        self._arrived = threading.Condition()
        self._come: dict[tuple[int, int], socket.socket] = {}  # by purpose and shard

    def connections(self) -> tuple[list[socket.socket], dict[int, socket.socket]]:
        """Return connections for orders, by shard from the first on a further node; and of lives.

        The latter by the first shard on each node. Waits for as long as it takes: if a process is
        lost before, the coordinator ends this one.
        """
        here, procs = len(self._place.shards), self._place.procs
        orders = [(ORDERS, shard) for shard in range(here, procs)]
        lives = [(LIFE, shard) for shard in range(here, procs, here)]
        listener = PeerListener(self._listener, PeerIdentity(key=self._key), MAGIC, self._admit)
        listener.start()
        with self._arrived:
            self._arrived.wait_for(lambda: all(each in self._come for each in (*orders, *lives)))
        listener.close()
        return [self._come[each] for each in orders], {s: self._come[k, s] for k, s in lives}

    def _admit(self, channel: socket.socket, come_for: peer_stream.Purpose) -> None:
        incarnation, shard, purpose = come_for
        if incarnation != self._place.incarnation:
            raise WireError(
                f"it belongs to incarnation {incarnation} of this worker, which is now "
                f"{self._place.incarnation}"
            )
        _tune(channel)
        with self._arrived:
            self._come[purpose, shard] = channel
            self._arrived.notify_all()


def connect(
    address: str, key: bytes, place: SpreadPlace, shard: int, purpose: int
) -> socket.socket:
    """Connect to the process of shard 0; this process ends at once if that is gone."""
    try:
        who = PeerIdentity(key=key)
        channel = peer_stream.connect(address, who, MAGIC, (place.incarnation, shard, purpose))
        _tune(channel)
    except (OSError, WireError) as error:
        end_lost(f"its worker's first process cannot be reached: {first_line(error)}")
    return channel


def _tune(channel: socket.socket) -> None:
    tune(channel, DEAD_S)
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)


def end_together(life: int, failure_fd: int) -> None:
    """End this process with the process of shard 0, seen by the descriptor `life`, and as well.

    `failure_fd`: reports a good end to this node's agent.
    """

    def watch() -> None:
        data = b""
        with contextlib.suppress(OSError):
            data = os.read(life, 1)
        if data == DONE:
            with contextlib.suppress(OSError):
                os.write(failure_fd, DONE)
            os._exit(0)
        end_lost("its worker has ended")

    threading.Thread(target=watch, name="holdfast-life", daemon=True).start()


def wait_to_be_ended(limit_s: float = float("inf")) -> NoReturn:
    """Wait, on a further node, until the process of shard 0 ends this one."""
    until = time.monotonic() + limit_s
    while time.monotonic() < until:
        time.sleep(LOOK_S)
    end_lost("its worker has not ended")


GRACE_S = 3.0  # after a failure, wait this long for a loss that explains it
READ_BYTES = 1 << 16
REST_S = 0.1  # for the rest of a message that has come in part
REPORT_BYTES_MAX = 12 << 10
FOR_USER = "UserError: "  # begins a sentence on what the user can mend, until the agent has it
BY_MACHINE = "\nMachineError: "  # begins the last line of a report on a machine's own error


@dataclass(frozen=True, slots=True)
class _Other:
    """Is this process's record of another process of the worker."""

    shard: int
    #: 0: it is on another node, with the processes that it watches.
    pid: int
    #: A descriptor, readable once it has ended.
    ended: int
    #: A descriptor that yields the reason of its failure, or DONE.
    told: int


class ShardProcesses:
    """Watches the other processes of this worker; any of them that fails ends all.

    When one process is lost, the scripts of all fail, because they cannot reach it. So a failure is
    reported only after GRACE_S without a loss that explains it. `first`: this process is shard 0
    and reports to the agent; all other ones report to it.
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

    def report(self, text: str) -> None:
        """Report the script's failure to the agent, from the process that failed first."""
        with self._lock:
            said = wait_readable((other.told for other in self._others), 0.0)
            first = not self._failures and not said
            self._here = True
        self._watch.join(END_S)
        own = text.encode(errors="replace")
        self._send_first([own, *self._failures] if first else [*self._failures, own])

    def end(self, code: int) -> None:
        """Wait, at the end of the script, until all processes of this worker may end together.

        A process that went first would count as lost. After a good end this reports it to the
        agent, or to the process of shard 0. `code`: the script's; after a failure processes on
        further nodes wait to be ended, because the reason may be a loss that is reported later.
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

    def _send_first(self, failures: Sequence[bytes]) -> None:
        """Report the first failure; prefer a sentence for the user to a traceback."""
        sentences = [text for text in failures if FOR_USER.encode() in text.split(b"\n")[0]]
        report_failure(self._failure_fd, (sentences or list(failures))[0])

    def _look(self) -> None:
        policy = FreezePolicy()
        # It is not known here which of them have joined the job.
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
            self._send_first(self._failures)
        if not self._first:
            wait_to_be_ended(END_S)
        os._exit(1)

    def _find_end(self, other: _Other) -> None:
        """Find out how another process has ended, and read its report."""
        # A process of another node names itself, unless it is the first one there.
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
        print_line(f"{text}: it ends")
        sys.stderr.flush()
        if self._first:
            report_failure(self._failure_fd, text.encode())
        os.kill(os.getpid(), signal.SIGKILL)


def _read(descriptor: int) -> bytes:
    """Read all bytes that are available at once."""
    os.set_blocking(descriptor, False)
    data = b""
    with contextlib.suppress(OSError):  # there are none, or the connection was reset
        while wait_readable([descriptor], REST_S if data else 0.0):
            more = os.read(descriptor, READ_BYTES)
            data += more
            if not more or data == DONE:
                break
    return data


def report_failure(failure_fd: int, text: bytes) -> None:
    """Send the end of a failure's text to the agent, or to the process of shard 0."""
    with contextlib.suppress(OSError):
        os.write(failure_fd, text[-REPORT_BYTES_MAX:])


def read_report(text: bytes) -> tuple[str, MachineError | None]:
    """Return a failure as people read it, and the machine's own error that it was, if any."""
    told, _, name = text.decode(errors="replace").strip().partition(BY_MACHINE)
    error = next((each for each in MachineError if each.value == name), None)
    return told.replace(FOR_USER, "", 1), error


def make_shards(failure_fd: int) -> ShardProcesses | LoneShard:
    """Make the other processes of a worker on this node, and meet the ones on further nodes.

    Each process gets the object that reports a failure of its script, and that waits for all
    processes at its end. The processes must not have begun any thread.
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

    Returns in the first one the other processes, and ends of channels to them; in each other one
    None, its end, and the descriptor for the report of a failure.
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

    `report_fd`: descriptor for reports of a failure or a good end.
    """

    def __init__(self, report_fd: int) -> None:
        self._report_fd = report_fd

    def report(self, text: str) -> None:
        """Report that the script has failed."""
        report_failure(self._report_fd, text.encode(errors="replace"))

    def end(self, code: int) -> None:
        """Wait, after a good end, to be ended with the other processes."""
        if code:
            return
        os.write(self._report_fd, DONE)
        while True:
            signal.pause()  # until the kernel ends it with the process that has forked it


def _descriptor(name: str) -> int | None:
    text = os.environ.get(name, "")
    return int(text) if text else None


def _take_gpu(number: int) -> None:
    """Use one of the GPUs that the worker was given on this node."""
    if gpus := visible_gpus(os.environ):
        os.environ[VARIABLE] = gpus[number % len(gpus)]

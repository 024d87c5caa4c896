"""Binds the lives of processes to the processes that started them (Linux).

    python -m holdfast.engine.host.lifetime PARENT_PID MODULE ARGS...

The command runs a module as a program that ends with the thread that started it.

The processes that a script has started end together with its worker. A process group is not enough:
a process that starts a session of its own leaves the group. So every worker is the *subreaper* of
all processes below it: the kernel gives it those whose parents end. If a worker ends, also by
SIGKILL, the kernel gives them to the next subreaper above it, which is the fork server, the agent
or the launcher. None of these has started them, and so it kills them.

Signals that ask for an end are left to the launcher, which passes them on as its orders. Slurm and
systemd send such a signal to every process of a job at once, a terminal or a user to the
launcher alone. So only the launcher acts on one: it orders the process that can end the job to do
so, once, and every other process works until it is ended. An order is a real-time signal of its
own, one for each signal: no scheduler sends these. If the launcher dies, the kernel ends them all.

It also asks the kernel about a process: its state, and whether any of its threads was scheduled.
"""

from __future__ import annotations

import asyncio
import contextlib
import ctypes
import os
import runpy
import signal
import sys
import time
from collections.abc import Callable, Collection, Iterator
from pathlib import Path
from typing import NamedTuple, NoReturn

from holdfast.engine.core.membership.liveness import ProcessSample
from holdfast.engine.net.standard_streams import print_line

PR_SET_PDEATHSIG = 1
PR_SET_CHILD_SUBREAPER = 36
LOOK_S = 0.01
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ORDERS: dict[int, int] = {number: signal.SIGRTMIN + 1 + i for i, number in enumerate(ENDING)}
SAME_S = 0.5  # a copy of a signal, forwarded by a wrapper, comes within this time
READ_BYTES = 4096


def end_lost(why: str) -> NoReturn:
    """End this process at once: it is lost, and its script has not failed."""
    with contextlib.suppress(OSError, ValueError):
        print_line(f"this process ends: {why}")
        sys.stderr.flush()
    os.kill(os.getpid(), signal.SIGKILL)
    raise SystemExit(1)


def die_with_parent(parent_pid: int, how: signal.Signals = signal.SIGKILL) -> None:
    """Ask the kernel to signal this process when its parent dies; exit if it already has."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_PDEATHSIG, how, 0, 0, 0)
    if os.getppid() != parent_pid:
        os._exit(1)


def adopt_orphans(*, adopt: bool = True) -> None:
    """Become the parent of every process below this one whose parent ends, or do not any more."""
    ctypes.CDLL(None, use_errno=True).prctl(PR_SET_CHILD_SUBREAPER, int(adopt), 0, 0, 0)


def end_orphans(own: Collection[int]) -> bool:
    """Kill the adopted children; return whether there were any.

    A child is adopted if it is in another session and not in `own`. Its own children are adopted
    after its end, so look again after a SIGCHLD, or soon.
    """
    orphans = [pid for pid in list_children() if pid not in own and _leads_own_life(pid)]
    for pid in orphans:
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            os.waitpid(pid, os.WNOHANG)
    return bool(orphans)


def end_all_orphans(own: Collection[int], within_s: float) -> None:
    """Kill the adopted children and all processes below them, for a limited time."""
    until = time.monotonic() + within_s
    while end_orphans(own) and time.monotonic() < until:
        time.sleep(LOOK_S)


def list_children() -> list[int]:
    """Return the children of all threads of this process."""
    found: list[int] = []
    for path in Path("/proc/self/task").glob("*/children"):
        with contextlib.suppress(OSError):  # the thread has ended
            found += map(int, path.read_text().split())
    return found


def _leads_own_life(pid: int) -> bool:
    """Return whether a child is in another session than this process."""
    try:
        return os.getsid(pid) != os.getsid(0)
    except OSError:
        return False


class EndRequests:
    """Counts how often the end was asked for: the most frequent signal counts.

    Copies of one signal are one request. So are different ones: schedulers follow SIGUSR1 by
    SIGTERM, and SIGTERM by SIGHUP, to get one end.
    """

    def __init__(self) -> None:
        self.first = 0  # the number of the first signal
        self.count = 0
        self._counts: dict[int, int] = {}
        self._counted_at: dict[int, float] = {}

    def add(self, number: int, now: float) -> None:
        """Count a signal that arrives at `now` (seconds)."""
        self.first = self.first or number
        if now < self._counted_at.get(number, float("-inf")) + SAME_S:
            return
        self._counted_at[number] = now
        self._counts[number] = self._counts.get(number, 0) + 1
        self.count = max(self._counts.values())


@contextlib.contextmanager
def held_back() -> Iterator[None]:
    """Block ending signals and orders, also in new processes, until they are ready.

    A process is ready when it calls `leave_ending_signals` or receives Orders.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, [*ENDING, *ORDERS.values()])
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_ending_signals() -> None:
    """Ignore signals that ask for an end, from now on in this process.

    Programs that it starts, and processes that it forks, are ended by these signals as usual. A
    signal that is ignored, as by nohup, stays so in them, too.
    """
    for number in ENDING:
        if signal.getsignal(number) is not signal.SIG_IGN:
            signal.signal(number, _do_nothing)
            signal.siginterrupt(number, False)  # libraries need not begin their calls again
    os.register_at_fork(after_in_child=restore_ending_signals)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, [*ENDING, *ORDERS.values()])


def restore_ending_signals() -> None:
    """Undo `leave_ending_signals`: its signals end this process again."""
    for number in ENDING:
        if signal.getsignal(number) is _do_nothing:
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, usual)


class Orders:
    """Receives the launcher's orders. `descriptor` is readable when there are any."""

    def __init__(self, descriptor: int) -> None:
        self.descriptor = descriptor

    @classmethod
    def receive(cls) -> Orders:
        """Begin to receive them. Call it in the main thread, at the start of the process."""
        # The kernel may deliver a signal to any thread, and so need not interrupt a wait of this
        # one; the pipe does.
        read, write = os.pipe2(os.O_NONBLOCK | os.O_CLOEXEC)
        signal.set_wakeup_fd(write, warn_on_full_buffer=False)
        for number in ORDERS.values():
            signal.signal(number, _do_nothing)
        leave_ending_signals()
        return cls(read)

    def read(self) -> list[int]:
        """Return the signals that the launcher has passed on since the last call, in order."""
        try:
            arrived = os.read(self.descriptor, READ_BYTES)
        except BlockingIOError:
            return []
        passed_on = {order: number for number, order in ORDERS.items()}
        return [passed_on[each] for each in arrived if each in passed_on]

    def watch(self, act: Callable[[int], object]) -> None:
        """Call `act` in the running event loop with each signal that is passed on."""

        def look() -> None:
            for number in self.read():
                act(number)

        asyncio.get_running_loop().add_reader(self.descriptor, look)


def _do_nothing(number: int, frame: object) -> None:
    """Leave the signal to the launcher, which gets it as well."""


THREADS_MAX = 64  # the control thread is among the first; more would only cost


def read_stat(pid: int | str) -> list[str]:
    """Return what the kernel says about a process, from its state on. OSError: it has gone."""
    with open(f"/proc/{pid}/stat") as file:
        return file.read().rpartition(")")[2].split()


def sample_process(pid: int) -> ProcessSample | None:
    """Take one look at a process; None when it has gone."""
    try:
        fields = read_stat(pid)
    except OSError:
        return None
    ticks = int(fields[11]) + int(fields[12])  # user and system time, all threads
    return ProcessSample(state=fields[0], progress=ticks + _switches(pid))


def start_time(pid: int) -> int | None:
    """Return when a process began, in the kernel's ticks since boot; None if it has ended."""
    try:
        fields = read_stat(pid)
    except OSError:
        return None
    return None if fields[0] in "ZX" else int(fields[19])


def _switches(pid: int) -> int:
    """Count the context switches of all threads: they grow even while a process only waits."""
    total = 0
    with contextlib.suppress(OSError):
        for tid in sorted(os.listdir(f"/proc/{pid}/task"), key=int)[:THREADS_MAX]:
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{tid}/status") as file:
                text = file.read()
                for line in text[text.rfind("voluntary_ctxt_switches") - 40 :].splitlines():
                    if "voluntary_ctxt_switches" in line:
                        total += int(line.split()[1])
    return total


class SessionUse(NamedTuple):
    """Sums up the living processes of a session. Memory that they share counts for each."""

    cpu_s: float
    memory_bytes: int


def measure_sessions(leaders: Collection[int]) -> dict[int, SessionUse]:
    """Measure these sessions, by their leaders; a session without a process is left out."""
    found: dict[int, SessionUse] = {}
    tick_s, page_bytes = 1.0 / os.sysconf("SC_CLK_TCK"), os.sysconf("SC_PAGE_SIZE")
    for name in filter(str.isdigit, os.listdir("/proc")):
        with contextlib.suppress(OSError, IndexError):
            fields = read_stat(name)
            if (session := int(fields[3])) in leaders:
                cpu_s, memory_bytes = found.get(session, (0.0, 0))
                cpu_s += (int(fields[11]) + int(fields[12])) * tick_s
                memory_bytes += int(fields[21]) * page_bytes
                found[session] = SessionUse(cpu_s, memory_bytes)
    return found


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    sys.argv = sys.argv[2:]
    runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)

"""Leaves the signals that ask for an end to the launcher, and passes them on as its orders.

Slurm and systemd send such a signal to every process of a job at once, a terminal or a user to the
launcher alone. So only the launcher acts on one: it orders the process that can end the job to do
so, once, and every other process works until it is ended. An order is a real-time signal of its
own, one for each signal: no scheduler sends these. If the launcher dies, the kernel ends them all.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
from collections.abc import Callable, Iterator

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
ORDERS: dict[int, int] = {number: signal.SIGRTMIN + 1 + i for i, number in enumerate(ENDING)}
SAME_S = 0.5  # a copy of a signal, forwarded by a wrapper, comes within this time
READ_BYTES = 4096


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

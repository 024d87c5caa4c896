"""Counts the seconds that a worker's script thread spends on each use, and writes them down.

The driver reports why the thread waits and which order it carries out. Lines are written when
something unusual begins or ends, and otherwise at growing distances, so that a file grows with the
logarithm of the job's length. A worker's own tasks are timed apart, without waiting for other
workers: these times are compared between workers to find slow ones.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from pathlib import Path

import torch

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import Purpose
from holdfast.engine.core.worker_status import Phase, WorkerStatus
from holdfast.engine.host.lifetime import read_stat
from holdfast.engine.records.time_lines import (
    ProcessHeader,
    SpentLine,
    TimesWriter,
    TimeUse,
    step_class,
    times_path,
)

LINE_S_MIN = 0.1  # between two lines of ordinary steps
LINE_S_MAX = 10.0
LEFT_MAX = 1 << 40  # limit for steps; a loop without a real end may have any number
FROZEN_S = 1.0  # without a sign of life, before a process counts as frozen
FROZEN_CPU = 0.02  # the most CPU time that it has used then, as a share
LINE_SHARE = 2000  # the distance of lines is the process's age, divided by this
_USUAL = frozenset(TimeUse) - {
    *(TimeUse.STARTING, TimeUse.JOINING, TimeUse.TRANSFER, TimeUse.STALL),
}
_WAITS = frozenset((TimeUse.WAIT, TimeUse.JOINING, TimeUse.STALL, TimeUse.TRANSFER))
_TRANSFERS = (ef.ObtainState, ef.ObtainStep, ef.SyncState, ef.SendMissed)

Write = Callable[[SpentLine], bool]


class TaskClock:
    """Times one task at a time. `device`: a GPU, or None for the host."""

    def __init__(self, device: torch.device | None) -> None:
        self._device = device
        self._began = 0.0
        self._host_s = 0.0
        #: The beginning of the running task.
        self._first: torch.cuda.Event | None = None
        self._events: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []

    def reset(self) -> None:
        """Begin a new step."""
        self._host_s = 0.0
        self._events = []

    def begin(self) -> None:
        if self._device is None:
            self._began = time.perf_counter()
        else:
            self._first = self._record()

    def end(self) -> None:
        if self._device is None:
            self._host_s += time.perf_counter() - self._began
        elif self._first is not None:
            self._events.append((self._first, self._record()))
            self._first = None

    def step_us(self) -> int:
        """Return the microseconds of all tasks that have ended since the reset.

        It waits for the GPU to have done them. Another thread may be in the midst of a task.
        """
        ended = [*self._events]
        for _, end in ended:
            end.synchronize()
        on_gpu_ms = sum(begin.elapsed_time(end) for begin, end in ended)
        return int(self._host_s * 1e6 + on_gpu_ms * 1e3)

    def _record(self) -> torch.cuda.Event:
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event


def process_age_s() -> float:
    """Return the seconds since this process was forked."""
    began_s = int(read_stat("self")[19]) / os.sysconf("SC_CLK_TCK")  # since the machine's start
    return max(time.clock_gettime(time.CLOCK_BOOTTIME) - began_s, 0.0)


class SignsOfLife:
    """Finds out whether a process did not run at all. `cpu`: the seconds that it has computed."""

    def __init__(self, cpu: Callable[[], float]) -> None:
        self._cpu = cpu
        self._last: tuple[float, float] | None = None  # time, and CPU time

    def note(self, now: float) -> None:
        """Record a sign of life."""
        self._last = now, self._cpu()

    def find_frozen_since(self, now: float) -> float | None:
        """Return the last sign of life, if it is old and no thread has computed since then."""
        if self._last is None or now - self._last[0] < FROZEN_S:
            return None
        at, cpu_s = self._last
        return at if self._cpu() - cpu_s <= FROZEN_CPU * (now - at) else None


class TimeSheet:
    """Counts seconds by use; exactly one use is counted at any time. Any thread may call it.

    `write`: takes each line, and returns whether it was kept; seconds of a line that was not are
    in the next one. `age_s`: age of the process. `clock`, and `cpu` for the time that the process
    has used a processor: in seconds.
    """

    def __init__(
        self,
        write: Write | None = None,
        age_s: float = 0.0,
        clock: Callable[[], float] = time.monotonic,
        cpu: Callable[[], float] = time.process_time,
    ) -> None:
        self._write = write
        self._clock = clock
        self._life = SignsOfLife(cpu)
        self._lock = threading.Lock()
        self._began = self._since = self._wrote = clock() - age_s
        self._use = TimeUse.STARTING
        self._waits_for = TimeUse.JOINING
        self._spent: dict[TimeUse, float] = {}
        self._steps: dict[int, int] = {}
        self._committed = 0
        self._left = 0  # steps of the script's loop; 0: unknown
        self._step_began: float | None = None  # None: an unusual event came in between
        # step, view, virtual ranks already computed
        self._tasks: tuple[int, int, set[int]] = (-1, 0, set())

    @classmethod
    def of_process(
        cls, run_dir: Path | None, worker: int, incarnation: int, host: str
    ) -> TimeSheet:
        """Return the sheet of this process, which is written if there is a run directory."""
        if run_dir is None:
            return cls()
        age_s = process_age_s()
        began = time.time() - age_s
        header = ProcessHeader(worker=worker, incarnation=incarnation, began=began, host=host)
        return cls(TimesWriter(times_path(run_dir, worker, incarnation), header).append, age_s)

    def enter(self, use: TimeUse) -> TimeUse:
        """Count the time from now on as this use; return the one before."""
        with self._lock:
            return self._turn(use)

    def note_alive(self) -> None:
        """Record a sign of life; called several times a second by a thread that never waits long.

        A process without one that has used no CPU time either was frozen as a whole, whatever its
        script was at.
        """
        with self._lock:
            now = self._clock()
            self._count_frozen(now)
            self._life.note(now)

    def wait(self, status: WorkerStatus) -> None:
        """Count the time from now on as waiting."""
        use = self._waits_for
        if status.phase is Phase.ENDED:
            use = TimeUse.END
        elif use is TimeUse.WAIT and status.in_step and not status.hosted:
            use = TimeUse.SPARE
        with self._lock:
            self._turn(use)

    def expect(self, use: TimeUse) -> None:
        """Count waits as this use from now on, the present one among them.

        Before its first step a worker is joining, or receives the state.
        """
        with self._lock:
            if self._waits_for is TimeUse.JOINING and use is not TimeUse.TRANSFER:
                return
            self._waits_for = use
            if self._use in _WAITS:
                self._turn(use)

    def note_left(self, steps: int) -> None:
        """Record how many steps the script's loop still has; 0: unknown."""
        with self._lock:
            self._left = min(max(steps, 0), LEFT_MAX)

    def note_engine(self, order: object) -> None:
        """Take in an order of the engine: it may explain why the script's thread waits."""
        if isinstance(order, ef.Reduce):
            self.expect(TimeUse.WAIT)
        elif isinstance(order, _TRANSFERS):
            self.expect(TimeUse.TRANSFER)

    def take(self, order: ef.ScriptEffect | ef.Adopt, view: int) -> None:
        """Count the time from now on for an order that is carried out in this view."""
        with self._lock:
            match order:
                case ef.Begin():
                    self._waits_for = TimeUse.WAIT
                    self._turn(TimeUse.UPDATE)
                case ef.Compute():
                    self._turn(self._use_of(order, view))
                case ef.CopyState():
                    self._turn(TimeUse.SAVE)
                case ef.Commit(step):
                    self._commit(step + 1)
                case ef.Release():
                    self._turn(TimeUse.UPDATE)
                    self._write_if_due()
                case ef.Adopt():
                    pass

    def close(self) -> None:
        """Write the last line: the process is about to end."""
        with self._lock:
            self._turn(self._use)
            self._write_line()

    def _use_of(self, task: ef.Compute, view: int) -> TimeUse:
        """Return whether the task is computed for the first time, again, or for a comparison."""
        if task.purpose is not Purpose.HOSTED:
            return TimeUse.CHECK
        step, first_view, computed = self._tasks
        if step != task.step:
            first_view, computed = view, set()
            self._tasks = (task.step, view, computed)
        again = view != first_view or task.vrank in computed
        computed.add(task.vrank)
        return TimeUse.AGAIN if again else TimeUse.TASK

    def _commit(self, committed: int) -> None:
        self._turn(TimeUse.UPDATE)
        if self._step_began is not None:
            number = step_class(self._since - self._step_began)
            self._steps[number] = self._steps.get(number, 0) + 1
        self._committed, self._step_began = committed, self._since
        self._write_if_due()

    def _count_frozen(self, now: float) -> None:
        """Count the time since the last sign of life as frozen, if the process did not run."""
        frozen_since = self._life.find_frozen_since(now)
        if frozen_since is None:
            return
        began = max(frozen_since, self._since)
        for use, until in ((self._use, began), (TimeUse.FROZEN, now)):
            self._spent[use] = self._spent.get(use, 0.0) + until - self._since
            self._since = until
            self._write_line()
        self._step_began = None
        self._life.note(now)

    def _turn(self, use: TimeUse) -> TimeUse:
        now, before = self._clock(), self._use
        self._count_frozen(now)
        self._spent[before] = self._spent.get(before, 0.0) + now - self._since
        self._since, self._use = now, use
        if use is not before and not (use in _USUAL and before in _USUAL):
            self._step_began = None
            self._write_line()
        return before

    def _write_if_due(self) -> None:
        distance_s = min(max((self._since - self._began) / LINE_SHARE, LINE_S_MIN), LINE_S_MAX)
        if self._since - self._wrote >= distance_s:
            self._write_line()

    def _write_line(self) -> None:
        spent = {use: seconds for use, seconds in self._spent.items() if seconds > 0}
        line = SpentLine(step=self._committed, spent=spent, steps=self._steps, left=self._left)
        self._wrote = self._since
        if self._write is None or self._write(line):
            self._spent, self._steps = {}, {}

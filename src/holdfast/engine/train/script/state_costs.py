"""Times what states of virtual ranks cost, and names one that takes longer than the tasks."""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator

from holdfast.engine.records.time_lines import TimeUse
from holdfast.engine.train.step.time_sheet import TimeSheet

TASKS_MIN = 8  # tasks before a state is judged: the first ones warm up
COST_S_MIN = 0.0005  # per task: a cheaper state is not worth a sentence
PARTS_MANY = 64
SLOW = (
    "the rank state {name!r} takes {cost_ms:.1f} ms of each task, which takes {own_ms:.1f} ms "
    "without it: its {parts} tensors ({kilobytes:.0f} kB) are copied before and after the task; "
    "{remedy}"
)
STACK = (
    "keep one tensor for each field, torch.zeros(4000, 4) say, and the index of the next row, "
    "instead of many small ones"
)
SHRINK = "keep only what a task changes in it, and give `value` no more than that"


class StateCosts:
    """Times loading and packing of rank states apart from the tasks that use them.

    `times`: its use of time is TimeUse.STATES while a state is loaded or packed. `note`: is called
    at most once for each state that takes more time than all else in its tasks. `clock`: seconds.
    """

    def __init__(
        self,
        times: TimeSheet | None = None,
        note: Callable[[str], None] = lambda text: None,
        clock: Callable[[], float] = time.perf_counter,
    ) -> None:
        self._times = times or TimeSheet()
        self._note = note
        self._clock = clock
        self._began = 0.0  # time when the present task began
        self._spent_s: dict[str, float] = {}  # in the present task, by name of the state
        self._tasks = 0  # the number of tasks in which a state was used
        self._total_s: dict[str, float] = {}  # in all of them
        self._own_s = 0.0  # the time of these tasks without the states
        self._named: set[str] = set()

    def begin_task(self) -> None:
        """Begin to time a run of a task."""
        self._began, self._spent_s = self._clock(), {}

    @contextlib.contextmanager
    def surround(self, name: str) -> Iterator[None]:
        """Surround the loading or packing of this state."""
        before, began = self._times.enter(TimeUse.STATES), self._clock()
        try:
            yield
        finally:
            self._spent_s[name] = self._spent_s.get(name, 0.0) + self._clock() - began
            self._times.enter(before)

    def end_task(self, describe: Callable[[str], tuple[int, int]]) -> None:
        """End the run, and name a state that is too slow.

        `describe`: returns the number of a state's tensors, and its bytes.
        """
        if not self._spent_s:
            return
        self._tasks += 1
        for name, seconds in self._spent_s.items():
            self._total_s[name] = self._total_s.get(name, 0.0) + seconds
        self._own_s += self._clock() - self._began - sum(self._spent_s.values())
        slowest = max(self._total_s, key=self._total_s.__getitem__)
        cost_s, own_s = self._total_s[slowest] / self._tasks, self._own_s / self._tasks
        is_slow = sum(self._total_s.values()) > self._own_s and cost_s >= COST_S_MIN
        if self._tasks >= TASKS_MIN and is_slow and slowest not in self._named:
            self._named.add(slowest)
            parts, size = describe(slowest)
            text = SLOW.format(
                name=slowest,
                cost_ms=cost_s * 1e3,
                own_ms=own_s * 1e3,
                parts=parts,
                kilobytes=size / 1e3,
                remedy=STACK if parts >= PARTS_MANY else SHRINK,
            )
            self._note(text)

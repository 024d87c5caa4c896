"""Keeps states that belong to a virtual rank: a hidden state, an environment, a replay buffer.

A task of the virtual rank starts from its state as of the last commit, and leaves a new one. The
new state travels with the step to all members, so it is a part of the job's state: any worker can
take over the virtual rank, and a task may be computed again, or by several workers, from the same
state. Invariant: a task sees no value left by other tasks, or by other runs of itself.
Loading and packing are timed: a state that takes longer than the tasks is named.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
import xxhash

from holdfast.engine.core.errors import StateMismatch, UserError
from holdfast.engine.records.time_lines import TimeUse
from holdfast.engine.train.checkpoint.state import keeps_state
from holdfast.engine.train.data.random_streams import key_apart
from holdfast.engine.train.step.time_sheet import TimeSheet
from holdfast.engine.train.step.values import TaskReport, count_tensors, pack, unpack

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
Packed = dict[int, bytes]  # by virtual rank; those whose tasks have not used it yet are missing


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


class RankState:
    """Is one state of every virtual rank; made by `Job.rank_state`.

    `value` is the state of the present task. It may be changed in place or replaced.

        hidden = job.rank_state("hidden", lambda rank: torch.zeros(8))
        for step in job.steps(data, until=10):
            for inputs, targets in step:
                step.backward(loss_fn(model(inputs + hidden.value), targets))
                hidden.value = inputs.mean(0)
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(
        self,
        name: str,
        make: Callable[[int], Any],
        seed: int,
        vranks: int,
        packed: Packed,
        costs: StateCosts,
    ) -> None:
        self._name = name
        self._make = make
        self._seed = seed
        self._vranks = vranks
        self._packed = packed
        self._costs = costs
        # made here, each as its last task has left it; None for a state that is no object
        self._objects: dict[int, Any] = {}
        self._first: Packed = {}  # the states with which they were made
        self._vrank: int | None = None  # the virtual rank of the present task
        self._is_used = False  # the present task has used the state
        self._value: Any = None

    @property
    def value(self) -> Any:
        """Return the state of the present task's virtual rank. UserError outside of a task.

        If `make` returns objects with state_dict and load_state_dict, it is such an object.
        """
        vrank = self._require_task("is read")
        if not self._is_used:
            self._value, self._is_used = self._load(vrank), True
        return self._value

    @value.setter
    def value(self, new: Any) -> None:
        """Replace the state; UserError outside of a task, and for an object with a state_dict."""
        vrank = self._require_task("is set")
        if keeps_state(new) or self._objects.get(vrank) is not None:
            raise UserError(
                f"the rank state {self._name!r} cannot be set to a {type(new).__name__}: return "
                "objects that have a state_dict from `make`, and change them rather than `value`"
            )
        self._value, self._is_used = new, True

    def __getitem__(self, vrank: int) -> Any:
        """Return a copy of a virtual rank's state as of the last commit; None before its first use.

        For an object it is the result of its state_dict. UserError for a number that is no virtual
        rank.
        """
        if not 0 <= vrank < self._vranks:
            raise UserError(
                f"the rank state {self._name!r} has no virtual rank {vrank}: there are "
                f"{self._vranks}, from 0 on"
            )
        return unpack(self._packed[vrank]) if vrank in self._packed else None

    def __len__(self) -> int:
        return self._vranks

    def begin_task(self, vrank: int) -> None:
        """Begin a run of a task of this virtual rank, with its state as of the last commit."""
        self._vrank, self._is_used, self._value = vrank, False, None

    def end_task(self) -> bytes | None:
        """End the run; return the new state, packed, or None if it has not changed."""
        vrank, self._vrank = self._vrank, None
        if vrank is None or not self._is_used:
            return None
        value, self._value = self._value, None
        with self._costs.surround(self._name):
            packed = self._pack(value.state_dict() if keeps_state(value) else value)
            return None if packed == self._packed.get(vrank) else packed

    def _load(self, vrank: int) -> Any:
        """Return the state of the last commit as the script uses it."""
        packed = self._packed.get(vrank, self._first.get(vrank))
        if vrank not in self._objects:
            made = self._make_value(vrank)
            self._objects[vrank] = made if keeps_state(made) else None
            if packed is None:
                if keeps_state(made):
                    self._first[vrank] = self._pack(made.state_dict())
                return made
        if packed is None:
            return self._make_value(vrank)
        known = self._objects[vrank]
        with self._costs.surround(self._name):
            if known is None:
                return unpack(packed)
            known.load_state_dict(unpack(packed))
        return known

    def _pack(self, state: Any) -> bytes:
        return pack(state, f"the rank state {self._name!r}")

    def _make_value(self, vrank: int) -> Any:
        with key_apart(self._seed, vrank, f"rank state {self._name}"):
            return self._make(vrank)

    def _require_task(self, what: str) -> int:
        if self._vrank is None:
            raise UserError(
                f"the rank state {self._name!r} {what} outside of a task: use `value` in the loop "
                "over a step's batches, and [virtual rank] elsewhere to read the committed value"
            )
        return self._vrank


class RankStates:
    """Keeps all states that a script has declared; a part of the job's state."""

    def __init__(self, costs: StateCosts | None = None) -> None:
        self._costs = costs or StateCosts()
        self._declared: dict[str, RankState] = {}
        #: Packed states by name, also of states that are declared later.
        self._packed: dict[str, Packed] = {}

    def declare(self, name: str, make: Callable[[int], Any], seed: int, vranks: int) -> RankState:
        """Declare a state. UserError if that name is taken."""
        if name in self._declared:
            raise UserError(f"job.rank_state({name!r}, ...) was called before: give each a name")
        packed = self._packed.setdefault(name, {})
        self._declared[name] = RankState(name, make, seed, vranks, packed, self._costs)
        return self._declared[name]

    def begin_task(self, vrank: int) -> None:
        """Give a run of a task the states of its virtual rank."""
        self._costs.begin_task()
        for each in self._declared.values():
            each.begin_task(vrank)

    def end_task(self) -> dict[str, bytes]:
        """End the run; returns the states that it has changed, packed, by name."""
        left = {name: each.end_task() for name, each in self._declared.items()}
        self._costs.end_task(lambda name: self._measure(name, left[name]))
        return {name: packed for name, packed in left.items() if packed is not None}

    def _measure(self, name: str, left: bytes | None) -> tuple[int, int]:
        """Return the numbers of tensors and bytes of a state, as a task has left it or found it."""
        data = left or next(iter(self._packed[name].values()))
        return count_tensors(data), len(data)

    def commit(self, reports: Mapping[int, TaskReport]) -> None:
        """Take in the states that the tasks of a committed step have left."""
        for vrank, report in reports.items():
            for name, packed in report.states.items():
                self._packed.setdefault(name, {})[vrank] = packed

    def fingerprint(self, step: int | None = None) -> int:
        """Return 63 bits of all states, or of this step's part of them; 0: no state."""
        digest, count = xxhash.xxh3_64(), 0
        for name, packed in sorted(self._packed.items()):
            for turn, (vrank, data) in enumerate(sorted(packed.items())):
                if step is None or step % len(packed) == turn:
                    digest.update(f"{name} {vrank} ".encode())
                    digest.update(data)
                    count += 1
        return digest.intdigest() >> 1 if count else 0

    def describe_states(self) -> list[tuple[str, int]]:
        """Return a description of each state, with 63 bits of it."""
        return [
            (
                f"the rank state {name!r} of virtual rank {vrank}",
                xxhash.xxh3_64_intdigest(data) >> 1,
            )
            for name, packed in sorted(self._packed.items())
            for vrank, data in sorted(packed.items())
        ]

    def state_dict(self) -> dict[str, dict[int, torch.Tensor]]:
        """Return all states, packed, as tensors of bytes."""
        return {
            name: {
                vrank: torch.frombuffer(bytearray(data), dtype=torch.uint8)
                for vrank, data in sorted(packed.items())
            }
            for name, packed in sorted(self._packed.items())
            if packed
        }

    def load_state_dict(self, state: Mapping[str, Mapping[int, torch.Tensor]]) -> None:
        """Take over the job's states. StateMismatch if they do not fit."""
        if any(each.dtype != torch.uint8 for held in state.values() for each in held.values()):
            raise StateMismatch("the states of virtual ranks are no packed bytes")
        for name in {*self._packed, *state}:
            packed = self._packed.setdefault(name, {})
            packed.clear()
            for vrank, data in state.get(name, {}).items():
                packed[vrank] = data.cpu().numpy().tobytes()

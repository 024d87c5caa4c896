"""Compares short runs of a script: on one worker, on two, and on two with one that is killed.

Equal states at every step show that the script keeps the promise; else the first tensor that
differs, and the kind of run with the difference, point to the cause.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.engine.core.errors import UserError

States = Mapping[int, Mapping[str, str]]  # by step, then by path

START = (
    "the model or the data depend on something that is drawn before holdfast.join(), on the clock, "
    "or on the worker: build everything after holdfast.join(), and sort what a directory lists"
)
WORKERS = (
    "an update depends on the worker: on a batch's own loss instead of step.loss, on job.worker or "
    "job.is_leader, on variables that change from batch to batch, or on random numbers that are "
    "not drawn from the global generators"
)
JOINS = (
    "a worker that joins lacks something: a variable of the script that steps change (keep it in "
    "job.values), a module, optimizer or scheduler that is not protected, or what a line did once "
    "at an earlier step"
)


@dataclass(frozen=True, slots=True, kw_only=True)
class TracedRun:
    """Describes one run of the script. `problem`: why it ended; "" if it went well."""

    name: str
    states: dict[str, States]  # by worker and incarnation
    told: Sequence[str]  # what the job's events say of the script
    problem: str = ""

    @property
    def steps(self) -> int:
        """Return the number of steps at which some worker has written down its state."""
        return max((max(each, default=-1) + 1 for each in self.states.values()), default=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class Divergence:
    """Names the place where a run first differs from the first run of all."""

    run: str
    step: int
    path: str
    cause: str


def read_traces(directory: Path) -> dict[str, States]:
    """Read what the workers of a run have written down."""
    found: dict[str, States] = {}
    for path in sorted(directory.glob("*.jsonl")):
        lines = path.read_text().splitlines()
        entries = [json.loads(line) for line in lines if line.endswith("}")]
        found[path.stem] = {entry["step"]: entry["tensors"] for entry in entries}
    return found


def compare(runs: Sequence[TracedRun], steps: int) -> list[Divergence]:
    """Compare each run with the first one, in their first `steps` steps."""
    reference = next(iter(runs[0].states.values()), {})
    found: list[Divergence] = []
    for run in runs:
        first = min(
            (
                (step, path)
                for states in run.states.values()
                for step, state in states.items()
                if step < steps
                for path in _first_difference(reference.get(step), state)
            ),
            key=lambda place: place[0],
            default=None,
        )
        if first is not None:
            step, path = first
            cause = START if step == 0 else _cause(run, runs, found)
            found.append(Divergence(run=run.name, step=step, path=path, cause=cause))
    return found


def _cause(run: TracedRun, runs: Sequence[TracedRun], found: Sequence[Divergence]) -> str:
    alone_differs = any(each.run != run.name for each in found)
    return WORKERS if alone_differs or run is not runs[-1] else JOINS


def _first_difference(one: Mapping[str, str] | None, other: Mapping[str, str]) -> list[str]:
    if one is None:
        return []
    paths = [*one, *(path for path in other if path not in one)]
    return [path for path in paths if one.get(path) != other.get(path)][:1]


def step_of_join(states: Mapping[str, Any], worker: int) -> int | None:
    """Return the first step that the second incarnation of a worker has taken part in."""
    found: Any = states.get(f"{worker}-2")
    return min(found) if found else None


def check_enough_steps(run: TracedRun, joined: int | None) -> None:
    """Check that a killed worker has come back. UserError says what to do if it has not."""
    if not run.problem and joined is None:
        raise UserError(
            f"the script ended after {run.steps} steps, before the worker that was killed had "
            "joined again: let it train for more steps"
        )

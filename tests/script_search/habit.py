"""Describes a habit: lines of a training script, and their effect on the job's result."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

Lines = tuple[str, ...]


class Truth(enum.Enum):
    """Truths about a habit: does the result of a script depend on the workers?"""

    HARMLESS = "harmless"  # it does not, or Holdfast carries, keys or restores the changed value
    TASKS = "tasks"  # it does: a task depends on earlier tasks of its worker
    WORKERS = "workers"  # it does: something differs between workers
    JOINS = "joins"  # it does once a worker joins, which lacks the changes of earlier steps


@dataclass(frozen=True, slots=True, kw_only=True)
class Habit:
    """Lines for some slots of the script's frame (compose.FRAME), and the truth about them.

    `names`: one of them must be in the message by which the script is refused.
    """

    what: str  # for people
    truth: Truth
    slots: Mapping[str, Lines]
    names: tuple[str, ...] = ()
    needs_processes: bool = False  # it touches what threads of one process share
    family: str = field(default="")


def habit(
    what: str, truth: Truth, names: tuple[str, ...] = (), *, processes: bool = False, **slots: str
) -> Habit:
    """Make a habit from text; a slot's lines are separated by newlines."""
    return Habit(
        what=what,
        truth=truth,
        names=names,
        needs_processes=processes,
        slots={slot: tuple(text.split("\n")) for slot, text in slots.items()},
    )

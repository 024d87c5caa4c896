"""Blames the script for wrong results once too many machines would have to be at fault. Pure.

It remembers the machines that were wrong in a steady way, and the steps in which two halves of the
workers were of two opinions. The limits are in docs/silent-errors.md: fewer faulty machines than
these never end a job.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from holdfast.engine.core.step.audit import are_too_many, name_machines
from holdfast.engine.core.step.early_audits import EARLY_STEPS
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View

STEADY_MAX = 2  # machines that may be wrong in a steady way
TIES_MAX = 2  # times that two halves of the workers may hold different states;
TIES_MAX_LOST = 1  # without a checkpoint to go back to
WINDOW_STEPS = 256  # machines and ties count for this number of steps,
WINDOW_CYCLES = 4  # or of cycles, whichever is longer


class ScriptBlame:
    """Counts wrong machines and ties. `cycle`: steps; `keeps`: the job has checkpoints.

    `comparable`: the same task has the same bits on all sound members.
    """

    def __init__(self, cycle: int, *, keeps: bool) -> None:
        self.comparable = False
        self._keeps = keeps
        self._window = max(WINDOW_STEPS, WINDOW_CYCLES * cycle)  # steps
        self._ties: list[int] = []  # steps in which states or gradients tied
        self._tied_at = -self._window  # the last step of a tie between gradients, with equal states
        self._steady: dict[str, int] = {}  # the last step in which each machine was wrong

    def covers(
        self, view: View, step: int, liars: Sequence[WorkerId], prints: Mapping[WorkerId, int]
    ) -> bool:
        """Return whether steady results that differ are the script's fault.

        `liars`: the minority with the right state; without one, it is a tie. A tie late in a job
        that has a checkpoint may be the fault of a machine that has just failed: the job goes back,
        and ends only if it ties again.
        """
        self._steady |= dict.fromkeys(sorted(name_machines(view, liars)), step)
        lately = [name for name, at in self._steady.items() if at > step - self._window]
        if are_too_many(len(lately), view, STEADY_MAX):
            return True
        if liars or len(set(prints.values())) > 1:
            return False
        again, self._tied_at = step < self._tied_at + self._window, step
        return again or not self._keeps or step < EARLY_STEPS

    def ties_too_often(self, step: int) -> bool:
        """Record a tie; return whether memory hardly fails as often as there were ties lately."""
        self._ties = [*(at for at in self._ties if at > step - self._window), step]
        most = TIES_MAX if self._keeps else TIES_MAX_LOST
        return self.comparable and len(self._ties) > most

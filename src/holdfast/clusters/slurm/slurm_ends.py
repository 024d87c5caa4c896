"""Knows which steps of Slurm have ended although Slurm lists them.

A step that ended while slurmctld was away stays listed for ever.
"""

from __future__ import annotations

import subprocess
from collections.abc import Collection
from dataclasses import dataclass

from holdfast.clusters.slurm.slurm_tables import SlurmStep

# Slurm kills a cancelled step after KillWait, by default 30 s.
STALE_S = 40.0


@dataclass(frozen=True, slots=True)
class _Cancelled:
    name: str
    at: float


class StepEnds:
    """Remembers the steps that were cancelled, and the sruns that started steps."""

    def __init__(self) -> None:
        self._sruns: dict[str, subprocess.Popen[bytes]] = {}  # by the name of the step
        self._cancelled: dict[str, _Cancelled] = {}  # by the id of the step

    def record_start(self, name: str, srun: subprocess.Popen[bytes]) -> None:
        self._sruns[name] = srun

    def record_cancel(self, id_: str, name: str, now: float) -> None:
        """Record that a step is cancelled; the first time counts."""
        self._cancelled.setdefault(id_, _Cancelled(name, now))

    def has_ended(self, step: SlurmStep, now: float) -> bool:
        """Return whether a step that is listed was cancelled and has ended."""
        cancelled, srun = self._cancelled.get(step.id), self._sruns.get(step.name)
        if cancelled is None:
            return False
        # Our own srun sees the end of its step also while slurmctld is away.
        return now >= cancelled.at + STALE_S or (srun is not None and srun.poll() is not None)

    def forget(self, listed: Collection[str], now: float) -> None:
        """Forget steps that have ended. `listed`: the ids in Slurm's list.

        After slurmctld was away it lists a step late.
        """
        self._cancelled = {
            id_: each
            for id_, each in self._cancelled.items()
            if id_ in listed or now < each.at + STALE_S
        }
        names = {each.name for each in self._cancelled.values()}
        self._sruns = {
            name: srun for name, srun in self._sruns.items() if srun.poll() is None or name in names
        }

"""Defines the settings of a step machine, and counts the votes of its view. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from holdfast.engine.core.ground.events import EventNoted, Row
from holdfast.engine.core.ground.vote import Tally, count_votes
from holdfast.engine.core.policies import BackupPolicy, ReplicationPolicy
from holdfast.engine.core.replica.saves import SavePolicy
from holdfast.engine.core.step.balance import BalancePolicy
from holdfast.engine.core.step.speculation import Patience
from holdfast.engine.core.step.speeds import Speeds
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPolicy:
    """Keeps the settings of a job that matter within a step; the same on all its workers.

    `audit`: share of tasks computed twice. `cycle`: steps in which all of the state is compared; 0:
    never. `keeps`: there are checkpoints to go back to. `restore_s`: how long a store may stay
    silent when the job is to begin from a checkpoint.
    `script_cycle`: steps in which workers compare one task, because of the script, in addition to
    the tasks of the first steps (core/step/audits.py); 0: they compare none. `processor`: a number
    that stands for the kind of this worker's processor.
    """

    seed: int = 0
    audit: float = 0.0
    audit_tolerance: float = 0.0
    cycle: int = 0
    keeps: bool = False
    balance: BalancePolicy | None = field(default_factory=BalancePolicy)
    backup: BackupPolicy = field(default_factory=BackupPolicy)
    patience: Patience = field(default_factory=Patience)
    saves: SavePolicy = field(default_factory=SavePolicy)
    restore_s: float = 300.0
    replication: ReplicationPolicy = field(default_factory=ReplicationPolicy)
    script_cycle: int = 0
    processor: int = 0

    @property
    def looks(self) -> bool:
        """Return whether anything is compared at all."""
        return bool(self.audit or self.cycle)


class Counting:
    """Draws the conclusions from a view's votes, step after step: the same on all its members."""

    def __init__(self, view: View, balance: BalancePolicy | None) -> None:
        self._speeds = Speeds(view, balance)

    @property
    def owners(self) -> tuple[WorkerId, ...]:
        """Return the host of each virtual rank from the next step on."""
        return self._speeds.owners

    def count(self, rows: Sequence[Row]) -> Tally:
        """Count the votes that end a step."""
        return count_votes(rows)

    def observe(self, tally: Tally, leads: bool) -> list[EventNoted]:
        """Learn from the times in the votes; returns events for the job's log."""
        return self._speeds.observe(tally.compute_us, leads, tally.waits)

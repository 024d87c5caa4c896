"""Names the changes that make up a plan: a decision returns one, the coordinator applies it.

A plan is a list of changes in order. Lines for the job's event log are changes, too, so
that they keep their places between them.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TypeAlias

from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.machine_losses import MachineLoss
from holdfast.engine.core.membership.roster import SlotState
from holdfast.engine.core.types import AgentId, WorkerId


@dataclass(frozen=True, slots=True)
class AddSlot:
    """Add a slot, for a worker with the next number that was never given."""

    slot: SlotState


@dataclass(frozen=True, slots=True)
class PutSlot:
    """Replace a worker's slot by this one, or add it."""

    worker: WorkerId
    slot: SlotState


@dataclass(frozen=True, slots=True)
class OrderNext:
    """Order the next incarnation of a worker to run at once, and the present one to end."""

    worker: WorkerId


@dataclass(frozen=True, slots=True)
class DismissNode:
    """Take all slots away that have this node among theirs."""

    agent: AgentId


@dataclass(frozen=True, slots=True)
class NameWorkers:
    """Give no number below this to a further worker."""

    count: int


@dataclass(frozen=True, slots=True)
class WelcomeNode:
    """Count the processes of an agent that has just begun to report as settled."""

    agent: AgentId


@dataclass(frozen=True, slots=True)
class SetDrain:
    """Drain a node for this reason; empty: use it again."""

    agent: AgentId
    reason: str


@dataclass(frozen=True, slots=True)
class WantSpares:
    """Use this number of the spares that a node offers."""

    agent: AgentId
    spares: int


@dataclass(frozen=True, slots=True)
class CountLoss:
    """Count a worker as lost, for this reason, which may be its machine's own error.

    `announced`: its node was to be taken away at a known time, so the loss spends no budget.
    """

    worker: WorkerId
    reason: str
    machine: MachineLoss | None = None
    announced: bool = False


RosterChange: TypeAlias = (
    AddSlot | PutSlot | OrderNext | DismissNode | NameWorkers | WelcomeNode | SetDrain | WantSpares
)
Change: TypeAlias = RosterChange | CountLoss | Announce

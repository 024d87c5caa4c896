"""Builds a coordinator's knowledge of nodes and workers, as their agents would have reported it."""

from __future__ import annotations

import dataclasses
from typing import Any

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.invalidations import Invalidation
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership.changes import (
    Change,
    CountLoss,
    PutSlot,
    SetDrain,
    WelcomeNode,
)
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.live_roster import LiveRoster, News
from holdfast.engine.core.membership.roster import SlotState
from holdfast.engine.core.policies import LeasePolicy
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import Phase, ReplicaStage, Stage, WorkerStatus

LEASE = LeasePolicy(lease_s=2.0, margin_s=0.5, suspect_s=1.5, abandon_s=20.0)
THREE = ViewNumber(3)


def status(worker: int, incarnation: int = 1, **fields: Any) -> WorkerStatus:
    """Return the status of a worker that is ready."""
    values = {"stage": Stage.READY} | fields
    return WorkerStatus(worker=WorkerId(worker), incarnation=Incarnation(incarnation), **values)


def member(worker: int, **fields: Any) -> WorkerStatus:
    """Return the status of a member of view 3 that acts in it and computes its task of step 5."""
    values = dict(view=THREE, promised=ViewNumber(2), state=ReplicaStage.CURRENT, committed=5)
    return status(worker, **(values | {"phase": Phase.COMPUTING} | fields))


def stopped(worker: int, **fields: Any) -> WorkerStatus:
    """Return the status of a member that has given up view 3 in the middle of step 5."""
    return member(worker, **({"promised": THREE} | fields))


def resting(worker: int, **fields: Any) -> WorkerStatus:
    """Return the status of a member that has given up view 3 at the boundary after step 5."""
    return stopped(worker, **({"phase": Phase.BOUNDARY} | fields))


def view_of(*workers: int, vranks: int = 0, **fields: Any) -> View:
    """Return view 3 of these workers, each on a node of its own; worker 4 is on node n4."""
    values: dict[str, Any] = dict(number=THREE, resume_step=4, leader=WorkerId(workers[0]))
    owners = (WorkerId(workers[v % len(workers)]) for v in range(vranks or len(workers)))
    values["owners"] = tuple(owners)
    return View(
        members=tuple(
            Member(worker=WorkerId(w), incarnation=Incarnation(1), agent=AgentId(f"n{w}"))
            for w in workers
        ),
        **(values | fields),
    )


def invalid(after: int, view: int, *wrong: int) -> Invalidation:
    return Invalidation(after=after, view=ViewNumber(view), wrong=tuple(map(WorkerId, wrong)))


class Cluster:
    """Nodes with one slot each: worker w is on node nw."""

    def __init__(self, *statuses: WorkerStatus, record: JobRecord | None = None) -> None:
        self.roster = LiveRoster(record, 0.0)
        self.now = 1.0
        self._seq: dict[str, int] = {}
        for each in statuses:
            name = AgentId(f"n{each.worker}")
            self.hear(name, each)
            slot = SlotState(name, each.incarnation)
            self.change(PutSlot(each.worker, slot), WelcomeNode(name))

    def hear(self, name: str, *statuses: WorkerStatus, **fields: Any) -> News:
        """Deliver the next report of a node."""
        self._seq[name] = fields.pop("seq", self._seq.get(name, 0) + 1)
        values = dict(incarnation=Incarnation(1), slots=1) | fields
        report = AgentReport(
            agent=AgentId(name), seq=self._seq[name], workers=tuple(statuses), **values
        )
        return self.roster.hear(report, self.now)

    def change(self, *plan: Change) -> list[str]:
        """Carry out a plan; return its lines."""
        lines = []
        for change in plan:
            if isinstance(change, Announce):
                lines.append(change.text)
            elif isinstance(change, CountLoss):
                lines.append(f"{change.worker}: {change.reason}")
            else:
                self.roster.apply(change)
        return lines

    def put(self, worker: int, **fields: Any) -> None:
        """Change fields of a worker's slot."""
        slot = self.roster.slots[WorkerId(worker)]
        self.change(PutSlot(WorkerId(worker), dataclasses.replace(slot, **fields)))

    def drain(self, name: str, reason: str = "asked") -> None:
        self.change(SetDrain(AgentId(name), reason))

    def facts(self, view: View | None = None, *silent: int, **fields: Any) -> Facts:
        """Return the facts; the nodes of `silent` workers have not reported for a while."""
        values: dict[str, Any] = dict(witness_at=None, now=self.now) | fields
        names = frozenset(AgentId(f"n{w}") for w in silent)
        return Facts(view=view, roster=self.roster, lease=LEASE, silent=names, **values)

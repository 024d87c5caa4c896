"""Keeps what a coordinator of workers knows of its job, besides nodes and slots.

Decisions read it (decisions.py). Only the machine changes it, where it takes facts in or carries a
plan out (coordinator.py).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership.admission import Attendance
from holdfast.engine.core.membership.durable import Durable
from holdfast.engine.core.membership.event_log import EventLog
from holdfast.engine.core.membership.followers import ORDERS_PER_TERM, Followers
from holdfast.engine.core.membership.formation import LEAVE_RESERVE_S
from holdfast.engine.core.membership.handover import Handover
from holdfast.engine.core.membership.job_changes import Memory
from holdfast.engine.core.membership.job_end import Stopping, standstill_s
from holdfast.engine.core.membership.last_saves import LastSaves
from holdfast.engine.core.membership.progress import Progress
from holdfast.engine.core.membership.protection import Protection
from holdfast.engine.core.membership.reserve import Reserve, ReservePolicy
from holdfast.engine.core.membership.review_schedule import Agenda
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.membership.server_places import ServerPlaces
from holdfast.engine.core.membership.view_end import ViewEnd
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.core.step.speculation import Budget
from holdfast.engine.core.types import RELEASE_ALL
from holdfast.engine.core.views import View


@dataclass(slots=True, kw_only=True)
class JobState:
    """Keeps the parts that decisions depend on; each is about one subject."""

    policy: CoordinatorPolicy
    agenda: Agenda
    budget: Budget
    durable: Durable
    event_log: EventLog
    progress: Progress
    followers: Followers
    handover: Handover
    last_saves: LastSaves
    protection: Protection
    reserve: Reserve
    servers: ServerPlaces
    attendance: Attendance = field(default_factory=Attendance)
    view_end: ViewEnd = field(default_factory=ViewEnd)
    #: Workers whose script has ended its loops up to this one are released.
    release_loop: int = 0
    #: An operator's request.
    stopping: Stopping | None = None
    #: Since when a first view could not be formed.
    wanting_since: float | None = None
    #: When the first report showed that a member of the view does not act any more (lease.py).
    witness_at: float | None = None

    @property
    def is_finishing(self) -> bool:
        """Return whether the leader's script is past its last loop."""
        return self.release_loop == RELEASE_ALL

    def note_steps(self, report: AgentReport, view: View | None) -> bool:
        """Take in the steps of members; return whether suspended workers fall further behind."""
        is_further = False
        for status in report.workers:
            if view is not None and view.includes(status.worker, status.incarnation):
                is_new = self.progress.record_step(status.committed)
                is_further = is_further or (is_new and bool(view.suspended))
        return is_further

    def remember(self, memory: Memory) -> None:
        """Keep a value that later decisions need; it replaces the one of the same type."""
        match memory:
            case Attendance():
                self.attendance = memory
            case Followers():
                self.followers = memory
            case Handover():
                self.handover = memory
            case LastSaves():
                self.last_saves = memory
            case Protection():
                self.protection = memory
            case Reserve():
                self.reserve = memory
            case ServerPlaces():
                self.servers = memory
            case _:
                raise AssertionError(f"a job of workers remembers no {memory}")

    def list_alarms(self, roster: Roster) -> Iterator[float]:
        """Yield when time alone changes a decision, for reasons of the whole job."""
        policy = self.policy
        if self.witness_at is not None:
            yield self.witness_at + policy.lease.fence_s
        if self.wanting_since is not None:
            yield self.wanting_since + policy.settle_s
        if self.stopping is not None:
            yield self.stopping.until
        if self.progress.standstills:
            yield self.agenda.still_since + standstill_s(self.progress, policy.hang_s)
        if self.last_saves.due_at is not None:
            yield self.last_saves.due_at
        if self.followers.order is not None:
            yield from (node.leave_by - LEAVE_RESERVE_S for node in roster.nodes.values())
        yield from self.handover.list_alarms()
        yield from self.servers.list_alarms(roster, policy.lease)


def recall_state(
    policy: CoordinatorPolicy,
    term: int,
    record: JobRecord | None,
    roster: Roster,
    now: float,
    passed_over: int,
) -> JobState:
    """Return the state as a coordinator begins. `passed_over`: numbers that a lost record gave."""
    held_back = ReservePolicy(
        virtual_ranks=policy.virtual_ranks, spares=policy.spares, hot=policy.hot_spares
    )
    view, past = (record.view, (record.setbacks, record.ended)) if record else (None, ())
    return JobState(
        policy=policy,
        agenda=Agenda(policy, roster, now),
        budget=Budget(policy.speculation, policy.virtual_ranks),
        durable=Durable(record.saved, record.invalidations) if record else Durable(),
        event_log=EventLog(record.slots if record else ()),
        progress=Progress(view.resume_step if view else 0, *past),
        followers=Followers(enabled=policy.feeds, newest=term * ORDERS_PER_TERM),
        handover=Handover(replicated=policy.replicated),
        last_saves=LastSaves(last=term * ORDERS_PER_TERM),
        protection=Protection(policy.redundancy, policy.shards_told, policy.servers),
        reserve=Reserve(policy=held_back, looked_at=now),
        servers=ServerPlaces.recall(policy, record, passed_over),
        release_loop=record.release_loop if record else 0,
    )

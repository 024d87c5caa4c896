"""The coordinator machine: who is a member, who hosts what, where to resume, who is replaced.

It does not know sockets, processes, files or clocks. Each event only updates what is known; then
`_advance` derives from the whole of it what should happen next, so that a lost, late or repeated
report can delay a decision but never change it. The invariants it keeps: view numbers grow and are
durable before anyone hears of them; a view is formed only once every member of the one before has
promised not to act in it or is gone for good; an incarnation is never ordered twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from dataclasses import dataclass, field

from holdfast.core.assignment import assign_at_boundary, assign_mid_step
from holdfast.core.errors import assert_never, require
from holdfast.core.resume import resume_step
from holdfast.core.types import (
    NO_VIEW,
    RELEASE_ALL,
    AgentId,
    AgentReport,
    Directive,
    Incarnation,
    JobRecord,
    Member,
    Slot,
    Stage,
    View,
    ViewNumber,
    WorkerId,
    WorkerStatus,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorPolicy:
    virtual_ranks: int
    workers_start: int  # workers to wait for before step 0
    workers_min: int = 1  # fewer than this and the job waits at the next boundary
    lease_s: float = 10.0
    lease_margin_s: float = 1.0  # clock drift and delivery, on top of the agent's own lease
    settle_s: float = 120.0  # start with workers_min once the others are this late
    patience_s: float = (
        5.0  # a planned stop that leaves a worker waiting this long is no longer one
    )
    hang_s: float = 1800.0  # a member others wait for, with nothing moving, is replaced after this
    losses_max: int = 30  # workers lost with no step committed in between
    backoff_s: float = 0.5
    backoff_max_s: float = 30.0


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class ReportArrived:
    report: AgentReport


@dataclass(frozen=True, slots=True)
class StopRequested:
    """The operator ends the job."""

    reason: str


@dataclass(frozen=True, slots=True)
class Tick:
    pass


CoordinatorEvent = ReportArrived | StopRequested | Tick

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class Persist:
    """Durable before any later effect is carried out."""

    record: JobRecord


@dataclass(frozen=True, slots=True)
class SendDirective:
    directive: Directive


@dataclass(frozen=True, slots=True)
class Announce:
    """One line of the job's story, with its reason, for people and for events.jsonl."""

    kind: str
    text: str
    worker: WorkerId | None = None
    view: ViewNumber | None = None
    step: int | None = None


@dataclass(frozen=True, slots=True)
class Finish:
    """The job is over and nothing of it runs any more. Empty outcome: success."""

    outcome: str


CoordinatorEffect = Persist | SendDirective | Announce | Finish

# ---------------------------------------------------------------- state


@dataclass(slots=True)
class _Agent:
    incarnation: Incarnation
    seq: int
    heard_at: float
    view_known: ViewNumber
    view_told: ViewNumber = NO_VIEW
    pid: int = 0
    statuses: dict[WorkerId, WorkerStatus] = field(default_factory=dict)
    sent: Directive | None = None


@dataclass(slots=True)
class _Slot:
    agent: AgentId
    incarnation: Incarnation
    counted: Incarnation = Incarnation(0)  # newest incarnation whose loss was counted
    respawn_at: float | None = None  # set from a loss until the next incarnation is ordered


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSnapshot:
    record: JobRecord
    step: int
    stop_view: ViewNumber
    pending_view: ViewNumber
    agents: tuple[tuple[AgentId, Incarnation, int], ...]  # with the agent's pid
    workers: tuple[WorkerStatus, ...]
    finished: bool


class CoordinatorMachine:
    """See the module's docstring; `handle` is the only mutator."""

    def __init__(
        self, policy: CoordinatorPolicy, term: int, record: JobRecord | None, now: float
    ) -> None:
        self._policy = policy
        self._term = term
        self._started_at = now
        self._view = record.view if record else None
        self._release_loop = record.release_loop if record else 0
        self._outcome = record.outcome if record else None
        self._slots = {
            s.worker: _Slot(s.agent, s.incarnation, counted=Incarnation(s.incarnation - 1))
            for s in (record.slots if record else ())
        }
        self._agents: dict[AgentId, _Agent] = {}
        self._persisted = record
        self._seq = 0
        self._stop_view = self._pending_view = NO_VIEW
        self._wanting_since: float | None = None  # since when a first view could not be formed
        self._step = self._view.resume_step if self._view else 0
        self._losses = 0  # since the last progress
        self._still_since = now
        self._still: object = None
        self._finished = False
        self._now = now

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorEffect]:
        """Apply one event at time `now` (seconds); returns effects in order."""
        self._now = now
        effects: list[CoordinatorEffect] = []
        reply_to: AgentId | None = None
        match event:
            case ReportArrived(report):
                reply_to = report.agent if self._hear(report, now) else None
            case StopRequested(reason):
                if self._outcome is None:
                    effects.append(Announce("stop", reason))
                    self._outcome = reason
            case Tick():
                pass
            case _:
                assert_never(event)
        effects += self._advance(now)
        record = self._record()
        if record != self._persisted:
            self._persisted = record
            effects.insert(0, Persist(record))
        effects += self._directives(reply_to, now)
        if self._over(now) and not self._finished:
            self._finished = True
            effects.append(Finish(self._outcome or ""))
        return effects

    def deadline(self) -> float | None:
        """The earliest time at which a Tick could change something."""
        times = [a.heard_at + self._fence_s() for a in self._agents.values()]
        times += [s.respawn_at for s in self._slots.values() if s.respawn_at is not None]
        waits_s = (self._policy.patience_s, self._policy.hang_s)
        times += [self._started_at + self._fence_s(), *(self._still_since + w for w in waits_s)]
        if self._wanting_since is not None:
            times.append(self._wanting_since + self._policy.settle_s)
        return min((t for t in times if t > self._now), default=None)

    def snapshot(self) -> CoordinatorSnapshot:
        return CoordinatorSnapshot(
            record=self._record(),
            step=self._step,
            stop_view=self._stop_view,
            pending_view=self._pending_view,
            agents=tuple((a, r.incarnation, r.pid) for a, r in sorted(self._agents.items())),
            workers=tuple(s for _, s in sorted(self._known().items())),
            finished=self._finished,
        )

    def check(self) -> None:
        view = self._view
        if view is not None:
            workers = view.workers
            require(list(workers) == sorted(set(workers)), f"view {view.number} repeats a member")
            require(set(view.owners) <= set(workers), f"view {view.number}: a stranger owns a rank")
            require(len(view.owners) == self._policy.virtual_ranks, "a virtual rank has no owner")
            require(self._stop_view <= view.number, "stopping a view that does not exist")
        require(self._record() == self._persisted or self._persisted is None, "unsaved record")

    # ------------------------------------------------------------ hearing

    def _hear(self, report: AgentReport, now: float) -> bool:
        agent = self._agents.get(report.agent)
        if agent is not None and (report.incarnation, report.seq) <= (agent.incarnation, agent.seq):
            return False
        anew = agent is None or agent.incarnation != report.incarnation
        if agent is None or anew:
            agent = _Agent(report.incarnation, report.seq, now, report.view_known)
            self._agents[report.agent] = agent
        agent.seq, agent.heard_at, agent.pid = report.seq, now, report.pid
        agent.view_known, agent.statuses = report.view_known, {s.worker: s for s in report.workers}
        here = [w for w, s in self._slots.items() if s.agent == report.agent]
        if anew:
            self._renew_unheard(report.agent, here)
        for _ in range(report.slots - len(here)):
            worker = WorkerId(max(self._slots, default=-1) + 1)
            self._slots[worker] = _Slot(report.agent, Incarnation(1))
        return True

    def _renew_unheard(self, name: AgentId, workers: list[WorkerId]) -> None:
        """An agent that starts to speak knows nothing of these: what was ordered before is void."""
        for worker in workers:
            slot = self._slots[worker]
            member = Member(worker=worker, incarnation=slot.incarnation, agent=name)
            if worker not in self._agents[name].statuses and member not in self._members:
                slot.incarnation = Incarnation(slot.incarnation + 1)

    # ------------------------------------------------------------ deciding

    def _advance(self, now: float) -> list[CoordinatorEffect]:
        if self._outcome is not None:
            return []
        effects: list[CoordinatorEffect] = [*self._note_progress(now), *self._replace_lost(now)]
        failed = [s for s in self._known().values() if s.stage == Stage.FAILED]
        if failed:
            self._outcome = f"worker {failed[0].worker} failed: {failed[0].detail}"
            effects.append(Announce("failed", self._outcome, failed[0].worker))
        elif self._losses > self._policy.losses_max:
            self._outcome = (
                f"{self._losses} workers were lost at step {self._step} with no step committed in "
                "between: see the worker logs; raise --losses-max if the machines are to blame"
            )
            effects.append(Announce("failed", self._outcome))
        elif self._note_release():
            left = [self._status(m.worker) for m in self._members if not self._gone(m, now)]
            if not left:
                self._outcome = ""
            elif any(s is not None and not s.ended for s in left):
                # Somebody has the last gradient but not its votes: a view of those left commits it.
                effects += self._stop_if_broken(now)
                effects += self._form(now)
        elif self._all_exited():
            self._outcome = ""
        else:
            effects += self._stop_if_broken(now)
            effects += self._form(now)
            effects += self._invite()
        return effects

    def _note_progress(self, now: float) -> list[CoordinatorEffect]:
        members = self._members_known()
        step = max((s.committed for s in members), default=self._step)
        if step > self._step:
            self._losses = 0
        self._step = max(step, self._view.resume_step) if self._view else step
        still = tuple((s.worker, s.incarnation, s.committed, s.waiting) for s in members)
        waited_for = [s for s in members if not s.waiting and not s.ended and s.stage.alive]
        if still != self._still or not any(s.waiting for s in members):
            self._still, self._still_since = still, now
        elif now - self._still_since >= self._policy.hang_s:
            self._still_since = now
            return [self._order_anew(s, f"hung for {self._policy.hang_s:g} s") for s in waited_for]
        return []

    def _order_anew(self, status: WorkerStatus, reason: str) -> Announce:
        slot = self._slots[status.worker]
        slot.incarnation = Incarnation(slot.incarnation + 1)
        slot.respawn_at = None
        return Announce("replaced", f"worker {status.worker} is replaced: {reason}", status.worker)

    def _replace_lost(self, now: float) -> Iterator[CoordinatorEffect]:
        """Count each loss once; order the next incarnation when its back-off has passed."""
        if self._release_loop == RELEASE_ALL:
            return
        for worker, slot in self._slots.items():
            if slot.respawn_at is None:
                lost = self._loss(worker, slot, now)
                if lost is None:
                    continue
                slot.respawn_at = now
                if slot.counted < slot.incarnation:
                    slot.counted = slot.incarnation
                    slot.respawn_at = now + self._count_loss()
                    yield Announce("lost", f"worker {worker} was lost: {lost}", worker)
            if now >= slot.respawn_at:
                slot.incarnation = Incarnation(slot.incarnation + 1)
                slot.respawn_at = None

    def _count_loss(self) -> float:
        """Returns the back-off: none at first, then longer with every loss without progress."""
        self._losses += 1
        excess = self._losses - 2 * len(self._slots)
        backoff_s = self._policy.backoff_s * 2.0 ** min(excess, 10)
        return min(backoff_s, self._policy.backoff_max_s) if excess > 0 else 0.0

    def _loss(self, worker: WorkerId, slot: _Slot, now: float) -> str | None:
        """Why the ordered incarnation of `worker` is gone, or None while it is not."""
        agent = self._agents.get(slot.agent)
        member = Member(worker=worker, incarnation=slot.incarnation, agent=slot.agent)
        in_view = member in self._members
        if agent is None or now >= agent.heard_at + self._fence_s():
            return "its node's lease ran out" if in_view and self._gone(member, now) else None
        status = agent.statuses.get(worker)
        if status is None or status.incarnation < slot.incarnation:
            # Not started yet, or the agent itself restarted and its workers died with it.
            return "its agent restarted" if in_view else None
        return status.detail or "gone" if status.stage == Stage.LOST else None

    def _note_release(self) -> bool:
        """Let ended workers go once the leader's script is past the loop; True when it is over."""
        view = self._view
        member = view.member(view.leader) if view else None
        leader = self._status(member.worker, member.incarnation) if member else None
        if leader is not None and leader.stage == Stage.EXITED:
            self._release_loop = RELEASE_ALL
        elif leader is not None:
            self._release_loop = max(self._release_loop, leader.loop - 1)
        return self._release_loop == RELEASE_ALL

    def _all_exited(self) -> bool:
        stages = [s.stage for s in self._known().values()]
        return 0 < len(stages) == len(self._slots) and all(s == Stage.EXITED for s in stages)

    def _stop_if_broken(self, now: float) -> Iterator[CoordinatorEffect]:
        view = self._view
        if view is None or self._stop_view >= view.number:
            return
        reason = None
        stopped = waiting = False
        for member in view.members:
            status = self._status(member.worker, member.incarnation)
            if self._gone(member, now):
                reason = f"worker {member.worker} is gone"
            elif status is None:
                continue
            elif status.promised < view.number:
                waiting = waiting or status.waiting
            elif status.at_boundary and status.committed > view.resume_step:
                stopped = True  # at rest after a vote: as planned, if the others come to rest too
            else:
                reason = reason or f"worker {member.worker} lost touch with another"
        if stopped and waiting and now - self._still_since >= self._policy.patience_s:
            reason = reason or "a worker waits for one that has stopped"
        if reason is not None:
            self._stop_view = number = view.number
            yield Announce("stop_view", f"view {number} is stopped: {reason}", None, number)

    def _form(self, now: float) -> Iterator[CoordinatorEffect]:
        """The next view, once nobody can act in the present one any more."""
        view = self._view
        alive: list[WorkerStatus] = []
        for member in self._members:
            if self._gone(member, now):
                continue
            status = self._status(member.worker, member.incarnation)
            if status is None or view is None or status.promised < view.number:
                return
            if self._ordered(status):  # else it is being replaced: its agent will end it
                alive.append(status)
        survivors = [s for s in alive if s.has_state]
        finishing = self._release_loop == RELEASE_ALL
        if view is None or not survivors:
            if not finishing:
                yield from self._form_initial(now)
            return
        step, why = resume_step(survivors)
        at_rest = all(s.at_boundary for s in survivors)
        room = max(self._policy.virtual_ranks - len(survivors), 0)
        joiners = self._candidates()[:room] if at_rest and not finishing else []
        if at_rest and not finishing and len(survivors + joiners) < self._policy.workers_min:
            return
        staying = [s.worker for s in survivors]
        members = sorted([*staying, *[s.worker for s in joiners]])
        if at_rest:
            owners = assign_at_boundary(self._policy.virtual_ranks, members, view.owners)
            if joiners:
                why = f"worker {', '.join(str(s.worker) for s in joiners)} joins"
        else:
            owners = assign_mid_step(staying, view.owners)
        yield self._install(members, owners, step, [s.worker for s in joiners], why)

    def _form_initial(self, now: float) -> Iterator[CoordinatorEffect]:
        """Nobody holds the state: start, or start again, from the initial one."""
        if self._wanting_since is None:
            self._wanting_since = now
        known = self._known()
        for status in known.values():
            stained = status.tainted or status.has_state
            if stained and status.stage == Stage.READY and self._ordered(status):
                yield self._order_anew(status, "its state is neither initial nor the job's")
        ready = [s for s in self._candidates() if not s.tainted and not s.has_state]
        late = now >= self._wanting_since + self._policy.settle_s
        pending = [w for w in self._slots if w not in known or known[w].stage != Stage.EXITED]
        everyone = len(ready) == len(pending) and len(self._slots) >= self._policy.workers_start
        if not ready or not (everyone or (late and len(ready) >= self._policy.workers_min)):
            return
        self._wanting_since = None
        members = [s.worker for s in ready][: self._policy.virtual_ranks]
        owners = assign_at_boundary(self._policy.virtual_ranks, members, ())
        why = "every worker was lost: from step 0 again" if self._view else "the job starts"
        self._step = 0
        yield self._install(members, owners, 0, members, why)

    def _install(
        self,
        members: list[WorkerId],
        owners: tuple[WorkerId, ...],
        step: int,
        joiners: list[WorkerId],
        why: str,
    ) -> Announce:
        number = ViewNumber((self._view.number if self._view else NO_VIEW) + 1)
        self._view = View(
            number=number,
            members=tuple(
                Member(worker=w, incarnation=self._slots[w].incarnation, agent=self._slots[w].agent)
                for w in members
            ),
            owners=owners,
            resume_step=step,
            leader=self._leader([w for w in members if w not in joiners] or members),
            joiners=tuple(sorted(joiners)),
            reason=why,
        )
        names = ", ".join(map(str, members))
        return Announce("view", f"view {number}: workers {names}; {why}", None, number, step)

    def _leader(self, eligible: list[WorkerId]) -> WorkerId:
        """The one before, if it survives: what it does alone it must be able to finish alone."""
        view = self._view
        return view.leader if view is not None and view.leader in eligible else eligible[0]

    def _invite(self) -> Iterator[CoordinatorEffect]:
        """Plan a change at the next boundary: somebody can join, or too few are left."""
        view = self._view
        if view is None or self._stop_view >= view.number or self._pending_view >= view.number:
            return
        joiners = self._candidates() if len(view.members) < self._policy.virtual_ranks else []
        short = len(view.members) < self._policy.workers_min
        if (joiners or short) and not any(s.ended for s in self._members_known()):
            self._pending_view = view.number
            names = ", ".join(str(s.worker) for s in joiners)
            who, kind = (f"worker {names} joins", "join") if joiners else ("the job waits", "wait")
            yield Announce(kind, f"{who} at the next step boundary")

    # ------------------------------------------------------------ telling

    def _directives(self, reply_to: AgentId | None, now: float) -> Iterator[SendDirective]:
        for name, agent in sorted(self._agents.items()):
            view = self._view
            directive = Directive(
                term=self._term,
                seq=agent.sent.seq if agent.sent else 0,
                agent=name,
                agent_incarnation=agent.incarnation,
                heard=agent.seq if name == reply_to else (agent.sent.heard if agent.sent else 0),
                wanted=tuple(self._wanted(name, now)),
                stop_view=self._stop_view,
                pending_view=self._pending_view,
                view=view if view and agent.view_known < view.number else None,
                release_loop=self._release_loop,
                shutdown=self._outcome is not None,
            )
            if name != reply_to and agent.sent is not None:
                old_view = directive.view is None or agent.view_told >= directive.view.number
                if old_view and directive == dataclasses.replace(agent.sent, view=directive.view):
                    continue
            self._seq += 1
            agent.view_told = view.number if view else NO_VIEW
            agent.sent = dataclasses.replace(directive, seq=self._seq)
            yield SendDirective(agent.sent)

    def _wanted(self, agent: AgentId, now: float) -> Iterator[tuple[WorkerId, Incarnation]]:
        if self._outcome is not None:
            return
        if self._release_loop == RELEASE_ALL:  # only who is still on its way out: nothing starts
            for member in self._members:
                if member.agent == agent and not self._gone(member, now):
                    yield member.worker, member.incarnation
            return
        for worker, slot in self._slots.items():
            # A lost one is not ordered: that would start the same incarnation a second time.
            if slot.agent == agent and slot.respawn_at is None:
                yield worker, slot.incarnation

    # ------------------------------------------------------------ knowing

    @property
    def _members(self) -> tuple[Member, ...]:
        return self._view.members if self._view else ()

    def _known(self) -> dict[WorkerId, WorkerStatus]:
        """The newest status heard of each worker, of whichever incarnation."""
        statuses = [(worker, self._status(worker)) for worker in self._slots]
        return {worker: status for worker, status in statuses if status is not None}

    def _status(
        self, worker: WorkerId, incarnation: Incarnation | None = None
    ) -> WorkerStatus | None:
        slot = self._slots.get(worker)
        agent = self._agents.get(slot.agent) if slot else None
        status = agent.statuses.get(worker) if agent else None
        other = status is not None and incarnation not in (None, status.incarnation)
        return None if other else status

    def _members_known(self) -> list[WorkerStatus]:
        found = [self._status(m.worker, m.incarnation) for m in self._members]
        return [s for s in found if s is not None]

    def _ordered(self, status: WorkerStatus) -> bool:
        return status.incarnation == self._slots[status.worker].incarnation

    def _candidates(self) -> list[WorkerStatus]:
        """Workers that could join a view: ready, newest of their slot, without the job's state."""
        acting = {m.worker: m.incarnation for m in self._members}
        promised = self._view.number if self._view else NO_VIEW
        return [
            s
            for s in sorted(self._known().values(), key=lambda s: s.worker)
            if s.stage == Stage.READY
            and self._ordered(s)
            and not s.has_state
            and (acting.get(s.worker) != s.incarnation or s.promised >= promised)
        ]

    def _gone(self, member: Member, now: float) -> bool:
        """Whether this incarnation can never act again: its process ended, or its lease ran out."""
        agent = self._agents.get(member.agent)
        if agent is None:
            return now >= self._started_at + self._fence_s()
        if now >= agent.heard_at + self._fence_s():
            return True
        status = agent.statuses.get(member.worker)
        if status is None or status.incarnation > member.incarnation:
            return True
        return status.incarnation == member.incarnation and not status.stage.alive

    def _fence_s(self) -> float:
        return self._policy.lease_s + self._policy.lease_margin_s

    def _record(self) -> JobRecord:
        return JobRecord(
            term=self._term,
            view=self._view,
            slots=tuple(
                Slot(worker=w, agent=s.agent, incarnation=s.incarnation)
                for w, s in self._slots.items()
            ),
            release_loop=self._release_loop,
            outcome=self._outcome,
        )

    def _over(self, now: float) -> bool:
        return self._outcome is not None and not any(
            s.stage.alive
            for a in self._agents.values()
            if now < a.heard_at + self._fence_s()
            for s in a.statuses.values()
        )

"""The coordinator machine: who is a member, who hosts what, where to resume, who is replaced.

It does not know sockets, processes, files or clocks. Each event only updates what is known; then
`_advance` derives from the whole of it what should happen next, so that a lost, late or repeated
report can delay a decision but never change it. The invariants it keeps: view numbers grow and are
durable before anyone hears of them; a view is formed only once every member of the one before has
promised not to act in it, is gone for good, or has lost its right to act; an incarnation is never
ordered twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.core.admission import Attendance, admit, attend
from holdfast.core.assignment import assign_at_boundary
from holdfast.core.errors import assert_never, require
from holdfast.core.formation import (
    Proposal,
    Situation,
    candidates,
    last_view,
    leaving,
    next_view,
    survivors_of,
    unreachable,
    why_broken,
)
from holdfast.core.job import CoordinatorPolicy
from holdfast.core.restart import bench, replace_lost
from holdfast.core.roster import News, NodeSnapshot, Roster
from holdfast.core.types import (
    NO_VIEW,
    RELEASE_ALL,
    AgentId,
    AgentReport,
    Directive,
    Incarnation,
    JobRecord,
    Member,
    Stage,
    View,
    ViewNumber,
    WorkerId,
    WorkerStatus,
)

REVIEW_S = 2e-5  # least time between two reviews, for each place of the job
SKIPPED = 1000  # numbers passed over after the loss of the journal: more than were given unheard


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

# ---------------------------------------------------------------- the machine


@dataclass(frozen=True, slots=True, kw_only=True)
class CoordinatorSnapshot:
    record: JobRecord
    step: int
    stop_view: ViewNumber
    pending_view: ViewNumber
    agents: tuple[NodeSnapshot, ...]
    workers: tuple[WorkerStatus, ...]
    finished: bool


class CoordinatorMachine:
    """See the module's docstring; `handle` is the only mutator.

    `forgotten`: greater with each record that was lost; if not 0, what it said must be learnt from
    the agents first, and numbers that it may have given are passed over.
    """

    def __init__(
        self,
        policy: CoordinatorPolicy,
        term: int,
        record: JobRecord | None,
        now: float,
        forgotten: int = 0,
    ) -> None:
        self._policy = policy
        self._term = term
        self._view = record.view if record else None
        self._forgotten = record.forgotten if record else forgotten
        passed_over = self._forgotten * SKIPPED
        self._views_used = record.views_used if record else ViewNumber(passed_over)
        self._release_loop = record.release_loop if record else 0
        self._outcome = record.outcome if record else None
        self._roster = Roster(record, now, Incarnation(passed_over + 1))
        self._learn_until = now + policy.lease.fence_s if forgotten else None
        self._persisted = record
        self._seq = 0
        self._stop_view = self._pending_view = NO_VIEW
        self._witness_at: float | None = None  # see core/lease.py
        self._wanting_since: float | None = None  # since when a first view could not be formed
        self._step = self._view.resume_step if self._view else 0
        self._losses = 0  # since the last progress
        self._still_since = now
        self._still: object = None
        self._attendance = Attendance()
        self._finished = False
        self._reviewed_at = float("-inf")
        self._review_at: float | None = now

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorEffect]:
        """Apply one event at time `now` (seconds); returns effects in order."""
        effects: list[CoordinatorEffect] = []
        reply_to: AgentId | None = None
        match event:
            case ReportArrived(report):
                news = self._hear(report, now)
                reply_to = None if news is News.STALE else report.agent
                if news in (News.CHANGE, News.AGENT):
                    self._review_at = self._soon(now)
                if self._review_at is None or now < self._review_at:
                    return [self._answer(reply_to)] if reply_to is not None else []
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
        if record != self._persisted and self._learn_until is None:
            self._persisted = record
            effects.insert(0, Persist(record))
        effects += self._directives(reply_to)
        if self._over(now) and not self._finished:
            self._finished = True
            effects.append(Finish(self._outcome or ""))
        self._reviewed_at, self._review_at = now, self._next_review(now)
        return effects

    def deadline(self) -> float | None:
        """The earliest time at which a Tick could change something."""
        return self._review_at

    def _soon(self, now: float) -> float:
        """When to decide on a change: a large job's changes come in floods, and decisions cost."""
        due = max(now, self._reviewed_at + len(self._roster.places) * REVIEW_S)
        return due if self._review_at is None else min(due, self._review_at)

    def _next_review(self, now: float) -> float | None:
        policy, lease, roster = self._policy, self._policy.lease, self._roster
        heard = [roster.started_at, *(n.heard_at for n in roster.nodes.values())]
        heard += [self._witness_at] if self._witness_at is not None else []
        times = [
            t + wait_s
            for t in heard
            for wait_s in (lease.suspect_s, lease.fence_s, lease.abandon_s + lease.margin_s)
        ]
        times += [p.respawn_at for p in roster.places.values() if p.respawn_at is not None]
        times += [self._still_since + w for w in (policy.patience_s, policy.hang_s)]
        if self._wanting_since is not None:
            times.append(self._wanting_since + policy.settle_s)
        if self._learn_until is not None:
            times.append(self._learn_until)
        return min((t for t in times if t > now), default=None)

    def snapshot(self) -> CoordinatorSnapshot:
        roster = self._roster
        return CoordinatorSnapshot(
            record=self._record(),
            step=self._step,
            stop_view=self._stop_view,
            pending_view=self._pending_view,
            agents=roster.snapshot(self._attendance.silent),
            workers=tuple(s for _, s in sorted(roster.known().items())),
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
        saved = self._persisted in (None, self._record())
        require(saved or self._learn_until is not None, "unsaved record")

    # ------------------------------------------------------------ hearing

    def _hear(self, report: AgentReport, now: float) -> News:
        roster, drained = self._roster, self._roster.draining(report.agent)
        news = roster.hear(report, now)
        if news in (News.STALE, News.NOTHING):
            if news is News.NOTHING and self._learn_until is not None:
                self._learn(report)
            return news
        drains = bool(report.draining) and not drained
        if drains or news is News.AGENT:
            self._review_at = now  # what is ordered changes here and now, and must be saved
        if drains:
            roster.drain(report.agent, self._view)
        if self._learn_until is not None:
            self._learn(report)
        elif news is News.AGENT:
            if self._forgotten:
                roster.recall(report, None)
            roster.renew_unheard(report.agent, self._view)
        if self._witness_at is None:
            here = (m for m in self._members if m.agent == report.agent)
            self._witness_at = now if any(map(self._is_witness, here)) else None
        return news

    def _is_witness(self, member: Member) -> bool:
        if self._roster.dead(member.worker, member.incarnation):
            return True
        status = self._roster.status(member.worker, member.incarnation)
        return status is not None and status.promised >= self._number

    def _learn(self, report: AgentReport) -> None:
        """The journal is lost: the newest view that any agent knows is the present one."""
        if report.view is not None and report.view.number > self._number:
            self._view = report.view
            self._views_used = ViewNumber(max(self._views_used, report.view.number + SKIPPED))
            self._step = report.view.resume_step
        self._release_loop = max(self._release_loop, report.release_loop)
        self._roster.recall(report, report.view)

    # ------------------------------------------------------------ deciding

    def _advance(self, now: float) -> list[CoordinatorEffect]:
        situation = self._situation(now)
        if self._learns(situation) or self._outcome is not None:
            return []
        effects: list[CoordinatorEffect] = [
            *self._admit(situation),
            *self._note_progress(situation),
        ]
        effects += self._replace_lost(situation)
        failed = [s for s in self._roster.known().values() if s.stage == Stage.FAILED]
        if failed:
            self._outcome = f"worker {failed[0].worker} failed: {failed[0].detail}"
            effects.append(Announce("failed", self._outcome, failed[0].worker))
        elif self._losses > self._policy.restart.losses_max:
            self._outcome = (
                f"{self._losses} workers were lost at step {self._step} with no step committed in "
                "between: see the worker logs; raise --losses-max if the machines are to blame"
            )
            effects.append(Announce("failed", self._outcome))
        elif self._note_release():
            left = [situation.status(m) for m in self._members if not situation.fenced(m)]
            if not left:
                self._outcome = ""
            elif any(s is not None and not s.ended for s in left):
                # Somebody has the last gradient but not its votes: a view of those left commits it.
                effects += self._stop_if_broken(situation)
                effects += self._form(situation)
        elif self._roster.all_exited():
            self._outcome = ""
        else:
            effects += self._stop_if_broken(situation)
            effects += self._form(situation)
            effects += self._invite(self._situation(now))
        return effects

    def _learns(self, situation: Situation) -> bool:
        """Whether something of a lost record may still come from the agents."""
        if self._learn_until is None:
            return False
        for name, node in self._roster.nodes.items():
            if node.view_known > self._number and not situation.silent(name):
                return True
        if situation.now < self._learn_until:
            return True
        self._learn_until = None
        for name in self._roster.nodes:
            self._roster.renew_unheard(name, self._view)
        return False

    def _admit(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        if self._release_loop < RELEASE_ALL:
            waiting, lines = admit(situation, self._policy.nodes_max)
            self._attendance, news = attend(situation, waiting, self._attendance)
            yield from (Announce("node", line) for line in lines)
            yield from (Announce(kind, line) for kind, line in news)

    def _note_progress(self, situation: Situation) -> list[CoordinatorEffect]:
        now = situation.now
        members = self._members_known()
        step = max((s.committed for s in members), default=self._step)
        if step > self._step:
            self._losses = 0
        self._step = max(step, self._view.resume_step) if self._view else step
        still = tuple((s.worker, s.incarnation, s.committed, s.waiting) for s in members)
        waited_for = [s for s in members if not s.waiting and not s.ended and s.stage.alive]
        unseen = any(situation.silent(m.agent) for m in self._members)
        if still != self._still or unseen or not any(s.waiting for s in members):
            self._still, self._still_since = still, now
        elif now - self._still_since >= self._policy.hang_s:
            self._still_since = now
            return [self._order_anew(s, f"hung for {self._policy.hang_s:g} s") for s in waited_for]
        return []

    def _order_anew(self, status: WorkerStatus, reason: str) -> Announce:
        self._roster.order_anew(status.worker)
        return Announce("replaced", f"worker {status.worker} is replaced: {reason}", status.worker)

    def _replace_lost(self, situation: Situation) -> Iterator[Announce]:
        if self._release_loop < RELEASE_ALL:
            for worker, why in replace_lost(situation, self._policy.restart):
                self._losses += 1
                yield Announce("lost", f"worker {worker} was lost: {why}", worker)

    def _note_release(self) -> bool:
        """Let ended workers go once the leader's script is past the loop; True when it is over."""
        view = self._view
        member = view.member(view.leader) if view else None
        leader = self._roster.status(member.worker, member.incarnation) if member else None
        if leader is not None and leader.stage == Stage.EXITED:
            self._release_loop = RELEASE_ALL
        elif leader is not None:
            self._release_loop = max(self._release_loop, leader.loop - 1)
        return self._release_loop == RELEASE_ALL

    def _stop_if_broken(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        view = self._view
        if view is None or self._stop_view >= view.number:
            return
        waited_s = situation.now - self._still_since
        reason = why_broken(situation, waited_s, self._policy.patience_s)
        if reason is not None:
            self._stop_view = number = view.number
            yield Announce("stop_view", f"view {number} is stopped: {reason}", None, number)

    def _form(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        """The next view, once nobody can act in the present one any more."""
        finishing = self._release_loop == RELEASE_ALL
        survivors = survivors_of(situation)
        if survivors is None:
            return
        for worker in unreachable(situation):
            wait_s = bench(self._roster, worker, situation.now, self._policy.restart)
            text = f"worker {worker} is left out for {wait_s:.3g} s: the network does not reach it"
            yield Announce("benched", text, worker)
        survivors = [s for s in survivors if self._roster.ordered(s)]
        if not survivors:
            # Silent members may hold the state: they are waited for, until that is given up.
            if not finishing and not any(situation.may_return(m) for m in self._members):
                yield from self._form_initial(situation)
            return
        policy = self._policy
        if finishing:
            yield self._install(last_view(situation, survivors))
            return
        proposal = next_view(situation, survivors, policy.virtual_ranks, policy.workers_min)
        if proposal is not None:
            yield self._install(proposal)

    def _form_initial(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        """Nobody holds the state: start, or start again, from the initial one."""
        now, roster, policy = situation.now, self._roster, self._policy
        if self._wanting_since is None:
            self._wanting_since = now
        known = roster.known()
        for status in known.values():
            stained = status.tainted or status.has_state
            if stained and status.stage == Stage.READY and roster.ordered(status):
                yield self._order_anew(status, "its state is neither initial nor the job's")
        ready = [s for s in candidates(situation) if not s.tainted]
        late = now >= self._wanting_since + policy.settle_s
        pending = [w for w in roster.places if w not in known or known[w].stage != Stage.EXITED]
        nodes = sum(1 for n in roster.nodes if roster.here(n) and not situation.silent(n))
        if self._view is None and nodes < policy.nodes_min:
            self._wanting_since = now
            return
        everyone = len(ready) == len(pending)
        if not ready or not (everyone or (late and len(ready) >= policy.workers_min)):
            return
        self._wanting_since = None
        workers = tuple(s.worker for s in ready)[: policy.virtual_ranks]
        why = "every worker was lost: from step 0 again" if self._view else "the job starts"
        self._step = 0
        yield self._install(
            Proposal(
                workers=workers,
                owners=assign_at_boundary(policy.virtual_ranks, workers, ()),
                resume_step=0,
                joiners=workers,
                why=why,
            )
        )

    def _install(self, proposal: Proposal) -> Announce:
        number = ViewNumber(max(self._number, self._views_used) + 1)
        for member in self._members:
            place = self._roster.places.get(member.worker)
            if member.worker in proposal.workers or place is None or place.respawn_at is not None:
                continue
            if place.incarnation == member.incarnation:
                self._roster.order_anew(member.worker)  # left out: never again as it was
        workers, places = proposal.workers, self._roster.places
        self._view = View(
            number=number,
            members=tuple(
                Member(worker=w, incarnation=places[w].incarnation, agent=places[w].agent)
                for w in workers
            ),
            owners=proposal.owners,
            resume_step=proposal.resume_step,
            leader=self._leader([w for w in workers if w not in proposal.joiners] or workers),
            joiners=proposal.joiners,
            reason=proposal.why,
        )
        self._views_used = number
        self._witness_at = None
        text = f"view {number}: workers {', '.join(map(str, workers))}; {proposal.why}"
        return Announce("view", text, None, number, proposal.resume_step)

    def _leader(self, eligible: Sequence[WorkerId]) -> WorkerId:
        """The one before, if it survives: what it does alone it must be able to finish alone."""
        view = self._view
        return view.leader if view is not None and view.leader in eligible else eligible[0]

    def _invite(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        """Plan a change at the next boundary: somebody can join, or too few are left."""
        view, policy = self._view, self._policy
        if view is None or self._stop_view >= view.number or self._pending_view >= view.number:
            return
        joiners = candidates(situation) if len(view.members) < policy.virtual_ranks else []
        short = len(view.members) < policy.workers_min
        left = leaving(situation)
        if (joiners or short or left) and not any(s.ended for s in self._members_known()):
            self._pending_view = view.number
            who, kind = f"worker {', '.join(str(s.worker) for s in joiners)} joins", "join"
            if not joiners:
                who, kind = "the job waits", "wait"
            if not joiners and left:
                name, why = min(left.items())
                who, kind = f"node {name} is left ({why})", "drain"
            yield Announce(kind, f"{who} at the next step boundary")

    # ------------------------------------------------------------ telling

    def _directives(self, reply_to: AgentId | None) -> Iterator[SendDirective]:
        for name, node in sorted(self._roster.nodes.items()):
            heard = node.seq if name == reply_to else (node.sent.heard if node.sent else 0)
            directive = self._directive(name, heard)
            if name != reply_to and node.sent is not None:
                old_view = directive.view is None or node.view_told >= directive.view.number
                same = dataclasses.replace(node.sent, seq=directive.seq, view=directive.view)
                if old_view and directive == same:
                    continue
            yield self._send(name, directive)

    def _answer(self, name: AgentId) -> SendDirective:
        return self._send(name, self._directive(name, self._roster.nodes[name].seq))

    def _send(self, name: AgentId, directive: Directive) -> SendDirective:
        node = self._roster.nodes[name]
        self._seq = directive.seq
        node.view_told, node.sent = directive.view_number, directive
        return SendDirective(directive)

    def _directive(self, name: AgentId, heard: int) -> Directive:
        view, node = self._view, self._roster.nodes[name]
        return Directive(
            term=self._term,
            seq=self._seq + 1,
            agent=name,
            agent_incarnation=node.incarnation,
            heard=heard,
            wanted=tuple(self._wanted(name)),
            stop_view=self._stop_view,
            pending_view=self._pending_view,
            view_number=self._number,
            view=view if view and node.view_known < view.number else None,
            release_loop=self._release_loop,
            undecided=self._learn_until is not None,
            shutdown=self._outcome is not None,
        )

    def _wanted(self, name: AgentId) -> Iterator[tuple[WorkerId, Incarnation]]:
        if self._outcome is not None or self._learn_until is not None:
            return
        if self._release_loop == RELEASE_ALL:  # who is still on its way out: nothing starts
            for member in self._members:
                here = member.agent == name
                if here and not self._roster.dead(member.worker, member.incarnation):
                    yield member.worker, member.incarnation
        else:
            yield from self._roster.wanted(name, self._view)

    # ------------------------------------------------------------ knowing

    @property
    def _number(self) -> ViewNumber:
        return self._view.number if self._view else NO_VIEW

    @property
    def _members(self) -> tuple[Member, ...]:
        return self._view.members if self._view else ()

    def _situation(self, now: float) -> Situation:
        return Situation(
            view=self._view,
            roster=self._roster,
            lease=self._policy.lease,
            witness_at=self._witness_at,
            now=now,
        )

    def _members_known(self) -> list[WorkerStatus]:
        found = [self._roster.status(m.worker, m.incarnation) for m in self._members]
        return [s for s in found if s is not None]

    def _record(self) -> JobRecord:
        return JobRecord(
            term=self._term,
            view=self._view,
            views_used=self._views_used,
            slots=self._roster.slots(),
            workers_named=self._roster.workers_named,
            forgotten=self._forgotten,
            release_loop=self._release_loop,
            outcome=self._outcome,
        )

    def _over(self, now: float) -> bool:
        """Whether all that may still run has ended: nodes that are silent end it by themselves."""
        roster, fence_s = self._roster, self._policy.lease.fence_s
        if self._outcome is None:
            return False
        if now < roster.started_at + fence_s:
            if any(p.agent not in roster.nodes for p in roster.places.values()):
                return False
        return not any(
            s.stage.alive
            for n in roster.nodes.values()
            if now < n.heard_at + fence_s
            for s in n.statuses.values()
        )

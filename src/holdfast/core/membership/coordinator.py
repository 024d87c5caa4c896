"""Decides for the job: who is a member, who hosts what, where to resume, who is replaced.

It does not know sockets, processes, files or clocks. Each event only updates what is known; then
`_advance` derives from all of it what should happen next, so that a lost, late or repeated report
can delay a decision but never change it. The invariants: view numbers grow and are durable before
anyone hears of them; a view is formed only once every member of the one before has promised not to
act in it, has ended, or has lost its right to act; an incarnation is never ordered twice.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator

from holdfast.core.errors import assert_never, require
from holdfast.core.job_spec import CoordinatorPolicy
from holdfast.core.membership.admission import Attendance, admit, attend, choose_drained
from holdfast.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorEvent,
    CoordinatorSnapshot,
    Finish,
    Persist,
    ReportArrived,
    SendDirective,
    StopRequested,
)
from holdfast.core.membership.durable import Durable, speakers
from holdfast.core.membership.event_log import EventLog
from holdfast.core.membership.followers import Followers, strays
from holdfast.core.membership.formation import (
    LEAVE_RESERVE_S,
    Situation,
    beginners,
    dirty_candidates,
    discarded,
    interrupted,
    last_view,
    next_view,
    present_nodes,
    room_beside_drained,
    spans,
    surely_newest,
    survivors_of,
    too_far_behind,
    unreachable,
    why_again,
    why_broken,
    why_change,
)
from holdfast.core.membership.last_saves import LastSaves
from holdfast.core.membership.progress import Progress
from holdfast.core.membership.protection import Protection
from holdfast.core.membership.reserve import Reserve, ReservePolicy
from holdfast.core.membership.restart import hung, quarantine, quarantine_wrong, replace_lost
from holdfast.core.membership.review_schedule import Agenda
from holdfast.core.membership.roster import News, Roster
from holdfast.core.membership.stopping import Stopping
from holdfast.core.membership.view_making import Proposal, check_view, initial_view, make_view
from holdfast.core.step.speculation import Budget
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
    Tick,
    View,
    ViewNumber,
    WantedProcess,
    WorkerId,
    WorkerStatus,
)

SKIPPED = 1000  # numbers passed over after the loss of the journal: more than were given unheard


class CoordinatorMachine:
    """Decides for the job, as the module describes; `handle` is the only mutator.

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
        self._stopping: Stopping | None = None  # what its operator has asked for
        self._durable = Durable(record.saved, record.invalidations) if record else Durable()
        self._roster = Roster(record, now, Incarnation(passed_over + 1))
        self._learn_until = now + policy.lease.fence_s if forgotten else None
        self._persisted = record
        self._seq = 0
        self._stop_view = self._pending_view = NO_VIEW
        self._witness_at: float | None = None  # see core/membership/lease.py
        self._wanting_since: float | None = None  # since when a first view could not be formed
        self._progress = Progress(self._view.resume_step if self._view else 0)
        self._attendance = Attendance()
        self._budget = Budget(policy.speculation, policy.virtual_ranks)
        self._followers = Followers(term, enabled=policy.feeds)
        held_back = ReservePolicy(
            virtual_ranks=policy.virtual_ranks, spares=policy.spares, hot=policy.hot_spares
        )
        self._reserve = Reserve(held_back, now)
        self._last_saves = LastSaves(term)
        self._protection = Protection(policy.redundancy, policy.shards_told)
        self._agenda = Agenda(policy, self._roster, now)
        self._event_log = EventLog(record.slots if record else ())
        self._finished = False
        self._said: dict[tuple[WorkerId, Incarnation], WorkerStatus] = {}  # of checkpoints
        self._checked: View | None = None

    def handle(self, event: CoordinatorEvent, now: float) -> list[CoordinatorEffect]:
        """Apply one event at time `now` (seconds); return effects in order."""
        effects: list[CoordinatorEffect] = []
        reply_to: AgentId | None = None
        match event:
            case ReportArrived(report):
                if self._hear(report, now):
                    reply_to = report.agent
            case StopRequested(reason, saves):
                if self._outcome is None:
                    effects.append(self._stop(reason, saves, now))
                    self._agenda.change(now, at_once=True)
            case Tick():
                pass
            case _:
                assert_never(event)
        if self._agenda.due(now):
            return [*effects, *self._review(reply_to, now)]
        return [self._answer(reply_to)] if reply_to is not None else []

    def _stop(self, reason: str, saves: bool, now: float) -> Announce:
        if saves and self._stopping is None:
            after = max(self._progress.step, 1)  # as far as reports have told until now
            self._stopping = Stopping(reason, after, now + self._policy.grace_s)
            self._last_saves.order(self._durable.step, now)
            return Announce("stop", "the job stops after a last checkpoint")
        self._outcome = reason
        return Announce("stop", reason)

    def _review(self, reply_to: AgentId | None, now: float) -> list[CoordinatorEffect]:
        """Decide on all that is known, and tell whoever should act on it."""
        effects = self._advance(now)
        record = self._record()
        if record != self._persisted and self._learn_until is None:
            self._persisted = record
            effects.insert(0, Persist(record))
        effects += self._directives(reply_to)
        if self._over(now) and not self._finished:
            self._finished = True
            effects.append(Finish(self._outcome or ""))
        self._agenda.reviewed(now, self._alarms())
        return effects

    def deadline(self) -> float | None:
        """Return the earliest time at which a Tick could change something."""
        return self._agenda.deadline

    def _alarms(self) -> Iterator[float]:
        """Yield when time alone changes a decision, for reasons of the whole job."""
        lease = self._policy.lease
        if self._witness_at is not None:
            yield self._witness_at + lease.fence_s
        if self._wanting_since is not None:
            yield self._wanting_since + self._policy.settle_s
        if self._learn_until is not None:
            yield self._learn_until
        if self._stopping is not None:
            yield self._stopping.until
        if self._last_saves.due_at is not None:
            yield self._last_saves.due_at
        if self._followers.order is not None:
            ends = (node.leave_by - LEAVE_RESERVE_S for node in self._roster.nodes.values())
            yield from (at for at in ends if at != float("inf"))
        if self._outcome is not None:
            yield from (n.heard_at + lease.fence_s for n in self._roster.nodes.values())

    @property
    def view(self) -> View | None:
        return self._view

    @property
    def outcome(self) -> str | None:
        """Return how the job ends or ended: None while it runs, empty for success."""
        return self._outcome

    def snapshot(self) -> CoordinatorSnapshot:
        roster = self._roster
        return CoordinatorSnapshot(
            record=self._record(),
            step=self._progress.step,
            stop_view=self._stop_view,
            pending_view=self._pending_view,
            agents=roster.snapshot(self._attendance.silent),
            workers=tuple(s for _, s in sorted(roster.newest.items())),
            finished=self._finished,
        )

    def check(self) -> None:
        view = self._view
        if view is not None and view is not self._checked:
            self._checked = view
            check_view(view, self._policy.virtual_ranks)
        require(self._stop_view <= self._number, "stopping a view that does not exist")
        saved = self._persisted in (None, self._record())
        require(saved or self._learn_until is not None, "unsaved record")

    # ------------------------------------------------------------ hearing

    def _hear(self, report: AgentReport, now: float) -> bool:
        """Take in a report; return whether to answer now, before a review."""
        roster, learns = self._roster, self._learn_until is not None
        news = roster.hear(report, now)
        if news is News.STALE:
            return False
        if learns:
            self._learn(report)
        for status in filter(roster.ordered, speakers(report.workers)):
            self._said[status.worker, status.incarnation] = status
        self._note_step(report, now)
        if learns or news is News.CHANGE or report.agent in self._agenda.silent:
            self._agenda.change(now)
        if self._witness_at is None and news is News.CHANGE and self._view is not None:
            members = (self._view.member(w) for w in roster.on(report.agent))
            if any(m is not None and self._is_witness(m) for m in members):
                self._witness_at = now
        return learns or not roster.nodes[report.agent].fresh

    def _note_step(self, report: AgentReport, now: float) -> None:
        view = self._view
        for status in report.workers:
            if view is not None and view.includes(status.worker, status.incarnation):
                if self._progress.reached(status.committed) and view.suspended:
                    self._agenda.change(now)  # suspended workers fall further behind

    def _is_witness(self, member: Member) -> bool:
        if self._roster.dead(member.worker, member.incarnation):
            return True
        status = self._roster.status(member.worker, member.incarnation)
        return status is not None and status.promised >= self._number

    def _learn(self, report: AgentReport) -> None:
        """Adopt the newest view that any agent knows, after the journal was lost."""
        if report.view is not None and report.view.number > self._number:
            self._view = report.view
            self._views_used = ViewNumber(max(self._views_used, report.view.number + SKIPPED))
            self._progress.step = report.view.resume_step
        self._release_loop = max(self._release_loop, report.release_loop)
        self._roster.recall(report.agent, report.workers, report.view)

    # ------------------------------------------------------------ deciding

    def _advance(self, now: float) -> list[CoordinatorEffect]:
        situation = self._situation(now)
        if self._learns(situation):
            return []
        self._welcome()
        roster = self._roster
        said, self._said = self._said, {}  # an agent may have begun anew since
        self._durable.note(
            [*said.values(), *filter(roster.ordered, speakers(roster.newest.values()))]
        )
        if self._outcome is not None:
            return []
        policy, restart = self._policy, self._policy.restart
        accused = self._durable.accused()
        effects: list[CoordinatorEffect] = [
            *(Announce(*news) for news in self._event_log.news(self._roster.newest.values())),
            *(
                Announce("quarantined", line, w)
                for w, line in quarantine_wrong(situation, accused, restart)
            ),
            *self._admit(situation),
            *self._replace_hung(situation),
            *self._replace_lost(situation),
        ]
        if failed := self._roster.failed():
            first = min(failed, key=lambda s: s.worker)
            self._outcome = f"worker {first.worker} failed: {first.detail}"
            effects.append(Announce("failed", self._outcome, first.worker))
        elif why := self._progress.hopeless(restart.losses_max, policy.retreats_max):
            self._outcome = why
            effects.append(Announce("failed", why))
        elif self._stopping is not None and self._stopping.over(self._durable.step, now):
            self._outcome = self._stopping.reason
            effects.append(Announce("stop", self._outcome))
        elif self._note_release():
            left = [situation.status(m) for m in self._members if not situation.fenced(m)]
            if why := self._progress.uneven(roster.newest.values()):
                self._outcome = why
                effects.append(Announce("failed", why))
            elif not left:
                self._outcome = ""
            elif any(s is not None and not s.ended for s in left):
                # Somebody has the last gradient but not its votes: a view of those left commits it.
                effects += self._stop_if_broken(situation)
                effects += self._form(situation)
        elif self._roster.all_exited():
            self._outcome = ""
        else:
            effects += self._stop_if_broken(situation)
            effects += self._form(self._situation(now))
            effects += self._bring_up(self._situation(now))
            effects += self._invite(self._situation(now))
            lines = self._last_saves.review(self._situation(now), self._durable.step)
            effects += [Announce("save", line) for line in lines if policy.keeps]
        return effects

    def _learns(self, situation: Situation) -> bool:
        """Tell whether something of a lost record may still come from the agents."""
        if self._learn_until is None:
            return False
        behind = any(
            node.view_known > self._number and name not in situation.silent
            for name, node in self._roster.nodes.items()
        )
        lease = self._policy.lease
        given_up_at = self._roster.started_at + lease.abandon_s + lease.margin_s
        until = self._learn_until if surely_newest(situation) else given_up_at
        if situation.now < until or behind:
            return True
        self._learn_until = None
        self._agenda.stir(situation.now)  # until now nobody could be told to go on
        return False

    def _welcome(self) -> None:
        """Settle what is ordered on nodes that begin to speak; without a record, what they run."""
        for name, node in self._roster.nodes.items():
            if node.fresh:
                self._roster.welcome(name, self._view, recall=self._forgotten > 0)

    def _admit(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        if self._release_loop < RELEASE_ALL:
            for line in self._reserve.review(self._roster, self._view, situation.now):
                yield Announce("node", line)
            waiting, lines = admit(situation, self._policy)
            not_drained = choose_drained(situation)
            self._attendance, news = attend(situation, waiting, not_drained, self._attendance)
            yield from (Announce("node", line) for line in lines)
            yield from (Announce(kind, line) for kind, line in news)

    def _replace_hung(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        """Replace workers if nothing has moved for very long while a member waits for others."""
        now, members = situation.now, self._members
        if any(situation.unheard(m) for m in members):
            self._agenda.stir(now)
        if now < self._agenda.still_since + self._policy.hang_s:
            return
        for status in hung(situation):
            yield self._order_anew(status, f"hung for {self._policy.hang_s:g} s")
        self._agenda.stir(now)

    def _order_anew(self, status: WorkerStatus, reason: str) -> Announce:
        self._roster.order_anew(status.worker)
        return Announce("replaced", f"worker {status.worker} is replaced: {reason}", status.worker)

    def _replace_lost(self, situation: Situation) -> Iterator[Announce]:
        if self._release_loop < RELEASE_ALL:
            bridges = self._protection.bridging(situation, self._durable)
            for worker, why in replace_lost(situation, self._policy.restart, bridges):
                doubt = self._progress.lost(why, self._policy.restart.losses_max)
                self._reserve.lost(worker, self._roster, situation.now)
                yield Announce("lost", f"worker {worker} was lost: {why}{doubt}", worker)

    def _note_release(self) -> bool:
        """Let ended workers go once the leader's script is past the loop; return if it is over."""
        view = self._view
        member = view.member(view.leader) if view else None
        leader = self._roster.status(member.worker, member.incarnation) if member else None
        if leader is not None and leader.stage == Stage.EXITED:
            self._progress.ended(leader)
            self._release_loop = RELEASE_ALL
        elif leader is not None:
            self._release_loop = max(self._release_loop, leader.loop - 1)
        return self._release_loop == RELEASE_ALL

    def _stop_if_broken(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        view = self._view
        if view is None or self._stop_view >= view.number:
            return
        waited_s = situation.now - self._agenda.still_since
        minds_late = self._budget.allows(self._progress.step)
        reason = why_broken(situation, waited_s, self._policy.patience_s, minds_late)
        if reason is not None:
            self._budget.tried(self._progress.step)
            self._stop_view = number = view.number
            yield Announce("stop_view", f"view {number} is stopped: {reason}", None, number)

    def _form(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        """Form the next view, once nobody can act in the present one any more."""
        finishing = self._release_loop == RELEASE_ALL
        survivors = survivors_of(situation)
        if survivors is None:
            return
        for worker in unreachable(situation):
            wait_s = quarantine(self._roster, worker, situation.now, self._policy.restart)
            text = f"worker {worker} is left out for {wait_s:.3g} s: the network does not reach it"
            yield Announce("quarantined", text, worker)
        survivors = [s for s in survivors if self._roster.ordered(s)]
        if discarded(situation) and not finishing:
            yield from self._go_back(situation)
            return
        if not survivors or not (finishing or self._policy.replicated):
            # Silent members may hold the state: wait for them until it is given up, or recalled.
            if not finishing and not self._protection.awaits(situation, self._durable):
                yield from self._form_initial(situation)
            return
        policy = self._policy
        if finishing:
            yield self._install(last_view(situation, survivors), situation.now)
            return
        for status in interrupted(situation):
            yield self._order_anew(status, "it had to stop while it caught up")
        proposal = next_view(situation, survivors, policy.workers_min, policy.speculation > 0)
        if proposal is not None:
            yield self._install(proposal, situation.now)

    def _go_back(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        """Start all workers anew from a checkpoint, since the state they hold is discarded."""
        if self._progress.retreats(self._durable.invalidations):
            yield Announce("back", f"the job goes back to step {self._durable.step}")
        yield from self._form_initial(situation)

    def _form_initial(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        """Start the job, or start it again from a checkpoint, when nobody holds the state."""
        now, policy = situation.now, self._policy
        for status, why in dirty_candidates(situation, policy.replicated):
            yield self._order_anew(status, why)
        if self._view is None and present_nodes(situation) < policy.nodes_min:
            self._wanting_since = None
            return
        if self._wanting_since is None:
            self._wanting_since = now
        late = now >= self._wanting_since + policy.settle_s
        ready = beginners(situation, policy.nodes_min, policy.workers_min if late else None)
        recall = self._protection.recall(situation, self._durable)
        if not ready or recall is None:
            return
        self._wanting_since = None
        self._progress.begins(recall.step)
        why = "" if self._view is None else why_again(policy.replicated)
        proposal = initial_view(ready, situation.room, policy.virtual_ranks, recall, why)
        yield self._install(proposal, now)

    def _install(self, proposal: Proposal, now: float) -> Announce:
        number = ViewNumber(max(self._number, self._views_used) + 1)
        staying = frozenset([*proposal.workers, *(lag.worker for lag in proposal.suspended)])
        self._budget.spend(proposal.redone)
        for member in self._members:
            slot = self._roster.slots.get(member.worker)
            if member.worker in staying or slot is None or slot.respawn_at is not None:
                continue
            if slot.incarnation == member.incarnation:
                self._roster.order_anew(member.worker)  # only a new incarnation may come back
        for lag in self._view.suspended if self._view is not None else ():
            if lag not in proposal.catching_up and self._roster.wants(lag.worker, lag.incarnation):
                self._roster.order_anew(lag.worker)  # what it has missed is not kept any longer
        view = make_view(proposal, number, self._view, self._roster, self._policy.procs)
        view = self._protection.protect(view, self._view, self._roster)
        self._view = dataclasses.replace(view, invalidations=self._durable.invalidations)
        self._views_used = number
        self._witness_at = None
        self._agenda.stir(now)
        self._progress.step = max(self._progress.step, proposal.resume_step)
        text = f"view {number}: workers {spans(proposal.workers)}; {self._view.reason}"
        return Announce("view", text, None, number, proposal.resume_step)

    def _bring_up(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        """Have workers that could join fed, and replace those that were, in vain."""
        policy, followers, number = self._policy, self._followers, self._number
        trains = self._stop_view < number and self._pending_view < number
        trains = trains and len(self._members) >= policy.workers_min and self._stopping is None
        trains = trains and not any(status.ended for status in situation.known)
        room = room_beside_drained(situation)
        for line in followers.review(situation, room, may_order=trains):
            yield Announce("join", line)
        for status in strays(situation, followers.order):
            yield self._order_anew(status, "it was fed, and not until it could join")

    def _invite(self, situation: Situation) -> Iterator[CoordinatorEffect]:
        """Plan a change at the next boundary: somebody can join, or too few are left."""
        view, policy = self._view, self._policy
        if view is None or self._stop_view >= view.number or self._pending_view >= view.number:
            return
        for status in too_far_behind(situation, self._progress.step):
            yield self._order_anew(status, "it was suspended and has missed too many steps")
        reason = why_change(situation, policy.workers_min, self._progress.step)
        if reason is not None and not any(s.ended for s in situation.known):
            self._pending_view = view.number
            kind, text = reason
            yield Announce(kind, f"{text} at the next step boundary")

    # ------------------------------------------------------------ telling

    def _directives(self, reply_to: AgentId | None) -> Iterator[SendDirective]:
        """Yield directives to agents with something new to hear, and in answer to reports."""
        common = self._common()
        for name in sorted(self._roster.nodes):
            node = self._roster.nodes[name]
            unseen = max(node.view_known, node.view_told) < self._number
            told = node.told == (common, tuple(self._wanted(name)))
            if name == reply_to or unseen or not told:
                yield self._answer(name)

    def _common(self) -> tuple[object, ...]:
        """Return the part of all directives, but for the view, that makes them worth sending."""
        counts = (self._stop_view, self._pending_view, self._number, self._release_loop)
        ending = self._last_saves.newest, self._outcome is None
        return *counts, self._learn_until is None, *ending, self._followers.order

    def _answer(self, name: AgentId) -> SendDirective:
        node, directive = self._roster.nodes[name], self._directive(name)
        self._seq = directive.seq
        node.view_told, node.told = directive.view_number, (self._common(), directive.wanted)
        return SendDirective(directive)

    def _directive(self, name: AgentId) -> Directive:
        view, node = self._view, self._roster.nodes[name]
        return Directive(
            term=self._term,
            seq=self._seq + 1,
            agent=name,
            agent_incarnation=node.incarnation,
            heard=node.seq,
            wanted=tuple(self._wanted(name)),
            stop_view=self._stop_view,
            pending_view=self._pending_view,
            view_number=self._number,
            view=view if view and node.view_known < view.number else None,
            release_loop=self._release_loop,
            undecided=self._learn_until is not None,
            shutdown=self._outcome is not None,
            save_wanted=self._last_saves.newest,
            follow=self._followers.order,
        )

    def _wanted(self, name: AgentId) -> Iterable[WantedProcess]:
        if self._outcome is not None or self._learn_until is not None:
            return ()
        leaving = self._release_loop == RELEASE_ALL
        find = self._roster.leaving if leaving else self._roster.wanted
        return find(name, self._view)

    # ------------------------------------------------------------ knowing

    @property
    def _number(self) -> ViewNumber:
        return self._view.number if self._view else NO_VIEW

    @property
    def _members(self) -> tuple[Member, ...]:
        return self._view.members if self._view else ()

    def _situation(self, now: float) -> Situation:
        found = Situation(
            view=self._view,
            roster=self._roster,
            lease=self._policy.lease,
            silent=self._agenda.silent,
            witness_at=self._witness_at,
            now=now,
            room=self._reserve.room(),
        )
        return self._followers.add_to(found)

    def _record(self) -> JobRecord:
        return JobRecord(
            term=self._term,
            view=self._view,
            views_used=self._views_used,
            slots=self._roster.slot_records(),
            workers_named=self._roster.workers_named,
            forgotten=self._forgotten,
            release_loop=self._release_loop,
            saved=self._durable.steps,
            invalidations=self._durable.invalidations,
            outcome=self._outcome,
        )

    def _over(self, now: float) -> bool:
        return self._outcome is not None and self._roster.over(now, self._policy.lease.fence_s)

"""Proves the checkers: planted protocol bugs, each found in a few seeds.

Every mutation is one mistake that a maintainer could make in the core. If one is no longer caught,
either the checkers went blind or the mutated code is no longer reached; both need an answer. The
unchanged code runs clean with the very same options and seeds.
"""

from __future__ import annotations

import copy
import dataclasses
import itertools
from collections.abc import Callable, Iterable, Iterator
from typing import Any

import pytest

import mutations_exchanges  # noqa: F401 - it plants some
import mutations_feeding  # noqa: F401 - it plants some
import mutations_memory  # noqa: F401 - and more
import mutations_promises  # noqa: F401 - it plants more
import mutations_servers  # noqa: F401 - and more
import mutations_shards  # noqa: F401 - and more
import mutations_spares  # noqa: F401 - it plants some
import mutations_spread  # noqa: F401 - and more
import mutations_step  # noqa: F401 - and more
import mutations_work  # noqa: F401 - and more
import mutations_wrong  # noqa: F401 - and more
from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.membership import coordinator as co
from holdfast.engine.core.membership import coordinator_events as ce
from holdfast.engine.core.membership import decision_loop, decisions, formation, outbox
from holdfast.engine.core.membership import facts as facts_module
from holdfast.engine.core.membership import lease as le
from holdfast.engine.core.membership.agent import AgentMachine
from holdfast.engine.core.membership.coordinator import CoordinatorMachine
from holdfast.engine.core.membership.durable import Durable
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.job_state import JobState
from holdfast.engine.core.membership.live_roster import LiveRoster, News
from holdfast.engine.core.membership.liveness import FreezeDetector
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.membership.view_making import resume_step
from holdfast.engine.core.step.verdicts import Decided
from holdfast.engine.core.types import ViewNumber
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.engine.core.worker.membership import Membership
from holdfast.engine.core.worker_status import ReplicaStage, WorkerStatus
from holdfast.lab.sim.swarm import run_seed
from holdfast.lab.sim.world import Machines
from holdfast.lab.sim.wrong_bits import Violation
from mutation_kit import EVENTS_MAX, MUTATIONS, failure_of_unchanged_code, mutation, swarm_for
from mutation_seeds import FIRST_SEED, SLOW, UNREACHED


def doctor(patch: pytest.MonkeyPatch, misread: Callable[[ReplicaStage], ReplicaStage]) -> Machines:
    """Make a coordinator that misreads in every status which state the worker holds."""
    plain = LiveRoster.hear

    def hear(self: LiveRoster, report: AgentReport, now: float) -> News:
        heard = tuple(dataclasses.replace(s, state=misread(s.state)) for s in report.workers)
        return plain(self, dataclasses.replace(report, workers=heard), now)

    patch.setattr(LiveRoster, "hear", hear)
    return Machines()


# ---------------------------------------------------------------- resume rule


@mutation
def resume_ignores_a_commit(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(
        formation, "resume_step", lambda s, lost: (min(x.committed for x in s), "planted")
    )
    return Machines()


@mutation
def commits_although_one_survivor_has_no_gradient(patch: pytest.MonkeyPatch) -> Machines:
    def resume(survivors: list[WorkerStatus], lost: bool) -> tuple[int, str]:
        newest = max(s.committed for s in survivors)
        return newest + any(s.reduced and s.committed == newest for s in survivors), "planted"

    patch.setattr(formation, "resume_step", resume)
    return Machines()


@mutation
def commits_although_a_member_was_lost_before_its_vote(patch: pytest.MonkeyPatch) -> Machines:
    """The lost member may have been the only one to see that the sum is not finite."""
    patch.setattr(formation, "resume_step", lambda s, lost: resume_step(s, False))
    return Machines()


# ---------------------------------------------------------------- views


@mutation
def view_is_formed_before_all_promised(patch: pytest.MonkeyPatch) -> Machines:
    plain = formation.survivors_of

    def hasty(facts: Facts) -> list[WorkerStatus] | None:
        roster, number = copy.copy(facts.roster), facts.view.number if facts.view else 0
        heard = facts.roster.newest.items()
        roster.newest = {w: dataclasses.replace(s, promised=number) for w, s in heard}
        return plain(dataclasses.replace(facts, roster=roster))

    patch.setattr(formation, "survivors_of", hasty)
    return Machines()


@mutation
def view_number_is_reused(patch: pytest.MonkeyPatch) -> Machines:
    class Reusing(CoordinatorMachine):
        @property
        def _next_number(self) -> ViewNumber:
            return ViewNumber(max(1, super()._next_number - 1))

    return Machines(coordinator=Reusing)


@mutation
def journal_is_written_after_sending(patch: pytest.MonkeyPatch) -> Machines:
    class Late(CoordinatorMachine):
        def handle(self, event: ce.CoordinatorEvent, now: float) -> list[ce.CoordinatorEffect]:
            return sorted(super().handle(event, now), key=lambda e: isinstance(e, ce.Persist))

    return Machines(coordinator=Late)


@mutation
def journal_keeps_only_views(patch: pytest.MonkeyPatch) -> Machines:
    class Sparse(CoordinatorMachine):
        def handle(self, event: ce.CoordinatorEvent, now: float) -> list[ce.CoordinatorEffect]:
            before = self._view
            effects = super().handle(event, now)
            same = before is self._view
            return [e for e in effects if not (same and isinstance(e, ce.Persist))]

    return Machines(coordinator=Sparse)


def misremember(
    roster: LiveRoster, report: AgentReport, applies: Callable[[AgentReport], bool]
) -> None:
    """Forget how new the last report of a node was, so that this one counts."""
    node = roster.nodes.get(report.agent)
    if node is not None and applies(node.report):
        old = dataclasses.replace(node.report, seq=-1, incarnation=report.incarnation)
        roster._nodes[report.agent] = dataclasses.replace(node, report=old)


@mutation
def stale_reports_are_believed(patch: pytest.MonkeyPatch) -> Machines:
    class Credulous(CoordinatorMachine):
        def _hear(self, report: Any, now: float) -> bool:
            misremember(self._roster, report, lambda old: old.incarnation == report.incarnation)
            return super()._hear(report, now)

    return Machines(coordinator=Credulous)


@mutation
def deposed_agent_is_believed(patch: pytest.MonkeyPatch) -> Machines:
    class Credulous(CoordinatorMachine):
        def _hear(self, report: Any, now: float) -> bool:
            misremember(self._roster, report, lambda old: old.incarnation > report.incarnation)
            return super()._hear(report, now)

    return Machines(coordinator=Credulous)


# ---------------------------------------------------------------- joining


@mutation
def joiner_is_admitted_in_the_middle_of_a_step(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(WorkerStatus, "at_boundary", property(lambda status: True))
    return Machines()


@mutation
def starts_again_although_survivors_hold_the_state(patch: pytest.MonkeyPatch) -> Machines:
    return doctor(patch, lambda state: ReplicaStage.ABSENT)


@mutation
def dirty_worker_counts_as_fresh(patch: pytest.MonkeyPatch) -> Machines:
    fresh = {
        ReplicaStage.OBTAINING: ReplicaStage.ABSENT,
        ReplicaStage.DISTRUSTED: ReplicaStage.ABSENT,
    }
    return doctor(patch, lambda state: fresh.get(state, state))


@mutation
def joiner_never_says_that_it_loads(patch: pytest.MonkeyPatch) -> Machines:
    class Silent(WorkerMachine):
        def handle(self, event: ev.WorkerEvent, now: float) -> list[ef.WorkerEffect]:
            return [] if isinstance(event, ev.Loading) else super().handle(event, now)

    return Machines(worker=Silent)


@mutation
def pending_change_is_read_from_the_own_vote(patch: pytest.MonkeyPatch) -> Machines:
    class Selfish(WorkerMachine):
        def _commit_step(self, vote: Decided) -> None:
            super()._commit_step(dataclasses.replace(vote, pending=self.pending))

    return Machines(worker=Selfish)


# ---------------------------------------------------------------- workers


@mutation
def worker_acts_after_promising(patch: pytest.MonkeyPatch) -> Machines:
    def promise(self: Membership, number: ViewNumber, why: str = "") -> bool:
        standing = self._standing
        if number <= standing.status.promised:
            return False
        standing.change(promised=number)
        standing.tell()
        return True

    patch.setattr(Membership, "promise", promise)
    patch.setattr(Standing, "acts_in", lambda self, number: self.status.view == number)
    patch.setattr(Standing, "acts", True)
    return Machines()


@mutation
def worker_promises_without_aborting(patch: pytest.MonkeyPatch) -> Machines:
    def promise(self: Membership, number: ViewNumber, why: str = "") -> bool:
        is_news = self._promise(number, why)
        if is_news:
            self._standing.tell()
        return is_news

    patch.setattr(Membership, "promise", promise)
    return Machines()


@mutation
def worker_installs_a_view_it_gave_up(patch: pytest.MonkeyPatch) -> Machines:
    class Backward(WorkerMachine):
        def _handle_directive(self, directive: Any) -> None:
            super()._handle_directive(directive)
            view, status = directive.view, self._standing.status
            if view is not None and view.includes(status.worker, status.incarnation):
                if view.number != status.view:
                    self._membership._install(view)

    return Machines(worker=Backward)


@mutation
def broken_group_is_not_given_up(patch: pytest.MonkeyPatch) -> Machines:
    class Stubborn(WorkerMachine):
        def handle(self, event: ev.WorkerEvent, now: float) -> list[ef.WorkerEffect]:
            return [] if isinstance(event, ev.GroupBroken) else super().handle(event, now)

    return Machines(worker=Stubborn)


# ---------------------------------------------------------------- processes and leases


@mutation
def same_incarnation_is_started_again(patch: pytest.MonkeyPatch) -> Machines:
    class Reviving(AgentMachine):
        def _reconcile(self, now: float) -> list[ag.AgentEffect]:
            for process in self._processes.values():
                if not process.running:
                    less = process.status.incarnation - 1
                    process.status = dataclasses.replace(process.status, incarnation=less)
            return super()._reconcile(now)

    return Machines(agent=Reviving)


@mutation
def next_incarnation_starts_before_the_old_one_ended(patch: pytest.MonkeyPatch) -> Machines:
    class Impatient(AgentMachine):
        def _kill(self, worker: Any, reason: str) -> list[ag.AgentEffect]:
            effects = super()._kill(worker, reason)
            self._processes[worker].running = False
            return effects

    return Machines(agent=Impatient)


@mutation
def lost_worker_is_still_ordered_during_its_back_off(patch: pytest.MonkeyPatch) -> Machines:
    def wanted(roster: Roster, name: Any, view: Any) -> Iterator[Any]:
        for worker in roster.workers_of(name):
            yield from outbox._list_processes(
                roster, worker, roster.slots[worker].incarnation, name
            )

    patch.setattr(decision_loop, "list_wanted", wanted)
    return Machines()


@mutation
def nobody_fences_without_a_lease(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(le, "acting_deadline", lambda answered_at, proved_at, policy: 1e9)
    return Machines()


@mutation
def coordinator_gives_up_leases_too_early(patch: pytest.MonkeyPatch) -> Machines:
    def early(
        heard_at: float, witness_at: float | None, policy: le.LeasePolicy, ends_at: float
    ) -> float:
        return heard_at + policy.suspect_s + 0.1

    patch.setattr(facts_module, "fence_time", early)
    return Machines()


@mutation
def lease_runs_from_when_the_answer_came(patch: pytest.MonkeyPatch) -> Machines:
    class Generous(AgentMachine):
        def _handle_directive(self, directive: Any, now: float) -> list[ag.AgentEffect]:
            sent_at = self._contact._sent_at
            if directive.heard in sent_at:
                sent_at[directive.heard] = now + 2.0
            return super()._handle_directive(directive, now)

    return Machines(agent=Generous)


@mutation
def agent_obeys_an_older_term(patch: pytest.MonkeyPatch) -> Machines:
    class Obedient(AgentMachine):
        def _handle_directive(self, directive: Any, now: float) -> list[ag.AgentEffect]:
            old = self._directive
            if old is not None and directive.term < old.term:
                self._directive = dataclasses.replace(old, term=0)
            return super()._handle_directive(directive, now)

    return Machines(agent=Obedient)


@mutation
def witness_is_ignored(patch: pytest.MonkeyPatch) -> Machines:
    """A node that others heard acting until just now counts as fenced by its silence alone."""

    def forgetful(
        heard_at: float, witness_at: float | None, policy: le.LeasePolicy, ends_at: float
    ) -> float:
        return le.fence_time(heard_at, None if witness_at is None else heard_at, policy, ends_at)

    patch.setattr(facts_module, "fence_time", forgetful)
    return Machines()


@mutation
def proof_is_dated_by_the_vote(patch: pytest.MonkeyPatch) -> Machines:
    """A vote shows that others acted when the step began, not when the last vote came in."""

    class Late(WorkerMachine):
        def _commit_step(self, vote: Decided) -> None:
            self.lateness.began_at = self._standing.now + 1.0
            super()._commit_step(vote)

    return Machines(worker=Late)


@mutation
def worker_minds_no_clock(patch: pytest.MonkeyPatch) -> Machines:
    """With its agent frozen nobody pauses it, so it must stop on its own."""

    class Timeless(WorkerMachine):
        def _handle_directive(self, directive: Any) -> None:
            super()._handle_directive(dataclasses.replace(directive, acting_until=float("inf")))

    return Machines(worker=Timeless)


@mutation
def lost_journal_is_taken_for_a_new_job(patch: pytest.MonkeyPatch) -> Machines:
    class Naive(CoordinatorMachine):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args[:4], 0)

    return Machines(coordinator=Naive)


@mutation
def incarnations_are_reused_after_the_loss_of_the_journal(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(decision_loop, "SKIPPED", 0)
    patch.setattr(co, "SKIPPED", 0)
    return Machines()


@mutation
def replaced_worker_stays_a_survivor(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Roster, "is_ordered", lambda self, status: status.worker in self.slots)
    return Machines()


@mutation
def frozen_worker_is_never_noticed(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(FreezeDetector, "observe", lambda self, sample: None)
    return Machines()


@mutation
def last_worker_is_left_without_its_votes(patch: pytest.MonkeyPatch) -> Machines:
    plain = decisions.decide_view

    def decide(facts: Facts, job: JobState, number: ViewNumber) -> co.Plan:
        return [] if job.is_finishing else plain(facts, job, number)

    patch.setattr(decisions, "decide_view", decide)
    return Machines()


@mutation
def planned_stop_is_awaited_for_ever(patch: pytest.MonkeyPatch) -> Machines:
    class Patient(CoordinatorMachine):
        def __init__(self, policy: Any, *args: Any) -> None:
            super().__init__(dataclasses.replace(policy, patience_s=1e9), *args)

    return Machines(coordinator=Patient)


# ---------------------------------------------------------------- checkpoints


@mutation
def a_committed_step_counts_as_saved(patch: pytest.MonkeyPatch) -> Machines:
    def note(self: Durable, statuses: Iterable[WorkerStatus]) -> None:
        self.steps = tuple(sorted({*self.steps, *(s.committed for s in statuses)}))

    patch.setattr(Durable, "note", note)
    return Machines()


@mutation
def an_unreadable_checkpoint_is_tried_again(patch: pytest.MonkeyPatch) -> Machines:
    def note(self: Durable, statuses: Iterable[WorkerStatus]) -> None:
        self.steps = (max([self.step, *(s.saved for s in statuses)]),)

    patch.setattr(Durable, "note", note)
    return Machines()


# ---------------------------------------------------------------- the test

FOUND = (Violation.__name__, InvariantError.__name__)  # any other error is not a finding


def parameters() -> list[Any]:
    """Return the bugs to be caught; those that no swarm reaches any more must not be caught."""
    assert set(MUTATIONS) >= {*SLOW, *UNREACHED}
    found = []
    for name in MUTATIONS:
        marks = [pytest.mark.slow] if name in SLOW or name in UNREACHED else []
        if name in UNREACHED:
            marks.append(pytest.mark.xfail(strict=True, reason=UNREACHED[name]))
        found.append(pytest.param(name, marks=marks))
    return found


@pytest.mark.parametrize("name", MUTATIONS)
def test_every_bug_can_be_planted(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    MUTATIONS[name](monkeypatch)  # the functions that it replaces are there


@pytest.mark.slow_with(
    "a_broken_group_counts_once_all_have_noticed",
    "a_checkpoint_counts_although_who_saved_it_left_uncompared",
    "a_checkpoint_counts_before_its_state_was_compared",
    "a_discarded_state_is_begun_from",
    "a_drained_node_is_used_on",
    "a_follower_that_is_too_slow_is_fed_on",
    "a_joiner_vouches_for_all",
    "a_last_checkpoint_is_not_checked",
    "a_layout_is_left_before_everybody_knows_it",
    "a_node_of_another_job_keeps_its_workers",
    "a_paused_process_counts_as_frozen",
    "a_view_without_tasks_for_who_was_fed_proves_it",
    "all_wait_while_who_is_fed_receives_the_state_again",
    "audits_prove_nothing",
    "broken_group_is_not_given_up",
    "commits_although_a_member_was_lost_before_its_vote",
    "commits_although_one_survivor_has_no_gradient",
    "copies_count_as_compared_although_they_differ",
    "deposed_agent_is_believed",
    "each_member_plans_comparisons_of_its_own",
    "each_view_has_another_leader",
    "frozen_worker_is_never_noticed",
    "hot_spares_are_not_brought_up_to_date",
    "it_votes_before_its_pieces_are_in_memory",
    "last_worker_is_left_without_its_votes",
    "lost_worker_is_still_ordered_during_its_back_off",
    "members_copy_at_different_boundaries",
    "nobody_is_asked_to_join",
    "nothing_is_recalled",
    "older_pieces_go_before_the_commit_is_marked",
    "one_node_of_a_worker_takes_it_for_all_of_it",
    "only_nodes_that_were_heard_count",
    "pending_change_is_read_from_the_own_vote",
    "planned_stop_is_awaited_for_ever",
    "replaced_worker_stays_a_survivor",
    "rows_of_an_earlier_layout_count",
    "rows_that_are_lost_once_are_lost_for_ever",
    "servers_are_placed_anew_after_the_journal_was_lost",
    "silent_nodes_that_hold_pieces_are_not_waited_for",
    "states_whose_rows_are_lost_are_recalled",
    "the_first_commit_after_a_fault_is_not_told",
    "the_first_layout_is_back_after_the_journal_was_lost",
    "the_first_step_is_not_fed",
    "the_loss_of_a_further_node_is_not_noticed",
    "the_owner_is_always_right",
    "the_proof_of_a_follower_is_dated_by_the_vote",
    "the_redo_is_forgotten_when_a_task_is_under_way",
    "the_word_that_the_job_is_over_is_not_believed",
    "too_few_workers_go_on",
    "two_machines_that_are_steadily_wrong_are_the_scripts_doing",
    "two_workers_that_contradict_themselves_are_the_scripts_doing",
    "what_nobody_has_committed_is_recalled",
    "what_the_members_agreed_on_since_is_forgotten",
    "what_was_half_done_counts_in_the_next_view",
    "who_has_room_again_goes_on_in_a_view_that_has_ended",
    "who_is_fed_is_not_waited_for_until_all_was_compared",
    "who_is_fed_joins_before_it_has_every_step",
    "who_stays_away_is_forgotten",
    "who_was_fed_is_proved_before_its_first_task",
    "who_was_unproven_is_proved_by_a_new_view",
    "whoever_is_silent_counts_as_frozen",
    "wrong_sums_are_kept",
)
@pytest.mark.timeout(1800)  # a search ends after a fixed number of events
@pytest.mark.parametrize("name", parameters())
def test_the_checkers_catch(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    machines, tuned = MUTATIONS[name](monkeypatch), swarm_for(name)
    first, events = FIRST_SEED.get(name, 0), 0
    for seed in itertools.count(first):
        result = run_seed(seed, small=True, machines=machines, tuned=tuned)
        events += result.events
        if result.failure:
            break
        assert events < EVENTS_MAX, f"not caught by seeds {first} to {seed}"
    print(f"seed {seed}: {result.failure.splitlines()[0]}")
    kind = result.failure.partition(":")[0]
    assert kind in FOUND, f"the plant itself is broken: {result.failure}"
    monkeypatch.undo()
    for used in range(first, seed + 1):
        assert not failure_of_unchanged_code(used, tuned), f"seed {used} fails without the bug"

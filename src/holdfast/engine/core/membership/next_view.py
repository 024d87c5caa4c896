"""Plans the next view of a job: the source of its state, its members, and whom it replaces. Pure.

It puts the verdicts of formation.py together with the copies of the state outside of workers:
checkpoints (durable.py), and pieces in the nodes' memory (protection.py).
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from functools import partial

from holdfast.engine.core.membership import formation, restart
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.durable import Durable
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.formation import BasisOfView
from holdfast.engine.core.membership.job_changes import (
    AwaitBeginners,
    GoBack,
    InstallView,
    Plan,
    Remember,
)
from holdfast.engine.core.membership.progress import Progress
from holdfast.engine.core.membership.protection import Protection
from holdfast.engine.core.membership.view_end import awaits_last_save
from holdfast.engine.core.membership.view_making import (
    Proposal,
    announce_view,
    find_worker_paths,
    initial_view,
    make_view,
)
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.core.types import ViewNumber


@dataclass(frozen=True, slots=True, kw_only=True)
class NextView:
    """Keeps the facts of the coordinator that decide the next view."""

    policy: CoordinatorPolicy
    protection: Protection
    durable: Durable
    #: The number that it would have.
    number: ViewNumber
    #: The job is past its last loop.
    finishing: bool
    #: The time since which a first view could not be formed.
    wanting_since: float | None

    def find_basis(self, facts: Facts) -> BasisOfView:
        """Find the source of the state with which the next view begins."""
        if awaits_last_save(facts, self.policy):
            return BasisOfView.AWAITED
        awaits = partial(self.protection.awaits, facts, self.durable)
        return formation.find_state_source(facts, self.finishing, self.policy.replicated, awaits)

    def plan_replacements(self, facts: Facts, progress: Progress) -> Plan:
        """Restart processes whose state is of no use for the next view."""
        basis, plan = self.find_basis(facts), Plan()
        is_discarded = basis is BasisOfView.DISCARDED
        if basis is BasisOfView.SURVIVORS:
            for status, why in formation.find_useless(facts, self.policy.workers_min):
                plan += restart.replace_all([status], why)
        known = self.durable.invalidations
        if is_discarded and not progress.has_gone_back(known):
            text = f"the job goes back to step {self.durable.step}"
            plan += [GoBack(known), Announce("back", text)]
        if is_discarded or basis in (BasisOfView.AWAITED, BasisOfView.RECALLED):
            note = self.protection.note_failures
            plan.append(Remember(note(facts, self.durable, is_discarded=is_discarded)))
        if is_discarded or basis is BasisOfView.RECALLED:
            for status, why in formation.find_dirty(facts, self.policy.replicated):
                plan += restart.replace_all([status], why)
        return plan

    def plan(self, facts: Facts) -> Plan:
        """Form the next view, once no member can act in the present one any more."""
        policy, survivors = self.policy, formation.survivors_of(facts) or []
        match self.find_basis(facts):
            case BasisOfView.UNKNOWN | BasisOfView.AWAITED:
                return []
            case BasisOfView.LAST_SURVIVORS:
                return self._install(facts, formation.propose_last_view(facts, survivors))
            case BasisOfView.SURVIVORS:
                minds_late = policy.speculation > 0
                proposal = formation.propose_view(facts, survivors, policy.workers_min, minds_late)
                return [] if proposal is None else self._install(facts, proposal)
            case BasisOfView.DISCARDED | BasisOfView.RECALLED:
                return self._begin(facts)

    def _begin(self, facts: Facts) -> Plan:
        """Start the job, or start it again from a checkpoint, when no worker holds the state."""
        policy, since = self.policy, self.wanting_since
        if facts.view is None and formation.present_nodes(facts) < policy.nodes_min:
            return [AwaitBeginners(None)]
        since = facts.now if since is None else since
        late = facts.now >= since + policy.settle_s
        ready = formation.choose_beginners(
            facts, policy.nodes_min, policy.workers_min if late else None
        )
        recall = self.protection.recall(facts, self.durable)
        if not ready or recall is None:
            return [AwaitBeginners(since)]
        why = formation.reason_to_begin_again(facts, self.durable.invalidations, policy.replicated)
        paths = find_worker_paths([s.worker for s in ready], facts.roster, facts.view)
        proposal = initial_view(ready, facts.room, policy.virtual_ranks, recall, why, paths)
        return [AwaitBeginners(None), *self._install(facts, proposal, begins=True)]

    def _install(self, facts: Facts, proposal: Proposal, *, begins: bool = False) -> Plan:
        """Make the proposed view the present one; replace the workers that it leaves out."""
        old, roster = facts.view, facts.roster
        view = make_view(proposal, self.number, old, roster, self.policy.procs)
        protection, view = self.protection.protect(view, old, roster)
        view = dataclasses.replace(view, invalidations=self.durable.invalidations)
        return [
            *formation.replace_left_out(facts, proposal),
            Remember(protection),
            InstallView(view, proposal.redone, begins),
            announce_view(view, again=begins and self.number > 1),
        ]

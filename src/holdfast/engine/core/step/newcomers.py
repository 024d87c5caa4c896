"""Audits the first tasks of workers that have joined by another member, and judges them. Pure.

A joiner holds the job's state, and may yet compute otherwise, again and again: its machine is
wrong, or the script keeps a value that the state lacks (a variable, a module that is not
protected), which only older members have. No bit shows which. So it leaves before any of its
results is used; if it does so again it is left out for a while, like a worker that computes
wrongly; and if other machines do the same before any has been accepted, the script is the cause. A
joiner whose processor is of another kind than the processors of all members is expected to compute
otherwise, and is no evidence against the script.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Iterable, Sequence

from holdfast.engine.core.step.audit import Audit, Ruling, Sentence, are_too_many, name_machines
from holdfast.engine.core.types import NO_VIEW, WorkerId
from holdfast.engine.core.views import View

REFUSED_MAX = 1  # machines that may be refused in turn


class Refusal(enum.Enum):
    """Names the consequences for a joiner with other results."""

    #: It may begin again at once.
    ANEW = "anew"
    #: It has done so before.
    QUARANTINED = "quarantined"
    #: Its processor is of another kind.
    KIND = "kind"
    #: Other machines have done so, too: the job ends.
    SCRIPT = "script"


class Newcomers:
    """Keeps which machines were refused since one was accepted. `looks`: anything is compared."""

    def __init__(self, *, looks: bool) -> None:
        self._looks = looks
        self._refused: frozenset[str] = frozenset()  # all members that may stay know the same
        self._strange: frozenset[WorkerId] = frozenset()  # with processors of another kind
        self._accepted: frozenset[WorkerId] = frozenset()  # in the step to be committed next
        self._proved: frozenset[WorkerId] = frozenset()  # in the present view
        self._view = NO_VIEW  # the number of the present view

    def compare_processors(self, view: View, kinds: Sequence[int]) -> None:
        """Take in the kinds of all members' processors, by rank."""
        by_worker = dict(zip(view.workers, kinds, strict=True))
        known = {kind for worker, kind in by_worker.items() if worker not in view.unproven}
        self._strange = frozenset(w for w, kind in by_worker.items() if kind not in known)

    def audits(
        self, view: View, owners: Sequence[WorkerId], planned: Sequence[Audit]
    ) -> tuple[Audit, ...]:
        """Return `planned`, and audits by which joiners that are watched prove themselves.

        Each of their tasks is computed by a member, too. A joiner that hosts no task has time, and
        computes a member's task.
        """
        joiners = self.watched_workers(view)
        if not joiners:
            return tuple(planned)
        others = [worker for worker in view.workers if worker not in joiners]
        found = {audit.vrank: audit for audit in planned}
        theirs = [vrank for vrank, owner in enumerate(owners) if owner in joiners]
        for vrank, auditor in zip(theirs, itertools.cycle(others)):
            found[vrank] = Audit(vrank, owners[vrank], (auditor,))
        idle = sorted(joiners - frozenset(owners))
        free = (vrank for vrank, owner in enumerate(owners) if vrank not in found)
        for worker, vrank in zip(idle, free, strict=False):
            found[vrank] = Audit(vrank, owners[vrank], (worker,))
        return tuple(found[vrank] for vrank in sorted(found))

    def judge(
        self, view: View, ruling: Ruling, owners: Sequence[WorkerId]
    ) -> tuple[tuple[WorkerId, ...], Refusal]:
        """Return the joiners that are refused, if any, and the consequence; all members agree.

        They are refused if they have computed otherwise each time, and no older member has.
        """
        joiners = self.watched_workers(view)
        unlike = frozenset(worker for worker, _ in ruling.wrong)
        if ruling.sentence is Sentence.TIE:
            idle = joiners - frozenset(owners)  # joiners that compute members' tasks
            of_members = any(owners[vrank] not in joiners for vrank in ruling.disputed)
            unlike = frozenset(owners[vrank] for vrank in ruling.disputed)
            unlike = (unlike & joiners) | idle if of_members and idle else unlike
        judged = ruling.sentence in (Sentence.TIE, Sentence.LEAVE) and ruling.steady
        if not (judged and unlike and unlike <= joiners):
            return (), Refusal.ANEW
        refused = tuple(sorted(unlike))
        if unlike <= self._strange:
            return refused, Refusal.KIND
        before = frozenset[str]() if unlike < joiners else self._refused  # one was accepted
        self._refused = before | name_machines(view, unlike - self._strange)
        if are_too_many(len(self._refused), view, REFUSED_MAX):
            return refused, Refusal.SCRIPT
        return refused, Refusal.QUARANTINED if before else Refusal.ANEW

    def add_audits(self, view: View, audited: Iterable[WorkerId]) -> None:
        """Record that the sums of a step are used, in which these took part in audits."""
        self._accepted = self.watched_workers(view) & frozenset(audited)
        if self._accepted:
            self._refused = frozenset()

    def record_commit(self, me: WorkerId) -> bool:
        """Record that the step is committed; return whether `me` has proved itself in this view."""
        self._proved |= self._accepted
        return me in self._proved or not self._looks

    def watched_workers(self, view: View) -> frozenset[WorkerId]:
        """Return the joiners that have not proved yet that they compute the same results."""
        if view.number != self._view:
            self._view, self._proved, self._accepted = view.number, frozenset(), frozenset()
        return frozenset(view.unproven) - self._proved if self._looks else frozenset()

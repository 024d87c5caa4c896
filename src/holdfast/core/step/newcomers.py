"""Has another member compute the first tasks of workers that have joined, and judges them. Pure.

A joiner holds the job's state, and may yet compute otherwise, again and again: its machine is
wrong, or the script keeps something that the state lacks (a variable, a module that is not
protected), which only those have that have taken the steps before. No bit shows which. So it leaves
before anything of it is used; if it does so again it is left out for a while, as one that computes
wrongly; and if another worker does the same before any has been accepted, it is the script's doing.
"""

from __future__ import annotations

import enum
import itertools
from collections.abc import Sequence

from holdfast.core.step.audit import Audit, Ruling, Sentence
from holdfast.core.types import NO_VIEW, View, WorkerId


class Refusal(enum.Enum):
    """Says what follows from a joiner that computes otherwise."""

    ANEW = "anew"  # it may begin anew at once
    QUARANTINED = "quarantined"  # it has done so before
    SCRIPT = "script"  # so has another worker: the job ends


class Newcomers:
    """Keeps which workers were refused since one was accepted. `looks`: anything is compared."""

    def __init__(self, *, looks: bool) -> None:
        self._looks = looks
        self._refused: frozenset[WorkerId] = frozenset()  # all members that may stay know the same
        self._proved_in = NO_VIEW  # by now all of that view's have been

    def audits(
        self, view: View, step: int, owners: Sequence[WorkerId], planned: Sequence[Audit]
    ) -> tuple[Audit, ...]:
        """Return `planned`, and an audit of each task of a joiner in its first step."""
        if not self._watches(view, step):
            return tuple(planned)
        joiners = frozenset(view.unproven)
        others = [worker for worker in view.workers if worker not in joiners]
        found = {audit.vrank: audit for audit in planned}
        theirs = [vrank for vrank, owner in enumerate(owners) if owner in joiners]
        for vrank, auditor in zip(theirs, itertools.cycle(others)):
            found[vrank] = Audit(vrank, owners[vrank], (auditor,))
        return tuple(found[vrank] for vrank in sorted(found))

    def judge(
        self, view: View, step: int, ruling: Ruling, owners: Sequence[WorkerId]
    ) -> tuple[tuple[WorkerId, ...], Refusal]:
        """Return the joiners that are refused, if any, and what follows; all members come to it.

        They are if they have computed otherwise each time, and are all who did.
        """
        joiners = frozenset(view.unproven)
        unlike = frozenset(worker for worker, _ in ruling.wrong)
        if ruling.sentence is Sentence.TIE:
            unlike = frozenset(owners[vrank] for vrank in ruling.disputed)
        judged = ruling.sentence in (Sentence.TIE, Sentence.LEAVE) and ruling.steady
        if not (self._watches(view, step) and judged and unlike and unlike <= joiners):
            return (), Refusal.ANEW
        before = frozenset[WorkerId]() if unlike < joiners else self._refused  # one was accepted
        self._refused = before | unlike
        if len(self._refused) > 1:
            return tuple(sorted(unlike)), Refusal.SCRIPT
        return tuple(sorted(unlike)), Refusal.QUARANTINED if before else Refusal.ANEW

    def accepted(self, view: View, step: int, owners: Sequence[WorkerId]) -> None:
        """Note that the sums of a step, with tasks of these owners, are used."""
        if self._watches(view, step) and set(view.unproven) <= set(owners):
            self._refused = frozenset()
            self._proved_in = view.number

    def _watches(self, view: View, step: int) -> bool:
        """Tell whether joiners are watched: in their first step, or the first that has a task."""
        first = step == view.resume_step
        if view.fed:
            first = self._proved_in < view.number
        return self._looks and first and bool(view.unproven)

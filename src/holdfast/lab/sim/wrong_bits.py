"""Checks what becomes of wrong gradients and flipped bits in a simulated run.

A run is exact if everything is audited: then nothing wrong is ever committed. Otherwise the job may
use something wrong for a while; but it must find out, and go back to before it.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol

from holdfast.engine.core.step.audit import ATTEMPTS_MAX
from holdfast.engine.core.views import View
from holdfast.lab.sim.arithmetic import Key, is_not_finite
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.seams import Actor


class Violation(AssertionError):
    """The machines did something that must never happen."""


class History(Protocol):
    """Keeps the undisturbed run, and the processes of this one."""

    steps: int
    states: list[int]
    sums: list[int]
    completed: bool
    drops: dict[tuple[int, int], bool]
    processes: dict[Key, Actor]

    def compute_rest(self, step: int, total: int) -> None: ...


class Errors:
    """Records the first use of each wrong value, and the workers that have noticed it.

    `hidden`: an error that no worker could have seen, since all workers that compared had it, or
    its only holder died first. Contents prove nothing from there on.
    """

    def __init__(self, truth: History, options: Options) -> None:
        self.hidden = False
        self.compares_nothing = False  # all were wrong in one step: nothing is compared from there
        self.since: int | None = None  # the first step of this history that is committed wrongly
        self._truth = truth
        self._exact = options.is_exact
        self._cycle = options.cycle
        self._keeps = options.save_every > 0
        self._right: tuple[list[int], list[int]] = ([], [])
        self._used: set[int] = set()  # steps in which something wrong went into a sum
        self._decided: dict[
            int, int | None
        ] = {}  # the committed total of each step, in this history
        self._committers: dict[
            int, list[tuple[int, int]]
        ] = {}  # the workers that committed each step
        self._noticed: set[tuple[int, int]] = set()  # processes found to be wrong, or suspected
        self._noticed_ill: set[tuple[int, int]] = set()  # those of them that were so by then
        self._saved_wrong = 0  # one after the other, and nobody has noticed
        self._by_flip = False  # the wrong value came from a wrong state
        self._looks: dict[int, bool] = {}  # steps in which all is looked at

    def start(self) -> None:
        self._right = list(self._truth.states), list(self._truth.sums)

    def check_used(
        self, view: View, step: int, sender: tuple[int, int], vrank: int, token: int
    ) -> None:
        """Check whether something wrong may go into a sum that is committed, and note it."""
        members = [self._truth.processes[(m.worker, m.incarnation)] for m in view.members]
        flips = {member.spoiling.flipped for member in members}
        poisoned = self._truth.processes[sender].spoiling.poisoned[step]
        each_time = len(members) == 1 and poisoned >= ATTEMPTS_MAX
        if is_not_finite(token) and not self.compares_nothing and not each_time:
            raise Violation(f"step {step} is committed, and is not finite by {sender}'s fault")
        if is_not_finite(token):
            self.compares_nothing = True  # taken to be rightly so, and others' are for a while
        alike = len(flips) == 1 and None not in flips
        if len(members) == 1 or alike or not self._truth.processes[sender].alive:
            self.hidden = True
        elif self._exact and not self.hidden:
            raise Violation(f"step {step}: vrank {vrank} from {sender} has other contents")
        self._used.add(step)
        self._by_flip = self._by_flip or self._truth.processes[sender].spoiling.flipped is not None

    def record_comparison(self, step: int) -> None:
        """Record that every task and state is audited and compared in this step."""
        self._looks[step] = True

    def _is_seen_by(self, step: int) -> bool:
        """Return whether the error must have been seen before this step was committed."""
        if self.since is None or self.hidden:
            return False
        if self._by_flip and step > self.since + self._cycle:
            return True
        return any(self.since < look < step for look in self._looks)

    def check_commit(self, process: Actor, step: int, total: int | None) -> None:
        truth = self._truth
        last = truth.completed and bool(truth.drops)  # no worker goes on from its commit
        if self._decided.setdefault(step, total) != total and not last:
            living = [key for key in self._committers[step] if truth.processes[key].alive]
            if living or not (self.hidden or truth.drops):
                raise Violation(f"step {step} is committed with two sums")
            self._decided[step] = total  # the worker that committed the other total died unheard
            if truth.drops and total is not None and not self.hidden:
                truth.compute_rest(step, total)
        self._committers.setdefault(step, []).append(process.key)
        if self.hidden:
            return
        if total is not None and (step, total) in truth.drops and total != truth.sums[step]:
            truth.compute_rest(step, total)
        if total != truth.sums[step]:
            if step not in self._used or total is None:
                raise Violation(f"worker {process.key} commits step {step} with other contents")
            self.since = step if self.since is None else min(step, self.since)
            truth.compute_rest(step, total)
        if self._is_seen_by(step):
            raise Violation(f"nobody sees until step {step} what is wrong since {self.since}")

    def check_save(self, step: int) -> None:
        """Check that no wrong gradient is part of two checkpoints in a row without an event."""
        if self.since is not None and step > self.since and not self.hidden:
            self._saved_wrong += 1
            if self._saved_wrong > 1 and not self._noticed:
                raise Violation(
                    f"a second checkpoint, {step}, with what is wrong since {self.since}"
                )

    def record_notice(self, wrong: Iterable[tuple[int, int]]) -> None:
        """A member of a view knows that something is wrong; and who, or that it is one of these."""
        for key in wrong:
            self._noticed.add(key)
            spoiling = self._truth.processes[key].spoiling
            if spoiling.flipped is not None or spoiling.lies:
                self._noticed_ill.add(key)

    def check_doubt(self, again: bool) -> None:
        """Check that, if the ledger doubts results and keeps them, there are no checkpoints."""
        if not again:
            if self._keeps:
                raise Violation("the job keeps checkpoints, and does not go back to one")
            self.hidden = True

    def record_end(self, process: Actor) -> None:
        ill = process.spoiling.flipped is not None or process.spoiling.lies
        used = self.since is not None or self._used
        if ill and used and process.key not in self._noticed_ill:
            self.hidden = True

    def check_view_beginning(self, view: View) -> None:
        """Check that all begin from a state that is right: a checkpoint, or the beginning."""
        for step in [s for s in self._decided if s >= view.resume_step]:
            del self._decided[step], self._committers[step]
        self._looks = {step: True for step in self._looks if step < view.resume_step}
        if self.since is not None and not self.hidden:
            if view.resume_step > self.since:
                if self._noticed:
                    raise Violation(
                        f"the job goes back to step {view.resume_step}, but is wrong since "
                        f"{self.since}"
                    )
                self.hidden = True  # all workers that could have seen it are lost
                return
            self._truth.states[:], self._truth.sums[:] = self._right
            self.since, self._by_flip = None, False
            self._used.clear()
            self._looks.clear()
        self._saved_wrong = 0
        self._noticed.clear()
        self._noticed_ill.clear()

    def check_script_end(self) -> None:
        """Check, at a script's end, that only errors after the last comparison are unseen."""
        if self._is_seen_by(self._truth.steps):
            raise Violation(f"the job ends with what is wrong since step {self.since}")

"""Checks what becomes of wrong gradients and flipped bits in a simulated run.

A run is exact if everything is audited: then no wrong value is ever committed. Otherwise the job
may use something wrong for a while; but it must find out, and go back to before it.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

from holdfast.engine.core.invalidations import Invalidations
from holdfast.engine.core.step.audit import ATTEMPTS_MAX
from holdfast.engine.core.views import View
from holdfast.lab.sim.arithmetic import INITIAL_STATE, Key, apply, expected_sum, is_not_finite
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.seams import Actor


class Violation(AssertionError):
    """The machines did something that must never happen."""


class History:
    """Keeps the course of a job in which no fault goes unnoticed: its states and sums by step."""

    def __init__(self, vranks: int, steps: int) -> None:
        self.vranks = vranks
        self.steps = steps
        self.states = [INITIAL_STATE]
        self.sums: list[int] = []
        # Whether a script has come to its end.
        self.completed = False
        # Steps and their sums that left out late results.
        self.drops: dict[tuple[int, int], bool] = {}
        # Errors that any worker has known of.
        self.doubts: Invalidations = ()

    def compute_from(self, step: int) -> None:
        """Compute the job from the state before a step."""
        self.compute_rest(step, expected_sum(self.states[step], step, self.vranks))

    def compute_rest(self, step: int, total: int) -> None:
        """Compute the rest of the job from the sum of one step."""
        del self.sums[step:], self.states[step + 1 :]
        for later in range(step, self.steps):
            state = self.states[-1]
            self.sums.append(expected_sum(state, later, self.vranks) if later > step else total)
            self.states.append(apply(state, later, self.sums[-1]))


class Errors:
    """Records the first use of each wrong value, and the workers that have noticed it.

    `hidden`: an error that no worker could have seen, since all workers that compared had it, or
    its only holder died first. Contents are no proof from there on.
    """

    def __init__(self, history: History, processes: Mapping[Key, Actor], options: Options) -> None:
        self.hidden = False
        # All members were wrong in one step: contents are not compared from there.
        self.compares_nothing = False
        self.since: int | None = None  # the first step of this history that is committed wrongly
        self._history = history
        self._processes = processes
        self._options = options
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
        # Wrong checkpoints in a row that no worker has noticed.
        self._saved_wrong = 0
        self._by_flip = False  # the wrong value came from a wrong state
        self._looks: dict[int, bool] = {}  # steps in which all is looked at

    def start(self) -> None:
        self._right = list(self._history.states), list(self._history.sums)

    def check_used(
        self, view: View, step: int, sender: tuple[int, int], vrank: int, token: int
    ) -> None:
        """Check whether something wrong may go into a sum that is committed, and note it."""
        members = [self._processes[(m.worker, m.incarnation)] for m in view.members]
        flips = {member.spoiling.flipped for member in members}
        poisoned = self._processes[sender].spoiling.poisoned[step]
        each_time = len(members) == 1 and poisoned >= ATTEMPTS_MAX
        if is_not_finite(token) and not self.compares_nothing and not each_time:
            raise Violation(f"step {step} is committed, and is not finite by {sender}'s fault")
        if is_not_finite(token):
            # The members take it for correct, and other such results for a while.
            self.compares_nothing = True
        alike = len(flips) == 1 and None not in flips
        if len(members) == 1 or alike or not self._processes[sender].alive:
            self.hidden = True
        elif self._options.is_exact and not self.hidden:
            raise Violation(f"step {step}: vrank {vrank} from {sender} has other contents")
        self._used.add(step)
        self._by_flip = self._by_flip or self._processes[sender].spoiling.flipped is not None

    def record_comparison(self, step: int) -> None:
        """Record that every task and state is audited and compared in this step."""
        self._looks[step] = True

    def _is_seen_by(self, step: int) -> bool:
        """Return whether the error must have been seen before this step was committed."""
        if self.since is None or self.hidden:
            return False
        if self._by_flip and step > self.since + self._options.cycle:
            return True
        return any(self.since < look < step for look in self._looks)

    def check_commit(self, process: Actor, step: int, total: int | None) -> None:
        history = self._history
        # No worker continues from its commit.
        last = history.completed and bool(history.drops)
        if self._decided.setdefault(step, total) != total and not last:
            living = [key for key in self._committers[step] if self._processes[key].alive]
            if living or not (self.hidden or history.drops):
                raise Violation(f"step {step} is committed with two sums")
            self._decided[step] = total  # the worker that committed the other total died unheard
            if history.drops and total is not None and not self.hidden:
                history.compute_rest(step, total)
        self._committers.setdefault(step, []).append(process.key)
        if self.hidden:
            return
        if total is not None and (step, total) in history.drops and total != history.sums[step]:
            history.compute_rest(step, total)
        if total != history.sums[step]:
            if step not in self._used or total is None:
                raise Violation(f"worker {process.key} commits step {step} with other contents")
            self.since = step if self.since is None else min(step, self.since)
            history.compute_rest(step, total)
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
            spoiling = self._processes[key].spoiling
            if spoiling.flipped is not None or spoiling.lies:
                self._noticed_ill.add(key)

    def check_doubt(self, again: bool) -> None:
        """Check that, if the ledger doubts results and keeps them, there are no checkpoints."""
        if not again:
            if self._options.save_every > 0:
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
            self._history.states[:], self._history.sums[:] = self._right
            self.since, self._by_flip = None, False
            self._used.clear()
            self._looks.clear()
        self._saved_wrong = 0
        self._noticed.clear()
        self._noticed_ill.clear()

    def check_script_end(self) -> None:
        """Check, at a script's end, that only errors after the last comparison are unseen."""
        if self._is_seen_by(self._history.steps):
            raise Violation(f"the job ends with what is wrong since step {self.since}")

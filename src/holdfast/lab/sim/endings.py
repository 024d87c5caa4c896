"""Checks how a simulated job ends: done, stopped by its operator, failed, or given up."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.step.audit import are_too_many
from holdfast.engine.core.step.newcomers import REFUSED_MAX
from holdfast.engine.core.step.script_blame import STEADY_MAX
from holdfast.engine.core.views import View
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.run_options import STORE_LOST, USUAL_MAX, Options
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.stored import StoredCheckpoints
from holdfast.lab.sim.wrong_bits import Violation

STOPPED = "its operator has stopped it"
SCRIPT_FAILED = "its script raises"
PARTED = "has left its loop after step"
ON_ALL = "(a disk is full on every worker): "


def is_out_of_time(process: Actor) -> bool:
    """Return whether its right to act has ended by its own clock, which it reads before it acts."""
    return process.host.clock() >= process.machine.acting_until


class WholeJob(Protocol):
    """Knows the present state of a job."""

    newest: int
    completed: bool
    count: Counter[str]
    stored: StoredCheckpoints
    processes: dict[Key, Actor]
    live: dict[Key, Actor]


class Endings:
    """Observes one run; raises Violation when its job ends as it must not."""

    def __init__(self, truth: WholeJob, options: Options) -> None:
        self.stop_at: int | None = None  # the step to which the job had come when it was stopped
        self.store_silent_since: float | None = None
        self._truth = truth
        self._options = options
        self._stop_in = 0  # the view in which the job was stopped
        self._stopped_at = 0.0
        self._long_s = 0.0  # seconds since then in which something took unusually long
        self._long_until = 0.0
        self._hurried = False  # it was to be stopped at once
        self._furthest = 0  # the step to which the job has come
        self._blamed = ""  # what a worker has rightly held against the script
        self.heard = 0  # the same, as far as a coordinator has heard: from there it counts losses
        self._failing: set[int] = set()  # workers that have met an error of their machine's own
        self._died: dict[int, int] = {}  # processes that had died when the job first reached a step

    @property
    def is_ending(self) -> bool:
        """Return whether the job is ending, for any reason."""
        truth = self._truth
        return truth.completed or truth.count["failed"] > 0 or self.stop_at is not None

    def record_commit(self, step: int) -> None:
        """Record that a step is committed, perhaps a second time."""
        if step >= self._furthest:
            self._furthest = step + 1
            self._died[step + 1] = self._truth.count["died"]

    def record_report(self, report: AgentReport) -> None:
        """Record the step that the job has reached, by a node's report to the coordinator."""
        steps = [status.committed for status in report.workers if status.has_state]
        self.heard = max([self.heard, *steps])

    def record_stop_request(self, step: int, now: float) -> None:
        """Record that the operator ends the job, which has reached this step."""
        if self.stop_at is None:
            self.stop_at, self._stop_in, self._stopped_at = step, self._truth.newest, now

    def record_delay(self, now: float, delay_s: float) -> None:
        """Record that from now on something takes much longer than it usually does."""
        since, until = max(now, self._long_until), now + delay_s
        if until > since:
            self._long_until = until
            self._long_s += until - (since if self.stop_at is not None else until)

    def record_hurry(self) -> bool:
        """Record that no last checkpoint is wanted; return whether the job was to be stopped."""
        self._hurried = self.stop_at is not None
        return self._hurried

    def record_machine_error(self, worker: int) -> None:
        """Record that a worker ends by an error of its machine's own."""
        self._failing.add(worker)

    def check_outcome(self, outcome: str, now: float) -> None:
        """Check the outcome of the job, as the coordinator says it."""
        truth, options = self._truth, self._options
        if not outcome:
            if not truth.completed or options.parts_at >= 0:
                raise Violation("the job was declared done and no script ever reached its end")
        elif outcome == STOPPED and self.stop_at is not None:
            truth.count["stopped"] += 1
            self._check_stop(now)
        elif (
            (outcome.endswith(f"failed: {SCRIPT_FAILED}") and truth.count["failed"])
            or outcome.endswith(f"{ON_ALL}{SCRIPT_FAILED}")  # see check_failure
            or (self._tells_of_losses(outcome) and options.losses_max < self._count_losses())
            or (self._blamed and self._blamed in outcome)
            or (PARTED in outcome and options.parts_at >= 0)
        ):
            pass
        else:
            silent_s = 0.0 if self.store_silent_since is None else now - self.store_silent_since
            hopeless = STORE_LOST in options.faults and silent_s >= options.restore_s
            if not hopeless or "given up after" not in outcome or "\n" in outcome:
                raise Violation(f"the job gave up: {outcome}")

    def check_script_blame(self, view: View | None, reason: str) -> None:
        """Check that, if a member of a view blames the script, too many machines are wrong to tell.

        They are if half of all, or of those that have not just joined, are; or more machines in
        turn than are borne in a short while.
        """
        members = view.members if view is not None else ()
        every = {m.worker: self._truth.processes[m.worker, m.incarnation] for m in members}
        proven = {w: p for w, p in every.items() if view is None or w not in view.unproven}
        many = any(2 * _count_ill(each.values()) >= len(each) for each in (every, proven))
        steady = {key[0] for key, p in self._truth.processes.items() if p.spoiling.lies}
        borne = REFUSED_MAX if "joined before" in reason else STEADY_MAX
        many = many or (view is not None and are_too_many(len(steady), view, borne))
        if self._options.wrong_together or not (many or self._options.forgetful):
            ill = _count_ill(every.values())
            raise Violation(f"{ill} of {len(every)} are wrong, yet the script is blamed: {reason}")
        self._blamed = reason

    def check_failure(self, why: str) -> None:
        """Check that no worker has been spared where machines' own errors end the job."""
        for key, process in sorted(self._truth.live.items()) if ON_ALL in why else ():
            may_act = not (process.paused or process.host.drained or is_out_of_time(process))
            if may_act and key[0] not in self._failing:
                raise Violation(f"worker {key} was spared, yet the job ends: {why}")

    def _tells_of_losses(self, outcome: str) -> bool:
        return "were lost at step" in outcome or "the job began again" in outcome

    def _count_losses(self) -> int:
        """Count the processes that ended, or may not act, since the job last came further."""
        truth = self._truth
        silent = [p for p in truth.live.values() if p.paused or is_out_of_time(p)]
        return truth.count["died"] - self._died.get(self.heard - 1, 0) + len(silent)

    def _check_stop(self, now: float) -> None:
        """Check that a job which is stopped in good health has saved its newest state, and soon."""
        truth, options = self._truth, self._options
        step, processes = self.stop_at or 0, truth.processes.values()
        ill = any(p.ailing or p.stopped or p.silent or p.paused or p.stuck for p in processes)
        at_end = step >= options.steps - 1 or step in (end - 1 for end in options.loops)
        # Who commits by a view and not by its votes has not heard that a save was agreed on.
        changes = truth.newest > self._stop_in
        excused = ill or at_end or changes or truth.completed or self._hurried
        if excused or not options.save_every:
            return
        if max(truth.stored.saved, default=0) < step:
            saved = sorted(truth.stored.saved)
            raise Violation(f"the job is stopped at step {step}, and has saved only {saved}")
        took_s, usual_s = now - self._stopped_at, options.saving_s(USUAL_MAX)
        if took_s > usual_s + self._long_s:
            raise Violation(f"a sound job took {took_s:.2f} s to stop: {usual_s:.2f} s are enough")


def _count_ill(processes: Iterable[Actor]) -> int:
    return sum(process.spoiling.is_ill(process.step) for process in processes)

"""Checks each step of a simulated job: its hosts, its tasks, its sum, its commit, and the script.

The oracle of a sum is written apart from the product's own summation. A worker's report of its
script must agree with the simulated script.
"""

from __future__ import annotations

from collections import Counter
from typing import Protocol

from holdfast.engine.core.ground.effects import Reduce
from holdfast.engine.core.invalidations import is_invalidated
from holdfast.engine.core.membership.formation import STEPS_MISSED_MAX
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Phase, WorkerStatus
from holdfast.lab.sim.arithmetic import DROPPED, Copy, Key, Parts, Share, task
from holdfast.lab.sim.endings import Endings
from holdfast.lab.sim.membership_checks import Parts as TruthParts
from holdfast.lab.sim.membership_checks import Processes, ViewChecks
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.seams import Actor, ScriptAtWork, ScriptWork
from holdfast.lab.sim.wrong_bits import Violation

#: Most commits before a view's end reaches the coordinator, and its reaction the view.
STEPS_UNHEARD = 40


class StepParts(TruthParts, Protocol):
    """Has the parts of the truth about a run that steps depend on."""

    membership: ViewChecks
    processes: Processes
    endings: Endings
    count: Counter[str]


class StepChecks:
    """Observes the steps of one run; raises Violation."""

    def __init__(self, truth: StepParts, options: Options) -> None:
        self.commits = 0
        # By view and step: the host of each virtual rank, and the ranks of the counted members.
        self.owners: dict[tuple[int, int], tuple[WorkerId, ...]] = {}
        self.counted: dict[tuple[int, int], tuple[int, ...]] = {}
        self._truth = truth
        self._history = truth.history
        self._membership = truth.membership
        self._processes = truth.processes
        self._errors = truth.errors
        self._options = options
        # The records of a comparison and of a sum that were checked last: all members share them.
        self._synced: object = None
        self._reduced: object = None

    def check_donation(self, process: Actor, view: View) -> None:
        if not process.work.at_rest:
            raise Violation(f"worker {process.key} donates in the middle of a step")
        if process.work.state != self._history.states[view.resume_step] and not self._errors.hidden:
            raise Violation(f"worker {process.key} donates a state that is not the job's")

    def check_staging(self, process: Actor, step: int) -> None:
        """Check what a member copies for workers that follow: the job's state, at rest."""
        if not process.work.at_rest or process.work.step != step:
            raise Violation(f"worker {process.key} copies its state in the middle of a step")
        if process.work.state != self._history.states[step] and not self._errors.hidden:
            raise Violation(f"worker {process.key} copies a state that is not the job's")
        self._truth.count["staged"] += 1

    def check_hosts(self, view: int, step: int, owners: tuple[WorkerId, ...]) -> None:
        """Check that all members of a view agree who hosts what in a step."""
        known = self.owners.setdefault((view, step), owners)
        if known != owners:
            raise Violation(f"in view {view} two assignments hold for step {step}")

    def check_reduce(self, view: View, reduce: Reduce) -> None:
        """Check that all members of a view sum a step alike: who hosts what, and who counts."""
        self.check_hosts(view.number, reduce.step, reduce.owners)
        self._truth.quiet_times.spare_rules.check_hosts(view, reduce.step, reduce.owners)
        counted = tuple(reduce.counted)
        if self.counted.setdefault((view.number, reduce.step), counted) != counted:
            raise Violation(f"in view {view.number} step {reduce.step} counts other members")

    def check_adoption(self, process: Actor, vrank: int) -> None:
        """Check a speculative task that becomes a worker's own: it is there, once, and hosted."""
        self._truth.count["adopted"] += 1
        view = process.exchanges.view
        hosts = view is not None and process.worker == view.owners[vrank]
        if vrank not in process.work.copies or vrank in process.work.tokens or not hosts:
            raise Violation(f"worker {process.key} adopts virtual rank {vrank} wrongly")

    def check_copy(self, process: Actor, step: int, vrank: int) -> None:
        """Check that whoever owns a task that is copied was seen to be late with it."""
        view = process.exchanges.view
        if view is None or process.exchanges.looked != (view.number, step):
            raise Violation(f"worker {process.key} copies virtual rank {vrank} without a look")

    def check_contradictions(self, process: Actor, step: int, parts: Parts) -> None:
        """Check that no wrong sum is committed if a sound worker has computed another one."""
        if process.spoiling.is_spoiled or self._errors.hidden or "poison" in self._options.faults:
            return
        for sender, vrank, token in parts:
            unlike = process.work.copies.get(vrank, token) != token
            if unlike and token not in (DROPPED, task(self._history.states[step], step, vrank)):
                raise Violation(f"step {step} is committed with virtual rank {vrank} of {sender}")

    def check_pieces(self, process: Actor, step: int, shares: list[Share]) -> None:
        """Check that a late worker receives one piece of its missed step from each member."""
        if [(share.rank, share.size) for share in shares] != list(
            zip(range(len(shares)), [len(shares)] * len(shares), strict=True)
        ):
            raise Violation(f"worker {process.key} gets pieces {shares} of step {step}")

    def check_sync(self, process: Actor, view: View, digests: dict[Key, Copy]) -> None:
        if digests is self._synced:
            return  # all members share them
        self._synced = digests
        for (worker, _), digest in sorted(digests.items()):
            right = digest[0] == self._history.states[view.resume_step] or self._errors.hidden
            if view.joiners and not right:
                raise Violation(f"worker {worker} starts view {view.number} from a wrong state")

    def check_sum(self, view: View, step: int, parts: Parts, total: int) -> None:
        """Check a sum that is about to be committed, which these members' tokens went into."""
        if parts is self._reduced:
            return  # all members share them
        self._reduced = parts
        seen: dict[int, Key] = {}
        for sender, vrank, token in parts:
            member = view.member(WorkerId(sender[0]))
            if member is None or member.incarnation != sender[1]:
                raise Violation(f"{sender} contributes to view {view.number} it is no member of")
            if vrank in seen:
                raise Violation(
                    f"step {step}: vrank {vrank} counts twice, from {seen[vrank]} and {sender}"
                )
            if self._options.backup.workers and token == DROPPED:
                self._history.drops[step, total] = True
            elif token != task(self._history.states[step], step, vrank):
                self._errors.check_used(view, step, sender, vrank, token)
            seen[vrank] = sender
        vranks = self._history.vranks
        if len(seen) != vranks:
            raise Violation(f"step {step} is summed from {len(seen)} of {vranks} vranks")
        counted = {sender for sender, _, token in parts if token != DROPPED}
        self._check_left_out(view, step, len(counted), {sender for sender, _, _ in parts})

    def _check_left_out(self, view: View, step: int, counted: int, hosts: set[Key]) -> None:
        """Check that a step leaves out the results of no more members than allowed."""
        needed = self._options.backup.needed_members(len(view.members))
        if counted < needed - (len(view.members) - len(hosts)):
            raise Violation(f"step {step} counts {counted} members of {len(view.members)}")

    def check_opening(self, process: Actor, step: int) -> None:
        """Check that a script begins to compute the step that its state is of."""
        if process.work.step != step:
            raise Violation(
                f"worker {process.key} opens step {step}, its state is of {process.work.step}"
            )

    def check_vote(self, process: Actor, step: int, by_vote: bool) -> None:
        """Check the committing of a step that a worker learns of and has yet to apply."""
        number = process.machine.snapshot().view
        if by_vote and number < self._membership.newest:
            raise Violation(
                f"worker {process.key} commits step {step} by a vote of view {number} although "
                f"view {self._membership.newest} was formed"
            )
        parts, view = process.exchanges.parts, self._membership.views.get(number)
        if by_vote and view is not None:
            self._truth.promises.check_vote(view, step)
        replays = view is not None and view.recall is not None and step < view.resume_step
        if view is not None and not replays and not view.feeds(process.worker):
            summed_in = process.exchanges.summed_in if process.work.total_step == step else None
            self._truth.memories.record_commit(process.agent, step, summed_in or view)
        if (
            view is not None
            and process.work.total_step == step
            and parts
            and process.work.total is not None
        ):
            summed_in = process.exchanges.summed_in or view
            if len(summed_in.members) == 1 and process.exchanges.wrongly:
                # No other worker was there to sum it.
                self._errors.hidden = True
            if by_vote:
                self.check_contradictions(process, step, parts)
            self.check_sum(summed_in, step, parts, process.work.total)

    def check_commit(self, process: Actor, step: int, total: int | None, now: float) -> None:
        """Check that a worker applies a step of the job, and to the right state."""
        self._truth.quiet_times.record_commit(now)
        self.commits += 1
        self._truth.endings.record_commit(step)
        self.check_suspended(process, step)
        if step >= self._history.steps:
            raise Violation(f"worker {process.key} commits step {step} of {self._history.steps}")
        self._errors.check_commit(process, step, total)
        if process.work.state != self._history.states[step] and not self._errors.hidden:
            raise Violation(f"worker {process.key} applies step {step} to another state")

    def check_suspended(self, process: Actor, step: int) -> None:
        """Check that a worker that was suspended comes back, or is replaced."""
        view = self._membership.views.get(process.machine.snapshot().view)
        for lag in view.suspended if view is not None else ():
            key = (int(lag.worker), int(lag.incarnation))
            wanted = self._membership.ordered.get(key[0]) == key[1]
            wanted = wanted and self._processes.started[key].alive
            if wanted and step - lag.committed > STEPS_MISSED_MAX + STEPS_UNHEARD:
                raise Violation(f"worker {key} was suspended in step {lag.committed} and forgotten")

    def check_beginning(self, process: Actor) -> None:
        """Check that a vote that announces a change is the last of its view, for everyone."""
        if process.machine.snapshot().view == process.tie.last_step_of:
            raise Violation(f"worker {process.key} begins another step after an announced change")

    def check_applied_state(self, process: Actor) -> None:
        """Check a step that is applied, unless the job has gone back to before it."""
        given_up = is_invalidated(
            self._history.doubts, process.work.step, process.machine.snapshot().view
        )
        right = process.work.state == self._history.states[process.work.step] or given_up
        if not right and not self._errors.hidden:
            raise Violation(f"worker {process.key} diverged at step {process.work.step}")


def check_script(process: Actor, status: WorkerStatus) -> None:
    """Compare a status with the script, once the machine has handled all its events."""
    wrong = _disagreement(process.work, process.script, status)
    if wrong:
        raise Violation(f"worker {process.key} is said to be {status.phase.value}, but {wrong}")


def _disagreement(work: ScriptWork, script: ScriptAtWork, status: WorkerStatus) -> str:
    step, phase = status.committed, status.phase
    open_now, done = work.open_step == step, set(status.hosted) <= set(work.tokens)
    if status.has_state and not step - 1 <= work.step <= step:
        return f"its state is of step {work.step} when {step} are committed"
    if status.reduced and (work.total is None or work.total_step != step):
        return f"it has no gradient of step {step}"
    if work.at_rest and not script.is_busy and phase is not Phase.BOUNDARY:
        return "it waits between two steps"
    match phase:
        case Phase.BOUNDARY if not work.at_rest:
            return "its script goes on"
        case Phase.BOUNDARY if status.has_state and work.step != step:
            return f"it rests after {work.step} of {step} steps"
        case Phase.WAITING | Phase.OVERDUE if not (open_now and done) and not script.can_wait:
            return f"its tasks of step {step} are not done"
        case Phase.COMPUTING if open_now and done and not script.is_busy:
            return f"its tasks of step {step} are done"
        case Phase.LEAVING | Phase.ENDED if work.step < script.until:
            return f"it has come to step {work.step} of {script.until}"
    return ""

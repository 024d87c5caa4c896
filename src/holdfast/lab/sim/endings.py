"""Checks the ends of the whole job, of processes that are replaced, and of nodes that leave.

A job is done, stopped by its operator, failed, or given up. A planned leave never lowers the newest
step that can be recovered if all processes are lost. That step is found in the nodes' memory and
the store as they really are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from typing import Protocol

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.step.audit import are_too_many
from holdfast.engine.core.step.newcomers import REFUSED_MAX
from holdfast.engine.core.step.rulings import STEADY_MAX
from holdfast.engine.core.types import RELEASE_ALL, AgentId, ViewNumber
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Phase, WorkerStatus
from holdfast.lab.sim.membership_checks import Processes, ViewChecks, is_out_of_time
from holdfast.lab.sim.memories import LostRows, Memories
from holdfast.lab.sim.quiet_times import QuietTimes
from holdfast.lab.sim.run_options import STORE_LOST, USUAL_MAX, Options
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.stored import StoredCheckpoints
from holdfast.lab.sim.wrong_bits import History, Violation

STOPPED = "its operator has stopped it"
SCRIPT_FAILED = "its script raises"
PARTED = "has left its loop after step"
ON_ALL = "(a disk is full on every worker): "
NEVER = float("inf")
REPLACED = "the coordinator replaced it"  # as the agent machine words it


class WholeJob(Protocol):
    """Knows the present state of a job."""

    history: History
    membership: ViewChecks
    processes: Processes
    count: Counter[str]
    stored: StoredCheckpoints
    memories: Memories
    rows: LostRows
    quiet_times: QuietTimes


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
        # The furthest step known to a coordinator, which counts losses from there.
        self.heard = 0
        self._failing: set[int] = set()  # workers that have met an error of their machine's own
        self._died: dict[int, int] = {}  # processes that had died when the job first reached a step

    @property
    def is_ending(self) -> bool:
        """Return whether the job is ending, for any reason."""
        truth = self._truth
        return truth.history.completed or truth.count["failed"] > 0 or self.stop_at is not None

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
            self.stop_at, self._stop_in, self._stopped_at = step, self._truth.membership.newest, now

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
        """Check the outcome that the coordinator gives the job."""
        truth, options = self._truth, self._options
        if not outcome:
            if not truth.history.completed or options.parts_at >= 0:
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
        """Check that a member of a view blames the script only where too many machines are wrong.

        They are too many if half of all members are wrong, or half of the members that have not
        just joined; or more machines in turn than are borne in a short while.
        """
        members = view.members if view is not None else ()
        every = {m.worker: self._truth.processes.started[m.worker, m.incarnation] for m in members}
        proven = {w: p for w, p in every.items() if view is None or w not in view.unproven}
        many = any(2 * _count_ill(each.values()) >= len(each) for each in (every, proven))
        steady = {key[0] for key, p in self._truth.processes.started.items() if p.spoiling.lies}
        borne = REFUSED_MAX if "joined before" in reason else STEADY_MAX
        many = many or (view is not None and are_too_many(len(steady), view, borne))
        if self._options.wrong_together or not (many or self._options.forgetful):
            ill = _count_ill(every.values())
            raise Violation(f"{ill} of {len(every)} are wrong, yet the script is blamed: {reason}")
        self._blamed = reason

    def check_failure(self, why: str) -> None:
        """Check that no worker has been spared where machines' own errors end the job."""
        for key, process in sorted(self._truth.processes.live.items()) if ON_ALL in why else ():
            may_act = not (process.paused or process.host.drained or is_out_of_time(process))
            if may_act and key[0] not in self._failing:
                raise Violation(f"worker {key} was spared, yet the job ends: {why}")

    def _tells_of_losses(self, outcome: str) -> bool:
        return "were lost at step" in outcome or "the job began again" in outcome

    def _count_losses(self) -> int:
        """Count the processes that ended, or may not act, since the job last came further."""
        truth = self._truth
        silent = [p for p in truth.processes.live.values() if p.paused or is_out_of_time(p)]
        return truth.count["died"] - self._died.get(self.heard - 1, 0) + len(silent)

    def _check_stop(self, now: float) -> None:
        """Check that a job which is stopped in good health has saved its newest state, and soon."""
        truth, options = self._truth, self._options
        step, processes = self.stop_at or 0, truth.processes.started.values()
        ill = any(map(_is_ill, processes))
        at_end = step >= options.steps - 1 or step in (end - 1 for end in options.loops)
        # A worker that commits by a view and not by its votes does not know that a save was agreed
        # on.
        changes = truth.membership.newest > self._stop_in
        excused = ill or at_end or changes or truth.history.completed or self._hurried
        if excused or not options.save_every:
            return
        if max(truth.stored.saved, default=0) < step:
            saved = sorted(truth.stored.saved)
            raise Violation(f"the job is stopped at step {step}, and has saved only {saved}")
        took_s, usual_s = now - self._stopped_at, options.saving_s(USUAL_MAX)
        if took_s > usual_s + self._long_s:
            raise Violation(f"a sound job took {took_s:.2f} s to stop: {usual_s:.2f} s are enough")


def _count_ill(processes: Iterable[Actor]) -> int:
    return sum(process.spoiling.is_ill(process.work.step) for process in processes)


class LeavingNode(Protocol):
    """Is a node that leaves the job."""

    name: AgentId
    incarnation: int

    def clock(self) -> float: ...


class PlannedLeaves:
    """Observes one run; raises Violation when something is ended that was needed."""

    def __init__(self, truth: WholeJob, options: Options) -> None:
        self._truth = truth
        self._options = options
        self._given_up: dict[int, bool] = {}  # views that did not end by plan
        self._taken_at: dict[tuple[AgentId, int], float] = {}  # by the node's own clock

    def record_status(self, status: WorkerStatus) -> None:
        """Record that a member has given its view up before it rested at the end of it."""
        if status.has_stopped and status.phase is not Phase.BOUNDARY:
            self._given_up[status.view] = True

    def record_notice(self, node: LeavingNode, in_s: float) -> None:
        """Record that a node's machine is taken away after `in_s` seconds."""
        key, at = (node.name, node.incarnation), node.clock() + in_s
        self._taken_at[key] = min(self._taken_at.get(key, at), at)

    def check_quit(self, node: LeavingNode, now: float, *, over: bool) -> None:
        """Check that a node takes no pieces along that are needed, unless its machine is taken.

        `over`: the job is, or another one is in its place. No node can take over pieces in a job
        that waits for more nodes; then they may go, if a worker on another node holds the state.
        """
        disk = self._truth.membership.disk
        over = over or disk is None or disk.release_loop == RELEASE_ALL or disk.outcome is not None
        is_taken = node.clock() >= self._taken_at.get((node.name, node.incarnation), NEVER)
        if over or is_taken or self._is_in_doubt():
            return
        before, after = self._find_newest(), self._find_newest(node.name)
        waits = now >= self._truth.quiet_times.moved_at + self._options.abandon_s / 2
        stay = [p for p in self._holders() if node.name not in p.spread.agents]
        if after < before and not (stay and waits and not self._options.shard_optimizer):
            raise Violation(
                f"{node.name} leaves by plan, and takes pieces along: step {before} can be "
                f"recovered with them, and step {after} without"
            )

    def check_kill(self, process: Actor, reason: str, now: float) -> None:
        """Check that a worker is ended for a reason that holds."""
        if reason.startswith("frozen") and not process.health.froze:
            raise Violation(f"worker {process.key} is ended as frozen: it never was")
        disk, truth = self._truth.membership.disk, self._truth
        if disk is None or reason != REPLACED or disk.outcome is not None:
            return
        self._check_last_holder(process, disk, now)
        if process.worker not in truth.membership.ordered:
            return  # another node has taken this one's place
        view = truth.membership.newest_view
        member = view.member(process.worker) if view is not None else None
        if truth.membership.newest <= truth.membership.newest_lost:
            return
        acting = member is not None and member.incarnation == process.key[1]
        if process.host.drained and not acting:
            # Only members of the view run there.
            return
        ordered = truth.membership.ordered[process.worker]
        if self._options.spread > 1:
            return  # one of its nodes may have been lost, and a new process may have to wait
        if ordered <= process.key[1] and disk.release_loop != RELEASE_ALL:
            raise Violation(f"worker {process.key} is ended for a directive that does not hold")

    def _check_last_holder(self, process: Actor, disk: JobRecord, now: float) -> None:
        """Check that the last sound holders of the state are not ended before it is kept."""
        view, holders = self._truth.membership.newest_view, self._holders()
        if view is None or process not in holders or disk.release_loop == RELEASE_ALL:
            return
        members = [self._truth.processes.live.get((m.worker, m.incarnation)) for m in view.members]
        sound = all(each is not None and _is_sound(each) for each in members)
        memories, shares = self._truth.memories, self._options.shard_optimizer
        if not sound or memories.has_lost_any() or (len(holders) > 1 and not shares):
            # A fault has struck, or another worker continues.
            return
        status = process.machine.snapshot()
        # The state that nodes' memory gave to the present view is there still.
        recalled = view.recall.step if view.recall is not None and view.recall.sources else 0
        kept, done = self._find_newest(recalled=recalled), status.committed
        if not self._options.redundancy.data:
            unannounced = process.tie.last_step_of != status.view
            unplanned = unannounced and (status.has_stopped or shares)
            unplanned = unplanned or status.view in self._given_up or self._seems_to_hang(now)
            if not self._options.save_every or unplanned or done in self._truth.stored.failed:
                # No store keeps the state, the view's end was not planned, or a save failed.
                return
        if kept < done and not self._is_in_doubt() and not self._truth.stored.rotten:
            raise Violation(f"worker {process.key} is ended by plan at step {done}: {kept} is kept")

    def _seems_to_hang(self, now: float) -> bool:
        """Return whether the job has stood still until a save under way counts as failed."""
        shortest_s = self._options.hang_s * (1 - 2 * self._options.drift)
        return now >= self._truth.quiet_times.moved_at + shortest_s

    def _holders(self) -> list[Actor]:
        live = self._truth.processes.live.values()
        return [each for each in live if each.machine.snapshot().has_state and _is_sound(each)]

    def _find_newest(self, without: AgentId | None = None, recalled: int = 0) -> int:
        """Return the newest step that can be recovered from memory or a checkpoint.

        `recalled`: the step of a state that memory gives in any case.
        """
        truth = self._truth
        saved = (step for step in truth.stored.saved if step not in truth.stored.rotten)
        base = max([truth.memories.find_base(without), recalled, *saved])
        return truth.memories.find_newest((), lambda _: True, base, without)

    def _is_in_doubt(self) -> bool:
        """Return whether something wrong was used, or rows are lost: memory may be of no use."""
        truth = self._truth
        return bool(truth.history.doubts) or truth.rows.are_lost(
            ViewNumber(truth.membership.newest)
        )


def _is_ill(process: Actor) -> bool:
    return not process.is_running or process.health.ailing or process.health.stuck


def _is_sound(process: Actor) -> bool:
    return not _is_ill(process) and process.spread.is_whole and not is_out_of_time(process)

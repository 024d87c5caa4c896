"""Knows the ground truth of a simulated run, and everything that must never be seen in it.

It looks only at facts of the world (live processes, summed bytes, the coordinator's disk, given
promises), never at the beliefs of one machine about another.
"""

from __future__ import annotations

from collections import Counter

from holdfast.engine.core.invalidations import Invalidations, is_covered, merge
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.lab.sim.endings import Endings, PlannedLeaves
from holdfast.lab.sim.membership_checks import Processes, Proofs, ViewChecks
from holdfast.lab.sim.memories import LostRows, Memories
from holdfast.lab.sim.promises import Promises
from holdfast.lab.sim.quiet_times import QuietTimes
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.step_checks import StepChecks
from holdfast.lab.sim.stored import StoredCheckpoints
from holdfast.lab.sim.wrong_bits import Errors, History, Violation


class Truth:
    """Observes; raises Violation. No part of the simulated world reads it."""

    def __init__(self, options: Options) -> None:
        self._options = options
        self.count: Counter[str] = Counter()  # number of events, by kind
        self.history = History(options.vranks, options.steps)
        self.processes = Processes()
        self.errors = Errors(self.history, self.processes.started, options)
        self.promises = Promises(options)
        self.memories = Memories(options.redundancy)
        self.rows = LostRows()
        self.stored = StoredCheckpoints()
        self.quiet_times = QuietTimes(options)
        self.membership = ViewChecks(self, self.processes, options)
        self.proofs = Proofs(self.membership.views)
        self.endings = Endings(self, options)
        self.leaves = PlannedLeaves(self, options)
        self.steps = StepChecks(self, options)

    def start(self) -> None:
        """Run the whole job without faults."""
        self.history.compute_from(0)
        self.errors.start()

    def record_start(self, process: Actor) -> None:
        """Check a process of a worker that starts, and record it."""
        self.processes.check_new(process, self.membership.has_forgotten)
        self.promises.check_start(process, self.processes.live.values())
        self.processes.add(process)

    def record_end(self, process: Actor) -> None:
        """Record that a process of a worker ends."""
        self.processes.remove(process)
        self.errors.record_end(process)
        self.count["died"] += 1

    def check_script_end(self, process: Actor) -> None:
        """Check that a script that ran to its end holds the result of the job."""
        wrong = (
            process.work.state != self.history.states[process.script.until]
            and not self.errors.hidden
        )
        if process.work.step != process.script.until or wrong:
            steps = f"{process.work.step} of {process.script.until}"
            raise Violation(f"worker {process.key} finished at step {steps}")
        self.errors.check_script_end()
        self.history.completed = True
        if self._options.backup.workers:
            # The other workers may drop different results in the last steps.
            self.errors.hidden = True

    def check_release(self, process: Actor, loop: int) -> None:
        """Check that a worker may leave a loop that has ended."""
        self.promises.check_release(process, loop, self.membership.newest_view)

    def look(self, now: float, disturbed_until: float) -> None:
        """Check that the job makes progress, unless it ends."""
        disk = self.membership.disk
        if not self.endings.is_ending and disk is not None and disk.outcome is None:
            running = (p for _, p in sorted(self.processes.live.items()) if not p.health.ailing)
            ordered = [p for p in running if self.membership.ordered.get(p.worker) == p.key[1]]
            self.quiet_times.look(now, disturbed_until, self.membership.newest_view, ordered)

    def check_outcome(self, outcome: str, now: float) -> None:
        """Check the coordinator's outcome at the end of the job."""
        self.promises.check_outcome(self.processes.live.values(), now)
        self.endings.check_outcome(outcome, now)

    def check_status(self, process: Actor, before: WorkerStatus, status: WorkerStatus) -> None:
        """Check a status that a worker sends to its agent."""
        if status.saved and status.saved != before.saved:
            self._check_saved(process, status.saved)
        if status.invalidations != before.invalidations:
            self._record_doubts(process, status.invalidations)
        told = before.events[-1].number if before.events else 0
        for event in status.events:
            if event.number > told and "other numbers each time" in event.text:
                self._check_determinism(process)

    def _check_determinism(self, process: Actor) -> None:
        """Check that members that take their hardware for not deterministic are all wrong."""
        keys = process.tie.group.keys if process.tie.group is not None else ()
        if any(self.processes.started[key].spoiling.lied_in < process.work.step for key in keys):
            raise Violation("deterministic machines are taken for others")
        self.errors.hidden = self.errors.compares_nothing = True  # all of them were wrong

    def _record_doubts(self, process: Actor, invalidations: Invalidations) -> None:
        """Record errors that members know; a view reports only old ones to joiners.

        Members that miss rows of a table give up the state as well, and have seen no error in it.
        """
        news = [each for each in invalidations if not is_covered(each, self.history.doubts)]
        self.history.doubts = merge(self.history.doubts, news)
        if (
            news
            and process.tie.group is not None
            and not self.rows.are_lost(process.tie.group.number)
        ):
            self.errors.record_notice(process.tie.group.keys)

    def _check_saved(self, process: Actor, step: int) -> None:
        """Check that a checkpoint exists which a worker reports as saved."""
        stored = self.stored
        newest = stored.find(step)
        compares = self._options.cycle and not self.errors.hidden
        # The checkpoint at the end of the job counts unchecked: no later step compares it.
        ends = step in self._options.loops or self.endings.stop_at is not None
        if newest is not None and stored.unlike[newest] and compares and not ends:
            raise Violation(f"the checkpoint of step {step} counts, and its shares are unlike")
        if not stored.was_durable(step):
            raise Violation(f"worker {process.key} says that step {step} is saved: it is not")
        if newest is not None and stored.count(newest):
            self.errors.check_save(step)

    def check_loaded_state(self, step: int) -> tuple[int, int | None]:
        """Check the state read from a checkpoint; return it, and its value if a bit flipped."""
        state, flipped = self.stored.saved[step]
        if (
            flipped is not None
            and len(self.membership.views[self.stored.saved_in[step]].members) == 1
        ):
            # No other worker was there to notice it.
            self.errors.hidden = True
        if self._options.backup.workers:  # it may be of a history in which other tasks were dropped
            self.history.states[step] = state or 0
            self.history.compute_from(step)
        if (state, flipped) != (self.history.states[step], None) and not self.errors.hidden:
            raise Violation(f"the checkpoint of step {step} has other contents")
        return state or 0, flipped

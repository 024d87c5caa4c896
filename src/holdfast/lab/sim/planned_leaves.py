"""Checks planned ends: of processes that the coordinator replaces, and of nodes that leave.

The promise: a planned leave never lowers the newest step that can be recovered if all processes
are lost. That step is found in the nodes' memory and the store as they really are.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.engine.core.invalidations import Invalidations
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.types import RELEASE_ALL, AgentId, ViewNumber
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Phase, WorkerStatus
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.endings import is_out_of_time
from holdfast.lab.sim.memories import LostRows, Memories
from holdfast.lab.sim.quiet_times import QuietTimes
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.stored import StoredCheckpoints
from holdfast.lab.sim.wrong_bits import Violation

NEVER = float("inf")
REPLACED = "the coordinator replaced it"  # as the agent machine words it


class LeavingNode(Protocol):
    """Is a node that leaves the job."""

    name: AgentId
    incarnation: int

    def clock(self) -> float: ...


class JobTruth(Protocol):
    """Knows the present state of a job."""

    disk: JobRecord | None
    newest: int
    newest_lost: int
    views: dict[int, View]
    ordered: dict[int, int]
    live: dict[Key, Actor]
    stored: StoredCheckpoints
    memories: Memories
    rows: LostRows
    quiet_times: QuietTimes

    @property
    def known_doubts(self) -> Invalidations: ...


class PlannedLeaves:
    """Observes one run; raises Violation when something is ended that was needed."""

    def __init__(self, truth: JobTruth, options: Options) -> None:
        self._truth = truth
        self._options = options
        self._given_up: dict[int, bool] = {}  # views that did not end by plan
        self._taken_at: dict[tuple[AgentId, int], float] = {}  # by the node's own clock

    def record_status(self, status: WorkerStatus) -> None:
        """Record that a member has given its view up before it rested at the end of it."""
        if status.has_stopped and status.phase is not Phase.BOUNDARY:
            self._given_up[status.view] = True

    def record_notice(self, node: LeavingNode, in_s: float) -> None:
        """Record that a node's machine is taken away after so many seconds."""
        key, at = (node.name, node.incarnation), node.clock() + in_s
        self._taken_at[key] = min(self._taken_at.get(key, at), at)

    def check_quit(self, node: LeavingNode, now: float, *, over: bool) -> None:
        """Check that a node takes no pieces along that are needed, unless its machine is taken.

        `over`: the job is, or another one is in its place. Nobody can take over pieces in a job
        that waits for more nodes; then they may go, if a worker on another node holds the state.
        """
        disk = self._truth.disk
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
        if reason.startswith("frozen") and not process.froze:
            raise Violation(f"worker {process.key} is ended as frozen: it never was")
        disk, truth = self._truth.disk, self._truth
        if disk is None or reason != REPLACED or disk.outcome is not None:
            return
        self._check_last_holder(process, disk, now)
        if process.worker not in truth.ordered:
            return  # another node has taken this one's place
        view = truth.views.get(truth.newest)
        member = view.member(process.worker) if view is not None else None
        if truth.newest <= truth.newest_lost:
            return
        acting = member is not None and member.incarnation == process.key[1]
        if process.host.drained and not acting:
            return  # nothing but members of the view runs there
        ordered = truth.ordered[process.worker]
        if self._options.spread > 1:
            return  # one of its nodes may have been lost, and a new process may have to wait
        if ordered <= process.key[1] and disk.release_loop != RELEASE_ALL:
            raise Violation(f"worker {process.key} is ended for a directive that does not hold")

    def _check_last_holder(self, process: Actor, disk: JobRecord, now: float) -> None:
        """Check that the last sound holders of the state are not ended before it is kept."""
        view, holders = self._truth.views.get(self._truth.newest), self._holders()
        if view is None or process not in holders or disk.release_loop == RELEASE_ALL:
            return
        members = [self._truth.live.get((m.worker, m.incarnation)) for m in view.members]
        sound = all(each is not None and _is_sound(each) for each in members)
        memories, shares = self._truth.memories, self._options.shard_optimizer
        if not sound or memories.has_lost_any() or (len(holders) > 1 and not shares):
            return  # something has gone wrong, or another one goes on
        status = process.machine.snapshot()
        # The state that nodes' memory gave to the present view is there still.
        recalled = view.recall.step if view.recall is not None and view.recall.sources else 0
        kept, done = self._find_newest(recalled=recalled), status.committed
        if not self._options.redundancy.data:
            unannounced = process.last_step_of != status.view
            unplanned = unannounced and (status.has_stopped or shares)
            unplanned = unplanned or status.view in self._given_up or self._seems_to_hang(now)
            if not self._options.save_every or unplanned or done in self._truth.stored.failed:
                return  # nothing keeps the state, its view was not ended by plan, or a save failed
        if kept < done and not self._is_in_doubt() and not self._truth.stored.rotten:
            raise Violation(f"worker {process.key} is ended by plan at step {done}: {kept} is kept")

    def _seems_to_hang(self, now: float) -> bool:
        """Return whether nothing has moved for so long that a save under way counts as failed."""
        shortest_s = self._options.hang_s * (1 - 2 * self._options.drift)
        return now >= self._truth.quiet_times.moved_at + shortest_s

    def _holders(self) -> list[Actor]:
        live = self._truth.live.values()
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
        return bool(truth.known_doubts) or truth.rows.are_lost(ViewNumber(truth.newest))


def _is_sound(process: Actor) -> bool:
    ill = process.ailing or process.stopped or process.silent or process.paused or process.stuck
    return not ill and process.spread.is_whole and not is_out_of_time(process)

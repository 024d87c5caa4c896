"""Knows the ground truth of a simulated run, and everything that must never be seen in it.

It looks only at facts of the world (live processes, summed bytes, the coordinator's disk, given
promises), never at the beliefs of one machine about another. The oracle is written apart from the
product's own summation.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

from holdfast.engine.core.directives import Directive
from holdfast.engine.core.ground.effects import Reduce
from holdfast.engine.core.invalidations import Invalidations, is_covered, is_invalidated, merge
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership.formation import STEPS_MISSED_MAX
from holdfast.engine.core.types import AgentId, ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.lab.sim.arithmetic import (
    DROPPED,
    INITIAL_STATE,
    Copy,
    Key,
    Parts,
    Share,
    apply,
    expected_sum,
    task,
)
from holdfast.lab.sim.endings import Endings, is_out_of_time
from holdfast.lab.sim.memories import LostRows, Memories
from holdfast.lab.sim.neighbour_rules import check_neighbours
from holdfast.lab.sim.planned_leaves import PlannedLeaves
from holdfast.lab.sim.promises import Promises
from holdfast.lab.sim.proofs import Proofs
from holdfast.lab.sim.quiet_times import QuietTimes
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.spare_rules import SpareRules
from holdfast.lab.sim.stored import StoredCheckpoints
from holdfast.lab.sim.wrong_bits import Errors, Violation

STEPS_UNHEARD = 40  # most commits before the coordinator hears of a view's end and acts


class Truth:
    """Observes; raises Violation. Nothing in the simulated world reads it."""

    def __init__(self, options: Options) -> None:
        self.vranks = options.vranks
        self.steps = options.steps
        self._options = options
        self.states = [INITIAL_STATE]
        self.sums: list[int] = []
        self.errors = Errors(self, options)
        self.promises = Promises(options)
        self.spare_rules = SpareRules(options)
        self.memories = Memories(options.redundancy)
        self.quiet_times = QuietTimes(options, self.spare_rules)
        self.endings = Endings(self, options)
        self.leaves = PlannedLeaves(self, options)
        self.views: dict[int, View] = {}
        self.proofs = Proofs(self.views)
        self.newest = 0
        self.processes: dict[Key, Actor] = {}
        self.live: dict[Key, Actor] = {}
        self.live_of: dict[int, list[Actor]] = {}  # by worker
        self.ordered: dict[int, int] = {}  # by worker: the incarnation that the journal orders
        self._slots: object = ()  # the slots in the journal, when last checked
        self._synced: object = None  # the record last checked
        self._reduced: object = None  # the same
        self.leading: dict[Key, int] = {}
        first = options.counts_from
        self.disk = JobRecord(term=first, views_used=ViewNumber(first)) if first else None
        self.newest_lost = 0  # the newest view formed when the journal was lost: perhaps unheard of
        self.forgotten = False  # the coordinator has lost the journal and still learns
        self.completed = False
        self.commits = 0
        self.owners: dict[tuple[int, int], tuple[WorkerId, ...]] = {}  # by view and step
        self.counted: dict[tuple[int, int], tuple[int, ...]] = {}  # the same: ranks
        self.stored = StoredCheckpoints()
        self.known_doubts: Invalidations = ()  # what any worker has known of
        self.drops: dict[tuple[int, int], bool] = {}  # sums that left out late results
        self.again: dict[tuple[int, int], bool] = {}  # steps that a view computes again
        self.count: Counter[str] = Counter()  # number of events, by kind
        self.rows = LostRows()
        self.reaches: Callable[[AgentId], bool] = lambda agent: True  # by the world

    def start(self) -> None:
        """Run the whole job without faults."""
        self.compute_rest(0, expected_sum(INITIAL_STATE, 0, self.vranks))
        self.errors.start()

    def compute_rest(self, step: int, total: int) -> None:
        """Compute the rest of the job from the sum of one step."""
        del self.sums[step:], self.states[step + 1 :]
        for later in range(step, self.steps):
            state = self.states[-1]
            self.sums.append(expected_sum(state, later, self.vranks) if later > step else total)
            self.states.append(apply(state, later, self.sums[-1]))

    # ------------------------------------------------------------ processes

    def record_start(self, process: Actor) -> None:
        key = process.key
        if key in self.processes:
            raise Violation(f"worker {key[0]} was started twice as incarnation {key[1]}")
        forgotten = self.disk is not None and self.disk.forgotten
        of_worker = self.live_of.setdefault(int(process.worker), [])
        for other in of_worker:
            # A coordinator without its journal may give a number twice, to nodes unknown to it.
            if other.agent == process.agent or not forgotten:
                raise Violation(f"two processes of worker {key[0]} live: {other.key}, {key}")
        self.promises.check_start(process, self.live.values())
        of_worker.append(process)
        self.processes[key] = process
        self.live[key] = process

    def record_end(self, process: Actor) -> None:
        del self.live[process.key]
        self.live_of[int(process.worker)].remove(process)
        self.leading.pop(process.key, None)
        self.errors.record_end(process)
        self.count["died"] += 1

    def check_script_end(self, process: Actor) -> None:
        """Check that a script that ran to its end holds the result of the job."""
        wrong = process.state != self.states[process.until] and not self.errors.hidden
        if process.step != process.until or wrong:
            steps = f"{process.step} of {process.until}"
            raise Violation(f"worker {process.key} finished at step {steps}")
        self.errors.check_script_end()
        self.completed = True
        if self._options.backup.workers:
            self.errors.hidden = True  # the others may drop different results in the last steps

    def check_release(self, process: Actor, loop: int) -> None:
        """Check that a worker may leave a loop that has ended."""
        self.promises.check_release(process, loop, self.views.get(self.newest))

    def look(self, now: float, disturbed_until: float) -> None:
        """Check that the job goes on, unless it ends."""
        disk = self.disk
        if not self.endings.is_ending and disk is not None and disk.outcome is None:
            running = (p for _, p in sorted(self.live.items()) if not p.ailing)
            ordered = [p for p in running if self.ordered.get(p.worker) == p.key[1]]
            self.quiet_times.look(now, disturbed_until, self.views.get(self.newest), ordered)

    def check_outcome(self, outcome: str, now: float) -> None:
        """Check what the coordinator says at the end of the job."""
        self.promises.check_outcome(self.live.values(), now)
        self.endings.check_outcome(outcome, now)

    def check_replacement(self, worker: int) -> None:
        """Check that something is wrong with the process of a worker that counts as hung."""
        for process in self.live.values():
            if process.worker == worker and not process.ailing:
                raise Violation(f"worker {process.key} is replaced as hung: nothing ails it")

    # ------------------------------------------------------------ membership

    def check_record(self, record: JobRecord, now: float) -> None:
        if self.disk is not None and self.disk.term > record.term:
            raise Violation("a deposed coordinator wrote to the journal")
        if self.disk is not None and not self.forgotten:
            self.promises.check_remembered(self.disk, record)
        self.disk, self.forgotten = record, False
        if record.view is not None:
            self._check_view(record.view, now)  # judged by the orders before this record
        if record.slots is not self._slots:
            self.promises.check_orders(record, now)
            self._slots = record.slots
            self.ordered = {int(s.worker): int(s.incarnation) for s in record.slots}

    def check_directive(self, directive: Directive, now: float) -> None:
        """Check that the coordinator only says what is durable."""
        if self.forgotten:
            return
        for each in directive.wanted:
            worker, incarnation = each.worker, each.incarnation
            if self.ordered.get(worker, 0) < incarnation:
                raise Violation(f"worker {worker}.{incarnation} was ordered before it was durable")
        view = directive.view
        if view is None:
            return
        self._check_view(view, now)
        kept = self.disk.view if self.disk else None
        if kept is None or kept.number < view.number:
            raise Violation(f"view {view.number} was sent before it was durable")

    def _check_view(self, view: View, now: float) -> None:
        known = self.views.get(view.number)
        if known is not None:
            if known is not view and known != view:
                raise Violation(f"two views are numbered {view.number}: {known} and {view}")
            return
        if view.number <= self.newest:
            raise Violation(f"view {view.number} was formed after view {self.newest}")
        for member in view.members:
            if (member.worker, member.incarnation) not in self.processes:
                raise Violation(f"view {view.number} has a member that was never started: {member}")
        before = self.views.get(self.newest)
        self.promises.check_view(before, view, now)
        self.views[view.number] = view
        self.newest = view.number
        for member in before.members if before else ():
            process = self.processes[(member.worker, member.incarnation)]
            if before is None or not process.alive:
                continue
            if process.paused and not process.spread.is_whole:
                continue  # it can commit nothing
            status = process.machine.snapshot()
            shares = self._options.shard_optimizer
            if shares and view.donors and process.step < self._options.steps:
                raise Violation(f"worker {process.key} goes on with its share of the state only")
            holds = status.has_state and not view.donors and not self._is_state_discarded(before)
            holds = holds and not shares
            if process.paused or is_out_of_time(process):
                if holds and not (self.disk is not None and self.disk.forgotten):
                    self.promises.check_given_up(view, process, now)
                continue
            if self.disk is not None and self.disk.forgotten and status.view < before.number:
                continue  # a view that was lost with the journal before anybody heard of it
            if status.promised < before.number:
                raise Violation(
                    f"view {view.number} was formed while worker {process.key} can still act in "
                    f"view {before.number}"
                )
            if holds:
                raise Violation(f"starting again although worker {process.key} holds the state")
        from_store = view.recall is None or not view.recall.view
        if not view.donors and view.base and from_store:
            if not self.stored.was_saved(view.base) and not view.invalidations:
                raise Violation(f"view {view.number} begins from a checkpoint that nobody saved")
        if not view.donors:
            if before is not None and self._are_rows_of_no_use(before):
                self.memories.record_useless_states(before.number)
            self.memories.check_new_beginning(
                view,
                lambda a: self.reaches(a) and not self.promises.is_given_up(a, now),
            )
            self.errors.check_view_beginning(view)
            if self._options.backup.workers:
                step = view.resume_step
                self.compute_rest(step, expected_sum(self.states[step], step, self.vranks))
        for fed in view.fed:
            follower = self.processes[fed.worker, fed.incarnation]
            if follower.feeds.is_wrong and not self.errors.hidden:
                raise Violation(f"worker {fed.worker} joins with something wrong that it was fed")
        self._check_balance(view)
        self.spare_rules.check_view(view)
        self.memories.record_view(view)
        self.rows.record_view(view)

    def _are_rows_of_no_use(self, view: View) -> bool:
        """Return whether servers lack the rows of the states that the nodes' memory has of a view.

        Servers keep the rows of the newest step only. If the members' states are discarded, these
        rows were updated from something wrong: then only a checkpoint has the rows of older steps.
        """
        discarded = self._options.servers > 0 and self._is_state_discarded(view)
        return discarded or self.rows.are_lost(view.number)

    def _is_state_discarded(self, view: View) -> bool:
        """Return whether a member knows that no member's state can be trusted."""
        members = (self.processes[(m.worker, m.incarnation)] for m in view.members)
        return any(member.machine.snapshot().discarded for member in members)

    def check_status(self, process: Actor, before: WorkerStatus, status: WorkerStatus) -> None:
        """Check what a worker tells its agent of itself."""
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
        keys = process.group.keys if process.group is not None else ()
        if any(self.processes[key].spoiling.lied_in < process.step for key in keys):
            raise Violation("deterministic machines are taken for others")
        self.errors.hidden = self.errors.compares_nothing = True  # all of them were wrong

    def _record_doubts(self, process: Actor, invalidations: Invalidations) -> None:
        """Record the errors that members know; those that a view reports to joiners are old."""
        news = [each for each in invalidations if not is_covered(each, self.known_doubts)]
        self.known_doubts = merge(self.known_doubts, news)
        if news and process.group is not None:
            self.errors.record_notice(process.group.keys)

    def _check_saved(self, process: Actor, step: int) -> None:
        """Check that a checkpoint exists which a worker says is saved."""
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
        if flipped is not None and len(self.views[self.stored.saved_in[step]].members) == 1:
            self.errors.hidden = True  # nobody else was there to notice
        if self._options.backup.workers:  # it may be of a history in which other tasks were dropped
            self.states[step] = state or 0
            self.compute_rest(step, expected_sum(self.states[step], step, self.vranks))
        if (state, flipped) != (self.states[step], None) and not self.errors.hidden:
            raise Violation(f"the checkpoint of step {step} has other contents")
        return state or 0, flipped

    def _check_balance(self, view: View) -> None:
        owned = sum(map(len, view.list_hosted().values()))
        if len(view.owners) != self.vranks or owned != self.vranks:
            raise Violation(f"view {view.number} hosts {owned} of {self.vranks} virtual ranks")
        check_neighbours(view)

    def check_install(self, process: Actor, view: View, before: int, promised: int) -> None:
        """Check a view when a worker builds its group; `promised`: the view it promised before."""
        if promised >= view.number:
            raise Violation(f"worker {process.key} installs view {view.number}: it gave that up")
        if process.group is not None and process.group.open:
            raise Violation(f"worker {process.key} leaves view {process.group.number} unaborted")
        if self.views.get(view.number) != view:
            raise Violation(f"worker {process.key} installs a view that was never formed: {view}")
        if view.number <= before:
            raise Violation(f"worker {process.key} goes from view {before} back to {view.number}")
        if view.member(process.worker) is None:
            raise Violation(f"worker {process.key} installs view {view.number} of others")
        keys = ((member.worker, member.incarnation) for member in view.members)
        if all(self.processes[key].spoiling.lacks for key in keys if key in self.processes):
            self.errors.hidden = True  # no live worker has the state that the script kept
        lost = sorted(set(process.tokens) - set(view.hosted_by(process.worker)))
        in_step = process.open_step == process.machine.snapshot().committed == view.resume_step
        late = view.is_late(process.worker)
        if in_step and lost and not late:  # its results are in sums by now
            raise Violation(f"worker {process.key} loses virtual ranks {lost} in mid-step")

    # ------------------------------------------------------------ content

    def check_donation(self, process: Actor, view: View) -> None:
        if not process.at_rest:
            raise Violation(f"worker {process.key} donates in the middle of a step")
        if process.state != self.states[view.resume_step] and not self.errors.hidden:
            raise Violation(f"worker {process.key} donates a state that is not the job's")

    def check_staging(self, process: Actor, step: int) -> None:
        """Check what a member copies for workers that follow: the job's state, at rest."""
        if not process.at_rest or process.step != step:
            raise Violation(f"worker {process.key} copies its state in the middle of a step")
        if process.state != self.states[step] and not self.errors.hidden:
            raise Violation(f"worker {process.key} copies a state that is not the job's")
        self.count["staged"] += 1

    def check_hosts(self, view: int, step: int, owners: tuple[WorkerId, ...]) -> None:
        """Check that all members of a view agree who hosts what in a step."""
        known = self.owners.setdefault((view, step), owners)
        if known != owners:
            raise Violation(f"in view {view} two assignments hold for step {step}")

    def check_reduce(self, view: View, reduce: Reduce) -> None:
        """Check that all members of a view sum a step alike: who hosts what, and who counts."""
        self.check_hosts(view.number, reduce.step, reduce.owners)
        self.spare_rules.check_hosts(view, reduce.step, reduce.owners)
        counted = tuple(reduce.counted)
        if self.counted.setdefault((view.number, reduce.step), counted) != counted:
            raise Violation(f"in view {view.number} step {reduce.step} counts other members")

    def check_adoption(self, process: Actor, vrank: int) -> None:
        """Check a speculative task that becomes a worker's own: it is there, once, and hosted."""
        self.count["adopted"] += 1
        view = process.exchanges.view
        hosts = view is not None and process.worker == view.owners[vrank]
        if vrank not in process.copies or vrank in process.tokens or not hosts:
            raise Violation(f"worker {process.key} adopts virtual rank {vrank} wrongly")

    def check_copy(self, process: Actor, step: int, vrank: int) -> None:
        """Check that whoever owns a task that is copied was seen to be late with it."""
        view = process.exchanges.view
        if view is None or process.exchanges.looked != (view.number, step):
            raise Violation(f"worker {process.key} copies virtual rank {vrank} without a look")

    def check_contradictions(self, process: Actor, step: int, parts: Parts) -> None:
        """Check that no wrong sum is committed if a sound worker has computed another one."""
        if process.spoiling.is_spoiled or self.errors.hidden or "poison" in self._options.faults:
            return
        for sender, vrank, token in parts:
            unlike = process.copies.get(vrank, token) != token
            if unlike and token not in (DROPPED, task(self.states[step], step, vrank)):
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
            right = digest[0] == self.states[view.resume_step] or self.errors.hidden
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
                self.drops[step, total] = True
            elif token != task(self.states[step], step, vrank):
                self.errors.check_used(view, step, sender, vrank, token)
            seen[vrank] = sender
        if len(seen) != self.vranks:
            raise Violation(f"step {step} is summed from {len(seen)} of {self.vranks} vranks")
        counted = {sender for sender, _, token in parts if token != DROPPED}
        self._check_left_out(view, step, len(counted), {sender for sender, _, _ in parts})

    def _check_left_out(self, view: View, step: int, counted: int, hosts: set[Key]) -> None:
        """Check that a step leaves out the results of no more members than allowed."""
        needed = self._options.backup.needed_members(len(view.members))
        if counted < needed - (len(view.members) - len(hosts)):
            raise Violation(f"step {step} counts {counted} members of {len(view.members)}")

    def check_opening(self, process: Actor, step: int) -> None:
        """Check that a script begins to compute the step that its state is of."""
        if process.step != step:
            raise Violation(
                f"worker {process.key} opens step {step}, its state is of {process.step}"
            )

    def record_copy(self, step: int) -> None:
        """Record that a share of the state was copied: the next step checks the whole state."""
        self.errors.record_comparison(step)

    def count_repeat(self, process: Actor) -> None:
        """Count that a worker computes its step once more."""
        self.count["redone"] += 1

    def check_vote(self, process: Actor, step: int, by_vote: bool) -> None:
        """Check the committing of a step that a worker learns of and has yet to apply."""
        if by_vote and process.machine.snapshot().view < self.newest:
            raise Violation(
                f"worker {process.key} commits step {step} by a vote of view "
                f"{process.machine.snapshot().view} although view {self.newest} was formed"
            )
        parts, view = process.exchanges.parts, self.views.get(process.machine.snapshot().view)
        if by_vote and view is not None:
            self.promises.check_vote(view, step)
        replays = view is not None and view.recall is not None and step < view.resume_step
        if view is not None and not replays and not view.feeds(process.worker):
            summed_in = process.exchanges.summed_in if process.total_step == step else None
            self.memories.record_commit(process.agent, step, summed_in or view)
        if view is not None and process.total_step == step and parts and process.total is not None:
            summed_in = process.exchanges.summed_in or view
            if len(summed_in.members) == 1 and process.exchanges.wrongly:
                self.errors.hidden = True  # nobody else was there to sum it
            if by_vote:
                self.check_contradictions(process, step, parts)
            self.check_sum(summed_in, step, parts, process.total)

    def check_commit(self, process: Actor, step: int, total: int | None, now: float) -> None:
        """Check that a worker applies a step of the job, and to the right state."""
        self.quiet_times.record_commit(now)
        self.commits += 1
        self.endings.record_commit(step)
        self.check_suspended(process, step)
        if step >= self.steps:
            raise Violation(f"worker {process.key} commits step {step} of {self.steps}")
        self.errors.check_commit(process, step, total)
        if process.state != self.states[step] and not self.errors.hidden:
            raise Violation(f"worker {process.key} applies step {step} to another state")

    def check_suspended(self, process: Actor, step: int) -> None:
        """Check that a worker that was suspended comes back, or is replaced."""
        view = self.views.get(process.machine.snapshot().view)
        for lag in view.suspended if view is not None else ():
            key = (int(lag.worker), int(lag.incarnation))
            wanted = self.ordered.get(key[0]) == key[1] and self.processes[key].alive
            if wanted and step - lag.committed > STEPS_MISSED_MAX + STEPS_UNHEARD:
                raise Violation(f"worker {key} was suspended in step {lag.committed} and forgotten")

    def check_beginning(self, process: Actor) -> None:
        """Check that a vote that announces a change is the last of its view, for everyone."""
        if process.machine.snapshot().view == process.last_step_of:
            raise Violation(f"worker {process.key} begins another step after an announced change")

    def check_applied_state(self, process: Actor) -> None:
        """Check a step that is applied, unless the job has gone back to before it meanwhile."""
        given_up = is_invalidated(self.known_doubts, process.step, process.machine.snapshot().view)
        right = process.state == self.states[process.step] or given_up
        if not right and not self.errors.hidden:
            raise Violation(f"worker {process.key} diverged at step {process.step}")

    def check_waking(self, process: Actor) -> None:
        """Check that a paused worker that its agent lets go on acts in no view of the past."""
        status = process.machine.snapshot()
        if self.newest > status.view > status.promised:
            raise Violation(f"worker {process.key} wakes in view {status.view} of {self.newest}")
        self.check_leaders(process)

    def check_answer(self, directive: Directive) -> None:
        """Check that a worker that asks after a view was formed is told of it: linearizability."""
        if directive.view_number < self.newest and self.newest > self.newest_lost:
            raise Violation(f"view {self.newest} was formed, {directive.view_number} was answered")

    def check_leaders(self, process: Actor) -> None:
        """Check after every event of a worker that no two workers believe that they lead."""
        machine = process.machine
        leads = machine.leads(process.host.clock()) and not process.paused
        if not leads:
            self.leading.pop(process.key, None)
            return
        self.leading[process.key] = machine.snapshot().view
        for key in list(self.leading):
            other = self.processes[key]
            if other.paused or not other.machine.leads(other.host.clock()):
                del self.leading[key]  # its time ran out, or its agent stopped it
        if len(self.leading) > 1:
            raise Violation(f"several leaders: {self.leading}")

"""Checks the members of a simulated job: its processes, the journal's record, views, and proofs.

It compares the coordinator's orders and views with the processes that really live, and with the
record on the coordinator's disk. A proof of the right to act shows that all members of a view acted
in it since some moment. The bytes that leave a machine, a rack or a zone are few only if each of
them hosts one block of virtual ranks.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import groupby
from typing import Protocol

from holdfast.engine.core.directives import Directive
from holdfast.engine.core.domains import Path
from holdfast.engine.core.ground.events import Row
from holdfast.engine.core.ground.vote import Vote
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.memories import LostRows, Memories
from holdfast.lab.sim.promises import Promises
from holdfast.lab.sim.quiet_times import QuietTimes
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.stored import StoredCheckpoints
from holdfast.lab.sim.wrong_bits import Errors, History, Violation


def is_out_of_time(process: Actor) -> bool:
    """Return whether its right to act has ended by its own clock, which it reads before it acts."""
    return process.host.clock() >= process.machine.acting_until


class Processes:
    """Knows all processes of workers that were ever started, and which of them live and lead."""

    def __init__(self) -> None:
        self.started: dict[Key, Actor] = {}
        self.live: dict[Key, Actor] = {}
        self.leading: dict[Key, int] = {}
        self._live_of: dict[int, list[Actor]] = {}  # by worker

    def check_new(self, process: Actor, forgotten: bool) -> None:
        """Check that a process is new; `forgotten`: the coordinator has lost its journal before."""
        key = process.key
        if key in self.started:
            raise Violation(f"worker {key[0]} was started twice as incarnation {key[1]}")
        for other in self._live_of.get(int(process.worker), ()):
            # A coordinator without its journal may give a number twice, to nodes unknown to it.
            if other.agent == process.agent or not forgotten:
                raise Violation(f"two processes of worker {key[0]} live: {other.key}, {key}")

    def add(self, process: Actor) -> None:
        """Record that a process starts."""
        self._live_of.setdefault(int(process.worker), []).append(process)
        self.started[process.key] = process
        self.live[process.key] = process

    def remove(self, process: Actor) -> None:
        """Record that a process ends."""
        del self.live[process.key]
        self._live_of[int(process.worker)].remove(process)
        self.leading.pop(process.key, None)

    def check_replacement(self, worker: int) -> None:
        """Check that something is wrong with the process of a worker that counts as hung."""
        for process in self.live.values():
            if process.worker == worker and not process.health.ailing:
                raise Violation(f"worker {process.key} is replaced as hung: nothing ails it")

    def check_waking(self, process: Actor, newest: int) -> None:
        """Check that a paused worker that its agent resumes acts in no view before the newest."""
        status = process.machine.snapshot()
        if newest > status.view > status.promised:
            raise Violation(f"worker {process.key} wakes in view {status.view} of {newest}")
        self.check_leaders(process)

    def check_leaders(self, process: Actor) -> None:
        """Check after every event of a worker that no two workers believe that they lead."""
        machine = process.machine
        leads = machine.leads(process.host.clock()) and not process.paused
        if not leads:
            self.leading.pop(process.key, None)
            return
        self.leading[process.key] = machine.snapshot().view
        for key in list(self.leading):
            other = self.started[key]
            if other.paused or not other.machine.leads(other.host.clock()):
                del self.leading[key]  # its time ran out, or its agent stopped it
        if len(self.leading) > 1:
            raise Violation(f"several leaders: {self.leading}")


class Parts(Protocol):
    """Has the parts of the truth about a run that views depend on."""

    history: History
    errors: Errors
    promises: Promises
    memories: Memories
    quiet_times: QuietTimes
    stored: StoredCheckpoints
    rows: LostRows


class ViewChecks:
    """Observes the journal, the directives and the views of one run; raises Violation."""

    def __init__(self, truth: Parts, processes: Processes, options: Options) -> None:
        self._truth = truth
        self._history = truth.history
        self._errors = truth.errors
        self._processes = processes
        self._options = options
        self.views: dict[int, View] = {}
        self.newest = 0
        # By worker: the incarnation that the journal orders.
        self.ordered: dict[int, int] = {}
        # The slots in the journal, when last checked.
        self._slots: object = ()
        first = options.counts_from
        self.disk = JobRecord(term=first, views_used=ViewNumber(first)) if first else None
        # The newest view formed when the journal was lost: perhaps no worker has received it.
        self.newest_lost = 0
        # Whether the coordinator has lost the journal and still learns.
        self.forgotten = False
        # Whether the coordinator's host reaches a node: set by the world.
        self.reaches: Callable[[AgentId], bool] = lambda agent: True

    @property
    def newest_view(self) -> View | None:
        return self.views.get(self.newest)

    @property
    def has_forgotten(self) -> bool:
        """Return whether a coordinator has lost the journal before the present record."""
        return self.disk is not None and self.disk.forgotten > 0

    def check_record(self, record: JobRecord, now: float) -> None:
        if self.disk is not None and self.disk.term > record.term:
            raise Violation("a deposed coordinator wrote to the journal")
        if self.disk is not None and not self.forgotten:
            self._truth.promises.check_remembered(self.disk, record)
        self.disk, self.forgotten = record, False
        if record.view is not None:
            self._check_view(record.view, now)  # judged by the orders before this record
        if record.slots is not self._slots:
            self._truth.promises.check_orders(record, now)
            self._slots = record.slots
            self.ordered = {int(s.worker): int(s.incarnation) for s in record.slots}

    def check_directive(self, directive: Directive, now: float) -> None:
        """Check that the coordinator only sends durable decisions."""
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
            if (member.worker, member.incarnation) not in self._processes.started:
                raise Violation(f"view {view.number} has a member that was never started: {member}")
        before = self.newest_view
        self._truth.promises.check_view(before, view, now)
        self.views[view.number] = view
        self.newest = view.number
        if before is not None:
            self._check_left(before, view, now)
        if not view.donors:
            self._check_new_beginning(before, view, now)
        for fed in view.fed:
            follower = self._processes.started[fed.worker, fed.incarnation]
            if follower.feeds.is_wrong and not self._errors.hidden:
                raise Violation(f"worker {fed.worker} joins with something wrong that it was fed")
        self._check_balance(view)
        self._truth.quiet_times.spare_rules.check_view(view)
        self._truth.memories.record_view(view)
        self._truth.rows.record_view(view)

    def _check_left(self, before: View, view: View, now: float) -> None:
        """Check that no member can still act in the view before, or holds a state that is lost."""
        for member in before.members:
            process = self._processes.started[(member.worker, member.incarnation)]
            if not process.alive:
                continue
            if process.paused and not process.spread.is_whole:
                # It can commit no step.
                continue
            status = process.machine.snapshot()
            shares = self._options.shard_optimizer
            if shares and view.donors and process.work.step < self._options.steps:
                raise Violation(f"worker {process.key} goes on with its share of the state only")
            holds = status.has_state and not view.donors and not self._is_state_discarded(before)
            holds = holds and not shares
            if process.paused or is_out_of_time(process):
                if holds and not self.has_forgotten:
                    self._truth.promises.check_given_up(view, process, now)
                continue
            if self.has_forgotten and status.view < before.number:
                # The view was lost with the journal before any worker received it.
                continue
            if status.promised < before.number:
                raise Violation(
                    f"view {view.number} was formed while worker {process.key} can still act in "
                    f"view {before.number}"
                )
            if holds:
                raise Violation(f"starting again although worker {process.key} holds the state")

    def _check_new_beginning(self, before: View | None, view: View, now: float) -> None:
        """Check a view whose members begin from a checkpoint, from memory, or from the start."""
        from_store = view.recall is None or not view.recall.view
        if view.base and from_store:
            if not self._truth.stored.was_saved(view.base) and not view.invalidations:
                raise Violation(f"view {view.number} begins from a checkpoint that nobody saved")
        if before is not None and self._are_rows_of_no_use(before):
            self._truth.memories.record_useless_states(before.number)
        self._truth.memories.check_new_beginning(
            view,
            lambda a: self.reaches(a) and not self._truth.promises.is_given_up(a, now),
        )
        self._errors.check_view_beginning(view)
        if self._options.backup.workers:
            self._history.compute_from(view.resume_step)

    def _are_rows_of_no_use(self, view: View) -> bool:
        """Return whether servers lack the rows of the states that the nodes' memory has of a view.

        Servers keep the rows of the newest step only. If the members' states are discarded, these
        rows were updated from something wrong: then only a checkpoint has the rows of older steps.
        """
        discarded = self._options.servers > 0 and self._is_state_discarded(view)
        return discarded or self._truth.rows.are_lost(view.number)

    def _is_state_discarded(self, view: View) -> bool:
        """Return whether a member knows that no member's state can be trusted."""
        members = (self._processes.started[(m.worker, m.incarnation)] for m in view.members)
        return any(member.machine.snapshot().discarded for member in members)

    def _check_balance(self, view: View) -> None:
        owned = sum(map(len, view.list_hosted().values()))
        vranks = self._history.vranks
        if len(view.owners) != vranks or owned != vranks:
            raise Violation(f"view {view.number} hosts {owned} of {vranks} virtual ranks")
        check_neighbours(view)

    def check_install(self, process: Actor, view: View, before: int, promised: int) -> None:
        """Check a view when a worker builds its group; `promised`: the view it promised before."""
        if promised >= view.number:
            raise Violation(f"worker {process.key} installs view {view.number}: it gave that up")
        if process.tie.group is not None and process.tie.group.open:
            raise Violation(
                f"worker {process.key} leaves view {process.tie.group.number} unaborted"
            )
        if self.views.get(view.number) != view:
            raise Violation(f"worker {process.key} installs a view that was never formed: {view}")
        if view.number <= before:
            raise Violation(f"worker {process.key} goes from view {before} back to {view.number}")
        if view.member(process.worker) is None:
            raise Violation(f"worker {process.key} installs view {view.number} of others")
        keys = ((member.worker, member.incarnation) for member in view.members)
        started = [self._processes.started[key] for key in keys if key in self._processes.started]
        if all(each.spoiling.lacks for each in started):
            self._errors.hidden = True  # no live worker has the state that the script kept
        lost = sorted(set(process.work.tokens) - set(view.hosted_by(process.worker)))
        in_step = process.work.open_step == process.machine.snapshot().committed == view.resume_step
        late = view.is_late(process.worker)
        if in_step and lost and not late:  # its results are in sums by now
            raise Violation(f"worker {process.key} loses virtual ranks {lost} in mid-step")

    def check_answer(self, directive: Directive) -> None:
        """Check that a worker that asks after a view was formed receives it: linearizability."""
        if directive.view_number < self.newest and self.newest > self.newest_lost:
            raise Violation(f"view {self.newest} was formed, {directive.view_number} was answered")


def check_neighbours(view: View) -> None:
    """Check a new view: machines and failure domains host one block of virtual ranks each.

    Views that begin in the middle of a step are exempt, since results would be lost. So are views
    with fed members: blocks are cut again once these have voted.
    """
    if not view.joiners or view.fed:
        return
    paths = [view.paths[owner] for owner in view.owners]
    for depth in range(1, max(map(len, paths)) + 1):
        if twice := find_scattered(paths, depth):
            raise Violation(f"view {view.number}: {twice} hosts several blocks of virtual ranks")


def find_scattered(paths: Sequence[Path], depth: int) -> Path | None:
    """Find a machine or domain that hosts several blocks.

    `paths`: where the host of each virtual rank is. `depth`: how many names of a path count.
    """
    blocks = [near for near, _ in groupby(path[:depth] for path in paths)]
    known: set[Path] = set()
    for near in blocks:
        if near in known:
            return near
        known.add(near)
    return None


@dataclass(slots=True)
class _Ceased:
    """Lists the members of a view that ceased first to act in it: at most two, and since when.

    `looked`: how many of the processes that ceased to act anywhere were looked at.
    """

    looked: int = 0
    first: dict[Key, float] = field(default_factory=dict)


class Proofs:
    """Remembers when processes ceased to act in views; raises Violation for a false proof."""

    def __init__(self, views: Mapping[int, View]) -> None:
        self._views = views
        self._voted: set[tuple[int, int]] = set()  # views and steps
        # By view and step: the members that have given their votes.
        self._given: dict[tuple[int, int], set[Key]] = {}
        # processes in the order in which they ceased: up to which view, and when
        self._ceased: list[tuple[Key, float, float]] = []
        self._by_view: dict[int, _Ceased] = {}

    def record_end(self, key: Key, now: float) -> None:
        """Record that a process ends."""
        self._ceased.append((key, math.inf, now))

    def record_promise(
        self, key: Key, before: WorkerStatus, status: WorkerStatus, now: float
    ) -> None:
        """Record that a process promises not to act any more in some views."""
        if status.promised > before.promised:
            self._ceased.append((key, status.promised, now))

    def record_vote(self, number: int, step: int) -> None:
        """Record that a worker commits a step by the votes of all members of a view."""
        view, given = self._views.get(number), self._given.get((number, step), set())
        if view is not None and len(given) < len(view.members):
            raise Violation(
                f"step {step} is committed in view {number} by {len(given)} votes of "
                f"{len(view.members)} members"
            )
        self._voted.add((number, step))

    def record_given_vote(self, number: int, row: Row, key: Key) -> None:
        """Record that a member begins to spread its vote."""
        vote = Vote.of(row)
        if vote.view != number:
            raise Violation(f"worker {key} votes in view {number} for view {vote.view}")
        self._given.setdefault((number, vote.step), set()).add(key)

    def check_proof(self, key: Key, number: int, step: int, proved_at: float) -> None:
        """Check that no member of a view had ceased to act in it at a moment of the world's time.

        `key`: of the worker that concludes it from a step. From the time when a member ends or
        promises, the coordinator counts until it continues without this worker.
        """
        if (number, step) not in self._voted:
            raise Violation(f"worker {key} takes step {step} for a proof: nobody voted for it")
        view = self._views.get(number)
        if view is None:
            return
        for other, ceased in self._find_first(view, proved_at).items():
            if other != key and ceased < proved_at:
                raise Violation(
                    f"worker {key} takes it for proved that all acted in view {number} at "
                    f"{proved_at:.3f}, but worker {other} had ceased to at {ceased:.3f}"
                )

    def _find_first(self, view: View, before: float) -> dict[Key, float]:
        """Return the members that ceased first, if any did before a time; each is looked at once.

        Two are enough: one of them may be the process that asks.
        """
        found = self._by_view.setdefault(view.number, _Ceased())
        while found.looked < len(self._ceased) and len(found.first) < 2:
            key, up_to, at = self._ceased[found.looked]
            if at >= before:
                break
            found.looked += 1
            if up_to >= view.number and view.includes(WorkerId(key[0]), Incarnation(key[1])):
                found.first.setdefault(key, at)
        return found.first

"""The coordinator's decisions: each rule, with reports as agents would send them."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.engine.core.directives import AgentReport, Directive
from holdfast.engine.core.invalidations import Invalidation
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership import coordinator_events as ce
from holdfast.engine.core.membership.coordinator import SKIPPED, CoordinatorMachine
from holdfast.engine.core.policies import CoordinatorPolicy, RestartPolicy
from holdfast.engine.core.types import RELEASE_ALL, AgentId, Incarnation, Tick, ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import JobEvent, Phase, ReplicaStage, Stage, WorkerStatus
from roster_kit import LEASE, status

POLICY = CoordinatorPolicy(
    virtual_ranks=4,
    nodes_min=2,
    lease=LEASE,
    settle_s=10.0,
    patience_s=1.0,
    grace_s=5.0,
    hang_s=60.0,
    retreats_max=1,
    restart=RestartPolicy(losses_max=3, backoff_s=1.0, strikes_free=2),
)


class Job:
    """Runs a coordinator, and nodes of one worker each, whose reports a test writes."""

    def __init__(
        self,
        *names: str,
        record: JobRecord | None = None,
        forgotten: int = 0,
        now: float = 100.0,
        **fields: Any,
    ) -> None:
        self.now = now
        self.pause_s = 0.001  # between two reports; changes that come faster wait for each other
        policy = dataclasses.replace(POLICY, **fields)
        self.machine = CoordinatorMachine(policy, 7, record, self.now, forgotten)
        self.known: dict[str, WorkerStatus] = {}
        self.told: dict[str, Directive] = {}
        self.done: list[ce.CoordinatorEffect] = []
        self._asks: dict[str, dict[str, Any]] = {}
        self._seq = 0
        for name in names:
            self.hear(name)

    def feed(self, event: ce.CoordinatorEvent) -> list[ce.CoordinatorEffect]:
        effects = self.machine.handle(event, self.now)
        self.machine.check()
        told = [isinstance(e, ce.SendDirective | ce.Finish) for e in effects]
        durable = [isinstance(e, ce.Persist) for e in effects]
        assert not (any(durable) and any(told[: durable.index(True)])), "told before it is durable"
        self.done += effects
        for effect in effects:
            if isinstance(effect, ce.SendDirective):
                self.told[effect.directive.agent] = effect.directive
        return effects

    def hear(self, name: str, *statuses: WorkerStatus, **fields: Any) -> list[Any]:
        self._seq += 1
        self.now += self.pause_s
        told = self.told.get(AgentId(name))
        ending = told is not None and told.shutdown
        values = dict(incarnation=Incarnation(1), seq=self._seq, slots=1, ending=ending)
        values |= self._asks.get(name, {}) | fields
        report = AgentReport(agent=AgentId(name), workers=tuple(statuses), **values)
        return self.feed(ce.ReportArrived(report))

    def node(self, name: str, **asks: Any) -> None:
        """Make a node ask for something, in every report from now on."""
        self._asks[name] = asks
        self.hear(name, self.known[name], view_known=self.number)

    def pass_time(self, until: float) -> None:
        """Tick at every deadline until then; all nodes report in that time."""
        while self.now < until:
            deadline = self.machine.deadline()
            self.now = min(until, self.now + 0.5, max(deadline or until, self.now + 0.001))
            for name in sorted(self.known):
                self.hear(name, self.known[name], view_known=self.number)
            self.feed(Tick())

    def say(self, name: str, worker: int, **fields: Any) -> list[Any]:
        """Report a node's worker to the coordinator."""
        old = self.known.get(name) or status(worker)
        self.known[name] = dataclasses.replace(old, seq=old.seq + 1, **fields)
        return self.hear(name, self.known[name], view_known=self.number)

    @property
    def view(self) -> View | None:
        return self.machine.view

    @property
    def number(self) -> ViewNumber:
        return self.view.number if self.view else ViewNumber(0)

    def announced(self, kind: str) -> list[str]:
        found = [e for e in self.done if isinstance(e, ce.Announce)]
        return [e.text for e in found if e.kind == kind]

    def act(self, *names: str, **fields: Any) -> None:
        """Make the workers of these nodes install the newest view, and act in it."""
        for worker, name in enumerate(names):
            values = dict(view=self.number, state=ReplicaStage.CURRENT, phase=Phase.COMPUTING)
            self.say(name, worker, **(values | dict(reduced=False) | fields))

    def stop(self, *names: str, **fields: Any) -> None:
        """Make these workers give the present view up."""
        for name in names:
            self.say(name, self.known[name].worker, promised=self.number, **fields)


def begun(*names: str, **fields: Any) -> Job:
    """Return a job whose workers act in its first view."""
    job = Job(*names, **fields)
    for worker, name in enumerate(names):
        job.say(name, worker)
    assert job.view is not None
    job.act(*names)
    return job


# ---------------------------------------------------------------- the beginning


def test_the_job_starts_once_all_are_ready_and_decisions_are_durable_first() -> None:
    job = Job("a", "b")
    assert [[w.worker for w in job.told[n].wanted] for n in ("a", "b")] == [[0], [1]]
    job.say("a", 0)
    assert job.view is None
    job.say("b", 1)
    assert job.view is not None
    assert (job.view.number, job.view.workers, job.view.joiners) == (1, (0, 1), (0, 1))
    assert job.told["a"].view == job.told["b"].view == job.view
    records = [e.record for e in job.done if isinstance(e, ce.Persist)]
    assert records[-1].view == job.view
    assert (records[-1].views_used, records[-1].term) == (1, 7)
    assert records[-1] == job.machine.snapshot().record
    assert job.announced("view") == ["view 1: workers 0, 1; the job starts"]


def test_fewer_nodes_than_needed_do_not_begin_and_the_missing_are_waited_for_so_long() -> None:
    job = Job("a")
    job.say("a", 0)
    job.pass_time(150.0)
    assert job.view is None
    job.hear("b")
    job.known["b"] = status(1, stage=Stage.BOOTING)
    assert job.view is None
    job.pass_time(161.0)
    assert job.view is not None
    assert job.view.workers == (0,)


def test_a_directive_says_all_and_a_view_only_to_whom_it_is_new() -> None:
    job = begun("a", "b")
    told = job.told["a"]
    assert (told.term, told.agent_incarnation, told.view_number) == (7, 1, 1)
    assert (told.undecided, told.shutdown, told.save_wanted) == (False, False, 0)
    assert told.view is None  # it has reported the view
    (answer,) = job.hear("b", job.known["b"])
    assert answer.directive.view == job.view
    assert answer.directive.heard == job._seq
    assert answer.directive.seq > told.seq
    assert job.hear("b", job.known["b"], seq=1) == []  # an old report is not answered


# ---------------------------------------------------------------- losses


def test_a_loss_stops_the_view_and_the_next_is_formed_when_all_have_promised() -> None:
    job = begun("a", "b")
    job.say("b", 1, stage=Stage.LOST, detail="signal 9")
    assert job.told["a"].stop_view == 1
    assert job.number == 1
    assert job.announced("lost") == ["worker 1 was lost: signal 9"]
    assert [w.incarnation for w in job.told["b"].wanted] == [2]
    job.stop("a")
    assert job.view is not None
    assert (job.number, job.view.workers, job.view.owners) == (2, (0,), (0, 0, 0, 0))
    assert job.told["a"].view == job.view
    assert len(job.announced("stop_view")) == 1


def test_a_worker_that_is_ready_again_joins_at_a_boundary() -> None:
    job = begun("a", "b")
    job.say("b", 1, stage=Stage.LOST)
    job.stop("a")
    job.act("a")
    job.known["b"] = status(1, 2)
    job.say("b", 1)
    assert job.told["a"].pending_view == 2
    assert job.told["a"].stop_view == 1
    assert job.announced("join") == ["worker 1 joins at the next step boundary"]
    job.stop("a", committed=3, phase=Phase.BOUNDARY)
    assert job.view is not None
    assert (job.number, job.view.joiners, job.view.resume_step) == (3, (1,), 3)
    assert job.machine.snapshot().step == 3


def test_too_many_losses_without_a_step_end_the_job_and_a_step_forgives_them() -> None:
    for steps in (False, True):
        job = begun("a", "b")
        for n in range(4):
            incarnation = next(s for s in job.machine.snapshot().record.slots if s.worker == 1)
            job.known["b"] = status(1, incarnation.incarnation, stage=Stage.LOST, detail="x")
            job.say("b", 1)
            job.pass_time(job.now + 5.0)
            if steps:
                job.say("a", 0, committed=10 + n)
        ended = job.machine.outcome
        assert (ended is None) is steps
    assert len(job.announced("lost")) == 4


def test_a_failed_script_ends_the_job_with_its_first_worker_and_nothing_runs_on() -> None:
    job = begun("a", "b")
    job.say("b", 1, stage=Stage.FAILED, detail="ValueError: b")
    assert job.machine.outcome == "worker 1 failed: ValueError: b"
    assert job.told["a"].shutdown
    assert job.told["a"].wanted == ()
    assert not any(isinstance(e, ce.Finish) for e in job.done)
    job.say("a", 0, stage=Stage.LOST)
    # Node b may have begun the work of its directive.
    assert not any(isinstance(e, ce.Finish) for e in job.done)
    job.say("b", 1)
    (finish,) = [e for e in job.done if isinstance(e, ce.Finish)]
    assert finish.outcome == job.machine.outcome
    job.feed(Tick())
    assert job.machine.snapshot().finished
    assert len([e for e in job.done if isinstance(e, ce.Finish)]) == 1


def test_when_all_keep_still_while_somebody_waits_the_others_are_replaced() -> None:
    job = begun("a", "b")
    job.say("a", 0, phase=Phase.WAITING, hosted=(0,))
    job.pass_time(100.0 + POLICY.hang_s - 1.0)
    assert job.announced("replaced") == []
    job.pass_time(100.0 + POLICY.hang_s + 1.0)
    assert job.announced("replaced") == ["worker 1 is replaced: hung for 60 s"]
    assert [w.incarnation for w in job.told["b"].wanted] == [2]
    full, calm = begun("a", "b"), begun("a", "b")
    full.say("b", 1, phase=Phase.BOUNDARY, no_room=True)
    full.say("a", 0, phase=Phase.WAITING, hosted=(0,))
    full.pass_time(100.0 + 2 * POLICY.hang_s)
    # where no worker waits, a script may take as long as it likes
    calm.say("a", 0, phase=Phase.WAITING)  # a worker that hosts no task is always waiting
    calm.pass_time(100.0 + 2 * POLICY.hang_s)
    assert full.announced("replaced") == calm.announced("replaced") == []


def test_a_silent_node_stops_the_view_and_is_gone_a_lease_after_the_witness() -> None:
    job = begun("a", "b")
    silent_from = job.now
    del job.known["b"]
    job.pass_time(silent_from + LEASE.suspect_s - 0.1)
    assert job.announced("stop_view") == []
    job.pass_time(silent_from + LEASE.suspect_s + 0.1)
    assert job.announced("stop_view") == [
        "view 1 is stopped: node b has not been heard for a while"
    ]
    assert_gone_a_lease_after_the_witness(job)


def test_a_witness_of_an_older_view_says_nothing_of_the_next() -> None:
    job = begun("a", "b", "c", nodes_max=3)
    job.say("b", 1, stage=Stage.LOST, detail="signal 9")  # a witness of view 1
    job.stop("a", "c")
    assert job.number == 2
    assert job.view is not None
    assert job.view.workers == (0, 2)
    for worker, name in ((0, "a"), (2, "c")):
        fields = dict(view=job.number, state=ReplicaStage.CURRENT, phase=Phase.COMPUTING)
        job.say(name, worker, **fields)
    silent_from = job.now
    del job.known["b"], job.known["c"]
    job.pass_time(silent_from + 3 * LEASE.fence_s)  # votes may have proved the right to act
    assert_gone_a_lease_after_the_witness(job)


def assert_gone_a_lease_after_the_witness(job: Job) -> None:
    """Stop node a from acting in the view; the next view forms a lease later, no sooner."""
    number, witness_at = job.number, job.now
    job.stop("a")
    job.pass_time(witness_at + LEASE.fence_s - 0.1)
    assert job.number == number
    job.pass_time(witness_at + LEASE.fence_s + 0.1)
    assert job.number == number + 1


# ---------------------------------------------------------------- what is wrong


def test_a_worker_that_the_network_does_not_reach_is_left_out() -> None:
    job = begun("a", "b")
    job.stop("a", unreached=(WorkerId(1),))
    job.stop("b", unreached=(WorkerId(0),))
    assert job.view is not None
    assert job.view.workers == (0,)
    (text,) = job.announced("quarantined")
    assert text == "worker 1 is left out for 5 s: the network does not reach it"
    assert job.told["b"].wanted == ()


def test_the_time_to_settle_begins_when_enough_nodes_are_here() -> None:
    job = Job("a", nodes_min=2, workers_min=1)
    job.say("a", 0)
    job.pass_time(130.0)
    began = job.now
    job.hear("b")  # its worker never gets ready
    assert job.view is None
    job.known["b"] = status(1, stage=Stage.BOOTING)
    job.pass_time(began + 9.9)
    assert job.view is None
    job.pass_time(began + 10.5)
    assert job.view is not None
    assert job.view.workers == (0,)


def wrong(after: int, view: int, *workers: int) -> Invalidation:
    return Invalidation(
        after=after, view=ViewNumber(view), wrong=tuple(WorkerId(w) for w in workers)
    )


def test_where_the_state_is_discarded_all_begin_from_the_newest_checkpoint() -> None:
    job = begun("a", "b")
    job.say("a", 0, saved=4, committed=6)
    job.say("a", 0, committed=9, saved=8)
    discarded = dict(saved=0, state=ReplicaStage.DISTRUSTED, invalidations=(wrong(5, 1, 1),))
    job.stop("a", **discarded)
    job.stop("b")
    assert "worker 1 is left out for 60 s: it computes wrongly" in job.announced("quarantined")
    assert job.announced("back") == ["the job goes back to step 4"]
    assert job.told["b"].wanted == ()
    assert [w.incarnation for w in job.told["a"].wanted] == [2]
    job.known["a"] = status(0, 2)
    del job.known["b"]
    job.say("a", 0)
    assert job.view is not None
    assert (job.view.resume_step, job.view.joiners) == (4, (0,))
    assert job.view.invalidations == (wrong(5, 1, 1),)
    assert job.machine.outcome is None


def test_a_snapshot_tells_which_view_is_stopped_and_which_is_about_to_change() -> None:
    job = begun("a", "b", nodes_max=3)
    job.say("c", 2)  # it joins at the next boundary
    found = job.machine.snapshot()
    assert (found.stop_view, found.pending_view) == (0, job.number)
    job.say("b", 1, stage=Stage.LOST, detail="signal 9")
    found = job.machine.snapshot()
    assert found.stop_view == job.number


def test_reports_on_a_checkpoint_are_kept_though_their_agent_restarts_at_once() -> None:
    job = begun("a", "b")
    job.say("a", 0, saved=4, committed=6)
    job.pass_time(job.now + 5.0)
    assert job.machine.snapshot().record.saved == (4,)
    job.pause_s = 1e-6  # such fast reports wait for a common review
    job.say("b", 1, detail="reviewed")
    job.say("a", 0, unreadable=4, saved=0)
    job.hear("a", incarnation=Incarnation(2), seq=1)  # it runs no worker
    del job.known["a"]
    job.pass_time(job.now + 5.0)
    assert job.machine.snapshot().record.saved == ()


def test_events_of_workers_are_told_with_their_worker() -> None:
    job = begun("a", "b")
    job.say("b", 1, events=(JobEvent(number=1, kind="save", text="step 4 is saved"),))
    found = [e for e in job.done if isinstance(e, ce.Announce) and e.kind == "save"]
    assert [(e.text, e.worker) for e in found] == [("step 4 is saved", 1)]


def test_a_damaged_checkpoint_is_told_once_though_every_worker_finds_it() -> None:
    job = begun("a", "b", "c")
    for number, step in ((1, 8), (2, 4)):
        for worker, name in enumerate("abc"):
            text = f"the checkpoint of step {step} is not used: share {worker} is damaged"
            job.say(name, worker, events=(JobEvent(number=number, kind="rot", text=text),))
    assert job.announced("rot") == [
        "the checkpoint of step 8 is not used: share 0 is damaged",
        "the checkpoint of step 4 is not used: share 0 is damaged",
    ]
    again = JobEvent(number=3, kind="rot", text="the checkpoint of step 8 is not used: it is gone")
    job.say("b", 1, events=(again,), view=ViewNumber(job.number + 1))  # it was saved again
    assert len(job.announced("rot")) == 3


def test_nodes_that_are_all_to_be_left_are_used_until_others_come() -> None:
    """The job has lost its state, and would wait for ever otherwise."""
    job = begun("a", "b")
    first = job.number
    for name in ("a", "b"):
        job.node(name, draining="it is needed elsewhere")
    for worker, name in enumerate(("a", "b")):
        job.say(name, worker, stage=Stage.LOST, promised=first, state=ReplicaStage.ABSENT)
    for worker, name in enumerate(("a", "b")):
        again = Incarnation(2)
        job.known[name] = status(worker, incarnation=again)
        job.say(name, worker)
    job.pass_time(job.now + 30.0)
    assert job.view is not None
    assert job.number > first
    assert job.view.workers == (0, 1)


# ---------------------------------------------------------------- the end


def test_an_operator_stops_the_job_at_once_or_after_a_last_checkpoint() -> None:
    plain = begun("a", "b")
    plain.feed(ce.StopRequested("enough", saves=False))
    assert plain.machine.outcome == "enough"
    assert plain.told["a"].shutdown
    job = begun("a", "b")
    job.say("a", 0, committed=6)
    job.feed(ce.StopRequested("enough", saves=True))
    assert job.machine.outcome is None
    assert job.told["a"].save_wanted
    job.say("a", 0, saved=5)
    assert job.machine.outcome is None  # an older checkpoint
    job.say("a", 0, saved=6)
    assert job.machine.outcome == "enough"
    again = begun("a", "b")
    for outcome in (None, "now"):
        again.feed(ce.StopRequested("now", saves=True))
        assert again.machine.outcome == outcome
    late = begun("a", "b")
    late.feed(ce.StopRequested("enough", saves=True))
    late.pass_time(100.0 + POLICY.grace_s - 0.1)
    assert late.machine.outcome is None
    late.pass_time(100.0 + POLICY.grace_s + 0.1)
    assert late.machine.outcome == "enough"


def test_a_loop_ends_when_its_leader_is_past_it_and_the_job_when_all_have_exited() -> None:
    job = begun("a", "b")
    job.act("a", "b", loop=1)
    assert job.told["b"].release_loop == 0
    job.say("a", 0, loop=2)
    assert job.told["b"].release_loop == 1
    job.say("b", 1, phase=Phase.ENDED)
    job.say("a", 0, stage=Stage.EXITED)
    assert job.told["b"].release_loop == RELEASE_ALL
    assert [w.worker for w in job.told["b"].wanted] == [1]  # it may finish
    assert job.told["a"].wanted == ()
    assert job.machine.outcome is None
    job.say("b", 1, stage=Stage.EXITED)
    assert job.machine.outcome == ""
    for worker, name in enumerate(("a", "b")):
        assert ce.Finish("") not in job.done
        job.say(name, worker)
    assert ce.Finish("") in job.done


def test_members_that_lack_votes_when_the_leader_has_ended_get_a_last_view() -> None:
    job = begun("a", "b", "c")
    job.act("a", "b", "c", loop=1, committed=4)
    job.say("a", 0, stage=Stage.EXITED, committed=5)
    job.say("c", 2, committed=4, reduced=True)
    job.stop("b", committed=5, phase=Phase.ENDED)
    job.stop("c", committed=4, reduced=True)
    assert job.view is not None
    assert (job.number, job.view.workers, job.view.resume_step) == (2, (1, 2), 5)
    lost = begun("a", "b")
    lost.say("a", 0, stage=Stage.EXITED)
    lost.say("b", 1, stage=Stage.LOST)
    assert lost.machine.outcome == ""  # no worker is left, and none is started again
    assert lost.announced("lost") == []


# ---------------------------------------------------------------- another coordinator


def test_another_coordinator_goes_on_from_the_record() -> None:
    before = begun("a", "b")
    record = before.machine.snapshot().record
    job = Job(record=record)
    assert (job.view, job.machine.outcome) == (before.view, None)
    assert job.machine.snapshot().record == dataclasses.replace(record, term=7)
    for name in ("a", "b"):
        job.known[name] = before.known[name]
    job.pass_time(140.0)
    assert job.number == 1
    assert job.announced("lost") == job.announced("stop_view") == []
    job.say("b", 1, stage=Stage.LOST)
    job.stop("a")
    assert job.number == 2


def test_a_coordinator_without_a_record_learns_everything_and_skips_numbers_already_given() -> None:
    before = begun("a", "b")
    job = Job(forgotten=1)
    for name, known in before.known.items():
        job.known[name] = known
        (answer,) = job.hear(name, known, view=before.view, view_known=1, release_loop=0)
        assert answer.directive.undecided
        assert answer.directive.wanted == ()
    assert not any(isinstance(e, ce.Persist) for e in job.done)
    assert job.view == before.view
    job.pass_time(100.0 + LEASE.fence_s - 0.1)
    assert job.machine.deadline() == 100.0 + LEASE.fence_s
    assert job.told["a"].undecided
    job.pass_time(100.0 + LEASE.fence_s + 0.6)
    assert not job.told["a"].undecided
    assert [(w.worker, w.incarnation) for w in job.told["a"].wanted] == [(0, 1)]
    job.say("b", 1, stage=Stage.LOST)
    job.stop("a")
    assert job.number == SKIPPED + 2
    assert [w.incarnation for w in job.told["b"].wanted] == [SKIPPED + 1]


def test_while_members_are_unheard_a_later_view_may_be_at_work() -> None:
    before = begun("a", "b")
    job = Job(forgotten=1)
    job.known["a"] = before.known["a"]
    job.hear("a", before.known["a"], view=before.view, view_known=1)
    job.pass_time(100.0 + LEASE.abandon_s)
    assert job.told["a"].undecided
    job.pass_time(100.0 + LEASE.abandon_s + LEASE.margin_s + 0.6)
    assert not job.told["a"].undecided


@pytest.mark.parametrize("seen", [True, False])
def test_many_changes_of_a_large_job_are_reviewed_together(seen: bool) -> None:
    """Reports are answered at once; their consequences are decided a little later."""
    names = [f"n{i:04}" for i in range(600)]
    job = Job(*names, nodes_min=600, virtual_ranks=600)
    job.pause_s, review_s = 0.0, 5e-5 * 600
    job.now += 1.0
    job.feed(Tick())
    job.now += 1.0
    job.say(names[0], 0, saved=3)  # this is decided at once
    first = job.now
    job.say(names[1], 1, saved=4)
    assert job.machine.deadline() == pytest.approx(first + review_s)
    job.now = first + (1.1 if seen else 0.9) * review_s
    job.feed(Tick())
    saved = [e.record.saved for e in job.done if isinstance(e, ce.Persist)]
    assert saved[-1] == ((3, 4) if seen else (3,))

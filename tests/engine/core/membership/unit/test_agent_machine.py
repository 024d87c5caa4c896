"""An agent's decisions for its node: processes, reports, and the right to act."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.engine.core.directives import Directive, Freed, WantedProcess
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.membership.agent import AgentMachine, AgentPolicy
from holdfast.engine.core.membership.liveness import FreezePolicy, ProcessSample
from holdfast.engine.core.membership.node_process import QUIT
from holdfast.engine.core.policies import LeasePolicy
from holdfast.engine.core.redundancy import KeptPieces
from holdfast.engine.core.types import AgentId, Incarnation, Tick, ViewNumber, WorkerId
from holdfast.engine.core.worker_status import Phase, Stage, WorkerStatus
from machine_kit import a_view

ME, ONE = AgentId("a"), Incarnation(1)
LEASE = LeasePolicy(lease_s=2.0, margin_s=0.5, suspect_s=1.5, abandon_s=20.0)
POLICY = AgentPolicy(
    heartbeat_s=0.5, lease=LEASE, freeze=FreezePolicy(stopped_samples=2, silent_samples=3)
)


class Node:
    """Is an agent with its coordinator: by default, directives answer the newest report."""

    def __init__(self, workers: int = 2, job: str = "one", policy: AgentPolicy = POLICY) -> None:
        self.machine = AgentMachine(ME, ONE, workers, policy, pid=77, job=job)
        self.now = 100.0
        self.reports: list[Any] = []
        self._seq = 0
        self.feed(Tick())

    def feed(self, event: ag.AgentEvent) -> list[ag.AgentEffect]:
        effects = self.machine.handle(event, self.now)
        self.machine.check()
        self.reports += [e.report for e in effects if isinstance(e, ag.SendReport)]
        return effects

    def direct(self, **fields: Any) -> list[ag.AgentEffect]:
        self._seq += 1
        values = {"term": 1, "seq": self._seq, "heard": self.reports[-1].seq} | fields
        directive = Directive(agent=ME, agent_incarnation=ONE, **values)
        return self.feed(ag.DirectiveArrived(directive))

    def want(self, *workers: tuple[int, int], **fields: Any) -> list[ag.AgentEffect]:
        wanted = tuple(
            WantedProcess(worker=WorkerId(w), incarnation=Incarnation(i)) for w, i in workers
        )
        return self.direct(wanted=wanted, **fields)

    def run(self, *workers: int) -> None:
        """Start these workers, as members of view 1 which act in it."""
        self.want(*((w, 1) for w in workers), view=a_view(1, workers), view_number=1)
        for w in workers:
            self.feed(ag.Spawned(WorkerId(w), ONE, 1000 + w))
            self.say(w, stage=Stage.READY, view=ViewNumber(1))

    def say(self, worker: int, **fields: Any) -> list[ag.AgentEffect]:
        old = self.status(worker)
        fields = {"seq": old.seq + 1} | fields
        return self.feed(ag.WorkerSaid(dataclasses.replace(old, **fields)))

    def status(self, worker: int) -> WorkerStatus:
        return next(s for s in self.machine.snapshot().report.workers if s.worker == worker)


def kinds(effects: list[ag.AgentEffect]) -> list[str]:
    return [type(e).__name__ for e in effects]


def of(kind: type, effects: list[ag.AgentEffect]) -> list[Any]:
    return [e for e in effects if isinstance(e, kind)]


# ---------------------------------------------------------------- reports


def test_the_first_report_comes_at_once_and_then_one_with_each_heartbeat() -> None:
    node = Node()
    (first,) = node.reports
    assert (first.agent, first.seq, first.slots, first.pid) == (ME, 1, 2, 77)
    assert node.machine.deadline() == 100.5
    node.now = 100.4
    assert node.feed(Tick()) == []
    node.now = 100.5
    assert kinds(node.feed(Tick())) == ["SendReport"]
    assert node.reports[-1].seq == 2
    assert node.machine.deadline() == 101.0


def test_changes_that_decisions_depend_on_are_reported_at_once_and_mere_progress_is_not() -> None:
    node = Node()
    node.run(0, 1)
    quiet = dict(committed=3, proved_at=99.0, phase=Phase.COMPUTING)
    assert "SendReport" not in kinds(node.say(0, **quiet))
    assert "SendReport" not in kinds(node.say(0, phase=Phase.WAITING))
    assert "SendReport" in kinds(node.say(0, phase=Phase.OVERDUE))
    assert "SendReport" in kinds(node.say(0, phase=Phase.ENDED))
    assert "SendReport" in kinds(node.say(1, promised=ViewNumber(1)))
    assert "SendReport" in kinds(node.say(1, reduced=True))
    assert node.status(0).committed == 3
    assert node.status(0).pid == 1000  # the agent's number counts, not the worker's


def test_an_older_status_or_one_of_another_process_is_not_believed() -> None:
    node = Node()
    node.run(0)
    node.say(0, committed=5)
    seq = node.status(0).seq
    node.say(0, committed=4, seq=seq)
    node.say(0, committed=3, incarnation=Incarnation(2))
    assert node.status(0).committed == 5
    node.feed(ag.ProcessExited(WorkerId(0), ONE, 0, reported=True))
    node.say(0, stage=Stage.READY)
    assert node.status(0).stage is Stage.EXITED


def test_the_reason_of_a_drain_is_reported_once_and_a_node_that_leaves_for_good_keeps_it() -> None:
    node = Node()
    assert "SendReport" in kinds(node.feed(ag.Drained("disk: slow", "disk")))
    assert (node.reports[-1].draining, node.reports[-1].failing) == ("disk: slow", "disk")
    assert node.feed(ag.Drained("disk: slow", "disk")) == []
    assert "SendReport" in kinds(node.feed(ag.Drained("", "")))
    assert node.reports[-1].draining == ""
    node.feed(ag.Drained("asked to end", leave=True))
    assert node.feed(ag.Drained("", "")) == []
    assert node.machine.snapshot().report.draining == "asked to end"


def test_a_coordinator_that_has_forgotten_the_view_is_told_of_it() -> None:
    node = Node()
    node.run(0)
    assert node.machine.snapshot().report.view is None
    assert node.machine.snapshot().report.view_known == 1
    node.direct(view_number=0, release_loop=4)
    assert node.machine.snapshot().report.view == a_view(1, [0])
    assert node.machine.snapshot().report.release_loop == 4


def test_the_coordinator_is_told_as_soon_as_it_can_be_reached() -> None:
    node = Node()
    assert kinds(node.feed(ag.CoordinatorReached())) == ["SendReport"]


# ---------------------------------------------------------------- another job


def test_an_agent_that_meets_another_job_at_the_address_ends_its_workers_and_says_why() -> None:
    node = Node()
    node.run(0, 1)
    assert kinds(node.feed(ag.CoordinatorReached("one"))) == ["SendReport"]
    killed = node.feed(ag.CoordinatorReached("two"))
    assert [(k.worker, k.incarnation) for k in killed] == [(0, 1), (1, 1)]  # and no report
    assert node.machine.deadline() is None
    assert node.feed(ag.CoordinatorReached("two")) == []
    # No order of the other job's coordinator counts, and the own one is not back for good.
    assert node.want((0, 1), (2, 1), view_number=1) == []
    assert node.feed(ag.CoordinatorReached("one")) == []
    assert node.feed(ag.ProcessExited(WorkerId(0), ONE, -9)) == []
    (quits,) = node.feed(ag.ProcessExited(WorkerId(1), ONE, -9))
    assert quits == ag.Quit(
        "this node is of job one, whose coordinator is gone, and job two is at its address now: "
        "its workers are ended; start the node again to have it in that job"
    )


def test_an_agent_that_learns_that_the_job_is_over_ends_at_once() -> None:
    node = Node()
    node.run(0)
    (killed,) = node.feed(ag.JobOver())
    assert (killed.worker, killed.reason) == (0, "the job is over")
    assert node.machine.deadline() is None
    assert node.want((0, 1), (1, 1), view_number=1) == []
    assert node.feed(ag.ProcessExited(WorkerId(0), ONE, -9)) == [ag.Quit()]
    assert Node().feed(ag.JobOver()) == [ag.Quit()]


def test_an_agent_without_a_job_belongs_to_the_first_that_it_meets() -> None:
    node = Node(job="")
    assert kinds(node.feed(ag.CoordinatorReached("two"))) == ["SendReport"]
    (quits,) = node.feed(ag.CoordinatorReached("one"))
    assert "of job two" in quits.problem


# ---------------------------------------------------------------- processes


def test_wanted_workers_are_started_and_unwanted_ones_are_killed_once() -> None:
    node = Node()
    effects = node.want((0, 1), (1, 1))
    assert [(s.worker, s.incarnation) for s in of(ag.Spawn, effects)] == [(0, 1), (1, 1)]
    assert of(ag.Spawn, node.want((0, 1), (1, 1))) == []
    effects = node.want((0, 1), (1, 2))
    assert [(k.worker, k.incarnation) for k in of(ag.Kill, effects)] == [(1, 1)]
    assert of(ag.Spawn, effects) == []  # not before the old one has ended
    assert of(ag.Kill, node.want((0, 1), (1, 2))) == []
    effects = node.feed(ag.ProcessExited(WorkerId(1), ONE, -9))
    assert [(s.worker, s.incarnation) for s in of(ag.Spawn, effects)] == [(1, 2)]
    assert node.machine.snapshot().report.workers[1].incarnation == 2


def test_an_incarnation_that_has_ended_is_never_started_again() -> None:
    node = Node()
    node.want((0, 2))
    node.feed(ag.ProcessExited(WorkerId(0), Incarnation(2), -9))
    assert of(ag.Spawn, node.want((0, 2))) == []
    assert of(ag.Spawn, node.want((0, 1))) == []
    assert len(of(ag.Spawn, node.want((0, 3)))) == 1


@pytest.mark.parametrize(
    ("code", "detail", "reported", "stage", "told"),
    [
        (0, "", True, Stage.EXITED, ""),
        (0, "", False, Stage.LOST, QUIT),
        (-11, "", False, Stage.LOST, "ended by signal 11"),
        (-9, "", True, Stage.LOST, "ended by signal 9"),
        (-9, "out of memory", False, Stage.LOST, "out of memory"),
        (7, "", True, Stage.FAILED, "exit code 7"),
        (1, "ValueError: x", False, Stage.FAILED, "ValueError: x"),
    ],
)
def test_the_stage_and_detail_of_a_worker_say_how_its_process_ended(
    code: int, detail: str, reported: bool, stage: Stage, told: str
) -> None:
    node = Node()
    node.run(0)
    before = node.status(0).seq
    effects = node.feed(ag.ProcessExited(WorkerId(0), ONE, code, detail, reported))
    assert "SendReport" in kinds(effects)
    status = node.status(0)
    assert (status.stage, status.detail) == (stage, told)
    assert status.seq > before


@pytest.mark.parametrize(
    ("code", "told", "error", "found"),
    [
        (1, "OSError: x", MachineError.DISK_FULL, MachineError.DISK_FULL),
        (-9, "", MachineError.KILLED, MachineError.KILLED),
        (1, "", None, MachineError.UNREPORTED),  # Python itself may not have started
    ],
)
def test_a_worker_that_its_machine_has_ended_is_lost(
    code: int, told: str, error: MachineError | None, found: MachineError
) -> None:
    node = Node()
    node.run(0)
    node.feed(ag.ProcessExited(WorkerId(0), ONE, code, told, error=error))
    status = node.status(0)
    assert (status.stage, status.machine_error) == (Stage.LOST, found)


def test_a_worker_that_ends_itself_is_lost_for_the_reason_that_it_gives() -> None:
    node = Node()
    node.run(0)
    node.say(0, detail="it computes wrongly", promised=ViewNumber(1))
    assert node.status(0).promised == 0  # no view may count on it as on a survivor
    node.feed(ag.ProcessExited(WorkerId(0), ONE, -9, "ended by SIGKILL"))
    status = node.status(0)
    assert (status.stage, status.detail) == (Stage.LOST, "it computes wrongly")


def test_a_killed_worker_is_lost_for_the_reason_it_was_killed_for() -> None:
    node = Node()
    node.run(0)
    node.want()
    node.feed(ag.ProcessExited(WorkerId(0), ONE, 0, reported=True))
    status = node.status(0)
    assert (status.stage, status.detail) == (Stage.LOST, "the coordinator replaced it")
    assert node.feed(ag.ProcessExited(WorkerId(0), Incarnation(7), 0, reported=True)) == []


SAVING = dataclasses.replace(POLICY, end_s=1.0)


def test_a_script_of_a_group_is_asked_to_end_and_killed_if_it_goes_on() -> None:
    node = Node(policy=SAVING)
    node.run(0)
    asked = node.direct(shutdown=True, end_signal=10)
    assert of(ag.AskToEnd, asked) == [ag.AskToEnd(WorkerId(0), ONE, 10)]
    assert of(ag.Kill, asked) == []
    assert kinds(node.direct(shutdown=True, end_signal=10)) == []  # once is enough
    node.now += 0.9
    node.direct(shutdown=True, heard=node.reports[-1].seq)
    assert node.machine.deadline() == pytest.approx(101.0)
    node.now = 101.0
    assert len(of(ag.Kill, node.feed(Tick()))) == 1
    assert of(ag.Kill, node.feed(Tick())) == []
    node.feed(ag.ProcessExited(WorkerId(0), ONE, -9))
    assert node.status(0).detail == "the coordinator replaced it"


def test_a_script_that_saves_is_killed_when_it_may_not_act_or_freezes_or_the_job_is_over() -> None:
    for why in ("lease", "frozen", "over"):
        node = Node(policy=dataclasses.replace(POLICY, end_s=60.0))
        node.run(0, 1)
        node.feed(ag.WorkerSaid(dataclasses.replace(node.status(1), promised=1, seq=99)))
        assert len(of(ag.AskToEnd, node.want())) == 2
        stopped = ag.Sampled(WorkerId(0), ONE, ProcessSample(state="T", progress=1))
        if why == "lease":
            node.now += 3.0
            killed = node.feed(Tick())
        elif why == "frozen":
            killed = [*node.feed(stopped), *node.feed(stopped)]
        else:
            killed = node.feed(ag.JobOver())
        assert len(of(ag.Kill, killed)) == (1 if why == "frozen" else 2), why


def test_only_a_process_that_runs_a_script_is_asked_to_end() -> None:
    node = Node(policy=SAVING)
    node.want((0, 1), (1, 1))
    for worker in (0, 1):
        node.feed(ag.Spawned(WorkerId(worker), ONE, 1000 + worker))
    node.say(0, stage=Stage.READY)  # it waits for a rank
    effects = node.want()
    assert len(of(ag.Kill, effects)) == 2
    assert of(ag.AskToEnd, effects) == []


def test_a_frozen_process_is_killed_unless_the_agent_itself_has_paused_it() -> None:
    for paused in (False, True):
        node = Node()
        node.run(0, 1)
        node.feed(ag.WorkerSaid(dataclasses.replace(node.status(1), promised=1, seq=99)))
        node.now += 2.0 if paused else 0.0
        node.feed(Tick())
        stopped = ag.Sampled(WorkerId(1), ONE, ProcessSample(state="T", progress=1))
        assert of(ag.Kill, node.feed(stopped)) == []
        kills = of(ag.Kill, node.feed(stopped))
        assert [k.worker for k in kills] == ([] if paused else [1])


def test_a_process_counts_as_silent_only_once_it_has_joined() -> None:
    """A process that has not joined may wait for something outside, and runs no loop."""
    node = Node()
    node.want((0, 1))
    node.feed(ag.Spawned(WorkerId(0), ONE, 1000))
    silent = ag.Sampled(WorkerId(0), ONE, ProcessSample(state="S", progress=1))
    assert not any(of(ag.Kill, node.feed(silent)) for _ in range(10))
    node.say(0, stage=Stage.BOOTING)
    kills = [bool(of(ag.Kill, node.feed(silent))) for _ in range(4)]
    assert kills == [False, False, True, False]


def test_a_sample_of_a_process_that_has_ended_or_is_another_ones_says_nothing() -> None:
    node = Node()
    node.run(0, 1)
    node.feed(ag.ProcessExited(WorkerId(1), ONE, 0, reported=True))
    for worker, incarnation in ((1, 1), (1, 2), (7, 1)):
        stopped = ag.Sampled(
            WorkerId(worker), Incarnation(incarnation), ProcessSample(state="T", progress=1)
        )
        for _ in range(3):
            assert node.feed(stopped) == []


@pytest.mark.parametrize("spread", [False, True])
def test_a_worker_with_processes_on_other_nodes_is_not_alone(spread: bool) -> None:
    """The worker may have been given up, and the job may continue without this node."""
    node = Node()
    node.run(0)
    view = a_view(1, (0,))
    further = (AgentId("elsewhere"),) if spread else ()
    members = tuple(dataclasses.replace(each, further=further) for each in view.members)
    node.want((0, 1), view=dataclasses.replace(view, members=members), view_number=1)
    paused = []
    for _ in range(10):
        node.now += 0.5
        paused += of(ag.Pause, node.feed(Tick()))
    assert len(paused) == (1 if spread else 0)


def test_without_a_lease_nothing_starts() -> None:
    node = Node()
    node.now += LEASE.lease_s
    assert of(ag.Spawn, node.want((0, 1))) == []  # the report that it answers is too old
    node.feed(Tick())
    assert len(of(ag.Spawn, node.want((0, 1)))) == 1


def test_a_directive_of_another_time_or_for_somebody_else_changes_nothing() -> None:
    node = Node()
    node.want((0, 1), term=3, seq=5)
    for older in (dict(term=3, seq=5), dict(term=3, seq=4), dict(term=2, seq=9)):
        assert of(ag.Kill, node.want(**older)) == []
    stranger = Directive(term=9, seq=9, agent=AgentId("b"), agent_incarnation=ONE)
    former = Directive(term=9, seq=9, agent=ME, agent_incarnation=Incarnation(2))
    for each in (stranger, former):
        assert of(ag.Kill, node.feed(ag.DirectiveArrived(each))) == []
    assert len(of(ag.Kill, node.want(term=4, seq=1))) == 1  # a later term counts from the beginning


def test_while_the_coordinator_still_learns_all_goes_on_as_before() -> None:
    node = Node()
    node.run(0)
    assert of(ag.Kill, node.want(undecided=True)) == []
    assert len(of(ag.Kill, node.want())) == 1


# ---------------------------------------------------------------- what workers are told


def test_workers_are_told_what_is_new_and_a_view_only_once() -> None:
    node = Node()
    node.run(0)
    node.say(0, promised=ViewNumber(1))  # so that its lease comes from the coordinator
    told = of(ag.SendWorker, node.want((0, 1), view_number=1, stop_view=ViewNumber(1)))
    assert [(s.worker, s.incarnation) for s in told] == [(0, 1)]
    assert told[0].directive.stop_view == 1
    assert told[0].directive.view is None
    told = of(ag.SendWorker, node.want((0, 1), view=a_view(2, [0]), view_number=2))
    assert told[0].directive.view == a_view(2, [0])
    fields: list[dict[str, Any]] = [
        dict(pending_view=ViewNumber(2)),
        dict(release_loop=1),
        dict(save_wanted=3),
    ]
    for each in fields:
        (said,) = of(ag.SendWorker, node.want((0, 1), view_number=2, **each))
        assert dataclasses.asdict(said.directive).items() >= each.items()


def test_a_lease_that_is_little_longer_is_not_worth_a_message() -> None:
    node = Node()
    node.want((0, 1))
    told = of(ag.SendWorker, node.want((0, 1), release_loop=1))
    assert told[0].directive.acting_until == 100.0 + LEASE.lease_s
    node.now += 0.2
    node.feed(ag.CoordinatorReached())
    assert of(ag.SendWorker, node.want((0, 1), release_loop=1)) == []
    node.now += 0.05
    node.feed(ag.CoordinatorReached())
    (said,) = of(ag.SendWorker, node.want((0, 1), release_loop=1))
    assert said.directive.acting_until == 100.25 + LEASE.lease_s


# ---------------------------------------------------------------- the right to act


def test_workers_are_paused_when_the_coordinator_is_silent_for_a_lease_and_resumed_after() -> None:
    node = Node()
    node.want((0, 1), (1, 1), view=a_view(1, range(3)), view_number=1)
    assert node.machine.deadline() == 100.5
    node.now = 101.9
    assert "Pause" not in kinds(node.feed(Tick()))
    assert node.machine.deadline() == 100.0 + LEASE.lease_s
    node.now = 102.0
    assert [p.worker for p in of(ag.Pause, node.feed(Tick()))] == [0, 1]
    assert node.machine.snapshot().paused == (0, 1)
    assert of(ag.Pause, node.feed(ag.CoordinatorReached())) == []
    effects = node.want((0, 1))
    assert [p.worker for p in of(ag.Resume, effects)] == [0]
    assert [k.worker for k in of(ag.Kill, effects)] == [1]
    assert 0 not in node.machine.snapshot().paused


def test_the_lease_counts_from_when_the_answered_report_was_sent() -> None:
    node = Node()
    node.want((0, 1), view=a_view(1, range(2)), view_number=1)
    node.now = 101.0
    node.feed(Tick())
    node.now = 102.5
    node.want((0, 1), view_number=1, heard=2)
    assert node.machine.snapshot().paused == ()
    node.now = 103.0
    assert "Pause" in kinds(node.feed(Tick()))
    node.want((0, 1), view_number=1, heard=1)  # no new report
    assert node.machine.snapshot().paused == (0,)


def test_complete_votes_renew_the_right_to_act_until_all_is_abandoned() -> None:
    node = Node()
    node.want((0, 1), view=a_view(1, range(2)), view_number=1)
    node.feed(ag.Spawned(WorkerId(0), ONE, 5))
    node.say(0, stage=Stage.READY, view=ViewNumber(1))
    for _ in range(19):
        node.now += 1.0
        assert kinds(node.say(0, proved_at=node.now)) in (
            [],
            ["SendReport"],
            ["SendWorker"],
            ["SendWorker", "SendReport"],
        )
    assert node.machine.snapshot().paused == ()
    node.now = 100.0 + LEASE.abandon_s
    (kill,) = of(ag.Kill, node.say(0, proved_at=node.now))
    assert "no coordinator" in kill.reason


def test_a_view_that_is_all_here_goes_on_without_anybody_until_somebody_has_promised() -> None:
    node = Node()
    node.run(0, 1)
    node.now += 10.0
    node.feed(Tick())
    assert node.machine.snapshot().paused == ()
    node.say(1, promised=ViewNumber(1))
    assert node.machine.snapshot().paused == (0, 1)


@pytest.mark.parametrize("gone", ["ended", "killed"])
def test_a_view_with_a_lost_member_is_not_complete(gone: str) -> None:
    node = Node()
    node.run(0, 1)
    if gone == "ended":
        node.feed(ag.ProcessExited(WorkerId(1), ONE, -9))
    else:
        node.want((0, 1), view_number=1)
    node.now += LEASE.lease_s
    node.feed(Tick())
    assert node.machine.snapshot().paused == (0,)


# ---------------------------------------------------------------- the end


def test_the_agent_ends_after_the_job_once_nothing_runs_and_says_so_before() -> None:
    node = Node()
    node.run(0)
    assert "Quit" not in kinds(node.direct(shutdown=True))
    effects = node.feed(ag.ProcessExited(WorkerId(0), ONE, 0, reported=True))
    assert kinds(effects)[-2:] == ["SendReport", "Quit"]
    leaving = Node()
    assert "Quit" not in kinds(leaving.feed(ag.Drained("bye", leave=True)))
    assert kinds(leaving.direct())[-1] == "Quit"
    staying = Node()
    staying.feed(ag.Drained("a check", "disk"))
    assert "Quit" not in kinds(staying.direct())


def test_a_node_that_leaves_stays_while_its_pieces_are_needed() -> None:
    node = Node()
    node.run(0)
    node.feed(ag.Drained("bye", leave=True))
    assert "Quit" not in kinds(node.direct(wanted=()))
    pieces = (KeptPieces(view=1, worker=0, parts=1, pieces=()),)
    node.feed(ag.MemoryHeld(pieces))
    node.feed(ag.ProcessExited(WorkerId(0), ONE, -9))
    listing = node.reports[-1]
    assert listing.kept == pieces
    assert "Quit" not in kinds(node.direct())
    for agent, incarnation, report in (
        (ME, ONE, listing.seq - 1),  # it does not list them
        (AgentId("b"), ONE, listing.seq),
        (ME, Incarnation(2), listing.seq),
    ):
        assert "Quit" not in kinds(node.direct(freed=(Freed(agent, incarnation, report),)))
    assert kinds(node.direct(freed=(Freed(ME, ONE, listing.seq),)))[-1] == "Quit"


def test_a_node_ends_its_workers_when_it_is_taken_away_and_then_itself() -> None:
    """They act for as long as that, and the coordinator learns of their end at once."""
    node = Node()
    node.run(0)
    node.feed(ag.Drained("bye", leave=True, deadline_s=0.7 * LEASE.lease_s))
    end = node.now + 0.7 * LEASE.lease_s
    assert node.machine.deadline() <= end
    node.now = end - 0.01
    assert "Kill" not in kinds(node.feed(Tick()))
    node.now = end
    (kill,) = of(ag.Kill, node.feed(Tick()))
    assert kill.reason == "its node is taken away"
    assert node.machine.deadline() > end
    effects = node.feed(ag.ProcessExited(WorkerId(0), ONE, -9))
    assert kinds(effects)[-2:] == ["SendReport", "Quit"]
    (lost,) = node.reports[-1].workers
    assert (lost.stage, lost.detail) == (Stage.LOST, "its node is taken away")


def test_pieces_are_not_kept_beyond_the_deadline_or_for_a_coordinator_that_is_gone() -> None:
    for deadline_s, stays_s in ((7.0, 7.0), (float("inf"), LEASE.abandon_s)):
        node = Node()
        node.feed(ag.MemoryHeld((KeptPieces(view=1, worker=0, parts=1, pieces=()),)))
        node.feed(ag.Drained("bye", leave=True, deadline_s=deadline_s))
        assert "Quit" not in kinds(node.direct())
        node.now += stays_s - 0.1
        assert "Quit" not in kinds(node.feed(Tick()))
        node.now += 0.2
        assert "Quit" in kinds(node.feed(Tick()))

"""FleetMachine keeps its promises through faults from seeds, and planted bugs are caught."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

import fleet_kit
from fleet_kit import PREFIX, Faults, run_fleet
from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.fleet import fleet_events as fe
from holdfast.engine.core.fleet.fleet import FleetMachine, HostStrikes
from holdfast.engine.core.fleet.fleet_node import Ending, FleetNode
from holdfast.engine.core.fleet.placements import FleetPolicy, Holding, NodeSeen, Notice, Placement
from holdfast.engine.core.types import Tick

SEEDS = 16


def ids(effects: list[fe.FleetEffect], kind: type) -> list[str]:
    return [e.id.removeprefix(PREFIX) for e in effects if isinstance(e, kind)]


def placed(number: int, notice: Notice | None = None, *domains: str) -> Placement:
    return Placement(
        id=f"{PREFIX}e-{number}",
        handle=str(number),
        holding=Holding.RUNNING,
        host=f"h{number}",
        notice=notice,
        domains=domains,
    )


def serving(number: int, **fields: object) -> NodeSeen:
    return NodeSeen(name=f"{PREFIX}e-{number}", **{"members": 1, **fields})


def three_nodes() -> FleetMachine:
    """A machine of a job that has the three nodes that it wants."""
    machine = FleetMachine(FleetPolicy(prefix=PREFIX, nodes=3, nodes_max=4), "e")
    machine.handle(fe.Observed((), 0.0), 0.0)
    asked = ids(machine.handle(fe.JobHeard(()), 0.0), fe.Request)
    assert asked == ["e-1", "e-2", "e-3"]
    machine.handle(fe.Observed((placed(1), placed(2), placed(3)), 1.0), 1.0)
    machine.handle(fe.JobHeard((serving(1), serving(2), serving(3))), 1.0)
    return machine


def test_a_snapshot_names_the_state_of_each_node() -> None:
    machine = three_nodes()
    seen = serving(1), serving(2, members=0), serving(3, members=0, silent=True)
    machine.handle(fe.JobHeard(seen), 2.0)
    assert [n.state for n in machine.snapshot().nodes] == ["serving", "here", "silent"]


def test_a_notice_becomes_a_drain_with_its_deadline_and_another_node_is_requested() -> None:
    machine = three_nodes()
    warned = placed(2, Notice(reason="maintenance", until=300.0))
    effects = machine.handle(fe.Observed((placed(1), warned, placed(3)), 2.0), 2.0)
    drain = fe.DrainNode(warned.id, "maintenance", 300.0)
    assert drain in effects
    (request,) = [e for e in effects if isinstance(e, fe.Request)]
    assert request.avoid == ("h2",)
    assert machine.handle(Tick(), 3.0) == []
    known = (serving(1), serving(2, draining="maintenance"), serving(3))
    assert machine.handle(fe.JobHeard(known), 20.0) == []


def test_the_loss_of_an_agent_is_the_jobs_word_and_never_the_managers() -> None:
    machine = three_nodes()
    everyone = (serving(1), serving(2), serving(3))
    effects = machine.handle(fe.Observed((placed(1), placed(3)), 2.0), 2.0)
    assert ids(effects, fe.Request) == ["e-4"]
    assert ids(effects, fe.ReleasePlacement) == ids(effects, fe.DrainNode) == []
    found = (placed(1), placed(2), placed(3), placed(4))
    assert ids(machine.handle(fe.Observed(found, 3.0), 3.0), fe.ReleasePlacement) == ["e-4"]
    silent = (*everyone[:2], serving(3, silent=True, members=0))
    machine.handle(fe.JobHeard(silent), 4.0)
    machine.handle(fe.Observed(found[:3], 5.0), 5.0)
    effects = machine.handle(Tick(), 10.0)
    assert ids(effects, fe.ReleasePlacement) == ["e-3"]


def test_failure_domains_are_told_until_the_job_knows_them() -> None:
    machine = three_nodes()
    everyone = (serving(1), serving(2), serving(3))
    told = fe.LabelNode(placed(2).id, ("rack=r7",))
    found = (placed(1), placed(2, None, "rack=r7"), placed(3))
    assert machine.handle(fe.Observed(found, 2.0), 2.0) == [told]
    assert machine.handle(fe.JobHeard(everyone), 3.0) == []
    assert machine.handle(fe.JobHeard(everyone), 8.0) == [told]
    otherwise = (serving(1), serving(2, domains=("rack=r8",)), serving(3))  # said on the machine
    assert machine.handle(fe.JobHeard(otherwise), 20.0) == []


def test_surplus_is_given_back_one_at_a_time() -> None:
    machine = three_nodes()
    assert ids(machine.handle(fe.NodesWanted(1), 2.0), fe.DrainNode) == ["e-2"]
    left = (serving(1), serving(2, draining="x", members=0), serving(3))
    assert ids(machine.handle(fe.JobHeard(left), 3.0), fe.DrainNode) == ["e-3"]


def test_a_node_is_given_back_once_nothing_in_its_memory_is_needed() -> None:
    machine = three_nodes()
    leaving = serving(2, draining="x", members=0)
    for needed, at, released in ((True, 20.0, []), (False, 21.0, []), (False, 40.0, ["e-2"])):
        seen = (serving(1), dataclasses.replace(leaving, needed=needed), serving(3))
        assert ids(machine.handle(fe.JobHeard(seen), at), fe.ReleasePlacement) == released


def test_a_waiting_request_is_made_anew_once_a_host_may_be_used_again() -> None:
    """The cluster has three hosts; one of them fails, and comes back."""
    machine = three_nodes()
    machine.handle(fe.JobHeard((serving(1), serving(2), serving(3, members=0, silent=True))), 2.0)
    found = machine.handle(Tick(), 7.0)
    (first,) = (e for e in found if isinstance(e, fe.Request))
    assert first.avoid == ("h3",)
    machine.handle(fe.RequestAnswered(first.id), 8.0)
    waits = Placement(id=first.id, handle="4", holding=Holding.WAITING)
    listed = fe.Observed((placed(1), placed(2), waits), 9.0)
    assert machine.handle(listed, 9.0) == []
    assert machine.deadline() == 14.0
    at, again = 9.0, []
    while not ids(again, fe.Request) and at < 100.0:
        at += 1.0
        again = machine.handle(Tick(), at)
    assert at == 9.0 + FleetPolicy(prefix="", nodes=3, nodes_max=4).picky_s
    assert ids(again, fe.ReleasePlacement) == ["e-4"]
    assert [e.avoid for e in again if isinstance(e, fe.Request)] == [()]


def test_a_request_that_is_refused_soon_accepts_hosts_that_have_failed() -> None:
    """Slurm refuses a job that every host is barred from, and lists it as ended."""
    machine = three_nodes()
    machine.handle(fe.JobHeard((serving(1), serving(2), serving(3, members=0, silent=True))), 2.0)
    asked = [e for e in machine.handle(Tick(), 7.0) if isinstance(e, fe.Request)]
    at, avoided = 7.0, []
    while asked and at < 60.0:
        (request,) = asked
        avoided.append(request.avoid)
        refused = Placement(id=request.id, handle="4", holding=Holding.ENDED, why="BadConstraints")
        machine.handle(fe.RequestAnswered(request.id, "it is not available"), at + 0.1)
        machine.handle(fe.Observed((placed(1), placed(2), refused), at + 0.2), at + 0.2)
        asked = []
        while not asked and at < 60.0 and avoided[-1]:
            at += 1.0
            asked = [e for e in machine.handle(Tick(), at) if isinstance(e, fe.Request)]
    assert avoided == [("h3",), ("h3",), ("h3",), ()]


@pytest.mark.parametrize("why", ["", "OOMKilled"])
def test_a_lost_node_is_noted_with_the_managers_reason(why: str) -> None:
    machine = three_nodes()
    ended = dataclasses.replace(placed(1), holding=Holding.ENDED, why=why)
    machine.handle(fe.Observed((ended, placed(2), placed(3)), 2.0), 2.0)
    lost = (serving(1, members=0, silent=True), serving(2), serving(3))
    notes = [e.text for e in machine.handle(fe.JobHeard(lost), 3.0) if isinstance(e, fe.Note)]
    said = " (OOMKilled)" if why else ""
    assert notes == [f"node {PREFIX}e-1 (on h1): its agent is lost{said}; h1 is avoided for 60 s"]


def test_a_lost_node_that_its_manager_lists_again_counts_once_against_its_host() -> None:
    """Slurm lists a step again that had ended while slurmctld was away."""
    machine = three_nodes()
    machine.handle(fe.Observed((placed(2), placed(3)), 2.0), 2.0)
    seen = (serving(1, members=0, silent=True), serving(2), serving(3))
    effects = machine.handle(fe.JobHeard(seen), 3.0)
    again = fe.Observed((placed(1), placed(2), placed(3)), 4.0)
    effects += machine.handle(again, 4.0) + machine.handle(Tick(), 13.0)
    lost = [e.text for e in effects if isinstance(e, fe.Note) and "avoided" in e.text]
    assert [text.partition("avoided for ")[2] for text in lost] == ["60 s", "50 s"]


@pytest.mark.parametrize("others_run", [True, False])
def test_what_an_error_on_its_host_keeps_waiting_is_replaced_if_others_run(
    others_run: bool,
) -> None:
    """An image that no host can pull is an error of the job: no host is to blame for it."""
    machine = FleetMachine(FleetPolicy(prefix=PREFIX, nodes=2, nodes_max=3), "e")
    machine.handle(fe.Observed((), 0.0), 0.0)
    machine.handle(fe.JobHeard(()), 0.0)
    waits = dataclasses.replace(placed(1), holding=Holding.WAITING, why="ErrImagePull on h1")
    stuck = dataclasses.replace(waits, stuck=True)
    other = placed(2) if others_run else dataclasses.replace(stuck, id=placed(2).id, host="h2")
    seen = [other, stuck]
    machine.handle(fe.Observed(tuple(seen), 1.0), 1.0)
    machine.handle(fe.JobHeard((serving(2),) if others_run else ()), 1.0)
    starts = dataclasses.replace(stuck, why="", stuck=False)
    machine.handle(fe.Observed((other, starts), 50.0), 50.0)  # it is tried again
    machine.handle(fe.Observed(tuple(seen), 55.0), 55.0)
    assert machine.handle(Tick(), 110.0) == []
    effects = machine.handle(Tick(), 115.0)
    assert ids(effects, fe.ReleasePlacement) == (["e-1"] if others_run else [])
    assert machine.snapshot().avoided == (("h1",) if others_run else ())
    if others_run:
        told = next(e.text for e in effects if isinstance(e, fe.Note))
        assert "it is kept waiting (ErrImagePull on h1); h1 is avoided" in told
        (request,) = [
            e for e in machine.handle(Tick(), 120.0) + effects if isinstance(e, fe.Request)
        ]
        assert request.avoid == ("h1",)


def test_nothing_is_done_before_the_manager_was_asked_once() -> None:
    machine = FleetMachine(FleetPolicy(prefix=PREFIX, nodes=1, nodes_max=3), "f")
    heard = fe.JobHeard((serving(1), serving(2), serving(3)))
    for now in range(600):
        for event in (heard, Tick()):
            found = machine.handle(event, float(now))
            assert all(isinstance(effect, fe.Note) for effect in found)


@pytest.mark.parametrize("seed", range(SEEDS))
def test_the_truth_agrees_with_the_invariants(seed: int) -> None:
    run_fleet(seed)


@pytest.mark.slow
def test_the_truth_agrees_with_the_invariants_in_many_more_runs() -> None:
    for seed in range(SEEDS, 400):
        run_fleet(seed)


# ---------------------------------------------------------------- planted bugs

Plant = Callable[[pytest.MonkeyPatch], Faults | None]
PLANTED: list[Plant] = []


def planted(plant: Plant) -> Plant:
    PLANTED.append(plant)
    return plant


@planted
def a_request_is_repeated_before_a_listing_tells(patch: pytest.MonkeyPatch) -> Faults | None:
    patch.setattr(FleetNode, "is_asked", property(lambda self: False))
    return Faults(lost_answers=0.5, late_listings_s=12.0)


@planted
def an_old_listing_is_believed(patch: pytest.MonkeyPatch) -> Faults | None:
    plain = FleetMachine._observe

    def observe(self: FleetMachine, found: tuple[Placement, ...], at: float, now: float) -> None:
        plain(self, found, at, now)
        self._observed_at = float("-inf") if now < 1e9 and self._ended_at is None else at

    patch.setattr(FleetMachine, "_observe", observe)
    return Faults(late_listings_s=12.0, kill_every_s=60.0)


@planted
def the_manager_decides_who_is_lost(patch: pytest.MonkeyPatch) -> Faults | None:
    plain = FleetNode.judge

    def judge(self: FleetNode, policy: FleetPolicy, now: float, **facts: bool) -> tuple[str, bool]:
        if self.ending is not None:
            return "its manager has ended it", False
        return plain(self, policy, now, **facts)

    patch.setattr(FleetNode, "judge", judge)
    return Faults(disown_every_s=40.0)


@planted
def a_new_machine_asks_before_it_knows(patch: pytest.MonkeyPatch) -> Faults | None:
    plain = FleetMachine.handle

    def handle(self: FleetMachine, event: fe.FleetEvent, now: float) -> list[fe.FleetEffect]:
        self._observed_at = max(self._observed_at, -1.0)
        return plain(self, event, now)

    patch.setattr(FleetMachine, "handle", handle)
    return Faults(restart_every_s=60.0, late_listings_s=12.0)


@planted
def surplus_is_given_back_before_the_job_was_heard(patch: pytest.MonkeyPatch) -> Faults | None:
    plain = FleetMachine._drop_surplus

    def drop(self: FleetMachine) -> object:
        heard, self._job_heard = self._job_heard, True
        yield from plain(self)
        self._job_heard = heard

    patch.setattr(FleetMachine, "_drop_surplus", drop)
    return Faults(restart_every_s=10.0, disown_every_s=20.0)


@planted
def all_leave_at_once(patch: pytest.MonkeyPatch) -> Faults | None:
    patch.setattr(FleetNode, "is_disturbed", property(lambda self: False))
    return Faults(notice_every_s=20.0)


@planted
def a_deadline_is_not_looked_at(patch: pytest.MonkeyPatch) -> Faults | None:
    plain = FleetMachine._drain

    def drain(self: FleetMachine, now: float) -> object:
        for effect in plain(self, now):
            if not (isinstance(effect, fe.DrainNode) and effect.until is not None):
                yield effect

    patch.setattr(FleetMachine, "_drain", drain)
    return Faults(notice_every_s=40.0)


@planted
def hosts_that_fail_are_asked_again(patch: pytest.MonkeyPatch) -> Faults | None:
    patch.setattr(HostStrikes, "hosts_to_avoid", lambda self, now: [])
    return Faults(bad_hosts=5, kill_every_s=10.0)


@planted
def a_request_that_waits_keeps_its_old_list(patch: pytest.MonkeyPatch) -> Faults | None:
    patch.setattr(FleetNode, "reason_to_renew", lambda self, policy, avoided, now: "")
    return Faults(reboot_every_s=40.0, queues=True, spare_hosts=0)


@planted
def a_refused_request_waits_ever_longer(patch: pytest.MonkeyPatch) -> Faults | None:
    slow = dataclasses.replace(fleet_kit.POLICY, retry_max_s=3600.0)
    patch.setattr(fleet_kit, "POLICY", slow)
    return Faults(refusals=0.9, reboot_every_s=40.0, spare_hosts=0)


@planted
def a_manager_that_was_never_asked_has_ended_all(patch: pytest.MonkeyPatch) -> Faults | None:
    plain = FleetMachine._hear

    def hear(self: FleetMachine, nodes: tuple[NodeSeen, ...], now: float) -> object:
        before = set(self._nodes)
        yield from plain(self, nodes, now)
        for node in self._nodes.values():
            if node.id not in before:
                node.ending, node.missing_at = Ending(now - 60.0), now

    patch.setattr(FleetMachine, "_hear", hear)
    return Faults(restart_every_s=60.0, away_every_s=40.0)


@planted
def copies_are_kept(patch: pytest.MonkeyPatch) -> Faults | None:
    plain = FleetNode.list

    def listed(self: FleetNode, found: tuple[Placement, ...], at: float, now: float) -> None:
        plain(self, found, at, now)
        self.copies = ()

    patch.setattr(FleetNode, "list", listed)
    return Faults(copies=0.3)


@planted
def it_finishes_without_a_last_listing(patch: pytest.MonkeyPatch) -> Faults | None:
    plain = FleetMachine._advance

    def advance(self: FleetMachine, now: float) -> object:
        yield from plain(self, now)
        if self._ended_at is not None and not self._finished:
            self._finished = True
            yield fe.Finished()

    patch.setattr(FleetMachine, "_advance", advance)
    return Faults()


@pytest.mark.parametrize("plant", PLANTED, ids=lambda plant: plant.__name__)
def test_a_planted_bug_is_caught(plant: Plant, monkeypatch: pytest.MonkeyPatch) -> None:
    for seed in range(12):
        with monkeypatch.context() as patch:
            faults = plant(patch)
            try:
                run_fleet(seed, faults)
            except (AssertionError, InvariantError):
                break
    else:
        pytest.fail("no seed finds it")
    run_fleet(seed, faults)  # and the unchanged code passes

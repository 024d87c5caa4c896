"""Checks the rules of a fleet one by one: lost placements, hosts that fail, times to look."""

from __future__ import annotations

import pytest

from fleet_kit import PREFIX
from holdfast.engine.core.fleet import fleet_events as fe
from holdfast.engine.core.fleet.fleet import FleetMachine, HostStrikes
from holdfast.engine.core.fleet.fleet_node import FleetNode
from holdfast.engine.core.fleet.placements import (
    FleetPolicy,
    Holding,
    NodeSeen,
    Notice,
    Placement,
    PlacementId,
)
from holdfast.engine.core.types import Tick

POLICY = FleetPolicy(prefix=PREFIX, nodes=1, nodes_max=2)
ID = PlacementId(f"{PREFIX}e-1")


def placed(holding: Holding = Holding.RUNNING, id_: str = ID, host: str = "h1") -> Placement:
    return Placement(id=PlacementId(id_), handle=f"{id_} there", holding=holding, host=host)


def kept(node: FleetNode, *, at: float = 0.0, notice: Notice | None = None) -> FleetNode:
    found = Placement(id=ID, handle="x", holding=Holding.RUNNING, host="h1", notice=notice)
    node.list([found], at, at)
    return node


# ---------------------------------------------------------------- one placement


@pytest.mark.parametrize(("host", "blamed"), [("h1", True), ("", False)])
def test_a_host_is_blamed_for_a_node_that_ends_before_its_agent_is_heard(
    host: str, blamed: bool
) -> None:
    node = FleetNode(ID)
    node.list([placed(host=host)], 1.0, 1.0)
    assert node.judge(POLICY, 1.0) == ("", False)
    node.list([placed(Holding.ENDED, host=host)], 2.0, 2.0)
    assert node.judge(POLICY, 2.0) == ("it ended before its agent was heard", blamed)


def test_a_placement_that_was_never_listed_has_not_ended() -> None:
    node = FleetNode(ID)
    node.list([], 1.0, 1.0)
    assert node.exists
    node.list([placed()], 2.0, 2.0)
    node.list([], 3.0, 3.0)
    assert not node.exists
    assert node.host == "h1"  # it was on that host


def test_only_a_listed_placement_tells_the_host_on_which_one_has_ended() -> None:
    node = FleetNode(ID)
    node.list([placed(Holding.ENDED, host="h7")], 1.0, 1.0)
    assert node.host == "h7"
    assert not node.exists


def test_an_agent_is_heard_for_the_first_time_only_once() -> None:
    node, seen = FleetNode(ID), NodeSeen(name=ID, members=1)
    assert not node.hear(None, 1.0)
    assert not node.heard
    assert node.hear(seen, 2.0)
    assert not node.hear(seen, 3.0)
    assert not node.hear(None, 4.0)  # it is silent now
    assert node.heard
    assert not node.is_alive


def test_a_placement_is_over_if_its_agent_is_not_heard_for_too_long() -> None:
    node = kept(FleetNode(ID), at=10.0)
    assert node.judge(POLICY, 10.0 + POLICY.join_s - 0.1) == ("", False)
    why, blamed = node.judge(POLICY, 10.0 + POLICY.join_s)
    assert "was not heard in" in why
    assert blamed


@pytest.mark.parametrize(
    ("first", "second", "until"),
    [(None, 9.0, 9.0), (5.0, None, 5.0), (5.0, 9.0, 5.0), (9.0, 5.0, 5.0), (None, None, None)],
)
def test_of_repeated_notices_the_earliest_deadline_counts(
    first: float | None, second: float | None, until: float | None
) -> None:
    node = kept(FleetNode(ID), notice=Notice(reason="a", until=first))
    kept(node, notice=Notice(reason="b", until=second))
    assert node.notice == Notice(reason="b", until=until)
    assert kept(node).notice is None  # it was withdrawn


def test_times_to_look_are_those_at_which_something_changes() -> None:
    node = FleetNode(ID, retry_at=7.0, answer_until=8.0, drain_at=9.0)
    assert {7.0, 8.0, 9.0} == set(node.alarms(POLICY))
    running = kept(FleetNode(ID), at=3.0)
    assert set(running.alarms(POLICY)) == {3.0 + POLICY.join_s}
    warned = kept(FleetNode(ID), at=3.0, notice=Notice(reason="a", until=500.0))
    assert 500.0 - POLICY.drain_lead_s in set(warned.alarms(POLICY))


# ---------------------------------------------------------------- hosts that fail


def test_a_host_is_avoided_for_longer_each_time_until_it_has_served_for_long_enough() -> None:
    strikes = HostStrikes(POLICY)
    assert strikes.strike("h1", PlacementId("a"), 0.0) == POLICY.avoid_s
    assert strikes.hosts_to_avoid(POLICY.avoid_s - 0.1) == ["h1"]
    assert strikes.strike("h1", PlacementId("a"), 10.0) == POLICY.avoid_s - 10.0  # the same failure
    assert strikes.hosts_to_avoid(POLICY.avoid_s) == []
    assert strikes.strike("h1", PlacementId("b"), 1000.0) == 2 * POLICY.avoid_s
    strikes.note_serving(["h1"], 2000.0)
    strikes.note_serving([], 2001.0)  # it has to begin again
    strikes.note_serving(["h1"], 2002.0)
    strikes.note_serving(["h1"], 2002.0 + POLICY.probation_s - 0.1)
    assert strikes.count_strikes("h1") == 2
    strikes.note_serving(["h1"], 2002.0 + POLICY.probation_s)
    assert strikes.count_strikes("h1") == 0
    assert strikes.strike("h1", PlacementId("c"), 9000.0) == POLICY.avoid_s


# ---------------------------------------------------------------- the fleet


def asked(effects: list[fe.FleetEffect]) -> list[str]:
    return [e.id for e in effects if isinstance(e, fe.Request)]


def test_each_failure_in_a_row_delays_the_next_request_more() -> None:
    machine, now = FleetMachine(POLICY, "e"), 0.0
    waits: list[float] = []
    again: list[str] = []
    machine.handle(fe.Observed((), now), now)
    (id_,) = asked(machine.handle(fe.JobHeard(()), now))
    for number in range(3):
        now += 1.0
        found = placed(id_=id_, host=f"h{number}")
        assert asked(machine.handle(fe.Observed((found,), now), now)) == []
        now += 1.0
        ended = placed(Holding.ENDED, id_, f"h{number}")
        assert asked(machine.handle(fe.Observed((ended,), now), now)) == []
        failed_at, again = now, []
        while not again:
            at = machine.deadline()
            assert at is not None
            now = at
            again = asked(machine.handle(Tick(), now))
        (id_,) = again
        waits.append(now - failed_at)
    assert waits == [POLICY.retry_s, 2 * POLICY.retry_s, 4 * POLICY.retry_s]


def test_a_node_that_its_manager_has_ended_is_left_after_a_while() -> None:
    machine = FleetMachine(POLICY, "e")
    machine.handle(fe.Observed((), 0.0), 0.0)
    (id_,) = asked(machine.handle(fe.JobHeard(()), 0.0))
    machine.handle(fe.Observed((placed(id_=id_),), 1.0), 1.0)
    here = fe.JobHeard((NodeSeen(name=id_, members=1),))
    machine.handle(here, 1.0)
    machine.handle(fe.Observed((), 2.0), 2.0)
    late = 2.0 + POLICY.disowned_s
    none = fe.Observed((), late - 0.1)
    for event in (none, here):  # nothing is concluded while the manager cannot be asked
        assert not [e for e in machine.handle(event, late) if isinstance(e, fe.DrainNode)]
    none = fe.Observed((), late)
    (drain,) = [e for e in machine.handle(none, late) if isinstance(e, fe.DrainNode)]
    assert drain.reason == "its manager has ended it"

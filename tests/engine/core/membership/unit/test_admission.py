"""Nodes take part up to a maximum; lost and drained nodes make room for new ones."""

from __future__ import annotations

from typing import Any

from holdfast.engine.core.membership.admission import Attendance, admit
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.core.types import AgentId
from roster_kit import LEASE, Cluster, member, status, view_of

N0, N1, N2 = AgentId("n0"), AgentId("n1"), AgentId("n2")
AT_MOST_TWO = CoordinatorPolicy(virtual_ranks=2, nodes_max=2)


def admitted(cluster: Cluster, *words: Any, **fields: Any) -> tuple[tuple[AgentId, ...], list[str]]:
    """Give nodes their slots; return the nodes that wait, and the lines."""
    waiting, plan = admit(cluster.facts(*words, **fields), AT_MOST_TWO)
    return waiting, cluster.change(*plan)


def test_a_node_that_is_drained_makes_room_before_it_is_left() -> None:
    cluster = Cluster(member(0), member(1))
    cluster.hear("n2")
    cluster.hear("n3")
    view = view_of(0, 1)
    cluster.drain("n1")
    assert admitted(cluster, view) == ((AgentId("n3"),), [])
    assert cluster.roster.workers_of(N2) == (2,)
    assert admitted(cluster, view) == ((AgentId("n3"),), []), "it keeps its place"
    cluster.drain("n1", "")
    admitted(cluster, view)
    assert not cluster.roster.workers_of(N2), "two members are enough again"


def test_a_drained_node_that_is_lost_makes_no_further_room() -> None:
    cluster = Cluster(member(0), member(1))
    cluster.hear("n2")
    cluster.drain("n1")
    view, late = view_of(0), 1.0 + LEASE.abandon_s + LEASE.margin_s
    assert admitted(cluster, view) == ((), []), "it makes room as it is drained"
    cluster.hear("n3")
    assert admitted(cluster, view, 1, now=late) == ((AgentId("n3"),), []), "n0 and n2 take part"


def test_a_limited_number_of_nodes_takes_part_and_a_lost_one_makes_room() -> None:
    cluster = Cluster(member(0), member(1))
    cluster.hear("n2")
    view, late = view_of(0, 1), 1.0 + LEASE.abandon_s + LEASE.margin_s
    assert admitted(cluster, view) == ((N2,), [])
    assert admitted(cluster, view, 2) == ((), [])  # a silent node gets no worker
    assert admitted(cluster, view, 1, now=late - 0.1) == ((N2,), [])
    assert admitted(cluster, view, 1, now=late) == ((), ["node n2 takes the place of node n1"])
    assert cluster.roster.workers_of(N2) == (2,)
    assert cluster.roster.workers_of(N1) == ()
    cluster.hear("n0", member(0), slots=2)  # further slots of a node that takes part
    assert admitted(cluster, view) == ((N1,), [])
    assert cluster.roster.workers_of(N0) == (0, 3)


def test_of_too_many_nodes_those_without_members_are_dismissed() -> None:
    """A coordinator without its record has taken back every node that reported."""
    cluster = Cluster(member(0), status(1), status(2))
    waiting, _ = admitted(cluster, view_of(0))
    assert sorted(cluster.roster.nodes_with_places) == ["n0", "n2"]
    assert waiting == (N1,)


def test_news_of_nodes_is_reported_once() -> None:
    cluster = Cluster(member(0), member(1))

    def attend(before: Attendance, silent: int, *waiting: AgentId, why: str = "") -> Any:
        now, first = before.tell_waiting(waiting)
        now, second = now.tell_silent(cluster.facts(None, silent))
        now, third = now.tell_not_drained(why)
        return now, cluster.change(*first, *second, *third)

    before, lines = attend(Attendance(), 1, N2, why="too many")
    assert lines == [
        "node n2 waits: the job has all the nodes it may have or can use",
        "node n1 is silent",
        "nodes that fail their checks are used on: too many",
    ]
    assert attend(before, 1, N2, why="too many") == (before, [])
    after, lines = attend(before, 0)
    assert lines == ["node n0 is silent", "node n1 is heard again"]
    assert after == Attendance(silent=(N0,))

"""Where servers of tables run: the coordinator's decision, and each node's own."""

from __future__ import annotations

import pytest

from holdfast.core.errors import InvariantError
from holdfast.core.membership.server_places import ServerPlaces
from holdfast.core.servers.placement import find_holders
from holdfast.core.servers.server_host import (
    BookArrived,
    EndServer,
    ServerEnded,
    ServerFroze,
    ServerHost,
    ServerListens,
    StartServer,
    TellServers,
)
from holdfast.core.types import AgentId, RunningServer, ServerPlace, Tick
from roster_kit import LEASE, Cluster, member, view_of


def nodes_of(places: ServerPlaces) -> list[str]:
    return [place.agent for place in places.book]


def test_servers_are_spread_evenly_and_stay_where_they_are() -> None:
    cluster = Cluster(member(0), member(1))
    places, lines = ServerPlaces(3).review(cluster.facts())
    assert nodes_of(places) == ["n0", "n1", "n0"]
    assert lines == []
    cluster.hear("n2", member(2))
    assert places.review(cluster.facts()) == (places, [])


def test_servers_wait_for_the_nodes_with_which_the_job_begins() -> None:
    cluster = Cluster(member(0))
    places, _ = ServerPlaces(2, nodes_min=2).review(cluster.facts())
    assert places.book == ()
    cluster.hear("n1", member(1))
    assert nodes_of(places.review(cluster.facts())[0]) == ["n0", "n1"]


def test_servers_do_not_wait_once_the_job_has_begun() -> None:
    cluster = Cluster(member(0))
    view = view_of(0)
    places, _ = ServerPlaces(1, nodes_min=2).review(cluster.facts(view))
    assert nodes_of(places) == ["n0"]


def test_without_servers_nothing_is_placed() -> None:
    assert ServerPlaces(0).review(Cluster(member(0)).facts())[0].book == ()


def test_a_server_moves_only_once_its_node_is_given_up() -> None:
    cluster = Cluster(member(0), member(1))
    places, _ = ServerPlaces(2).review(cluster.facts())
    given_up = cluster.now + LEASE.abandon_s + LEASE.margin_s
    cluster.now = given_up - 0.1
    cluster.hear("n0", member(0))
    cluster.hear("n0", member(0))
    assert nodes_of(places.review(cluster.facts(None, 1))[0]) == ["n0", "n1"]
    cluster.now = given_up + 1.0
    moved, lines = places.review(cluster.facts(None, 1))
    assert nodes_of(moved) == ["n0", "n0"]
    assert [line.text for line in lines] == ["server 1 moves from n1 to n0"]


def test_a_server_leaves_a_node_that_is_drained_unless_there_is_no_other() -> None:
    cluster = Cluster(member(0), member(1))
    places, _ = ServerPlaces(2).review(cluster.facts())
    cluster.drain("n1")
    assert nodes_of(places.review(cluster.facts())[0]) == ["n0", "n0"]
    cluster.drain("n0")
    assert nodes_of(places.review(cluster.facts())[0]) == ["n0", "n1"]


def test_addresses_are_those_that_nodes_have_told() -> None:
    cluster = Cluster(member(0))
    places, _ = ServerPlaces(1).review(cluster.facts())
    assert [place.address for place in places.book] == [""]
    running = RunningServer(number=0, incarnation=1, address="h:1", pid=7)
    cluster.hear("n0", member(0), servers=(running,))
    told, _ = places.review(cluster.facts())
    assert [place.address for place in told.book] == ["h:1"]
    assert ServerPlaces.recall(1, 1, told.book) == told


BOOK = (
    ServerPlace(number=0, agent=AgentId("here")),
    ServerPlace(number=1, agent=AgentId("there")),
)


def test_a_node_runs_its_own_servers_and_starts_them_again() -> None:
    host = ServerHost(AgentId("here"))
    assert host.handle(BookArrived(BOOK), 0.0) == [StartServer(0, 1)]
    assert host.handle(ServerListens(0, 1, "h:1", 7), 0.1) == [TellServers()]
    assert host.report() == (RunningServer(number=0, incarnation=1, address="h:1", pid=7),)
    assert host.handle(ServerEnded(0, 1), 0.2) == [TellServers(), StartServer(0, 2)]
    assert host.report() == ()
    host.check()


def test_a_server_that_keeps_ending_is_started_after_longer_and_longer_pauses() -> None:
    host, now = ServerHost(AgentId("here")), 0.0
    host.handle(BookArrived(BOOK), now)
    pauses = []
    for incarnation in range(1, 7):
        host.handle(ServerEnded(0, incarnation), now)
        at = host.deadline() if host.deadline() is not None else now
        assert at is not None
        pauses.append(at - now)
        now = at
        host.handle(Tick(), now)
    assert pauses == [0.0, 0.25, 0.5, 1.0, 2.0, 4.0]
    host.handle(ServerListens(0, 7, "h:1", 7), now)
    assert StartServer(0, 8) in host.handle(ServerEnded(0, 7), now + 100.0)


def test_a_frozen_server_is_ended() -> None:
    host = ServerHost(AgentId("here"))
    host.handle(BookArrived(BOOK), 0.0)
    host.handle(ServerListens(0, 1, "h:1", 7), 0.1)
    assert host.handle(ServerFroze(0, 1), 1.0) == [EndServer(0, 1)]
    assert host.handle(ServerFroze(0, 9), 1.0) == []


@pytest.mark.parametrize("event", [BookArrived(BOOK[1:]), BookArrived(BOOK, over=True)])
def test_servers_that_are_not_wanted_any_more_are_ended(event: BookArrived) -> None:
    host = ServerHost(AgentId("here"))
    host.handle(BookArrived(BOOK), 0.0)
    assert host.handle(event, 1.0) == [EndServer(0, 1)]
    assert host.handle(ServerEnded(0, 1), 1.1) == [TellServers()]
    assert host.is_empty
    assert host.deadline() is None


def test_reports_of_older_processes_change_nothing() -> None:
    host = ServerHost(AgentId("here"))
    host.handle(BookArrived(BOOK), 0.0)
    host.handle(ServerEnded(0, 1), 0.1)
    assert host.handle(ServerListens(0, 1, "h:1", 7), 0.2) == []
    assert host.handle(ServerEnded(0, 1), 0.3) == []
    assert host.report() == ()
    host.check()


def test_replicas_need_as_many_servers() -> None:
    with pytest.raises(InvariantError, match="3 replicas on 2 servers"):
        find_holders(2, 3)

"""Where servers of tables run: the coordinator's decision, and each node's own."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from holdfast.engine.core.directives import Directive
from holdfast.engine.core.hosted_service import RunningServer, ServerLayout, ServerPlace
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership.departure import Departure
from holdfast.engine.core.membership.formation import LEAVE_RESERVE_S
from holdfast.engine.core.membership.server_host import (
    BookArrived,
    EndServer,
    ServerEnded,
    ServerFroze,
    ServerHost,
    ServerListens,
    StartServer,
    TellServers,
)
from holdfast.engine.core.membership.server_places import ServerPlaces
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.core.types import AgentId, Incarnation, Tick
from holdfast.engine.core.views import View
from roster_kit import LEASE, Cluster, member, stopped, view_of


def places_of(servers: int, nodes_min: int = 1) -> ServerPlaces:
    return ServerPlaces(ServerLayout(count=servers, goal=servers), nodes_min)


def recalled(servers: int, book: tuple[ServerPlace, ...], **kept: Any) -> ServerPlaces:
    """Return the places that a coordinator of a job that began with `servers` has recorded."""
    policy = CoordinatorPolicy(virtual_ranks=2, servers=servers)
    return ServerPlaces.recall(policy, JobRecord(term=1, servers=book, **kept), 0)


def nodes_of(places: ServerPlaces) -> list[str]:
    return [place.agent for place in places.book]


def test_servers_are_spread_evenly_and_stay_where_they_are() -> None:
    cluster = Cluster(member(0), member(1))
    places, lines = places_of(3).review(cluster.facts())
    assert nodes_of(places) == ["n0", "n1", "n0"]
    assert lines == []
    cluster.hear("n2", member(2))
    assert places.review(cluster.facts()) == (places, [])


def test_servers_wait_for_the_nodes_with_which_the_job_begins() -> None:
    cluster = Cluster(member(0))
    places, _ = places_of(2, 2).review(cluster.facts())
    assert places.book == ()
    cluster.hear("n1", member(1))
    assert nodes_of(places.review(cluster.facts())[0]) == ["n0", "n1"]


def test_servers_do_not_wait_once_the_job_has_begun() -> None:
    cluster = Cluster(member(0))
    view = view_of(0)
    places, _ = places_of(1, 2).review(cluster.facts(view))
    assert nodes_of(places) == ["n0"]


def test_without_servers_nothing_is_placed() -> None:
    assert places_of(0).review(Cluster(member(0)).facts())[0].book == ()


def test_a_server_moves_only_once_its_node_is_given_up() -> None:
    cluster = Cluster(member(0), member(1))
    places, _ = places_of(2).review(cluster.facts())
    given_up = cluster.now + LEASE.abandon_s + LEASE.margin_s
    cluster.now = given_up - 0.1
    cluster.hear("n0", member(0))
    cluster.hear("n0", member(0))
    assert nodes_of(places.review(cluster.facts(None, 1))[0]) == ["n0", "n1"]
    cluster.now = given_up + 1.0
    moved, lines = places.review(cluster.facts(None, 1))
    assert nodes_of(moved) == ["n0", "n0"]
    assert [line.text for line in lines] == ["server 1 moves from n1 to n0"]


class Move:
    """Moves server 1 from node n1, which is drained, to n0. `places`: as they are now."""

    def __init__(self, **report: Any) -> None:
        self.cluster = Cluster(member(0), member(1))
        self.places, _ = places_of(2).review(self.cluster.facts())
        self.cluster.hear("n0", member(0), servers=(running(0, "h0:1"),))
        self.cluster.hear("n1", member(1), servers=(running(1, "h1:1"),), **report)
        self.cluster.drain("n1")
        self.lines = self.review()

    def review(self, *silent: int, view: View | None = None) -> list[str]:
        self.places, lines = self.places.review(self.cluster.facts(view or view_of(0, 1), *silent))
        return [line.text for line in lines]

    def start_heir(self, *complete: str) -> list[str]:
        """Start the heir's server; worker 0 reports these complete heirs. Return the lines."""
        servers = running(0, "h0:1"), running(1, "h0:2", 1)
        self.cluster.hear("n0", member(0, heirs=complete), servers=servers)
        return self.review()

    @property
    def book(self) -> list[tuple[int, str, str, bool]]:
        return [(p.number, p.agent, p.address, p.heir) for p in self.places.book]


MOVING = [(0, "n0", "h0:1", False), (1, "n1", "h1:1", False), (1, "n0", "h0:2", True)]
MOVED = [(0, "n0", "h0:1", False), (1, "n0", "h0:2", False)]


def running(number: int, address: str, order: int = 0) -> RunningServer:
    return RunningServer(number=number, incarnation=1, address=address, order=order)


def test_a_server_of_a_drained_node_moves_once_its_heir_has_all_rows() -> None:
    move = Move()
    assert move.lines == ["server 1 is copied from n1 to n0"]
    assert move.start_heir() == []
    assert move.book == MOVING
    assert recalled(2, move.places.book) == move.places
    assert move.start_heir("elsewhere:1") == []
    assert move.start_heir("elsewhere:1", "h0:2") == ["server 1 moves from n1 to n0"]
    assert move.book == MOVED
    assert move.review() == []


def test_an_heir_is_given_up_once_its_server_can_stay() -> None:
    move = Move()
    move.cluster.drain("n1", "")
    assert move.review() == []
    assert move.book == [each for each in MOVING if not each[3]]


def test_another_heir_is_made_when_its_node_is_lost() -> None:
    move = Move()
    move.start_heir()
    move.cluster.hear("n2", member(2))
    assert move.review(0) == [], "it may come back"
    move.cluster.drain("n0")
    assert "server 1 is copied from n1 to n2" in move.review()
    assert {p.number: (p.agent, p.order) for p in move.places.book if p.heir}[1] == ("n2", 2)


def test_what_an_earlier_heir_has_does_not_count_for_the_next_one() -> None:
    move = Move()
    move.start_heir("h0:2")
    move.places = recalled(2, (*move.places.book[:1], FIRST))
    assert move.review() == ["server 1 is copied from n1 to n0"]
    assert move.book == [*MOVING[:2], (1, "n0", "", True)]
    assert move.review() == []
    servers = running(0, "h0:1"), running(1, "h0:3", 2)
    move.cluster.hear("n0", member(0, heirs=("h0:3",)), servers=servers)
    assert move.review() == ["server 1 moves from n1 to n0"]


FIRST = ServerPlace(number=1, agent=AgentId("n1"), address="h1:1")


def test_a_coordinator_that_has_forgotten_the_places_finds_them_again() -> None:
    move = Move()
    move.start_heir()
    move.places, _ = places_of(2).review(move.cluster.facts(view_of(0, 1)))
    assert move.book[:2] == MOVING[:2]
    assert [(p.agent, p.heir, p.order) for p in move.places.book[2:]] == [("n0", True, 2)]


@pytest.mark.parametrize("is_heir", [False, True])
def test_a_server_of_a_node_that_ends_soon_moves_at_once(is_heir: bool) -> None:
    move = Move(draining="it ends", leaves_in_s=10.0)
    if is_heir:
        move.start_heir()
    move.cluster.now += 10.0 - LEAVE_RESERVE_S - 0.1
    assert move.review() == []
    move.cluster.now += 0.1
    assert move.review() == ["server 1 moves from n1 to n0"]
    assert move.book == (MOVED if is_heir else [MOVED[0], (1, "n0", "", False)])


def test_a_server_of_a_drained_node_that_is_silent_moves_at_once() -> None:
    move = Move()
    move.start_heir()
    assert move.review(1) == ["server 1 moves from n1 to n0"]
    assert move.book == MOVED


@pytest.mark.parametrize("trains", [True, False])
def test_an_heir_is_waited_for_as_long_as_somebody_trains(trains: bool) -> None:
    move, word = Move(), member(0) if trains else stopped(0)
    move.start_heir()
    servers = running(0, "h0:1"), running(1, "h0:2", 1)
    move.cluster.hear("n1", stopped(1), servers=(running(1, "h1:1"),))
    move.cluster.hear("n0", word, servers=servers)
    move.cluster.now = move.cluster.roster.moved_at + LEASE.abandon_s - 0.1
    assert move.review() == []
    move.cluster.now += 100.0  # a step may take long
    move.cluster.hear("n0", word, servers=servers)
    assert move.review() == ([] if trains else ["server 1 moves from n1 to n0"])


def test_a_server_stays_on_a_drained_node_if_there_is_no_other() -> None:
    move = Move()
    move.cluster.drain("n0")
    assert move.review() == []
    assert [(p.agent, p.heir) for p in move.places.book] == [("n0", False), ("n1", False)]


class Leaver:
    """Is the departure of node n1 for good in 10 s, which its fifth report announces first."""

    def __init__(self) -> None:
        self.departure = Departure()
        self.departure.ask("a new fan", "", True, 10.0, 5)

    def may_end(self, heard: int, *places: ServerPlace, now: float = 0.0) -> bool:
        told = Directive(
            term=1,
            seq=1,
            agent=AgentId("n1"),
            agent_incarnation=Incarnation(1),
            heard=heard,
            servers=places,
        )
        return self.departure.may_end(AgentId("n1"), told, now, alone=False)


def test_a_node_leaves_once_its_servers_have_moved() -> None:
    node, mine = Leaver(), ServerPlace(number=1, agent=AgentId("n1"))
    heir = ServerPlace(number=1, agent=AgentId("n0"), heir=True)
    other = ServerPlace(number=0, agent=AgentId("n0"))
    assert not node.may_end(4, other, mine), "nobody knows yet that it leaves"
    assert not node.may_end(5, other, mine, heir)
    assert node.may_end(5, other, mine, heir, now=10.0), "it has to"
    assert node.may_end(5, other, mine), "no other node can have the server"
    assert node.may_end(5, other, ServerPlace(number=1, agent=AgentId("n0")))
    assert node.may_end(4), "there are no servers"


def test_a_node_that_was_not_asked_for_good_does_not_leave() -> None:
    node = Leaver()
    node.departure = Departure()
    assert not node.may_end(9)
    node.departure.ask("it fails a check", "disk", False, float("inf"), 5)
    assert not node.may_end(9)


def test_addresses_are_those_that_nodes_have_told() -> None:
    cluster = Cluster(member(0))
    places, _ = places_of(1).review(cluster.facts())
    assert [place.address for place in places.book] == [""]
    running = RunningServer(number=0, incarnation=1, address="h:1", pid=7)
    cluster.hear("n0", member(0), servers=(running,))
    told, _ = places.review(cluster.facts())
    assert [place.address for place in told.book] == ["h:1"]
    assert recalled(1, told.book) == told


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


def test_another_place_on_the_same_node_has_another_process() -> None:
    host = ServerHost(AgentId("here"))
    host.handle(BookArrived(BOOK), 0.0)
    host.handle(ServerListens(0, 1, "h:1", 7), 0.1)
    moved = (replace(BOOK[0], order=1), *BOOK[1:])
    assert host.handle(BookArrived(moved), 1.0) == [EndServer(0, 1)]
    assert StartServer(0, 2) in host.handle(ServerEnded(0, 1), 1.1)
    host.handle(ServerListens(0, 2, "h:2", 8), 1.2)
    (found,) = host.report()
    assert (found.address, found.order) == ("h:2", 1)
    assert host.handle(BookArrived(moved), 2.0) == []


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


# ---------------------------------------------------------------- another number of servers


class Scaling:
    """Scales 2 servers to another number; worker 0 on n0 reports. `places`: as they are now."""

    def __init__(self, goal: int, *others: int) -> None:
        self.cluster = Cluster(member(0), *map(member, others))
        self.members = 0, *others
        self.places, _ = places_of(2).review(self.cluster.facts())
        self.running = [running(0, "h:0"), running(1, "h:1")]
        self.hear(0)
        self.review()
        self.places, lines = self.places.scale(goal)
        self.lines = [line.text for line in lines]
        self.review()

    @property
    def layout(self) -> ServerLayout:
        return self.places.layout

    def hear(self, worker: int, *complete: str, layout: ServerLayout | None = None) -> None:
        """Deliver a worker's report; all servers run on n0."""
        status = member(worker, heirs=complete, layout=layout)
        servers = tuple(self.running) if worker == 0 else ()
        self.cluster.hear(f"n{worker}", status, servers=servers)

    def review(self) -> list[str]:
        self.places, lines = self.places.review(self.cluster.facts(view_of(*self.members)))
        return [line.text for line in lines]


def test_tables_are_on_more_servers_once_each_has_all_rows() -> None:
    scaling = Scaling(3)
    assert scaling.lines == ["the service goes from 2 servers to 3"]
    assert (scaling.layout.count, scaling.layout.goal) == (2, 3)
    assert [p.number for p in scaling.places.book] == [0, 1, 2]
    scaling.running.append(running(2, "h:2"))
    scaling.hear(0, "h:0", "h:1", layout=scaling.layout)
    assert scaling.review() == []
    scaling.hear(0, "h:0", "h:1", "h:2", layout=scaling.layout)
    assert scaling.review() == ["the service is on 3 servers now"]
    assert (scaling.layout.count, scaling.layout.goal) == (3, 3)


def test_former_servers_stay_until_the_others_have_their_rows() -> None:
    scaling = Scaling(1)
    assert [p.number for p in scaling.places.book] == [0, 1]
    scaling.hear(0, "h:0", layout=scaling.layout)
    assert scaling.review() == ["the service is on 1 server now"]
    assert [p.number for p in scaling.places.book] == [0]


def test_what_a_worker_says_of_another_layout_does_not_count() -> None:
    scaling = Scaling(1)
    before = replace(scaling.layout, number=0, goal=2)
    for stale in (None, before, replace(scaling.layout, number=7)):
        scaling.hear(0, "h:0", "h:1", layout=stale)
        assert scaling.review() == []


def test_every_member_knows_the_layout_before_it_is_left() -> None:
    scaling = Scaling(1, 1)
    scaling.hear(0, "h:0", layout=scaling.layout)
    assert scaling.review() == []
    scaling.hear(1, layout=replace(scaling.layout, number=0, goal=2))
    assert scaling.review() == []
    scaling.hear(1, layout=scaling.layout)
    assert scaling.review() == ["the service is on 1 server now"]


def test_another_order_replaces_one_that_is_under_way() -> None:
    scaling = Scaling(3)
    places, lines = scaling.places.scale(3)
    assert (places, lines) == (scaling.places, [])
    places, lines = places.scale(4)
    assert [line.text for line in lines] == ["the service goes from 2 servers to 4"]
    assert places.layout == ServerLayout(number=2, count=2, goal=4)
    places, lines = places.scale(2)
    assert [line.text for line in lines] == ["the service stays on 2 servers"]
    places, _ = places.review(scaling.cluster.facts(view_of(0)))
    assert [p.number for p in places.book] == [0, 1]


def test_a_coordinator_keeps_the_layout_and_finds_it_again_if_its_journal_is_lost() -> None:
    layout = ServerLayout(number=4, count=3, goal=5)
    kept = recalled(2, (), layout=layout)
    assert kept.layout == layout
    assert kept.recall_layout([member(0, layout=replace(layout, number=3, goal=3))]) == kept
    policy = CoordinatorPolicy(virtual_ranks=2, servers=2)
    guess = ServerPlaces.recall(policy, None, 1000)
    assert guess.layout == ServerLayout(number=1000, count=2, goal=2)
    assert guess.recall_layout([member(0)]) == guess
    found = guess.recall_layout([member(0, layout=layout), member(1)])
    assert found.layout == layout
    assert found.recall_layout([member(0, layout=replace(layout, number=2))]) == found

"""Virtual ranks that are summed early are hosted near each other, so few bytes leave a machine."""

from __future__ import annotations

import importlib
import random
from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.core.assignment import assign_at_boundary, assign_mid_step
from holdfast.engine.core.domains import Path, find_paths, order_kinds
from holdfast.engine.core.job_record import JobRecord, Slot
from holdfast.engine.core.membership import formation as fo
from holdfast.engine.core.membership import view_making as vm
from holdfast.engine.core.membership.live_roster import LiveRoster
from holdfast.engine.core.membership.view_making import Room
from holdfast.engine.core.redundancy import Recall
from holdfast.engine.core.step.balance import BalancePolicy, Balancer
from holdfast.engine.core.step.speeds import Speeds
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Follower, View
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.lab.sim.membership_checks import find_scattered
from places import ROOT
from roster_kit import Cluster, resting, status, stopped, view_of

MACHINE, RACK, ZONE = 3, 2, 1  # names at the beginning of a path, zones first
Paths = dict[WorkerId, Path]


@pytest.fixture(scope="module")
def bench() -> Iterator[Any]:
    with pytest.MonkeyPatch.context() as patch:
        patch.syspath_prepend(str(ROOT / "benchmarks"))
        yield importlib.import_module("machine_bytes")


def ids(*numbers: int) -> list[WorkerId]:
    return [WorkerId(number) for number in numbers]


def place(
    seed: int, machines: int, workers: int, racks: int = 1, zones: int = 1, first: int = 0
) -> Paths:
    """Place workers on machines, these in racks, these in zones: nothing is in order."""
    dice = random.Random(seed)
    numbers = dice.sample(range(first, first + machines * workers), machines * workers)
    names = [f"{dice.choice(('gpu', 'n', 'x-'))}{dice.randrange(100)}-{i}" for i in range(machines)]
    dice.shuffle(names)
    nodes = {}
    for i, number in enumerate(numbers):
        rack = i // workers * racks // machines
        labels = (f"rack=r{(5 * rack) % 7}-{rack}", f"zone={3 * (rack * zones // racks) % 5}")
        nodes[WorkerId(number)] = names[i // workers], labels
    return find_paths(nodes)


def workers_on(paths: Paths, path: Path) -> list[WorkerId]:
    return [worker for worker in sorted(paths) if paths[worker][: len(path)] == path]


# ---------------------------------------------------------------- kinds of domains


@pytest.mark.parametrize(
    ("nodes", "kinds"),
    [
        ([], []),
        ([(), ("rack=a",)], ["rack"]),
        # Each rack lies within one zone.
        ([("rack=a", "zone=1"), ("rack=b", "zone=1"), ("rack=c", "zone=2")], ["zone", "rack"]),
        # A kind that contains another one comes first, however its key is spelt.
        ([("a=1", "z=1"), ("a=2", "z=1")], ["z", "a"]),
        ([("a=1", "z=1"), ("a=1", "z=2")], ["a", "z"]),
        (
            [
                ("host=h1", "rack=a", "zone=1"),
                ("host=h2", "rack=a", "zone=1"),
                ("host=h3", "rack=b", "zone=1"),
                ("host=h4", "rack=c", "zone=2"),
            ],
            ["zone", "rack", "host"],
        ),
        # Neither contains the other: the kind with larger domains comes first.
        (
            [
                ("power=p", "rack=a"),
                ("power=p", "rack=b"),
                ("power=q", "rack=b"),
                ("power=q", "rack=c"),
                ("power=q", "rack=d"),
            ],
            ["power", "rack"],
        ),
        # They are the same domains by two names.
        ([("rack=a", "switch=s"), ("rack=b", "switch=t")], ["rack", "switch"]),
        # Two nodes of rack a have no zone, so the rack does not lie within one.
        ([("rack=a", "zone=1"), ("rack=a",), ("rack=a",), ("rack=b",)], ["rack", "zone"]),
    ],
)
def test_kinds_of_domains_are_ordered_from_wide_to_narrow(
    nodes: list[tuple[str, ...]], kinds: list[str]
) -> None:
    assert order_kinds(nodes) == kinds
    assert order_kinds(reversed(nodes)) == kinds


def test_a_path_goes_from_the_widest_domain_to_the_node() -> None:
    nodes = {1: ("n1", ("rack=a", "zone=1")), 2: ("n2", ("rack=b", "zone=1")), 3: ("n3", ())}
    assert find_paths(nodes) == {
        1: ("zone=1", "rack=a", "n1"),
        2: ("zone=1", "rack=b", "n2"),
        3: ("n3",),
    }


# ---------------------------------------------------------------- the order at a boundary


def test_blocks_follow_machines_then_racks_then_zones_then_names() -> None:
    nodes = {
        WorkerId(0): ("n10", ("rack=b", "zone=1")),
        WorkerId(1): ("n9", ("rack=a", "zone=2")),
        WorkerId(2): ("n2", ("rack=b", "zone=1")),
        WorkerId(3): ("n1", ("rack=c", "zone=1")),
        WorkerId(4): ("n10", ("rack=b", "zone=1")),
    }
    owners = assign_at_boundary(5, sorted(nodes), (), find_paths(nodes))
    assert owners == (2, 0, 4, 3, 1)


@st.composite
def placed(draw: st.DrawFn) -> Paths:
    names = st.sampled_from(("n1", "n2", "n10", "rack=a"))
    labels = st.sampled_from(((), ("rack=a",), ("rack=b",), ("rack=a", "zone=1")))
    nodes = draw(st.dictionaries(names, labels, min_size=1))
    where = draw(st.lists(st.sampled_from(sorted(nodes)), min_size=1, max_size=20))
    return find_paths({WorkerId(w): (name, nodes[name]) for w, name in enumerate(where)})


@given(paths=placed(), data=st.data())
def test_every_machine_and_domain_has_one_block_and_all_hosts_equal_shares(
    paths: Paths, data: st.DataObject
) -> None:
    vranks = data.draw(st.integers(len(paths), 40))
    everyone = [*paths, WorkerId(99)]
    previous = data.draw(
        st.just(()) | st.lists(st.sampled_from(everyone), min_size=vranks, max_size=vranks)
    )
    owners = assign_at_boundary(vranks, sorted(paths), previous, paths)
    loads = [owners.count(worker) for worker in paths]
    assert sum(loads) == vranks
    assert max(loads) - min(loads) <= 1
    for depth in range(1, 4):
        assert find_scattered([paths[owner] for owner in owners], depth) is None
    assert find_scattered([(str(owner),) for owner in owners], 1) is None
    assert assign_at_boundary(vranks, sorted(paths), owners, paths) == owners


@given(paths=placed(), data=st.data())
def test_lost_ones_are_shared_out_as_evenly_whoever_is_near(
    paths: Paths, data: st.DataObject
) -> None:
    everyone = [*paths, WorkerId(99)]
    previous = data.draw(st.lists(st.sampled_from(everyone), min_size=1, max_size=40))
    survivors = sorted(data.draw(st.sets(st.sampled_from(sorted(paths)), min_size=1)))
    owners = assign_mid_step(survivors, previous, paths)
    plain = assign_mid_step(survivors, previous)
    assert sorted(map(owners.count, survivors)) == sorted(map(plain.count, survivors))
    for before, after in zip(previous, owners, strict=True):
        assert after in survivors
        assert after == before or before not in survivors


# ---------------------------------------------------------------- bytes between machines


@pytest.mark.parametrize(
    ("seed", "machines", "vranks"), [(1, 2, 16), (2, 8, 64), (3, 8, 512), (4, 16, 128), (5, 4, 32)]
)
def test_machines_of_eight_send_no_more_than_they_must(
    bench: Any, seed: int, machines: int, vranks: int
) -> None:
    paths = place(seed, machines, 8, racks=machines // 2, zones=max(machines // 4, 1))
    workers = sorted(paths)
    owners = assign_at_boundary(vranks, workers, (), paths)
    assert bench.measure(owners, paths, MACHINE).most == 1.0
    assert bench.measure(owners, paths, RACK).most <= 1.0
    assert bench.measure(owners, paths, ZONE).most <= 1.0
    if machines > 2:
        by_number = assign_at_boundary(vranks, workers, ())
        assert bench.measure(by_number, paths, MACHINE).mean > 5.0


@pytest.mark.parametrize(("machines", "most"), [(3, 1.13), (5, 1.17), (6, 1.06), (7, 1.08)])
def test_where_machines_are_no_power_of_two_one_may_send_more(
    bench: Any, machines: int, most: float
) -> None:
    """On the way down the canonical tree some machines relay finished sums."""
    paths = place(1, machines, 8)
    found = bench.measure(
        assign_at_boundary(8 * machines, sorted(paths), (), paths), paths, MACHINE
    )
    assert found.mean <= 1.05
    assert found.most <= most


@pytest.mark.parametrize("workers", [5, 6, 7])
def test_machines_host_whole_subtrees_where_balance_allows_it(bench: Any, workers: int) -> None:
    paths = place(2, 8, workers, racks=4, zones=2)
    owners = assign_at_boundary(64, sorted(paths), (), paths)
    assert bench.measure(owners, paths, MACHINE).most == 1.0
    assert bench.measure(owners, paths, ZONE).most == 1.0
    # With one virtual rank for each worker they cannot.
    owners = assign_at_boundary(8 * workers, sorted(paths), (), paths)
    assert 1.8 < bench.measure(owners, paths, MACHINE).mean < 2.6


def test_one_lost_worker_costs_no_bytes_between_machines(bench: Any) -> None:
    paths = place(3, 8, 8, racks=4)
    owners = assign_at_boundary(64, sorted(paths), (), paths)
    for lost in sorted(paths)[::9]:
        left = [worker for worker in sorted(paths) if worker != lost]
        at_once = assign_mid_step(left, owners, paths)
        heir = at_once[owners.index(lost)]
        assert paths[heir] == paths[lost]
        assert bench.measure(at_once, paths, MACHINE).most <= 1.05
        later = assign_at_boundary(64, left, at_once, paths)
        assert bench.measure(later, paths, MACHINE).most <= 1.05
        back = assign_at_boundary(64, sorted(paths), later, paths)
        assert count_moves(later, back) == 1
        assert [paths[owner] for owner in back] == [paths[owner] for owner in owners]


def test_a_lost_machine_goes_to_one_that_is_near(bench: Any) -> None:
    """A machine of the same rack hosts all of it, as no worker would have less to do elsewhere."""
    paths = place(4, 8, 8, racks=4)
    owners = assign_at_boundary(64, sorted(paths), (), paths)
    machine = paths[owners[0]]
    left = [worker for worker in sorted(paths) if paths[worker] != machine]
    at_once = assign_mid_step(left, owners, paths)
    heirs = {paths[at_once[vrank]] for vrank in range(64) if paths[owners[vrank]] == machine}
    [heir] = heirs
    assert heir[:RACK] == machine[:RACK]
    assert max(map(at_once.count, left)) == 2
    assert bench.measure(at_once, paths, MACHINE).mean <= 1.05
    assert bench.measure(at_once, paths, RACK).mean <= 1.05


# ---------------------------------------------------------------- what moves


def count_moves(before: Sequence[WorkerId], after: Sequence[WorkerId]) -> int:
    return sum(old != new for old, new in zip(before, after, strict=True))


@pytest.mark.parametrize("vranks", [64, 512])
def test_a_machine_that_replaces_a_lost_one_takes_its_block_and_no_more(vranks: int) -> None:
    """Its name and its workers' numbers are new."""
    paths = place(5, 8, 8, racks=4)
    owners = assign_at_boundary(vranks, sorted(paths), (), paths)
    lost = paths[sorted(paths)[11]]
    left = {worker: path for worker, path in paths.items() if path != lost}
    at_once = assign_mid_step(sorted(left), owners, left)
    now = left | {WorkerId(1000 + i): (*lost[:RACK], "a0") for i in range(8)}
    after = assign_at_boundary(vranks, sorted(now), at_once, now)
    assert count_moves(at_once, after) == vranks // 8
    assert [now[owner][:RACK] for owner in after] == [paths[owner][:RACK] for owner in owners]


def test_a_machine_that_joins_moves_half_of_the_virtual_ranks_at_most(bench: Any) -> None:
    paths = place(6, 7, 8)
    owners = assign_at_boundary(512, sorted(paths), (), paths)
    now = paths | {WorkerId(1000 + i): (*paths[owners[0]][:RACK], "a0") for i in range(8)}
    after = assign_at_boundary(512, sorted(now), owners, now)
    assert count_moves(owners, after) < 512 * 0.55
    assert bench.measure(after, now, MACHINE).most == 1.0


# ---------------------------------------------------------------- within a view


def test_slow_workers_give_tasks_to_a_near_worker_that_is_done_as_soon() -> None:
    nodes = {WorkerId(w): (f"n{w // 2}", (f"rack=r{w // 4}",)) for w in range(8)}
    owners = [WorkerId(v // 4) for v in range(32)]
    policy = BalancePolicy(warm_up=0, window=1)
    balancer = Balancer(policy, sorted(nodes), owners, find_paths(nodes))
    assert balancer.observe([40, 40, 40, 40, 40, 40, 40, 120])  # microseconds of four tasks each
    assert balancer.counts == (4, 4, 4, 4, 5, 5, 5, 1)
    assert balancer.owners == tuple(ids(*(v // 4 for v in range(28)), 7, 6, 4, 5))


def label(view: View, racks: dict[int, str], *owners: int) -> View:
    """Return a view whose members are in these racks, with other hosts if some are given."""
    members = tuple(replace(m, domains=(f"rack={racks[m.worker]}",)) for m in view.members)
    return replace(view, members=members, owners=tuple(ids(*owners)) or view.owners)


@pytest.mark.parametrize(
    ("racks", "owners"),
    [("aabb", (0, 0, 1, 1, 3, 3, 2, 2)), ("abba", (0, 0, 3, 3, 1, 1, 2, 2))],
)
def test_who_was_fed_gets_a_block_in_its_rack(racks: str, owners: tuple[int, ...]) -> None:
    view = view_of(0, 1, 2, 3, unproven=tuple(ids(3)))
    view = label(view, dict(enumerate(racks)), 0, 0, 0, 1, 1, 1, 2, 2)
    speeds = Speeds(view, None)
    speeds.observe([1, 1, 1, 0], leads=False)
    assert speeds.owners == owners


# ---------------------------------------------------------------- the coordinator's views


RACKS = {0: "a", 1: "b", 2: "a", 3: "b"}


def cluster_of(*statuses: WorkerStatus) -> Cluster:
    cluster = Cluster(*statuses)
    for each in statuses:
        cluster.hear(f"n{each.worker}", each, domains=(f"rack={RACKS[each.worker]}",))
    return cluster


def propose(cluster: Cluster, view: View, **fields: Any) -> vm.Proposal:
    facts = cluster.facts(view, **fields)
    survivors = fo.survivors_of(facts)
    assert survivors is not None
    proposal = fo.propose_view(facts, survivors, 1)
    assert proposal is not None
    return proposal


def test_the_first_view_hosts_rack_by_rack_and_names_the_domains_of_its_members() -> None:
    ready = [status(w) for w in range(4)]
    cluster = cluster_of(*ready)
    paths = vm.find_worker_paths(ids(0, 1, 2, 3), cluster.roster, None)
    recall = Recall(base=0, view=0, sources=())
    proposal = vm.initial_view(ready, Room(hosts=4), 4, recall, "", paths)
    assert proposal.owners == (0, 2, 1, 3)
    view = vm.make_view(proposal, ViewNumber(1), None, cluster.roster)
    assert [m.domains for m in view.members] == [(f"rack={RACKS[w]}",) for w in range(4)]
    assert view.paths == paths


def test_a_view_after_a_rest_restores_the_order() -> None:
    cluster = cluster_of(*(resting(w) for w in range(4)))
    assert propose(cluster, view_of(0, 1, 2, 3)).owners == (0, 2, 1, 3)


def test_in_mid_step_the_domains_that_the_view_names_count() -> None:
    """All its members know these, so that they copy the tasks which they would be given."""
    cluster = cluster_of(*(stopped(w) for w in (0, 1, 3)))
    view = view_of(0, 1, 2, 3)
    assert propose(cluster, label(view, RACKS, 0, 2, 1, 3)).owners == (0, 0, 1, 3)
    others = {0: "a", 1: "c", 2: "b", 3: "b"}
    assert propose(cluster, label(view, others, 1, 3, 0, 2)).owners == (1, 3, 0, 0)
    assert propose(cluster, label(view, others, 1, 0, 2, 3)).owners == (1, 0, 3, 3)


def test_domains_of_a_node_that_is_not_heard_are_those_in_the_view_before() -> None:
    record = JobRecord(
        term=1,
        slots=(Slot(worker=WorkerId(0), agent=AgentId("n0"), incarnation=Incarnation(1)),),
    )
    unheard = LiveRoster(record, 0.0)
    old = label(view_of(0), {0: "a"})
    assert vm.find_worker_paths(ids(0), unheard, old) == {0: ("rack=a", "n0")}
    assert vm.find_worker_paths(ids(0), unheard, None) == {0: ("n0",)}
    assert vm.find_worker_paths(ids(0), Cluster(status(0)).roster, old) == {0: ("n0",)}


def test_nothing_moves_for_a_fed_worker_until_it_has_voted() -> None:
    """Blocks are cut once, when it gets its own."""
    cluster = cluster_of(*(resting(w) for w in range(2)), status(2, abreast=1))
    fed = (Follower(worker=WorkerId(2), incarnation=Incarnation(1)),)
    view = view_of(0, 1, owners=tuple(ids(0, 1, 1, 1)))
    proposal = propose(cluster, view, caught_up=fed)
    assert (proposal.fed, proposal.owners) == (fed, (0, 1, 1, 1))

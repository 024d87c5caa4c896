"""The nodes of spread workers: teams, their repair, and the pieces their members may hold."""

from __future__ import annotations

import dataclasses
from typing import Any

from holdfast.engine.core.job_record import JobRecord, Slot
from holdfast.engine.core.membership.changes import CountLoss
from holdfast.engine.core.membership.formation import candidates, reason_to_stop
from holdfast.engine.core.membership.group_faults import find_fault
from holdfast.engine.core.membership.protection import find_recall, make_ring
from holdfast.engine.core.membership.restart import replace_lost
from holdfast.engine.core.membership.teams import admit_teams, end_team, find_team_to_end
from holdfast.engine.core.policies import RestartPolicy
from holdfast.engine.core.redundancy import KeptPieces, Redundancy
from holdfast.engine.core.replica.replicating import parts_of, pieces_of
from holdfast.engine.core.types import AgentId, Incarnation, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import Stage
from roster_kit import LEASE, Cluster, member, status, view_of

A, B, C, D = (AgentId(name) for name in "abcd")
W0 = WorkerId(0)
ONE = Incarnation(1)
PAIRS = (0, A, B), (1, C, D)


def nodes(*names: str, **fields: Any) -> Cluster:
    cluster = Cluster()
    for name in names:
        cluster.hear(name, **fields)
    return cluster


def teams(cluster: Cluster) -> list[tuple[AgentId, ...]]:
    return list(dict.fromkeys(slot.nodes for slot in cluster.roster.slots.values()))


def admitted(
    cluster: Cluster,
    *silent: AgentId,
    view: View | None = None,
    most: int = 4,
    size: int = 2,
    now: float = 1.0,
) -> tuple[tuple[AgentId, ...], list[str]]:
    facts = dataclasses.replace(cluster.facts(view), silent=frozenset(silent), now=now)
    waiting, plan = admit_teams(facts, most, size)
    return waiting, cluster.change(*plan)


def acting(cluster: Cluster, *names: AgentId) -> View:
    """Run worker 0 on its nodes, as the only member of a view."""
    cluster.hear(names[0], member(0, meets_at="here"))
    for place, name in enumerate(names[1:], 1):
        cluster.hear(name, status(0, stage=Stage.BOOTING, place=place))
    first = Member(worker=W0, incarnation=Incarnation(1), agent=names[0], further=names[1:])
    return dataclasses.replace(view_of(0), members=(first,))


def test_nodes_become_teams_and_those_beyond_wait() -> None:
    cluster = nodes("a", "b", "c", slots=2)
    assert admitted(cluster) == ((C,), ["workers are spread over the nodes a, b"])
    assert teams(cluster) == [(A, B)]
    assert len(cluster.roster.slots) == 2
    cluster.hear("d", slots=2)
    assert admitted(cluster)[0] == ()
    assert teams(cluster) == [(A, B), (C, D)]
    assert admitted(nodes(*"abcd"), most=2)[0] == (C, D)


def test_only_once_nobody_can_act_a_lost_node_is_replaced() -> None:
    cluster = nodes("a", "b", "c")
    admitted(cluster, most=2)
    view, gone = acting(cluster, A, B), 1.0 + LEASE.fence_s
    assert admitted(cluster, B, view=view, most=2, now=gone)[1] == []
    cluster.hear("a", status(0, stage=Stage.LOST, meets_at="here"))
    assert admitted(cluster, B, view=view, most=2, now=gone - 0.1)[1] == []
    assert admitted(cluster, B, view=view, most=2, now=gone) == (
        (),
        ["node c takes the place of node b"],
    )
    assert teams(cluster) == [(A, C)], "the other one has the shards that it had"
    assert W0 not in cluster.roster.slots


def test_the_first_node_is_replaced_once_the_processes_on_another_have_ended() -> None:
    cluster = nodes("a", "b", "c")
    admitted(cluster, most=2)
    view, gone = acting(cluster, A, B), 1.0 + LEASE.fence_s
    assert admitted(cluster, A, view=view, most=2, now=gone)[1] == []
    cluster.hear("b", status(0, stage=Stage.LOST, place=1))
    assert admitted(cluster, A, view=view, most=2, now=gone)[1] != []
    assert teams(cluster) == [(C, B)]


def test_of_two_broken_teams_one_whole_is_made() -> None:
    cluster = nodes(*"abcd")
    admitted(cluster)
    admitted(cluster, B, C, now=1.0 + LEASE.fence_s)
    assert teams(cluster) == [(A, D)]


def test_a_team_is_not_broken_up_for_a_node_that_nobody_has_heard_yet() -> None:
    slots = (Slot(worker=WorkerId(w), agent=x, incarnation=ONE, further=(y,)) for w, x, y in PAIRS)
    cluster = Cluster(record=JobRecord(term=2, slots=tuple(slots)))
    for name in (A, B, C):  # a coordinator that has just begun
        cluster.hear(name)
    cluster.drain(B)
    cluster.drain(C)
    assert admitted(cluster) == ((), [])
    cluster.hear(D)
    admitted(cluster)
    assert teams(cluster) == [(A, D)]


def ended(cluster: Cluster, view: View) -> list[str]:
    """End the workers that cannot leave a drained node otherwise; return the lines."""
    facts = cluster.facts(view)
    team = find_team_to_end(facts)
    return cluster.change(*end_team(facts, team)) if team else []


def test_the_last_workers_end_to_leave_a_drained_node_that_another_one_can_replace() -> None:
    cluster = nodes("a", "b")
    admitted(cluster, most=2)
    view = acting(cluster, A, B)
    cluster.drain(B, "asked for")
    assert ended(cluster, view) == [], "no node waits"
    cluster.hear("c")
    assert ended(cluster, view) == ["worker 0 begins again without node b (asked for)"]
    assert not cluster.roster.wants(W0, Incarnation(1))


def two_teams(cluster: Cluster, **fields: Any) -> View:
    """Run worker 0 on a and b, and worker 1 on c and d, both as members of a view."""
    admitted(cluster)
    first = acting(cluster, A, B).members[0]
    cluster.hear("c", member(1, meets_at="here", **fields))
    cluster.hear("d", status(1, stage=Stage.BOOTING, place=1))
    other = Member(worker=WorkerId(1), incarnation=ONE, agent=C, further=(D,))
    return dataclasses.replace(view_of(0, 1), members=(first, other))


def test_only_the_workers_of_a_drained_node_begin_again() -> None:
    cluster = nodes(*"abcde")
    view = two_teams(cluster, stage=Stage.LOST)
    cluster.drain(B, "asked for")
    (line,) = ended(cluster, view)
    assert line.startswith("worker 0 begins")
    assert not cluster.roster.wants(W0, ONE)
    assert cluster.roster.wants(WorkerId(1), ONE)


def test_workers_stay_while_another_one_holds_the_state_or_will() -> None:
    cluster = nodes(*"abcde")
    view = two_teams(cluster)
    cluster.drain(B)
    assert ended(cluster, view) == [], "worker 1 goes on"
    cluster.drain(D)
    (line,) = ended(cluster, view)
    assert line.startswith("worker 0 begins"), "both cannot stay: one after the other"
    alone = dataclasses.replace(view, members=view.members[1:])
    cluster.drain(B, "")
    cluster.hear("a", status(0, 2, meets_at="here"))
    assert ended(cluster, alone) == [], "worker 0 receives the state first"


def test_a_worker_is_a_candidate_once_it_runs_on_all_of_its_nodes() -> None:
    cluster = nodes("a", "b")
    admitted(cluster)
    cluster.hear("a", status(0, meets_at="here"))
    assert candidates(cluster.facts()) == []
    cluster.hear("b", status(0, stage=Stage.BOOTING, place=1))
    assert [each.worker for each in candidates(cluster.facts())] == [W0]


def losses(cluster: Cluster, view: View, *silent: AgentId, now: float, bridges: bool) -> list[str]:
    facts = dataclasses.replace(cluster.facts(view), silent=frozenset(silent), now=now)
    plan = replace_lost(facts, RestartPolicy(), lambda: bridges)
    return [change.reason for change in plan if isinstance(change, CountLoss)]


def test_a_silent_node_is_lost_at_once_only_if_that_costs_no_step() -> None:
    gone = 1.0 + LEASE.fence_s
    for now, bridges, found in (
        (gone, False, []),
        (gone - 0.1, True, []),
        (gone, True, ["node b is lost"]),
        (1.0 + LEASE.abandon_s + LEASE.margin_s, False, ["node b is lost"]),
    ):
        cluster = nodes("a", "b")
        admitted(cluster)
        view = acting(cluster, A, B)
        assert losses(cluster, view, B, now=now, bridges=bridges) == found, (now, bridges)


def test_a_process_that_ends_on_a_further_node_ends_the_worker() -> None:
    cluster = nodes("a", "b")
    admitted(cluster)
    view = acting(cluster, A, B)
    assert losses(cluster, view, now=1.0, bridges=False) == []
    assert reason_to_stop(cluster.facts(view), 0.0, 1.0) is None
    cluster.hear("b", status(0, stage=Stage.LOST, place=1, detail="crashed"))
    assert not cluster.facts(view).is_sound(view.members[0])
    assert losses(cluster, view, now=1.0, bridges=False) == ["on node b: crashed"]
    restarted = nodes("a", "b")
    admitted(restarted)
    view = acting(restarted, A, B)
    restarted.hear("b", incarnation=Incarnation(2))
    (why,) = losses(restarted, view, now=1.0, bridges=False)
    assert why == "the agent of node b ended, and its processes there with it"


# ---------------------------------------------------------------- pieces


def spread_view(workers: int, size: int, redundancy: Redundancy) -> View:
    """Return a view of workers spread over `size` nodes each, with a shard on each."""
    members = tuple(
        Member(
            worker=WorkerId(w),
            incarnation=Incarnation(1),
            agent=AgentId(f"n{w * size}"),
            shards=size,
            further=tuple(AgentId(f"n{w * size + i}") for i in range(1, size)),
        )
        for w in range(workers)
    )
    view = dataclasses.replace(view_of(*range(workers)), members=members)
    return dataclasses.replace(view, ring=make_ring(members, {}, redundancy))


def kept_in(view: View, redundancy: Redundancy) -> dict[AgentId, list[KeptPieces]]:
    found: dict[AgentId, list[KeptPieces]] = {}
    for each in view.members:
        for shard in range(each.shards):
            for place, name in enumerate(each.nodes):
                pieces = pieces_of(view, each.worker, redundancy, shard, place)
                found.setdefault(name, []).append(
                    KeptPieces(
                        view=3,
                        worker=int(each.worker),
                        parts=parts_of(view, shard),
                        pieces=pieces,
                        end=5,
                        committed=5,
                        shards=(shard,),
                    )
                )
    return found


def test_each_shard_is_kept_first_where_it_is_and_bears_every_loss() -> None:
    for workers, size, redundancy in (
        (1, 3, Redundancy(data=1, parity=1)),
        (1, 4, Redundancy(data=2, parity=1)),
        (2, 2, Redundancy(data=2, parity=2)),
        (3, 2, Redundancy(data=1, parity=2)),
    ):
        view = spread_view(workers, size, redundancy)
        kept = kept_in(view, redundancy)
        assert sorted(kept) == sorted(view.ring)
        for shard in range(size):
            assert parts_of(view, shard) == workers
            every = [
                p for each in kept.values() for k in each if shard in k.shards for p in k.pieces
            ]
            assert len(every) == len(set(every)) == workers * redundancy.pieces
            for each in view.members:
                firsts = pieces_of(view, each.worker, redundancy, shard, shard)
                assert any(piece.number == 0 for piece in firsts)
        for lost in view.ring:
            left = [k for name, each in kept.items() if name != lost for k in each]
            recall = find_recall(left, redundancy.data, 0, (3, 5), (), size)
            assert recall.step == 5, (workers, size, redundancy, lost)
        without = [k for each in kept.values() for k in each if 0 not in k.shards]
        assert find_recall(without, redundancy.data, 0, (3, 5), (), size).step == 0


def test_a_group_ends_with_the_node_of_a_rank() -> None:
    cluster = Cluster(member(0), member(1))
    assert find_fault(view_of(0, 1), cluster.roster, []) is None
    fault = find_fault(view_of(0, 1), cluster.roster, [AgentId("n1")])
    assert fault is not None
    assert fault.headline == "node n1 with rank 1 was lost"

"""The pieces in nodes' memory: their places, and the step to which they bring a job again."""

from __future__ import annotations

import dataclasses
import itertools
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.ground.vote import Vote, count_votes
from holdfast.engine.core.invalidations import INVALIDATIONS_MAX, Invalidation, is_invalidated
from holdfast.engine.core.membership.durable import Durable
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.protection import (
    Protection,
    find_recall,
    find_weakness,
    make_ring,
)
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.policies import ReplicationPolicy
from holdfast.engine.core.redundancy import (
    GradientSource,
    KeptPieces,
    Piece,
    Recall,
    Redundancy,
    read_redundancy,
)
from holdfast.engine.core.replica import intervals
from holdfast.engine.core.replica.intervals import Exposure, best_interval_s
from holdfast.engine.core.replica.replicating import Replicating, pieces_of
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from roster_kit import LEASE, Cluster, stopped, view_of

RS = Redundancy(data=2, parity=1)


def members_on(*agents: str) -> tuple[Member, ...]:
    return tuple(
        Member(worker=w, incarnation=Incarnation(1), agent=AgentId(agent))
        for w, agent in enumerate(agents)
    )


def view_with(members: tuple[Member, ...], ring: tuple[AgentId, ...]) -> View:
    return View(
        number=ViewNumber(1), members=members, owners=(0,), resume_step=0, leader=0, ring=ring
    )


# ---------------------------------------------------------------- the setting


def test_settings_are_read() -> None:
    assert read_redundancy("none") == Redundancy()
    assert read_redundancy("replicate:2") == Redundancy(data=1, parity=1)
    assert read_redundancy("rs:4+2") == Redundancy(data=4, parity=2)
    for text in ("none", "replicate:3", "rs:10+4"):
        assert str(read_redundancy(text)) == text


@pytest.mark.parametrize(
    "text",
    [
        *("", "2", "replicate", "replicate:0", "replicate:²", "replicate:1+1", "rs:2", "rs:0+1"),
        *("rs:2+0", "rs:200+56", "rs:2+1+1", "rs:-1+2", "RS:2+1", "replicate:999"),
    ],
)
def test_bad_settings_are_refused(text: str) -> None:
    with pytest.raises(UserError, match="replicate:R"):
        read_redundancy(text)


# ---------------------------------------------------------------- what is not protected


def weakness(text: str, racks: str) -> str:
    """Return the weakness of members on nodes in these racks, one letter each."""
    nodes = [AgentId(f"n{number}") for number in range(len(racks))]
    domains = {node: (f"rack={rack}",) for node, rack in zip(nodes, racks, strict=True)}
    members, redundancy = members_on(*nodes), read_redundancy(text)
    return find_weakness(make_ring(members, domains, redundancy), domains, redundancy)


def test_domains_that_hold_too_much_are_told() -> None:
    assert weakness("none", "a") == ""
    assert weakness("rs:2+1", "abc") == ""
    assert weakness("rs:4+2", "aabbcc") == ""
    assert weakness("rs:2+1", "aabb") == (
        "a loss of all of rack=a takes 2 pieces of a part, and rs:2+1 bears 1: use more domains, "
        "or a greater redundancy"
    )
    assert "rack=a takes 3 pieces of a part, and rs:4+2 bears 2" in weakness("rs:4+2", "aaabcd")


def test_too_few_nodes_are_told() -> None:
    assert weakness("rs:2+1", "ab") == (
        "the nodes' memory bears the loss of 0 nodes instead of 1: rs:2+1 needs 3, and the members "
        "are on 2"
    )
    assert "bears the loss of 1 nodes instead of 2" in weakness("rs:4+2", "abc")
    assert "bears the loss of 1 nodes instead of 2" in weakness("replicate:3", "ab")
    assert "bears the loss of 0 nodes instead of 1" in weakness("replicate:2", "a")


def test_an_unprotected_value_is_reported_when_it_changes() -> None:
    protection, cluster = Protection(RS), Cluster()
    roster = cluster.roster
    for agent in "abc":
        cluster.hear(agent, pieces_at=f"{agent}:1")
    reasons = []
    for agents in ("ab", "ab", "abc", "ab"):
        view = dataclasses.replace(view_with(members_on(*agents), ()), reason="why")
        protection, made = protection.protect(view, None, roster)
        reasons.append(made.reason)
        assert made.pieces_at == tuple(f"{agent}:1" for agent in made.ring)
    told = (
        "why; the nodes' memory bears the loss of 0 nodes instead of 1: rs:2+1 needs 3, and the "
        "members are on 2"
    )
    assert reasons == [told, "why", "why", told]


# ---------------------------------------------------------------- when


class ProtectingMember:
    """Walks one member through steps that its script takes some seconds to apply."""

    def __init__(self, every: int) -> None:
        view = view_with(members_on("a"), (AgentId("a"),))
        self.exposure = Exposure(ReplicationPolicy(every=every))
        self.exposure.enter(view)
        self.replicating = Replicating(self.exposure)
        self.replicating.enter(view)
        self.step, self.now = 0, 0.0

    def walk(self, steps: int, *, step_s: float = 1.0, stall_s: float = 0.0) -> list[int]:
        """Return the states that were protected."""
        found = []
        for _ in range(steps):
            self.exposure.record_step(self.now)
            protect = self.replicating.opinion(self.step, leads=True)
            tally = count_votes([a_vote(self.step, protect, self.replicating.staged).row()])
            self.replicating.record_votes(self.step, tally, self.now)
            self.step, self.now = self.step + 1, self.now + step_s
            if self.replicating.next_copy(self.step, self.now):
                found.append(self.step)
                self.now += stall_s
                self.replicating.record_pause(self.now, stall_s)
                self.replicating.record_copy(self.step, "")
        return found


def a_vote(step: int, protect: bool, staged: int) -> Vote:
    return Vote(view=ViewNumber(1), step=step, protect=protect, staged=staged)


def test_a_state_is_due_after_some_steps_or_without_room_for_more() -> None:
    member = ProtectingMember(5)
    assert member.walk(13, stall_s=100.0) == [1, 6, 11]
    member.replicating.full = True
    assert member.walk(2) == [14]


def test_few_losses_leave_the_logged_gradients_as_the_only_bound() -> None:
    assert ProtectingMember(0).walk(201, stall_s=2.0) == [1, 101, 201]


def test_the_steps_between_two_states_follow_from_their_cost_and_the_losses(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(intervals, "WORKER_MTBF_S", 100.0)
    member = ProtectingMember(0)
    found = member.walk(100, stall_s=2.0)
    bounds = best_interval_s(2.0, 100.0) - 1, best_interval_s(2.0, 100.0 + member.now) + 1
    between = [after - before for before, after in itertools.pairwise(found)]
    assert len(between) > 3
    assert all(bounds[0] <= steps <= bounds[1] for steps in between), (between, bounds)
    member.replicating.full = True
    assert len(member.walk(2)) == 1


def test_a_copy_that_is_not_yet_whole_is_followed_by_no_other() -> None:
    member = ProtectingMember(1)
    member.walk(1)
    tally = count_votes([a_vote(1, False, 0).row()])
    member.replicating.record_votes(1, tally, member.now)
    assert not member.replicating.opinion(2, leads=True)


# ---------------------------------------------------------------- who keeps what


@given(
    nodes=st.lists(st.integers(1, 3), min_size=1, max_size=9),
    data=st.integers(1, 4),
    parity=st.integers(0, 3),
)
def test_each_piece_is_kept_once_and_those_of_a_part_on_as_many_nodes_as_there_are(
    nodes: list[int], data: int, parity: int
) -> None:
    members = members_on(*(f"n{i}" for i, count in enumerate(nodes) for _ in range(count)))
    redundancy = Redundancy(data=data, parity=parity)
    ring = make_ring(members, {}, redundancy)
    assert len(ring) == len(nodes)
    view = view_with(members, ring)
    kept = [(p, m.agent) for m in members for p in pieces_of(view, m.worker, redundancy)]
    pieces = redundancy.pieces_on(len(nodes))
    every = [Piece(part, i) for part in range(len(ring)) for i in range(pieces)]
    assert sorted(p for p, _ in kept) == every
    together = Counter((p.part, agent) for p, agent in kept)
    assert max(together.values()) == -(-pieces // len(nodes))
    # If any `parity` nodes are lost, the other nodes have enough pieces of each part.
    lost = redundancy.nodes_to_lose(len(nodes))
    assert 0 <= lost < len(nodes)
    for gone in itertools.islice(itertools.combinations(ring, lost), 50):
        left = Counter(p.part for p, agent in kept if agent not in gone)
        assert min(left[part] for part in range(len(ring))) >= data


def most_in_a_domain(
    ring: tuple[AgentId, ...], domains: dict[AgentId, Domains], size: int
) -> Counter[str]:
    """Return for each label the most pieces of one part that nodes with it keep."""
    found: Counter[str] = Counter()
    for start in range(len(ring)):
        near = [ring[(start + i) % len(ring)] for i in range(size)]
        found |= Counter(label for agent in near for label in domains[agent])
    return found


@pytest.mark.parametrize(
    ("racks", "redundancy"),
    [
        ((2, 2, 2), RS),
        ((3, 3, 3), Redundancy(data=2, parity=1)),
        ((4, 4), Redundancy(data=1, parity=1)),
        ((2, 2, 2, 2, 2, 2), Redundancy(data=4, parity=2)),
        ((3, 3, 3), Redundancy(data=4, parity=2)),
    ],
)
def test_no_failure_domain_keeps_more_than_may_be_lost(
    racks: tuple[int, ...], redundancy: Redundancy
) -> None:
    domains = {
        AgentId(f"n{rack}{i}"): (f"rack={rack}",) for rack, n in enumerate(racks) for i in range(n)
    }
    ring = make_ring(members_on(*sorted(domains)), domains, redundancy)
    assert sorted(ring) == sorted(domains)
    worst = most_in_a_domain(ring, domains, redundancy.pieces)
    assert max(worst.values()) <= redundancy.parity, ring


# ---------------------------------------------------------------- what can be made again


def kept(view: int, node: int, *, states: tuple[int, ...] = (), **more: int) -> KeptPieces:
    """Return the pieces that one of three nodes keeps by rs:2+1, with one worker on each."""
    members = members_on("a", "b", "c")
    pieces = pieces_of(view_with(members, make_ring(members, {}, RS)), members[node].worker, RS)
    return KeptPieces(view=view, worker=node, parts=3, pieces=pieces, states=states, **more)


def find(
    *found: KeptPieces, checkpoint: int = 0, floor: tuple[int, int] = (0, 0), wrong: int = -1
) -> Recall:
    known = (Invalidation(after=wrong, view=ViewNumber(9)),) if wrong >= 0 else ()
    return find_recall(found, RS.data, checkpoint, floor, known)


def test_gradients_bring_the_initial_state_to_the_last_committed_step() -> None:
    every = [kept(1, node, first=0, end=5, committed=4) for node in range(3)]
    assert find(*every) == Recall(base=0, view=0, sources=(GradientSource(1, 0, 4),))
    assert find(*every[1:]).step == 4
    assert find(every[0]).step == 0
    # Step 4 is committed, as a later view began after it.
    assert find(*every, floor=(2, 5)).step == 5


def test_a_state_counts_once_the_next_step_has_compared_it() -> None:
    early = [kept(1, node, states=(3,), first=0, end=4, committed=3) for node in range(3)]
    assert (find(*early).base, find(*early).step) == (0, 3)
    # The next view began after that step, so it was committed in this one; or in another one.
    known = Recall(base=3, view=1, sources=(GradientSource(1, 3, 4),))
    assert find(*early[:2], floor=(2, 4)) == known
    assert find(*early, floor=(3, 4)).base == 0
    late = [kept(1, node, states=(3,), first=3, end=6, committed=6) for node in range(2)]
    assert find(*late) == Recall(base=3, view=1, sources=(GradientSource(1, 3, 6),))


def test_gradients_of_several_views_follow_each_other() -> None:
    first = [kept(1, node, states=(2,), first=2, end=5, committed=4) for node in range(3)]
    second = [kept(2, node, first=4, end=8, committed=8) for node in range(3)]
    found = find(*first, *second)
    assert found == Recall(
        base=2, view=1, sources=(GradientSource(1, 2, 4), GradientSource(2, 4, 8))
    )
    gap = [kept(2, node, first=5, end=8, committed=8) for node in range(3)]
    assert find(*first, *gap).step == 4
    assert find(*first, *gap, floor=(9, 5)).step == 8


def test_a_checkpoint_is_begun_from_where_it_is_newer_or_gradients_follow_it() -> None:
    old = [kept(1, node, states=(2,), first=2, end=5, committed=5) for node in range(3)]
    assert find(*old, checkpoint=7) == Recall(base=7, view=0, sources=())
    assert find(*old[:1], checkpoint=3).step == 3
    later = [kept(1, node, first=3, end=5, committed=5) for node in range(3)]
    assert find(*later, checkpoint=3) == Recall(base=3, view=0, sources=(GradientSource(1, 3, 5),))


def test_an_invalidated_state_is_not_recalled() -> None:
    every = [kept(1, node, states=(2, 4), first=2, end=6, committed=6) for node in range(3)]
    assert find(*every).step == 6
    found = find(*every, wrong=3)
    assert (found.base, found.step) == (2, 3)


# ---------------------------------------------------------------- and when it is not used


PROTECTION = Protection(RS)


def three_nodes(*silent: int) -> Facts:
    """All workers of view 3 were lost; nodes n0 to n2 keep its gradients of steps 0 to 4."""
    cluster = Cluster()
    old = view_of(0, 1, 2)
    ring = make_ring(old.members, {}, RS)
    old = dataclasses.replace(old, ring=ring, resume_step=0)
    for worker in range(3):
        pieces = pieces_of(old, WorkerId(worker), RS)
        there = KeptPieces(view=3, worker=worker, parts=3, pieces=pieces, end=5, committed=5)
        cluster.hear(f"n{worker}", kept=(there,))
    return cluster.facts(old, *silent)


def test_nodes_are_waited_for_that_may_hold_what_brings_the_job_further() -> None:
    assert PROTECTION.recall(three_nodes(), Durable()).step == 5
    assert PROTECTION.recall(three_nodes(1), Durable()).step == 5
    assert PROTECTION.recall(three_nodes(1, 2), Durable()) is None
    later = dataclasses.replace(three_nodes(1, 2), now=100.0)  # they are given up
    assert PROTECTION.recall(later, Durable()).step == 0
    nothing = Protection(Redundancy())
    assert nothing.recall(three_nodes(1, 2), Durable()).step == 0


def test_steps_that_no_view_built_on_are_abandoned() -> None:
    first = view_of(0, 1, 2)
    begins = view_of(0, 1, 2, number=ViewNumber(7), joiners=(0, 1, 2), resume_step=2)
    _, found = PROTECTION.protect(begins, first, Roster(None, 0.0))
    assert found.abandoned == (Invalidation(after=2, view=ViewNumber(6)),)
    later = view_of(0, 1, number=ViewNumber(8))
    _, goes_on = PROTECTION.protect(later, found, Roster(None, 0.0))
    assert goes_on.abandoned == found.abandoned
    assert (found.ring, goes_on.ring) == (("n0", "n1", "n2"), ("n0", "n1"))
    for number in range(9, 60):  # each begins further on
        again = view_of(0, 1, 2, number=ViewNumber(number), joiners=(0, 1, 2), resume_step=number)
        _, found = PROTECTION.protect(again, found, Roster(None, 0.0))
    assert len(found.abandoned) <= INVALIDATIONS_MAX
    for view, step in ((6, 1), (20, 3), (40, 59)):
        late = is_invalidated(found.abandoned, step, ViewNumber(view))
        assert late or step <= view  # the oldest are forgotten with the steps that they abandon
    assert is_invalidated(found.abandoned, 0, ViewNumber(6))


def test_a_state_that_nodes_claim_to_hold_but_do_not_give_is_not_asked_for_for_ever() -> None:
    """They are tried again as long as silent nodes are awaited; then the checkpoint counts."""
    protection, durable = Protection(RS), Durable([2])
    before = three_nodes()
    recall = protection.recall(before, durable)
    assert (recall.base, recall.step) == (0, 5)

    def facts(failed: bool, now: float, recalled: Recall = recall) -> Facts:
        view = dataclasses.replace(before.view, recall=recalled)
        for worker in range(3):
            told = ViewNumber(view.number if failed else 0)
            status = stopped(worker, seq=int(now), unrecalled=told)
            kept = before.roster.nodes[AgentId(f"n{worker}")].report.kept
            cluster.hear(f"n{worker}", status, kept=kept)
        return cluster.facts(view, now=now)

    def recalled(failed: bool, now: float, known: Recall = recall) -> Recall:
        nonlocal protection
        found = facts(failed, now, known)
        protection = protection.note_failures(found, durable, is_discarded=False)
        again = protection.recall(found, durable)
        assert again == protection.recall(found, durable), "asking changes nothing"
        return again

    cluster = Cluster(*(stopped(worker) for worker in range(3)))
    assert recalled(False, 10.0).step == 5
    assert recalled(True, 20.0).step == 5
    assert recalled(True, 20.0 + LEASE.abandon_s - 1).step == 5
    found = recalled(True, 20.0 + LEASE.abandon_s)
    assert (found.base, found.view, found.step) == (2, 0, 2)
    other = dataclasses.replace(recall, sources=recall.sources[:0])
    assert recalled(True, 21.0 + LEASE.abandon_s, other).step == 5  # not that view


def test_states_whose_rows_are_lost_are_not_recalled() -> None:
    """The rows are in checkpoints only; pieces of later views count again."""
    durable, facts = Durable([2]), three_nodes()
    assert facts.view is not None
    number = facts.view.number
    for servers, step in ((0, 5), (2, 2)):
        protection = Protection(RS, servers=servers)
        protection = protection.note_failures(facts, durable, is_discarded=True)
        recall = protection.recall(facts, durable)
        assert recall is not None
        assert recall.step == step
    again = view_of(0, 1, 2, number=ViewNumber(number + 1), joiners=(0, 1, 2), resume_step=2)
    _, found = protection.protect(again, facts.view, Roster(None, 0.0))
    assert is_invalidated(found.abandoned, 1, number)
    assert not is_invalidated(found.abandoned, 1, again.number)

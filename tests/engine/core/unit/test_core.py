"""Properties of the core's pure decisions: the tree, the assignment, the resume rule, freezing."""

from __future__ import annotations

import hashlib
from collections.abc import Collection

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.core import tree
from holdfast.engine.core.assignment import assign_at_boundary, assign_mid_step, spread_blocks
from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.errors import InvariantError, first_line
from holdfast.engine.core.exact_products import NARROW, WIDE, ExactProduct, digest_of
from holdfast.engine.core.membership.admission import choose_drains, drain
from holdfast.engine.core.membership.changes import AddSlot, Change
from holdfast.engine.core.membership.formation import Facts, choose_unreachable
from holdfast.engine.core.membership.lease import acting_deadline, fence_time
from holdfast.engine.core.membership.live_roster import LiveRoster
from holdfast.engine.core.membership.liveness import FreezeDetector, FreezePolicy, ProcessSample
from holdfast.engine.core.membership.outbox import list_wanted
from holdfast.engine.core.membership.roster import SlotState
from holdfast.engine.core.membership.view_making import resume_step
from holdfast.engine.core.policies import LeasePolicy
from holdfast.engine.core.sum_plan import part_of
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId, spans
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import ReplicaStage, Stage, WorkerStatus

settings.register_profile("core", max_examples=150, deadline=None)
settings.load_profile("core")


def add(left: str, right: str) -> str:
    """Shows the whole shape of the sum: neither associative nor commutative."""
    return f"({left}+{right})"


def definition(vranks: int) -> str:
    level = [str(v) for v in range(vranks)]
    while len(level) > 1:
        pairs = [add(*level[i : i + 2]) for i in range(0, len(level) - 1, 2)]
        level = pairs + level[len(pairs) * 2 :]
    return level[0]


# ---------------------------------------------------------------- tree


@given(vranks=st.integers(1, 40), data=st.data())
def test_the_sum_does_not_depend_on_the_merging_workers(vranks: int, data: st.DataObject) -> None:
    order = data.draw(st.permutations(range(vranks)))
    owners = data.draw(st.lists(st.integers(0, 4), min_size=vranks, max_size=vranks))
    whole: dict[tree.Node, str] = {}
    for worker in range(5):
        own: dict[tree.Node, str] = {}
        for v in order:
            if owners[v] == worker:
                tree.merge(own, (v, 1), str(v), vranks, add)
        leaves = [v for v in range(vranks) if owners[v] == worker]
        assert tuple(sorted(own)) == tree.maximal_nodes(leaves, vranks)
        whole.update(own)
    assert tree.fold(whole, vranks, add) == definition(vranks)
    merged: dict[tree.Node, str] = {}
    for node in data.draw(st.permutations(sorted(whole))):
        tree.merge(merged, node, whole[node], vranks, add)
    assert merged == {tree.root(vranks): definition(vranks)}


@given(vranks=st.integers(1, 40), missing=st.integers(0, 39))
def test_incomplete_sum_never_passes(vranks: int, missing: int) -> None:
    values = {(v, 1): str(v) for v in range(vranks) if v != missing % vranks}
    with pytest.raises(KeyError, match=f"virtual rank {missing % vranks} is missing"):
        tree.fold(values, vranks, add)


@given(vranks=st.integers(1, 64), data=st.data())
def test_maximal_nodes_cover_exactly_their_leaves(vranks: int, data: st.DataObject) -> None:
    leaves = data.draw(st.sets(st.integers(0, vranks - 1)))
    nodes = tree.maximal_nodes(leaves, vranks)
    covered = [v for start, width in nodes for v in range(start, min(start + width, vranks))]
    assert sorted(covered) == sorted(leaves)
    assert len(nodes) <= max(1, len(leaves))


@given(vranks=st.integers(2, 64))
def test_parent_and_children_agree(vranks: int) -> None:
    for child in tree.children(tree.root(vranks)):
        assert tree.parent(child) == tree.root(vranks)


def test_the_order_of_a_sum_is_the_same_for_ever() -> None:
    """The order is pinned: another tree changes the bits of every job."""
    shapes = {1: "0", 2: "(0+1)", 3: "((0+1)+2)", 5: "(((0+1)+(2+3))+4)"}
    shapes[7] = "(((0+1)+(2+3))+((4+5)+6))"
    for vranks, shape in shapes.items():
        assert tree.fold({(v, 1): str(v) for v in range(vranks)}, vranks, add) == shape
    leaves = [1.0, 1e16, -1e16, 1.0, 1.0]  # added in order they give 2
    floats = {(v, 1): leaf for v, leaf in enumerate(leaves)}
    assert tree.fold(floats, 5, lambda a, b: a + b) == 1.0


@given(vranks=st.integers(2, 64), node=st.integers(0, 63), level=st.integers(0, 5))
def test_a_node_is_one_of_its_parents_children(vranks: int, node: int, level: int) -> None:
    width = 1 << level
    start = node % vranks // width * width
    children = tree.children(tree.parent((start, width)))
    assert (start, width) in children
    assert children[0][0] + children[0][1] == children[1][0]
    assert tree.root(vranks)[1] >= vranks > tree.root(vranks)[1] // 2


# ---------------------------------------------------------------- parts


@given(st.integers(0, 10_000), st.integers(1, 20), st.integers(1, 64))
def test_parts_cover_a_range_once_and_are_about_equal(total: int, count: int, align: int) -> None:
    parts = [part_of(total, index, count, align) for index in range(count)]
    assert [at for part in parts for at in range(*part)] == list(range(total))
    assert all(start <= stop for start, stop in parts)
    assert all(start % align == 0 for start, stop in parts if start < stop)
    even = -(-total // count)
    assert max(stop - start for start, stop in parts) <= even + align - 1
    assert part_of(10, 1, 3) == (4, 8)
    assert part_of(10, 1, 3, 3) == (6, 10)


def test_exact_products_are_the_same_for_ever() -> None:
    """The products are pinned: a machine's results are compared with a digest made earlier."""
    tiny = ExactProduct(name="tiny", rows=2, inner=3, columns=2, entry_max=5, digest="")
    assert [each - 256 * (each > 127) for each in tiny.left_entries()] == [-4, 1, 5, 3, -5, -1]
    assert [each - 256 * (each > 127) for each in tiny.right_entries()] == [3, -2, -2, -4, -4, 1]
    assert (tiny.sum_max, tiny.operations) == (75, 24)
    for product, left, right in ((WIDE, "149bde9b855bc0e7", None), (NARROW, None, PINNED_RIGHT)):
        for made, pinned in ((product.left_entries(), left), (product.right_entries(), right)):
            assert pinned is None or hashlib.sha256(made).hexdigest()[:16] == pinned
    assert (WIDE.sum_max < 1 << 24, NARROW.sum_max <= 256) == (True, True)
    assert digest_of(b"\1\0\0\0") == "d82c12285b5d4551f88e8f6e7eb52b81"


PINNED_RIGHT = "cfcb611c6b1bba19"

# ---------------------------------------------------------------- assignment


def loads(owners: tuple[WorkerId, ...], workers: list[WorkerId]) -> list[int]:
    return [owners.count(w) for w in workers]


@given(vranks=st.integers(1, 32), data=st.data())
def test_boundary_assignment_is_balanced_and_contiguous(vranks: int, data: st.DataObject) -> None:
    everyone = [WorkerId(w) for w in range(40)]
    workers = sorted(data.draw(st.sets(st.sampled_from(everyone), min_size=1, max_size=vranks)))
    previous = data.draw(
        st.just(()) | st.lists(st.sampled_from(everyone), min_size=vranks, max_size=vranks)
    )
    owners = assign_at_boundary(vranks, workers, previous)
    assert len(owners) == vranks
    assert max(loads(owners, workers)) - min(loads(owners, workers)) <= 1
    blocks = [owners[i] for i in range(vranks) if i == 0 or owners[i] != owners[i - 1]]
    assert sorted(blocks) == workers
    assert assign_at_boundary(vranks, workers, owners) == owners  # no task moves without a reason


@given(vranks=st.integers(1, 32), data=st.data())
def test_in_the_middle_of_a_step_only_lost_vranks_move(vranks: int, data: st.DataObject) -> None:
    workers = [WorkerId(w) for w in range(data.draw(st.integers(1, vranks)))]
    previous = assign_at_boundary(vranks, workers, ())
    survivors = sorted(data.draw(st.sets(st.sampled_from(workers), min_size=1)))
    owners = assign_mid_step(survivors, previous)
    for before, after in zip(previous, owners, strict=True):
        assert after in survivors
        assert after == before or before not in survivors
    if len(workers) > len(survivors):
        most = max(loads(owners, survivors))
        assert most - min(loads(owners, survivors)) <= 1


def test_assignments_are_the_same_for_ever() -> None:
    """The assignments are pinned: coordinators of two releases must not move work to and fro."""
    before = [WorkerId(w) for w in (5, 5, 5, 2, 2, 9, 9)]
    workers = [WorkerId(w) for w in (0, 2, 5)]
    assert assign_at_boundary(7, workers, before) == (5, 5, 5, 2, 2, 0, 0)
    lost = [WorkerId(w) for w in (0, 2, 5, 2, 0, 9, 5)]
    assert assign_mid_step([WorkerId(0), WorkerId(5)], lost) == (0, 0, 5, 5, 0, 0, 5)


def test_more_workers_than_virtual_ranks_is_refused() -> None:
    with pytest.raises(InvariantError, match="3 workers cannot host 2 virtual ranks"):
        spread_blocks(2, 3)


# ---------------------------------------------------------------- resume rule


def survivor(worker: int, committed: int, reduced: bool) -> WorkerStatus:
    return WorkerStatus(
        worker=WorkerId(worker),
        incarnation=Incarnation(1),
        state=ReplicaStage.CURRENT,
        committed=committed,
        reduced=reduced,
    )


@given(step=st.integers(0, 9), reduced=st.lists(st.booleans(), min_size=1, max_size=6))
def test_uncommitted_step_is_committed_only_if_all_hold_its_gradient(
    step: int, reduced: list[bool]
) -> None:
    survivors = [survivor(i, step, r) for i, r in enumerate(reduced)]
    resumed, why = resume_step(survivors, lost=False)
    assert resumed == step + all(reduced)
    assert why
    assert resume_step(survivors, lost=True)[0] == step  # the lost one may have doubted the sum


@given(step=st.integers(1, 9), committed=st.lists(st.booleans(), min_size=1, max_size=6))
def test_commit_of_one_is_the_commit_of_all(step: int, committed: list[bool]) -> None:
    survivors = [survivor(i, step - (not c), not c) for i, c in enumerate([*committed, True])]
    for lost in (False, True):  # a commit takes all votes, also the lost one's
        assert resume_step(survivors, lost)[0] == step


@pytest.mark.parametrize(
    "survivors",
    [
        [survivor(0, 3, False), survivor(1, 2, False)],  # committed without the gradient of all
        [survivor(0, 4, False), survivor(1, 2, True)],  # two steps apart
        [],
    ],
)
def test_impossible_reports_are_refused(survivors: list[WorkerStatus]) -> None:
    for lost in (False, True):
        with pytest.raises(InvariantError):
            resume_step(survivors, lost)


# ---------------------------------------------------------------- frozen or busy

POLICY = FreezePolicy(sample_s=0.25, stopped_samples=4, silent_samples=10)


def verdicts(samples: list[tuple[str, int]]) -> list[str | None]:
    detector = FreezeDetector(POLICY)
    return [detector.observe(ProcessSample(state=s, progress=p)) for s, p in samples]


@given(st.lists(st.tuples(st.sampled_from("RSDt"), st.integers(1, 5)), max_size=60))
def test_a_process_that_makes_progress_is_not_frozen(samples: list[tuple[str, int]]) -> None:
    progress, fed = 0, []
    for state, more in samples:
        progress += more
        fed.append((state, progress))
    assert not any(verdicts(fed))


def test_stopped_process_is_frozen_after_its_samples() -> None:
    seen = verdicts([("S", 1), *[("T", 1)] * 4])
    assert seen[:4] == [None] * 4
    assert seen[4] == "frozen: the kernel reports it stopped for 1 s"


def test_silent_process_is_frozen_after_its_samples() -> None:
    seen = verdicts([("S", 7)] * 11)
    assert seen[:10] == [None] * 10
    assert seen[10] == "frozen: no thread of it was scheduled for 2.5 s"


def test_a_process_that_has_not_joined_may_be_silent_but_not_stopped() -> None:
    detector = FreezeDetector(POLICY, joined=False)
    silent, stopped = ProcessSample(state="S", progress=7), ProcessSample(state="T", progress=7)
    assert not any(detector.observe(silent) for _ in range(100))
    detector.joined = True
    assert [detector.observe(silent) is None for _ in range(10)] == [True] * 9 + [False]
    detector.joined = False
    assert "stopped" in str([detector.observe(stopped) for _ in range(4)][-1])


def test_one_sign_of_life_starts_the_count_again() -> None:
    assert not any(verdicts([("T", 1), ("T", 1), ("T", 1), ("S", 2)] * 5))
    assert not any(verdicts([("S", i // 10) for i in range(40)]))


def test_a_traced_process_is_somebody_debugging() -> None:
    assert not any(verdicts([("t", 1)] * 50))


# ---------------------------------------------------------------- the right to act


@given(
    answered=st.floats(0, 100),
    proved=st.floats(0, 100),
    witness=st.floats(0, 200),
    heard_late=st.floats(0, 50),
    drift=st.floats(-0.05, 0.05),
    policy=st.builds(
        LeasePolicy,
        lease_s=st.floats(1, 10),
        suspect_s=st.just(1.0),
        abandon_s=st.floats(20, 100),
        margin_s=st.just(0.0),
    ),
)
def test_a_worker_has_stopped_before_it_is_fenced(
    answered: float,
    proved: float,
    witness: float,
    heard_late: float,
    drift: float,
    policy: LeasePolicy,
) -> None:
    """Times of one true clock; the node's own runs faster or slower by `drift` from time 0."""
    proved = min(proved, witness)  # no ledger proves more than the witness allows
    rate = 1 + drift
    stops_at = acting_deadline(answered * rate, proved * rate, policy) / rate
    fenced_at = fence_time(answered + heard_late, witness, policy)
    alone = fence_time(answered + heard_late, None, policy)
    span_s = policy.abandon_s if fenced_at == alone else policy.lease_s
    assert stops_at <= fenced_at + span_s * 0.06


# ---------------------------------------------------------------- lost links


def facts(pairs: list[tuple[int, int]], joiners: set[int], workers: int) -> Facts:
    """Return a stopped view of `workers` on nodes of their own, with complaints as `pairs`."""
    members = tuple(
        Member(worker=WorkerId(w), incarnation=Incarnation(1), agent=AgentId(f"n{w}"))
        for w in range(workers)
    )
    view = View(
        number=ViewNumber(3),
        members=members,
        owners=tuple(m.worker for m in members),
        resume_step=0,
        leader=WorkerId(min(set(range(workers)) - joiners)),
        joiners=tuple(WorkerId(w) for w in sorted(joiners)),
    )
    roster = LiveRoster(None, 0.0)
    for member in members:
        status = WorkerStatus(
            worker=member.worker,
            incarnation=member.incarnation,
            stage=Stage.READY,
            view=view.number,
            promised=view.number,
            state=ReplicaStage.ABSENT if member.worker in joiners else ReplicaStage.CURRENT,
            unreached=tuple(WorkerId(b) for a, b in pairs if a == member.worker),
        )
        report = AgentReport(
            agent=member.agent, incarnation=Incarnation(1), seq=1, slots=1, workers=(status,)
        )
        roster.hear(report, 0.0)
        roster.apply(AddSlot(SlotState(member.agent, Incarnation(1))))
    return Facts(
        view=view, roster=roster, lease=LeasePolicy(), silent=frozenset(), witness_at=0.0, now=0.1
    )


@given(data=st.data(), workers=st.integers(2, 7))
def test_leaving_unreachable_workers_out_reconnects_the_rest(
    data: st.DataObject, workers: int
) -> None:
    joiners = data.draw(st.sets(st.integers(0, workers - 1), max_size=workers - 1))
    several = st.tuples(st.integers(0, workers - 1), st.integers(0, workers - 1))
    pairs = [p for p in data.draw(st.lists(several, max_size=8)) if p[0] != p[1]]
    left_out = choose_unreachable(facts(pairs, joiners, workers))
    kept = set(range(workers)) - set(left_out)
    assert not any(a in kept and b in kept for a, b in pairs)
    assert kept - joiners, "nobody who holds the state is left"
    assert len(left_out) <= len(pairs)


def test_a_pair_costs_one_worker_and_not_the_leader() -> None:
    assert choose_unreachable(facts([(0, 1), (1, 0)], set(), 3)) == [1]
    assert choose_unreachable(facts([(2, 0)], {2}, 3)) == [2]
    assert choose_unreachable(facts([(1, 0), (1, 2), (2, 1)], set(), 3)) == [1]


# ---------------------------------------------------------------- drains


def asking(name: str, seq: int, asks: str, check: str) -> AgentReport:
    return AgentReport(
        agent=AgentId(name),
        incarnation=Incarnation(1),
        seq=seq,
        slots=1,
        draining=asks,
        failing=check,
    )


def drain_now(found: Facts) -> str:
    """Drain the nodes that should be drained; return the reasons for keeping the other ones."""
    why_not, plan = drain(found)
    renew(found, *plan)
    return why_not


def renew(found: Facts, *news: Change | AgentReport) -> None:
    roster = found.roster
    assert isinstance(roster, LiveRoster)
    for each in news:
        if isinstance(each, AgentReport):
            roster.hear(each, 0.0)
        else:
            roster.apply(each)


def nodes_asking(failing: dict[str, str], asked: Collection[str] = ()) -> Facts:
    """Return eight nodes with a place each; some fail a check, some are asked to leave."""
    roster = LiveRoster(None, 0.0)
    for name in (f"n{i}" for i in range(8)):
        check = failing.get(name, "")
        asks = "disk: bad" if check else "a new fan" if name in asked else ""
        report = asking(name, 1, asks, check)
        roster.hear(report, 0.0)
        roster.apply(AddSlot(SlotState(report.agent, Incarnation(1))))
    return Facts(
        view=None, roster=roster, lease=LeasePolicy(), silent=frozenset(), witness_at=None, now=0.1
    )


def drained(found: Facts) -> list[str]:
    return [name for name, node in found.roster.nodes.items() if node.draining]


def test_a_node_that_fails_is_drained_and_a_failure_that_many_share_drains_none() -> None:
    found = nodes_asking({"n3": "disk"})
    assert drain_now(found) == ""
    assert drained(found) == ["n3"]
    shared = nodes_asking({f"n{i}": "disk" for i in range(5)})
    assert "disk fails on 5 of 8 nodes" in drain_now(shared)
    assert drained(shared) == []


def test_a_check_that_a_quarter_fails_is_theirs_and_one_that_more_fail_is_shared() -> None:
    """At most two of eight nodes are drained at a time; one of two; none of one."""
    several = {count: [("n", "disk")] * count + [("m", "")] * (8 - count) for count in (2, 3)}
    assert choose_drains(several[2]) == (("n", "n"), "")
    chosen, why = choose_drains(several[3])
    assert (chosen, why) == ((), "disk fails on 3 of 8 nodes: it is shared")
    mixed = [("a", "disk"), ("b", "gpu"), ("c", "gpu"), *[("m", "")] * 5]
    assert choose_drains(mixed) == (("a", "b"), "at most 2 of 8 nodes at a time")
    assert choose_drains([("a", "disk"), ("b", "")]) == (("a",), "")
    assert choose_drains([("a", "disk")])[0] == ()


def test_nodes_asked_to_leave_are_drained_however_many_others_fail() -> None:
    found = nodes_asking({f"n{i}": "disk" for i in range(5)}, asked=("n6", "n7"))
    drain_now(found)
    assert drained(found) == ["n6", "n7"]


def test_a_drained_node_stays_so_when_another_begins_to_fail() -> None:
    found = nodes_asking({"n5": "disk", "n6": "memory"})
    drain_now(found)
    for name, check in (("n0", "gpu"), ("n1", "clock")):
        renew(found, asking(name, 2, "bad", check))
    assert "at most 2 of 8" in drain_now(found)
    assert drained(found) == ["n5", "n6"]


def test_a_node_that_is_well_again_is_used_again() -> None:
    found = nodes_asking({"n3": "disk"})
    drain_now(found)
    ordered = [each.incarnation for each in list_wanted(found.roster, AgentId("n3"), None)]
    renew(found, asking("n3", 2, "", ""))
    drain_now(found)
    assert drained(found) == []
    assert ordered == []
    assert [each.incarnation for each in list_wanted(found.roster, AgentId("n3"), None)] == [2]


def test_an_error_is_told_in_one_line_whatever_it_says() -> None:
    assert first_line(ValueError("\nno space\nadvice")) == "no space"
    assert first_line(ValueError("  ")) == first_line(ValueError()) == "ValueError"


def test_spans() -> None:
    workers = [WorkerId(w) for w in (0, 1, 4, 5, 6, 9)]
    assert spans(workers) == "0, 1, 4-6, 9"
    assert spans([]) == ""


@given(st.data())
def test_lost_vranks_go_to_the_least_loaded(data: st.DataObject) -> None:
    """The heap finds whom a plain search would find."""
    count = data.draw(st.integers(2, 6))
    previous = data.draw(st.lists(st.integers(0, count - 1), min_size=count, max_size=24))
    survivors = sorted(data.draw(st.sets(st.integers(0, count - 1), min_size=1)))
    load = {w: previous.count(w) for w in survivors}
    expected = list(previous)
    for v, owner in enumerate(previous):
        if owner not in load:
            near = previous[v ^ 1] if v ^ 1 < len(previous) else None
            heir = min(survivors, key=lambda w: (load[w], w != near, w))
            expected[v] = heir
            load[heir] += 1
    found = assign_mid_step([WorkerId(w) for w in survivors], [WorkerId(w) for w in previous])
    assert list(found) == expected

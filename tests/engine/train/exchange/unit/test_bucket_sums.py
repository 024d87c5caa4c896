"""A bucket's sum has the same bits whoever hosts what; wrong sums are found, and who made them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.engine.core import tree
from holdfast.engine.core.ground.events import Doubt
from holdfast.engine.core.step.sum_trial import SumTrial
from holdfast.engine.core.sum_plan import SumPlan, cut, cut_evenly, find_shared_sums
from holdfast.engine.core.types import WorkerId
from holdfast.engine.train.exchange.cut_plan import PIECE_ALIGN, CutAddition
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.step.bucket_sums import BucketSum
from holdfast.engine.train.step.buckets import Bucket, Flat
from holdfast.engine.train.step.sum_runs import BucketRuns
from mailboxes import Mailbox, mailboxes, together

# ---------------------------------------------------------------- sums


def complete(summing: BucketSum, box: Mailbox) -> None:
    summing.begin(box)
    while summing.advance(box):
        pass
    summing.finish()


@settings(max_examples=40, deadline=None)
@given(data=st.data(), vranks=st.integers(1, 9), seed=st.integers(0, 100))
def test_the_sum_does_not_depend_on_the_assignment(
    data: st.DataObject, vranks: int, seed: int
) -> None:
    size = data.draw(st.integers(1, vranks))
    hosts = data.draw(st.permutations([v % size for v in range(vranks)]))
    generator = torch.Generator().manual_seed(seed)
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    leaves = torch.randn(vranks, 300, generator=generator).to(dtype)
    expected = tree.fold({(v, 1): leaves[v] for v in range(vranks)}, vranks, torch.add)
    hosted = tuple(tuple(v for v in range(vranks) if hosts[v] == r) for r in range(size))
    nodes = tuple(tree.maximal_nodes(h, vranks) for h in hosted)
    boxes = mailboxes(size)
    buckets = []
    for rank in range(size):
        bucket = Bucket(0, [nn.Parameter(torch.zeros(300, dtype=dtype))], [0])
        for v in data.draw(st.permutations(hosted[rank])):
            leaf = Flat(bucket.params)
            leaf.data.copy_(leaves[v])
            bucket.contribute(v, leaf, vranks)
        buckets.append(bucket)
    layouts = [Layout(rank, size, vranks, hosted, nodes, tuple(hosts)) for rank in range(size)]
    for turned in (1, 2, 0):  # a reduction can be repeated: it does not change the partial sums
        sums = [
            BucketSum(b, layout, plan=layout.turned_plan(turned) if turned else None)
            for b, layout in zip(buckets, layouts, strict=True)
        ]
        pairs = zip(sums, boxes, strict=True)
        assert together(*[lambda s=s, b=b: complete(s, b) for s, b in pairs]) == []
        for each in sums:
            assert torch.equal(each.result, expected)
        flat = [
            each.repeat(layout.flat_plan(turned))
            for each, layout in zip(sums, layouts, strict=True)
        ]
        pairs = zip(flat, boxes, strict=True)
        assert together(*[lambda s=s, b=b: complete(s, b) for s, b in pairs]) == []
        assert all(torch.equal(each.result, expected) for each in flat)

    copies = [Flat(buckets[0].params) for _ in range(vranks)]
    for copy, leaf in zip(copies, leaves, strict=True):
        copy.data.copy_(leaf)
    for each in sums:  # the received parts have not changed
        assert all(each.agrees(v, {0: copies[v]}) for v in range(vranks))
    for v in range(vranks):
        # Other members see it only within a sum, unless its part is alone there.
        alone = any(start == v and min(w, vranks - v) == 1 for start, w in nodes[hosts[v]])
        copies[v].data.add_(1)
        unlike = [r for r in range(size) if not sums[r].agrees(v, {0: copies[v]})]
        assert hosts[v] not in unlike
        assert bool(unlike) == (alone and size > 1)


@pytest.mark.parametrize("hosts", [(0, 0, 0, 0), (0, 2, 0, 2), (1, 1, 1, 2)])
def test_members_that_host_nothing_get_every_sum(hosts: tuple[int, ...]) -> None:
    size, vranks = 3, len(hosts)
    hosted = tuple(tuple(v for v in range(vranks) if hosts[v] == r) for r in range(size))
    nodes = tuple(tree.maximal_nodes(each, vranks) for each in hosted)
    leaves = torch.randn(vranks, 300, generator=torch.Generator().manual_seed(1))
    boxes, sums = mailboxes(size), []
    for rank in range(size):
        bucket = Bucket(0, [nn.Parameter(torch.zeros(300))], [0])
        for v in hosted[rank]:
            leaf = Flat(bucket.params)
            leaf.data.copy_(leaves[v])
            bucket.contribute(v, leaf, vranks)
        layout = Layout(rank, size, vranks, hosted, nodes, tuple(map(WorkerId, hosts)))
        first = BucketSum(bucket, layout)
        plans = (layout.turned_plan(1), layout.flat_plan(0), layout.flat_plan(1))
        sums.append([first, *(first.repeat(plan) for plan in plans)])
    expected = tree.fold({(v, 1): leaves[v] for v in range(vranks)}, vranks, torch.add)
    for run in zip(*sums, strict=True):
        pairs = zip(run, boxes, strict=True)
        assert together(*[lambda s=s, b=b: complete(s, b) for s, b in pairs]) == []
        assert all(torch.equal(each.result, expected) for each in run)


# ---------------------------------------------------------------- what is wrong in them


def members_of(size: int) -> tuple[list[Mailbox], list[Layout], list[Bucket], torch.Tensor]:
    """Return a bucket with a part on each of these members, and its right sum."""
    dice = torch.Generator().manual_seed(size)
    leaves = torch.randn(size, 1000, generator=dice)
    hosted = tuple((v,) for v in range(size))
    nodes = tuple(tree.maximal_nodes(h, size) for h in hosted)
    layouts = [Layout(rank, size, size, hosted, nodes, tuple(range(size))) for rank in range(size)]
    buckets = []
    for leaf in leaves:
        bucket = Bucket(0, [nn.Parameter(torch.zeros(1000))], [0])
        flat = Flat(bucket.params)
        flat.data.copy_(leaf)
        bucket.contribute(len(buckets), flat, size)
        buckets.append(bucket)
    total = tree.fold({(v, 1): leaves[v] for v in range(size)}, size, torch.add)
    return mailboxes(size), layouts, buckets, total


Damage = Callable[[int, int, torch.Tensor, str], None]  # a rank, a run, values, and their name


def check_sum(bucket: Bucket, transport: Mailbox, layout: Layout) -> tuple[list[int], int] | None:
    """Sum a bucket, and have a trial judge that, as a worker's machine and engine do.

    Return the ranks that were wrong, and the number of questions; None without a verdict.
    """
    first = BucketSum(bucket, layout)
    complete(first, transport)
    trial, runs = SumTrial(bucket.index, range(layout.size), layout.size), BucketRuns(first, layout)
    asked = 0
    while trial.question is not None:
        if trial.right:
            runs.put_right(trial.right)
        rows = runs.answer(trial.question, transport)
        trial.hear(tuple(tuple(row) for row in rows))
        asked += 1
    return None if trial.is_undecided else (list(trial.wrong), asked)


def checked(
    size: int, damage: Damage, patch: pytest.MonkeyPatch
) -> list[tuple[list[int], int] | None]:
    """Check a sum among members, while `damage` may change values that they make or receive."""
    boxes, layouts, buckets, total = members_of(size)
    add, advance = BucketSum._add, BucketSum.advance

    flat_plan = Layout.flat_plan
    flat_plans: list[tuple[SumPlan, int]] = []

    def make_flat_plan(self: Layout, turned: int) -> SumPlan:
        plan = flat_plan(self, turned)
        flat_plans.append((plan, turned))
        return plan

    def run_of(summing: BucketSum) -> tuple[int, bool]:
        """Return the number of places by which a run is turned, and whether it is flat."""
        for plan, turned in flat_plans:
            if plan is summing.plan:
                return turned, True
        return int(summing.plan is not summing._layout.plan), False

    def add_wrongly(self: BucketSum, addition: CutAddition) -> None:
        add(self, addition)
        made = self._held[addition.node][1]
        turned, is_flat = run_of(self)
        if not is_flat:
            damage(self._layout.rank, turned, made, f"node {addition.node}")

    def advance_wrongly(self: BucketSum, transport: Mailbox) -> bool:
        goes_on = advance(self, transport)
        if not goes_on:
            turned, is_flat = run_of(self)
            damage(self._layout.rank, turned, self.result, "flat" if is_flat else "copy")
        return goes_on

    patch.setattr(Layout, "flat_plan", make_flat_plan)
    patch.setattr(BucketSum, "_add", add_wrongly)
    patch.setattr(BucketSum, "advance", advance_wrongly)
    found: list[tuple[list[int], int] | None] = [None] * size

    def check(rank: int) -> None:
        found[rank] = check_sum(buckets[rank], boxes[rank], layouts[rank])

    assert together(*[lambda r=r: check(r) for r in range(size)]) == []
    patch.undo()
    if None not in found:
        for bucket in buckets:
            assert torch.equal(bucket.result.data, total)
    return found


SIZES = [2, 3, 5, 8]


@pytest.mark.parametrize("size", SIZES)
def test_a_sum_that_is_right_is_made_twice_and_compared_once(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert checked(size, lambda *_: None, monkeypatch) == [([], 1)] * size


@pytest.mark.parametrize("run", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_a_damaged_copy_of_a_sum_is_put_right_and_its_holder_blamed(
    size: int, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(rank: int, turned: int, values: torch.Tensor, what: str) -> None:
        if (rank, turned, what) == (1, run, "copy"):
            values[3] += 1

    assert checked(size, damage, monkeypatch) == [([1], 4)] * size


@pytest.mark.slow_with("8-0")
@pytest.mark.parametrize("run", [0, 1])
@pytest.mark.parametrize("size", SIZES)
def test_who_makes_a_wrong_sum_at_any_node_in_one_run_is_found(
    size: int, run: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    nodes = [tree.maximal_nodes((v,), size) for v in range(size)]
    for each in find_shared_sums(nodes, size):
        for maker in each.hosts:

            def damage(rank: int, turned: int, values: torch.Tensor, what: str) -> None:
                if (rank, turned, what) == (maker, run, f"node {each.node}"):  # noqa: B023
                    values[-1:] += 1

            assert checked(size, damage, monkeypatch) == [([maker], 4)] * size


@pytest.mark.parametrize("size", [3, 8])
def test_a_member_that_always_adds_wrongly_is_found(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(rank: int, turned: int, values: torch.Tensor, what: str) -> None:
        if rank == 1 and what not in ("copy", "flat"):
            values[0] += 1
        if what == "flat":
            values[cut(cut_evenly((1 + turned) % size, size), 1000, PIECE_ALIGN)] += 1

    assert checked(size, damage, monkeypatch) == [([1], 5)] * size


def test_two_members_that_sum_otherwise_each_time_are_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def damage(rank: int, turned: int, values: torch.Tensor, what: str) -> None:
        if what == "copy":
            values += 1 + turned
        elif what == "flat":
            values += 2**turned

    assert checked(2, damage, monkeypatch) == [None, None]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_sum_that_is_not_finite_is_noticed(
    dtype: torch.dtype,
) -> None:
    for value in (math.nan, math.inf, -math.inf, 1.0):
        boxes, layouts, buckets, _ = members_of(2)
        for bucket in buckets:
            bucket.result = Flat([nn.Parameter(torch.zeros(1000, dtype=dtype))])
            for node, flat in bucket.partials.items():
                cast = Flat([nn.Parameter(torch.zeros(1000, dtype=dtype))])
                cast.data.copy_(flat.data)
                bucket.partials[node] = cast
        next(iter(buckets[0].partials.values())).data[999] = value
        sums = [BucketSum(b, layout) for b, layout in zip(buckets, layouts, strict=True)]
        pairs = zip(sums, boxes, strict=True)
        assert together(*[lambda s=s, b=b: complete(s, b) for s, b in pairs]) == []
        found = [each.doubt() for each in sums]
        if math.isfinite(value):
            assert found == [Doubt.FINITE, Doubt.FINITE]
        else:
            assert found == [Doubt.BLAMED, Doubt.UNATTRIBUTED]


def test_a_number_that_is_not_finite_is_blamed_on_the_member_whose_part_it_is() -> None:
    for size, bad in ((4, 3), (4, 1), (3, 2), (7, 5)):
        boxes, layouts, buckets, _ = members_of(size)
        next(iter(buckets[bad].partials.values())).data[0] = math.nan
        sums = [BucketSum(b, layout) for b, layout in zip(buckets, layouts, strict=True)]
        pairs = zip(sums, boxes, strict=True)
        assert together(*[lambda s=s, b=b: complete(s, b) for s, b in pairs]) == []
        found = [each.doubt() for each in sums]
        assert found == [
            Doubt.BLAMED + bad if r == bad else Doubt.UNATTRIBUTED for r in range(size)
        ]

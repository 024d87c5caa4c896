"""A bucket's sum has the same bits whoever hosts what; wrong sums are found, and who made them."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.core import tree
from holdfast.core.step.events import FINITE, NOBODYS, SOMEBODYS
from holdfast.core.step.sum_trial import SumTrial
from holdfast.train.exchange.layout import TAG_AUDIT, Layout, all_gather
from holdfast.train.step.bucket_sums import BucketSum, FlatSum
from holdfast.train.step.buckets import Bucket, Flat
from holdfast.train.step.sum_runs import SumRuns
from mailboxes import Mailbox, mailboxes, together

# ---------------------------------------------------------------- sums

KINDS = [BucketSum, FlatSum]


def complete(summing: BucketSum | FlatSum, box: Mailbox) -> None:
    summing.begin(box)
    while summing.advance(box):
        pass
    summing.finish()


@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=40, deadline=None)
@given(data=st.data(), vranks=st.integers(1, 9), seed=st.integers(0, 100))
def test_the_sum_does_not_depend_on_the_assignment(
    kind: type[BucketSum | FlatSum], data: st.DataObject, vranks: int, seed: int
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
    for _ in range(2):  # a reduction can be repeated: it does not change the partial sums
        sums = [kind(b, layout) for b, layout in zip(buckets, layouts, strict=True)]
        pairs = zip(sums, boxes, strict=True)
        assert together(*[lambda s=s, b=b: complete(s, b) for s, b in pairs]) == []
        for bucket in buckets:
            assert torch.equal(bucket.result.data, expected)

    copies = [Flat(buckets[0].params) for _ in range(vranks)]
    for copy, leaf in zip(copies, leaves, strict=True):
        copy.data.copy_(leaf)
    for each in sums:  # the parts are still those that were received
        assert all(each.agrees(v, {0: copies[v]}) for v in range(vranks))
    for v in range(vranks):
        # Others see it only within a sum, unless its part is alone there.
        alone = any(start == v and min(w, vranks - v) == 1 for start, w in nodes[hosts[v]])
        copies[v].data.add_(1)
        unlike = [r for r in range(size) if not sums[r].agrees(v, {0: copies[v]})]
        assert hosts[v] not in unlike
        assert bool(unlike) == (alone and size > 1)
        if kind is FlatSum:
            pieces = [layouts[r].piece(r, 300) for r in range(size)]
            wide = [r for r in range(size) if pieces[r].stop > pieces[r].start]
            assert not alone or unlike == [r for r in wide if r != hosts[v]]


# ---------------------------------------------------------------- what is wrong in them


def summed_by(size: int) -> tuple[list[Mailbox], list[Layout], list[Bucket], torch.Tensor]:
    """Return a bucket that these members have summed, on each of them; and the right sum."""
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
    for bucket in buckets:
        bucket.result.data.copy_(total)
    return mailboxes(size), layouts, buckets, total


def check_sum(bucket: Bucket, transport: Mailbox, layout: Layout) -> list[int] | None:
    """Have a trial judge the runs of a bucket's sum, as a worker's machine and engine do."""
    trial, runs = SumTrial(bucket.index), SumRuns(bucket, layout)
    while True:
        mine = torch.tensor(runs.digests(), dtype=torch.int64)
        rows = all_gather(transport, layout, mine, TAG_AUDIT).tolist()
        verdict = trial.hear(tuple(tuple(row) for row in rows))
        if verdict is None:
            runs.add(transport)
            continue
        if verdict.undecided:
            return None
        if verdict.amended:
            runs.put_right(verdict.right)
        return list(verdict.wrong)


def checked(size: int, damage: Callable[[list[Bucket]], None]) -> list[list[int] | None]:
    boxes, layouts, buckets, total = summed_by(size)
    damage(buckets)
    found: list[list[int] | None] = [None] * size

    def check(rank: int) -> None:
        found[rank] = check_sum(buckets[rank], boxes[rank], layouts[rank])

    assert together(*[lambda r=r: check(r) for r in range(size)]) == []
    if None not in found:
        for bucket in buckets:
            assert torch.equal(bucket.result.data, total)
    return found


@pytest.mark.parametrize("size", [2, 3, 5])
def test_a_sum_is_checked_and_put_right(size: int) -> None:
    assert checked(size, lambda buckets: None) == [[]] * size

    def one_copy(buckets: list[Bucket]) -> None:
        buckets[1].result.data[3] += 1  # the first member's sum, as the second has got it

    def the_sum(buckets: list[Bucket]) -> None:
        for bucket in buckets:  # the last member's piece
            bucket.result.data[-1] += 1

    assert checked(size, one_copy) == [[1]] * size
    layouts = summed_by(size)[1]
    (last,) = [each.rank for each in layouts if each.piece(each.rank, 1000).stop == 1000][:1]
    assert checked(size, the_sum) == [[last]] * size


def test_two_members_that_sum_otherwise_each_time_are_not_believed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    plain = FlatSum._fold

    def fold(self: FlatSum, out: torch.Tensor, piece: slice) -> None:
        plain(self, out, piece)
        if self._layout.rank == 1:
            out += 1

    monkeypatch.setattr(FlatSum, "_fold", fold)

    def as_it_was(buckets: list[Bucket]) -> None:
        half = Layout(0, 2, 2, (), (), ()).piece(1, 1000)
        for bucket in buckets:
            bucket.result.data[half] += 1

    assert checked(2, as_it_was) == [None, None]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float64])
def test_a_sum_that_is_not_finite_is_noticed(
    dtype: torch.dtype, kind: type[BucketSum | FlatSum]
) -> None:
    for value in (math.nan, math.inf, -math.inf, 1.0):
        boxes, layouts, buckets, _ = summed_by(2)
        for bucket in buckets:
            bucket.result = Flat([nn.Parameter(torch.zeros(1000, dtype=dtype))])
            for node, flat in bucket.partials.items():
                cast = Flat([nn.Parameter(torch.zeros(1000, dtype=dtype))])
                cast.data.copy_(flat.data)
                bucket.partials[node] = cast
        next(iter(buckets[0].partials.values())).data[999] = value
        sums = [kind(b, layout) for b, layout in zip(buckets, layouts, strict=True)]
        pairs = zip(sums, boxes, strict=True)
        assert together(*[lambda s=s, b=b: complete(s, b) for s, b in pairs]) == []
        found = [each.doubt() for each in sums]
        if math.isfinite(value):
            assert found == [FINITE, FINITE]
        else:
            assert found == ([SOMEBODYS, NOBODYS] if kind is BucketSum else [FINITE, SOMEBODYS])


@pytest.mark.parametrize("kind", KINDS)
def test_a_number_that_is_not_finite_is_blamed_on_the_member_whose_part_it_is(
    kind: type[BucketSum | FlatSum],
) -> None:
    for size, bad in ((4, 3), (4, 1), (3, 2), (7, 5)):
        boxes, layouts, buckets, _ = summed_by(size)
        next(iter(buckets[bad].partials.values())).data[0] = math.nan
        sums = [kind(b, layout) for b, layout in zip(buckets, layouts, strict=True)]
        pairs = zip(sums, boxes, strict=True)
        assert together(*[lambda s=s, b=b: complete(s, b) for s, b in pairs]) == []
        found = [each.doubt() for each in sums]
        (looked,) = [r for r in range(size) if layouts[r].piece(r, 1000).start == 0]
        blamed, other = (bad, NOBODYS) if kind is BucketSum else (looked, FINITE)
        assert found == [SOMEBODYS + bad if r == blamed else other for r in range(size)]

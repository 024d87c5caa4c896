"""Sparse gradients are summed along the tree, by members with few connections, to the same bits."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from fractions import Fraction

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from holdfast.engine.core import tree
from holdfast.engine.core.ground.events import Doubt
from holdfast.engine.core.step.sum_trial import SumTrial
from holdfast.engine.core.sum_plan import Message
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.step.row_sums import RowPiece, RowsSum, mix, unmix
from holdfast.engine.train.step.row_table import Rows, RowTable
from holdfast.engine.train.step.sum_runs import RowRuns
from mailboxes import together
from peer_kit import OpenConnections, complete_all, connect, lay_out

ROWS, WIDTH = 24, 3
EXTREMES = [-(1 << 63), -(1 << 63) + 1, -1, 0, 1, 1 << 62, (1 << 63) - 1]
SIZES = [1, 2, 3, 5, 8, 13]
Leaf = list[Rows]  # a task's rows, by table


def random_rows(dice: torch.Generator, dtype: torch.dtype, shape: Sequence[int]) -> Rows:
    """Return no rows, some, some with extreme keys, or all; many values are zeros of any sign."""
    kind = int(torch.randint(5, (1,), generator=dice))
    if kind == 0:
        return Rows(
            places=torch.empty(0, dtype=torch.int64), values=torch.empty(0, *shape, dtype=dtype)
        )
    chosen = torch.randperm(ROWS, generator=dice)[: 1 + kind]
    places = torch.arange(ROWS) if kind == 4 else chosen.sort().values
    if kind == 3:
        keys = torch.tensor(EXTREMES)
        places = keys[torch.rand(len(keys), generator=dice) < 0.5]
    values = torch.randn(len(places), *shape, generator=dice)
    zeros = torch.tensor([0.0, -0.0])[torch.randint(2, values.shape, generator=dice)]
    values = torch.where(torch.rand(values.shape, generator=dice) < 0.4, zeros, values).to(dtype)
    return Rows(places=places, values=values, dense=kind == 4)


def tables_of(layout: Layout, leaves: Sequence[Leaf], order: Sequence[int]) -> list[RowTable]:
    """Return a member's tables, to which its tasks have contributed in this order."""
    found = []
    for index, like in enumerate(leaves[0]):
        param = nn.Parameter(torch.zeros(ROWS, *like.values.shape[1:], dtype=like.values.dtype))
        table = RowTable(index, [(f"table{index}", param, index)], ())
        for vrank in order:
            if vrank in layout.hosted[layout.rank]:
                table.contribute(vrank, leaves[vrank][index], layout.vranks)
        found.append(table)
    return found


def summed(
    layouts: Sequence[Layout],
    leaves: Sequence[Leaf],
    *,
    order: Sequence[int] | None = None,
    dropped: int = -1,
    turned: int = 0,
    flat: bool = False,
) -> tuple[list[RowsSum], list[OpenConnections]]:
    """Sum the rows of all tasks in all members."""
    sums = []
    for layout in layouts:
        tables = tables_of(layout, leaves, order or range(len(leaves)))
        summing = RowsSum.of(tables, layout, counts=layout.rank != dropped)
        if flat or turned:
            plan = layout.flat_plan(turned) if flat else layout.turned_plan(turned)
            summing = summing.repeat(plan)
        sums.append(summing)
    transports = connect(layouts, all_open=flat or turned > 0)
    complete_all([[each] for each in sums], transports)
    return sums, transports


def define_sum(layouts: Sequence[Layout], leaves: Sequence[Leaf], dropped: int = -1) -> Leaf:
    """Return the sum by definition: the sum of the members' partial sums, along the tree."""
    found = []
    for index in range(len(leaves[0])):
        parts = {}
        for layout in layouts:
            (table,) = tables_of(layout, [[leaf[index]] for leaf in leaves], range(len(leaves)))
            if layout.rank == dropped:
                table.partials = {
                    node: Rows.make_empty(table.parts[0].param) for node in table.partials
                }
            parts |= table.partials
        found.append(tree.fold(parts, layouts[0].vranks, Rows.add))
    return found


@pytest.mark.parametrize("flat", [False, True])
@settings(max_examples=30, deadline=None)
@given(data=st.data(), size=st.sampled_from(SIZES), seed=st.integers(0, 1000))
def test_the_sum_is_the_one_along_the_tree_whoever_hosts_what(
    flat: bool, data: st.DataObject, size: int, seed: int
) -> None:
    vranks = data.draw(st.integers(1, 16))
    hosts = data.draw(st.lists(st.integers(0, size - 1), min_size=vranks, max_size=vranks))
    layouts = lay_out(sorted(hosts) if data.draw(st.booleans()) else hosts, size)
    shapes = data.draw(
        st.lists(
            st.tuples(
                st.sampled_from([torch.float32, torch.bfloat16, torch.float64]),
                st.sampled_from([(), (WIDTH,), (2, WIDTH)]),
            ),
            min_size=1,
            max_size=3,
        )
    )
    dice = torch.Generator().manual_seed(seed)
    leaves = [[random_rows(dice, *each) for each in shapes] for _ in range(vranks)]
    dropped = data.draw(st.integers(-1, size - 1))
    order = data.draw(st.permutations(range(vranks)))
    expected = define_sum(layouts, leaves, dropped)
    turned = data.draw(st.integers(0, 2))
    sums, _ = summed(layouts, leaves, order=order, dropped=dropped, turned=turned, flat=flat)
    for each in sums:
        for found, table, right in zip(each.results, each.tables, expected, strict=True):
            assert found.equals(right)
            assert found.dense == right.dense
            assert (table.result is found) == (not turned and not flat)
        assert each.doubt() == Doubt.FINITE


@pytest.mark.parametrize("is_used", [True, False])
def test_a_negative_zero_stays_one_only_beside_a_sum_without_any_rows(is_used: bool) -> None:
    """The other sum may also have rows, but none within the part that a member adds up."""
    count = int(is_used)
    few = Rows(places=torch.arange(count), values=torch.ones(count, 1))
    many = Rows(places=torch.arange(10, 60), values=torch.full((50, 1), -0.0))
    layouts = lay_out(range(4), 4)
    leaves = [[few], [few], [many], [many]]
    (expected,) = define_sum(layouts, leaves)
    assert bool(torch.signbit(expected.values[-50:]).any()) is not is_used
    sums, _ = summed(layouts, leaves)
    assert all(each.tables[0].result.equals(expected) for each in sums)


@settings(max_examples=20, deadline=None)
@given(data=st.data(), size=st.sampled_from(SIZES), seed=st.integers(0, 1000))
def test_a_member_compares_the_rows_that_have_come_to_it(
    data: st.DataObject, size: int, seed: int
) -> None:
    vranks = data.draw(st.integers(1, 13))
    hosts = data.draw(st.lists(st.integers(0, size - 1), min_size=vranks, max_size=vranks))
    layouts = lay_out(hosts, size)
    dice = torch.Generator().manual_seed(seed)
    full = Rows(places=torch.arange(400), values=torch.ones(400, 1))
    leaves = [[random_rows(dice, torch.float32, (WIDTH,)), full] for _ in range(vranks)]
    sums, _ = summed(layouts, leaves)
    for vrank in range(vranks):
        assert all(each.agrees(vrank, dict(enumerate(leaves[vrank]))) for each in sums)
        alone = (vrank, 1) in layouts[0].nodes[hosts[vrank]] or (
            vrank == vranks - 1 and any(n[0] == vrank for n in layouts[0].nodes[hosts[vrank]])
        )
        other = {0: leaves[vrank][0], 1: Rows(places=full.places, values=torch.zeros(400, 1))}
        unlike = [rank for rank, each in enumerate(sums) if not each.agrees(vrank, other)]
        assert hosts[vrank] not in unlike
        assert bool(unlike) == (alone and any(each.plan.up for each in layouts))


# ---------------------------------------------------------------- what is not finite, or wrong


def of_ones(vranks: int, rows: int) -> list[Leaf]:
    return [
        [Rows(places=torch.arange(rows), values=torch.ones(rows, WIDTH))] for _ in range(vranks)
    ]


@pytest.mark.parametrize("value", [math.nan, math.inf, -math.inf])
def test_a_number_that_is_not_finite_is_blamed_on_the_member_whose_part_it_is(
    value: float,
) -> None:
    for size, bad in ((1, 0), (2, 1), (3, 0), (5, 4)):
        leaves = of_ones(size, 50)
        leaves[bad][0].values[17, 1] = value
        sums, _ = summed(lay_out(range(size), size), leaves)
        expected = [
            Doubt.BLAMED + bad if rank == bad else Doubt.UNATTRIBUTED for rank in range(size)
        ]
        assert [each.doubt() for each in sums] == expected


def test_a_sum_beyond_all_numbers_is_blamed_on_no_member() -> None:
    leaves = of_ones(2, 5)
    for leaf in leaves:
        leaf[0].values[3] = torch.finfo(torch.float32).max
    sums, _ = summed(lay_out(range(2), 2), leaves)
    assert [each.doubt() for each in sums] == [Doubt.UNATTRIBUTED, Doubt.UNATTRIBUTED]


# Of a rank, whether it repeats the sum, and rows that it has made.
Damage = Callable[[int, bool, list[RowPiece]], None]


def check_sums(
    size: int, damage: Damage, patch: pytest.MonkeyPatch
) -> list[tuple[list[int], int] | None]:
    """Sum rows on all members, and check that, while `damage` may change parts that they make.

    Return by rank the members that were wrong, and the number of questions; None: no verdict.
    """
    layouts, leaves = lay_out(range(size), size), of_ones(size, 100)
    take_in = RowsSum._take_in

    def take_in_wrongly(self: RowsSum, arrived: list[tuple[Message, list[RowPiece]]]) -> None:
        before = len(self.made)
        take_in(self, arrived)
        for made in self.made[before:]:
            damage(self._layout.rank, self._is_repeated, made)

    patch.setattr(RowsSum, "_take_in", take_in_wrongly)
    sums, transports = summed(layouts, leaves)
    for transport in transports:
        transport.peers = range(size)  # disputed sums need all
    found: list[tuple[list[int], int] | None] = [None] * size

    def check(rank: int) -> None:
        trial, asked = SumTrial(7, range(size), size), 0
        runs = RowRuns(sums[rank], layouts[rank])
        while trial.question is not None:
            if trial.right:
                runs.put_right(trial.right)
            rows = runs.answer(trial.question, transports[rank])
            trial.hear(tuple(tuple(row) for row in rows))
            asked += 1
        if not trial.is_undecided:
            found[rank] = list(trial.wrong), asked

    assert together(*[lambda r=r: check(r) for r in range(size)]) == []
    (expected,) = define_sum(layouts, leaves)
    if None not in found:
        assert all(each.tables[0].result.equals(expected) for each in sums)
    return found


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_sum_that_is_right_is_made_twice_and_compared_once(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert check_sums(size, lambda *_: None, monkeypatch) == [([], 1)] * size


@pytest.mark.parametrize("size", [2, 3, 5, 8])
def test_a_wrong_sum_is_put_right_and_its_maker_found(
    size: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    def damage(rank: int, is_repeated: bool, made: list[RowPiece]) -> None:
        if rank == 1 and not is_repeated:
            made[0].rows.values.add_(1)

    assert check_sums(size, damage, monkeypatch) == [([1], 4)] * size


# ---------------------------------------------------------------- messages


@pytest.mark.parametrize("size", [2, 8, 16])
def test_a_member_sends_few_messages_to_few_members(size: int) -> None:
    levels = size.bit_length() - 1
    layouts = lay_out(range(size), size)
    _, transports = summed(layouts, of_ones(size, 4000))
    of_sum = 4000 * (8 + 4 * WIDTH)
    for transport in transports:
        assert len({peer for peer, _ in transport.sent}) == levels
        assert len(transport.sent) == 6 * levels
        assert transport.sent_bytes < 2.1 * of_sum


def test_rows_of_one_task_alone_are_sent_little_more_than_once() -> None:
    size, rows, row_bytes = 8, 1000, 8 + 4 * WIDTH
    leaves = [
        [Rows(places=torch.arange(rows) + v * rows, values=torch.ones(rows, WIDTH))]
        for v in range(size)
    ]
    _, transports = summed(lay_out(range(size), size), leaves)
    down, up = (size - 1) * rows * row_bytes, 3 * rows / 2 * row_bytes
    assert max(each.sent_bytes for each in transports) < 1.1 * (down + up)


def test_low_row_numbers_burden_no_member_more_than_the_others() -> None:
    """All tasks use the first rows of a table, and each uses some other rows as well."""
    size = 8
    dice = torch.Generator().manual_seed(1)
    leaves = []
    for _ in range(size):
        rare = torch.randint(10**6, 10**9, (500,), generator=dice)
        places = torch.cat([torch.arange(2000), rare]).unique()
        leaves.append([Rows(places=places, values=torch.ones(len(places), WIDTH))])
    _, transports = summed(lay_out(range(size), size), leaves)
    sent = [each.sent_bytes for each in transports]
    assert max(sent) < 1.15 * min(sent)


def test_a_step_without_rows_exchanges_their_numbers_only() -> None:
    none = Rows(places=torch.empty(0, dtype=torch.int64), values=torch.empty(0, WIDTH))
    _, transports = summed(lay_out(range(8), 8), [[none] for _ in range(8)])
    assert [[size for _, size in each.sent] for each in transports] == [[16] * 6] * 8


# ---------------------------------------------------------------- keys


@given(st.lists(st.integers(-(1 << 63), (1 << 63) - 1), max_size=20))
def test_no_two_places_have_the_same_key(numbers: list[int]) -> None:
    places = torch.tensor(EXTREMES + numbers, dtype=torch.int64)
    assert torch.equal(unmix(mix(places)), places)
    assert len(mix(places).unique()) == len(places.unique())


@pytest.mark.parametrize("stride", [1, 3, 64, 46368, 1 << 20, 1 << 40])
def test_the_keys_of_any_regular_places_are_spread_evenly(stride: int) -> None:
    places = torch.arange(8000) * stride
    rows = Rows(places=places, values=torch.zeros(8000, 1))
    eighths = [(Fraction(i, 8), Fraction(i + 1, 8)) for i in range(8)]
    counts = [len(RowPiece.of(rows).cut(each).rows.places) for each in eighths]
    assert sum(counts) == 8000
    assert min(counts) > 850

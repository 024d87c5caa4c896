"""The machines of servers of tables, alone: which shards are where, and whom a reader asks."""

from __future__ import annotations

import pytest

from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.tables.core import reading
from holdfast.tables.core.holdings import (
    BARE,
    WINDOW,
    AdoptCopy,
    ApplyUpdate,
    BeginCopies,
    CopyArrived,
    CopyFailed,
    CopyOffered,
    DropShards,
    ForgetUpdate,
    Holdings,
    ShardsChosen,
    ShardsGivenUp,
    ShardStanding,
    UpdateArrived,
)
from holdfast.tables.core.placement import (
    SHARDS,
    choose_savers,
    find_holders,
    find_shards,
    lay_out,
)
from holdfast.tables.core.reading import (
    Ask,
    FindRight,
    Give,
    Lost,
    OrderCopy,
    OrderDrop,
    OrderLoad,
    OrderReset,
    RowReading,
    WaitAgain,
    can_begin_from,
    find_common,
)


def hold(*shards: int, window: int = WINDOW) -> Holdings:
    """Return the machine of a server whose shards have their first values."""
    holdings = Holdings(shards, window)
    for shard in shards:
        assert holdings.handle(CopyArrived(shard, 0)) == [AdoptCopy(shard)]
    return holdings


def test_shards_are_spread_evenly_and_stay_where_they_are() -> None:
    for servers in range(1, 9):
        holders = find_holders(servers, min(servers, 2))
        assert all(len(set(each)) == min(servers, 2) for each in holders)
        firsts = [each[0] for each in holders]
        assert max(map(firsts.count, range(servers))) <= SHARDS // servers + 2
        assert sorted({s for n in range(servers) for s in find_shards(n, holders)}) == list(
            range(SHARDS)
        )
    few, more = find_holders(4, 1), find_holders(5, 1)
    moved = sum(a != b for a, b in zip(few, more, strict=True))
    assert 0 < moved <= SHARDS // 2


def test_replicas_need_as_many_servers() -> None:
    with pytest.raises(InvariantError, match="3 replicas on 2 servers"):
        find_holders(2, 3)


def test_updates_are_applied_in_order_whenever_they_come() -> None:
    holdings = hold(3)
    assert not any(
        isinstance(e, ApplyUpdate) for e in holdings.handle(UpdateArrived(2, (3,), token=20))
    )
    found = holdings.handle(UpdateArrived(1, (3,), token=10))
    assert [(e.number, e.token) for e in found if isinstance(e, ApplyUpdate)] == [(1, 10), (2, 20)]
    assert holdings.judge(2, [3]).can_serve
    assert holdings.judge(0, [3]).can_serve
    assert holdings.judge(3, [3]).behind == ((3, 2),)
    assert holdings.judge(1, [4]).past == (4,)


def test_a_bare_shard_has_no_version_and_keeps_the_updates_that_come() -> None:
    holdings = Holdings([0])
    assert holdings.judge(0, [0]).behind == ((0, BARE),)
    for number in (0, 1):  # no update has the number 0
        assert holdings.handle(UpdateArrived(number, (0,), token=number)) == []
    assert holdings.handle(CopyOffered((0, 5), 0)) == [BeginCopies((0,))]
    assert holdings.judge(0, [0]).copying == (0,)
    applied = [ApplyUpdate(1, (0,), 1), ForgetUpdate(1)]
    assert holdings.handle(CopyArrived(0, 0)) == [AdoptCopy(0), ForgetUpdate(0), *applied]
    assert holdings.judge(0, [0]).can_serve


def test_first_values_replace_rows_from_which_they_cannot_be_read_any_more() -> None:
    holdings = hold(0, window=4)
    first = CopyArrived(0, 0, replaces=True)
    for number in range(1, 4):
        holdings.handle(UpdateArrived(number, (0,), token=number))
    assert holdings.handle(first) == []
    for number in range(4, 7):
        holdings.handle(UpdateArrived(number, (0,), token=number))
    assert holdings.judge(1, [0]).past == (0,)
    assert holdings.handle(first) == [AdoptCopy(0)]
    assert holdings.judge(0, [0]).can_serve


def test_a_copy_begins_if_the_server_lacks_it_and_none_is_on_its_way() -> None:
    holdings = hold(0, 1, 2, window=2)
    for number in range(1, 5):
        holdings.handle(UpdateArrived(number, (0, 1), token=number))
    assert holdings.handle(CopyOffered((0, 1), 4)) == []
    assert holdings.handle(CopyOffered((0, 1, 2), 1)) == [BeginCopies((2,))]
    assert holdings.handle(CopyOffered((0, 2), 1, replaces=True)) == [BeginCopies((0,))]
    assert holdings.handle(CopyOffered((0, 2), 1, replaces=True)) == []
    assert holdings.judge(4, [0]).can_serve, "its rows are there until the copy has come"
    holdings.handle(CopyFailed((0, 2)))
    assert holdings.handle(CopyOffered((0, 1, 2), 2, replaces=True)) == [BeginCopies((2,))]


def test_bare_shards_do_not_keep_the_old_values_of_others() -> None:
    holdings = Holdings([0, 1])
    holdings.handle(CopyArrived(0, 30))
    assert holdings.floor == 30


def test_damaged_shards_are_bare_and_take_what_has_waited_once_their_rows_come() -> None:
    holdings = hold(0, 1)
    holdings.handle(UpdateArrived(1, (0, 1), 1))
    holdings.handle(UpdateArrived(3, (0, 1), 3))
    assert holdings.handle(ShardsGivenUp((1, 5))) == [DropShards((1,))]
    assert [holdings.version(shard) for shard in (0, 1)] == [1, BARE]
    assert holdings.judge(1, [0, 1]) == ShardStanding(behind=((1, BARE),))
    holdings.handle(CopyArrived(1, 1))
    effects = holdings.handle(UpdateArrived(2, (0, 1), 5))
    assert ApplyUpdate(3, (0, 1), 3) in effects


def test_a_server_holds_other_shards_and_forgets_what_waited_for_the_former_ones() -> None:
    holdings = hold(0, 1)
    holdings.handle(UpdateArrived(1, (0, 1), 1))
    holdings.handle(UpdateArrived(3, (1,), 3))
    assert holdings.handle(ShardsChosen((0, 2))) == [ForgetUpdate(3)]
    assert holdings.judge(1, [0, 1, 2]) == ShardStanding(behind=((2, BARE),), past=(1,))
    assert holdings.handle(CopyArrived(2, 1)) == [AdoptCopy(2)]
    assert holdings.judge_span(0, 1, [0]).can_serve
    assert holdings.judge_span(0, 1, [2]) == ShardStanding(past=(2,))
    holdings.check()


def test_rows_are_on_their_former_servers_until_all_are_where_they_are_to_be() -> None:
    former, later = find_holders(3, 2), find_holders(4, 2)
    changing = lay_out(ServerLayout(number=1, count=3, goal=4), 2)
    for shard in range(SHARDS):
        assert changing[shard][:2] == former[shard]
        assert set(changing[shard]) == {*former[shard], *later[shard]}
    assert lay_out(ServerLayout(number=2, count=4, goal=4), 2) == later


def test_a_reader_asks_another_server_and_has_the_first_one_copy() -> None:
    read = RowReading(9, {0: (4, 7)}, kept_after=5)
    assert read.next() == [Ask(4, (0,))]
    assert read.record_refusal(4, (0,), ShardStanding(behind=((0, 2),))) == []
    assert read.next() == [Ask(7, (0,))]
    assert read.record_answer(7, (0,), {0: 1}) == [OrderCopy(4, 7, (0,), 9)]
    assert read.is_done


def test_a_reader_gives_what_it_keeps() -> None:
    read = RowReading(9, {0: (4, 7)}, kept_after=5)
    read.next()
    assert read.record_refusal(4, (0,), ShardStanding(behind=((0, 6),))) == [Give(4, 6, (0,))]
    assert read.next() == [Ask(4, (0,))]


def test_rows_are_used_once_all_servers_claim_the_same() -> None:
    read = RowReading(9, {0: (4, 7), 1: (7, 4)}, kept_after=5, replicas=2)
    assert read.next() == [Ask(4, (0,), (1,)), Ask(7, (1,), (0,))]
    read.record_answer(4, (0,), {0: 11, 1: 21})
    assert not read.is_done
    assert read.next() == []
    read.record_answer(7, (1,), {0: 11, 1: 22})
    assert read.next() == [FindRight(1, ((4, 21), (7, 22)))]
    assert read.next() == []
    orders = read.settle(1, {4: 21, 7: 22}, 21)
    assert orders == [OrderDrop(7, 1, 9, 22)]
    assert read.next() == [Ask(4, (1,))]
    assert read.record_answer(4, (1,), {1: 21}) == [OrderCopy(7, 4, (1,), 9)]
    assert read.is_done


def begin_dispute() -> RowReading:
    """Return a read whose servers 4 and 7 claim different rows of shard 0."""
    read = RowReading(9, {0: (4, 7)}, kept_after=5, replicas=2)
    read.next()
    read.record_answer(4, (0,), {0: 11})
    read.record_answer(7, (), {0: 12})
    assert read.next() == [FindRight(0, ((4, 11), (7, 12)))]
    return read


def test_a_server_that_has_dropped_its_rows_in_between_is_out_of_the_dispute() -> None:
    read = begin_dispute()
    assert read.settle(0, {7: 12}, 12) == []
    assert read.next() == [Ask(7, (0,))]
    read.record_answer(7, (0,), {0: 12})
    assert read.is_done


def test_a_server_that_has_right_rows_by_now_gives_them_again() -> None:
    read = begin_dispute()
    assert read.settle(0, {4: 12, 7: 12}, 12) == []
    assert read.next() == [Ask(4, (0,))]


def test_rows_are_lost_if_nobody_can_say_whose_are_right() -> None:
    read = begin_dispute()
    drops = [OrderDrop(4, 0, 9, 11), OrderDrop(7, 0, 9, 12)]
    assert read.settle(0, {4: 11, 7: 12}, None) == [*drops, Lost((0,))]


def test_a_server_that_falls_silent_is_not_waited_for() -> None:
    read = RowReading(9, {0: (4, 7)}, kept_after=5, replicas=2)
    read.next()
    read.record_answer(4, (0,), {0: 11})
    read.record_silence(7)
    assert read.is_done


def test_a_server_without_memory_has_no_rows_and_is_not_waited_for() -> None:
    read, waits = RowReading(9, {0: (4, 7)}, kept_after=5, replicas=2), 0
    while (found := read.next()) != [Lost((0,))]:
        if found == [WaitAgain()]:
            waits += 1
            read.try_again({0: (4, 7)})
        else:
            read.record_full(4)
            read.record_refusal(7, (0,), ShardStanding(behind=((0, BARE),)))
    assert waits == reading.DENIALS_MAX - 1
    read = RowReading(9, {0: (4, 7)}, kept_after=5, replicas=2)
    read.next()
    read.record_full(4)
    read.next()
    read.record_answer(7, (0,), {0: 11})
    assert read.is_done


@pytest.mark.parametrize(("kept_after", "stored"), [(0, None), (5, 5)])
def test_a_server_that_was_mended_in_vain_may_not_hold_the_shard_any_more(
    kept_after: int, stored: int | None
) -> None:
    read = RowReading(9, {0: (4,)}, kept_after, stored=stored)
    for _ in range(2):
        assert read.next() == [Ask(4, (0,))]
        read.record_refusal(4, (0,), ShardStanding(past=(0,)))
        assert isinstance(read.next()[0], OrderReset | OrderLoad)
        assert read.next() == [Ask(4, (0,))]
        read.record_refusal(4, (0,), ShardStanding(past=(0,)))
        assert read.next() == [WaitAgain()]
        read.try_again({0: (4,)})
    read.try_again({0: (7,)})
    assert read.next() == [Ask(7, (0,))]


def test_each_server_is_made_to_begin_again_in_turn() -> None:
    read = RowReading(0, {0: (4, 7)}, kept_after=0)
    mended = []
    for _ in range(3):
        for _ in range(2):
            (asked,) = read.next()
            assert isinstance(asked, Ask)
            read.record_refusal(asked.server, (0,), ShardStanding(past=(0,)))
        (order,) = read.next()
        assert isinstance(order, OrderReset)
        mended.append(order.server)
        assert read.next() == [Ask(order.server, (0,))]
        read.record_refusal(order.server, (0,), ShardStanding(past=(0,)))
        assert read.next() == [WaitAgain()]
        read.try_again({0: (4, 7)})
    assert mended == [4, 7, 4]


def test_a_claim_is_remembered_while_the_rows_are_asked_for_again() -> None:
    read = RowReading(9, {0: (4, 7)}, kept_after=5, replicas=2)
    read.next()
    read.record_answer(7, (), {0: 12})
    read.record_silence(4)
    assert read.next() == [Ask(7, (0,))]
    read.record_silence(7)
    assert read.next() == [WaitAgain()]
    read.try_again({0: (4, 7)})
    assert read.next() == [Ask(4, (0,))]
    read.record_answer(4, (0,), {0: 11})
    assert read.next() == [FindRight(0, ((4, 11), (7, 12)))]


def test_suspects_and_heirs_are_not_compared() -> None:
    read = RowReading(1, {0: (4, 7, 70)}, 0, suspects=[4], replicas=2)
    assert read.next() == [Ask(7, (0,))]
    read.record_answer(7, (0,), {0: 5})
    assert read.is_done


def test_a_dispute_begins_where_all_servers_agreed() -> None:
    assert can_begin_from({4: 1, 7: 1}, {4: 2, 7: 3})
    assert not can_begin_from({4: 1}, {4: 2, 7: 3})
    assert not can_begin_from({4: 1, 7: 2}, {4: 2, 7: 3})
    assert can_begin_from({4: 1}, {4: 2, 7: 2})
    assert can_begin_from({4: 1}, {4: 2})
    assert can_begin_from({4: 1, 7: 1}, {4: 2, 7: 3, 9: 3})
    assert not can_begin_from({7: 1, 9: 1}, {4: 2, 7: 3, 9: 3})
    assert not can_begin_from({}, {4: 2})


def test_servers_that_disagree_have_no_common_claim() -> None:
    assert find_common([5, 5, 5]) == 5
    assert find_common([5, 6, 5]) is None
    assert find_common([]) is None


def test_suspects_are_asked_last() -> None:
    assert RowReading(1, {0: (4, 7)}, 0, suspects=[4]).next() == [Ask(7, (0,))]


def test_rows_are_given_up_only_when_all_have_answered_again_and_again() -> None:
    read = RowReading(9, {0: (4,)}, kept_after=8)
    for _ in range(reading.DENIALS_MAX):
        assert read.next() == [Ask(4, (0,))]
        read.record_refusal(4, (0,), ShardStanding(past=(0,)))
        found = read.next()
        read.try_again({0: (4,)})
    assert found == [Lost((0,))]
    for _ in range(3 * reading.DENIALS_MAX):
        read = RowReading(9, {0: (4, 7)}, kept_after=8)
        read.next()
        read.record_refusal(4, (0,), ShardStanding(past=(0,)))
        read.next()
        read.record_silence(7)
        assert not any(isinstance(e, Lost) for e in read.next())


def test_bare_shards_get_their_first_values_if_every_update_is_kept() -> None:
    bare = ShardStanding(behind=((0, BARE), (1, 3)))
    read = RowReading(9, {0: (4, 7), 1: (4, 7)}, kept_after=0)
    read.next()
    assert read.record_refusal(4, (0, 1), bare) == [Give(4, 3, (1,)), OrderReset(4, (0,))]
    assert read.next() == [Ask(7, (0,)), Ask(4, (1,))]
    assert read.record_answer(7, (0,), {0: 1}) == []  # it is not copied as well
    read = RowReading(9, {0: (4, 7), 1: (4, 7)}, kept_after=1)
    read.next()
    assert read.record_refusal(4, (0, 1), bare) == [Give(4, 3, (1,))]
    read.next()
    assert read.record_answer(7, (0,), {0: 1}) == [OrderCopy(4, 7, (0,), 9)]


@pytest.mark.parametrize(("kept_after", "stored"), [(0, None), (5, 5), (8, None)])
def test_a_read_that_does_not_wait_gives_up_at_once(kept_after: int, stored: int | None) -> None:
    read = RowReading(9, {0: (4,), 1: (7,)}, kept_after, stored=stored, waits=False)
    read.next()
    read.record_answer(7, (1,), {1: 1})
    read.record_refusal(4, (0,), ShardStanding(past=(0,)))
    assert read.next() == [Lost((0,))]


def test_a_reader_knows_which_servers_have_the_rows() -> None:
    read = RowReading(9, {0: (4, 7), 1: (7,)}, kept_after=5, replicas=2)
    read.next()
    read.record_answer(7, (1,), {0: 5, 1: 6})
    assert read.find_sources() == {0: (7,), 1: (7,)}
    read.record_answer(4, (0,), {0: 5})
    assert read.find_sources() == {0: (4, 7), 1: (7,)}


def test_servers_that_have_the_rows_save_those_of_others() -> None:
    parts = {4: (0, 3), 7: (1, 2), 9: (5,)}
    every = dict.fromkeys(range(6), (4, 7, 9))
    assert choose_savers(parts, every) == [(4, (0, 3)), (7, (1, 2)), (9, (5,))]
    without = dict.fromkeys(range(6), (4, 9))
    assert choose_savers(parts, without) == [(4, (0, 3)), (9, ()), (9, (1, 2, 5))]
    assert choose_savers(parts, every | {1: (9, 70), 2: (70,)}) == [
        (4, (0, 3)),
        (7, (2,)),  # an heir has no share
        (9, (1, 5)),
    ]


def test_a_job_that_keeps_every_update_has_rows_made_again() -> None:
    read = RowReading(0, {0: (4,)}, kept_after=0)
    read.next()
    read.record_refusal(4, (0,), ShardStanding(past=(0,)))
    assert read.next() == [OrderReset(4, (0,))]

"""Servers of tables in the simulator: no seed breaks a rule, and planted bugs are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.core.servers import reading
from holdfast.core.servers.heirs import HeirProgress
from holdfast.core.servers.holdings import (
    AdoptCopy,
    ApplyUpdate,
    CopyArrived,
    ForgetUpdate,
    Holdings,
    HoldingsEffect,
    ResetAsked,
    ResetShards,
    ShardsChosen,
    ShardsDamaged,
    ShardStanding,
    UpdateArrived,
)
from holdfast.core.servers.placement import SHARDS, find_holders, find_shards, lay_out
from holdfast.core.servers.reading import Ask, Give, Lost, OrderCopy, OrderReset, RowReading
from holdfast.core.types import ServerLayout
from holdfast.sim.simulated_servers import SimServer
from holdfast.sim.table_servers import (
    TableSimOptions,
    TableSimReport,
    TableWorld,
    draw_options,
    find_failure,
)
from holdfast.sim.wrong_bits import Violation

SEEDS = range(60)
# Long enough to go back by more updates than can be undone.
LONG = TableSimOptions(servers=2, replicas=1, saves_every=25, steps=150, faults=20, quiet_at=25.0)
Patch = pytest.MonkeyPatch


def total(options: TableSimOptions, seeds: Sequence[int]) -> TableSimReport:
    reports = [TableWorld(options, seed).run() for seed in seeds]
    names = (
        "steps",
        "reads",
        "copies",
        "gives",
        "restarts",
        "damages",
        "faults",
        "moves",
        "scales",
    )
    return TableSimReport(**{name: sum(getattr(r, name) for r in reports) for name in names})


def test_no_seed_breaks_a_rule() -> None:
    assert [seed for seed in SEEDS if find_failure(seed)] == []


def test_faults_have_consequences() -> None:
    found = total(TableSimOptions(), range(10))
    assert min(found.reads, found.copies, found.gives, found.faults) > 50
    assert found.damages > 10


def test_one_server_may_be_lost_without_a_step() -> None:
    options = TableSimOptions(servers=3, replicas=2, faults=1)
    assert total(options, range(40)).restarts == 0


def test_without_a_second_replica_the_job_begins_again() -> None:
    assert total(TableSimOptions(servers=2, replicas=1), range(10)).restarts > 0


def test_with_checkpoints_a_job_begins_again_from_the_newest() -> None:
    plain = total(TableSimOptions(servers=2, replicas=1, faults=8), range(20))
    saving = total(TableSimOptions(servers=2, replicas=1, faults=8, saves_every=7), range(20))
    assert plain.restarts > 0
    assert saving.restarts > 0
    assert saving.reads < plain.reads
    assert total(LONG, range(5)).restarts > 0


MOVING = TableSimOptions(servers=3, replicas=1, faults=0, moves=8, staleness=1)


def test_servers_move_and_no_row_is_lost_by_that() -> None:
    found = total(MOVING, range(30))
    assert found.moves > 100
    assert found.restarts == 0


def test_heirs_that_are_taken_too_early_are_noticed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        "holdfast.core.servers.heirs.HeirProgress.record_answer",
        lambda self, *said: plain(self, *said[:-1], ShardStanding()),
    )
    assert total(MOVING, range(30)).restarts > 0


plain = HeirProgress.record_answer
SCALING = TableSimOptions(servers=2, replicas=1, faults=0, moves=2, scales=6, staleness=1)


def test_the_number_of_servers_changes_and_no_row_is_lost_by_that() -> None:
    found = total(SCALING, range(30))
    assert found.scales > 40
    assert found.moves > 20
    assert found.restarts == 0


RESTLESS = replace(SCALING, servers=4, moves=0, scales=60, quiet_at=3.0)


def test_an_order_to_copy_that_comes_late_does_nothing() -> None:
    found = total(RESTLESS, range(40, 50))
    assert found.scales > 10
    assert found.restarts == 0


def keeps_progress(patch: Patch) -> None:
    """Let a server that had all rows of one layout count as if it had those of the next."""

    def change_layout(self: HeirProgress, layout: ServerLayout) -> None:
        self._layout = layout

    patch.setattr(HeirProgress, "change_layout", change_layout)


def forgets_former_holders(patch: Patch) -> None:
    """Let workers ask only the servers that are to hold the rows."""

    def lay_out(layout: ServerLayout, replicas: int) -> Any:
        return find_holders(layout.goal, replicas)

    patch.setattr("holdfast.sim.server_moves.lay_out", lay_out)
    patch.setattr("holdfast.core.servers.heirs.lay_out", lay_out)


def looks_at_the_newest_version_only(patch: Patch) -> None:
    """Let a copy count as whole although stale reads cannot use it yet."""
    patch.setattr(
        Holdings, "judge_span", lambda self, _, newest, shards: self.judge(newest, shards)
    )


@pytest.mark.parametrize(
    "plant", [keeps_progress, forgets_former_holders, looks_at_the_newest_version_only]
)
def test_rows_that_are_let_go_too_early_are_noticed(
    plant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    try:
        restarts = total(replace(SCALING, staleness=8), range(30)).restarts
    except Violation:
        return
    assert restarts > 0


def test_the_same_seed_comes_to_the_same() -> None:
    assert TableWorld(draw_options(3), 3).run() == TableWorld(draw_options(3), 3).run()


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--tables", "--seeds", "0:5"]) == 0
    assert "5 seeds of servers of tables, 0 failed" in capsys.readouterr().out


# ---------------------------------------------------------------- planted bugs


def applies_twice(patch: Patch) -> None:
    """Let a server apply an update again that it has had."""
    patch.setattr(Holdings, "_is_due", lambda self, s, n: self._versions[s] in (n - 1, n))


def leaves_updates_out(patch: Patch) -> None:
    """Let a server apply an update although an earlier one is missing."""
    patch.setattr(Holdings, "_is_due", lambda self, s, n: self._versions[s] < n)


def serves_what_it_has(patch: Patch) -> None:
    """Let a server answer a read as of a version that it has not reached."""
    patch.setattr(Holdings, "judge", lambda *_: ShardStanding())


def trusts_copies(patch: Patch) -> None:
    """Let a server count a copy as one update newer than it is."""
    plain = Holdings._adopt

    def adopt(self: Holdings, event: CopyArrived) -> list[HoldingsEffect]:
        return plain(self, replace(event, version=event.version + 1))

    patch.setattr(Holdings, "_adopt", adopt)


def keeps_later_rows(patch: Patch) -> None:
    """Let a server keep its rows when the job has gone back to a checkpoint."""
    plain = Holdings._adopt
    patch.setattr(
        Holdings, "_adopt", lambda self, event: plain(self, replace(event, replaces=False))
    )


def saves_unread_updates(patch: Patch) -> None:
    """Let a checkpoint have the rows as they are now, though the next step reads earlier ones."""
    patch.setattr(TableSimOptions, "rows_saved_at", lambda self, step: step)


def forgets_what_waits(patch: Patch) -> None:
    """Let a server drop updates that came early, as if they had been applied."""

    def keep(self: Holdings, number: int, left: list[UpdateArrived]) -> None:
        for each in left:
            for shard in each.shards:
                self._versions[shard] = number
        self._ahead.pop(number, None)

    patch.setattr(Holdings, "_keep", keep)


def resets_good_rows(patch: Patch) -> None:
    """Let a reset keep the version, so that the first values count as the newest."""
    plain = Holdings._reset

    def reset(self: Holdings, shards: tuple[int, ...]) -> list[HoldingsEffect]:
        versions = dict(self._versions)
        found = plain(self, shards)
        self._versions.update(versions)
        return found

    patch.setattr(Holdings, "_reset", reset)


def reads_without_a_look(patch: Patch) -> None:
    """Let a server send rows, and copies, that its memory has changed by itself."""
    patch.setattr(SimServer, "drop_damaged", lambda *_: None)


def keeps_what_is_damaged(patch: Patch) -> None:
    """Let a server go on with damaged shards if their first values are still known."""
    plain = Holdings._begin_again

    def begin_again(self: Holdings, shards: tuple[int, ...]) -> list[HoldingsEffect]:
        return plain(self, tuple(shard for shard in shards if self._floors[shard] > 0))

    patch.setattr(Holdings, "_begin_again", begin_again)


def gives_up_at_once(patch: Patch) -> None:
    """Let a reader give rows up as soon as nobody has answered."""
    patch.setattr(reading, "DENIALS_MAX", 0)


def never_gives_up(patch: Patch) -> None:
    """Let a reader wait for ever for rows that nobody has."""
    patch.setattr(reading, "DENIALS_MAX", 1 << 60)


def waits_for_the_first(patch: Patch) -> None:
    """Let a reader ask the first server of a shard only."""
    plain, again = RowReading.__init__, RowReading.try_again

    def init(self: RowReading, version: int, holders: Any, *rest: Any) -> None:
        plain(self, version, {s: h[:1] for s, h in holders.items()}, *rest)

    def try_again(self: RowReading, holders: Any) -> None:
        again(self, {s: h[:1] for s, h in holders.items()})

    patch.setattr(RowReading, "__init__", init)
    patch.setattr(RowReading, "try_again", try_again)


def asks_who_held_them_before(patch: Patch) -> None:
    """Let a reader that asks again ask heirs that there are no longer."""
    plain = RowReading.try_again

    def try_again(self: RowReading, _: Any) -> None:
        plain(self, {shard: [*self._shards[shard].tries] for shard in self.missing})

    patch.setattr(RowReading, "try_again", try_again)


def takes_new_shards_for_current(patch: Patch) -> None:
    """Let a server's new shards count as if they had had the updates of the others."""
    plain = Holdings._choose

    def choose(self: Holdings, shards: tuple[int, ...]) -> list[HoldingsEffect]:
        newest = max(self._versions.values(), default=0)
        known = dict(self._versions)
        found = plain(self, shards)
        for shard in shards:
            self._versions[shard] = self._floors[shard] = known.get(shard, newest)
        return found

    patch.setattr(Holdings, "_choose", choose)


def keeps_updates_of_foreign_shards(patch: Patch) -> None:
    """Let updates wait for shards that the server holds no more."""

    def choose(self: Holdings, shards: tuple[int, ...]) -> list[HoldingsEffect]:
        self._versions = {shard: self._versions.get(shard, 0) for shard in shards}
        self._floors = {shard: self._floors.get(shard, 0) for shard in shards}
        return []

    patch.setattr(Holdings, "_choose", choose)


def never_orders_copies(patch: Patch) -> None:
    """Let servers that are behind stay so."""
    patch.setattr(reading, "bring_up", lambda *_: [])
    patch.setattr("holdfast.sim.table_servers.bring_up", lambda *_: [])
    patch.setattr(RowReading, "record_answer", _answer_without_copies(RowReading.record_answer))


def _answer_without_copies(plain: Callable[..., Any]) -> Callable[..., Any]:
    def record_answer(self: RowReading, server: int, shards: Sequence[int]) -> list[Any]:
        return [e for e in plain(self, server, shards) if not isinstance(e, OrderCopy)]

    return record_answer


@pytest.mark.parametrize(
    ("plant", "options"),
    [
        (applies_twice, TableSimOptions()),
        (leaves_updates_out, TableSimOptions()),
        (serves_what_it_has, TableSimOptions()),
        (trusts_copies, TableSimOptions()),
        (keeps_later_rows, LONG),
        (saves_unread_updates, replace(LONG, staleness=8)),
        (forgets_what_waits, TableSimOptions()),
        (resets_good_rows, TableSimOptions(servers=2, replicas=1)),
        (reads_without_a_look, TableSimOptions()),
        (keeps_what_is_damaged, TableSimOptions()),
        (gives_up_at_once, TableSimOptions()),
        (waits_for_the_first, TableSimOptions()),
        (asks_who_held_them_before, TableSimOptions(servers=5, replicas=1, moves=8, scales=4)),
        (never_gives_up, TableSimOptions(servers=2, replicas=1)),
        (takes_new_shards_for_current, TableSimOptions(servers=5, replicas=2, scales=6)),
        (keeps_updates_of_foreign_shards, TableSimOptions(scales=6)),
    ],
)
def test_the_checkers_find(
    plant: Callable[[Patch], None], options: TableSimOptions, monkeypatch: Patch
) -> None:
    plant(monkeypatch)
    with pytest.raises(Exception, match=r"shard|no end|happen|update"):
        total(options, SEEDS)


def test_servers_that_are_never_copied_cost_steps(monkeypatch: Patch) -> None:
    options = TableSimOptions(servers=2, replicas=2, faults=8)
    sound = total(options, range(40)).restarts
    never_orders_copies(monkeypatch)
    assert total(options, range(40)).restarts > sound


# ---------------------------------------------------------------- the machines alone


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


def test_updates_are_applied_in_order_whenever_they_come() -> None:
    holdings = Holdings([3])
    assert not any(
        isinstance(e, ApplyUpdate) for e in holdings.handle(UpdateArrived(2, (3,), token=20))
    )
    found = holdings.handle(UpdateArrived(1, (3,), token=10))
    assert [(e.number, e.token) for e in found if isinstance(e, ApplyUpdate)] == [(1, 10), (2, 20)]
    assert holdings.judge(2, [3]).can_serve
    assert holdings.judge(0, [3]).can_serve
    assert holdings.judge(3, [3]).behind == ((3, 2),)
    assert holdings.judge(1, [4]).past == (4,)


def test_rows_that_can_still_be_read_are_not_reset() -> None:
    holdings = Holdings([0], window=4)
    for number in range(1, 4):
        holdings.handle(UpdateArrived(number, (0,), token=number))
    assert holdings.handle(ResetAsked((0,))) == []
    for number in range(4, 7):
        holdings.handle(UpdateArrived(number, (0,), token=number))
    assert holdings.judge(1, [0]).past == (0,)
    assert holdings.handle(ResetAsked((0,)))
    assert holdings.judge(0, [0]).can_serve


def test_damaged_shards_begin_again_and_take_what_has_waited() -> None:
    holdings = Holdings([0, 1])
    holdings.handle(UpdateArrived(1, (0, 1), 1))
    holdings.handle(UpdateArrived(3, (0, 1), 3))
    assert holdings.handle(ShardsDamaged((1, 5))) == [ResetShards((1,))]
    assert [holdings.version(shard) for shard in (0, 1)] == [1, 0]
    assert holdings.judge(1, [0, 1]) == ShardStanding(behind=((1, 0),))
    holdings.handle(UpdateArrived(1, (1,), 4))
    effects = holdings.handle(UpdateArrived(2, (0, 1), 5))
    assert ApplyUpdate(3, (0, 1), 3) in effects


def test_a_server_holds_other_shards_and_forgets_what_waited_for_the_former_ones() -> None:
    holdings = Holdings([0, 1])
    holdings.handle(UpdateArrived(1, (0, 1), 1))
    holdings.handle(UpdateArrived(3, (1,), 3))
    assert holdings.handle(ShardsChosen((0, 2))) == [ForgetUpdate(3)]
    assert holdings.judge(1, [0, 1, 2]) == ShardStanding(behind=((2, 0),), past=(1,))
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
    assert read.record_answer(7, (0,)) == [OrderCopy(4, 7, (0,), 9)]
    assert read.is_done


def test_a_reader_gives_what_it_keeps() -> None:
    read = RowReading(9, {0: (4, 7)}, kept_after=5)
    read.next()
    assert read.record_refusal(4, (0,), ShardStanding(behind=((0, 6),))) == [Give(4, 6, (0,))]
    assert read.next() == [Ask(4, (0,))]


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


def test_a_job_that_keeps_every_update_has_rows_made_again() -> None:
    read = RowReading(0, {0: (4,)}, kept_after=0)
    read.next()
    read.record_refusal(4, (0,), ShardStanding(past=(0,)))
    assert read.next() == [OrderReset(4, (0,))]

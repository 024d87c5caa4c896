"""Servers of tables in the simulator: no seed breaks a rule, and planted bugs are found."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import pytest

from holdfast.cli.main import main
from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.lab.sim.simulated_servers import SimServer
from holdfast.lab.sim.table_servers import (
    TableSimOptions,
    TableSimReport,
    TableWorld,
    draw_options,
    find_failure,
)
from holdfast.lab.sim.wrong_bits import Violation
from holdfast.tables.core import reading
from holdfast.tables.core.heirs import HeirProgress
from holdfast.tables.core.holdings import (
    BARE,
    CopyArrived,
    Holdings,
    HoldingsEffect,
    ShardStanding,
    UpdateArrived,
)
from holdfast.tables.core.placement import find_holders
from holdfast.tables.core.reading import OrderCopy, RowReading

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
        "disputes",
        "unseen",
    )
    return TableSimReport(**{name: sum(getattr(r, name) for r in reports) for name in names})


@pytest.mark.slow
def test_no_seed_breaks_a_rule() -> None:
    assert [seed for seed in SEEDS if find_failure(seed)] == []


@pytest.mark.slow
def test_faults_have_consequences() -> None:
    found = total(TableSimOptions(), range(10))
    assert min(found.reads, found.copies, found.gives, found.faults) > 50
    assert found.damages > 10


@pytest.mark.slow
def test_one_server_may_be_lost_without_a_step() -> None:
    options = TableSimOptions(servers=3, replicas=2, faults=1)
    assert total(options, range(40)).restarts == 0


@pytest.mark.slow
def test_without_a_second_replica_the_job_begins_again() -> None:
    assert total(TableSimOptions(servers=2, replicas=1), range(10)).restarts > 0


@pytest.mark.slow
def test_with_checkpoints_a_job_begins_again_from_the_newest() -> None:
    plain = total(TableSimOptions(servers=2, replicas=1, faults=8), range(20))
    saving = total(TableSimOptions(servers=2, replicas=1, faults=8, saves_every=7), range(20))
    assert plain.restarts > 0
    assert saving.restarts > 0
    assert saving.reads < plain.reads
    assert total(LONG, range(5)).restarts > 0


MOVING = TableSimOptions(servers=3, replicas=1, faults=0, moves=8, staleness=1)


@pytest.mark.slow
def test_servers_move_and_no_row_is_lost_by_that() -> None:
    found = total(MOVING, range(30))
    assert found.moves > 100
    assert found.restarts == 0


@pytest.mark.slow
def test_heirs_that_are_taken_too_early_are_noticed(monkeypatch: Patch) -> None:
    monkeypatch.setattr(
        "holdfast.tables.core.heirs.HeirProgress.record_answer",
        lambda self, group, told: plain(self, group, replace(told, standing=ShardStanding())),
    )
    assert total(MOVING, range(30)).restarts > 0


plain = HeirProgress.record_answer
SCALING = TableSimOptions(servers=2, replicas=1, faults=0, moves=2, scales=6, staleness=1)


@pytest.mark.slow
def test_the_number_of_servers_changes_and_no_row_is_lost_by_that() -> None:
    found = total(SCALING, range(30))
    assert found.scales > 40
    assert found.moves > 20
    assert found.restarts == 0


RESTLESS = replace(SCALING, servers=4, moves=0, scales=60, quiet_at=3.0)


@pytest.mark.slow
def test_an_order_to_copy_that_comes_late_does_nothing() -> None:
    found = total(RESTLESS, range(40, 55))
    assert found.scales > 10
    assert found.restarts == 0


def keeps_progress(patch: Patch) -> None:
    """Make a server that had all rows of one layout count as having those of the next layout."""

    def change_layout(self: HeirProgress, layout: ServerLayout) -> None:
        self._layout = layout

    patch.setattr(HeirProgress, "change_layout", change_layout)


def forgets_former_holders(patch: Patch) -> None:
    """Make workers ask only the servers that will hold the rows."""

    def lay_out(layout: ServerLayout, replicas: int) -> Any:
        return find_holders(layout.goal, replicas)

    patch.setattr("holdfast.lab.sim.server_moves.lay_out", lay_out)
    patch.setattr("holdfast.tables.core.heirs.lay_out", lay_out)


def looks_at_the_newest_version_only(patch: Patch) -> None:
    """Count a copy as whole although stale reads cannot use it yet."""
    patch.setattr(
        Holdings, "judge_span", lambda self, _, newest, shards: self.judge(newest, shards)
    )


@pytest.mark.slow
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


# A worker does not compare the rows of a server that was silent, so here all messages are quick.
ERRING = TableSimOptions(faults=0, mistakes=20)
PATIENT = "holdfast.lab.sim.simulated_servers.PATIENCE_S"


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        ERRING,
        replace(ERRING, servers=4, replicas=3),
        replace(ERRING, staleness=8, steps=120),
    ],
)
def test_wrong_rows_of_one_server_are_never_used(
    options: TableSimOptions, monkeypatch: Patch
) -> None:
    monkeypatch.setattr(PATIENT, 1.0)
    found = total(options, range(20))
    assert found.disputes > 50
    assert (found.unseen, found.restarts) == (0, 0)
    assert found.steps == 20 * options.steps


@pytest.mark.slow
def test_a_job_goes_back_if_wrong_rows_are_noticed_late(monkeypatch: Patch) -> None:
    monkeypatch.setattr(PATIENT, 1.0)
    found = total(replace(ERRING, saves_every=7, workers=1), range(27, 47))
    assert found.disputes > 50
    assert found.unseen == 0
    assert found.restarts > 0
    assert found.steps == 20 * ERRING.steps


@pytest.mark.slow
def test_wrong_rows_are_noticed_beside_other_faults() -> None:
    options = replace(ERRING, mistakes=40, faults=12, moves=4, scales=3, servers=4, replicas=3)
    assert total(options, range(15)).disputes > 50


def compares_nothing(patch: Patch) -> None:
    """Make a reader accept the rows of one server without a comparison."""
    patch.setattr(RowReading, "_begin", _only_first(RowReading._begin))


def _only_first(plain: Callable[..., Any]) -> Callable[..., Any]:
    def begin(self: RowReading, servers: Sequence[int]) -> Any:
        return replace(plain(self, servers), compared=())

    return begin


def believes_the_first(patch: Patch) -> None:
    """Make a reader believe the server that has sent the rows."""
    plain = RowReading.settle

    def settle(self: RowReading, shard: int, claims: Any, _: int | None) -> list[Any]:
        each = self._shards[shard]
        right = None if each.served_by is None else each.claims[each.served_by]
        return plain(self, shard, claims, right)

    patch.setattr(RowReading, "settle", settle)


def uses_what_has_come(patch: Patch) -> None:
    """Make a reader use wrong rows that it has, although another server turns out to be right."""
    plain = RowReading.settle

    def settle(self: RowReading, shard: int, *said: Any) -> list[Any]:
        each, served_by = self._shards[shard], self._shards[shard].served_by
        found = plain(self, shard, *said)
        each.served_by = served_by
        return found

    patch.setattr(RowReading, "settle", settle)


def drops_nothing(patch: Patch) -> None:
    """Make a server keep its wrong rows."""
    patch.setattr(SimServer, "drop_wrong", lambda *_: None)


@pytest.mark.parametrize(
    "plant",
    [
        compares_nothing,
        believes_the_first,
        uses_what_has_come,
        pytest.param(drops_nothing, marks=pytest.mark.slow),
    ],
)
def test_errors_in_dealing_with_wrong_rows_are_noticed(
    plant: Callable[[Patch], None], monkeypatch: Patch
) -> None:
    monkeypatch.setattr(PATIENT, 1.0)
    plant(monkeypatch)
    try:
        found = total(ERRING, range(15))
    except Violation:
        return
    assert found.unseen or found.restarts or found.disputes > 2000


def test_the_same_seed_comes_to_the_same() -> None:
    assert TableWorld(draw_options(3), 3).run() == TableWorld(draw_options(3), 3).run()


def test_the_command_says_what_it_found(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sim", "--tables", "--seeds", "0:5"]) == 0
    assert "5 seeds of servers of tables, 0 failed" in capsys.readouterr().out


# ---------------------------------------------------------------- planted bugs


def applies_twice(patch: Patch) -> None:
    """Make a server apply an update that it has applied before."""
    patch.setattr(Holdings, "_is_due", lambda self, s, n: self._versions[s] in (n - 1, n))


def leaves_updates_out(patch: Patch) -> None:
    """Make a server apply an update although an earlier one is missing."""
    patch.setattr(Holdings, "_is_due", lambda self, s, n: self._versions[s] < n)


def serves_what_it_has(patch: Patch) -> None:
    """Make a server answer a read for a version that it has not reached."""
    patch.setattr(Holdings, "judge", lambda *_: ShardStanding())


def trusts_copies(patch: Patch) -> None:
    """Make a server count a copy as one update newer than it is."""
    plain = Holdings._adopt

    def adopt(self: Holdings, event: CopyArrived) -> list[HoldingsEffect]:
        return plain(self, replace(event, version=event.version + 1))

    patch.setattr(Holdings, "_adopt", adopt)


def keeps_later_rows(patch: Patch) -> None:
    """Make a server keep its rows when the job has gone back to a checkpoint."""
    plain = Holdings._begin_copies
    patch.setattr(
        Holdings, "_begin_copies", lambda self, event: plain(self, replace(event, replaces=False))
    )


def saves_unread_updates(patch: Patch) -> None:
    """Save the present rows in a checkpoint, although the next step reads earlier ones."""
    patch.setattr(TableSimOptions, "rows_saved_at", lambda self, step: step)


def forgets_what_waits(patch: Patch) -> None:
    """Make a server drop updates that came early, as if it had applied them."""

    def keep(self: Holdings, number: int, left: list[UpdateArrived]) -> None:
        for each in left:
            for shard in each.shards:
                self._versions[shard] = number
        self._ahead.pop(number, None)

    patch.setattr(Holdings, "_keep", keep)


def takes_first_values_for_the_newest(patch: Patch) -> None:
    """Count first values as if they had the updates of the server's other shards."""
    plain = Holdings._adopt

    def adopt(self: Holdings, event: CopyArrived) -> list[HoldingsEffect]:
        found = plain(self, event)
        if event.version == 0 and event.shard in self._versions:
            self._versions[event.shard] = max(self._versions.values())
        return found

    patch.setattr(Holdings, "_adopt", adopt)


def takes_bare_shards_for_first_values(patch: Patch) -> None:
    """Make a server apply updates to rows that have not come yet."""
    patch.setattr(Holdings, "_is_due", lambda self, s, n: max(self._versions[s], 0) == n - 1)


def reads_without_a_look(patch: Patch) -> None:
    """Make a server send damaged rows and copies without a check of its memory."""
    patch.setattr(SimServer, "drop_damaged", lambda *_: None)


def keeps_what_is_damaged(patch: Patch) -> None:
    """Make a server continue with damaged shards if their first values are still known."""
    plain = Holdings._drop

    def drop(self: Holdings, shards: tuple[int, ...]) -> list[HoldingsEffect]:
        return plain(self, tuple(shard for shard in shards if self._floors[shard] > 0))

    patch.setattr(Holdings, "_drop", drop)


def keeps_what_is_replaced(patch: Patch) -> None:
    """Make a server keep its rows while a copy is written over them."""
    plain = Holdings._drop

    def drop(self: Holdings, shards: tuple[int, ...]) -> list[HoldingsEffect]:
        return plain(self, tuple(shard for shard in shards if shard not in self._copying))

    patch.setattr(Holdings, "_drop", drop)


def forgets_that_a_copy_comes(patch: Patch) -> None:
    """Make readers give up a shard as lost while its copy is being written."""
    plain = Holdings._drop

    def drop(self: Holdings, shards: tuple[int, ...]) -> list[HoldingsEffect]:
        self._copying -= set(shards)
        return plain(self, shards)

    patch.setattr(Holdings, "_drop", drop)


def gives_up_at_once(patch: Patch) -> None:
    """Make a reader give rows up as soon as no server has answered."""
    patch.setattr(reading, "DENIALS_MAX", 0)


def never_gives_up(patch: Patch) -> None:
    """Make a reader wait for ever for rows that no server has."""
    patch.setattr(reading, "DENIALS_MAX", 1 << 60)


def waits_for_the_first(patch: Patch) -> None:
    """Make a reader ask only the first server of a shard."""
    plain, again = RowReading.__init__, RowReading.try_again

    def init(self: RowReading, version: int, holders: Any, *rest: Any, **more: Any) -> None:
        plain(self, version, {s: h[:1] for s, h in holders.items()}, *rest, **more)

    def try_again(self: RowReading, holders: Any) -> None:
        again(self, {s: h[:1] for s, h in holders.items()})

    patch.setattr(RowReading, "__init__", init)
    patch.setattr(RowReading, "try_again", try_again)


def asks_who_held_them_before(patch: Patch) -> None:
    """Make a reader that asks again ask heirs that no longer exist."""
    plain = RowReading.try_again

    def try_again(self: RowReading, _: Any) -> None:
        plain(self, {shard: [*self._shards[shard].tries] for shard in self.missing})

    patch.setattr(RowReading, "try_again", try_again)


def takes_new_shards_for_current(patch: Patch) -> None:
    """Count a server's new shards as if they had the updates of its other shards."""
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
    """Make updates wait for shards that the server no longer holds."""

    def choose(self: Holdings, shards: tuple[int, ...]) -> list[HoldingsEffect]:
        self._versions = {shard: self._versions.get(shard, BARE) for shard in shards}
        self._floors = {shard: self._floors.get(shard, BARE) for shard in shards}
        return []

    patch.setattr(Holdings, "_choose", choose)


def never_orders_copies(patch: Patch) -> None:
    """Never order copies, so that servers that lag behind never catch up."""
    patch.setattr(reading, "bring_up", lambda *_: [])
    patch.setattr("holdfast.lab.sim.table_servers.bring_up", lambda *_: [])
    patch.setattr(RowReading, "record_answer", _answer_without_copies(RowReading.record_answer))


def _answer_without_copies(plain: Callable[..., Any]) -> Callable[..., Any]:
    def record_answer(self: RowReading, *said: Any) -> list[Any]:
        return [e for e in plain(self, *said) if not isinstance(e, OrderCopy)]

    return record_answer


@pytest.mark.parametrize(
    ("plant", "options"),
    [
        (applies_twice, TableSimOptions()),
        (leaves_updates_out, TableSimOptions()),
        (serves_what_it_has, TableSimOptions()),
        pytest.param(trusts_copies, TableSimOptions(), marks=pytest.mark.slow),
        pytest.param(keeps_later_rows, LONG, marks=pytest.mark.slow),
        (saves_unread_updates, replace(LONG, staleness=8)),
        (forgets_what_waits, TableSimOptions()),
        (takes_first_values_for_the_newest, TableSimOptions(servers=2, replicas=1)),
        (takes_bare_shards_for_first_values, TableSimOptions()),
        (reads_without_a_look, TableSimOptions()),
        (keeps_what_is_damaged, TableSimOptions()),
        (keeps_what_is_replaced, TableSimOptions()),
        pytest.param(forgets_that_a_copy_comes, TableSimOptions(), marks=pytest.mark.slow),
        (gives_up_at_once, TableSimOptions(servers=5, replicas=1, workers=6, faults=40)),
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


@pytest.mark.slow
def test_servers_that_are_never_copied_cost_steps(monkeypatch: Patch) -> None:
    # The faults leave time for copies in between.
    options = TableSimOptions(servers=2, replicas=2, faults=12, steps=300, quiet_at=40.0)
    sound = total(options, range(15)).restarts
    never_orders_copies(monkeypatch)
    assert total(options, range(15)).restarts > 2 * sound

"""Servers that compute wrongly: their rows are noticed before a worker uses them."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import msgspec
import pytest
import torch
from test_keyed_tables import described, updates_of
from test_row_servers import (
    RULES,
    Servers,
    close_servers,
    everything,
    expected,
    fill,
    group,
    update,
)

from holdfast.engine.core.errors import UserError
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.files import FileStorage
from holdfast.tables import Adagrad, RowOptimizer, server_connection
from holdfast.tables import server_wire as wire
from holdfast.tables.core.holdings import BARE, CopyArrived
from holdfast.tables.core.placement import SHARDS, find_holders, share_out
from holdfast.tables.keyed_rows import KeyedTable
from holdfast.tables.row_client import KEPT, RowClient
from holdfast.tables.row_reader import RowRead, RowReader
from holdfast.tables.server_connection import ServerConnection
from holdfast.tables.server_group import ServerGroup, fill_shard
from holdfast.tables.server_rows import RowBlock, RowUpdate
from holdfast.tables.table_shape import FREQUENCY, TableShape
from support import until

ALL = tuple(range(SHARDS))
KEYED = {"capacity": 32, "admit_after": 2, "evict": FREQUENCY}
__all__ = ["close_servers"]  # a fixture


@pytest.fixture(autouse=True)
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Count no server as silent: the rows of the other servers would be used without it."""
    monkeypatch.setattr(server_connection, "PATIENCE_S", 20.0)


class WrongRule:
    """Updates rows as a rule does, but flips a bit in each of some calls.

    `calls`: which ones, counted from 1. `slot`: not of a row, but of the first slot.
    """

    def __init__(self, rule: RowOptimizer, calls: range, slot: bool = False) -> None:
        self._rule, self._calls, self._slot, self._count = rule, calls, slot, 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._rule, name)

    def update(self, rows: torch.Tensor, slots: Any, *rest: Any) -> None:
        self._rule.update(rows, slots, *rest)
        self._err(next(iter(slots.values())) if self._slot else rows, 0)

    def update_at(
        self, places: torch.Tensor, rows: torch.Tensor, slots: Any, *rest: Any, **more: Any
    ) -> None:
        self._rule.update_at(places, rows, slots, *rest, **more)
        if len(places):
            self._err(rows, int(places[0]))

    def _err(self, array: torch.Tensor, row: int) -> None:
        self._count += 1
        if self._count in self._calls and len(array):
            array.view(torch.int32)[row, 0] ^= 1


def begin(client: RowClient) -> None:
    """Make all servers give the rows their first values."""
    name, ask = client._group.name, client.reader._referee._ask
    for server in client.book.list_servers():
        ServerConnection(client.book, server, client._group).order(wire.ResetRows(name, ALL))

    def is_filled(shard: int, server: int) -> bool:
        answer = ask(server, shard, 0)
        return answer is not None and bool(answer.fingerprints)

    for shard, servers in client.book.find_holders(ALL).items():
        for server in servers:
            until(partial(is_filled, shard, server), "the rows")


def spoil(servers: Servers, number: int, calls: range, slot: bool = False) -> None:
    """Make one server compute wrongly in some updates."""
    (found,) = servers.servers[number]._groups.values()
    for _, block in found.tables._blocks:
        if isinstance(block, RowBlock):
            block.rule = WrongRule(block.rule, calls, slot)  # type: ignore[assignment]
        else:
            (table,) = block.tables
            table._rule = WrongRule(table._rule, calls)


def train(client: RowClient, steps: int) -> None:
    """Send some updates, and read all rows after each of them."""
    for step in range(1, steps + 1):
        client.push(step, update(step, 1))
        everything(client, step, 1)


def wrong_lines(servers: Servers) -> list[str]:
    return [line for line in servers.log if "wrongly" in line or "whose" in line]


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize(("count", "replicas"), [(2, 2), (3, 3)])
@pytest.mark.parametrize("slot", [False, True])
def test_wrong_rows_are_never_read(
    rule: RowOptimizer, count: int, replicas: int, slot: bool
) -> None:
    servers = Servers(count, replicas)
    client = servers.client(group(rule, "items"))
    begin(client)
    spoil(servers, 1, range(4, 5), slot)
    for step in range(1, 24):
        client.push(step, update(step, 1))
        assert torch.equal(everything(client, step, 1)[0], expected(rule, step)[0])
    lines = wrong_lines(servers)
    assert len(lines) == 1
    words = r"server 1 has computed rows of items wrongly \(seen after \d+ updates, shards \d+\): "
    assert re.match(words, lines[0])
    copied = re.compile(r"shards \[\d+\] of items were copied from .+")
    until(lambda: any(map(copied.fullmatch, servers.log)), "the copy")


@pytest.mark.parametrize("number", [0, 1])
def test_a_server_that_errs_again_and_again_costs_no_bit(number: int) -> None:
    servers = Servers(2, 2)
    client = servers.client(group(RULES[1], "items", "users"))
    begin(client)
    spoil(servers, number, range(1, 1000))
    for step in range(1, 20):
        client.push(step, update(step, 2))
        assert torch.equal(everything(client, step, 2)[0], expected(RULES[1], step)[0])
    assert len(wrong_lines(servers)) > 5
    assert all(line.startswith(f"server {number} has") for line in wrong_lines(servers))


@pytest.mark.parametrize("number", [0, 1])
def test_wrong_rows_of_keys_are_never_read(number: int) -> None:
    rule, steps = Adagrad(lr=0.1), 30
    alone = KeyedTable(described(rule, **KEYED).tables[0], range(SHARDS), rule)
    servers = Servers(2, 2)
    client = servers.client(described(rule, **KEYED))
    begin(client)
    spoil(servers, number, range(5, 1000, 7))
    every = torch.arange(60) * 977 - 10_000
    for step, given in enumerate(updates_of(steps), start=1):
        alone.update(given.keys[0], given.grads[0], 0.1, step, step)
        client.push(step, given)
        assert torch.equal(client.read(step, [every])[0], alone.read(every, step))
    assert wrong_lines(servers)


def test_rows_that_are_read_late_are_compared_as_they_were() -> None:
    servers = Servers(2, 2)
    described = msgspec.structs.replace(group(RULES[1], "items"), staleness=5)
    client = RowClient(described, servers.access(5))
    begin(client)
    spoil(servers, 1, range(9, 10))
    for step in range(1, 24):
        client.push(step, update(step, 1))
        read = max(step - 5, 0)
        assert torch.equal(everything(client, read, 1)[0], expected(RULES[1], read)[0])
    assert len(wrong_lines(servers)) == 1


def test_without_a_second_replica_nothing_is_compared() -> None:
    servers = Servers(2, 1)
    client = servers.client(group(RULES[1], "items"))
    begin(client)
    spoil(servers, 1, range(4, 5))
    for step in range(1, 6):
        client.push(step, update(step, 1))
        everything(client, step, 1)
    assert wrong_lines(servers) == []


def test_rows_are_given_up_if_nobody_can_say_whose_are_right() -> None:
    servers = Servers(2, 2)
    client = servers.client(group(RULES[1], "items"))
    begin(client)
    train(client, KEPT + 2)
    (held,) = servers.servers[1]._groups.values()
    key = torch.tensor([4])
    part = RowUpdate(keys=[key], grads=[torch.ones(1, 5)], steps=[1], rates=[0.1])
    held.tables.apply(0, (4,), part)  # no record shows that it was applied
    with pytest.raises(UserError, match=r"rows of items are lost: .* shards 4 "):
        everything(client, KEPT + 2, 1)
    (line,) = wrong_lines(servers)
    assert line.startswith("server 0 and server 1 have different rows of items")
    assert "shards 4)" in line


def test_wrong_rows_are_not_saved(tmp_path: Path) -> None:
    rule, steps = RULES[1], 6
    described = group(rule, "items")
    servers = Servers(2, 2, tmp_path)
    client = servers.client(described)
    begin(client)
    spoil(servers, 0, range(steps, steps + 1))
    for step in range(1, steps + 1):
        client.push(step, update(step, 1))
        everything(client, step - 1, 1)
    store = Checkpoints(FileStorage(tmp_path))
    client.save(steps, 40, "token", 1, share_out(find_holders(2, 2)))
    first = store.begin(40, "token", 0)
    first.commit([first.write([], 0), *first.gather(3, 30.0)], {})
    assert len(wrong_lines(servers)) == 1
    other = Servers(1, 1, tmp_path).client(described)
    other.begin_from(steps, 40)
    assert torch.equal(everything(other, steps, 1)[0], expected(rule, steps)[0])


def test_rows_that_cannot_be_compared_are_not_saved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.tables.row_client.SAVE_TRIES", 2)
    servers = Servers(1, 1, tmp_path)
    client = servers.client(group(RULES[1], "items"))
    begin(client)
    client.save(KEPT + 9, 40, "token", 1, {0: ALL})
    line = "rows of items are not saved at step 40: no server has them"
    until(lambda: line in servers.log, "the line")


def test_a_copy_that_has_changed_on_its_way_is_dropped(monkeypatch: pytest.MonkeyPatch) -> None:
    servers = Servers(2, 2)
    client = servers.client(group(RULES[1], "items"))
    begin(client)
    train(client, KEPT + 2)
    flips = [1]

    def adopt(group: ServerGroup, arrived: CopyArrived, arrays: Any, *rest: Any) -> None:
        if flips:
            flips.pop()
            arrays[0][0].view(torch.int32)[0, 0] ^= 1
        adopt_soundly(group, arrived, arrays, *rest)

    adopt_soundly = ServerGroup.adopt
    monkeypatch.setattr(ServerGroup, "adopt", adopt)
    held = servers.servers[1]._groups["items"]
    held.drop_wrong(0, KEPT + 2, *held._take_fingerprints(KEPT + 2, [0]))
    for step in range(KEPT + 3, KEPT + 20):
        client.push(step, update(step, 1))
        assert torch.equal(everything(client, step, 1)[0], expected(RULES[1], step)[0])
    assert flips == []
    until(lambda: held.judge(KEPT + 19, [0]).can_serve, "another copy")
    assert any("memory with rows of items has changed" in line for line in servers.log)
    assert wrong_lines(servers) == []


def test_an_order_to_drop_wrong_rows_that_comes_late_does_nothing() -> None:
    found = make(NUMBERED, numbered_updates(3))
    (right,) = found._take_fingerprints(3, [5])
    for shard, version, claim in ((5, 3, right + 1), (5, 2, right), (5, 4, right), (99, 3, right)):
        found.drop_wrong(shard, version, claim)
    assert found.judge(3, ALL).can_serve
    found.drop_wrong(5, 3, right)
    assert found.judge(3, ALL).behind == ((5, BARE),)


# ---------------------------------------------------------------- fingerprints


NUMBERED = group(RULES[3], "items", "users")
OF_KEYS = described(Adagrad(lr=0.1), **KEYED)


def numbered_updates(steps: int) -> list[RowUpdate]:
    return [update(step, 2) for step in range(1, steps + 1)]


def make(described: wire.TableGroup, updates: list[RowUpdate]) -> ServerGroup:
    found = fill(ServerGroup(described, ALL))
    for number, each in enumerate(updates, start=1):
        assert found.update(number, ALL, each).can_serve
    return found


@pytest.mark.parametrize(
    ("described", "updates"),
    [pytest.param(NUMBERED, numbered_updates, marks=pytest.mark.slow), (OF_KEYS, updates_of)],
)
def test_fingerprints_follow_from_the_updates_alone(
    described: wire.TableGroup, updates: Callable[[int], list[RowUpdate]]
) -> None:
    given = updates(12)
    all_prints = [make(described, given[:n])._take_fingerprints(n, ALL) for n in range(13)]
    assert len(set(all_prints)) == 13
    found = make(described, given)
    assert [found._take_fingerprints(n, ALL) for n in range(13)] == all_prints
    # A shard that has come from elsewhere, and a shard that was dropped and reaches it again.
    found.drop_wrong(3, 12, all_prints[12][3])
    other = make(described, given[:10])
    copy = other.copy(5, 8)
    assert copy.fingerprint == all_prints[8][5]
    arrays = other.tables.make_room(5)
    flat = [array for table in arrays for array in table]
    for mine, theirs in zip(flat, copy.arrays, strict=True):
        mine.copy_(theirs)
    found.hold([s for s in ALL if s != 5], 1)
    found.hold(ALL, 2)
    found.adopt(CopyArrived(5, 8), arrays, copy.fingerprint)
    assert found._take_fingerprints(8, [5]) == (all_prints[8][5],)
    fill_shard(found, 3)
    for number, each in enumerate(given, start=1):
        found.update(number, (3, 5), pick(each, described.tables, (3, 5)))
    assert found.judge(12, ALL).can_serve
    assert found._take_fingerprints(12, ALL) == all_prints[12]


def pick(given: RowUpdate, tables: tuple[TableShape, ...], shards: tuple[int, ...]) -> RowUpdate:
    """Return the part of an update in some shards."""
    inside = [t.are_in(shards, keys) for t, keys in zip(tables, given.keys, strict=True)]
    return RowUpdate(
        keys=[keys[mask] for keys, mask in zip(given.keys, inside, strict=True)],
        grads=[grads[mask] for grads, mask in zip(given.grads, inside, strict=True)],
        steps=given.steps,
        rates=given.rates,
    )


@pytest.mark.parametrize("described", [NUMBERED, OF_KEYS])
def test_any_changed_number_changes_the_fingerprint(described: wire.TableGroup) -> None:
    updates = numbered_updates(3) if described is NUMBERED else updates_of(3)
    wanted = make(described, updates)._take_fingerprints(3, ALL)
    for table in range(len(described.tables)):
        for array in range(len(make(described, updates).tables.all[table].array_names)):
            found = make(described, updates)
            parts = list(found.tables.all[table].parts(7))
            parts[array].view(torch.int32)[0, 0] ^= 1
            seal(found, table, 7)
            prints = found._take_fingerprints(3, ALL)
            assert [s for s in ALL if prints[s] != wanted[s]] == [7]


def seal(found: ServerGroup, place: int, shard: int) -> None:
    """Take a shard's rows for right, as a server does that has computed them wrongly."""
    table = found.tables.all[place]
    if isinstance(table, KeyedTable):
        table.checksums.seal_shard(shard)
    else:
        table.seal(shard, table.sum_up(shard, [*table.parts(shard)]))


def test_rows_of_tables_that_change_places_have_another_fingerprint() -> None:
    one, other = (group(RULES[0], *names) for names in (("a", "b"), ("b", "a")))
    tables = one.tables[0], replace(one.tables[1], seed=8)
    one = msgspec.structs.replace(one, tables=tables)
    other = msgspec.structs.replace(other, tables=tables[::-1])
    prints = [fill(ServerGroup(each, ALL))._take_fingerprints(0, ALL) for each in (one, other)]
    assert prints[0] != prints[1]


def test_a_worker_that_waits_for_nobody_makes_no_server_begin_again() -> None:
    servers = Servers(1)
    client = servers.client(group(RULES[1], "items"))
    begin(client)
    train(client, KEPT + 5)

    def give_up(why: str) -> None:
        raise UserError(why)

    reader = RowReader(client._group, client.book, client._kept, give_up)
    early = RowRead(client._group, 0, [torch.arange(5)])
    with pytest.raises(UserError, match="rows of items are lost"):
        reader.carry_on(early, range(SHARDS), waits=False)
    assert torch.equal(everything(client, KEPT + 5, 1)[0], expected(RULES[1], KEPT + 5)[0])

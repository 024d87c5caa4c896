"""Memory of servers that changes by itself: it is noticed before a row is used, and mended."""

from __future__ import annotations

import random

import pytest
import torch
from test_row_servers import RULES, Servers, everything, expected, fill, group, update
from test_wrong_servers import begin

from holdfast.engine.core.errors import Damaged, UserError, WireError
from holdfast.tables import RowOptimizer
from holdfast.tables.core.holdings import BARE
from holdfast.tables.core.placement import SHARDS
from holdfast.tables.keyed_rows import EVERY_PLACE, KeyedTable, _Moves
from holdfast.tables.row_client import KEPT
from holdfast.tables.row_memory import ReservedArrays, RowChecksums
from holdfast.tables.server_group import ServerGroup, fill_shard
from holdfast.tables.server_rows import RowUpdate, ServerTable
from holdfast.tables.serving import scrub
from holdfast.tables.table_set import write_shard
from holdfast.tables.table_shape import KeyRules, TableShape

ALL = tuple(range(SHARDS))


def flip(array: torch.Tensor, row: int, column: int = 0, bit: int = 7) -> None:
    """Change one bit of an array's row, as a fault of the memory does."""
    array.view(torch.int32)[row, column] ^= 1 << bit if bit < 31 else -(1 << 31)


def test_any_flipped_bit_is_noticed_and_nothing_else() -> None:
    arrays = [torch.randn(50, 5), torch.arange(100).reshape(50, 2), torch.zeros(50, 1)]
    sums = RowChecksums(arrays, ReservedArrays(), owners=1)
    sums.seal_part(range(50), 0)
    assert len(sums.find_damaged(range(50))) == 0
    dice = random.Random(3)
    for _ in range(500):
        array = dice.choice(arrays)
        row, bit = dice.randrange(50), dice.randrange(32)
        column = dice.randrange(array.view(torch.int32).shape[1])
        flip(array, row, column, bit)
        assert sums.find_damaged(range(50)).tolist() == [row]
        assert sums.find_damaged(torch.tensor([row, (row + 1) % 50])).tolist() == [row]
        flip(array, row, column, bit)


def test_rows_count_as_right_once_they_are_sealed() -> None:
    rows = torch.randn(200, 3)
    sums = RowChecksums([rows], ReservedArrays(), owners=2)
    sums.seal_part(range(100), 0)
    sums.seal_part(range(100, 200), 1)
    rows[10:20] += 1.0
    assert sums.find_damaged(range(200)).tolist() == list(range(10, 20))
    sums.seal(torch.arange(10, 15), torch.zeros(5, dtype=torch.int64))
    sums.seal(torch.arange(15, 19), torch.zeros(4, dtype=torch.int64))
    assert sums.find_damaged(range(200)).tolist() == [19]


def numbered(found: ServerGroup, place: int = 0) -> ServerTable:
    """Return one of a group's tables."""
    table = found.tables.all[place]
    assert isinstance(table, ServerTable)
    return table


def part_of(table: ServerTable, row: int, array: int = 0) -> tuple[torch.Tensor, int]:
    """Return the part of a table's array with its `row`th place over all shards, and where."""
    shard, at = divmod(row, table.shape.shard_rows)
    return list(table.parts(shard))[array], at


def table_of(servers: Servers, number: int) -> ServerTable:
    """Return the only table of a server in this process."""
    (found,) = servers.servers[number]._groups.values()
    return numbered(found)


@pytest.mark.parametrize("rule", RULES, ids=lambda rule: type(rule).__name__)
@pytest.mark.parametrize("slot", [False, True])
def test_a_replica_gives_the_rows_that_another_one_has_lost(rule: RowOptimizer, slot: bool) -> None:
    servers = Servers(2, replicas=2)
    client = servers.client(group(rule, "items"))
    begin(client)  # a server that still has no rows has none to be flipped
    for step in range(1, 30):
        client.push(step, update(step, 1))
        assert torch.equal(everything(client, step, 1)[0], expected(rule, step)[0])
        if step == 20:
            for number, row in ((0, 4), (0, 9), (1, 12)):
                table = table_of(servers, number)
                flip(*part_of(table, row, int(slot)))
    assert any("has changed" in line for line in servers.log)


def test_rows_that_no_other_server_has_are_given_up_instead_of_used() -> None:
    servers = Servers(1)
    client = servers.client(group(RULES[1], "items"))
    for step in range(1, KEPT + 3):
        client.push(step, update(step, 1))
        everything(client, step, 1)
    flip(*part_of(table_of(servers, 0), 3))
    with pytest.raises(UserError, match="rows of items are lost"):
        everything(client, KEPT + 2, 1)
    assert "server 0: memory with rows of items has changed by itself" in servers.log[-1]


def made(*names: str) -> ServerGroup:
    """Return a group with all shards after one update."""
    found = fill(ServerGroup(group(RULES[2], *names), ALL))
    found.update(1, ALL, update(1, len(names)))
    return found


def test_rows_that_nobody_reads_are_looked_at_in_turn() -> None:
    found = made("a", "b")
    table = numbered(found, 1)
    flip(*part_of(table, 2 * table.shape.shard_rows + 1, 1))  # in shard 2
    rounds = 32
    for number in range(rounds):
        scrub(found, number, rounds)
    assert found.take_dropped() == (2,)
    assert found.take_dropped() == ()


def test_damaged_rows_are_neither_copied_nor_saved() -> None:
    found = made("items")
    pin = found.pin(1, ALL)
    assert pin is not None
    table = numbered(found)
    flip(*part_of(table, 0))
    flip(*part_of(table, table.shape.shard_rows))
    with pytest.raises(Damaged, match="shard 0 of items has changed in memory by itself"):
        found.copy_as_of(pin, 0, 0, 0)
    with pytest.raises(WireError, match="shard 1 of items has changed in memory by itself"):
        found.copy(1)
    with pytest.raises(WireError, match="shard 1 is not known"):
        found.copy(1)
    fill_shard(found, 1)
    assert found.copy(1).version == 0


def test_an_update_is_applied_to_the_shards_that_are_sound() -> None:
    found = fill(ServerGroup(group(RULES[1], "items"), ALL))
    table = numbered(found)
    flip(*part_of(table, 3 * table.shape.shard_rows))
    keys, grads = torch.arange(2 * SHARDS), torch.ones(2 * SHARDS, 5)
    given = RowUpdate(keys=[keys], grads=[grads], steps=[1], rates=[0.1])
    assert found.update(1, ALL, given).behind == ((3, BARE),)
    fill_shard(found, 3)
    mine = keys % SHARDS == 3
    rest = RowUpdate(keys=[keys[mine]], grads=[grads[mine]], steps=[1], rates=[0.1])
    assert found.update(1, (3,), rest).can_serve


# ---------------------------------------------------------------- tables of keys


KEYED = TableShape(
    name="keys", count=0, dim=4, seed=1, limits=(-1, 1), keyed=KeyRules(capacity=64, admit_after=2)
)


def keyed_table() -> KeyedTable:
    """Return a table of keys in which shards are full, after a few updates."""
    table = KeyedTable(KEYED, ALL, RULES[1])
    dice = torch.Generator().manual_seed(5)
    for number in range(1, 12):
        keys = torch.randint(0, 90, (60,), generator=dice).unique()
        assert table.find_damaged(keys, whole=True) == set()
        table.update(keys, torch.ones(len(keys), 4), 0.1, number, number)
    assert not any(table.is_damaged(shard, EVERY_PLACE) for shard in ALL)
    return table


@pytest.mark.parametrize("array", ["rows", "keys", "used", "sum", "seen"])
def test_every_array_of_a_table_of_keys_is_watched(array: str) -> None:
    table = keyed_table()
    places = table.arrays[array].shape[0] // SHARDS
    shard = 5
    row = shard * places
    flip(table.arrays[array], row, bit=2)
    assert [s for s in ALL if table.is_damaged(s, EVERY_PLACE)] == [shard]
    wanted = torch.arange(2000)
    assert table.find_damaged(wanted, whole=True) == {shard}
    assert table.find_damaged(wanted, whole=False) <= {shard}
    arrays = [part.clone() for part in table.parts(shard)]
    table.fill(shard, arrays)
    write_shard(table, shard, arrays)
    table.seal(shard, table.sum_up(shard, arrays))
    assert table.find_damaged(wanted, whole=True) == set()


def test_a_row_of_a_key_is_not_read_after_its_memory_has_changed() -> None:
    table = keyed_table()
    flip(table.arrays["rows"], 5)
    key = table.arrays["keys"][5]
    assert table.find_damaged(key, whole=False) == {int(KEYED.shards_of(key)[0])}


@pytest.mark.parametrize("rebuilt", [False, True])
@pytest.mark.parametrize(("array", "value"), [("keys", 1 << 40), ("used", 0), ("used", -1)])
def test_a_key_or_its_uses_that_have_changed_are_noticed_as_the_row_is_read(
    array: str, value: int, rebuilt: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    table = keyed_table()
    key = table.arrays["keys"][5].clone()
    shard = int(KEYED.shards_of(key)[0])
    for whole in (False, True):
        assert table.find_damaged(key, whole=whole) == set()
    table.arrays[array][5, 0] = value
    if rebuilt:  # the newest keys are sorted in by now
        monkeypatch.setattr("holdfast.tables.row_memory.RECENT_MIN", 0)
        for number in range(12, 12 + SHARDS):
            keys = torch.arange(1000 * number, 1000 * number + 2)
            table.update(keys, torch.ones(2, 4), 0.1, number, number)
    for whole in (False, True):
        assert table.find_damaged(key, whole=whole) == {shard}


def test_a_key_that_comes_back_by_itself_is_not_read() -> None:
    table = keyed_table()
    key = table.arrays["keys"][5].clone()
    wanted = table.read(key, 1 << 40)
    table._carry_out(_Moves(key[:0], key[:0], torch.tensor([5])))
    assert not torch.equal(table.read(key, 1 << 40), wanted)
    table.arrays["used"][5, 0] = 1
    assert not torch.equal(table.read(key, 1 << 40), wanted)


def test_a_worker_keeps_no_checksums() -> None:
    table = KeyedTable(KEYED, ALL, RULES[1], undoes=False)
    table.update(torch.arange(5), torch.ones(5, 4), 0.1, 1, 1)
    assert table.checksums._sets == {}

"""Copies of shards, for other servers and for checkpoints: updates and reads continue."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from test_keyed_tables import described, updates_of
from test_row_servers import (
    IDENTITY,
    ROWS,
    RULES,
    Servers,
    close_servers,
    everything,
    expected,
    fill,
    group,
    update,
)

from holdfast.engine.core.errors import Damaged, WireError
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_stream import SendRate
from holdfast.tables import server_group
from holdfast.tables import server_wire as wire
from holdfast.tables.core.holdings import (
    BARE,
    WINDOW,
    CopyArrived,
    ShardsGivenUp,
    ShardStanding,
)
from holdfast.tables.core.placement import SHARDS
from holdfast.tables.server_group import ServerGroup, ShardRows, fill_shard
from holdfast.tables.server_rows import RowUpdate
from holdfast.tables.serving import fetch_shard
from holdfast.tables.table_shape import FREQUENCY
from support import until

__all__ = ["close_servers"]  # a fixture
ALL = tuple(range(SHARDS))
MANY = 3 * WINDOW
KEYED = updates_of(MANY)


def trained(version: int) -> ServerGroup:
    made = fill(ServerGroup(group(RULES[0], "items"), ALL))
    for step in range(1, version + 1):
        made.update(step, ALL, update(step, 1))
    return made


def test_a_pinned_version_can_be_copied_however_many_updates_follow() -> None:
    made = trained(2)
    pin = made.pin(2, ALL)
    assert pin is not None
    for step in range(3, MANY):
        made.update(step, ALL, update(step, 1))
    rows, slots = expected(RULES[0], 2)
    (momentum,) = slots.values()
    for shard in ALL:
        for array, right in enumerate((rows, momentum)):
            found = made.copy_as_of(pin, shard, 0, array)
            wanted = right[shard::SHARDS]
            assert torch.equal(found[: len(wanted)], wanted)
    made.unpin(pin)
    assert len(made.tables._blocks[0][1].undos) <= WINDOW  # type: ignore[attr-defined]


def interrupt(
    made: ServerGroup, act: Callable[[], object], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Run an action after each part that is copied, and make parts of one or two rows."""
    (table,) = made.tables.all
    plain = table.copy

    def copy(*args: Any) -> torch.Tensor:
        part = plain(*args)
        act()
        return part

    monkeypatch.setattr(server_group, "PART_BYTES", 100)
    monkeypatch.setattr(table, "copy", copy)


def keyed(version: int) -> ServerGroup:
    rules: dict[str, Any] = {"capacity": 64, "admit_after": 2, "evict": FREQUENCY}
    made = fill(ServerGroup(described(RULES[1], **rules), ALL))
    for step in range(1, version + 1):
        made.update(step, ALL, KEYED[step - 1])
    return made


@pytest.mark.parametrize("is_keyed", [False, True])
def test_a_copy_is_of_one_version_though_updates_come_between_its_parts(
    is_keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, right = (keyed(5), keyed(5)) if is_keyed else (trained(5), trained(5))
    step = 5

    def given(step: int) -> RowUpdate:
        return KEYED[step - 1] if is_keyed else update(step, 1)

    def train() -> None:
        nonlocal step
        if step < MANY:
            step += 1
            made.update(step, ALL, given(step))

    interrupt(made, train, monkeypatch)
    for shard in (3, 4, 5):
        version = step
        for later in range(right.judge(1 << 40, [0]).behind[0][1] + 1, version + 1):
            right.update(later, ALL, given(later))
        ours, theirs = made.copy(shard), right.copy(shard)
        assert (ours.version, ours.fingerprint) == (version, theirs.fingerprint)
        assert all(map(torch.equal, ours.arrays, theirs.arrays))
    assert step > 5 + WINDOW


def test_a_copy_of_a_shard_that_gets_other_rows_meanwhile_is_refused(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def give_away(made: ServerGroup) -> None:
        made.hold((1,), 5)

    def reset(made: ServerGroup) -> None:
        fill_shard(made, 0)

    for act in (give_away, reset):
        made = trained(WINDOW + 2)
        interrupt(made, partial(act, made), monkeypatch)
        with pytest.raises(
            WireError, match="shard 0 of items is not kept as of 18 updates any longer"
        ):
            made.copy(0)
        assert not made._pins._pins


def test_a_pin_does_not_outlive_the_rows_of_its_shard() -> None:
    made, other = trained(3), trained(5)
    pin = made.pin(3, ALL)
    assert pin is not None
    copy = other.copy(2)
    made.adopt(CopyArrived(2, copy.version), [copy.arrays], copy.fingerprint)
    with pytest.raises(Damaged, match="shard 2 of items is not kept as of 3 updates any longer"):
        made.copy_as_of(pin, 2, 0, 0)
    assert torch.equal(made.copy_as_of(pin, 1, 0, 0), trained(3).copy(1).arrays[0])


def test_a_save_that_hangs_keeps_its_rows_only_until_the_next_one() -> None:
    made = trained(2)
    hangs, copy = made.pin(2, (0, 1), for_save=True), made.pin(2, (2,))
    assert hangs is not None
    assert copy is not None
    for step in range(3, MANY):
        made.update(step, ALL, update(step, 1))
    assert made.pin(2, (0,), for_save=True) is None
    made.unpin(copy)
    assert torch.equal(made.copy_as_of(hangs, 0, 0, 0), trained(2).copy(0).arrays[0])
    shares = [made.pin(MANY - 1, (shard,), for_save=True) for shard in (0, 1)]
    with pytest.raises(Damaged, match="shard 0 of items is not kept as of 2 updates any longer"):
        made.copy_as_of(hangs, 0, 0, 0)
    assert len(made.tables._blocks[0][1].undos) <= WINDOW  # type: ignore[attr-defined]
    for shard, share in enumerate(shares):
        assert share is not None
        assert len(made.copy_as_of(share, shard, 0, 0))
    made.unpin(hangs)


@pytest.mark.parametrize("is_keyed", [False, True])
@pytest.mark.parametrize("is_bare", [False, True])
def test_reads_and_updates_go_on_while_a_copy_takes_its_place(
    is_bare: bool, is_keyed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, step = (keyed if is_keyed else trained), WINDOW + 2
    made, right = make(step), make(step)
    begun, may_end, plain = threading.Event(), threading.Event(), made.tables.write
    if is_bare:
        made.hold([s for s in ALL if s != 3], 1)
        made.hold(ALL, 2)

    def write(shard: int, arrays: list[list[torch.Tensor]]) -> None:
        plain(shard, [[torch.full_like(array, 7) for array in arrays[0]]])  # half written
        begun.set()
        assert may_end.wait(60.0)
        plain(shard, arrays)

    monkeypatch.setattr(made.tables, "write", write)
    threads = [threading.Thread(target=fill_shard, args=(made, 3))]
    threads[0].start()
    assert begun.wait(60.0)
    assert made.judge(0, [3]) == ShardStanding(behind=((3, BARE),))
    threads.append(threading.Thread(target=made.hold, args=([0, 3], 3)))
    threads[1].start()
    for number in range(step + 1, step + 4):
        given = KEYED[number - 1] if is_keyed else update(number, 1)
        for each in (made, right):
            each.update(number, ALL, given)
    others = [s for s in ALL if s != 3]
    (described,), keys = made.group.tables, torch.cat([each.keys[0] for each in KEYED]).unique()
    keys = keys if is_keyed else torch.arange(ROWS)
    mine = [keys[described.are_in(others, keys)]]
    ours, theirs = (each.read(step + 3, others, mine) for each in (made, right))
    assert isinstance(ours, ShardRows)
    assert isinstance(theirs, ShardRows)
    assert ours.fingerprints == theirs.fingerprints
    assert torch.equal(ours.arrays[0], theirs.arrays[0])
    may_end.set()
    for thread in threads:
        thread.join(60.0)
    assert made.tables.shards == (0, 3)
    assert made.copy(3).version == 0
    assert made.copy(3).fingerprint == make(0).copy(3).fingerprint
    assert made.copy(0).fingerprint == right.copy(0).fingerprint


def test_a_copy_that_is_not_wanted_stays_away_whatever_happens_meanwhile(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made, copy = trained(5), trained(4).copy(3)
    plain = made._holdings.is_wanted

    def is_wanted(arrived: CopyArrived) -> bool:
        found = plain(arrived)
        made._handle(ShardsGivenUp((3,)))  # its memory has changed, as is found a moment later
        return found

    monkeypatch.setattr(made._holdings, "is_wanted", is_wanted)
    made.adopt(CopyArrived(3, copy.version), [copy.arrays], copy.fingerprint)
    assert made.judge(4, [3]) == ShardStanding(behind=((3, BARE),))


def test_copies_for_other_servers_keep_to_a_rate(monkeypatch: pytest.MonkeyPatch) -> None:
    slept: list[float] = []
    servers = Servers(1)  # no other one copies as well
    servers.servers[0]._rate = SendRate(1000.0)
    client = servers.client(group(RULES[0], "items"))
    for step in range(1, WINDOW + 6):  # more than workers could give
        client.push(step, update(step, 1))
        everything(client, step, 1)
    made = servers.servers[0]._groups["items"]
    monkeypatch.setattr(peer_stream.time, "sleep", slept.append)
    with peer_stream.connect(
        servers.addresses[0], IDENTITY, wire.MAGIC, (0, 0, 0), 20.0
    ) as channel:
        other = ServerGroup(made.group, ALL)
        fetch_shard(channel, other, 3, made.copy(3).version)
        assert not slept  # a worker waits for it
        fetch_shard(channel, other, 4)
    sent = sum(array.nbytes for array in other.copy(4).arrays)
    until(lambda: sum(slept) > 0.5 * sent / 1000, "the sender has waited")
    assert other.copy(4).fingerprint == made.copy(4).fingerprint

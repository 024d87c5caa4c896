"""Servers that have just started: no reader waits for their rows while other servers have them."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_row_servers import (
    RULES,
    STEPS,
    Servers,
    close_servers,
    everything,
    expected,
    group,
    start_server,
    update,
)

from holdfast.engine.core.errors import UserError
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.files import FileStorage
from holdfast.tables import serving
from holdfast.tables.core.placement import SHARDS, find_holders, share_out
from holdfast.tables.row_client import KEPT, RowClient
from holdfast.tables.server_group import ServerGroup, fill_shard
from support import until

__all__ = ["close_servers"]  # a fixture
DESCRIBED = group(RULES[1], "items")


class Filling:
    """Delays servers as they give rows their first values. `begun`: the number of such shards."""

    def __init__(self) -> None:
        self.begun, self.may_end = 0, threading.Event()

    def fill(self, made: ServerGroup, shard: int) -> None:
        self.begun += 1
        assert self.may_end.wait(60.0)
        fill_shard(made, shard)


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Filling]:
    filling = Filling()
    monkeypatch.setattr(serving, "fill_shard", filling.fill)
    yield filling
    filling.may_end.set()


def is_whole(servers: Servers, number: int, version: int) -> bool:
    """Return whether a server has all its shards as of a version."""
    groups = servers.servers[number]._groups
    found = groups.get(DESCRIBED.name)
    return found is not None and found.judge(version, found.tables.shards).can_serve


def train(servers: Servers, client: RowClient, steps: int) -> None:
    """Send some updates, and wait until all servers have had them, so that one may be closed."""
    for step in range(1, steps + 1):
        client.push(step, update(step, 1))
        everything(client, step, 1)

    def have_all() -> bool:
        everything(client, steps, 1)  # gives updates to servers that lack some
        return all(is_whole(servers, number, steps) for number in range(servers.count))

    until(have_all, "all servers have all rows")


def start_again(servers: Servers, number: int) -> None:
    servers.servers[number].close()
    servers.servers[number] = start_server(servers.log.append)
    servers.addresses[number] = servers.servers[number].listen("127.0.0.1")


def test_nobody_waits_for_a_server_that_fills_its_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    servers, filling = Servers(2, 2), Filling()
    client = servers.client(DESCRIBED)
    train(servers, client, STEPS)
    monkeypatch.setattr(serving, "fill_shard", filling.fill)
    start_again(servers, 1)
    for _ in range(20):
        assert torch.equal(everything(client, STEPS, 1)[0], expected(RULES[1], STEPS)[0])
    until(lambda: filling.begun, "the server has begun")
    assert not is_whole(servers, 1, STEPS)
    assert 1 not in client.reader.find_suspects()  # it answers, and is asked again at once
    filling.may_end.set()

    def has_all() -> bool:
        everything(client, STEPS, 1)  # gives it the updates
        return is_whole(servers, 1, STEPS)

    until(has_all, "the server has all rows")
    assert filling.begun == SHARDS, "it has filled each shard once"


def test_a_server_that_can_copy_all_rows_gives_none_its_first_values(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers, filling = Servers(2, 2), Filling()
    client, steps = servers.client(DESCRIBED), KEPT + 3  # more than a worker could give
    train(servers, client, steps)
    monkeypatch.setattr(serving, "fill_shard", filling.fill)
    start_again(servers, 1)

    def has_all() -> bool:
        everything(client, steps, 1)  # orders the copies
        return is_whole(servers, 1, steps)

    until(has_all, "the server has all rows")
    assert filling.begun == 0
    assert servers.servers[1]._groups[DESCRIBED.name].copy(3).version == steps


def test_the_first_read_waits_until_there_are_rows(filling: Filling) -> None:
    client, found = Servers(1).client(DESCRIBED), list[torch.Tensor]()
    reader = threading.Thread(target=lambda: found.extend(everything(client, 0, 1)), daemon=True)
    reader.start()
    until(lambda: filling.begun, "the server has begun")
    assert not found
    filling.may_end.set()
    reader.join(60.0)
    assert torch.equal(found[0], expected(RULES[1], 0)[0])


def test_the_others_save_the_rows_that_a_server_lacks(tmp_path: Path, filling: Filling) -> None:
    filling.may_end.set()
    servers = Servers(3, 2, tmp_path)
    client = servers.client(DESCRIBED)
    train(servers, client, STEPS)
    filling.may_end.clear()
    start_again(servers, 1)
    everything(client, STEPS, 1)
    until(lambda: filling.begun, "the server fills its rows")
    store, parts = Checkpoints(FileStorage(tmp_path)), share_out(find_holders(3, 2))
    assert parts[1], "it would save some"
    client.save(STEPS, 40, "token", 1, parts)
    first = store.begin(40, "token", 0)
    first.commit([first.write([], 0), *first.gather(4, 60.0)], {})
    others = Servers(1, 1, tmp_path).client(DESCRIBED)
    others.begin_from(STEPS, 40)
    assert torch.equal(everything(others, STEPS, 1)[0], expected(RULES[1], STEPS)[0])


def fail(*_: object) -> ServerGroup:
    raise RuntimeError("no memory")


def test_tables_for_which_a_server_has_no_memory_end_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(serving, "ServerGroup", fail)
    client = Servers(1).client(DESCRIBED)
    with pytest.raises(UserError, match="the server cannot hold these tables: no memory"):
        everything(client, 0, 1)


def test_a_server_without_memory_for_tables_is_replaced_by_another_one(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    made: list[ServerGroup] = []

    def make_one(*about: Any) -> ServerGroup:
        if made:
            fail()
        made.append(ServerGroup(*about))
        return made[0]

    monkeypatch.setattr(serving, "ServerGroup", make_one)
    servers, steps = Servers(2, 2), KEPT + 3  # more than a worker could give
    client = servers.client(DESCRIBED)
    for step in range(steps + 1):
        if step:
            client.push(step, update(step, 1))
        assert torch.equal(everything(client, step, 1)[0], expected(RULES[1], step)[0])
    full = "takes no updates: the server cannot hold these tables: no memory"
    until(lambda: any(full in line for line in servers.log), "the line")
    named = [line.partition(" takes")[0] for line in servers.log if full in line]
    good = 1 if named == ["server 0"] else 0
    assert named == [f"server {1 - good}"]
    # If the other one loses its rows, they are lost: no reader waits for the full one.
    made.clear()
    start_again(servers, good)
    with pytest.raises(UserError, match="rows of items are lost"):
        everything(client, steps, 1)


def test_a_server_whose_memory_runs_out_later_says_so_and_tries_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    servers, told = Servers(1), re.compile(r"shards \[.*\] of items cannot be copied: no memory")
    with monkeypatch.context() as patch:
        patch.setattr(serving, "fill_shard", fail)
        client, found = servers.client(DESCRIBED), list[torch.Tensor]()
        reader = threading.Thread(target=lambda: found.extend(everything(client, 0, 1)))
        reader.start()
        until(lambda: any(map(told.fullmatch, servers.log)), "the line")
    reader.join(60.0)
    assert torch.equal(found[0], expected(RULES[1], 0)[0])

"""Servers that have just started: nobody waits while they give their rows the first values."""

from __future__ import annotations

import threading
from collections.abc import Iterator

import pytest
import torch

from holdfast.core.errors import UserError
from holdfast.servers import serving
from holdfast.servers.row_client import RowClient
from holdfast.servers.server_connection import NotReady, ServerConnection
from holdfast.servers.server_group import ServerGroup
from support import until
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

__all__ = ["close_servers"]  # a fixture
DESCRIBED = group(RULES[1], "items")


class Filling:
    """Delays servers as they give rows their first values. `begun`: the number that have begun."""

    def __init__(self) -> None:
        self.begun, self.may_end = 0, threading.Event()

    def make(self, *args: object) -> ServerGroup:
        self.begun += 1
        assert self.may_end.wait(60.0)
        return ServerGroup(*args)  # type: ignore[arg-type]


@pytest.fixture
def filling(monkeypatch: pytest.MonkeyPatch) -> Iterator[Filling]:
    """Delay each server that begins from now on."""
    filling = Filling()
    monkeypatch.setattr(serving, "ServerGroup", filling.make)
    yield filling
    filling.may_end.set()


def is_whole(servers: Servers, number: int, version: int) -> bool:
    """Return whether a server has all its shards as of a version."""
    groups = servers.servers[number]._groups
    found = groups.get(DESCRIBED.name)
    return found is not None and found.judge(version, found.shards).can_serve


def trained(servers: Servers) -> RowClient:
    client = servers.client(DESCRIBED)
    for step in range(1, STEPS):
        client.push(step, update(step, 1))
        everything(client, step, 1)
    return client


def test_nobody_waits_for_a_server_that_has_started_again(monkeypatch: pytest.MonkeyPatch) -> None:
    servers, filling = Servers(2, 2), Filling()
    client = trained(servers)
    monkeypatch.setattr(serving, "ServerGroup", filling.make)
    servers.servers[1].close()
    servers.servers[1] = start_server(servers.log.append)
    servers.addresses[1] = servers.servers[1].listen("127.0.0.1")
    version = STEPS - 1
    for _ in range(20):
        assert torch.equal(everything(client, version, 1)[0], expected(RULES[1], version)[0])
    until(lambda: filling.begun, "the server has begun")
    assert 1 not in client.reader.find_suspects()  # it answers, and is asked again at once
    filling.may_end.set()

    def has_all() -> bool:
        everything(client, version, 1)  # orders the copies
        return is_whole(servers, 1, version)

    until(has_all, "the server has all rows")
    assert filling.begun == 1


def test_the_first_read_waits_until_there_are_rows(filling: Filling) -> None:
    client, found = Servers(1).client(DESCRIBED), list[torch.Tensor]()
    reader = threading.Thread(target=lambda: found.extend(everything(client, 0, 1)), daemon=True)
    reader.start()
    until(lambda: filling.begun, "the server has begun")
    assert not found
    filling.may_end.set()
    reader.join(60.0)
    assert torch.equal(found[0], expected(RULES[1], 0)[0])


def test_an_order_to_a_server_that_makes_room_is_refused_at_once(filling: Filling) -> None:
    client = Servers(1).client(DESCRIBED)
    with pytest.raises(NotReady, match="server 0 is making room for its rows"):
        ServerConnection(client.book, 0, DESCRIBED).open()


def test_tables_for_which_a_server_has_no_memory_end_the_job(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(*_: object) -> ServerGroup:
        raise RuntimeError("no memory")

    monkeypatch.setattr(serving, "ServerGroup", fail)
    client = Servers(1).client(DESCRIBED)
    with pytest.raises(UserError, match="the server cannot hold these tables: no memory"):
        everything(client, 0, 1)

"""Each order for a node is claimed once, by the first to ask; the book is closed to others."""

from __future__ import annotations

import dataclasses
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from holdfast.clusters.order_book import WITHDRAWN, OrderBook
from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.lab.contracts.cluster_contract import order


@pytest.fixture
def book(tmp_path: Path) -> OrderBook:
    return OrderBook(tmp_path / "orders")


def test_an_order_is_claimed_once_and_kept(book: OrderBook) -> None:
    wanted = order(1)
    assert book.entries() == []
    assert book.find(wanted.id) is None
    book.add(wanted)
    entry = book.find(wanted.id)
    assert entry is not None
    assert (entry.order, entry.waits) == (wanted, True)
    assert book.take("c1", "a") == wanted
    assert book.take("c2", "a") is None
    (entry,) = book.entries()
    assert (entry.holder, entry.host, entry.waits) == ("c1", "a", False)
    assert not book.withdraw(wanted.id)


def test_one_of_many_claims_gets_an_order(book: OrderBook) -> None:
    wanted = [order(number) for number in range(20)]
    for each in wanted:
        book.add(each)
    with ThreadPoolExecutor(8) as pool:
        taken = list(pool.map(lambda name: book.take(f"c{name}", "a"), range(40)))
    assert sorted(each.id for each in taken if each) == sorted(each.id for each in wanted)


def test_a_withdrawn_order_is_not_taken(book: OrderBook) -> None:
    wanted = order(1)
    book.add(wanted)
    assert book.withdraw(wanted.id)
    assert book.withdraw(wanted.id)  # the answer to the first one may have been lost
    assert book.take("c1", "a") is None
    assert [entry.holder for entry in book.entries()] == [WITHDRAWN]


def test_an_order_avoids_the_hosts_that_it_was_last_given(book: OrderBook) -> None:
    wanted = order(1, avoid=["a", "b"])
    book.add(wanted)
    assert book.take("c1", "a") is None
    book.add(dataclasses.replace(wanted, avoid=("b",)))
    assert book.take("c2", "b") is None
    assert book.take("c1", "a") is not None


def test_nobody_else_can_read_the_book(book: OrderBook, tmp_path: Path) -> None:
    book.add(order(1))
    book.take("c1", "a")
    folder = tmp_path / "orders"
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert {stat.S_IMODE(path.stat().st_mode) for path in folder.iterdir()} == {0o600}
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize("text", ["{", "[]", '{"command": ["x"]}'])
def test_an_order_that_cannot_be_read_is_reported_as_damaged(
    book: OrderBook, tmp_path: Path, text: str
) -> None:
    book.add(order(1))
    (path,) = (tmp_path / "orders").iterdir()
    path.write_text(text)
    with pytest.raises(Damaged, match="orders"):
        book.entries()
    with pytest.raises(Damaged):
        book.find(PlacementId(path.stem))

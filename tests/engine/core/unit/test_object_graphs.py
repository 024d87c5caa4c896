"""Graphs of the core's objects are written as bytes and come back; all else is refused."""

from __future__ import annotations

import types
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.core.errors import Damaged, WireError
from holdfast.engine.core.membership.facts import LatestFacts
from holdfast.engine.core.membership.live_roster import LiveRoster
from holdfast.engine.core.redundancy import Piece
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.core.worker_status import Stage, WorkerStatus
from holdfast.engine.wire.object_graphs import dump_graph, load_graph

MEMBER = Member(worker=WorkerId(3), incarnation=Incarnation(2), agent=AgentId("a"))

plain = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
keys = st.integers() | st.text() | st.tuples(st.integers(), st.text())
values = st.recursive(
    plain | st.binary() | st.sampled_from(Stage) | st.just(MEMBER),
    lambda inner: (
        st.lists(inner)
        | st.lists(inner).map(tuple)
        | st.sets(keys)
        | st.frozensets(keys)
        | st.dictionaries(keys, inner)
    ),
    max_leaves=20,
)


def test_what_a_view_has_found_once_is_not_written() -> None:
    view = View(
        number=ViewNumber(1), members=(MEMBER,), owners=(WorkerId(3),), resume_step=0, leader=3
    )
    before = dump_graph(view)
    assert (view.workers, view.donors, view.hosted_by(WorkerId(3))) == ((3,), (3,), (0,))
    assert view.incarnations == {(3, 2)}
    assert dump_graph(view) == before
    assert load_graph(before).donors == (3,)


@pytest.mark.slow
@given(values)
def test_values_come_back(value: Any) -> None:
    found = load_graph(dump_graph(value))
    assert found == value
    assert type(found) is type(value)


def test_shared_objects_stay_shared() -> None:
    status = WorkerStatus(worker=WorkerId(1), incarnation=Incarnation(1), stage=Stage.LOST)
    ring: list[Any] = [status, {"again": status}]
    ring.append(ring)
    found = load_graph(dump_graph(ring))
    assert found[0] == status
    assert found[1]["again"] is found[0]
    assert found[2] is found


def test_a_view_of_a_dictionary_follows_it() -> None:
    kept = {"a": 1}
    both = load_graph(dump_graph([types.MappingProxyType(kept), kept]))
    both[1]["b"] = 2
    assert dict(both[0]) == {"a": 1, "b": 2}
    with pytest.raises(TypeError):
        both[0]["c"] = 3


def test_objects_of_all_kinds_come_back() -> None:
    piece = Piece(part=1, number=2)
    roster = LiveRoster(None, 1.5)
    found = load_graph(dump_graph([roster, piece, 1 << 80, -(1 << 70)]))
    assert type(found[0]) is LiveRoster
    assert vars(found[0]).keys() == vars(roster).keys()
    assert found[1] == piece
    assert type(found[1]) is Piece
    assert found[2:] == [1 << 80, -(1 << 70)]


def test_caches_are_made_again() -> None:
    cache = LatestFacts()
    cache._made_from = ("not", "kept")  # type: ignore[assignment]
    found = load_graph(dump_graph([cache, cache], [LatestFacts]), [LatestFacts])
    assert found[0]._made_from is None
    assert found[0] is found[1]
    with pytest.raises(Damaged, match="cannot be made without its fields"):
        load_graph(dump_graph(cache, [LatestFacts]))


@pytest.mark.parametrize("value", [len, object(), print, lambda: 0, WireError("x"), {1: 1 + 2j}])
def test_other_values_are_refused(value: object) -> None:
    with pytest.raises(TypeError):
        dump_graph(value)


@pytest.mark.parametrize(
    ("form", "why"),
    [
        (["o", "os:system"], "No module named"),
        (["o", "types:dataclass"], "is no class of its module"),
        (["o", "types:__builtins__"], "is no class of its module"),
        (["o", "views.Member"], "names no class"),
        (["o", "views:Member", "__class__", 1], "'__class__' is no attribute"),
        (["o", "views:Member", "left", 1], "left"),
        (["o", "views:Member", "worker"], "zip"),
        (["o", "errors:WireError"], "object.__new__"),
        (["o", "worker_status:Stage"], "no worker_status:Stage can be made"),
        (["e", "worker_status:Stage", "NO_SUCH"], "NO_SUCH"),
        (["e", "views:Member", "worker"], "is no Enum"),
        (["m", "views:Member", 1], "is no tuple"),
        (["r", 3], "IndexError"),
        (["t", ["r", 0]], "contains itself"),
        (["d", 1], "zip"),
        (["d", ["l"], 1], "unhashable"),
        (["p", 5], "mappingproxy"),
        (["x", 5], "'x'"),
        ([], "not enough values"),
        (["i", float("inf")], "inf is no text of digits"),
        ([5], "5"),
    ],
)
def test_bytes_that_describe_no_graph_are_refused(form: object, why: str) -> None:
    with pytest.raises(Damaged, match=why):
        load_graph(msgspec.msgpack.encode(form))


forms = st.recursive(
    plain
    | st.sampled_from(
        ["views:Member", "worker_status:Stage", "errors:WireError", "worker", "view"]
    ),
    lambda inner: st.tuples(st.sampled_from("pdomenriltsfx"), st.lists(inner)).map(
        lambda pair: [pair[0], *pair[1]]
    ),
    max_leaves=30,
)


@given(st.binary() | forms.map(lambda form: form))
def test_any_bytes_are_read_or_refused(given_form: object) -> None:
    if isinstance(given_form, bytes):
        data = given_form
    else:
        try:
            data = msgspec.msgpack.encode(given_form)
        except OverflowError:
            return
    try:
        load_graph(data)
    except Damaged:
        return


def test_depth_is_refused() -> None:
    form: object = ["l"]
    for _ in range(900):
        form = ["l", form]
    with pytest.raises(Damaged):
        load_graph(msgspec.msgpack.encode(form))

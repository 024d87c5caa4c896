"""Which heirs of servers have all rows, by their answers to updates."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import cast

from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.engine.core.job_spec import ServerSettings
from holdfast.engine.train.script.service_link import ServiceLink
from holdfast.tables.core.heirs import HeirProgress, HolderAnswer
from holdfast.tables.core.holdings import ShardStanding
from holdfast.tables.core.placement import HEIRS, find_shards, lay_out
from holdfast.tables.server_access import ServerAccess

WHOLE = ShardStanding()
TWO = ServerLayout(count=2, goal=2)
MORE = ServerLayout(number=1, count=2, goal=3)
HELD, HELD_BY_1 = (find_shards(n, lay_out(TWO, 1)) for n in range(2))
LAST = HELD[-1]
AT = "node0:7"
HEIR, OTHER = HEIRS, HEIRS + 1


def progress() -> HeirProgress:
    """Return the progress of two groups, where the heir of server 0 is whole in the second."""
    made = HeirProgress(TWO, 1)
    made.add_group("a")
    made.add_group("b")
    made.record_answer("b", HolderAnswer(HEIR, AT, 0, HELD, WHOLE))
    return made


def test_an_heir_is_complete_with_all_shards_of_all_groups() -> None:
    found = progress()
    found.record_answer("a", HolderAnswer(HEIR, AT, 0, HELD[:-1], WHOLE))
    assert found.list_complete() == ()
    found.record_answer("a", HolderAnswer(HEIR, AT, 0, (LAST,), WHOLE))
    assert found.list_complete() == (AT,)


def test_shards_that_are_behind_past_or_being_copied_are_not_whole() -> None:
    for lacking in (
        ShardStanding(behind=((LAST, 7),)),
        ShardStanding(past=(LAST,)),
        ShardStanding(copying=(LAST,)),
    ):
        found = progress()
        found.record_answer("a", HolderAnswer(HEIR, AT, 0, HELD, lacking))
        assert found.list_complete() == ()
        found.record_answer("a", HolderAnswer(HEIR, AT, 0, (LAST,), WHOLE))
        assert found.list_complete() == (AT,)
        found.record_answer("a", HolderAnswer(HEIR, AT, 0, (LAST,), lacking))
        assert found.list_complete() == ()


def test_an_heir_that_is_silent_or_starts_again_has_to_prove_itself_again() -> None:
    found = progress()
    found.record_answer("a", HolderAnswer(HEIR, AT, 0, HELD, WHOLE))
    found.record_silence("b", HEIR)
    assert found.list_complete() == ()
    found.record_answer("b", HolderAnswer(HEIR, "node0:8", 0, HELD, WHOLE))
    assert found.list_complete() == (), "the two groups know different processes"
    found.record_answer("a", HolderAnswer(HEIR, "node0:8", 0, HELD[:-1], WHOLE))
    assert found.list_complete() == ()
    found.record_answer("a", HolderAnswer(HEIR, "node0:8", 0, (LAST,), WHOLE))
    assert found.list_complete() == ("node0:8",)


def watched() -> tuple[ServerAccess, list[tuple[tuple[str, ...], int]]]:
    """Return a watch of one group, and its reports: complete processes, and the layout's number."""
    told: list[tuple[tuple[str, ...], int]] = []

    def report(complete: tuple[str, ...], layout: ServerLayout) -> None:
        told.append((complete, layout.number))

    link = SimpleNamespace(layout=TWO, settings=ServerSettings(count=2), report=report)
    watch = ServerAccess(cast(ServiceLink, link))
    watch.add_group("a")
    watch.begin()
    return watch, told


def test_heirs_of_several_servers_are_told_once_and_when_they_change() -> None:
    watch, told = watched()
    watch.record_answer("a", HolderAnswer(OTHER, "x:1", 0, HELD_BY_1, WHOLE))
    watch.record_answer("a", HolderAnswer(OTHER, "x:1", 0, HELD_BY_1, WHOLE))
    watch.record_answer("a", HolderAnswer(HEIR, AT, 0, HELD, WHOLE))
    watch.record_silence("a", OTHER)
    assert told == [((), 0), (("x:1",), 0), ((AT, "x:1"), 0), ((AT,), 0)]


def test_servers_themselves_matter_only_while_their_number_changes() -> None:
    watch, told = watched()
    watch.record_answer("a", HolderAnswer(0, AT, 0, HELD, WHOLE))
    watch.change_layout(MORE)
    watch.record_answer("a", HolderAnswer(0, AT, 1, HELD, WHOLE))
    added = find_shards(2, lay_out(MORE, 1))
    watch.record_answer("a", HolderAnswer(2, "new:1", 1, added[:-1], WHOLE))
    watch.record_answer("a", HolderAnswer(2, "new:1", 1, added[-1:], WHOLE))
    watch.change_layout(TWO)
    watch.change_layout(replace(MORE, number=2, count=3))
    watch.record_answer("a", HolderAnswer(2, "new:1", 2, added, WHOLE))
    assert told == [((), 0), ((), 1), ((AT,), 1), (("new:1", AT), 1), ((), 2)]


def test_what_was_whole_in_one_layout_does_not_count_in_the_next() -> None:
    found = progress()
    found.record_answer("a", HolderAnswer(HEIR, AT, 0, HELD, WHOLE))
    assert found.list_complete() == (AT,)
    found.change_layout(MORE)
    assert found.list_complete() == ()


def test_what_a_server_says_of_an_earlier_layout_does_not_count() -> None:
    watch, told = watched()
    watch.change_layout(MORE)
    watch.change_layout(replace(MORE, number=2))
    added = find_shards(2, lay_out(MORE, 1))
    watch.record_answer("a", HolderAnswer(2, "new:1", 1, added, WHOLE))
    watch.record_answer("a", HolderAnswer(HEIR, AT, 0, HELD, WHOLE))
    watch.record_answer("a", HolderAnswer(2, "new:1", 2, added, WHOLE))
    assert told == [((), 0), ((), 1), ((), 2), (("new:1",), 2)]

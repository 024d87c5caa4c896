"""Which heirs of servers have all rows, by their answers to updates."""

from __future__ import annotations

from holdfast.core.servers.heirs import HeirProgress
from holdfast.core.servers.holdings import ShardStanding
from holdfast.train.script.row_updates import HeirWatch

WHOLE = ShardStanding()
HELD = {0: (1, 2, 3), 1: (4,), 2: ()}
AT = "node0:7"


def progress() -> HeirProgress:
    """Return the progress of two groups, of which the second one's heir of server 0 is whole."""
    made = HeirProgress()
    made.add_group("a", HELD)
    made.add_group("b", HELD)
    made.record_answer("b", 0, AT, (1, 2, 3), WHOLE)
    return made


def test_an_heir_is_complete_with_all_shards_of_all_groups() -> None:
    found = progress()
    found.record_answer("a", 0, AT, (1, 2), WHOLE)
    assert found.list_complete() == ()
    found.record_answer("a", 0, AT, (3,), WHOLE)
    assert found.list_complete() == (AT,)


def test_shards_that_are_behind_past_or_being_copied_are_not_whole() -> None:
    for lacking in (
        ShardStanding(behind=((2, 7),)),
        ShardStanding(past=(2,)),
        ShardStanding(copying=(2,)),
    ):
        found = progress()
        found.record_answer("a", 0, AT, (1, 2, 3), lacking)
        assert found.list_complete() == ()
        found.record_answer("a", 0, AT, (2,), WHOLE)
        assert found.list_complete() == (AT,)
        found.record_answer("a", 0, AT, (2,), lacking)
        assert found.list_complete() == ()


def test_an_heir_that_is_silent_or_starts_again_has_to_prove_itself_again() -> None:
    found = progress()
    found.record_answer("a", 0, AT, (1, 2, 3), WHOLE)
    found.record_silence("b", 0)
    assert found.list_complete() == ()
    found.record_answer("b", 0, "node0:8", (1, 2, 3), WHOLE)
    assert found.list_complete() == (), "the two groups know different processes"
    found.record_answer("a", 0, "node0:8", (1, 2), WHOLE)
    assert found.list_complete() == ()
    found.record_answer("a", 0, "node0:8", (3,), WHOLE)
    assert found.list_complete() == ("node0:8",)


def test_heirs_of_several_servers_are_told_once_and_when_they_change() -> None:
    told: list[tuple[str, ...]] = []
    watch = HeirWatch(told.append)
    watch.add_group("a", HELD)
    watch.record_answer("a", 1, "x:1", (4,), WHOLE)
    watch.record_answer("a", 1, "x:1", (4,), WHOLE)
    watch.record_answer("a", 0, AT, (1, 2, 3), WHOLE)
    watch.record_silence("a", 1)
    assert told == [("x:1",), (AT, "x:1"), (AT,)]

"""The tables of legal moves: every phase can be reached and left, and other moves are refused."""

from __future__ import annotations

import enum
from typing import Any

import pytest

from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.ground.transitions import Transitions
from holdfast.engine.core.replica.replica import SYNC_MOVES, SyncStage
from holdfast.engine.core.step.activities import ACTIVITY_MOVES, Activity

TABLES: list[tuple[Transitions[Any], type[enum.Enum]]] = [
    (ACTIVITY_MOVES, Activity),
    (SYNC_MOVES, SyncStage),
]


@pytest.mark.parametrize(("table", "phases"), TABLES)
def test_every_phase_can_be_reached_and_given_up(
    table: Transitions[Any], phases: type[enum.Enum]
) -> None:
    closed = phases["CLOSED"]
    after: dict[enum.Enum, set[enum.Enum]] = {phase: set() for phase in phases}
    for old, new in table.pairs():
        after[old].add(new)
    assert all(table.check(phase, closed) is closed for phase in phases)
    reached, wave = {closed}, {closed}
    while wave:
        wave = set().union(*(after[phase] for phase in wave)) - reached
        reached |= wave
    assert reached == set(phases)


def test_a_move_that_is_not_in_the_table_is_refused_with_both_phases() -> None:
    with pytest.raises(InvariantError, match="Activity must not go from tasks to vote"):
        ACTIVITY_MOVES.check(Activity.TASKS, Activity.VOTE)
    assert ACTIVITY_MOVES.check(Activity.KEEP, Activity.VOTE) is Activity.VOTE

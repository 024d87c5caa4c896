"""Planted bugs in how the processes of one worker become one member."""

from __future__ import annotations

import pytest

from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.step import shards
from holdfast.engine.core.step.shards import ShardEvents
from holdfast.lab.sim.world import Machines
from mutation_kit import SHARDS, TUNED, mutation


@mutation
def one_process_speaks_for_all(patch: pytest.MonkeyPatch) -> Machines:
    def hear(self: ShardEvents, shard: int, event: ev.WorkerEvent) -> list[ev.WorkerEvent]:
        return [event]

    patch.setattr(ShardEvents, "hear", hear)
    return Machines()


@mutation
def a_broken_group_counts_once_all_have_noticed(patch: pytest.MonkeyPatch) -> Machines:
    others = tuple(kind for kind in shards._AT_ONCE if kind is not ev.GroupBroken)
    patch.setattr(shards, "_AT_ONCE", others)
    return Machines()


@mutation
def what_is_under_way_is_forgotten_with_a_view(patch: pytest.MonkeyPatch) -> Machines:
    def begin(self: ShardEvents, view: int) -> None:
        self._heard.clear()

    patch.setattr(ShardEvents, "begin", begin)
    return Machines()


@mutation
def what_was_half_done_counts_in_the_next_view(patch: pytest.MonkeyPatch) -> Machines:
    plain = shards._key

    def key(event: ev.WorkerEvent) -> object:
        found = plain(event)
        return (found[0], None, *found[2:]) if isinstance(found, tuple) else found

    patch.setattr(shards, "_key", key)
    return Machines()


for name in (
    "one_process_speaks_for_all",
    "what_is_under_way_is_forgotten_with_a_view",
    "what_was_half_done_counts_in_the_next_view",
):
    TUNED[name] = SHARDS
TUNED["a_broken_group_counts_once_all_have_noticed"] = SHARDS | {
    "procs": 2,
    "faults": ("link_break", "data_partition"),
    "fault_every_s": 1.0,
    "hang_s": 60.0,
}

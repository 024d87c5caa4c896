"""Planted bugs within an exchange: levels of a sum, pieces, and turns of a gather."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.engine.core.spread_turns import Turn, plan_turns
from holdfast.engine.core.sum_plan import Level, SumPlan, SumPlans
from holdfast.lab.sim import data_network, turns
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.groups import Group, TurnOf, What
from holdfast.lab.sim.seams import Actor
from holdfast.lab.sim.turns import LevelSum, TurnedGather, Turns
from holdfast.lab.sim.world import Machines
from mutation_kit import mutation


def change_plans(patch: pytest.MonkeyPatch, **changed: Any) -> Machines:
    """Replace fields of each plan of a sum: by name, a function of the plan."""
    plain = SumPlans.of

    def of(self: SumPlans, rank: int) -> SumPlan:
        plan = plain(self, rank)
        return dataclasses.replace(plan, **{name: make(plan) for name, make in changed.items()})

    patch.setattr(SumPlans, "of", of)
    return Machines()


@mutation
def a_level_of_a_sum_is_skipped(patch: pytest.MonkeyPatch) -> Machines:
    return change_plans(patch, up=lambda plan: plan.up[:-1])


@mutation
def a_level_on_the_way_down_is_skipped(patch: pytest.MonkeyPatch) -> Machines:
    return change_plans(patch, down=lambda plan: plan.down[:-1])


@mutation
def an_owner_forgets_its_piece(patch: pytest.MonkeyPatch) -> Machines:
    return change_plans(patch, own=lambda plan: None if plan.up else plan.own)


@mutation
def the_operands_of_an_addition_are_exchanged(patch: pytest.MonkeyPatch) -> Machines:
    def turn_round(level: Level) -> Level:
        additions = (
            dataclasses.replace(each, left=each.right, right=each.left) for each in level.additions
        )
        return dataclasses.replace(level, additions=tuple(additions))

    return change_plans(patch, up=lambda plan: tuple(map(turn_round, plan.up)))


@mutation
def a_piece_of_an_older_view_is_taken(patch: pytest.MonkeyPatch) -> Machines:
    plain = turns.handle_turn

    def handle(process: Actor, number: int, name: TurnOf, sender: Key, body: object) -> None:
        present = process.tie.group.number if process.tie.group is not None else number
        plain(process, present, name, sender, body)

    patch.setattr(turns, "handle_turn", handle)
    patch.setattr(data_network, "handle_turn", handle)
    return Machines()


@mutation
def a_piece_of_an_older_step_is_taken(patch: pytest.MonkeyPatch) -> Machines:
    plain = Turns.start_sum

    def start_sum(self: Turns, process: Actor, group: Group, what: What, *of: Any) -> LevelSum:
        return plain(self, process, group, (what[0], 0), *of)  # type: ignore[arg-type]

    patch.setattr(Turns, "start_sum", start_sum)
    patch.setattr(Group, "is_over", lambda self, kind, number: False)
    return Machines()


@mutation
def a_gather_ends_one_turn_early(patch: pytest.MonkeyPatch) -> Machines:
    def plan(rank: int, size: int) -> tuple[Turn, ...]:
        return plan_turns(rank, size)[:-1]

    patch.setattr(turns, "plan_turns", plan)
    return Machines()


@mutation
def a_member_gets_records_from_the_wrong_side(patch: pytest.MonkeyPatch) -> Machines:
    def plan(rank: int, size: int) -> tuple[Turn, ...]:
        return tuple(
            turn._replace(give_to=turn.get_from, get_from=turn.give_to)
            for turn in plan_turns(rank, size)
        )

    patch.setattr(turns, "plan_turns", plan)
    return Machines()


@mutation
def missing_votes_are_taken_for_granted(patch: pytest.MonkeyPatch) -> Machines:
    plain_init, plain_finish = TurnedGather.__init__, TurnedGather._finish

    def begin(self: TurnedGather, *args: Any) -> None:
        plain_init(self, *args)
        self._last -= self._what[0] == "vote" and self._last > 0

    def finish(self: TurnedGather) -> None:
        if self._what[0] != "vote":
            plain_finish(self)
            return
        records, process = self._records, self._process
        every = {key: records.get(key, records[process.key]) for key in self._group.keys}
        self._group.heard[self._what] = every
        process.receive(self._what)

    patch.setattr(TurnedGather, "__init__", begin)
    patch.setattr(TurnedGather, "_finish", finish)
    return Machines()

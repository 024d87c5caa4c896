"""Planted bugs in the nodes' memory: the pieces kept, those that count, and recalling."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import pytest

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import SinkKind
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.ground.vote import Tally
from holdfast.engine.core.membership import next_view, protection, view_end
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.handover import Handover
from holdfast.engine.core.membership.protection import Protection
from holdfast.engine.core.redundancy import KeptPieces, Piece, Recall
from holdfast.engine.core.replica import replicating
from holdfast.engine.core.replica.replicating import Replicating
from holdfast.engine.core.replica.saves import Saves
from holdfast.engine.core.step.judging import Judgement
from holdfast.engine.core.step.step_machine import StepMachine
from holdfast.engine.core.step.verdicts import Decided
from holdfast.engine.core.types import AgentId
from holdfast.engine.core.worker.machine import WorkerMachine
from holdfast.lab.sim import memories
from holdfast.lab.sim.world import Machines
from mutation_kit import MEMORY, SPREAD, TUNED, mutation


@mutation
def nothing_is_recalled(patch: pytest.MonkeyPatch) -> Machines:
    def recall(self: Protection, facts: Any, durable: Any) -> Recall:
        return Recall(base=durable.step, view=0, sources=())

    patch.setattr(Protection, "recall", recall)
    return Machines()


@mutation
def gradients_are_not_recalled(patch: pytest.MonkeyPatch) -> Machines:
    plain = Protection.recall

    def recall(self: Protection, facts: Any, durable: Any) -> Recall | None:
        found = plain(self, facts, durable)
        return None if found is None else dataclasses.replace(found, sources=())

    patch.setattr(Protection, "recall", recall)
    return Machines()


@mutation
def a_part_with_too_few_pieces_counts(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(protection, "_complete", lambda kept, needed, shards: bool(kept))
    return Machines()


@mutation
def what_nobody_has_committed_is_recalled(patch: pytest.MonkeyPatch) -> Machines:
    plain = protection.find_recall

    def find(kept: Sequence[KeptPieces], *rest: Any) -> Recall:
        return plain([dataclasses.replace(k, committed=1 << 30) for k in kept], *rest)

    patch.setattr(protection, "find_recall", find)
    return Machines()


@mutation
def it_votes_before_its_pieces_are_in_memory(patch: pytest.MonkeyPatch) -> Machines:
    plain = StepMachine._carry_out

    def carry_out(self: StepMachine, judgement: Judgement) -> None:
        plain(self, judgement)
        effects = self._standing.take_effects()
        kept = [e for e in effects if isinstance(e, ef.KeepStep) and e.sink is SinkKind.MEMORY]
        self._standing.order(*(e for e in effects if e not in kept))
        if kept:
            self.handle_kept_gradient(self.course.step, full=False)
        self._standing.order(*kept)

    patch.setattr(StepMachine, "_carry_out", carry_out)
    return Machines()


@mutation
def both_pieces_are_kept_on_one_node(patch: pytest.MonkeyPatch) -> Machines:
    plain = replicating.pieces_of

    def pieces(view: Any, worker: Any, redundancy: Any, *_: int) -> tuple[Piece, ...]:
        place = {agent: i for i, agent in enumerate(view.ring)}
        agent = view.member(worker).agent
        mine = plain(view, worker, redundancy)
        every = range(redundancy.pieces)
        parts = {p.part for p in mine if p.number == 0 and place[agent] == p.part}
        return tuple(Piece(part, number) for part in parts for number in every)

    patch.setattr(memories, "pieces_of", pieces)
    return Machines()


@mutation
def a_state_counts_before_all_have_put_it_there(patch: pytest.MonkeyPatch) -> Machines:
    plain = Replicating.record_votes

    def voted(self: Replicating, step: int, tally: Tally, now: float) -> Any:
        staged = (max(tally.staged),) * len(tally.staged)
        plain(self, step, dataclasses.replace(tally, staged=staged), now)

    patch.setattr(Replicating, "record_votes", voted)
    return Machines()


@mutation
def what_is_older_goes_at_once(patch: pytest.MonkeyPatch) -> Machines:
    plain = Replicating.next_copy

    def at_boundary(self: Replicating, step: int, now: float) -> Any:
        found = plain(self, step, now)
        if found and self._view is not None:
            found = [*found, ef.Forget(SinkKind.MEMORY, self._view.number, step)]
        return found

    patch.setattr(Replicating, "next_copy", at_boundary)
    return Machines()


@mutation
def older_pieces_go_before_the_commit_is_marked(patch: pytest.MonkeyPatch) -> Machines:
    class Hasty(WorkerMachine):
        def _commit_step(self, vote: Decided) -> None:
            self._standing.carry(self._replica.replicating.forget_older())
            super()._commit_step(vote)

    return Machines(worker=Hasty)


@mutation
def commits_are_not_marked(patch: pytest.MonkeyPatch) -> Machines:
    class Silent(WorkerMachine):
        def handle(self, event: Any, now: float) -> Any:
            found = super().handle(event, now)
            return [each for each in found if not isinstance(each, ef.MarkCommitted)]

    return Machines(worker=Silent)


# ---------------------------------------------------------------- nodes that leave


@mutation
def a_node_that_leaves_takes_needed_pieces_along(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Handover, "_find_needed", lambda self, *_: ())
    return Machines()


@mutation
def who_leaves_waits_only_until_a_view_is_formed_without_it(
    patch: pytest.MonkeyPatch,
) -> Machines:
    plain = Handover._find_needed

    def find(self: Handover, facts: Facts, *rest: Any) -> tuple[AgentId, ...]:
        ring = facts.view.ring if facts.view is not None else ()
        return tuple(name for name in plain(self, facts, *rest) if name in ring)

    patch.setattr(Handover, "_find_needed", find)
    return Machines()


@mutation
def the_last_workers_end_before_their_state_is_saved(patch: pytest.MonkeyPatch) -> Machines:
    for module in (next_view, view_end):
        patch.setattr(module, "awaits_last_save", lambda facts, policy: False)
    return Machines()


@mutation
def a_view_ends_at_a_boundary_that_is_not_saved(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Saves, "has_ended", lambda self, view: False)
    patch.setattr(Standing, "ends_saved", False)
    return Machines()


LEAVES = SPREAD | {"faults": ("leave",)}
TUNED["a_node_that_leaves_takes_needed_pieces_along"] = MEMORY | {"faults": ("leave",)}
TUNED["who_leaves_waits_only_until_a_view_is_formed_without_it"] = LEAVES | {"pieces": (1, 0)}
STORE_ONLY = {"shard_optimizer": True, "pieces": (0, 0), "save_every": 3, "faults": ("leave",)}
TUNED["the_last_workers_end_before_their_state_is_saved"] = STORE_ONLY
TUNED["a_view_ends_at_a_boundary_that_is_not_saved"] = STORE_ONLY

"""Planted bugs in how workers are spread over several nodes."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.engine.core.membership import restart, teams
from holdfast.engine.core.membership.agent import AgentMachine
from holdfast.engine.core.membership.protection import Protection
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.core.replica import replicating
from holdfast.engine.core.step.shards import FollowerProofs
from holdfast.lab.sim import memories
from holdfast.lab.sim.world import Machines
from mutation_kit import SPREAD, TUNED, mutation


@mutation
def the_loss_of_a_further_node_is_not_noticed(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(restart, "_reason_of_loss_elsewhere", lambda *_: None)
    return Machines()


@mutation
def a_team_changes_while_its_worker_acts(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(teams, "_acts", lambda facts, team: False)
    return Machines()


@mutation
def a_lost_node_keeps_its_place(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(teams, "_is_lost", lambda facts, name: False)
    return Machines()


@mutation
def one_shard_stands_for_all(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(CoordinatorPolicy, "shards_told", 1)
    return Machines()


@mutation
def all_pieces_of_a_shard_are_kept_where_it_is(patch: pytest.MonkeyPatch) -> Machines:
    plain = replicating.pieces_of

    def pieces(view: Any, worker: Any, redundancy: Any, shard: int = 0, place: int = 0) -> Any:
        me = view.member(worker)
        here = me is not None and me.holder(shard) == me.nodes[place]
        every = [plain(view, worker, redundancy, shard, each) for each in range(len(me.nodes))]
        return tuple(piece for those in every for piece in those) if here else ()

    patch.setattr(memories, "pieces_of", pieces)
    return Machines()


@mutation
def silent_nodes_that_hold_pieces_are_not_waited_for(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(Protection, "_bridges", lambda self, facts, durable: True)
    patch.setattr(Protection, "awaits", lambda self, facts, durable: False)
    plain = Protection.recall

    def recall(self: Protection, facts: Any, durable: Any) -> Any:
        every = dataclasses.replace(facts, lease=dataclasses.replace(facts.lease, abandon_s=0))
        return plain(self, every, durable)

    patch.setattr(Protection, "recall", recall)
    return Machines()


@mutation
def a_follower_takes_any_commit_for_a_proof(patch: pytest.MonkeyPatch) -> Machines:
    plain = FollowerProofs.record_commit
    patch.setattr(
        FollowerProofs, "record_commit", lambda self, now, voted: plain(self, now, voted=True)
    )
    return Machines()


@mutation
def one_node_of_a_worker_takes_it_for_all_of_it(patch: pytest.MonkeyPatch) -> Machines:
    class Alone(AgentMachine):
        def _is_alone(self) -> bool:
            plain = self._directive
            if plain is not None and plain.view is not None:
                members = (dataclasses.replace(m, further=()) for m in plain.view.members)
                view = dataclasses.replace(plain.view, members=tuple(members))
                self._directive = dataclasses.replace(plain, view=view)
            try:
                return super()._is_alone()
            finally:
                self._directive = plain

    return Machines(agent=Alone)


@mutation
def the_proof_of_a_follower_is_dated_by_the_vote(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(FollowerProofs, "record_commit", lambda self, now, voted: now if voted else None)
    return Machines()


TUNED["the_loss_of_a_further_node_is_not_noticed"] = SPREAD | {
    "faults": ("agent_crash",),
    "faults_end_s": 6.0,
    "unheard_break": 1.0,
}
TUNED["a_team_changes_while_its_worker_acts"] = SPREAD | {  # all of its nodes are cut off
    "faults": ("rack_partition",),
    "procs": 2,
    "spread": 2,
    "nodes_min": 2,
    "nodes_max": 2,
}
TEAMS = SPREAD | {
    "procs": 2,
    "spread": 2,
    "nodes_min": 2,
    "nodes_max": 4,
    "shard_lag_s": 0.1,
}
TUNED["a_follower_takes_any_commit_for_a_proof"] = SPREAD | {"faults": ("all_lost",)}
TUNED["the_proof_of_a_follower_is_dated_by_the_vote"] = TEAMS | {
    "faults": ("worker_crash", "link_break"),
    "fault_every_s": 0.3,
}
TUNED["one_node_of_a_worker_takes_it_for_all_of_it"] = SPREAD | {"faults": ("isolation",)}
TUNED["a_lost_node_keeps_its_place"] = SPREAD | {
    "agents": 8,  # enough of them are left
    "faults": ("agent_lost", "worker_crash"),
}
TUNED["one_shard_stands_for_all"] = SPREAD | {  # the job tries for long to recall what is missing
    "faults": ("all_lost",),
    "abandon_s": 1000.0,
}
TUNED["all_pieces_of_a_shard_are_kept_where_it_is"] = SPREAD | {"faults": ("agent_crash",)}
TUNED["silent_nodes_that_hold_pieces_are_not_waited_for"] = SPREAD | {
    "faults": ("partition",),
    "pieces": (1, 0),
}

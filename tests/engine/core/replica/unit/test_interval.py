"""How often a job saves: the interval against a model of losses, and against measurements."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import pytest

from holdfast.engine.core.policies import WORKER_MTBF_S, PacePolicy, ReplicationPolicy
from holdfast.engine.core.redundancy import Redundancy
from holdfast.engine.core.replica.intervals import (
    OUTAGE_MTBF_S,
    REPLICATE_MOST,
    Exposure,
    Pace,
    best_interval_s,
    best_steps,
    chance_of_losing_pieces,
)
from holdfast.engine.core.types import AgentId, Incarnation, WorkerId
from holdfast.engine.core.views import View
from machine_kit import a_view


def expected_s(work_s: float, interval_s: float, cost_s: float, mtbf_s: float) -> float:
    """Return the time of `work_s` by Daly's exact equation: exponential losses, free restart."""
    return mtbf_s * math.expm1((interval_s + cost_s) / mtbf_s) * work_s / interval_s


@pytest.mark.parametrize("cost_s", [0.01, 1.0, 60.0])
@pytest.mark.parametrize("mtbf_s", [600.0, 10_000.0, 1e6])
def test_no_other_interval_is_much_better(cost_s: float, mtbf_s: float) -> None:
    ours = expected_s(1.0, best_interval_s(cost_s, mtbf_s), cost_s, mtbf_s)
    tried = (best_interval_s(cost_s, mtbf_s) * 1.1**i for i in range(-40, 41))
    assert ours <= 1.001 * min(expected_s(1.0, t, cost_s, mtbf_s) for t in tried)


def test_a_save_that_costs_more_than_losses_come_apart_is_made_once_for_each() -> None:
    assert best_interval_s(100.0, 30.0) == 30.0


def on_nodes(nodes: str, *, ring: bool = False) -> View:
    """Return a view of one worker on each of these nodes, whose memory may hold pieces."""
    view = a_view(1, range(len(nodes)))
    named = zip(view.members, nodes, strict=True)
    members = tuple(dataclasses.replace(each, agent=AgentId(node)) for each, node in named)
    agents = tuple(sorted({each.agent for each in members}))
    return dataclasses.replace(view, members=members, ring=agents if ring else ())


def exposed(nodes: str, *, ring: bool = False, **policy: Any) -> Exposure:
    found = Exposure(ReplicationPolicy(**policy))
    found.enter(on_nodes(nodes, ring=ring))
    return found


def pace(nodes: str = "aa", least_s: float = 1.0, most_s: float = 1e9) -> Pace:
    return Pace(PacePolicy(least_s, most_s), exposed(nodes), 0.0)


def run(
    found: Pace | Exposure, now: float, steps: int, step_s: float, *, busy: bool = False
) -> float:
    for _ in range(steps):
        now += step_s
        if isinstance(found, Pace):
            found.record_step(now, busy=busy)
        else:
            found.record_step(now)
    return now


# ---------------------------------------------------------------- saves


def test_the_cost_is_the_stall_and_what_steps_take_longer() -> None:
    found = pace()
    now = run(found, 0.0, 20, 1.0)
    found.record_save(now + 0.5, stall_s=0.5)
    now = run(found, now + 0.5, 4, 1.25, busy=True)
    run(found, now, 1, 1.0)
    lost_s = exposed("aa").return_mtbf_s
    assert found.interval_s == pytest.approx(best_interval_s(1.5, lost_s))
    assert "a save costs 1.5 s, one of 2 workers is lost every 9.12e+07 s, and the" in str(found)


def test_the_operators_bounds_hold_and_the_first_save_measures_the_cost() -> None:
    found = pace("a", least_s=5.0, most_s=9.0)
    assert not found.is_due(4.9)
    assert found.is_due(5.0)  # the cost is not known yet
    run(found, 0.0, 5, 1.0)
    found.record_save(5.0, stall_s=2.0)
    run(found, 5.0, 2, 0.1)
    assert found.interval_s == 9.0
    assert not found.is_due(13.9)
    assert found.is_due(14.0)


# ---------------------------------------------------------------- losses


def test_losses_count_and_joiners_do_not() -> None:
    found, view = Exposure(), on_nodes("ab")
    found.enter(view)
    now = run(found, 0.0, 11, 1.0)
    assert found.loss_mtbf_s == pytest.approx((WORKER_MTBF_S + 20.0) / 2)
    again = dataclasses.replace(view.members[1], incarnation=Incarnation(2))
    found.enter(dataclasses.replace(view, members=(view.members[0], again)))
    run(found, now, 10, 1.0)
    assert found.loss_mtbf_s == pytest.approx((WORKER_MTBF_S + 40.0) / 2 / 2)
    more = dataclasses.replace(view.members[1], worker=WorkerId(2))
    found.enter(dataclasses.replace(view, members=(view.members[0], again, more)))
    assert found.loss_mtbf_s == pytest.approx((WORKER_MTBF_S + 40.0) / 2 / 3)


def test_a_checkpoint_is_needed_only_where_no_other_node_holds_the_state() -> None:
    outage = pytest.approx(OUTAGE_MTBF_S)
    every_loss = pytest.approx(1 / (1 / (WORKER_MTBF_S / 2) + 1 / OUTAGE_MTBF_S))
    assert exposed("ab").return_mtbf_s == outage
    assert exposed("aa").return_mtbf_s == every_loss
    assert exposed("ab", is_sharded=True).return_mtbf_s == every_loss
    one, lone = on_nodes("a"), Exposure()
    spread = dataclasses.replace(one.members[0], further=(AgentId("b"),))
    lone.enter(dataclasses.replace(one, members=(spread,)))
    assert lone.return_mtbf_s == pytest.approx(1 / (1 / WORKER_MTBF_S + 1 / OUTAGE_MTBF_S))
    twice = {"is_sharded": True, "redundancy": Redundancy(data=1, parity=1), "every": 10}
    assert exposed("ab", **twice).return_mtbf_s == every_loss  # the nodes hold no pieces yet
    kept = exposed("ab", ring=True, **twice)
    run(kept, 0.0, 9, 1.0)
    assert kept.return_mtbf_s == outage


def test_pieces_are_lost_with_their_last_copy() -> None:
    def chance(redundancy: Redundancy, nodes: int, window_s: float = 10.0) -> float:
        return chance_of_losing_pieces(redundancy, nodes, loss_rate=0.01, window_s=window_s)

    assert chance(Redundancy(), 4) == 1.0
    assert chance(Redundancy(data=1, parity=1), 1) == 1.0
    # The other copy is on one of three nodes.
    assert chance(Redundancy(data=1, parity=1), 4) == pytest.approx(1 - math.exp(-0.1 / 3))
    # All five other holders may fail; with two pieces to spare, one further loss is borne.
    assert chance(Redundancy(data=4, parity=2), 6) == pytest.approx(1 - math.exp(-0.1) * 1.1)
    assert chance(Redundancy(data=4, parity=2), 6, window_s=0.0) == 0.0


# ---------------------------------------------------------------- states in memory


@pytest.mark.parametrize("cost_s", [0.01, 0.5])
@pytest.mark.parametrize("mtbf_s", [1_000.0, 30_000.0])
def test_no_other_number_of_steps_costs_less(cost_s: float, mtbf_s: float) -> None:
    def lost(steps: int) -> float:
        return cost_s / (steps * step_s) + steps * apply_s / 2 / mtbf_s

    step_s, apply_s = 0.5, 0.2
    ours = best_steps(cost_s, apply_s=apply_s, step_s=step_s, mtbf_s=mtbf_s)
    assert lost(ours) <= 1.01 * min(map(lost, range(1, REPLICATE_MOST + 1)))


def test_logged_gradients_are_bounded() -> None:
    assert best_steps(10.0, apply_s=0.01, step_s=1.0, mtbf_s=1e9) == REPLICATE_MOST
    assert best_steps(10.0, apply_s=0.0, step_s=1.0, mtbf_s=100.0) == REPLICATE_MOST
    assert best_steps(1e-6, apply_s=0.9, step_s=1.0, mtbf_s=10.0) == 1

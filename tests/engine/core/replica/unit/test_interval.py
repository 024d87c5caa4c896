"""How often a job saves: the interval against a model of losses, and against measurements."""

from __future__ import annotations

import math

import pytest

from holdfast.engine.core.policies import PacePolicy
from holdfast.engine.core.replica.saves import WORKER_MTBF_S, Pace, best_interval_s


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


def pace(least_s: float = 1.0, most_s: float = 1e9) -> Pace:
    return Pace(PacePolicy(least_s, most_s), 0.0)


def run(found: Pace, now: float, steps: int, step_s: float, busy: bool = False) -> float:
    for _ in range(steps):
        now += step_s
        found.record_step(now, busy)
    return now


def test_the_cost_is_the_stall_and_what_steps_take_longer() -> None:
    found = pace()
    found.record_members({"a", "b"})
    now = run(found, 0.0, 20, 1.0)
    found.record_save(now + 0.5, stall_s=0.5)
    now = run(found, now + 0.5, 4, 1.25, busy=True)
    run(found, now, 1, 1.0)
    assert found.interval_s == pytest.approx(best_interval_s(1.5, found.mtbf_s))
    assert "a save costs 1.5 s, and one of 2 workers" in str(found)


def test_losses_shorten_the_interval_and_joiners_do_not() -> None:
    found = pace()
    found.record_members({("w", 1), ("v", 1)})
    now = run(found, 0.0, 10, 1.0)
    assert found.mtbf_s == pytest.approx((WORKER_MTBF_S + 20.0) / 2)
    found.record_members({("w", 1), ("v", 2)})
    run(found, now, 10, 1.0)
    assert found.mtbf_s == pytest.approx((WORKER_MTBF_S + 40.0) / 2 / 2)
    found.record_members({("w", 1), ("v", 2), ("x", 1)})
    assert found.mtbf_s == pytest.approx((WORKER_MTBF_S + 40.0) / 2 / 3)


def test_the_operators_bounds_hold_and_the_first_save_measures_the_cost() -> None:
    found = pace(least_s=5.0, most_s=9.0)
    found.record_members({"a"})
    assert not found.is_due(4.9)
    assert found.is_due(5.0)  # nothing is known of the cost yet
    found.record_save(5.0, stall_s=2.0)
    run(found, 5.0, 2, 0.1)
    assert found.interval_s == 9.0
    assert not found.is_due(13.9)
    assert found.is_due(14.0)

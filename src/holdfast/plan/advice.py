"""Chooses the settings of a job by their use and their cost.

All combinations of a few values of each setting are compared by the closed form. Intervals follow
from the formulas that a running job uses with measured rates. The best choices are then played over
weeks, with the same failures for each.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.membership.reserve import spares_needed
from holdfast.engine.core.policies import PacePolicy
from holdfast.engine.core.redundancy import Redundancy
from holdfast.engine.core.replica.intervals import best_interval_s, best_steps
from holdfast.plan.failing_job import make_recovery
from holdfast.plan.failure_tables import DAY_S, Effect
from holdfast.plan.machines import Found, Trial, assume_recovery, run_trial
from holdfast.plan.recovery import Loss, Outlook, Standstill, predict
from holdfast.plan.scenario import Choice, Point, Scenario, scale_rate
from holdfast.plan.weeks import Ageing, simulate, spread_of

TASKS = (1, 2, 4, 8, 16)
LEASES_S = (1.0, 2.5, 5.0, 10.0, 20.0, 30.0)
REDUNDANCIES = (
    Redundancy(),
    Redundancy(data=1, parity=1),
    Redundancy(data=1, parity=2),
    Redundancy(data=4, parity=1),
    Redundancy(data=4, parity=2),
    Redundancy(data=8, parity=2),
    Redundancy(data=8, parity=3),
)
#: Spares may have to suffice for these shares of the time. Each share gives a number to compare.
ENOUGH = (0.5, 0.8, 0.9, 0.99, 0.999, 0.9999)
#: A choice that is simpler is as good if it is worse by no more than this share of the time.
AS_GOOD = 0.0005
NEXT = 3
PLAYS = 8
SPAN_S = 28 * DAY_S
#: Failures after which a play ends early.
PLAYED_MOST = 3000
FACTORS = (2.0, 0.5, 5.0, 0.2, 10.0, 0.1)
#: Of the job that the real machines run, which takes some 10 seconds.
NODES_MOST = 6
FAILURES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Rated:
    """Rates a choice by the time that it is expected to leave."""

    choice: Choice
    outlook: Outlook
    #: Useful share of the time of all nodes, spares included.
    useful: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Played:
    """Is a choice whose weeks were played: the mean of `useful`, and bounds of that mean."""

    rated: Rated
    useful: float
    low: float
    high: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Change:
    """Is a change of an input with which another choice would be the best one."""

    input: str
    factor: float
    choice: Choice


@dataclass(frozen=True, slots=True, kw_only=True)
class Advice:
    """Is the result of a plan. Choices are in the order of their use, best first."""

    scenario: Scenario
    best: Played
    others: tuple[Played, ...]
    #: The best choice, with all intervals at their best and at their worst ends.
    at_best: Rated
    at_worst: Rated
    changes: tuple[Change, ...]
    #: The best choice on the real machines, and the closed form for the same job.
    found: Found | None
    assumed: Outlook | None


def rate_choice(scenario: Scenario, choice: Choice, point: Point = Point.MIDDLE) -> Rated:
    """Predict the time of a job under a choice."""
    outlook = predict(make_recovery(scenario, choice, point))
    return Rated(choice=choice, outlook=outlook, useful=outlook.ettr * scenario.efficiency(choice))


def list_choices(scenario: Scenario) -> Iterator[Choice]:
    """Yield the choices to compare, each with its best intervals."""
    one = scenario.count_workers(Choice()) == 1
    only_pieces = scenario.work.shard_optimizer or one
    kinds = REDUNDANCIES if only_pieces else REDUNDANCIES[:1]
    for spare_nodes, tasks, redundancy in itertools.product(list_spares(scenario), TASKS, kinds):
        can_be_hot = spare_nodes > 0 and not only_pieces and not scenario.is_spread
        for hot in (False, True) if can_be_hot else (False,):
            choice = Choice(tasks=tasks, spare_nodes=spare_nodes, hot=hot, redundancy=redundancy)
            if is_possible(scenario, choice):
                yield choose_intervals(scenario, choice)


def list_spares(scenario: Scenario) -> list[int]:
    """Return the numbers of spare nodes to compare."""
    recovery = make_recovery(scenario, Choice())
    mean = recovery.mean_missing() / scenario.units_per_node
    most = scenario.cluster.nodes // 2
    found = {0, 1, 2, 4}.union(spares_needed(mean, enough) for enough in ENOUGH)
    return sorted(number for number in found if number <= most)


def is_possible(scenario: Scenario, choice: Choice) -> bool:
    """Return whether enough nodes train, their memory is large enough, and pieces are of use."""
    if scenario.count_workers(choice) < 1:
        return False
    nodes = scenario.working_nodes(choice)
    if choice.redundancy.data and nodes < 2:
        return False
    if choice.redundancy.pieces > nodes:
        return False
    return scenario.memory_bytes(choice) <= scenario.cluster.memory_bytes


def choose_intervals(scenario: Scenario, choice: Choice) -> Choice:
    """Return the choice with its best lease and intervals of saves and copies."""
    found = dataclasses.replace(choice, protect_every=_protect_every(scenario, choice))
    found = dataclasses.replace(found, save_every_s=_save_every_s(scenario, found))
    leases = [dataclasses.replace(found, lease_s=lease_s) for lease_s in LEASES_S]
    return max(leases, key=lambda each: rate_choice(scenario, each).useful)


def _protect_every(scenario: Scenario, choice: Choice) -> int:
    if not choice.redundancy.data:
        return 1
    rates = make_recovery(scenario, choice).rates
    rate = sum(rates.get(e, 0.0) for e in (Effect.PROCESS, Effect.HANG, Effect.NODE))
    step_s = scenario.step_s(choice)
    apply_s = scenario.work.replay_share * step_s if rate else 0.0
    return best_steps(
        scenario.copy_s(choice), apply_s=apply_s, step_s=step_s, mtbf_s=1 / rate if rate else 0.0
    )


def _save_every_s(scenario: Scenario, choice: Choice) -> float:
    if not scenario.cluster.store_bytes_per_s:
        return math.inf
    bounds = PacePolicy()
    rate = make_recovery(scenario, choice).return_rate
    best_s = best_interval_s(scenario.copy_s(choice), 1 / rate) if rate else math.inf
    least_s = max(bounds.least_s, scenario.save_s(), scenario.step_s(choice))
    return max(min(best_s, bounds.most_s), least_s)


def _simplicity(choice: Choice) -> tuple[int, ...]:
    """Return a key that is smaller for a choice that asks less of a cluster."""
    return (choice.spare_nodes, choice.redundancy.pieces, choice.hot, choice.tasks)


def _sort(rated: Sequence[Rated]) -> list[Rated]:
    """Put the best choice first. Of choices that are nearly as good the simplest is the best."""
    found = sorted(rated, key=lambda r: -r.useful)
    near = [r for r in found if r.useful >= found[0].useful - AS_GOOD]
    first = min(near, key=lambda r: _simplicity(r.choice))
    return [first, *(r for r in found if r is not first)]


def find_best(scenario: Scenario) -> list[Rated]:
    """Return all possible choices, best first. UserError if there is none."""
    rated = [rate_choice(scenario, choice) for choice in list_choices(scenario)]
    if not rated:
        cluster, work = scenario.cluster, scenario.work
        raise UserError(
            f"{cluster.nodes} nodes of {cluster.gpus_per_node} GPUs are too few for a worker of "
            f"{work.worker_gpus} GPUs: add nodes, or lower --worker-gpus"
        )
    return _sort(rated)


def advise(
    scenario: Scenario, seed: int = 0, plays: int = PLAYS, failures: int = FAILURES
) -> Advice:
    """Compare all choices, play the best ones, and look for inputs that would change the advice.

    `plays`: weeks that are played for each of the best choices. `failures`: played by the real
    machines on the best choice; 0: none.
    """
    rated = find_best(scenario)
    firsts = [rated[0], *_pick_next(rated)]
    played = [play(scenario, each, seed, plays) for each in firsts]
    best = max(played, key=lambda p: p.useful)
    if best.useful <= played[0].useful + AS_GOOD:
        best = played[0]
    found, assumed = try_machines(scenario, best.rated.choice, failures, seed)
    return Advice(
        scenario=scenario,
        found=found,
        assumed=assumed,
        best=best,
        others=tuple(sorted((p for p in played if p is not best), key=lambda p: -p.useful)),
        at_best=rate_choice(scenario, best.rated.choice, Point.BEST),
        at_worst=rate_choice(scenario, best.rated.choice, Point.WORST),
        changes=tuple(find_changes(scenario, best.rated.choice)),
    )


def _pick_next(rated: Sequence[Rated]) -> list[Rated]:
    """Return the best choice of each further kind: other spares, tasks or redundancy."""
    first = rated[0].choice
    found: list[Rated] = []
    for name in ("spare_nodes", "tasks", "redundancy", "hot"):
        mine = getattr(first, name)
        other = next((r for r in rated[1:] if getattr(r.choice, name) != mine), None)
        if other is not None and other not in found:
            found.append(other)
    return sorted(found, key=lambda r: -r.useful)[:NEXT]


def play(scenario: Scenario, rated: Rated, seed: int, plays: int) -> Played:
    """Play weeks of a choice, each with a seed of its own."""
    recovery = make_recovery(scenario, rated.choice)
    model = scenario.model
    ageing = None
    if model.shape != 1.0 or model.lemons is not None:
        nodes = scenario.working_nodes(rated.choice)
        ageing = Ageing(nodes=nodes, shape=model.shape, is_new=model.is_new, lemons=model.lemons)
    span_s = min(SPAN_S, PLAYED_MOST / max(recovery.rate, 1e-12))
    outlooks = [
        simulate(recovery, span_s, Random(f"{seed} {number}"), ageing) for number in range(plays)
    ]
    efficiency = scenario.efficiency(rated.choice)
    mean, low, high = (efficiency * value for value in spread_of(outlooks))
    return Played(rated=rated, useful=mean, low=low, high=high)


def try_machines(
    scenario: Scenario, choice: Choice, failures: int, seed: int
) -> tuple[Found | None, Outlook | None]:
    """Play failures on the real machines, and predict the same job in closed form.

    The job has the failures, times and tasks of the choice, on NODES_MOST nodes at most.
    """
    if not failures:
        return None, None
    recovery = make_recovery(scenario, choice)
    if recovery.rate == 0:
        return None, None
    pause = recovery.pauses.get(Effect.NODE, Standstill())
    processes = recovery.rates.get(Effect.PROCESS, 0.0) + recovery.rates.get(Effect.HANG, 0.0)
    trial = Trial(
        nodes=min(scenario.count_workers(choice), NODES_MOST),
        spare_nodes=min(recovery.spares, 1),
        tasks=choice.tasks,
        step_s=scenario.step_s(choice),
        opening_s=pause.opening_s,
        start_s=Point.MIDDLE.of(scenario.costs.start_s),
        load_s=scenario.feed_s(),
        lease_s=choice.lease_s,
        replace_s=recovery.back_s.get(Effect.NODE, 0.0),
        mtbf_s=1 / recovery.rate,
        process_share=processes / recovery.rate,
    )
    found = run_trial(trial, failures, seed)
    return found, predict(assume_recovery(trial, found))


def find_changes(scenario: Scenario, best: Choice) -> Iterator[Change]:
    """Yield, for each input, the smallest factor with which another choice is advised."""
    for name in INPUTS:
        for factor in FACTORS:
            other = scale_input(scenario, name, factor)
            if other is None:
                continue
            found = find_best(other)
            same = next((r for r in found if _simplicity(r.choice) == _simplicity(best)), None)
            if same is None or found[0].useful > same.useful + 2 * AS_GOOD:
                yield Change(input=name, factor=factor, choice=found[0].choice)
                break


INPUTS = (
    "failures",
    "time to replace a node",
    "time to open a group",
    "time to start a process",
    "size of the state",
    "step",
)


def scale_input(scenario: Scenario, name: str, factor: float) -> Scenario | None:
    """Return a scenario with one input multiplied by a factor; None if it has no such input."""
    cluster, work, costs = scenario.cluster, scenario.work, scenario.costs
    match name:
        case "failures":
            return scale_rate(scenario, factor)
        case "time to replace a node":
            if cluster.replace_s is None:
                return None
            slower = dataclasses.replace(cluster, replace_s=cluster.replace_s.times(factor))
            return dataclasses.replace(scenario, cluster=slower)
        case "time to open a group":
            opening_s = costs.find_opening_s(cluster.gpus).times(factor)
            return dataclasses.replace(
                scenario, costs=dataclasses.replace(costs, opening_s=opening_s)
            )
        case "time to start a process":
            start_s = costs.start_s.times(factor)
            return dataclasses.replace(scenario, costs=dataclasses.replace(costs, start_s=start_s))
        case "size of the state":
            state_bytes = work.state_bytes * factor
            return dataclasses.replace(
                scenario, work=dataclasses.replace(work, state_bytes=state_bytes)
            )
        case _:
            return dataclasses.replace(
                scenario, work=dataclasses.replace(work, step_s=work.step_s * factor)
            )


def explain_loss(best: Played, other: Played, scenario: Scenario) -> str:
    """Return the main reason why a choice is worse than the best one, in words."""
    better, worse = best.rated, other.rated
    reasons: list[tuple[float, str]] = [
        (worse.outlook.lost[part] - better.outlook.lost[part], part.value) for part in Loss
    ]
    slower = scenario.efficiency(better.choice) - scenario.efficiency(worse.choice)
    spares = scenario.working_nodes(better.choice) - scenario.working_nodes(worse.choice)
    if spares > 0:
        reasons.append((slower, f"{spares} node{'s' * (spares > 1)} held back"))
    else:
        reasons.append((slower, "smaller tasks"))
    amount, reason = max(reasons)
    return f"{reason} (+{amount:.2%} of the time)"

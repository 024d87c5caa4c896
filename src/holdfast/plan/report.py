"""Shows a plan as lines for people and as plain values for scripts."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from typing import Any

from holdfast.plan import closed_forms as forms
from holdfast.plan.advice import Advice, Change, Played, explain_loss
from holdfast.plan.failure_tables import DAY_S, HOUR_S, Effect
from holdfast.plan.scenario import GB, Choice, Point, Scenario

#: Shares of the time below this are not shown.
SHOWN = 0.00005


def list_lines(advice: Advice) -> Iterator[str]:
    """Yield the plan for a person, line by line."""
    scenario, best = advice.scenario, advice.best
    yield from _list_inputs(scenario)
    yield ""
    yield f"advice: {describe(scenario, best.rated.choice)}"
    yield (
        f"useful time: {best.useful:.2%} of all GPUs' time ({best.low:.2%} to {best.high:.2%} over "
        f"the weeks that were played); {advice.at_worst.useful:.2%} to {advice.at_best.useful:.2%} "
        "over the intervals of the inputs"
    )
    yield f"ETTR: {best.rated.outlook.ettr:.2%} of the job's time"
    if scenario.cluster.store_bytes_per_s:
        yield (
            f"    a job that ends and restarts from its checkpoint at each failure: at most "
            f"{_restart_share(scenario):.2%}, if another node is there at once"
        )
    for name, share in _list_losses(scenario, best):
        yield f"    {share:7.2%}  {name}"
    yield from _list_costs(scenario, best)
    if advice.found is not None and advice.assumed is not None:
        found = advice.found
        yield (
            f"the real machines in the simulator: {found.failures} failures on {found.nodes} nodes "
            f"within {_duration(found.span_s)}, {found.events:,} events: ETTR {found.ettr:.2%} "
            f"(closed form: {advice.assumed.ettr:.2%})"
        )
    if advice.others:
        yield ""
        yield "next best:"
    for number, other in enumerate(advice.others, 1):
        yield f"    {number}. {other.useful:.2%}: {describe_difference(scenario, best, other)}"
        yield f"       worse by {explain_loss(best, other, scenario)}"
    yield ""
    if not advice.changes:
        yield "the advice stays the same if any input is ten times larger or smaller"
    for change in advice.changes:
        yield f"{_describe_change(change)}: {describe(scenario, change.choice)}"


def _list_inputs(scenario: Scenario) -> Iterator[str]:
    cluster, work, model = scenario.cluster, scenario.work, scenario.model
    yield (
        f"cluster: {cluster.nodes:,} nodes of {cluster.gpus_per_node} GPUs; job: state of "
        f"{work.state_bytes / GB:,.4g} GB, held by {work.worker_gpus} GPUs together, steps of "
        f"{work.step_s:g} s"
    )
    age = "new nodes" if model.is_new else "nodes of all ages"
    kind = "exponential" if model.shape == 1 else f"Weibull, shape {model.shape:.2g} of a node"
    yield f"failures: {model.rate} of 1,000 node-days, {kind}, {age}; from {model.source}"
    best, worst = (_mtbf_s(scenario, point) for point in (Point.BEST, Point.WORST))
    span = _duration(worst) if worst == best else f"{_duration(worst)} to {_duration(best)}"
    yield f"mean time between failures of the job: {span}"
    if model.lemons is not None:
        yield (
            f"{model.lemons.share:.1%} of the nodes cause {model.lemons.part:.0%} of the failures: "
            "a job that leaves them out fails that much less"
        )
    if model.waves.high:
        yield f"waves: {model.waves} in a day take {model.wave_nodes} nodes each"
    silent = scenario.cluster.nodes * model.per_node_s(cluster.gpus_per_node).middle
    if month := silent * model.share(Effect.SILENT) * 30 * DAY_S:
        yield (
            f"silent errors: {month:.2g} in 30 days; --audit finds machines that compute wrongly "
            "(docs/silent-errors.md)"
        )


def _mtbf_s(scenario: Scenario, point: Point) -> float:
    model, cluster = scenario.model, scenario.cluster
    nodes = cluster.gpus / model.gpus_per_node
    return forms.job_mtbf_s(point.of(model.rate), nodes)


def _restart_share(scenario: Scenario) -> float:
    """Return the useful time of a job that begins again from a checkpoint at each failure."""
    mtbf_s, save_s = _mtbf_s(scenario, Point.MIDDLE), scenario.copy_s(Choice())
    restart_s = scenario.costs.start_s.middle + scenario.save_s()
    best_s = forms.find_best_interval_s(save_s, mtbf_s, restart_s) if mtbf_s < math.inf else DAY_S
    return forms.exact_share(max(best_s, scenario.save_s()), save_s, mtbf_s, restart_s)


def _list_losses(scenario: Scenario, played: Played) -> list[tuple[str, float]]:
    """Return the parts of the lost time of all GPUs, the largest first."""
    choice, efficiency = played.rated.choice, scenario.efficiency(played.rated.choice)
    found = [(part.value, share * efficiency) for part, share in played.rated.outlook.lost.items()]
    idle = 1 - scenario.working_nodes(choice) / scenario.cluster.nodes
    found += [("nodes held back", idle), ("smaller tasks", 1 - idle - efficiency)]
    return sorted(((n, s) for n, s in found if s >= SHOWN), key=lambda pair: -pair[1])


def _list_costs(scenario: Scenario, played: Played) -> Iterator[str]:
    choice, cluster = played.rated.choice, scenario.cluster
    if choice.redundancy.data:
        yield (
            f"redundancy takes {scenario.memory_bytes(choice) / GB:.3g} GB of each node's memory "
            f"and {scenario.network_bytes_per_s(choice) / GB:.3g} GB/s of its network"
        )
    if choice.save_every_s < math.inf:
        yield (
            f"a checkpoint stops training for {scenario.copy_s(choice):.2g} s and is in the store "
            f"after {scenario.save_s():.3g} s"
        )
    if cluster.gpu_hour:
        day = cluster.gpus * 24 * cluster.gpu_hour
        held = cluster.nodes - scenario.working_nodes(choice)
        yield (
            f"a day costs ${day:,.0f}: ${day * (1 - played.useful):,.0f} of it is not useful, and "
            f"nodes held back are ${day * held / cluster.nodes:,.0f}"
        )


def describe(scenario: Scenario, choice: Choice) -> str:
    """Return a choice in words."""
    return "; ".join(_list_settings(scenario, choice))


def _list_settings(scenario: Scenario, choice: Choice) -> list[str]:
    """Return the same number of texts for each choice, one for each setting."""
    workers = scenario.count_workers(choice)
    parts = [f"{workers:,} workers with {choice.tasks} virtual rank{'s' * (choice.tasks > 1)} each"]
    parts.append(_describe_spares(scenario, choice))
    if choice.redundancy.data:
        parts.append(f"redundancy {choice.redundancy} every {choice.protect_every} steps")
    else:
        parts.append("no redundancy in memory")
    if choice.save_every_s < math.inf:
        steps = scenario.steps_between_saves(choice)
        parts.append(f"a checkpoint every {_duration(choice.save_every_s)} ({steps:,} steps)")
    else:
        parts.append("no checkpoints")
    parts.append(f"lease {choice.lease_s:g} s, patience {_duration(scenario.hang_s)}")
    return parts


def _describe_spares(scenario: Scenario, choice: Choice) -> str:
    held = scenario.cluster.nodes - scenario.working_nodes(choice)
    if not held:
        return "no spares"
    kind = "waiting" if scenario.is_spread else "hot" if choice.hot else "warm"
    return f"{kind} spares of {held} node{'s' * (held > 1)}"


def describe_difference(scenario: Scenario, best: Played, other: Played) -> str:
    """Return the settings of a choice that the best one sets differently."""
    mine = _list_settings(scenario, best.rated.choice)
    theirs = _list_settings(scenario, other.rated.choice)
    differing = [their for my, their in zip(mine, theirs, strict=True) if my != their]
    return "; ".join(differing) or "the same"


def _describe_change(change: Change) -> str:
    times = max(change.factor, 1 / change.factor)
    if change.input == "failures":
        return f"with {times:g} times {'more' if change.factor > 1 else 'fewer'} failures"
    word = "longer" if change.input != "size of the state" else "larger"
    if change.factor < 1:
        word = "shorter" if change.input != "size of the state" else "smaller"
    return f"with a {times:g} times {word} {change.input}"


def _duration(seconds: float) -> str:
    for unit, size in (("days", DAY_S), ("h", HOUR_S), ("min", 60.0)):
        if 2 * size <= seconds < math.inf:
            return f"{seconds / size:.3g} {unit}"
    return "infinite" if seconds == math.inf else f"{seconds:.3g} s"


def to_plain(advice: Advice) -> dict[str, Any]:
    """Return the plan as values that JSON can hold. Times are seconds, shares are of 1."""
    scenario = advice.scenario
    return {
        "failures": {
            "model": scenario.model.name,
            "source": scenario.model.source,
            "per_1000_node_days": [scenario.model.rate.low, scenario.model.rate.high],
            "mtbf_s": [_mtbf_s(scenario, p) for p in (Point.WORST, Point.BEST)],
        },
        "best": _played_to_plain(scenario, advice.best),
        "useful_over_inputs": [advice.at_worst.useful, advice.at_best.useful],
        "next": [
            {**_played_to_plain(scenario, p), "why": explain_loss(advice.best, p, scenario)}
            for p in advice.others
        ],
        "machines": _found_to_plain(advice),
        "changes": [
            {
                "input": change.input,
                "factor": change.factor,
                "choice": _choice_to_plain(scenario, change.choice),
            }
            for change in advice.changes
        ],
    }


def _found_to_plain(advice: Advice) -> dict[str, Any] | None:
    if advice.found is None or advice.assumed is None:
        return None
    return {**dataclasses.asdict(advice.found), "ettr_closed_form": advice.assumed.ettr}


def _played_to_plain(scenario: Scenario, played: Played) -> dict[str, Any]:
    outlook = played.rated.outlook
    return {
        "choice": _choice_to_plain(scenario, played.rated.choice),
        "useful": played.useful,
        "useful_between": [played.low, played.high],
        "useful_closed_form": played.rated.useful,
        "ettr": outlook.ettr,
        "lost": {part.value: share for part, share in outlook.lost.items()},
    }


def _choice_to_plain(scenario: Scenario, choice: Choice) -> dict[str, Any]:
    found = dataclasses.asdict(choice)
    found["redundancy"] = str(choice.redundancy)
    found["save_every_s"] = choice.save_every_s if choice.save_every_s < math.inf else None
    found["workers"] = scenario.count_workers(choice)
    found["virtual"] = choice.tasks * scenario.count_workers(choice)
    found["hang_s"] = scenario.hang_s
    found["memory_bytes"] = scenario.memory_bytes(choice)
    found["network_bytes_per_s"] = scenario.network_bytes_per_s(choice)
    return found

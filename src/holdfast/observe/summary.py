"""Sums a run up in a few lines: steps, the use of time, and the price of faults."""

from __future__ import annotations

from holdfast.observe.goodput import Goodput
from holdfast.observe.incident_costs import Part

PARTS_SHOWN = 4


def summarize(goodput: Goodput) -> list[str]:
    """Return three lines on a run, without a full stop at their ends."""
    many = describe_workers(len(goodput.workers))
    median = goodput.step_quantile(0.5)
    each = f", {describe_seconds(median)} a step" if median else ""
    steps = "1 step" if goodput.steps == 1 else f"{goodput.steps} steps"
    lines = [f"{steps} in {describe_seconds(goodput.wall_s)} on {many}{each}"]
    total = goodput.total_s or 1.0
    parts = [(s / total, p) for p, s in goodput.parts().items() if p is not Part.PRODUCTIVE]
    most = sorted(parts, key=lambda item: -item[0])[:PARTS_SHOWN]
    rest = ", ".join(f"{part.value} {share:.1%}" for share, part in most if share >= 0.0005)
    lines.append(
        f"goodput {goodput.share:.1%} of all workers' time" + (f"; {rest}" if rest else "")
    )
    return [*lines, _summarize_incidents(goodput)]


def _summarize_incidents(goodput: Goodput) -> str:
    costs = goodput.costs
    if not costs:
        return "no incidents"
    pause_s = sum(cost.incident.cost.get("pause_s", 0.0) for cost in costs)
    steps = sum(int(cost.incident.cost.get("steps", 0)) for cost in costs)
    again = f", {steps} steps computed again" if steps else ""
    lost_s = sum(cost.seconds for cost in costs)
    many = "1 incident" if len(costs) == 1 else f"{len(costs)} incidents"
    pauses = f"pauses of {describe_seconds(pause_s)} in all{again}, " if pause_s else ""
    return f"{many}: {pauses}{describe_seconds(lost_s)} of workers' time lost"


def describe_workers(count: int) -> str:
    """Return how many workers there are, as words."""
    return "1 worker" if count == 1 else f"{count} workers"


def describe_seconds(seconds: float) -> str:
    """Return a duration with its unit, to three digits below two minutes."""
    if seconds < 1:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 120:
        return f"{seconds:.3g} s"
    minutes, rest = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    if hours < 48:
        return f"{hours} h {minutes} min" if hours else f"{minutes} min {rest} s"
    return f"{hours // 24} d {hours % 24} h"

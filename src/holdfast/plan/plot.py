"""Draws the balance of a plan: useful time against the interval, spares and the failure rate."""

from __future__ import annotations

import dataclasses
import math
from pathlib import Path
from typing import TYPE_CHECKING, Any

from holdfast.engine.core.errors import UserError
from holdfast.plan.advice import Advice, choose_intervals, is_possible, list_spares, rate_choice
from holdfast.plan.scenario import Point, scale_rate

if TYPE_CHECKING:
    from matplotlib.axes import Axes

KINDS = (".png", ".svg", ".pdf")
POINTS = 41
BAND = "#9ecae1"
LINE = "#08519c"
MARK = "#d94801"


def draw_plan(path: Path, advice: Advice) -> None:
    """Draw three charts into one file. UserError if matplotlib or the kind of file is missing."""
    if path.suffix not in KINDS:
        raise UserError(f"--plot {path} must end in {', '.join(KINDS)}")
    try:
        import matplotlib as mpl
    except ImportError:
        raise UserError("--plot needs matplotlib: pip install 'holdfast[plan]'") from None
    mpl.use("Agg")
    from matplotlib.figure import Figure

    figure = Figure(figsize=(13, 4.2), layout="constrained")
    axes = figure.subplots(1, 3)
    _draw_interval(axes[0], advice)
    _draw_spares(axes[1], advice)
    _draw_rate(axes[2], advice)
    cluster = advice.scenario.cluster
    figure.suptitle(
        f"{cluster.gpus:,} GPUs, failures of {advice.scenario.model.name}: "
        f"{advice.best.useful:.2%} of all GPUs' time is useful"
    )
    try:
        figure.savefig(path, dpi=150)
    except OSError as error:
        raise UserError(f"--plot {path} cannot be written: {error.strerror}") from None


def _draw_interval(axis: Axes, advice: Advice) -> None:
    scenario, best = advice.scenario, advice.best.rated.choice
    axis.set_title("interval of checkpoints")
    if best.save_every_s == math.inf:
        axis.text(0.5, 0.5, "no store", ha="center", transform=axis.transAxes)
        return
    xs = [best.save_every_s * 10 ** (i / 20 - 1) for i in range(POINTS)]
    choices = [dataclasses.replace(best, save_every_s=x) for x in xs]
    _draw_band(axis, [x / 60 for x in xs], [(scenario, choice) for choice in choices])
    axis.axvline(best.save_every_s / 60, color=MARK, label="advice")
    axis.set(xscale="log", xlabel="minutes between checkpoints", ylabel="useful share of all time")
    axis.legend(loc="lower right")


def _draw_spares(axis: Axes, advice: Advice) -> None:
    scenario, best = advice.scenario, advice.best.rated.choice
    most = max(*list_spares(scenario), best.spare_nodes)
    numbers = range(0, most + 1, max(most // POINTS, 1))
    choices = [dataclasses.replace(best, spare_nodes=number) for number in numbers]
    possible = [choice for choice in choices if is_possible(scenario, choice)]
    pairs = [(scenario, choose_intervals(scenario, choice)) for choice in possible]
    _draw_band(axis, [choice.spare_nodes for _, choice in pairs], pairs)
    axis.axvline(best.spare_nodes, color=MARK)
    axis.set(title="spares", xlabel="nodes held back")


def _draw_rate(axis: Axes, advice: Advice) -> None:
    scenario, best = advice.scenario, advice.best.rated.choice
    middle = scenario.model.rate.middle
    factors = [10 ** (i / 20 - 1) for i in range(POINTS)]
    pairs = []
    for factor in factors:
        other = scale_rate(scenario, factor)
        pairs.append((other, choose_intervals(other, best)))
    _draw_band(axis, [middle * factor for factor in factors], pairs)
    axis.axvspan(scenario.model.rate.low, scenario.model.rate.high, color=MARK, alpha=0.15)
    axis.axvline(middle, color=MARK)
    axis.set(title="failures", xscale="log", xlabel="failures of 1,000 node-days")


def _draw_band(axis: Axes, xs: list[Any], pairs: list[tuple[Any, Any]]) -> None:
    """Draw the middle as a line, and the intervals of the other inputs as a band."""
    low, middle, high = (
        [rate_choice(scenario, choice, point).useful for scenario, choice in pairs]
        for point in (Point.WORST, Point.MIDDLE, Point.BEST)
    )
    axis.fill_between(xs, low, high, color=BAND, alpha=0.5, label="intervals of the inputs")
    axis.plot(xs, middle, color=LINE, label="middle")
    axis.grid(visible=True, alpha=0.3)
    axis.yaxis.set_major_formatter(lambda y, _: f"{y:.1%}")

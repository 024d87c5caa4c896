"""`holdfast report RUN` writes one HTML page about a run, or prints its figures for scripts.

The page needs no other file, no script and no network. Everything on it comes from the run's files,
so it can be made of a run that works, that has ended, or that crashed.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from holdfast.engine.core.errors import NoAnswer, UserError
from holdfast.engine.core.plain_text import escape_html
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.goodput import MEANINGS, QUANTILES, Goodput
from holdfast.engine.records.incidents import (
    Incident,
    IncidentCost,
    Part,
    describe_cost,
    tell_story,
)
from holdfast.engine.records.last_words import find_last_words
from holdfast.engine.records.step_records import read_steps
from holdfast.engine.records.summary import (
    DATE_AND_TIME,
    describe_seconds,
    describe_unseen,
    describe_workers,
    format_clock,
    summarize,
)
from holdfast.engine.records.time_lines import class_seconds
from holdfast.engine.records.usage_lines import NodeUsage, read_all_usage
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.rundir import RunDir, read_goodput
from holdfast.reports.charts import Band, Mark, draw_bars, draw_lanes, draw_line
from holdfast.reports.usage_charts import draw_usage

_COLOURS = {  # light, dark
    Part.PRODUCTIVE: ("#2a7f4f", "#4fb37a"),
    Part.WAITING: ("#8fbf9f", "#3d6b4f"),
    Part.DATA: ("#c9a227", "#d9b84a"),
    Part.STATES: ("#8c7a3f", "#b5a25f"),
    Part.CHECKS: ("#5b7fb5", "#7fa3d9"),
    Part.AGAIN: ("#b36ac2", "#c98ad6"),
    Part.LOST: ("#7d3c98", "#a569bd"),
    Part.SAVING: ("#3f8fa3", "#5fb5c9"),
    Part.STALLED: ("#c0392b", "#e0604f"),
    Part.TRANSFER: ("#e08e3a", "#eba45c"),
    Part.STARTING: ("#9a9a9a", "#8a8a8a"),
    Part.SPARE: ("#c4c4c4", "#5c5c5c"),
    Part.ENDING: ("#b8b0a0", "#6c665a"),
    Part.DEGRADED: ("#e6b0aa", "#7b3a34"),
}
CHARTS = {"loss": "the loss", "workers": "the workers"}  # by the first part of the marks' names
_STYLE = Path(__file__).with_name("report.css")


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast report`."""
    options = parser().parse_args(argv)
    run_dir = RunDir(Path(options.run_dir))
    if options.json:
        print_plain(json.dumps(read_goodput(run_dir).to_dict(), indent=2))
        return 0
    path = options.output or run_dir.path / "report.html"
    for line in summarize(write_report(run_dir, path)):
        print_plain(line)
    if run_dir.outcome() is None and _is_deserted(run_dir):
        print_plain(
            "the run has no end and no live coordinator: if it was killed, "
            f"`holdfast resume {run_dir.path}` goes on with it"
        )
    print_plain(f"report: {path}")
    return 0


def _is_deserted(run_dir: RunDir) -> bool:
    """Return whether no coordinator answers; a coordinator that wants a certificate is there."""
    try:
        job_status(run_dir)
    except NoAnswer:
        return True
    except UserError:
        pass
    return False


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast report",
        description="Write one HTML page about a run: loss with faults marked, where the time of "
        "all workers went, how long steps took, and each incident with its cost. It reads the "
        "run's files, also while the run works and after a crash.",
    )
    found.add_argument("run_dir", metavar="RUN", help="directory of the run")
    found.add_argument(
        "--output",
        type=Path,
        metavar="FILE",
        help="write the page here (default: RUN/report.html)",
    )
    found.add_argument("--json", action="store_true", help="print the figures as JSON instead")
    return found


@dataclass(frozen=True, slots=True, kw_only=True)
class RunFacts:
    """Keeps the facts for a report.

    `losses`: by step. `outcome`: None while the run works. `last_words`: by incident, what lost
    workers printed last.
    """

    name: str
    script: str
    outcome: str | None
    goodput: Goodput
    losses: Mapping[int, float]
    last_words: Mapping[str, Sequence[str]] = field(default_factory=dict)
    usage: Sequence[NodeUsage] = ()


def write_page(facts: RunFacts) -> str:
    """Return the report as HTML."""
    title = f"Holdfast: {facts.name}"
    charts = [*_loss(facts), *_waterfall(facts.goodput), *_lanes(facts.goodput)]
    parts = [
        f"<h1>{escape_html(facts.name)}</h1>",
        f'<p class="dim">{escape_html(_headline(facts))}</p>',
        _tiles(facts),
        *charts,
        *_usage(facts),
        *_steps(facts.goodput),
        *_incidents(facts, "".join(charts)),
        *_workers(facts.goodput),
        '<p class="dim">Made by <code>holdfast report</code> from the files of the run.</p>',
    ]
    body = "\n".join(parts)
    style = _STYLE.read_text() + _part_styles()
    return (
        '<!doctype html>\n<html lang="en">\n<head><meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{escape_html(title)}</title>\n<style>{style}</style></head>\n"
        f"<body>\n{body}\n</body></html>\n"
    )


def _headline(facts: RunFacts) -> str:
    began = format_clock(facts.goodput.began, DATE_AND_TIME)
    if facts.outcome is None:
        state = "not ended, as far as its files tell"
    else:
        state = f"failed: {facts.outcome}" if facts.outcome else "ended with success"
    return f"{facts.script} · began {began} · {state}"


def _tiles(facts: RunFacts) -> str:
    goodput = facts.goodput
    incidents = len(goodput.costs)
    tiles = [
        (f"{goodput.steps:,}", "steps committed"),
        (describe_seconds(goodput.wall_s), f"on {describe_workers(len(goodput.workers))}"),
        (f"{goodput.share:.1%}", "goodput: productive share of all time"),
        (f"{goodput.ettr:.1%}", "effective training time ratio"),
        (describe_seconds(goodput.step_quantile(0.5)), "median step"),
        (f"{incidents}", "incident" if incidents == 1 else "incidents"),
    ]
    cells = "".join(
        f'<div class="tile"><b>{a}</b><span>{escape_html(b)}</span></div>' for a, b in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _loss(facts: RunFacts) -> list[str]:
    if not facts.losses:
        return []
    marks = []
    for cost in facts.goodput.costs:
        steps = [e["step"] for e in cost.incident.events if isinstance(e.get("step"), int)]
        if steps:
            marks.append(_mark("loss", cost.incident, steps[-1]))
    points = [(float(step), loss) for step, loss in sorted(facts.losses.items())]
    return ["<h2>Loss</h2>", draw_line(points, marks, label="step")]


def _mark(chart: str, incident: Incident, at: float) -> Mark:
    """Return the mark of an incident in a chart, which links to the incident's story."""
    return Mark(at, incident.title, f"{chart}-{incident.name}", f"incident-{incident.name}")


def _waterfall(goodput: Goodput) -> list[str]:
    total, rows = goodput.total_s or 1.0, []
    for part, seconds in goodput.parts().items():
        if seconds <= 0 and part is not Part.PRODUCTIVE:
            continue
        share = seconds / total
        rows.append(
            f'<tr><td><span class="swatch {part.value}"></span>{part.value}</td>'
            f'<td class="number">{describe_seconds(seconds)}</td>'
            f'<td class="number">{share:.1%}</td>'
            f'<td class="wide"><div class="track"><div class="fill {part.value}" '
            f'style="width:{share:.2%}"></div></div></td>'
            f'<td class="dim">{escape_html(MEANINGS[part])}</td></tr>'
        )
    head = f"Time of all workers, {describe_seconds(goodput.total_s)}, by its use."
    body = "".join(rows)
    return [
        "<h2>Where the time went</h2>",
        *(f'<p class="dim">{escape_html(text)}.</p>' for text in describe_unseen(goodput)),
        f'<p class="dim">{head}</p><div class="scroll"><table>{body}</table></div>',
    ]


def _lanes(goodput: Goodput) -> list[str]:
    lanes: dict[str, list[Band]] = {f"worker {w}": [] for w in goodput.workers}
    for stretch in goodput.stretches:
        at = stretch.began - goodput.began
        for part in Part:
            if seconds := stretch.parts.get(part, 0.0):
                lanes[f"worker {stretch.worker}"].append(Band(at, at + seconds, part.value))
                at += seconds
    marks = [
        _mark("workers", c.incident, c.incident.began_at - goodput.began) for c in goodput.costs
    ]
    seen = [p for p, s in goodput.parts().items() if s > 0]
    legend = " ".join(f'<span class="swatch {p.value}"></span>{p.value}' for p in seen)
    chart = draw_lanes(lanes, marks, goodput.span_s, label="seconds since the run began")
    return ["<h2>Workers</h2>", f'<p class="dim">{legend}</p>', chart]


def _usage(facts: RunFacts) -> list[str]:
    began = facts.goodput.began
    marks = [
        Mark(i.began_at - began, i.title, target=f"incident-{i.name}")
        for i in (cost.incident for cost in facts.goodput.costs)
    ]
    return draw_usage(facts.usage, marks, began)


def _steps(goodput: Goodput) -> list[str]:
    counts = goodput.step_counts
    if not counts:
        return []
    quantiles = ", ".join(
        f"{n} {describe_seconds(goodput.step_quantile(q))}" for n, q in QUANTILES.items()
    )
    bars = []
    for number in range(min(counts), max(counts) + 1):
        length, count = describe_seconds(class_seconds(number)), counts.get(number, 0)
        bars.append((length, float(count), f"{count} steps of about {length}"))
    text = f"{quantiles}; right to 5 %, counted once for each worker."
    return [
        "<h2>How long steps took</h2>",
        f'<p class="dim">{text}</p>',
        draw_bars(bars, label="length"),
    ]


def _incidents(facts: RunFacts, charts: str) -> list[str]:
    """Describe each incident, with links to its marks in the charts that have one."""
    goodput, found = facts.goodput, ["<h2>Incidents</h2>"]
    if not goodput.costs:
        return [*found, "<p>None.</p>"]
    for cost in goodput.costs:
        incident = cost.incident
        at = describe_seconds(max(incident.began_at - goodput.began, 0.0))
        story = escape_html(
            "\n".join(tell_story(incident, facts.last_words.get(incident.name, ())))
        )
        name = escape_html(incident.name)
        links = " · ".join(
            f'<a href="#{chart}-{name}">its mark in the chart of {text}</a>'
            for chart, text in CHARTS.items()
            if f'id="{chart}-{name}"' in charts
        )
        price = f"{describe_cost(incident)}; {describe_worker_seconds(cost)}"
        found.append(
            f'<details><summary><b>{escape_html(incident.title)}</b> <span class="dim">after {at}: '
            f'{escape_html(price)}</span></summary><div id="incident-{name}"><p>{links}</p>'
            f"<pre>{story}</pre></div></details>"
        )
    return found


def describe_worker_seconds(cost: IncidentCost) -> str:
    """Return the cost of an incident in seconds of workers, in one phrase."""
    if not cost.seconds:
        return "no time of workers"
    parts = sorted(cost.parts.items(), key=lambda item: -item[1])
    each = ", ".join(f"{part.value} {describe_seconds(s)}" for part, s in parts)
    return f"{describe_seconds(cost.seconds)} of workers' time ({each})"


def _workers(goodput: Goodput) -> list[str]:
    parts: Sequence[Part] = [p for p, s in goodput.parts().items() if s > 0]
    head = "".join(f'<th class="number">{p.value}</th>' for p in parts)
    rows = []
    for worker, own in sorted(goodput.parts_by_worker().items()):
        cells = "".join(f'<td class="number">{own[p]:.2f}</td>' for p in parts)
        rows.append(f"<tr><td>{worker}</td>{cells}</tr>")
    table = f"<table><tr><th>worker</th>{head}</tr>{''.join(rows)}</table>"
    return [
        f'<details><summary>Seconds by worker</summary><div class="scroll">{table}</div></details>'
    ]


def _part_styles() -> str:
    light = "".join(f".{p.value}{{fill:{a};background:{a}}}" for p, (a, _) in _COLOURS.items())
    dark = "".join(f".{p.value}{{fill:{b};background:{b}}}" for p, (_, b) in _COLOURS.items())
    return f"\n{light}\n@media (prefers-color-scheme: dark) {{{dark}}}\n"


def write_report(run_dir: RunDir, path: Path) -> Goodput:
    """Write the page of a run; return the shares of its time. UserError."""
    goodput, spec = read_goodput(run_dir), run_dir.spec()
    facts = RunFacts(
        name=run_dir.path.resolve().name,
        script=" ".join([spec.script, *spec.args]),
        outcome=run_dir.outcome(),
        goodput=goodput,
        losses=_read_losses(run_dir),
        last_words={
            cost.incident.name: find_last_words(run_dir.path, cost.incident)
            for cost in goodput.costs
        },
        usage=read_all_usage(run_dir.path),
    )
    try:
        path.write_text(write_page(facts), encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    return goodput


def _read_losses(run_dir: RunDir) -> dict[int, float]:
    """Return the loss of each step by its number; none without a ledger."""
    try:
        steps = read_steps(run_dir.path).steps
    except UserError:
        return {}
    return {step: float.fromhex(line.loss) for step, line in steps.items()}

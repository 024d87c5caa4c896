"""Reads a user's own record of failures, and makes a model of it.

A trace is a CSV file with the columns `time`, `node`, `effect` and `repair_s`, and two lines before
them with the nodes and the days that were watched:

    # nodes: 128
    # days: 90
    time,node,effect,repair_s
    2026-03-01T04:12:09,node17,node,5400
    2026-03-01T09:40:00,node3,process,

`time`: ISO 8601, or seconds. `effect`: process, node, domain, hang, planned, wave, slow,
outage or silent. `repair_s`: seconds until the machine was back; empty if unknown. Rows may be in
any order.
"""

from __future__ import annotations

import csv
import datetime
import math
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from statistics import fmean, median

from holdfast.engine.core.errors import UserError
from holdfast.engine.state.store.regular_files import read_named
from holdfast.plan.distributions import Interval, LogNormal, fit_weibull
from holdfast.plan.failure_tables import LANL_REPAIR, Effect, FailureModel

COLUMNS = ["time", "node", "effect", "repair_s"]
#: Rows of several nodes within this time are one failure of their domain.
TOGETHER_S = 60.0
#: Times between failures that a shape is fitted to, at least.
GAPS_MIN = 20
#: Repairs that a distribution is fitted to, at least.
REPAIRS_MIN = 5
ROWS_MAX = 1_000_000
BYTES_MAX = 100_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """Is one failure of a trace. `repair_s`: None if unknown."""

    time_s: float
    node: str
    effect: Effect
    repair_s: float | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Trace:
    """Lists failures in the order of their times, with the nodes and days that were watched."""

    nodes: int
    days: float
    rows: tuple[Row, ...]


def read_trace(path: Path) -> Trace:
    """Read a trace. UserError names the file, the line and the fault."""
    try:
        text = read_named(path, BYTES_MAX).decode("utf-8", errors="replace")
    except OSError as error:
        why = error.strerror or str(error)
        raise UserError(f"--failures {path} cannot be read: {why}") from None
    lines = text.splitlines()
    watched = {}
    while lines and lines[0].startswith("#"):
        name, _, value = lines.pop(0).lstrip("# ").partition(":")
        watched[name.strip()] = value.strip()
    nodes = _read_positive(path, "nodes", watched.get("nodes", ""))
    days = _read_positive(path, "days", watched.get("days", ""))
    first = text.count("\n", 0, len(text) - len("\n".join(lines))) + 1
    reader = csv.reader(lines)
    header = next(reader, [])
    if [each.strip() for each in header] != COLUMNS:
        raise UserError(
            f"{path}:{first}: the columns are {','.join(header) or 'missing'}: "
            f"they must be {','.join(COLUMNS)}"
        )
    rows: list[Row] = []
    for fields in reader:
        if not fields:
            continue
        if len(rows) == ROWS_MAX:
            raise UserError(f"{path}: has more than {ROWS_MAX:,} rows: leave out the oldest")
        rows.append(_read_row(f"{path}:{first + reader.line_num - 1}", fields))
    if not rows:
        raise UserError(f"{path}: has no failure, so no rate follows from it: use --rate")
    return Trace(nodes=int(nodes), days=days, rows=tuple(sorted(rows, key=lambda r: r.time_s)))


def _read_positive(path: Path, name: str, value: str) -> float:
    try:
        number = float(value)
    except ValueError:
        number = math.nan
    if not 0 < number < math.inf:
        raise UserError(
            f"{path}: begins without a line `# {name}: NUMBER` with a number above 0, which is "
            "how much was watched"
        )
    return number


def _read_row(where: str, fields: Sequence[str]) -> Row:
    if len(fields) != len(COLUMNS):
        raise UserError(f"{where}: has {len(fields)} fields instead of {len(COLUMNS)}")
    time, node, effect, repair = (field.strip() for field in fields)
    known = [each.value for each in Effect]
    if effect not in known:
        raise UserError(f"{where}: the effect {effect!r} must be one of {', '.join(known)}")
    try:
        repair_s = float(repair) if repair else None
    except ValueError:
        raise UserError(f"{where}: the repair_s {repair!r} is no number of seconds") from None
    if repair_s is not None and not 0 <= repair_s < math.inf:
        raise UserError(f"{where}: the repair_s {repair!r} is no number of seconds")
    if not node:
        raise UserError(f"{where}: has no node")
    return Row(time_s=_read_time(where, time), node=node, effect=Effect(effect), repair_s=repair_s)


def _read_time(where: str, text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        try:
            moment = datetime.datetime.fromisoformat(text)
        except ValueError:
            raise UserError(
                f"{where}: the time {text!r} is neither ISO 8601 nor a number of seconds"
            ) from None
        seconds = moment.replace(tzinfo=moment.tzinfo or datetime.timezone.utc).timestamp()
    if not math.isfinite(seconds):
        raise UserError(f"{where}: the time {text!r} is not finite")
    return seconds


def find_incidents(trace: Trace) -> list[Row]:
    """Return the failures; losses of several nodes within a minute become one of their domain."""
    found: list[Row] = []
    group: list[Row] = []
    for row in trace.rows:
        if row.effect is not Effect.NODE:
            found.append(row)
            continue
        if group and row.time_s - group[-1].time_s > TOGETHER_S:
            found.append(_join(group))
            group = []
        group.append(row)
    if group:
        found.append(_join(group))
    return sorted(found, key=lambda r: r.time_s)


def _join(group: list[Row]) -> Row:
    if len({row.node for row in group}) == 1:
        return group[0]
    repairs = [row.repair_s for row in group if row.repair_s is not None]
    return Row(
        time_s=group[0].time_s,
        node=group[0].node,
        effect=Effect.DOMAIN,
        repair_s=max(repairs, default=None),
    )


def fit_trace(trace: Trace, name: str, gpus_per_node: int) -> FailureModel:
    """Make a model of a trace.

    The rate's interval holds the true one with 90 % if failures are independent. The shape belongs
    to the times between failures of one node, if enough nodes failed more than once.
    """
    incidents = find_incidents(trace)
    count, node_days = len(incidents), trace.nodes * trace.days
    spread = 1.645 * math.sqrt(count)
    low = max(count - spread, 0.05) / node_days * 1000
    rate = Interval(low=low, high=(count + spread) / node_days * 1000)
    gaps = _find_gaps(trace)
    shape = fit_weibull(gaps).shape if len(gaps) >= GAPS_MIN else 1.0
    repairs = [r.repair_s for r in trace.rows if r.repair_s]
    repair = LANL_REPAIR
    if len(repairs) >= REPAIRS_MIN:
        repair = LogNormal(mean_s=max(fmean(repairs), median(repairs)), median_s=median(repairs))
    shares = {e: sum(r.effect is e for r in incidents) / count for e in Effect}
    return FailureModel(
        name=name,
        source=f"{count} failures of {trace.nodes} nodes in {trace.days:g} days",
        rate=rate,
        gpus_per_node=gpus_per_node,
        shape=shape,
        shares=shares,
        repair=repair,
    )


def _find_gaps(trace: Trace) -> list[float]:
    last: dict[str, float] = {}
    found = []
    for row in trace.rows:
        before = last.get(row.node)
        if before is not None and row.time_s > before:
            found.append(row.time_s - before)
        last[row.node] = row.time_s
    return found

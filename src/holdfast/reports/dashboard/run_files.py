"""Reads the files of a run, and describes the run by topic.

It works while the run does, after its end and after a crash. All its knowledge is in the files, and
a value that is not known is None. The losses are read from the ledger line by line, by the rules of
engine/records/step_records.py; the rate of steps follows from the times that workers write.
"""

from __future__ import annotations

import contextlib
import math
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec

from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.records.goodput import MEANINGS, QUANTILES, Goodput, share_times
from holdfast.engine.records.incidents import (
    Incident,
    IncidentCost,
    Part,
    describe_cost,
    list_events,
    list_incidents,
)
from holdfast.engine.records.last_words import find_last_words
from holdfast.engine.records.ledger import LEDGER_DIR, DoubtLine, StepLine, Uses, decode_line
from holdfast.engine.records.run_tail import FileTail, RunTail
from holdfast.engine.records.time_lines import ProcessTimes, read_times
from holdfast.engine.records.usage_lines import list_nodes, read_usage
from holdfast.engine.runtime.rundir import RunDir
from holdfast.reports.charts import thin_points

INCIDENTS_MAX = 100
SAVES_MAX = 40
TROUBLES_MAX = 60
EVENTS_KEPT = 20_000  # newest ones, and older ones that incidents consist of
PACE = 20  # a costly look is repeated after this many times its duration
SAVES = frozenset(("save", "unsaved", "store", "rot", "back"))
TROUBLES = frozenset(
    "balance busy copy data descriptors failed journal link lost quarantined record refused rot "
    "script slow straggler unsaved wrong".split()
)
Topics = dict[str, Any]
POINTS_MAX = 1500
USAGE_POINTS = 400  # for each curve
Point = tuple[float, float | None]
PARTS = 160
PART_S_MIN = 1.0
RECENT_S = 10.0
Rate = tuple[float, float | None]


class RunFiles:
    """Follows the files of one run."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._tail = RunTail(run_dir.path, EVENTS_KEPT)
        self._loss = LossSeries(run_dir.path)
        self._times_next = 0.0  # monotonic
        self._times_mark: tuple[object, ...] = ()
        self._last_words: dict[tuple[str, int], list[str]] = {}  # by incident and its length

    def read_run(self, spec: JobSpec) -> Topics:
        """Return the facts of the run that have one value."""
        record = self._run_dir.load_record()
        return {
            "run": {
                "name": self._run_dir.path.resolve().name,
                "path": str(self._run_dir.path.resolve()),
                "script": " ".join([spec.script, *spec.args]),
                "virtual_ranks": spec.virtual_ranks,
                "outcome": self._run_dir.outcome(),
                "began": self._tail.events[0]["time"] if self._tail.events else None,
                "saved": list(record.saved) if record is not None else [],
            },
        }

    def read_events(self) -> tuple[bool, Sequence[dict[str, Any]]]:
        """Return whether the log was replaced, and its new events."""
        fresh = self._tail.look()
        return self._tail.was_replaced, fresh

    def read_notes(self) -> Topics:
        """Return the events about checkpoints, and those about troubles."""
        saves = [e for e in self._tail.events if e["kind"] in SAVES]
        troubles = [e for e in self._tail.events if e["kind"] in TROUBLES]
        return {"saves": saves[-SAVES_MAX:], "troubles": troubles[-TROUBLES_MAX:]}

    def read_time_left(self) -> Topics:
        """Return the estimate of the time that the script's loop still takes."""
        over = self._run_dir.outcome() is not None
        return {"left": None if over else self._tail.estimate_left_s()}

    def read_losses(self) -> Topics:
        """Return the losses, if new ones have come."""
        if not self._loss.refresh():
            return {}
        last = self._loss.newest()
        return {
            "loss": {
                "points": self._loss.points(),
                "step": last[0] if last else None,
                "last": last[1] if last else None,
            }
        }

    def read_times(self) -> Topics:
        """Return the topics from the workers' times, if these are new and it is not too soon."""
        began = time.monotonic()
        folder = self._run_dir.path / "times"
        sizes = sorted((p.name, p.stat().st_size) for p in folder.glob("*.jsonl"))
        mark = (*sizes, len(self._tail.events), self._tail.events[-1:])
        if began < self._times_next or mark == self._times_mark:
            return {}
        processes = read_times(self._run_dir.path)
        goodput = share_times(processes, self._tail.events)
        found = {
            **self._incidents(goodput),
            "rates": {
                "began": min((each.began for each in processes), default=None),
                "points": measure_rates(processes),
                "now": rate_now(processes),
            },
            "goodput": describe_goodput(goodput) if goodput is not None else None,
            "known": describe_known(processes, self._nodes()),
        }
        self._times_mark = mark
        self._times_next = time.monotonic() + PACE * (time.monotonic() - began)
        return found

    def read_machines(self) -> Topics:
        """Return the names of the nodes whose use has been measured."""
        return {"machines": list_nodes(self._run_dir.path)}

    def _nodes(self) -> dict[int, str]:
        """Return the node of each worker by the coordinator's journal, where that is a file."""
        record = self._run_dir.load_record()
        return {s.worker: s.agent for s in record.slots} if record is not None else {}

    def _incidents(self, goodput: Goodput | None) -> Topics:
        costs = goodput.costs if goodput is not None else []
        seconds = {cost.incident.name: cost for cost in costs}
        incidents = list_incidents(self._tail.events)
        shown = incidents[-INCIDENTS_MAX:]
        known = self._last_words
        keys = {(each.name, len(each.events)): each for each in shown}
        self._last_words = {
            key: known[key] if key in known else find_last_words(self._run_dir.path, each)
            for key, each in keys.items()
        }
        items = [
            describe_incident(each, seconds.get(each.name), self._last_words[key])
            for key, each in keys.items()
        ]
        return {"incidents": {"total": len(incidents), "items": items}}


def describe_incident(
    incident: Incident, cost: IncidentCost | None, last_words: Sequence[str]
) -> dict[str, Any]:
    """Return an incident for the page. `seconds`: of workers' time; None: not known."""
    steps = [e["step"] for e in incident.events if isinstance(e.get("step"), int)]
    return {
        "id": incident.name,
        "title": incident.title,
        "began": incident.began_at,
        "ended": incident.ended_at if incident.cost else None,
        "step": steps[-1] if steps else None,
        "workers": sorted(incident.workers),
        "cost": describe_cost(incident),
        "pause_s": incident.cost.get("pause_s"),
        "worker_s": cost.seconds if cost is not None else None,
        "story": [*list_events(incident), *last_words, *incident.diagnosis.lines()],
    }


def describe_usage(run_dir: Path, node: str) -> dict[str, Any] | None:
    """Return the curves of a node's use and of its workers' for the page; None without any.

    Times are seconds since the epoch. A value that was not measured is None.
    """
    usage = read_usage(run_dir, node)
    if usage is None:
        return None
    curves = {
        measure: {
            name: [(at, value if math.isfinite(value) else None) for at, value in _thin(points)]
            for name, points in lines.items()
        }
        for measure, lines in usage.list_curves(0.0).items()
    }
    head = usage.header
    return {"cores": head.cores, "memory_bytes": head.memory_bytes, "curves": curves}


def _thin(points: Sequence[tuple[float, float]]) -> list[tuple[float, float]]:
    finite = [point for point in points if math.isfinite(point[1])]
    gaps = [point for point in points if not math.isfinite(point[1])]
    return sorted([*thin_points(finite, USAGE_POINTS), *gaps[-USAGE_POINTS:]], key=lambda p: p[0])


def describe_goodput(goodput: Goodput) -> dict[str, Any]:
    """Return the figures of a run's time, with a sentence on each part."""
    total = goodput.total_s
    parts = [
        {"name": part.value, "seconds": s, "share": s / total, "meaning": MEANINGS[part]}
        for part, s in goodput.parts().items()
        if total and (s > 0 or part is Part.PRODUCTIVE)
    ]
    return {
        "wall_s": goodput.wall_s,
        "total_s": total,
        "workers": len(goodput.workers),
        "steps": goodput.steps,
        "share": goodput.share if total else None,
        "ettr": goodput.ettr if total else None,
        "parts": parts,
        "step_s": {n: goodput.step_quantile(q) for n, q in QUANTILES.items()}
        if goodput.step_counts
        else None,
    }


def describe_known(processes: Sequence[ProcessTimes], nodes: dict[int, str]) -> list[Any]:
    """Return each worker's number, node, incarnation, steps and time of its end."""
    newest: dict[int, ProcessTimes] = {}
    for each in processes:
        known = newest.get(each.worker)
        if known is None or each.incarnation > known.incarnation:
            newest[each.worker] = each
    found = []
    for worker in sorted({*newest, *nodes}):
        times = newest.get(worker)
        found.append(
            {
                "id": worker,
                "node": nodes.get(worker),
                "incarnation": times.incarnation if times else None,
                "step": times.lines[-1].step if times and times.lines else None,
                "seen": times.ended if times else None,
            }
        )
    return found


class LossSeries:
    """Keeps the losses in the files of one ledger."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / LEDGER_DIR
        self._tails: dict[str, FileTail] = {}
        self._doubts: list[DoubtLine] = []
        self._steps: dict[int, tuple[int, float]] = {}  # by step: view and loss

    def refresh(self) -> bool:
        """Read the new lines of all files; return whether a loss has changed."""
        changed = False
        for path in sorted(self._folder.glob("*.jsonl")):
            tail = self._tails.setdefault(path.name, FileTail(path))
            for data in tail.read():
                if tail.cut:
                    self._tails, self._doubts, self._steps = {}, [], {}
                    return True  # the next look reads all files again
                with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                    changed |= self._take(decode_line(data))
        return changed

    def points(self) -> list[Point]:
        """Return some 1,500 steps with their losses; None where the loss is no finite number."""
        steps = sorted(self._steps)
        finite = [(float(s), loss) for s in steps if math.isfinite(loss := self._steps[s][1])]
        odd: list[Point] = [(float(s), None) for s in steps if not math.isfinite(self._steps[s][1])]
        shown: list[Point] = [*thin_points(finite, POINTS_MAX)]
        return sorted([*shown, *odd[-POINTS_MAX:]], key=lambda point: point[0])

    def newest(self) -> tuple[int, float | None] | None:
        """Return the newest step and its loss; None without any."""
        if not self._steps:
            return None
        step = max(self._steps)
        loss = self._steps[step][1]
        return step, loss if math.isfinite(loss) else None

    def _take(self, line: object) -> bool:
        if isinstance(line, DoubtLine) and line.again and line not in self._doubts:
            self._doubts.append(line)
            kept = {s: v for s, v in self._steps.items() if not line.covers(s, v[0])}
            changed = len(kept) != len(self._steps)
            self._steps = kept
            return changed
        if not isinstance(line, StepLine) or line.uses is Uses.NO_SAMPLES:
            return False
        if any(doubt.covers(line.step, line.view) for doubt in self._doubts):
            return False
        known = self._steps.get(line.step)
        if known is not None and known[0] >= line.view:
            return False
        with contextlib.suppress(ValueError, OverflowError):
            self._steps[line.step] = line.view, float.fromhex(line.loss)
            return True
        return False


def measure_rates(processes: Sequence[ProcessTimes]) -> list[Rate]:
    """Return the steps per second by seconds since the first process began, in equal parts.

    None: no line of any worker covers a piece of that part. Steps that were done again count again.
    """
    if not any(each.lines for each in processes):
        return []
    began, ended = min(p.began for p in processes), max(p.ended for p in processes)
    wall_s = max(ended - began, 1e-3)
    count = max(min(round(wall_s / PART_S_MIN), PARTS), 1)
    width = wall_s / count
    most: dict[int, float] = {}  # by part: steps of the worker with most of them in it
    for each in processes:
        for number, steps in _steps_by_part(each, began, width).items():
            most[number] = max(most.get(number, 0.0), steps)
    return [
        ((number + 0.5) * width, most[number] / width if number in most else None)
        for number in range(count)
    ]


def rate_now(processes: Sequence[ProcessTimes]) -> float | None:
    """Return the steps per second of the last 10 s that the files cover; None if unknown."""
    if not any(each.lines for each in processes):
        return None
    began, ended = min(p.began for p in processes), max(p.ended for p in processes)
    width = min(RECENT_S, ended - began)
    if width <= 0:
        return None
    recent = [_steps_by_part(each, ended - width, width).get(0, 0.0) for each in processes]
    return max(recent) / width


def _steps_by_part(process: ProcessTimes, began: float, width: float) -> dict[int, float]:
    """Return the steps in each part that a process has recorded; parts have negative numbers, too.

    Steps with a length count, and are spread over their line: the steps that it received together
    with the state are none of its own.
    """
    found: dict[int, float] = {}
    for line_began, line in process.walk():
        if line.seconds <= 0:
            continue
        steps = sum(line.steps.values())
        first, last = (line_began - began) / width, (line_began + line.seconds - began) / width
        for number in range(int(first // 1), int(-(-last // 1))):
            share = (min(last, number + 1) - max(first, number)) / (last - first)
            if share > 0:
                found[number] = found.get(number, 0.0) + steps * share
    return found

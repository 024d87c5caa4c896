"""Reads the files of a run, and describes the run by topic.

It works while the run does, after its end and after a crash. All its knowledge is in the files, and
a value that is not known is None.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.records.goodput import MEANINGS, QUANTILES, Goodput, share_times
from holdfast.engine.records.incident_costs import IncidentCost, Part
from holdfast.engine.records.incidents import Incident, describe_cost, list_events, list_incidents
from holdfast.engine.records.run_tail import RunTail
from holdfast.engine.records.time_lines import ProcessTimes, read_times
from holdfast.engine.runtime.rundir import RunDir
from holdfast.reports.dashboard.loss_series import LossSeries
from holdfast.reports.dashboard.step_rates import measure_rates, rate_now

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


class RunFiles:
    """Follows the files of one run."""

    def __init__(self, run_dir: RunDir) -> None:
        self._run_dir = run_dir
        self._tail = RunTail(run_dir.path, EVENTS_KEPT)
        self._loss = LossSeries(run_dir.path)
        self._times_next = 0.0  # monotonic
        self._times_mark: tuple[object, ...] = ()

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
        """Return what follows from the workers' times, if these are new and it is not too soon."""
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

    def _nodes(self) -> dict[int, str]:
        """Return the node of each worker by the coordinator's journal, where that is a file."""
        record = self._run_dir.load_record()
        return {s.worker: s.agent for s in record.slots} if record is not None else {}

    def _incidents(self, goodput: Goodput | None) -> Topics:
        costs = goodput.costs if goodput is not None else []
        seconds = {cost.incident.name: cost for cost in costs}
        incidents = list_incidents(self._tail.events)
        shown = incidents[-INCIDENTS_MAX:]
        items = [describe_incident(each, seconds.get(each.name)) for each in shown]
        return {"incidents": {"total": len(incidents), "items": items}}


def describe_incident(incident: Incident, cost: IncidentCost | None) -> dict[str, Any]:
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
        "story": [*list_events(incident), *incident.diagnosis.lines()],
    }


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
    """Return what files say of each worker: number, node, incarnation, steps, time of its end."""
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

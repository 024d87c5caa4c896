"""Finds what lost workers printed last, in the logs of a run directory.

Nodes without a common run directory keep the logs of their workers in their own, so a log may be
missing here.
"""

from __future__ import annotations

import contextlib
from pathlib import Path

from holdfast.engine.records.incidents import Incident
from holdfast.engine.records.run_tail import incarnation_of, list_logs, read_last_lines
from holdfast.engine.records.time_lines import read_beginning

LINES_MAX = 5  # for each worker
WORKERS_MAX = 3  # for each incident
WIDTH_MAX = 200
LATE_S = 1.0  # the last lines of a process may reach its log so long after its loss is known


def find_last_words(run_dir: Path, incident: Incident) -> list[str]:
    """Return the last lines of the workers that an incident has lost, below the names of the logs.

    A worker's log is the one of its newest process that began before the loss.
    """
    lost = {
        int(e["worker"]): float(e["time"])
        for e in incident.events
        if e["kind"] == "lost" and e.get("worker") is not None
    }
    found: list[str] = []
    for worker, at in list(lost.items())[:WORKERS_MAX]:
        path = _find_log(run_dir, worker, at)
        lines = [line for line in read_last_lines(path) if line.strip()] if path else []
        if path is not None and lines:
            found.append(f"The end of logs/{path.name}:")
            found += [f"  | {line[:WIDTH_MAX]}" for line in lines[-LINES_MAX:]]
    return found


def _find_log(run_dir: Path, worker: int, lost_at: float) -> Path | None:
    for path in reversed(list_logs(run_dir / "logs", worker)):
        began = read_beginning(run_dir, worker, incarnation_of(path))
        if began is None:  # it ended early
            with contextlib.suppress(OSError):
                began = path.stat().st_mtime - LATE_S
        if began is not None and began <= lost_at:
            return path
    return None

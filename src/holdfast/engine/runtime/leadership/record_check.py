"""Looks for numbers in a journal's record that no coordinator can have written."""

from __future__ import annotations

from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.views import View

COUNT_MAX = 1 << 53  # limits terms, views, steps and workers


def problem_of_record(record: JobRecord) -> str:
    """Return why no coordinator can have written this record; empty if one may have."""
    counts = {
        f"term {record.term}": record.term,
        f"view {record.views_used}": record.views_used,
        f"{record.workers_named} workers named": record.workers_named,
        f"{record.forgotten} records lost": record.forgotten,
        f"a furthest step {record.setbacks.furthest}": record.setbacks.furthest,
    }
    for what, count in counts.items():
        if not _is_count(count):
            return what
    for step in record.saved:
        if not _is_count(step):
            return f"a checkpoint of step {step}"
    return _problem_of_view(record.view) if record.view is not None else ""


def _problem_of_view(view: View) -> str:
    if not _is_count(view.number):
        return f"view {view.number}"
    if not _is_count(view.resume_step):
        return f"view {view.number} begins at step {view.resume_step}"
    workers = frozenset(view.workers)
    if len(workers) < len(view.members):
        return f"view {view.number} lists a member twice"
    for worker in (view.leader, *view.owners):
        if worker not in workers:
            return f"view {view.number} names worker {worker}, which is no member"
    return ""


def _is_count(number: int) -> bool:
    return 0 <= number <= COUNT_MAX

"""Writes a run as a trace in Chrome's format, which Perfetto and chrome://tracing show.

One process stands for each node, with a lane for each worker and one for events. A span is drawn
only for time that a worker has written down whole; arrows lead from each event to those that it
caused. The format is described in "Trace Event Format" (docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Times are microseconds since the run began.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from holdfast.engine.records.clocks import ClockLine
from holdfast.engine.records.incidents import Event, list_incidents
from holdfast.engine.records.time_lines import ProcessTimes, TimeUse

Entry = dict[str, Any]
JOB = 0  # the process in the trace that stands for the job as a whole
_LANE = {use: number for number, use in enumerate(TimeUse)}  # the order within one line


def trace_entries(processes: Sequence[ProcessTimes], events: Sequence[Event]) -> Iterator[Entry]:
    """Yield the entries of the trace, names first."""
    times = [float(event["time"]) for event in events]
    began = min([p.began for p in processes] + times, default=0.0)
    hosts = sorted({process.host for process in processes})
    numbers = {host: JOB + 1 + number for number, host in enumerate(hosts)}
    yield _name("process_name", JOB, 0, "job")
    yield _name("thread_name", JOB, 0, "events")
    yield _name("thread_name", JOB, 1, "incidents")
    clocks = {process.host: _describe_clock(process.clock) for process in processes}
    for host, number in numbers.items():
        yield _name("process_name", number, 0, f"node {host or 'unknown'}{clocks[host]}")
    for process in processes:
        node = numbers[process.host]
        yield _name("thread_name", node, process.worker, f"worker {process.worker}")
        yield from _spans(process, node, began)
    yield from _events(events, began)
    yield from _incidents(events, began)


def _describe_clock(clock: ClockLine | None) -> str:
    """Return how far the clock of a node was corrected; nothing if it was not."""
    if clock is None or not clock.correction_s:
        return ""
    way = "ahead" if clock.ahead_s > 0 else "behind"
    return f" (clock {abs(clock.ahead_s):.3f} s {way}, corrected to {clock.error_s:.3f} s)"


def _spans(process: ProcessTimes, node: int, began: float) -> Iterator[Entry]:
    """Yield one span for each use in each line: how much of the line it took, in a fixed order."""
    step = 0
    for at, line in process.walk():
        offset = at
        for use in sorted(line.spent, key=_LANE.__getitem__):
            seconds = line.spent[use]
            yield {
                "ph": "X",
                "name": use.value,
                "cat": "worker",
                "pid": node,
                "tid": process.worker,
                "ts": _to_us(offset, began),
                "dur": seconds * 1e6,
                "args": {
                    "incarnation": process.incarnation,
                    "steps": f"{step} to {line.step}",
                    "line_s": line.seconds,
                },
            }
            offset += seconds
        step = line.step


def _events(events: Sequence[Event], began: float) -> Iterator[Entry]:
    """Yield an instant for each event, and an arrow from each of its causes to it."""
    known = {event["id"]: event for event in events if event.get("id")}
    arrows = 0
    for event in events:
        at = _to_us(float(event["time"]), began)
        more = {k: v for k, v in event.items() if k not in ("time", "kind")}
        yield _instant(event["kind"], at, more)
        for cause in event.get("causes", ()):
            if cause in known:
                arrows += 1
                end = {"name": "cause", "cat": "cause", "id": arrows, "pid": JOB, "tid": 0}
                yield {"ph": "s", "ts": _to_us(float(known[cause]["time"]), began), **end}
                yield {"ph": "f", "bp": "e", "ts": at, **end}


def _incidents(events: Sequence[Event], began: float) -> Iterator[Entry]:
    """Yield an asynchronous pair for each incident; one that is open has no end."""
    for incident in list_incidents(events):
        pair: Entry = {"name": incident.title, "cat": "incident", "id": incident.name}
        pair |= {"pid": JOB, "tid": 1}
        yield {
            "ph": "b",
            "ts": _to_us(incident.began_at, began),
            "args": dict(incident.cost),
            **pair,
        }
        if incident.cost:
            yield {"ph": "e", "ts": _to_us(incident.ended_at, began), **pair}


def _instant(name: str, at: float, more: dict[str, Any]) -> Entry:
    # An arrow begins and ends in a slice, so an event is a slice without length.
    return {
        "ph": "X",
        "name": name,
        "cat": "event",
        "pid": JOB,
        "tid": 0,
        "ts": at,
        "dur": 0,
        "args": more,
    }


def _name(kind: str, process: int, thread: int, name: str) -> Entry:
    return {"ph": "M", "name": kind, "pid": process, "tid": thread, "args": {"name": name}}


def _to_us(at: float, began: float) -> float:
    return (at - began) * 1e6

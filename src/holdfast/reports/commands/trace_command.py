"""`holdfast trace RUN` writes a run as a trace for Perfetto, in Chrome's format.

One process stands for each node, with a lane for each worker and one for events. A span is drawn
only for time that a worker has written down whole; arrows lead from each event to the events that
it caused. The format is described in "Trace Event Format" (docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU). Times are microseconds since the run began.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import IO, Any

from holdfast.engine.core.errors import UserError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.incidents import Event, list_incidents
from holdfast.engine.records.time_lines import ClockLine, ProcessTimes, TimeUse, read_times
from holdfast.engine.runtime.rundir import RunDir, read_run_events

Entry = dict[str, Any]
JOB = 0  # the process in the trace that stands for the job as a whole
_LANE = {use: number for number, use in enumerate(TimeUse)}  # the order within one line


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast trace`."""
    options = parser().parse_args(argv)
    run_dir = RunDir(options.run_dir)
    entries = trace_entries(read_times(run_dir.path), read_run_events(run_dir))
    path = options.output or run_dir.path / "trace.json"
    try:
        with open(path, "w", encoding="utf-8") as file:
            count = _write(file, entries)
    except OSError as error:
        raise UserError(f"{path} cannot be written: {error.strerror}") from None
    print_plain(f"trace: {path}, {count} entries; open it at https://ui.perfetto.dev")
    return 0


def _write(file: IO[str], entries: Iterator[dict[str, object]]) -> int:
    """Write the entries one by one; return how many there were."""
    count = 0
    file.write('{"displayTimeUnit": "ms", "traceEvents": [\n')
    for count, entry in enumerate(entries, 1):
        file.write((",\n" if count > 1 else "") + json.dumps(entry))
    file.write("\n]}\n")
    return count


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast trace",
        description="Write a trace of a run in Chrome's format: a lane for each worker, with the "
        "uses of its time, events with arrows from their causes, and incidents.",
    )
    found.add_argument("run_dir", metavar="RUN", type=Path, help="directory of the run")
    found.add_argument(
        "--output", type=Path, metavar="FILE", help="write it here (default: RUN/trace.json)"
    )
    return found


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
    """Return the correction of a node's clock as text; empty if there was none."""
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
    """Yield an asynchronous pair for each incident; an open one has no end."""
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

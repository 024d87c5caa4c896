"""Writes and reads the job's event log, a file of JSON lines.

Each line has a kind, a text for people, and the worker, view and step that it is about, if any.
"""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import msgspec

from holdfast.engine.core.routine_lines import RoutineLines
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.records.incidents import parse_event
from holdfast.engine.runtime.outlet import LogFile
from holdfast.engine.state.store.regular_files import open_regular, read_whole_lines

EVENT_BYTES_MAX = 1 << 20  # a longer line is no event
FAILED = "failed"  # kind of the event with the outcome of a failed job


class LoggedEvent(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Describes one event. `time`: seconds since the epoch, by the coordinator's clock."""

    time: float
    kind: str
    text: str
    worker: int | None = None
    view: int | None = None
    step: int | None = None
    node: str | None = None
    #: It is unique in the run. Lines of older releases have none.
    id: str = ""
    #: The ids of earlier lines that led to this one.
    causes: tuple[str, ...] = ()
    #: The cost of the incident that ended (see Cost).
    cost: dict[str, float] | None = None
    #: The workers of the view that begins, for example "0-3, 7".
    members: str = ""
    #: The view that begins repeats committed steps.
    again: bool = False


class EventSink:
    """Writes each event to the log, and for people to standard error.

    Routine lines repeat themselves: people see ever fewer of them, the log has all.
    """

    def __init__(self, path: Path) -> None:
        self._log = LogFile(path, print_line)
        self._lines = RoutineLines()
        self._own_lines = 0

    def next_own_id(self, term: int) -> str:
        """Return an id for a line that is not the core's."""
        self._own_lines += 1
        return f"{term}.s{self._own_lines}"

    def write(self, event: LoggedEvent) -> None:
        """Append one line soon. A log that cannot be written does not stop the job."""
        self._log.write(json.dumps(msgspec.to_builtins(event)).encode() + b"\n")
        shown = self._lines.show(event.kind, event.text, event.time)
        if shown and event.kind != FAILED:  # the launcher shows the outcome, once
            print_line(shown)


def read_events(path: Path) -> list[dict[str, Any]]:
    """Return the events so far as they stand in the log; none if there is no log yet.

    A line that is only half written, because its writer is at work or was killed, is left out.
    """
    try:
        os.close(open_regular(path))
    except FileNotFoundError:
        return []
    lines = read_whole_lines(path, EVENT_BYTES_MAX)
    return [event for event in map(parse_event, lines) if event is not None]

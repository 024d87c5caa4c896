"""Collects files that help to understand an incident, later and elsewhere, in one archive.

It is a zip archive within a budget: most important parts first, of logs only the ends. It is
made from the files of the run directory alone, so that it can also be made after a crash.
"""

from __future__ import annotations

import contextlib
import os
import zipfile
from collections.abc import Iterator, Sequence
from pathlib import Path

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.plain_text import escape_controls
from holdfast.engine.records.incidents import (
    Event,
    Incident,
    find_incident,
    list_incidents,
    tell_story,
)
from holdfast.engine.records.last_words import find_last_words
from holdfast.engine.records.recordings import RECORDINGS_DIR, order_of_name
from holdfast.engine.records.time_lines import TIMES_DIR
from holdfast.engine.runtime.job_events import read_events
from holdfast.engine.runtime.rundir import BUNDLES_DIR, STACKS_DIR, RunDir
from holdfast.engine.state.store.regular_files import read_up_to, regular_stream

BUNDLES_MAX = 32  # in a run directory; older ones are removed
BUNDLE_BYTES_MAX = 32 << 20
RECORDINGS_MAX = 3  # newest
EVENT_BYTES_MAX = 4 << 20
END_BYTES_MAX = 64 << 10  # for each log and each file of times or stacks
README = """\
An incident of a Holdfast job, or its state when `holdfast dump` was called.

{story}

  holdfast incident replay FILE   the coordinator's decisions, made again from what it heard
  events.jsonl                    the newest events
  recordings/                     what the coordinator heard
  stacks/                         where the workers' threads were when views ended
  logs/, times/                   the ends of these files
  job.json                        the settings of the job (its secret is not here)
{left_out}"""


def keep_bundle(run_dir: RunDir, event: str) -> Path:
    """Write the bundle of an event's incident to its place, and remove old ones; return its path.

    OSError; UserError.
    """
    folder = run_dir.path / BUNDLES_DIR
    folder.mkdir(exist_ok=True)
    incident = _find(read_events(run_dir.events), event)
    path = folder / f"{incident.name if incident is not None else event}.zip"
    write_bundle(run_dir, path, event)
    kept = sorted(folder.glob("*.zip"), key=order_of_name)
    for each in kept[:-BUNDLES_MAX]:
        each.unlink()
    return path


def write_bundle(run_dir: RunDir, path: Path, event: str = "") -> list[str]:
    """Write a bundle; return the names of the parts that had no room in it. UserError; OSError.

    `event`: id of an event of the incident with whose story it begins; empty: the newest incident.
    """
    run_dir.spec()  # refuses a directory without a run
    story = _tell_story(run_dir, event)
    draft, room = path.with_name(f".{path.name}.{os.getpid()}"), BUNDLE_BYTES_MAX
    left_out: list[str] = []
    try:
        with zipfile.ZipFile(draft, "w", zipfile.ZIP_DEFLATED) as bundle:
            for name, data in _parts(run_dir):
                if len(data) > room:
                    left_out.append(name)
                    continue
                room -= len(data)
                bundle.writestr(name, data)
            missing = f"Left out for lack of room: {', '.join(left_out)}\n" if left_out else ""
            text = README.format(story=escape_controls(story), left_out=missing)
            bundle.writestr("README.txt", text)
        draft.replace(path)
    finally:
        draft.unlink(missing_ok=True)
    return left_out


def _find(events: Sequence[Event], event: str) -> Incident | None:
    """Return the incident of an event, or the newest one if none is named; None without any."""
    incidents = list_incidents(events)
    if not event:
        return incidents[-1] if incidents else None
    with contextlib.suppress(UserError):
        return find_incident(incidents, event)
    return None


def _tell_story(run_dir: RunDir, event: str) -> str:
    """Return the story of the event's incident, or the event's own text if it has none."""
    events = read_events(run_dir.events)
    incident = _find(events, event)
    if incident is not None:
        return "\n".join(tell_story(incident, find_last_words(run_dir.path, incident)))
    said = (each["text"] for each in events if each.get("id") == event)
    return str(next(said, "There is no incident."))


def _parts(run_dir: RunDir) -> Iterator[tuple[str, bytes]]:
    """Yield the parts with their names, the most important ones first."""
    root = run_dir.path
    yield "job.json", _end_of(run_dir.job, EVENT_BYTES_MAX)
    yield "events.jsonl", _end_of(run_dir.events, EVENT_BYTES_MAX)
    recordings = sorted((root / RECORDINGS_DIR).glob("*"), key=order_of_name, reverse=True)
    for each in recordings[:RECORDINGS_MAX]:
        yield f"{RECORDINGS_DIR}/{each.name}", _end_of(each, BUNDLE_BYTES_MAX)
    for folder in (root / STACKS_DIR, run_dir.logs, root / TIMES_DIR):
        for each in _newest_first(folder):
            yield f"{folder.name}/{each.name}", _end_of(each, END_BYTES_MAX)


def _newest_first(folder: Path) -> list[Path]:
    found = []
    for each in folder.glob("*"):
        with contextlib.suppress(OSError):
            found.append((each.stat().st_mtime_ns, each))
    return [path for _, path in sorted(found, reverse=True)]


def _end_of(path: Path, bytes_max: int) -> bytes:
    with contextlib.suppress(OSError), regular_stream(path) as file:
        size = os.fstat(file.fileno()).st_size
        file.seek(max(size - bytes_max, 0))
        return read_up_to(file, bytes_max)
    return b""

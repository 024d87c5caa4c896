"""`holdfast explain RUN [EVENT]` lists the incidents of a run, or prints the story of one.

It reads the event log and prints; it makes no decision. It works for crashed runs, too.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Sequence
from pathlib import Path

from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.incidents import (
    describe_cost,
    find_incident,
    find_unsaved,
    list_incidents,
    tell_story,
)
from holdfast.engine.records.last_words import find_last_words
from holdfast.engine.records.summary import format_clock
from holdfast.engine.runtime.rundir import RunDir, read_run_events, shorten_failure


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast explain`."""
    options = parser().parse_args(argv)
    run_dir = RunDir(Path(options.run_dir))
    events = read_run_events(run_dir)
    incidents = list_incidents(events)
    if options.event is not None:
        found = find_incident(incidents, options.event)
        words = find_last_words(run_dir.path, found)
        told = {**found.to_dict(), "last_words": words}
        print_plain(
            json.dumps(told, indent=2) if options.json else "\n".join(tell_story(found, words))
        )
        return 0
    if options.json:
        print_plain(json.dumps([each.to_dict() for each in incidents], indent=2))
        return 0
    for each in incidents:
        at = format_clock(each.began_at)
        print_plain(f"{each.name:<8} {at}  {each.title}; {describe_cost(each)}")
    if unsaved := find_unsaved(events):
        print_plain(unsaved)
    if not incidents:
        print_plain(f"no {'other ' if unsaved else ''}incidents in {len(events)} events")
    else:
        print_plain(
            f"for the story of one: holdfast explain {options.run_dir} {incidents[-1].name}"
        )
    outcome = run_dir.outcome()
    if outcome:
        print_plain(f"the run is over: {shorten_failure(outcome)}")
    if outcome is None:
        print_plain(
            "the run has recorded no end: it is still running, or all of it was killed; "
            f"`holdfast status {options.run_dir}` tells which"
        )
    return 0


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast explain",
        description="List the incidents of a run, newest last, or tell the story of one: the "
        "fault, the reaction, and the cost. It reads the run's event log.",
    )
    found.add_argument("run_dir", metavar="RUN", help="directory of the run")
    found.add_argument("event", metavar="EVENT", nargs="?", help="id of an event of an incident")
    found.add_argument("--json", action="store_true", help="print JSON, for scripts")
    return found

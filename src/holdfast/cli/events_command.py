"""`holdfast events RUN` prints the event log of a run, also while it runs or after a crash."""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Sequence
from pathlib import Path

from holdfast.runtime.rundir import RunDir, read_run_events

POLL_S = 0.2


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast events`."""
    options = parser().parse_args(argv)
    run, shown, size = RunDir(Path(options.run_dir)), 0, -1
    while True:
        over, now = run.result.exists(), _size_of(run.events)
        if now != size:
            size, events = now, read_run_events(run)
            for event in events[shown:]:
                if options.kind in (None, event["kind"]):
                    print(json.dumps(event) if options.json else render(event), flush=True)
            shown = len(events)
        if not options.follow or over:
            return 0
        try:
            time.sleep(POLL_S)
        except KeyboardInterrupt:
            return 130


def _size_of(path: Path) -> int:
    """Return the size of a file in bytes, 0 if it is not there yet."""
    try:
        return path.stat().st_size
    except OSError:
        return 0


def render(event: dict[str, object]) -> str:
    """Return one event for people."""
    at = time.strftime("%H:%M:%S", time.localtime(float(str(event["time"]))))
    causes = event.get("causes")
    because = f"  <- {', '.join(map(str, causes))}" if isinstance(causes, list) and causes else ""
    return f"{at}  {event.get('id', ''):<8} {event['kind']:<11} {event['text']}{because}"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast events", description="Print the event log of a run, oldest first."
    )
    found.add_argument("run_dir", metavar="RUN", help="directory of the run")
    found.add_argument("--follow", action="store_true", help="go on until the run has ended")
    found.add_argument("--kind", metavar="KIND", help="only events of this kind")
    found.add_argument("--json", action="store_true", help="print the lines as they are")
    return found

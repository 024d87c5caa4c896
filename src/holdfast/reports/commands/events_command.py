"""`holdfast events RUN` prints the event log of a run, also while it runs or after a crash."""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from holdfast.engine.commands.shared_options import add_tls
from holdfast.engine.core.errors import NoAnswer, UserError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.net.tls import client_of
from holdfast.engine.records.incidents import add_utc
from holdfast.engine.records.run_tail import RunTail
from holdfast.engine.records.summary import format_clock
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.rundir import RunDir, read_run_events

POLL_S = 0.2
QUIET_S = 5.0  # without an event; then the coordinator is asked
ASK_AGAIN_S = 1.0  # after a question without an answer
GONE_S = 10.0  # without an answer; a launcher or an election replaces a dead coordinator earlier
CRASHED = 3  # exit status: the run has neither an end nor a coordinator


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast events`."""
    options = parser().parse_args(argv)
    run = RunDir(Path(options.run_dir))
    try:
        if options.follow:
            return _follow(run, options)
        _show(read_run_events(run), options)
        return 0
    except KeyboardInterrupt:
        return 130


def _follow(run: RunDir, options: argparse.Namespace) -> int:
    """Print the events as they come, until the run has ended or its coordinator is gone."""
    tls = client_of(options.tls)
    watch = CoordinatorWatch(lambda: job_status(run, tls), options.wait)
    read_run_events(run)  # raises UserError for a bad log
    tail = RunTail(run.path, events_max=0)
    while True:
        over = run.result.exists()
        if fresh := tail.look():
            _show(fresh, options)
            watch.note_event(time.monotonic())
        if over:
            return 0
        if news := watch.look(time.monotonic()):
            print_plain(f"holdfast: {news}", file=sys.stderr, flush=True)
        if watch.is_gone and not options.wait:
            return CRASHED
        time.sleep(POLL_S)


def _show(events: Sequence[dict[str, Any]], options: argparse.Namespace) -> None:
    for event in events:
        if options.kind in (None, event["kind"]):
            print_plain(json.dumps(add_utc(event)) if options.json else render(event), flush=True)


class CoordinatorWatch:
    """Asks a run's coordinator now and then whether it is still there.

    `ask` raises NoAnswer if no process answers. Any other UserError leaves that open, for example
    because certificates are missing here; the run is not given up then. Times are in seconds.
    """

    def __init__(self, ask: Callable[[], object], waits: bool) -> None:
        self._ask = ask
        # The command continues without a coordinator.
        self._waits = waits
        self._next = float("-inf")
        self._silent_since: float | None = None
        self.is_gone = False

    def note_event(self, now: float) -> None:
        """Record a new event: another process has written it."""
        self._next = now + QUIET_S
        self._silent_since = None

    def look(self, now: float) -> str:
        """Ask if it is time to; return a sentence if the coordinator has gone or come back."""
        if now < self._next:
            return ""
        try:
            self._ask()
        except NoAnswer as error:
            return self._miss(now, error.problem)
        except UserError:
            pass
        self.note_event(now)
        came_back, self.is_gone = self.is_gone, False
        return "a coordinator answers again" if came_back else ""

    def _miss(self, now: float, problem: str) -> str:
        self._next = now + ASK_AGAIN_S
        since = self._silent_since = now if self._silent_since is None else self._silent_since
        if self.is_gone or now - since < GONE_S:
            return ""
        self.is_gone = True
        then = "waiting until somebody resumes it" if self._waits else "--wait goes on following"
        return f"the run has no end and no live coordinator: {problem}; {then}"


def render(event: dict[str, object]) -> str:
    """Return one event for people."""
    at = format_clock(float(str(event["time"])))
    causes = event.get("causes")
    because = f"  <- {', '.join(map(str, causes))}" if isinstance(causes, list) and causes else ""
    return f"{at}  {event.get('id', ''):<8} {event['kind']:<11} {event['text']}{because}"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast events",
        description="Print the event log of a run, oldest first. The exit status is 3 if the "
        "followed run has no end and no coordinator answers any more.",
    )
    found.add_argument("run_dir", metavar="RUN", help="directory of the run")
    found.add_argument("--follow", action="store_true", help="go on until the run has ended")
    found.add_argument(
        "--wait",
        action="store_true",
        help="with --follow: go on also without a coordinator, until the run is resumed",
    )
    found.add_argument("--kind", metavar="KIND", help="only events of this kind")
    found.add_argument(
        "--json", action="store_true", help="print JSON lines, with times also in ISO 8601 (utc)"
    )
    add_tls(found)
    return found

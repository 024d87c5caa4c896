"""`holdfast incident replay FILE` makes a coordinator's decisions again, from a recording.

The machine is pure, so the same code makes the same decisions. Changed code can be tried on events
that have happened in earnest. A recording may describe a machine that never stops deciding, so a
replay has limits of memory and time.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import resource
import signal
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from holdfast.engine.core.errors import Damaged, UserError
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorEvent,
    Finish,
    Persist,
    ReportArrived,
    SendDirective,
    ServersAsked,
    StopRequested,
)
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.recordings import (
    DecisionDigest,
    HeardEvent,
    Machine,
    Recording,
    digest_core,
    digest_effects,
    open_recordings,
    read_header,
    read_recording,
    thaw,
)
from holdfast.engine.records.summary import format_clock

# Far more than any coordinator has, and needs for one decision.
MEMORY_BYTES_MAX = 2 << 30
DECISION_CPU_S_MAX = 5.0
# What the file system and the library for zip files raise.
UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)
SHOWN_MAX = 12  # effects of a decision that differs


@dataclass(frozen=True, slots=True)
class Announced:
    """Is one line that the machine announces, at a time in seconds since the epoch."""

    at: float
    announce: Announce


@dataclass(frozen=True, slots=True)
class FirstDifference:
    """Describes the first event after which the machine decides otherwise than recorded.

    `number`: counts events from 1. `error`: what the machine raised; empty if it decided.
    """

    number: int
    at: float
    event: CoordinatorEvent
    effects: tuple[CoordinatorEffect, ...] = ()
    error: str = ""


@dataclass(slots=True)
class ReplayResult:
    """Is the result of a replay. `seconds`: of recorded time."""

    events: int = 0
    decisions: int = 0
    seconds: float = 0.0
    told: list[Announced] = field(default_factory=list)
    difference: FirstDifference | None = None


def replay(recording: Recording) -> ReplayResult:
    """Replay a recording up to its end, or to the first difference. Damaged.

    An event without a recorded decision at the very end is the last before the coordinator's
    process died: the machine handles it as well, and any decision is right.
    """
    header, found = recording.header, ReplayResult()
    with limit_time():
        machine = thaw(header.machine)
    events = list(_pair(recording.records))
    for heard, decided in events:
        event = heard.event()
        found.events += 1
        found.seconds = heard.at - header.clock
        wall = header.began + found.seconds
        with limit_time():
            effects, digest, error = _decide(machine, event, heard.at)
        is_last = found.events == len(events)
        if error or digest != decided:
            if is_last and decided is None and not error:
                return found
            found.difference = FirstDifference(found.events, wall, event, tuple(effects), error)
            return found
        found.decisions += bool(effects)
        found.told += [Announced(wall, each) for each in effects if isinstance(each, Announce)]
    return found


def _pair(
    records: Sequence[HeardEvent | DecisionDigest],
) -> Iterator[tuple[HeardEvent, int | None]]:
    """Yield each event with the digest of its decision; None: it led to none."""
    heard: HeardEvent | None = None
    for each in records:
        if isinstance(each, HeardEvent):
            if heard is not None:
                yield heard, None
            heard = each
        elif heard is not None:
            yield heard, each.digest
            heard = None
    if heard is not None:
        yield heard, None


def _decide(
    machine: Machine, event: CoordinatorEvent, at: float
) -> tuple[list[CoordinatorEffect], int | None, str]:
    """Return the effects, their digest, and what the machine raised; empty if it decided."""
    try:
        effects = machine.handle(event, at)
        return effects, digest_effects(effects) if effects else None, ""
    except (Damaged, MemoryError):  # it is stopped by limits
        raise
    except Exception as error:  # noqa: BLE001 - a bug of the machine is a result
        return [], None, f"{type(error).__name__}: {error}"


def describe_event(event: CoordinatorEvent) -> str:
    """Return a few words on an event."""
    match event:
        case ReportArrived(report):
            return f"report {report.seq} of node {report.agent}"
        case StopRequested(reason):
            return f"a request to stop ({reason})"
        case ServersAsked(count):
            return f"a request for {count} servers"
        case _:
            return "the time that had passed"


def describe_effect(effect: CoordinatorEffect) -> str:
    """Return one line on an effect."""
    match effect:
        case Announce():
            return f"says ({effect.kind}): {effect.text}"
        case Persist(record):
            number = record.view.number if record.view else 0
            return f"keeps a record with view {number} and {len(record.slots)} workers"
        case SendDirective(directive):
            return f"sends a directive to node {directive.agent}"
        case Finish(outcome):
            return f"ends the job: {outcome or 'success'}"


@contextlib.contextmanager
def limit_memory() -> Iterator[None]:
    """Raise Damaged where the process would take much more memory than it has taken before."""
    before = resource.getrlimit(resource.RLIMIT_AS)
    pages = int(Path("/proc/self/statm").read_text().split()[0])
    wanted = pages * resource.getpagesize() + MEMORY_BYTES_MAX
    given = [limit for limit in before if limit != resource.RLIM_INFINITY]
    resource.setrlimit(resource.RLIMIT_AS, (min([wanted, *given]), before[1]))
    try:
        yield
    except MemoryError:
        raise Damaged(
            f"it takes more than {MEMORY_BYTES_MAX >> 30} GiB of memory, which no coordinator does"
        ) from None
    finally:
        resource.setrlimit(resource.RLIMIT_AS, before)


@contextlib.contextmanager
def limit_time() -> Iterator[None]:
    """Raise Damaged after much processor time. For the main thread alone, as signals are."""

    def end(number: int, frame: object) -> None:
        raise Damaged(
            f"a decision or the state takes more than {DECISION_CPU_S_MAX:g} s of processor time, "
            "which no coordinator does"
        )

    before = signal.signal(signal.SIGVTALRM, end)
    signal.setitimer(signal.ITIMER_VIRTUAL, DECISION_CPU_S_MAX)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)
        signal.signal(signal.SIGVTALRM, before)


def main(argv: Sequence[str]) -> int:
    """Run the command; `argv` follows `holdfast incident`. Status 1: a decision differs."""
    options = parser().parse_args(argv)
    results = list(_replay_all(options.source))
    if not results:
        raise UserError(f"{options.source} holds no recording of a coordinator")
    if options.json:
        print_plain(json.dumps([describe(*each) for each in results], indent=2))
    else:
        for each in results:
            for line in tell(*each):
                print_plain(line)
    return int(any(found.difference is not None for _, _, found in results))


def _replay_all(source: Path) -> Iterator[tuple[str, Recording, ReplayResult]]:
    """Replay all recordings of a bundle, of a run directory, or the one in a file, in their order.

    Only one recording is in memory at a time, so its records are dropped before it is yielded.
    UserError.
    """
    try:
        with limit_memory(), open_recordings(source) as streams:
            headers = {}
            for name, open_stream in streams.items():
                with open_stream() as stream:
                    headers[name] = read_header(stream)
            for name in sorted(headers, key=lambda n: (headers[n].term, headers[n].clock)):
                with streams[name]() as stream:
                    recording = read_recording(stream)
                try:
                    found = replay(recording)
                except Damaged as error:
                    raise UserError(f"{name} cannot be replayed: {error}") from None
                yield name, replace(recording, records=()), found
    except Damaged as error:
        raise UserError(f"{source} cannot be used: {error}") from None
    except UNREADABLE as error:
        raise UserError(f"{source} cannot be read: {error}") from None


def tell(name: str, recording: Recording, found: ReplayResult) -> Iterator[str]:
    """Yield lines on a replay: the announcements, and whether all decisions are the same."""
    header = recording.header
    yield f"{name}: term {header.term}, from {_clock(header.began)}, {found.seconds:.1f} s"
    for told in found.told:
        yield f"  {_clock(told.at)} {told.announce.kind}: {told.announce.text}"
    if recording.problem:
        yield f"  the recording ends early: {recording.problem}"
    difference = found.difference
    if difference is None:
        yield (
            f"  {found.events} events were told to the coordinator again; all {found.decisions} "
            "decisions are the recorded ones"
        )
        return
    where = f"event {difference.number}, {describe_event(difference.event)}"
    if difference.error:
        yield f"  {_clock(difference.at)} {where}: the coordinator fails: {difference.error}"
    else:
        yield f"  {_clock(difference.at)} {where}: another decision than recorded. Now it"
        for effect in difference.effects[:SHOWN_MAX]:
            yield f"    {describe_effect(effect)}"
        if len(difference.effects) > SHOWN_MAX:
            yield f"    and has {len(difference.effects) - SHOWN_MAX} more effects"
        if not difference.effects:
            yield "    does nothing"
    if header.core != digest_core():
        yield f"  it was recorded by other code (release {header.release}), which may explain this"


def describe(name: str, recording: Recording, found: ReplayResult) -> dict[str, Any]:
    """Return the same for scripts."""
    header, difference = recording.header, found.difference
    return {
        "recording": name,
        "term": header.term,
        "release": header.release,
        "same_code": header.core == digest_core(),
        "began": header.began,
        "seconds": found.seconds,
        "events": found.events,
        "decisions": found.decisions,
        "problem": recording.problem,
        "announced": [
            {"time": told.at, "id": told.announce.id, "kind": told.announce.kind}
            for told in found.told
        ],
        "difference": None
        if difference is None
        else {
            "event": difference.number,
            "time": difference.at,
            "what": describe_event(difference.event),
            "error": difference.error,
            "effects": [describe_effect(effect) for effect in difference.effects],
        },
    }


def _clock(at: float) -> str:
    clock = format_clock(at)
    return clock if clock == "unknown" else f"{clock}.{int(at * 10) % 10}"


def parser() -> argparse.ArgumentParser:
    found = argparse.ArgumentParser(
        prog="holdfast incident",
        description="Make a coordinator's decisions again, from a recording, and compare them "
        "with those that it made. No process of the job is needed. The exit status is 1 if a "
        "decision differs, which only other code can cause: so a recording is a test of a change.",
    )
    found.add_argument("what", choices=["replay"], help="replay: make the decisions again")
    found.add_argument(
        "source",
        metavar="FILE",
        type=Path,
        help="a bundle (RUN/post-mortem/*.zip, or from `holdfast dump`), a file of "
        "RUN/recordings, or the directory of a run",
    )
    found.add_argument("--json", action="store_true", help="print JSON, for scripts")
    return found

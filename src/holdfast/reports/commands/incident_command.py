"""`holdfast incident replay FILE` makes a coordinator's decisions again, from a recording."""

from __future__ import annotations

import argparse
import json
import struct
import zipfile
import zlib
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from holdfast.engine.core.errors import Damaged, UserError
from holdfast.engine.net.standard_streams import print_plain
from holdfast.engine.records.recordings import (
    Recording,
    digest_core,
    open_recordings,
    read_header,
    read_recording,
)
from holdfast.engine.records.summary import format_clock
from holdfast.reports.decision_replay import ReplayResult, describe_effect, describe_event, replay
from holdfast.reports.replay_limits import limit_memory

# What the file system and the library for zip files raise.
UNREADABLE = (
    *(OSError, EOFError, RuntimeError, ValueError),
    *(zipfile.BadZipFile, zlib.error, struct.error),
)
SHOWN_MAX = 12  # effects of a decision that differs


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

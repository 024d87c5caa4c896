"""Keeps recordings and bundles, so that people can understand a coordinator's decisions.

Both are written in threads, for which the coordinator does not wait. A disk that is too slow costs
a part of the recording, and never time: the waiting part is bounded, and beyond it the recording
stops until the disk has caught up. A file that cannot be written is given up, and the next one is
tried a while later. A bundle is a zip archive within a budget: most important parts first, of logs
only the ends. It is made from the files of the run directory alone, so that it can also be made
after a crash.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import threading
import time
import zipfile
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import zstandard

from holdfast.engine.core.errors import RELEASE, HoldfastError, UserError
from holdfast.engine.core.membership.coordinator_events import (
    Announce,
    CoordinatorEffect,
    CoordinatorEvent,
)
from holdfast.engine.core.plain_text import escape_controls
from holdfast.engine.records.incidents import (
    Event,
    Incident,
    find_incident,
    list_incidents,
    tell_story,
)
from holdfast.engine.records.last_words import find_last_words
from holdfast.engine.records.recordings import (
    RECORDINGS_DIR,
    DecisionDigest,
    Header,
    Machine,
    digest_core,
    digest_effects,
    encode_record,
    freeze,
    make_heard,
    order_of_name,
)
from holdfast.engine.records.time_lines import TIMES_DIR
from holdfast.engine.runtime.job_events import read_events
from holdfast.engine.runtime.rundir import BUNDLES_DIR, STACKS_DIR, RunDir
from holdfast.engine.state.store.regular_files import create_regular, read_up_to, regular_stream

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


# The next recording is begun after this many bytes before compression, and at least this many times
# as many as the machine has, whose writing costs a second in a job of a thousand nodes.
RECORDING_BYTES, BEGINNINGS = 64 << 20, 32
FILES_MAX = 16  # in a run directory, of all terms
WAITING_BYTES_MAX = 16 << 20
PACE_S = 0.2  # between two writes
END_S = 2.0  # for the last write
AGAIN_S = 60.0  # after a file that could not be written


class Recorder:
    """Records one term. `hear` precedes the machine's handling of an event, `note` follows."""

    def __init__(self, run_dir: Path, term: int, say: Callable[[str], None]) -> None:
        """Begin a term. `say`: takes a sentence on a part that is not recorded."""
        self._folder = run_dir / RECORDINGS_DIR
        self._term = term
        self._say = say
        self._core = digest_core()
        self._lock = threading.Lock()
        self._waiting: list[bytes | Path] = []  # a path: what follows goes to this new file
        self._waiting_bytes = 0
        self._room_bytes = 0  # in this recording; less than 0: it is long enough
        self._count = 0
        self._is_on = False
        self._problem = ""  # why the present file cannot be written
        self._not_before = float("-inf")  # the next file, by the machine's clock
        self._filled = threading.Event()
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._write, daemon=True, name="recorder")
        self._thread.start()

    def begin(self, machine: Machine, now: float) -> None:
        """Begin a recording with the machine as it is; not while too much waits for the disk."""
        is_slow = self._waiting_bytes > WAITING_BYTES_MAX // 2
        if is_slow or now < self._not_before:
            return
        try:
            state = freeze(machine)
        except TypeError as error:
            self._not_before = float("inf")
            self._say(f"what the coordinator hears is not recorded: {error}")
            return
        header = Header(
            release=RELEASE,
            core=self._core,
            term=self._term,
            began=time.time(),
            clock=now,
            machine=state,
        )
        self._count += 1
        self._is_on, self._room_bytes = True, max(RECORDING_BYTES, BEGINNINGS * len(state))
        self._put(self._folder / f"coordinator-{self._term}-{self._count}.zst")
        self._put(encode_record(header))

    def hear(self, event: CoordinatorEvent, now: float) -> None:
        """Record an event that the machine handles next."""
        if self._is_on:
            self._put(encode_record(make_heard(event, now)))

    def note(self, machine: Machine, effects: Sequence[CoordinatorEffect], now: float) -> None:
        """Record the machine's decision; begin the next recording if this one is long enough."""
        if self._problem:
            self._say(f"what the coordinator hears is not recorded: {self._problem}")
            self._problem, self._is_on, self._not_before = "", False, now + AGAIN_S
        if not self._is_on:
            self.begin(machine, now)
            return
        if effects:
            self._put(encode_record(DecisionDigest(digest_effects(effects))))
        if self._waiting_bytes > WAITING_BYTES_MAX:
            self._is_on = False
            self._say("the disk is slow: a part of what the coordinator hears is not recorded")
        elif self._room_bytes < 0:
            self.begin(machine, now)

    def close(self) -> None:
        """Write the rest, for a limited time."""
        self._over.set()
        self._filled.set()
        self._thread.join(END_S)

    def _put(self, part: bytes | Path) -> None:
        size = len(part) if isinstance(part, bytes) else 0
        self._room_bytes -= size
        with self._lock:
            self._waiting.append(part)
            self._waiting_bytes += size
        self._filled.set()

    def _write(self) -> None:
        output, is_over = _Output(), False
        while not is_over:
            self._filled.wait()
            self._filled.clear()  # before the look at `over`, which may come at any moment
            is_over = self._over.wait(PACE_S)
            with self._lock:
                parts, self._waiting = self._waiting, []
            for part in parts:
                if isinstance(part, Path):
                    output.begin(part)
                else:
                    output.write(part)
            output.flush()
            self._problem, output.problem = output.problem or self._problem, ""
            with self._lock:
                self._waiting_bytes = sum(len(p) for p in self._waiting if isinstance(p, bytes))
        output.end()


class _Output:
    """Writes one compressed file after the other; `problem`: why one was given up."""

    def __init__(self) -> None:
        self.problem = ""
        self._stream: zstandard.ZstdCompressionWriter | None = None

    def begin(self, path: Path) -> None:
        self.end()
        try:
            path.parent.mkdir(exist_ok=True)
            kept = sorted(path.parent.glob("coordinator-*.zst"), key=order_of_name)
            for each in kept[: len(kept) - FILES_MAX + 1]:
                each.unlink()
            file = os.fdopen(create_regular(path), "wb", buffering=0)
        except OSError as error:
            self.problem = str(error)
            return
        self._stream = zstandard.ZstdCompressor(level=3).stream_writer(file)

    def write(self, data: bytes) -> None:
        self._try(lambda stream: stream.write(data))

    def flush(self) -> None:
        self._try(lambda stream: stream.flush(zstandard.FLUSH_BLOCK))

    def end(self) -> None:
        self._try(lambda stream: stream.close())
        self._stream = None

    def _try(self, use: Callable[[Any], object]) -> None:
        try:
            if self._stream is not None:
                use(self._stream)
        except OSError as error:  # the disk is full, for example
            self._stream, self.problem = None, str(error)


SETTLE_S = 1.0  # until the lines of an incident are in its files
PAUSE_S = 30.0  # between two bundles: further incidents are in the next one's recordings
FINISH_S = 5.0  # for a bundle that is being written as the job ends


class BundleKeeper:
    """Writes one bundle at a time. `say`: takes a sentence on a bundle that cannot be written."""

    def __init__(self, run_dir: RunDir, say: Callable[[str], None]) -> None:
        self._run_dir = run_dir
        self._say = say
        self._task: asyncio.Task[None] | None = None
        self._next = ""  # the newest incident that has no bundle yet
        self._is_ending = asyncio.Event()

    def order(self, incident: str) -> None:
        """Order a bundle of the incident to which this event belongs."""
        self._next = incident
        if self._task is None or self._task.done():
            self._task = asyncio.ensure_future(self._work())

    async def finish(self) -> None:
        """Write the last bundle, if one is ordered, for a limited time."""
        self._is_ending.set()
        if self._task is not None:
            await asyncio.wait([self._task], timeout=FINISH_S)

    async def _work(self) -> None:
        while self._next:
            await self._pause(SETTLE_S)
            incident, self._next = self._next, ""
            try:
                await asyncio.to_thread(_write, self._run_dir, incident)
            except (HoldfastError, OSError) as error:
                self._say(f"incident {incident} has no bundle: {error}")
            await self._pause(PAUSE_S)

    async def _pause(self, duration_s: float) -> None:
        try:
            await asyncio.wait_for(self._is_ending.wait(), duration_s)
        except asyncio.TimeoutError:
            return


def _write(run_dir: RunDir, incident: str) -> None:
    from holdfast.engine.runtime.coordinate.black_box import keep_bundle  # it takes a while

    keep_bundle(run_dir, incident)


BUNDLED = ("resumed", "failed")  # kinds of events after which a bundle is kept


class BlackBox:
    """Records one machine. `say`: takes a sentence on a part that cannot be kept."""

    def __init__(self, run_dir: RunDir, machine: Machine, say: Callable[[str], None]) -> None:
        self._machine = machine
        self._recorder = Recorder(run_dir.path, machine.snapshot().record.term, say)
        self._bundles = BundleKeeper(run_dir, say)

    def begin(self) -> None:
        """Record from now on."""
        self._recorder.begin(self._machine, time.monotonic())

    def handle(self, event: CoordinatorEvent, now: float) -> Sequence[CoordinatorEffect]:
        """Pass an event to the machine, record it with its effects, and return these."""
        self._recorder.hear(event, now)
        try:
            effects = self._machine.handle(event, now)
        except Exception:  # a bug of ours: the recording ends with the event that has led to it
            self._recorder.close()
            raise
        self._recorder.note(self._machine, effects, now)
        for effect in effects:
            if isinstance(effect, Announce) and effect.kind in BUNDLED:
                self._bundles.order(effect.id)
        return effects

    async def close(self) -> None:
        """Write the rest, for a limited time."""
        self._recorder.close()
        await self._bundles.finish()

"""Keeps the coordinator's journal: the one record that must never be forgotten, and the term count.

A journal hands out terms and keeps the newest record; it does not know what a record means. Its
invariants: a term is handed out once, and is greater than all before it; what `save` was given is
what the next `load` returns, or the damage is named. There is no third outcome.

Only the newest record is ever used. The one before it looks harmless and is not: it lacks the
newest view, so a coordinator that trusted it would give that view's number to other members while
the first may still act in it. A coordinator without its record asks the agents, which know more. A
record with numbers that no coordinator can have written counts as damaged.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import time
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Protocol

import msgspec
import xxhash

from holdfast.engine.core.errors import (
    Damaged,
    Deposed,
    OtherRelease,
    UserError,
    newer_format,
    require,
)
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.views import View
from holdfast.engine.state.store.regular_files import create_regular, read_regular
from holdfast.engine.wire.strict import StrictDecoder

# Exit status of a coordinator whose term is over: started again, it stands by.
DEPOSED = 75
MAGIC = b"HFJOURN1"
_DECODER = StrictDecoder(JobRecord)
DIGEST_BYTES = 16
HEADER_BYTES = len(MAGIC) + 8 + DIGEST_BYTES
RECORD_BYTES_MAX = 256 << 20
NO_DAMAGE = ""
NOTE_BYTES = 64
COUNTED_MAX = 1 << 31  # terms that were counted are below this, whatever the clock shows


@dataclass(frozen=True, slots=True, kw_only=True)
class Loaded:
    """Describes the beginning of a coordinator."""

    #: The new term, greater than all terms before.
    term: int
    #: The newest record. None: the job has not begun, or there is damage.
    record: JobRecord | None
    #: The loss and its reason. The job may be running all the same.
    damage: str = NO_DAMAGE


class Journal(Protocol):
    """Declares a journal: `load` once, then `save` at will.

    All implementations pass one suite, in test_journal.py.
    """

    async def load(self) -> Loaded:
        """Begin a new term. UserError if another coordinator has this journal."""
        ...

    async def save(self, record: JobRecord) -> None:
        """Save a record, durably on return.

        HoldfastError: it may or may not be durable, so no decision may be made now. Deposed:
        another coordinator may have begun a term.
        """
        ...

    def close(self) -> None:
        """Give the journal up, for another coordinator."""
        ...


# ---------------------------------------------------------------- bytes


def seal(record: JobRecord) -> bytes:
    """Encode the record so that any change shows; it is compressed, since names repeat."""
    body = zlib.compress(msgspec.msgpack.encode(record), 1)
    return MAGIC + len(body).to_bytes(8, "big") + xxhash.xxh3_128(body).digest() + body


def unseal(data: bytes) -> JobRecord:
    """Decode the record. Damaged (or OtherRelease) with its fault, and no other error."""
    if not data:
        raise Damaged("it is empty")
    newer = newer_format(data, MAGIC)
    if data[: len(MAGIC)] != MAGIC[: len(data)] and not newer:
        raise Damaged(f"it begins with {data[: len(MAGIC)]!r}, not with {MAGIC!r}")
    body, size = data[HEADER_BYTES:], int.from_bytes(data[8:16], "big")
    if len(data) < HEADER_BYTES or len(body) < size:
        whole = HEADER_BYTES + size if len(data) >= 16 else HEADER_BYTES
        raise Damaged(f"it is cut short: {len(data)} of at least {whole} bytes are left")
    if len(body) > size:
        raise Damaged(f"{len(body) - size} bytes too many follow its end")
    if xxhash.xxh3_128(body).digest() != data[16:HEADER_BYTES]:
        raise Damaged(f"its {len(data)} bytes do not fit their digest")
    if newer and not _is_one_bit_off(data):
        raise OtherRelease(f"it {newer}")
    try:
        record = _DECODER.decode(zlib.decompressobj().decompress(body, RECORD_BYTES_MAX))
    except (zlib.error, msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        text = newer or f"is whole, but of another release of Holdfast: {error}"
        raise OtherRelease(f"it {text}") from None
    if newer:
        raise Damaged(f"it begins with {data[: len(MAGIC)]!r}, not with {MAGIC!r}")
    if problem := problem_of_record(record):
        raise Damaged(f"it contradicts itself: {problem}")
    return record


def _is_one_bit_off(data: bytes) -> bool:
    """Return whether one flipped bit can have made its format: the digest does not cover that."""
    return (data[len(MAGIC) - 1] ^ MAGIC[-1]).bit_count() == 1


# ---------------------------------------------------------------- in a file


class FileJournal:
    """Keeps the record in a file, replaced whole at each save, and locks it for one coordinator.

    The lock file also keeps the last term and whether a record has ever been written, so that a
    record which is damaged or has vanished is never taken for a job that has not begun.
    """

    def __init__(self, path: Path, clock: Callable[[], float] = time.time) -> None:
        self._path = path
        # Gives a term after the loss of everything, above any that was given after an earlier loss.
        self._clock = clock
        self._lock_path = path.with_name(path.name + ".lock")
        self._lock = -1
        self._term = 0
        self._recorded = False

    async def load(self) -> Loaded:
        try:
            if not self._take_lock():
                raise UserError(
                    f"another coordinator has the journal {self._path}: stop it first, or use "
                    "another --run-dir"
                )
            return self._load()
        except OSError as error:
            raise self._make_unusable_error(error) from None

    def is_held(self) -> bool:
        """Return whether a coordinator holds the journal, and so runs the job. UserError."""
        try:
            free = self._take_lock()
        except OSError as error:
            raise self._make_unusable_error(error) from None
        self.close()
        return not free

    async def save(self, record: JobRecord) -> None:
        if self._lock < 0:
            raise Deposed(f"the journal {self._path} is not held by this coordinator")
        require(record.term == self._term, f"a record of term {record.term} in term {self._term}")
        await asyncio.to_thread(self._save, seal(record))

    def close(self) -> None:
        if self._lock >= 0:
            os.close(self._lock)
            self._lock = -1

    def _take_lock(self) -> bool:
        self._lock = os.open(self._lock_path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        try:
            fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self.close()
            return False
        return True

    def _make_unusable_error(self, error: OSError) -> UserError:
        return UserError(
            f"the journal {self._path} cannot be used: {error.strerror}; mend that, or use "
            "another --run-dir"
        )

    def _load(self) -> Loaded:
        noted = _parse_note(os.pread(self._lock, NOTE_BYTES, 0))
        record, damage = self._read()
        if damage:
            damage = f"{damage}; it is kept as {self._move_aside().name}"
        elif record is None and noted is not None and noted.recorded:
            damage = f"the journal {self._path} is gone, though coordinators have written to it"
        terms = [noted.term] if noted else []
        if record is not None:
            terms.append(record.term)
        elif noted is None:  # no count is left, so take a number that none can have reached
            damage = damage or f"{self._lock_path}, which counts the terms, is unreadable"
            terms.append(COUNTED_MAX + int(self._clock()))
        self._term = max(terms) + 1
        self._recorded = record is not None or bool(damage)
        self._write_note()
        return Loaded(term=self._term, record=record, damage=damage)

    def _read(self) -> tuple[JobRecord | None, str]:
        """Return the record and its fault; neither if there is no file."""
        try:
            return read_record(self._path), NO_DAMAGE
        except OtherRelease as error:  # the record is good: leave it to a release that can read it
            raise UserError(str(error)) from None
        except Damaged as error:
            return None, str(error)

    def _move_aside(self) -> Path:
        """Rename the damaged file and keep it: it may help to find out what happened."""
        number = 1
        while (kept := self._path.with_name(f"{self._path.name}.damaged-{number}")).exists():
            number += 1
        os.rename(self._path, kept)
        _sync_directory(self._path.parent)
        return kept

    def _write_note(self) -> None:
        """Write the note in place, as a new file would be another lock; one sector holds it."""
        text = f"term {self._term} {'recorded' if self._recorded else 'fresh'}"
        note = f"{text} {xxhash.xxh3_64_hexdigest(text.encode())}\n".encode().ljust(NOTE_BYTES)
        if os.pwrite(self._lock, note, 0) < len(note):
            raise OSError(28, "No space left on device")
        os.fsync(self._lock)

    def _save(self, data: bytes) -> None:
        try:
            new = self._path.with_name(self._path.name + ".new")
            descriptor = create_regular(new, 0o600)
            try:
                _write_all(descriptor, data)
                os.fsync(descriptor)
            finally:
                os.close(descriptor)
            os.replace(new, self._path)
            _sync_directory(self._path.parent)
            if not self._recorded:
                self._recorded = True
                self._write_note()
        except OSError as error:
            raise UserError(
                f"cannot write {self._path}: {error.strerror}; free space or use --run-dir"
            ) from None


@dataclass(frozen=True, slots=True)
class _Note:
    """Formats the lock file's text, padded so that a new one always covers the old."""

    term: int
    recorded: bool


def _parse_note(data: bytes) -> _Note | None:
    """Parse the note; None if it is damaged. A file that was just made counts no term."""
    if not data:
        return _Note(0, recorded=False)
    words = data.decode(errors="replace").split()
    if len(words) != 4 or words[0] != "term" or not words[1].isdecimal():
        return None
    if words[3] != xxhash.xxh3_64_hexdigest(" ".join(words[:3]).encode()):
        return None
    return _Note(int(words[1]), recorded=words[2] == "recorded")


def read_record(path: Path) -> JobRecord | None:
    """Read the record in a journal file, only to look at it; None if there is no file. Damaged."""
    try:
        return unseal(read_regular(path, RECORD_BYTES_MAX))
    except FileNotFoundError:
        return None
    except OtherRelease as error:
        raise OtherRelease(f"the journal {path} cannot be used: {error}") from None
    except Damaged as error:
        raise Damaged(f"the journal {path} is damaged: {error}") from None
    except PermissionError:
        raise
    except OSError as error:
        raise Damaged(f"the journal {path} cannot be read: {error.strerror}") from None


def _write_all(descriptor: int, data: bytes) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def _sync_directory(path: Path) -> None:
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class PatientJournal:
    """Saves again for a while what cannot be saved, because a full disk may be given room.

    The workers train in the meantime, and changes wait. A record without a view, or of
    a job that has ended, is not worth it.
    `say` takes a sentence for people. `is_over` returns whether the job has ended while an older
    record waits. Times are in seconds.
    """

    def __init__(
        self,
        inner: Journal,
        patience_s: float,
        say: Callable[[str], None],
        is_over: Callable[[], bool] = lambda: False,
        again_s: float = 1.0,
    ) -> None:
        self._inner = inner
        self._is_over = is_over
        self._patience_s = patience_s
        self._say = say
        self._again_s = again_s

    async def load(self) -> Loaded:
        return await self._inner.load()

    async def save(self, record: JobRecord) -> None:
        until, tries = time.monotonic() + self._patience_s, 0
        while True:
            tries += 1
            try:
                await self._inner.save(record)
            except UserError as error:
                is_pointless = record.view is None or record.outcome is not None
                if is_pointless or self._is_over() or time.monotonic() >= until:
                    raise
                if tries == 1:
                    self._say(f"{error}: all changes wait, for {self._patience_s:g} s at most")
                await asyncio.sleep(self._again_s)
                continue
            if tries > 1:
                self._say("the journal can be written again")
            return

    def close(self) -> None:
        self._inner.close()


# ---------------------------------------------------------------- in memory


@dataclass(slots=True)
class MemoryStore:
    """Keeps a record that MemoryJournals share, as coordinators share a file, for tests."""

    data: bytes | None = None
    term: int = 0
    held: bool = False


class MemoryJournal:
    """Implements a journal over a MemoryStore, for tests."""

    def __init__(self, store: MemoryStore) -> None:
        self._store = store
        self._held = False

    async def load(self) -> Loaded:
        if self._store.held:
            raise UserError("another coordinator has the journal in memory: close it first")
        self._store.held = self._held = True
        self._store.term += 1
        record, damage = None, NO_DAMAGE
        if self._store.data is not None:
            try:
                record = unseal(self._store.data)
            except Damaged as error:
                damage = f"the journal in memory is damaged: {error}"
        return Loaded(term=self._store.term, record=record, damage=damage)

    async def save(self, record: JobRecord) -> None:
        if not self._held:
            raise Deposed("the journal in memory is not held by this coordinator")
        self._store.data = seal(record)

    def close(self) -> None:
        if self._held:
            self._store.held = self._held = False


COUNT_MAX = 1 << 53  # limits terms, views, steps and workers


def problem_of_record(record: JobRecord) -> str:
    """Return the reason why no coordinator can have written this record, or ""."""
    counts = {
        f"term {record.term}": record.term,
        f"view {record.views_used}": record.views_used,
        f"{record.workers_named} workers named": record.workers_named,
        f"{record.forgotten} records lost": record.forgotten,
        f"a furthest step {record.setbacks.furthest}": record.setbacks.furthest,
    }
    for what, count in counts.items():
        if not _is_count(count):
            return what
    for step in record.saved:
        if not _is_count(step):
            return f"a checkpoint of step {step}"
    return _problem_of_view(record.view) if record.view is not None else ""


def _problem_of_view(view: View) -> str:
    if not _is_count(view.number):
        return f"view {view.number}"
    if not _is_count(view.resume_step):
        return f"view {view.number} begins at step {view.resume_step}"
    workers = frozenset(view.workers)
    if len(workers) < len(view.members):
        return f"view {view.number} lists a member twice"
    for worker in (view.leader, *view.owners):
        if worker not in workers:
            return f"view {view.number} names worker {worker}, which is no member"
    return ""


def _is_count(number: int) -> bool:
    return 0 <= number <= COUNT_MAX

"""Copies the files of a run to another machine, for viewers that know only the job's address.

The coordinator reads its run directory and sends the new parts of files; the mirror appends these
to its files of the same names. So whatever reads the files of a run can read those of a mirror.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator, Mapping
from pathlib import Path

from holdfast.engine.core.errors import UserError
from holdfast.engine.net.secret import write_run_dir
from holdfast.engine.runtime.contact import Contact, ask
from holdfast.engine.runtime.rundir import RunDir, write_json
from holdfast.engine.state.store.regular_files import open_regular
from holdfast.engine.wire.job_document import JOB_FILE
from holdfast.engine.wire.messages import FilePart, FilesReply, FilesRequest

DOCUMENTS = (JOB_FILE, "journal", "result.json")  # written as a whole, and sent so
LOGS = ("events.jsonl", "times/*.jsonl", "usage/*.jsonl", "ledger/*.jsonl")  # grow at their ends
REPLY_BYTES = 1 << 20  # a reply's contents take about as much
DOCUMENT_BYTES = 2 << 20  # a larger document is not sent
LATE_BYTES = 1 << 20  # if a log is longer when the mirror begins, only its end is copied
_NAME = re.compile(r"(times|usage|ledger)/[A-Za-z0-9_%-][A-Za-z0-9_.%-]{0,200}\.jsonl")


def read_parts(run_dir: Path, held: Mapping[str, int]) -> FilesReply:
    """Return the parts of files in a run directory that a mirror lacks, up to some size.

    `held`: the position of the mirror in each file, from the parts that it has received. A file
    that cannot be read is left out.
    """
    parts: list[FilePart] = []
    left = REPLY_BYTES
    for part in _parts(run_dir, held):
        parts.append(part)
        left -= len(part.data)
        if left <= 0:
            return FilesReply(parts=tuple(parts), more=True)
    return FilesReply(parts=tuple(parts), more=False)


def _parts(run_dir: Path, held: Mapping[str, int]) -> Iterator[FilePart]:
    for name in DOCUMENTS:
        with contextlib.suppress(OSError):
            yield from _read_document(run_dir, name, held.get(name))
    for pattern in LOGS:
        for path in sorted(run_dir.glob(pattern)):
            with contextlib.suppress(OSError):
                name = path.relative_to(run_dir).as_posix()
                if _is_known(name):
                    yield from _read_end(path, name, held.get(name))


def _is_known(name: str) -> bool:
    """Return whether a run may have a file of this name that is mirrored."""
    return name in DOCUMENTS or name in LOGS or _NAME.fullmatch(name) is not None


def _read_document(run_dir: Path, name: str, held: int | None) -> Iterator[FilePart]:
    descriptor = open_regular(run_dir / name)
    try:
        found = os.fstat(descriptor)
        if found.st_mtime_ns != held and found.st_size <= DOCUMENT_BYTES:
            data = os.pread(descriptor, found.st_size, 0)
            yield FilePart(name=name, data=data, held=found.st_mtime_ns, replaces=True)
    finally:
        os.close(descriptor)


def _read_end(path: Path, name: str, held: int | None) -> Iterator[FilePart]:
    descriptor = open_regular(path)
    try:
        size = os.fstat(descriptor).st_size
        replaces = held is None or size < held
        at = max(size - LATE_BYTES, 0) if held is None or size < held else held
        if replaces and at:  # the line in which the end begins is left out
            at += os.pread(descriptor, LATE_BYTES, at).find(b"\n") + 1
        if replaces or at < size:
            data = os.pread(descriptor, min(size - at, REPLY_BYTES), at)
            yield FilePart(name=name, data=data, held=at + len(data), replaces=replaces)
    finally:
        os.close(descriptor)


class RunMirror:
    """Keeps a run directory here up to date with the directory of the job at an address."""

    def __init__(self, contact: Contact, secret: bytes, folder: Path) -> None:
        """Make the directory. Its files come with the first `update`."""
        self._contact = contact
        self._secret = secret
        self._held: dict[str, int] = {}
        self.run_dir = RunDir(folder)
        folder.mkdir(mode=0o700, exist_ok=True)
        write_run_dir(folder, secret)
        if not contact.election:  # else the job's document has the URL of the election
            host, port = contact.address
            write_json(self.run_dir.coordinator, {"host": host, "port": port})

    def update(self) -> None:
        """Ask until no new part is left. NoAnswer; UserError: the answer does not fit."""
        more = True
        while more:
            question = FilesRequest(held=tuple(sorted(self._held.items())))
            reply = ask(self._contact, self._secret, question, FilesReply)
            for part in reply.parts:
                self._write(part)
            more = reply.more

    def _write(self, part: FilePart) -> None:
        if not _is_known(part.name):
            raise UserError(f"the coordinator sends a file {part.name[:80]!r}, which no run has")
        path = self.run_dir.path / part.name
        path.parent.mkdir(exist_ok=True)
        if part.replaces:
            fresh = path.with_name(f".{path.name}.new")
            fresh.write_bytes(part.data)
            fresh.replace(path)
        else:
            with open(path, "ab") as file:
                file.write(part.data)
        self._held[part.name] = part.held

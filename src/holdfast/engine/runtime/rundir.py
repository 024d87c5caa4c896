"""Names the files of a run directory, and writes so that no reader sees half a file."""

from __future__ import annotations

import contextlib
import errno
import json
import os
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.engine.core.errors import Damaged, OtherRelease, UserError
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.net.secret import read_run_dir, write_run_dir
from holdfast.engine.records.goodput import Goodput, share_out
from holdfast.engine.runtime.job_events import read_events
from holdfast.engine.runtime.leadership.journal import read_record
from holdfast.engine.runtime.user_script import SOURCES_FILE, encode_sources
from holdfast.engine.state.store.regular_files import (
    DOCUMENT_BYTES_MAX,
    parse_json,
    read_json,
    read_regular,
)
from holdfast.engine.wire.job_document import COORDINATOR_FILE, JOB_FILE, decode_job, encode_job

RUNS = Path("holdfast-runs")  # runs are kept here, where no other place is given
STACKS_DIR = "stacks"  # workers write there where their threads are
BUNDLES_DIR = "post-mortem"  # a file for each incident


def choose_run_path() -> Path:
    """Return a path for a new run that was given none: by the time, and by this process."""
    return RUNS / f"{time.strftime('%Y%m%d-%H%M%S')}-{os.getpid()}"


@dataclass(frozen=True, slots=True)
class RunDir:
    """Paths inside one run directory, and the files with a format of their own."""

    path: Path

    @property
    def job(self) -> Path:
        return self.path / JOB_FILE

    @property
    def secret_file(self) -> Path:
        return self.path / "secret"

    @property
    def logs(self) -> Path:
        return self.path / "logs"

    @property
    def events(self) -> Path:
        return self.path / "events.jsonl"

    @property
    def result(self) -> Path:
        return self.path / "result.json"

    @property
    def _earlier(self) -> Path:
        return self.path / "earlier-result.json"

    @property
    def coordinator(self) -> Path:
        return self.path / COORDINATOR_FILE

    @property
    def journal(self) -> Path:
        return self.path / "journal"

    def create(self, spec: JobSpec, secret: bytes) -> None:
        """Make a fresh run directory. UserError when it is in use or cannot be written."""
        try:
            self.path.mkdir(parents=True, exist_ok=True)
            if self.job.exists():
                raise UserError(
                    f"--run-dir {self.path} already holds a run: name another directory"
                )
            self.logs.mkdir(exist_ok=True)
            (self.path / "ledger").mkdir(exist_ok=True)
            write_run_dir(self.path, secret)
            _replace(self.path / SOURCES_FILE, encode_sources(spec.cwd, spec.script))
            _replace(self.job, encode_job(spec))
        except OSError as error:
            raise make_unwritable_error(self.path, error) from None

    def reopen(self, *, ended: bool = False) -> None:
        """Forget the outcome of the run, which is to continue, but not that it ended.

        `ended`: all of its processes have ended, although it may have no result.
        """
        try:
            if self.result.exists():
                self.result.replace(self._earlier)
            elif ended:
                self._earlier.touch()
            else:
                self._earlier.unlink(missing_ok=True)
        except OSError as error:
            raise make_unwritable_error(self.path, error) from None

    def take_earlier_end(self) -> bool:
        """Return, once, whether the run had ended when it was reopened."""
        try:
            self._earlier.unlink()
            return True
        except OSError:
            return False

    def attach(self, spec: JobSpec, secret: bytes) -> None:
        """Make this the directory of a node that joins: a fresh one, or the job's own if shared."""
        if not self.job.exists():
            self.create(spec, secret)
        elif self.spec().job != spec.job:
            raise UserError(f"--run-dir {self.path} belongs to another job: name another directory")

    def spec(self) -> JobSpec:
        """Read the job that runs here. UserError: its document is missing, damaged or foreign."""
        try:
            return decode_job(self._read(JOB_FILE))
        except OtherRelease as error:
            raise UserError(f"{self.job} cannot be used: {error}") from None
        except Damaged as error:
            raise UserError(
                f"{self.job} is damaged, or of another release of Holdfast: {error}"
            ) from None

    def secret(self) -> bytes:
        return read_run_dir(self.path)

    def address(self) -> tuple[str, int]:
        """Return the host and port at which the coordinator listens."""
        found = self._read_json(COORDINATOR_FILE)
        try:
            return str(found["host"]), int(found["port"])
        except (KeyError, TypeError, ValueError):
            raise UserError(f"{self.coordinator} is damaged: {found!r}") from None

    def outcome(self) -> str | None:
        """Return the outcome of the run; None while it has not ended."""
        try:
            return str(read_json(self.result)["outcome"])
        except (OSError, ValueError, KeyError, TypeError):
            return None

    def load_record(self) -> JobRecord | None:
        """Return the newest record, only to look at it; None if there is none or it is damaged."""
        with contextlib.suppress(OSError, Damaged):
            return read_record(self.journal)
        return None

    def check_journal(self) -> None:
        """Raise UserError if only another release of Holdfast can continue from the journal."""
        try:
            read_record(self.journal)
        except OtherRelease as error:
            raise UserError(str(error)) from None
        except (OSError, Damaged):
            return  # the coordinator deals with that

    def _read(self, name: str) -> bytes:
        path = self.path / name
        try:
            return read_regular(path, DOCUMENT_BYTES_MAX)
        except (FileNotFoundError, NotADirectoryError):
            if not self.path.is_dir():
                hint = "`holdfast run` prints its own at start"
                raise UserError(f"there is no run directory {self.path}: {hint}") from None
            raise UserError(f"{path} does not exist: is {self.path} a run directory?") from None
        except OSError as error:
            raise UserError(f"{path} cannot be read: {error}") from None

    def _read_json(self, name: str) -> Any:
        try:
            return parse_json(self._read(name))
        except ValueError as error:
            raise UserError(f"{self.path / name} cannot be read: {error}") from None


def is_full(path: Path) -> bool:
    """Return whether the file system of a directory has no block left for this user."""
    with contextlib.suppress(OSError):
        return os.statvfs(path).f_bavail == 0
    return False


def make_unwritable_error(path: Path, error: OSError) -> UserError:
    if path.exists() and not path.is_dir():
        return UserError(f"--run-dir {path} is a file: name a directory")
    full = error.errno in (errno.ENOSPC, errno.EDQUOT)
    remedy = "free space there, or name" if full else "name"
    return UserError(
        f"cannot write under {path}: {error.strerror}; {remedy} another directory with --run-dir"
    )


def write_json(path: Path, value: object) -> None:
    """Write a file of the run directory, whole or not at all. UserError where that fails."""
    try:
        _replace(path, json.dumps(value, indent=2).encode() + b"\n")
    except OSError as error:
        raise make_unwritable_error(path.parent, error) from None


def _replace(path: Path, data: bytes) -> None:
    temporary = path.with_name(f".{path.name}.{os.getpid()}")
    temporary.write_bytes(data)
    os.replace(temporary, path)


def check_run(run: RunDir) -> None:
    """Raise UserError if there is no run here."""
    if not run.job.exists():
        raise UserError(f"{run.path} holds no run: name the directory given as --run-dir")


def read_run_events(run: RunDir) -> list[dict[str, Any]]:
    """Return the events so far. UserError: there is no run here, or its log is no log."""
    check_run(run)
    try:
        return read_events(run.events)
    except (OSError, ValueError) as error:
        raise UserError(f"{run.events} cannot be read: {error}") from None


def shorten_failure(outcome: str) -> str:
    """Return the reason of a failure in one line: of a traceback the exception alone."""
    first, _, rest = outcome.partition("\n")
    who, traceback, _ = first.partition("Traceback (most")
    return f"{who}{rest.splitlines()[-1]}" if traceback and rest else first


def read_goodput(run_dir: RunDir) -> Goodput:
    """Return the uses of a run's time. UserError if its workers have not recorded it."""
    found = share_out(run_dir.path, read_run_events(run_dir))
    if found is None:
        raise UserError(
            f"{run_dir.path} holds no times of workers: none has begun yet, or the run is of an "
            "older Holdfast, or of --compat"
        )
    return found

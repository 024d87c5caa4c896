"""Finds the job's secret and derives keys from it.

The secret is what makes a process part of a job. So it is taken only from places that other users
cannot read, never from a command line, and never passed on to child processes.
"""

from __future__ import annotations

import errno
import hashlib
import hmac
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from holdfast.engine.core.errors import UserError

VARIABLE = "HOLDFAST_SECRET"
SECRET_BYTES_MIN = 32
FILE_BYTES_MAX = 4096
RUN_DIR_FILE = "secret"
ADVICE = "make one with: (umask 077; openssl rand -hex 32 > FILE)"


def load_secret(
    environ: MutableMapping[str, str], *, file: Path | None = None, run_dir: Path | None = None
) -> bytes:
    """Load the secret from `file`, else HOLDFAST_SECRET, else the run directory. UserError.

    The variable is removed from `environ` in any case, so that children do not inherit it.
    """
    text = environ.pop(VARIABLE, None)
    if file is not None:
        return read_secret_file(file)
    if text is not None:
        return parse_secret(text, VARIABLE)
    if run_dir is not None and os.path.lexists(run_dir / RUN_DIR_FILE):
        return read_run_dir(run_dir)
    where = f" in {run_dir}" if run_dir is not None else ""
    raise UserError(
        f"there is no job secret{where}: give the job's --run-dir, --secret-file or {VARIABLE}; "
        f"{ADVICE}"
    )


def read_secret_file(path: Path) -> bytes:
    """Read the secret from a file that other users cannot read. UserError.

    The rule is PostgreSQL's for its keys: a file of ours must be closed to group and world (0600,
    0400); a file owned by root may be readable by its group as well (0440, 0640), since that is how
    Kubernetes hands a secret to a pod that does not run as root (`defaultMode: 0440`, `fsGroup`).
    Links are followed, as Kubernetes mounts need; the file that was opened is the one checked.
    """
    try:
        return _read(path, 0)
    except OSError as error:
        raise UserError(f"the secret file {path} cannot be read: {error.strerror}") from None


def _read(path: Path, flags: int) -> bytes:
    """Open the file with these further flags, check it, and parse it. OSError, UserError."""
    # Not blocking: a pipe in the file's place must not hang us.
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK | flags)
    try:
        refusal = _reason_to_refuse(os.fstat(descriptor))
        if refusal:
            raise UserError(f"the secret file {path} {refusal}")
        data = os.read(descriptor, FILE_BYTES_MAX)
    finally:
        os.close(descriptor)
    return parse_secret(data.decode("ascii", errors="replace"), str(path))


def _reason_to_refuse(found: os.stat_result) -> str:
    """Return the reason why a secret must not come from this file; empty if it may."""
    me = os.geteuid()
    if not stat.S_ISREG(found.st_mode):
        return "is not a regular file: name one"
    if found.st_uid not in (0, me):
        return f"belongs to user {found.st_uid}: it must be yours or root's"
    if found.st_mode & (0o037 if found.st_uid == 0 else 0o077):
        return (
            f"has mode {stat.S_IMODE(found.st_mode):04o}, so others can read or change it: chmod "
            "0600 (in Kubernetes, defaultMode: 0400, or 0440 with an fsGroup)"
        )
    return ""


def write_run_dir(path: Path, secret: bytes) -> None:
    """Write the secret into a run directory, as a new file that only its owner can read. OSError.

    Any older file of its name is removed, and a link is never followed: in a directory where
    other users can write, they could choose its place and its readers.
    """
    file = path / RUN_DIR_FILE
    file.unlink(missing_ok=True)
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW | os.O_CLOEXEC
    with open(os.open(file, flags, 0o600), "w") as opened:
        opened.write(secret.hex())


def read_run_dir(path: Path) -> bytes:
    """Read the secret that `holdfast run` made in its directory. UserError.

    It must be the file that was made there: no link, and closed to other users as any secret file
    is.
    """
    if not path.is_dir():
        raise UserError(f"there is no run directory {path}: `holdfast run` prints its own at start")
    file = path / RUN_DIR_FILE
    try:
        return _read(file, os.O_NOFOLLOW)
    except OSError as error:
        if error.errno == errno.ELOOP:
            raise UserError(f"{file} is a link: put the secret itself there, mode 0600") from None
        raise UserError(f"{path} has no readable secret ({error}): is it a run?") from None


def parse_secret(text: str, where: str) -> bytes:
    """Parse at least 32 bytes of hexadecimal digits. UserError, which never shows the input."""
    digits = "".join(text.split())
    try:
        secret = bytes.fromhex(digits)
    except ValueError:
        raise UserError(f"{where} does not hold hexadecimal digits: {ADVICE}") from None
    if len(secret) < SECRET_BYTES_MIN:
        raise UserError(
            f"{where} holds {len(digits)} hexadecimal digits, and a job secret needs at least "
            f"{2 * SECRET_BYTES_MIN}: {ADVICE}"
        )
    return secret


def derive_peer_key(secret: bytes, job: str) -> bytes:
    """Derive the key that a job's workers prove to each other.

    Jobs that share a secret have different ones, and the secret cannot be computed from it.
    """
    return hmac.digest(secret, b"holdfast peer key 2|" + job.encode(), hashlib.sha256)

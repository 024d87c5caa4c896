"""Finds the job's secret and derives keys from it.

The secret is what makes a process part of a job. So it is taken only from places that others cannot
read, never from a command line, and never passed on to child processes.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import stat
from collections.abc import MutableMapping
from pathlib import Path

from holdfast.core.errors import UserError

VARIABLE = "HOLDFAST_SECRET"
SECRET_BYTES_MIN = 32
FILE_BYTES_MAX = 4096
ADVICE = "make one with: openssl rand -hex 32"


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
    if run_dir is not None and (run_dir / "secret").exists():
        return read_run_dir(run_dir)
    where = f" in {run_dir}" if run_dir is not None else ""
    raise UserError(
        f"there is no job secret{where}: give the job's --run-dir, --secret-file or {VARIABLE}; "
        f"{ADVICE}"
    )


def read_secret_file(path: Path) -> bytes:
    """Read the secret from a file that others cannot read. UserError.

    The rule is PostgreSQL's for its keys: a file of ours must be closed to group and others (0600,
    0400); one owned by root may be readable by its group as well (0440, 0640), since that is how
    Kubernetes hands a secret to a pod that does not run as root (`defaultMode: 0440`, `fsGroup`).
    Links are followed, as Kubernetes mounts need; the file that was opened is the one checked.
    """
    try:
        # Not blocking: a pipe in the file's place must not hang us.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    except OSError as error:
        raise UserError(f"the secret file {path} cannot be read: {error.strerror}") from None
    try:
        refusal = _unfit(os.fstat(descriptor))
        if refusal:
            raise UserError(f"the secret file {path} {refusal}")
        data = os.read(descriptor, FILE_BYTES_MAX)
    except OSError as error:
        raise UserError(f"the secret file {path} cannot be read: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return parse_secret(data.decode("ascii", errors="replace"), str(path))


def _unfit(found: os.stat_result) -> str:
    """Tell why a secret must not come from this file; empty if it may."""
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


def read_run_dir(path: Path) -> bytes:
    """Read the secret that `holdfast run` made in its directory. UserError."""
    if not path.is_dir():
        raise UserError(f"there is no run directory {path}: `holdfast run` prints its own at start")
    try:
        text = (path / "secret").read_text(encoding="ascii")
    except (OSError, ValueError) as error:
        raise UserError(f"{path} has no readable secret ({error}): is it a run?") from None
    return parse_secret(text, str(path / "secret"))


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


def derive_peer_key(secret: bytes) -> bytes:
    """Derive the key by which workers know each other; the secret cannot be computed from it."""
    return hmac.digest(secret, b"holdfast peer key 1", hashlib.sha256)

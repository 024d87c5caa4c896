"""Turns the job document into bytes and back: JSON, in the run directory and in etcd.

A document has exact types, no unknown parts and passes every check of the core, or is refused.
"""

from __future__ import annotations

from typing import Any

import msgspec

from holdfast.engine.core.errors import Damaged, OtherRelease, describe_newer_writer
from holdfast.engine.core.job_problems import find_problem
from holdfast.engine.core.job_spec import JobSpec

FORMAT = 1
JOB_FILE = "job.json"  # its name in every run directory
COORDINATOR_FILE = "coordinator.json"  # where the coordinator listens, in its own run directory


def encode_job(spec: JobSpec) -> bytes:
    """Write the document as indented JSON, the same bytes each time."""
    document = {"format": FORMAT, **msgspec.to_builtins(spec)}
    return msgspec.json.format(msgspec.json.encode(document), indent=2) + b"\n"


def decode_job(data: bytes) -> JobSpec:
    """Read the job that a document describes. Damaged: it describes none, for a reason.

    OtherRelease: a newer release wrote it.
    """
    try:
        plain = msgspec.json.decode(data)
        _check_format(plain)
        spec = msgspec.convert(plain, JobSpec)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise Damaged(str(error)) from None
    problem = _unknown(plain, msgspec.to_builtins(spec)) or find_problem(spec)
    if problem:
        raise Damaged(problem)
    return spec


def _check_format(plain: Any) -> None:
    """Take the format out of a document, which may lack it: the first ones had none."""
    found = plain.pop("format", FORMAT) if isinstance(plain, dict) else FORMAT
    if isinstance(found, int) and found > FORMAT:
        raise OtherRelease(f"it {describe_newer_writer(found, FORMAT)}")
    if found != FORMAT:
        raise Damaged(f"its format is {found!r}, where {FORMAT} was expected")


def _unknown(found: dict[str, Any], known: dict[str, Any]) -> str:
    """Name the first key of a document that no setting has; empty if there is none."""
    for name, value in found.items():
        if name not in known:
            return f"it has an unknown part {name!r}"
        if isinstance(value, dict) and (inner := _unknown(value, known[name])):
            return f"{inner} in {name!r}"
    return ""

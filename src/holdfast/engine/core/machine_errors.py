"""Judges whether an error is the script's or a machine's own. Pure.

An error of the script ends the job, because it would happen on any machine. A machine's own error,
a full disk for instance, costs the job one worker (membership/machine_losses.py).
"""

from __future__ import annotations

import enum
import errno
import re
from collections.abc import Sequence
from dataclasses import dataclass


class MachineError(enum.Enum):
    """Names the errors that are a machine's own."""

    DISK_FULL = "disk full"
    QUOTA = "disk quota"
    DEVICE = "device"
    READ_ONLY = "read-only file system"
    STALE = "stale file system"
    DESCRIPTORS = "descriptors"
    MEMORY = "memory"
    SHARED_MEMORY = "shared memory"
    THREADS = "threads"
    LIBRARY = "library"
    GPU_MEMORY = "GPU memory"
    GPU = "GPU"
    KILLED = "killed for lack of memory"
    UNREPORTED = "unreported end"
    OTHER = "other"

    @property
    def what(self) -> str:
        """Return a phrase that "on node X" may follow."""
        return _WORDS[self][0]

    @property
    def remedy(self) -> str:
        """Return the remedy for people; empty: that depends."""
        return _WORDS[self][1]


_WORDS: dict[MachineError, tuple[str, str]] = {
    MachineError.DISK_FULL: ("a disk is full", "free space there"),
    MachineError.QUOTA: ("a disk quota is used up", "free space there, or raise the quota"),
    MachineError.DEVICE: (
        "a disk or another device cannot be read or written",
        "`holdfast doctor` may find it",
    ),
    MachineError.READ_ONLY: ("a file system cannot be written", "mount it for writing"),
    MachineError.STALE: ("a network file system is stale", "mount it again"),
    MachineError.DESCRIPTORS: ("no file descriptor is left", "raise the limit (ulimit -n)"),
    MachineError.MEMORY: (
        "no memory is left",
        "run fewer workers there, make batches smaller, or raise the machine's limit",
    ),
    MachineError.SHARED_MEMORY: ("/dev/shm is full", ""),  # the report ends with its size
    MachineError.THREADS: (
        "no more threads or processes can be started",
        "raise their limit (ulimit -u, or pids.max of the container)",
    ),
    MachineError.LIBRARY: ("a library is missing", "install it there"),
    MachineError.GPU_MEMORY: (
        "a GPU has no memory left",
        "end what else uses that GPU, or make batches smaller",
    ),
    MachineError.GPU: ("a GPU has failed", "`holdfast doctor` may find it"),
    MachineError.KILLED: (
        "killed by the kernel for lack of memory",
        "run fewer workers there, make batches smaller, or raise the machine's limit",
    ),
    MachineError.UNREPORTED: ("its process ended without a report", "see the worker's log there"),
    MachineError.OTHER: ("its machine has failed it", ""),
}

_BY_NUMBER = {
    errno.ENOSPC: MachineError.DISK_FULL,
    errno.EDQUOT: MachineError.QUOTA,
    errno.EIO: MachineError.DEVICE,
    errno.EUCLEAN: MachineError.DEVICE,
    errno.EROFS: MachineError.READ_ONLY,
    errno.ESTALE: MachineError.STALE,
    errno.EMFILE: MachineError.DESCRIPTORS,
    errno.ENFILE: MachineError.DESCRIPTORS,
    errno.ENOMEM: MachineError.MEMORY,
}
_BY_CLASS = {
    "MemoryError": MachineError.MEMORY,
    "ImportError": MachineError.LIBRARY,
    "OutOfMemoryError": MachineError.GPU_MEMORY,
    "WorldError": MachineError.OTHER,
}
#: Parts of messages by which Python, PyTorch and CUDA report such an error as a RuntimeError.
_BY_TEXT = {
    "unable to allocate shared memory": MachineError.SHARED_MEMORY,
    "out of shared memory": MachineError.SHARED_MEMORY,
    "DefaultCPUAllocator: can't allocate memory": MachineError.MEMORY,
    "can't start new thread": MachineError.THREADS,
    "CUDA error: out of memory": MachineError.GPU_MEMORY,
    "uncorrectable": MachineError.GPU,
    "no CUDA-capable device": MachineError.GPU,
    "CUDA-capable device(s) is/are busy": MachineError.GPU,
}
#: An exception that crosses from one process to another keeps its number only in its text.
_NUMBER = re.compile(r"\[Errno (\d+)\]")


@dataclass(frozen=True, slots=True, kw_only=True)
class Raised:
    """Describes an exception: the names of its class and of those above, its text and errno."""

    classes: tuple[str, ...]
    text: str = ""
    number: int | None = None


@dataclass(frozen=True, slots=True)
class ErrorVerdict:
    """Names the machine's own error, or none if the script is at fault, and the reason."""

    error: MachineError | None
    reason: str


def judge_error(chain: Sequence[Raised]) -> ErrorVerdict:
    """Judge an error of a script; `chain`: the exception, then its causes.

    The first clear one decides: a library that cannot write raises an error of its own. An error
    that the user can repair is the script's, except for a library, which may be there on other
    machines.
    """
    found = [(error, each) for each in chain if (error := _find_error(each)) is not None]
    if chain and "UserError" in chain[0].classes:
        found = [pair for pair in found if pair[0] is MachineError.LIBRARY]
    if not found:
        return ErrorVerdict(None, "no machine is known to cause it")
    error, raised = min(found, key=lambda pair: pair[0] is MachineError.OTHER)
    return ErrorVerdict(error, f"{raised.classes[0]}: {error.what}")


def _find_error(raised: Raised) -> MachineError | None:
    if "OSError" in raised.classes:
        named = _NUMBER.search(raised.text)
        number = int(named[1]) if raised.number is None and named else raised.number
        error = _BY_NUMBER.get(number or 0)
        is_shared = error is MachineError.DISK_FULL and "/dev/shm" in raised.text
        return MachineError.SHARED_MEMORY if is_shared else error
    for name, error in _BY_CLASS.items():
        if name in raised.classes:
            return error
    found = (error for text, error in _BY_TEXT.items() if text in raised.text)
    return next(found, None) if "RuntimeError" in raised.classes else None

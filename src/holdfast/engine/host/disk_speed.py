"""Try out the disk under a directory: space, fsync, writing, reading back.

Runs in a process of its own, because a file system that hangs cannot be interrupted. Its file has
no name, or loses it as soon as it is open, so no file is left behind.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import tempfile
import time
from pathlib import Path
from statistics import median

from holdfast.engine.host.checks_trials import DiskSample
from holdfast.engine.host.findings import MIB

PREFIX = ".holdfast-doctor-"
SYNCS = 20
SYNC_BYTES = 4096
WRITE_BYTES = 256 * MIB
SPARE_PART = 4  # never write more than this part of the free space


def try_disk(directory: str, *, syncs: int = SYNCS, write_s: float = 0.0) -> DiskSample:
    """Sync `syncs` small writes; then write and read back for about `write_s` seconds, if any."""
    try:
        found = os.statvfs(directory)
        free = found.f_bavail * found.f_frsize
        # Without a name (O_TMPFILE) where the file system can, so that even a kill leaves no file.
        with tempfile.TemporaryFile(prefix=PREFIX, dir=directory, buffering=0) as file:
            descriptor = file.fileno()
            times = sync_times(descriptor, syncs, max(write_s, 1.0))
            rate, wrong = None, False
            if write_s > 0:
                size = min(WRITE_BYTES, free // SPARE_PART) // MIB * MIB
                rate, wrong = write_and_read(descriptor, size, write_s)
    except OSError as error:
        return DiskSample(directory=directory, failure=error.strerror or str(error))
    return DiskSample(
        directory=directory,
        filesystem=filesystem_of(directory, Path("/proc/self/mountinfo")),
        free_bytes=free,
        inodes=found.f_favail / found.f_files if found.f_files else None,
        sync_s=median(times) if times else None,
        sync_max_s=max(times, default=None),
        write_per_s=rate,
        read_back_wrong=wrong,
    )


def sync_times(descriptor: int, count: int, budget_s: float) -> list[float]:
    """Time `count` small writes with fsync, in seconds; fewer when they take long."""
    block = os.urandom(SYNC_BYTES)
    times: list[float] = []
    end = time.perf_counter() + budget_s
    while len(times) < count and (not times or time.perf_counter() < end):
        started = time.perf_counter()
        _write(descriptor, block)
        os.fsync(descriptor)
        times.append(time.perf_counter() - started)
    return times


def write_and_read(descriptor: int, bytes_max: int, budget_s: float) -> tuple[float | None, bool]:
    """Return (bytes written and synced a second, whether reading back gave other bytes).

    As much is read back as there is time for, and at least one block.
    """
    block = bytearray(os.urandom(MIB))  # random: some disks compress
    offset = os.lseek(descriptor, 0, os.SEEK_END)
    digests: list[bytes] = []
    spent_s = 0.0
    while (len(digests) + 1) * MIB <= bytes_max and spent_s < budget_s:
        block[:8] = len(digests).to_bytes(8, "little")  # no two are equal: some disks deduplicate
        digests.append(_digest(block))
        started = time.perf_counter()
        _write(descriptor, block)
        spent_s += time.perf_counter() - started
    if not digests:
        return None, False
    written = len(digests) * MIB
    started = time.perf_counter()
    os.fsync(descriptor)
    spent_s += time.perf_counter() - started
    # Drop it from the page cache, so that it comes from the disk.
    os.posix_fadvise(descriptor, offset, written, os.POSIX_FADV_DONTNEED)
    end = time.perf_counter() + budget_s
    wrong = False
    for number, digest in enumerate(digests):
        wrong = wrong or _digest(os.pread(descriptor, MIB, offset + number * MIB)) != digest
        if time.perf_counter() > end:
            break
    return written / max(spent_s, 1e-9), wrong


def _digest(data: bytes | bytearray) -> bytes:
    return hashlib.blake2b(data, digest_size=16).digest()


def _write(descriptor: int, data: bytes | bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(descriptor, view) :]


def filesystem_of(directory: str, mounts: Path) -> str:
    """Name the type of the file system under a directory; empty when it is not known."""
    place = os.path.realpath(directory)
    best, kind = "", ""
    with contextlib.suppress(OSError):
        for line in mounts.read_text(errors="replace").splitlines():
            before, dash, after = line.partition(" - ")
            words = before.split()
            if not dash or len(words) < 5:
                continue
            mount = words[4].replace("\\040", " ")
            inside = place == mount or place.startswith(mount.rstrip("/") + "/")
            if inside and len(mount) >= len(best):
                best, kind = mount, after.split(" ")[0]
    return kind

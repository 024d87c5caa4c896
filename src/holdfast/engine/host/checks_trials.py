"""Judge trials of arithmetic, memory and disk, and the kernel's log.

Measurements in, findings out; other modules measure.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.host.findings import (
    GIB,
    MIB,
    Finding,
    Grade,
    Limits,
    Pair,
    fail_if,
    grade_above,
    grade_below,
    limit_text,
    make_skipped,
    warn_if,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticSample:
    """Counts the exact products that one device got wrong."""

    device: str
    repeats: int
    wrong: int  # wrong ones among the repeats
    where: str = ""  # the rows of wrong ones
    failure: str = ""  # the error, if there is no result
    operations_per_s: float = 0.0  # median


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpeedSample:
    """Gives the speed of copying memory, and the bytes that did not last."""

    copied_per_s: float
    tested_bytes: int
    wrong_bytes: int
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSample:
    """A disk sample is one try of a directory's disk."""

    directory: str
    filesystem: str = ""
    failure: str = ""  # the operating system's error, if it cannot be used
    free_bytes: int = 0
    inodes: float | None = None  # part of them that is free
    sync_s: float | None = None  # median
    sync_max_s: float | None = None
    write_per_s: float | None = None
    read_back_wrong: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLogSample:
    """Counts the kernel's lines on each kind of trouble, and keeps the newest."""

    unreadable: str = ""
    counts: tuple[tuple[str, int, str], ...] = ()  # kind, how many, newest line
    xids: tuple[tuple[str, int], ...] = ()  # the GPU's PCI address, Xid


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchLine:
    """A torch line is one line of the self-test: its versions first, then device by device."""

    facts: dict[str, str] | None = None
    trying: str = ""  # the device that comes next
    run: ArithmeticSample | None = None


def judge_arithmetic(sample: ArithmeticSample) -> Finding:
    """Judge the exact products of one device: one wrong bit is a failure."""
    if sample.failure:
        return Finding(
            check="arithmetic",
            subject=sample.device,
            grade=Grade.FAIL,
            reason=f"it cannot compute: {sample.failure}",
            advice="if nothing else uses it, reset it or restart the machine",
        )
    bad = sample.wrong > 0
    where = f": {sample.where}" if sample.where else ""
    wrong = f"{sample.wrong} of {sample.repeats} exact products came out wrong{where}"
    out = "this machine computes wrongly: take it out, whatever else looks well"
    return Finding(
        check="arithmetic",
        subject=sample.device,
        grade=fail_if(bad or not sample.repeats),
        value=sample.wrong,
        unit="wrong",
        limit="fail above 0",
        reason=wrong if bad else f"{sample.repeats} exact products, all bits right",
        advice=out if bad else "",
    )


def judge_memory_speed(sample: MemorySpeedSample) -> list[Finding]:
    """Judge whether memory kept the written bytes, and its speed."""
    kept = f"{sample.tested_bytes / MIB:.0f} MiB kept every pattern"
    lost = f"{sample.wrong_bytes} of {sample.tested_bytes} bytes changed: {sample.where}"
    return [
        Finding(
            check="memory-pattern",
            grade=fail_if(sample.wrong_bytes > 0),
            value=sample.wrong_bytes,
            unit="bytes",
            limit="fail above 0",
            reason=lost if sample.wrong_bytes > 0 else kept,
            advice="take the machine out and test its memory (memtester, memtest86+)",
        ),
        Finding(
            check="memory-speed",
            grade=Grade.OK,
            value=round(sample.copied_per_s / 1e9, 2),
            unit="GB/s",
            reason=f"{sample.copied_per_s / 1e9:.1f} GB/s copied",
        ),
    ]


def judge_disk(disk: DiskSample, limits: Limits) -> list[Finding]:
    """Judge the disk of a machine that waits for a job."""
    median = f"fsync of 4 KiB takes {1e3 * (disk.sync_s or 0):.2f} ms (median), "
    worst = f"{1e3 * (disk.sync_max_s or 0):.1f} ms at worst"
    advice = "put journal and checkpoints on a faster disk"
    found = _judge_basics(disk, limits, limits.disk_sync_s, median + worst, advice)
    if disk.write_per_s is not None and not disk.failure:
        found += _judge_disk_write(disk, disk.write_per_s, limits)
    return found


def judge_disk_running(disk: DiskSample, limits: Limits) -> list[Finding]:
    """Judge the disk of a node that trains: it may be busy, so only faults count."""
    one = f"an fsync of 4 KiB took {1e3 * (disk.sync_s or 0):.1f} ms"
    return _judge_basics(disk, limits, limits.disk_sync_busy_s, one, "")


def _judge_basics(
    disk: DiskSample, limits: Limits, sync_s: Pair, reason: str, advice: str
) -> list[Finding]:
    found = [_judge_usable(disk)]
    if disk.failure:
        return found
    found.append(judge_disk_space(disk, limits))
    if disk.sync_s is not None:
        found.append(
            Finding(
                check="disk-sync",
                subject=disk.directory,
                grade=grade_above(disk.sync_s, *sync_s),
                value=round(1e3 * disk.sync_s, 3),
                unit="ms",
                limit=limit_text("above", sync_s, 1e-3) + " ms",
                reason=reason,
                advice=advice,
            )
        )
    return found


def _judge_usable(disk: DiskSample) -> Finding:
    return Finding(
        check="disk",
        subject=disk.directory,
        grade=fail_if(bool(disk.failure)),
        limit="fail when a file cannot be written and synced",
        reason=disk.failure or f"can be written ({disk.filesystem or 'file system not told'})",
        advice="mend it, or name another directory",
    )


def _judge_disk_write(disk: DiskSample, rate: float, limits: Limits) -> list[Finding]:
    grade, spoilt = grade_below(rate, *limits.disk_write), disk.read_back_wrong
    read = "other bytes were read than written" if spoilt else "the same bytes were read back"
    return [
        Finding(
            check="disk-write",
            subject=disk.directory,
            grade=grade,
            value=round(rate / 1e6, 1),
            unit="MB/s",
            limit=limit_text("below", limits.disk_write, 1e6) + " MB/s",
            reason=f"{rate / 1e6:.0f} MB/s written and synced on {disk.filesystem or 'it'}",
            advice="checkpoints will take long: use a faster disk",
        ),
        Finding(
            check="disk-read-back",
            subject=disk.directory,
            grade=fail_if(spoilt),
            limit="fail when a byte differs",
            reason=read,
            advice="this disk corrupts data: take it out",
        ),
    ]


def judge_disk_space(disk: DiskSample, limits: Limits) -> Finding:
    """Judge the space and the inodes that are left."""
    grade = grade_below(disk.free_bytes, *limits.disk_free_bytes)
    few = disk.inodes is not None and disk.inodes < limits.disk_inodes[0]
    if few and grade is Grade.OK:
        grade = Grade.WARN
    if disk.inodes is not None and disk.inodes < limits.disk_inodes[1]:
        grade = Grade.FAIL
    inodes = f", {disk.inodes:.1%} of the inodes" if few else ""
    return Finding(
        check="disk-space",
        subject=disk.directory,
        grade=grade,
        value=round(disk.free_bytes / GIB, 2),
        unit="GiB",
        limit=limit_text("below", limits.disk_free_bytes, GIB) + " GiB",
        reason=f"{disk.free_bytes / GIB:.1f} GiB free{inodes}",
        advice="free space there, or name another directory",
    )


# What the kernel's lines are about: how they are known, and what to do.
LOG_KINDS = {
    "hardware": (
        re.compile(r"\[Hardware Error\]|Machine check|EDAC .*\b[UC]E\b"),
        "read the lines in dmesg; drain the machine if they go on",
    ),
    "pcie": (
        re.compile(r"PCIe Bus Error|AER: .*[Uu]ncorrect"),
        "a card or slot reports errors: reseat it, or take it out",
    ),
    "disk": (
        re.compile(
            r"I/O error, dev |Buffer I/O error|EXT4-fs error|XFS .*(orruption|hutdown)|"
            r"Remounting filesystem read-only|nvme\d+: .*(timeout|is down)"
        ),
        "look at the disk (smartctl) and its file system",
    ),
    "hung": (
        re.compile(r"blocked for more than \d+ seconds|soft lockup|hard LOCKUP"),
        "something waits for a disk or driver that does not answer",
    ),
    "memory": (
        re.compile(r"Out of memory: Killed process|Memory cgroup out of memory"),
        "a process was killed for lack of memory: give the job more, or use less",
    ),
    "gpu": (
        re.compile(r"NVRM: Xid \(PCI:([0-9a-fA-F:.]+)\): (\d+)"),
        "a GPU's driver reports errors (Xid): pip install 'holdfast[gpu]' tells more",
    ),
}


def judge_kernel_log(
    log: KernelLogSample, *, gpus: bool, without: Sequence[str] = ()
) -> list[Finding]:
    """Make one finding of each kind. `gpus`: they are asked themselves, so Xids are left out.

    Warnings only: a line is a hint at what to look at, and may be about another container's device.
    """
    if log.unreadable:
        return [make_skipped("kernel-log", log.unreadable)]
    lines = {kind: (count, line) for kind, count, line in log.counts}
    if log.xids and not gpus:
        bus, xid = log.xids[-1]
        lines["gpu"] = (len(log.xids), f"Xid {xid} of {bus}")
    found = []
    for kind, (_, advice) in LOG_KINDS.items():
        if kind in without or (gpus and kind == "gpu"):
            continue
        count, line = lines.get(kind, (0, ""))
        found.append(
            Finding(
                check="kernel-log",
                subject=kind,
                grade=warn_if(count > 0),
                value=count,
                unit="lines",
                limit="warn above 0",
                reason=f"{count} of late, newest: {line}" if count else "no trouble",
                advice=advice,
            )
        )
    return found


def judge_failure(
    check: str, subject: str, failure: str, *, hung: bool, broken: Grade = Grade.WARN
) -> Finding:
    """Make a finding of a missing measurement: if it hung, the machine is at fault.

    `broken`: the grade of any other end, which may be our own fault.
    """
    advice = "see the message; holdfast needs this to work" if broken is Grade.FAIL else ""
    if hung:
        advice = "it hangs: look at driver and device (dmesg), restart the machine"
    grade = Grade.FAIL if hung else broken
    return Finding(check=check, subject=subject, grade=grade, reason=failure, advice=advice)

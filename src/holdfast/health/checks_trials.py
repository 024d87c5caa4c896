"""Judging what was tried out: arithmetic, memory, disk; and what the kernel wrote in its log.

Measurements in, findings out; how they were taken is not known here.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.health.checks_host import limit_text
from holdfast.health.history import Finding, Grade, grade_above, grade_below
from holdfast.health.limits import GIB, MIB, Limits


@dataclass(frozen=True, slots=True, kw_only=True)
class ArithmeticSample:
    """Exact products on one device."""

    device: str
    repeats: int
    wrong: int  # of them
    where: str = ""  # of the wrong ones: which rows
    failure: str = ""  # what was said instead of computing
    operations_per_s: float = 0.0  # median


@dataclass(frozen=True, slots=True, kw_only=True)
class MemorySpeedSample:
    copied_per_s: float
    tested_bytes: int
    wrong_bytes: int
    where: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class DiskSample:
    """`failure`: what the operating system said when it could not be used."""

    directory: str
    filesystem: str = ""
    failure: str = ""
    free_bytes: int = 0
    inodes: float | None = None  # part of them that is free
    sync_s: float | None = None  # median
    sync_max_s: float | None = None
    write_per_s: float | None = None
    read_back_wrong: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class KernelLogSample:
    """How often the kernel wrote of each kind of trouble, and the newest line of each kind."""

    unreadable: str = ""
    counts: tuple[tuple[str, int, str], ...] = ()  # kind, how many, newest line
    xids: tuple[tuple[str, int], ...] = ()  # the GPU's PCI address, Xid


@dataclass(frozen=True, slots=True, kw_only=True)
class TorchLine:
    """What a process with torch tells, line by line: first its versions, then device by device."""

    facts: dict[str, str] | None = None
    trying: str = ""  # the device that comes next
    run: ArithmeticSample | None = None


def judge_arithmetic(sample: ArithmeticSample) -> Finding:
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
    return Finding(
        check="arithmetic",
        subject=sample.device,
        grade=Grade.FAIL if bad or not sample.repeats else Grade.OK,
        value=sample.wrong,
        unit="wrong",
        limit="fail above 0",
        reason=f"{sample.wrong} of {sample.repeats} exact products came out wrong{where}"
        if bad
        else f"{sample.repeats} exact products, all bits right",
        advice="this machine computes wrongly: take it out, whatever else looks well"
        if bad
        else "",
    )


def judge_memory_speed(sample: MemorySpeedSample) -> list[Finding]:
    bad = sample.wrong_bytes > 0
    return [
        Finding(
            check="memory-pattern",
            grade=Grade.FAIL if bad else Grade.OK,
            value=sample.wrong_bytes,
            unit="bytes",
            limit="fail above 0",
            reason=f"{sample.wrong_bytes} of {sample.tested_bytes} bytes changed: {sample.where}"
            if bad
            else f"{sample.tested_bytes / MIB:.0f} MiB kept every pattern",
            advice="take the machine out and test its memory (memtester, memtest86+)"
            if bad
            else "",
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
    """Before a job."""
    found = [_judge_usable(disk)]
    if disk.failure:
        return found
    found.append(judge_disk_space(disk, limits))
    if disk.sync_s is not None:
        grade = grade_above(disk.sync_s, *limits.disk_sync_s)
        found.append(
            Finding(
                check="disk-sync",
                subject=disk.directory,
                grade=grade,
                value=round(1e3 * disk.sync_s, 3),
                unit="ms",
                limit=limit_text("above", limits.disk_sync_s, 1e-3) + " ms",
                reason=f"fsync of 4 KiB takes {1e3 * disk.sync_s:.2f} ms (median), "
                f"{1e3 * (disk.sync_max_s or 0):.1f} ms at worst",
                advice="" if grade is Grade.OK else "put journal and checkpoints on a faster disk",
            )
        )
    if disk.write_per_s is not None:
        found += _judge_disk_write(disk, disk.write_per_s, limits)
    return found


def _judge_usable(disk: DiskSample) -> Finding:
    return Finding(
        check="disk",
        subject=disk.directory,
        grade=Grade.FAIL if disk.failure else Grade.OK,
        limit="fail when a file cannot be written and synced",
        reason=disk.failure or f"can be written ({disk.filesystem or 'file system not told'})",
        advice="mend it, or name another directory" if disk.failure else "",
    )


def _judge_disk_write(disk: DiskSample, rate: float, limits: Limits) -> list[Finding]:
    grade = grade_below(rate, *limits.disk_write)
    return [
        Finding(
            check="disk-write",
            subject=disk.directory,
            grade=grade,
            value=round(rate / 1e6, 1),
            unit="MB/s",
            limit=limit_text("below", limits.disk_write, 1e6) + " MB/s",
            reason=f"{rate / 1e6:.0f} MB/s written and synced on {disk.filesystem or 'it'}",
            advice="" if grade is Grade.OK else "checkpoints will take long: use a faster disk",
        ),
        Finding(
            check="disk-read-back",
            subject=disk.directory,
            grade=Grade.FAIL if disk.read_back_wrong else Grade.OK,
            limit="fail when a byte differs",
            reason="what was read is not what was written"
            if disk.read_back_wrong
            else "what was written was read back",
            advice="this disk corrupts data: take it out" if disk.read_back_wrong else "",
        ),
    ]


def judge_disk_space(disk: DiskSample, limits: Limits) -> Finding:
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
        advice="" if grade is Grade.OK else "free space there, or name another directory",
    )


def judge_disk_running(disk: DiskSample, limits: Limits) -> list[Finding]:
    """On a node that trains: it may be busy with a checkpoint, so only what is broken counts."""
    found = [_judge_usable(disk)]
    if disk.failure:
        return found
    found.append(judge_disk_space(disk, limits))
    if disk.sync_s is not None:
        found.append(
            Finding(
                check="disk-sync",
                subject=disk.directory,
                grade=grade_above(disk.sync_s, *limits.disk_sync_busy_s),
                value=round(1e3 * disk.sync_s, 3),
                unit="ms",
                limit=limit_text("above", limits.disk_sync_busy_s, 1e-3) + " ms",
                reason=f"an fsync of 4 KiB took {1e3 * disk.sync_s:.1f} ms",
            )
        )
    return found


LOG_ADVICE = {
    "gpu": "a GPU's driver reports errors (Xid): pip install 'holdfast[gpu]' tells more",
    "hardware": "read the lines in dmesg; drain the machine if they go on",
    "disk": "look at the disk (smartctl) and its file system",
    "pcie": "a card or slot reports errors: reseat it, or take it out",
    "hung": "something waits for a disk or driver that does not answer",
    "memory": "a process was killed for lack of memory: give the job more, or use less",
}


def judge_kernel_log(log: KernelLogSample, kinds: Sequence[str], *, gpus: bool) -> list[Finding]:
    """One finding for each kind. `gpus`: they are asked themselves, so its Xids are left out.

    Warnings only: a line is a hint at what to look at, and may be about another container's device.
    """
    if log.unreadable:
        return [Finding(check="kernel-log", grade=Grade.SKIPPED, reason=log.unreadable)]
    lines = {kind: (count, line) for kind, count, line in log.counts}
    if log.xids and not gpus:
        bus, xid = log.xids[-1]
        lines["gpu"] = (len(log.xids), f"Xid {xid} of {bus}")
    found = []
    for kind in (*kinds, *(() if gpus else ("gpu",))):
        count, line = lines.get(kind, (0, ""))
        found.append(
            Finding(
                check="kernel-log",
                subject=kind,
                grade=Grade.WARN if count else Grade.OK,
                value=count,
                unit="lines",
                limit="warn above 0",
                reason=f"{count} of late, newest: {line}" if count else "no trouble",
                advice=LOG_ADVICE.get(kind, "read the lines in dmesg") if count else "",
            )
        )
    return found


def judge_failure(
    check: str, subject: str, failure: str, *, hung: bool, broken: Grade = Grade.WARN
) -> Finding:
    """A measurement that did not come. One that hung is a finding about the machine.

    `broken`: the grade of any other end, which may be our own fault.
    """
    advice = "see the message; holdfast needs this to work" if broken is Grade.FAIL else ""
    return Finding(
        check=check,
        subject=subject,
        grade=Grade.FAIL if hung else broken,
        reason=failure,
        advice="it hangs: look at driver and device (dmesg), restart the machine"
        if hung
        else advice,
    )

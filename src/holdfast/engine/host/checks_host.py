"""Judge a host by its kernel's values: memory, processors, pressure, processes' allowances.

Measurements in, findings out. It does not know how anything was measured; None means that the
machine lacks a value, which is skipped and never held against it.
"""

from __future__ import annotations

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
class MemorySample:
    """A memory sample holds bytes, and counters since the machine was started."""

    total_bytes: int
    available_bytes: int
    swap_used_bytes: int = 0
    limit_bytes: int | None = None  # the container's
    limit_used_bytes: int = 0  # without what the kernel would drop
    swapped_pages: int = 0  # counter: in and out
    oom_kills: int = 0  # counter
    corrected: int | None = None  # counters of the memory controllers' ECC
    uncorrected: int | None = None

    @property
    def usable_bytes(self) -> int:
        return min(self.total_bytes, self.limit_bytes or self.total_bytes)

    @property
    def free_bytes(self) -> int:
        limit = self.limit_bytes or self.total_bytes
        return max(0, min(self.available_bytes, limit - self.limit_used_bytes))


@dataclass(frozen=True, slots=True, kw_only=True)
class CpuSample:
    """A CPU sample holds processors, and counters since machine or container were started."""

    visible: int
    allowed: int  # by affinity
    quota: float | None = None  # the container's, in processors
    ticks: int = 0
    stolen: int = 0
    periods: int = 0
    throttled: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class PressureSample:
    """Gives the percentage of the last minute in which tasks waited for each resource."""

    cpu_some: float | None = None  # None where the kernel has no such value
    memory_full: float | None = None
    io_full: float | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class AllowanceSample:
    """Gives the resources that a process may have here; None is without limit."""

    open_files: int | None
    open_files_hard: int | None
    processes: int | None  # still possible: the lowest of the limits, less what runs
    shared_bytes: int | None  # size of /dev/shm; None when there is none
    shared_free_bytes: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class HostSample:
    """A host sample is one look at a host, at a time of a clock that never goes back."""

    at_s: float
    memory: MemorySample
    cpu: CpuSample
    pressure: PressureSample
    allowance: AllowanceSample
    ports_down: tuple[str, ...] = ()  # InfiniBand ports that are not active
    ports: int = 0


def judge_memory(memory: MemorySample, limits: Limits) -> list[Finding]:
    """Judge free memory, swapped memory, and the ECC counters."""
    part = memory.free_bytes / max(1, memory.usable_bytes)
    of = "the container's" if memory.limit_bytes else "the machine's"
    swapped = memory.swap_used_bytes / max(1, memory.total_bytes)
    swaps = warn_if(swapped > limits.swap_used)
    return [
        Finding(
            check="memory-available",
            grade=grade_below(part, *limits.memory_available),
            value=round(memory.free_bytes / GIB, 2),
            unit="GiB",
            limit=limit_text("below", limits.memory_available, 0.01) + f" % of {of}",
            reason=f"{part:.0%} of {of} {memory.usable_bytes / GIB:.1f} GiB is free",
            advice="end what else runs here",
        ),
        Finding(
            check="swap",
            grade=swaps,
            value=round(memory.swap_used_bytes / GIB, 2),
            unit="GiB",
            limit=f"warn above {limits.swap_used:.0%} of the memory",
            reason=f"{memory.swap_used_bytes / GIB:.2f} GiB are swapped out",
            advice="a worker that swaps slows all others: free memory, or swapoff",
        ),
        judge_memory_errors(memory),
    ]


def judge_memory_errors(memory: MemorySample) -> Finding:
    if memory.uncorrected is None:
        return make_skipped("memory-errors", "no memory controller tells (EDAC)")
    return Finding(
        check="memory-errors",
        grade=fail_if(memory.uncorrected > 0),
        value=memory.uncorrected,
        unit="errors",
        limit="fail above 0 uncorrected",
        reason=f"{memory.uncorrected} uncorrected, {memory.corrected or 0} corrected since start",
        advice="drain the machine and replace the memory module",
    )


def judge_memory_change(before: HostSample, now: HostSample, limits: Limits) -> list[Finding]:
    """Judge what happened to the memory between two looks."""
    elapsed_s = max(now.at_s - before.at_s, 1e-3)
    rate = (now.memory.swapped_pages - before.memory.swapped_pages) / elapsed_s
    kills = now.memory.oom_kills - before.memory.oom_kills
    corrected = (now.memory.corrected or 0) - (before.memory.corrected or 0)
    found = [
        Finding(
            check="swapping",
            grade=warn_if(rate > limits.swap_pages_per_s),
            value=round(rate, 1),
            unit="pages/s",
            limit=f"warn above {limits.swap_pages_per_s:g}",
            reason=f"{rate:.0f} pages/s in and out",
        ),
        Finding(
            check="out-of-memory",
            grade=warn_if(kills > 0),
            value=kills,
            unit="processes",
            limit="warn above 0",
            reason=f"killed by the kernel for lack of memory: {kills}",
        ),
    ]
    if now.memory.corrected is not None:
        found.append(
            Finding(
                check="memory-corrected",
                grade=warn_if(corrected > 0),
                value=corrected,
                unit="errors",
                limit="warn above 0 more",
                reason=f"{corrected} more corrected memory errors",
            )
        )
    return found


def judge_cpu(before: HostSample, now: HostSample, limits: Limits) -> list[Finding]:
    """Judge by two looks what the hypervisor took and what the container's quota held back."""
    cpu, past = now.cpu, before.cpu
    ticks = cpu.ticks - past.ticks
    part = (cpu.stolen - past.stolen) / ticks if ticks > 0 else 0.0
    grade = grade_above(part, *limits.steal)
    taken = f"the hypervisor gave {part:.1%} of the processors' time to others"
    found = [
        Finding(
            check="cpu-steal",
            grade=grade if ticks > 0 else Grade.SKIPPED,
            value=round(100 * part, 2),
            unit="%",
            limit=limit_text("above", limits.steal, 0.01) + " %",
            reason=taken if ticks > 0 else "no time has passed",
            advice="the host is overcommitted: move the machine" if ticks > 0 else "",
        )
    ]
    periods = cpu.periods - past.periods
    if cpu.quota is not None and periods > 0:
        held = (cpu.throttled - past.throttled) / periods
        grade = warn_if(held > limits.throttled)
        found.append(
            Finding(
                check="cpu-throttled",
                grade=grade,
                value=round(100 * held, 1),
                unit="%",
                limit=f"warn above {limits.throttled:.0%} of the periods",
                reason=f"the container's quota held processes back in {held:.0%} of the periods",
                advice="raise the quota, or use fewer threads",
            )
        )
    return found


def judge_cpu_limits(cpu: CpuSample) -> Finding:
    usable = min(float(cpu.allowed), cpu.quota or float(cpu.allowed))
    told = f"{cpu.visible} visible, {cpu.allowed} allowed"
    return Finding(
        check="cpu-limit",
        grade=warn_if(cpu.quota is not None and cpu.quota < cpu.allowed),
        value=round(usable, 2),
        unit="processors",
        limit="warn when a quota is below the processors that programs see",
        reason=f"{told}, quota {cpu.quota:g}" if cpu.quota else f"{told}, no quota",
        advice="libraries start one thread for each processor they see: set --threads",
    )


def judge_pressure(pressure: PressureSample, limits: Limits) -> list[Finding]:
    """Judge the kernel's pressure stall information, before a job."""
    rows = (
        ("cpu-pressure", pressure.cpu_some, limits.cpu_pressure, "processors", "some"),
        ("memory-pressure", pressure.memory_full, limits.memory_pressure, "memory", "all"),
        ("io-pressure", pressure.io_full, limits.io_pressure, "disks", "all"),
    )
    found = []
    for check, value, limit, what, who in rows:
        if value is None:
            found.append(make_skipped(check, "the kernel does not tell (/proc/pressure)"))
            continue
        found.append(
            Finding(
                check=check,
                grade=warn_if(value > limit),
                value=value,
                unit="%",
                limit=f"warn above {limit:g} %",
                reason=f"{who} tasks waited for {what} for {value:g} % of the last minute",
                advice="find what else runs here",
            )
        )
    return found


def judge_allowance(
    allowance: AllowanceSample, limits: Limits, shared_need_bytes: int = 0
) -> list[Finding]:
    """Judge what a process may have; data loaders will hold `shared_need_bytes` in /dev/shm."""
    hard = "unlimited" if allowance.open_files_hard is None else allowance.open_files_hard
    files = f"raise it: ulimit -n {hard}"
    pids = "raise ulimit -u, or the container's pids limit"
    a, of = allowance, limits
    return [
        _judge_count("open-files", a.open_files, of.open_files, "files a process may open", files),
        _judge_count("processes", a.processes, of.processes, "more processes or threads", pids),
        _judge_shared(allowance, limits, shared_need_bytes),
    ]


def _judge_count(check: str, value: int | None, pair: Pair, what: str, advice: str) -> Finding:
    grade = Grade.OK if value is None else grade_below(value, *pair)
    return Finding(
        check=check,
        grade=grade,
        value=value,
        limit=limit_text("below", pair),
        reason=f"{'no limit on' if value is None else value} {what}",
        advice=advice,
    )


def _judge_shared(allowance: AllowanceSample, limits: Limits, need_bytes: int) -> Finding:
    size, free = allowance.shared_bytes, allowance.shared_free_bytes
    if size is None:
        return Finding(
            check="shared-memory",
            grade=Grade.FAIL,
            reason="there is no /dev/shm, which data loaders and gloo use",
            advice="mount a tmpfs there",
        )
    pair = (max(limits.shared_memory_bytes[0], need_bytes), limits.shared_memory_bytes[1])
    grade = grade_below(size, *pair)
    if free < need_bytes:
        grade = Grade.FAIL
    need = f"; the data loaders need {need_bytes / MIB:.0f} MiB" if need_bytes else ""
    return Finding(
        check="shared-memory",
        grade=grade,
        value=round(free / MIB, 1),
        unit="MiB",
        limit=limit_text("below", pair, MIB) + " MiB in size",
        reason=f"{free / MIB:.0f} of {size / MIB:.0f} MiB free in /dev/shm{need}",
        advice="enlarge it (docker run --shm-size, or a larger tmpfs), or use fewer loaders",
    )


def judge_ports(sample: HostSample) -> Finding:
    if not sample.ports:
        return make_skipped("infiniband", "no InfiniBand port here")
    down = sample.ports_down
    return Finding(
        check="infiniband",
        grade=warn_if(bool(down)),
        value=sample.ports - len(down),
        unit="ports",
        limit="warn when one is not active",
        reason=f"not active: {', '.join(down)}" if down else f"all {sample.ports} ports active",
        advice="look at cable and switch port, or disable the port",
    )

"""Judge GPUs by the values of their driver; None stands for a value that a GPU lacks.

Values and bits are those of NVML (nvml.h); the library itself is not known here.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.engine.host.checks_trials import KernelLogSample
from holdfast.engine.host.findings import (
    GIB,
    Finding,
    Grade,
    Limits,
    fail_if,
    make_skipped,
    warn_if,
)

# The reasons for lower clocks: nvmlClocksEventReason...
HW_SLOWDOWN = 0x8
SW_THERMAL = 0x20
HW_THERMAL = 0x40
POWER_BRAKE = 0x80
SLOWED = (
    (HW_THERMAL, "the hardware slows it down for heat", "look at fans, airflow and coolant"),
    (POWER_BRAKE, "the power supply asks for less (power brake)", "look at the power supply"),
    (HW_SLOWDOWN, "the hardware slows it down", "look at cooling and power supply"),
    (SW_THERMAL, "the driver slows it down for heat", "look at fans, airflow and coolant"),
)

# What the driver wants to be done: NVML_GPU_RECOVERY_ACTION_...
RECOVERY = {
    1: "reset the GPU (nvidia-smi -r)",
    2: "restart the machine",
    3: "drain peer-to-peer traffic, then reset the GPU",
    4: "drain the GPU and reset it",
    5: "recover its NVLink domain (IMEX)",
    6: "reset its bus",
    7: "restart the system",
}

# The grade of each Xid, and its meaning. OK: a script's mistake or its end is no fault of the GPU.
XIDS = dict.fromkeys((8, 13, 31, 43, 45, 68), (Grade.OK, "")) | {
    48: (Grade.FAIL, "double bit ECC error"),
    62: (Grade.FAIL, "internal micro-controller halted"),
    63: (Grade.WARN, "row remapping recorded"),
    64: (Grade.FAIL, "row remapping failed"),
    74: (Grade.FAIL, "NVLink error"),
    79: (Grade.FAIL, "fallen off the bus"),
    92: (Grade.WARN, "many single bit ECC errors"),
    94: (Grade.WARN, "contained ECC error"),
    95: (Grade.FAIL, "uncontained ECC error"),
    119: (Grade.FAIL, "GSP does not answer"),
    120: (Grade.FAIL, "GSP error"),
    140: (Grade.FAIL, "unrecovered ECC error"),
}
XID_UNKNOWN = (Grade.WARN, "see NVIDIA's list of Xid errors")
WEAR = "watch it: its memory is getting worse"


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuSample:
    """A GPU sample is one look at one GPU; `lost`: the driver's error in place of answers."""

    index: int
    bus: str = ""
    name: str = ""
    lost: str = ""
    recovery: int | None = None
    temperature_c: int | None = None
    slowdown_c: int | None = None
    clock_reasons: int | None = None
    uncorrected: int | None = None  # ECC, since the driver was loaded
    corrected: int | None = None
    remap_pending: bool | None = None
    remap_failed: bool | None = None
    retire_pending: bool | None = None
    performance_state: int | None = None  # 0 is the fastest
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    memory_used_bytes: int | None = None
    xids: tuple[int, ...] | None = None  # recent ones


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuReport:
    """Holds the samples of all GPUs of a machine; `missing`: the reason why there are none."""

    missing: str = ""
    driver: str = ""
    present: int = 0  # NVIDIA GPUs on the PCI bus
    gpus: tuple[GpuSample, ...] = ()


def bus_name(text: str) -> str:
    """Spell NVML's 00000000:3B:00.0 and the kernel log's 0000:3b:00 in one way."""
    domain, _, rest = text.lower().partition(":")
    return f"{domain[-4:]}:{rest.partition('.')[0]}" if rest else text.lower()


def with_logged_xids(report: GpuReport, log: KernelLogSample) -> GpuReport:
    """Give each GPU the Xids that the kernel logged; None where the log cannot be read."""
    gpus = []
    for gpu in report.gpus:
        xids = tuple(xid for bus, xid in log.xids if bus_name(bus) == gpu.bus)
        gpus.append(replace(gpu, xids=None if log.unreadable else xids))
    return replace(report, gpus=tuple(gpus))


def judge_all_gpus(report: GpuReport, limits: Limits, *, before_job: bool) -> list[Finding]:
    """Judge all GPUs. `before_job`: no process should use them yet."""
    if not report.gpus:
        return [_judge_none(report)]
    found: list[Finding] = []
    for gpu in report.gpus:
        found += judge_gpu(gpu, limits, before_job=before_job)
    return found


def _judge_none(report: GpuReport) -> Finding:
    reason = report.missing or "the driver sees no GPU"
    if not report.present:
        return make_skipped("gpu", reason)
    return Finding(
        check="gpu",
        grade=Grade.WARN,
        value=0,
        unit="GPUs",
        reason=f"{report.present} on the PCI bus, but {reason}",
        advice="load the driver; pip install 'holdfast[gpu]'",
    )


def judge_gpu_count(count: int, expected: int) -> Finding:
    """Judge during a job whether all GPUs of its start are still there."""
    return Finding(
        check="gpu-count",
        grade=fail_if(count < expected),
        value=count,
        unit="GPUs",
        limit=f"fail below the {expected} there were",
        reason=f"{count} of {expected} GPUs are there",
        advice="a GPU has gone: read dmesg, restart the machine",
    )


def judge_gpu(gpu: GpuSample, limits: Limits, *, before_job: bool) -> list[Finding]:
    """Judge one GPU: one finding for each of its values, or just one if it is lost."""
    subject = f"GPU {gpu.index}"
    if gpu.lost:
        return [
            Finding(
                check="gpu",
                subject=subject,
                grade=Grade.FAIL,
                reason=f"{gpu.lost} ({gpu.bus})" if gpu.bus else gpu.lost,
                advice="reset it, or restart the machine; replace it if this comes again",
            )
        ]
    rows = [
        _check_present(gpu),
        _ecc(gpu, limits),
        _rows(gpu),
        _temperature(gpu, limits),
        _clocks(gpu),
        _pcie(gpu),
        _xids(gpu),
    ]
    if before_job:
        rows.append(_memory(gpu, limits))
    return [replace(row, subject=subject) for row in rows]


def _skip_untold(check: str) -> Finding:
    return make_skipped(check, "this GPU does not tell")


def _check_present(gpu: GpuSample) -> Finding:
    wanted = RECOVERY.get(gpu.recovery or 0, "")
    if gpu.recovery and not wanted:
        wanted = f"recovery action {gpu.recovery}: see NVIDIA's manual"
    return Finding(
        check="gpu",
        grade=fail_if(bool(wanted)),
        limit="fail when the driver asks for a reset or restart",
        reason="the driver wants a recovery" if wanted else f"{gpu.name} answers",
        advice=wanted,
    )


def _ecc(gpu: GpuSample, limits: Limits) -> Finding:
    if gpu.uncorrected is None:
        return _skip_untold("gpu-ecc")
    corrected = gpu.corrected or 0
    grade = Grade.FAIL if gpu.uncorrected > 0 else warn_if(corrected > limits.gpu_corrected)
    mend = "drain the node and reset the GPU; replace it if errors come again"
    return Finding(
        check="gpu-ecc",
        grade=grade,
        value=gpu.uncorrected,
        unit="errors",
        limit=f"fail above 0 uncorrected, warn above {limits.gpu_corrected} corrected",
        reason=f"{gpu.uncorrected} uncorrected, {corrected} corrected since the driver was loaded",
        advice=mend if grade is Grade.FAIL else WEAR,
    )


def judge_gpu_change(before: GpuSample, now: GpuSample) -> list[Finding]:
    """Judge growth between two looks: corrected errors announce worse ones."""
    if before.corrected is None or now.corrected is None:
        return []
    more = now.corrected - before.corrected
    return [
        Finding(
            check="gpu-corrected",
            subject=f"GPU {now.index}",
            grade=warn_if(more > 0),
            value=more,
            unit="errors",
            limit="warn above 0 more",
            reason=f"{more} more corrected memory errors",
            advice=WEAR,
        )
    ]


def _rows(gpu: GpuSample) -> Finding:
    told = (gpu.remap_failed, gpu.remap_pending, gpu.retire_pending)
    if all(x is None for x in told):
        return _skip_untold("gpu-rows")
    grade, reason, advice = Grade.OK, "no row or page waits to be replaced", ""
    if gpu.remap_pending or gpu.retire_pending:
        what = "row to be remapped" if gpu.remap_pending else "page to be retired"
        grade, reason = Grade.WARN, f"a faulty {what} waits for a reset"
        advice = "reset the GPU when it is free (nvidia-smi -r)"
    if gpu.remap_failed:
        grade, reason = Grade.FAIL, "remapping a faulty row has failed: no spare rows are left"
        advice = "replace the GPU"
    return Finding(
        check="gpu-rows",
        grade=grade,
        limit="warn when pending, fail when remapping failed",
        reason=reason,
        advice=advice,
    )


def _temperature(gpu: GpuSample, limits: Limits) -> Finding:
    if gpu.temperature_c is None:
        return _skip_untold("gpu-temperature")
    slowdown = gpu.slowdown_c or limits.gpu_slowdown_c
    warn = slowdown - limits.gpu_margin_c
    return Finding(
        check="gpu-temperature",
        grade=warn_if(gpu.temperature_c >= warn),
        value=gpu.temperature_c,
        unit="C",
        limit=f"warn from {warn}; it slows itself down at {slowdown}",
        reason=f"{gpu.temperature_c} C",
        advice="look at fans, airflow and coolant",
    )


def _clocks(gpu: GpuSample) -> Finding:
    if gpu.clock_reasons is None:
        return _skip_untold("gpu-clocks")
    reason, advice = next(
        ((why, what) for bit, why, what in SLOWED if gpu.clock_reasons & bit), ("", "")
    )
    return Finding(
        check="gpu-clocks",
        grade=warn_if(bool(reason)),
        value=gpu.clock_reasons,
        unit="reasons",
        limit="warn when slowed down for heat or power supply",
        reason=reason or "not slowed down for heat or power supply",
        advice=advice,
    )


def _pcie(gpu: GpuSample) -> Finding:
    width, width_max = gpu.pcie_width, gpu.pcie_width_max
    generation, generation_max = gpu.pcie_generation, gpu.pcie_generation_max
    if width is None or width_max is None or generation is None or generation_max is None:
        return _skip_untold("gpu-pcie")
    # A GPU at rest lowers the generation to save power; at full clocks it has no such excuse.
    slow = generation < generation_max and gpu.performance_state == 0
    return Finding(
        check="gpu-pcie",
        grade=warn_if(slow or width < width_max),
        value=width,
        unit="lanes",
        limit=f"warn below generation {generation_max} x{width_max}",
        reason=f"generation {generation} x{width}",
        advice="reseat the card, or look at riser and slot",
    )


def _memory(gpu: GpuSample, limits: Limits) -> Finding:
    used = gpu.memory_used_bytes
    if used is None:
        return _skip_untold("gpu-memory")
    return Finding(
        check="gpu-memory",
        grade=warn_if(used > limits.gpu_memory_used_bytes),
        value=round(used / GIB, 2),
        unit="GiB",
        limit=f"warn above {limits.gpu_memory_used_bytes / GIB:g} in use before a job",
        reason=f"{used / GIB:.1f} GiB are in use",
        advice="something uses it: nvidia-smi names the processes",
    )


def _xids(gpu: GpuSample) -> Finding:
    if gpu.xids is None:
        return _skip_untold("gpu-xid")
    serious = [x for x in gpu.xids if XIDS.get(x, XID_UNKNOWN)[0] is not Grade.OK]
    fatal = [x for x in serious if XIDS.get(x, XID_UNKNOWN)[0] is Grade.FAIL]
    newest = (fatal or serious or (0,))[-1]
    what = XIDS.get(newest, XID_UNKNOWN)[1]
    grade = Grade.FAIL if fatal else warn_if(bool(serious))
    mend = "drain the node and reset the GPU; replace it if this comes again"
    return Finding(
        check="gpu-xid",
        grade=grade,
        value=newest if serious else None,
        unit="Xid" if serious else "",
        limit="fail on " + ", ".join(str(x) for x, (bad, _) in XIDS.items() if bad is Grade.FAIL),
        reason=f"Xid {newest}: {what} ({len(serious)} in all)" if serious else "no serious Xid",
        advice=mend if fatal else "watch it; reset the GPU when it is free",
    )

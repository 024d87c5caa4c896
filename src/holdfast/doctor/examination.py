"""Examine one machine before it joins a job: measurements, their order and their limits.

Every measurement that may hang is another process with a limit (engine/host/bounded.py); a
measurement that does not come is a finding like any other. Measurements are judged in
health/checks_*.py.
"""

from __future__ import annotations

import functools
import importlib.metadata
import os
import platform
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeVar

import msgspec

from holdfast.engine.host.bounded import ChildAnswer, child_command, run_bounded
from holdfast.engine.host.checks_gpu import GpuReport, judge_all_gpus, with_logged_xids
from holdfast.engine.host.checks_host import (
    HostSample,
    judge_allowance,
    judge_cpu,
    judge_cpu_limits,
    judge_memory,
    judge_ports,
    judge_pressure,
)
from holdfast.engine.host.checks_peers import (
    PeerSample,
    Report,
    compare_facts,
    compare_siblings,
    compare_speeds,
    judge_peer,
    judge_versions,
)
from holdfast.engine.host.checks_trials import (
    ArithmeticSample,
    DiskSample,
    KernelLogSample,
    MemorySpeedSample,
    TorchLine,
    judge_arithmetic,
    judge_disk,
    judge_failure,
    judge_kernel_log,
    judge_memory_speed,
)
from holdfast.engine.host.external_checks import ExternalCheck, run
from holdfast.engine.host.findings import GIB, Finding, Grade, Limits, make_skipped, summary
from holdfast.engine.host.host import HostReader

SELFTEST = "holdfast.engine.train.selftest"
PEERS_MAX = 64

T = TypeVar("T")
Measure = Callable[[str, dict[str, Any], float], ChildAnswer]
Progress = Callable[[int, int, str], None]  # number done, number in all, the next one


@dataclass(frozen=True, slots=True, kw_only=True)
class ExaminationPace:
    """Limits the time of each part; after `..._limit_s` it counts as hung."""

    arithmetic_s: float = 1.0
    memory_s: float = 1.0  # 0 leaves the part out
    torch_s: float = 0.5  # on each device
    disk_write_s: float = 2.0
    disk_syncs: int = 20
    bandwidth_s: float = 1.0
    limit_s: float = 20.0  # far more than a busy machine needs
    torch_limit_s: float = 60.0  # imports, and drivers that wake up one GPU after the other


QUICK = ExaminationPace(
    arithmetic_s=0.2,
    memory_s=0.0,
    torch_s=0.0,
    disk_write_s=0.0,
    disk_syncs=5,
    bandwidth_s=0.0,
    limit_s=10.0,
)


@dataclass(frozen=True, slots=True, kw_only=True)
class Examination:
    """Describes an examination: its directory, peers, reports and commands."""

    directory: str
    version: str  # Holdfast's
    pace: ExaminationPace = ExaminationPace()
    peers: tuple[tuple[str, int], ...] = ()
    secret: bytes = b""
    against: tuple[Report, ...] = ()
    shared_need_bytes: int = 0
    external: tuple[ExternalCheck, ...] = ()


def measure(name: str, arguments: dict[str, Any], limit_s: float) -> ChildAnswer:
    """Take one of the real measurements; tests bring their own."""
    if name == "torch":
        command = [sys.executable, "-m", SELFTEST, str(os.getpid()), str(arguments["budget_s"])]
        return run_bounded(command, b"", limit_s)
    return run_bounded(child_command(name), msgspec.json.encode(arguments) + b"\n", limit_s)


class Doctor:
    """Makes one examination, collecting facts and speeds that later steps compare."""

    def __init__(
        self, wanted: Examination, limits: Limits, reader: HostReader, measure: Measure
    ) -> None:
        self._wanted = wanted
        self._limits = limits
        self._reader = reader
        self._measure = measure
        self._facts: dict[str, str] = {}
        self._speeds: dict[str, float] = {}
        self._gpu_speeds: dict[str, float] = {}
        self._host: list[HostSample] = []  # at the start
        self._present = 0

    def examine(self, progress: Progress) -> Report:
        """Take all steps, one after another, so that none disturbs another's measurement."""
        steps = self._steps()
        found: list[Finding] = []
        for done, (title, step) in enumerate(steps):
            progress(done, len(steps), title)
            found += step()
        progress(len(steps), len(steps), "")
        return Report(
            host=platform.node(),
            facts=self._facts,
            speeds=self._speeds,
            findings=tuple(found),
            verdict=summary(found),
        )

    def _steps(self) -> list[tuple[str, Callable[[], list[Finding]]]]:
        pace = self._wanted.pace
        steps: list[tuple[str, Callable[[], list[Finding]]]] = [
            ("host", self._look_at_host),
            ("arithmetic", self._try_arithmetic),
        ]
        if pace.memory_s > 0:
            steps.append(("memory", self._try_memory))
        steps.append(("disk", self._try_disk))
        steps.append(("GPUs", self._look_at_gpus))
        steps.append(("torch", self._try_torch))
        for peer in self._wanted.peers[:PEERS_MAX]:
            steps.append((f"peer {peer[0]}", functools.partial(self._meet, *peer)))
        for check in self._wanted.external:
            steps.append((check.name, functools.partial(_run_external, check)))
        steps.append(("comparing", self._compare))
        return steps

    def _ask(
        self, name: str, kind: type[T], arguments: dict[str, Any], as_check: tuple[str, str]
    ) -> tuple[T | None, list[Finding]]:
        """Take one sample, or return the finding with the reason why there is none."""
        answer = self._measure(name, arguments, self._wanted.pace.limit_s)
        failure = answer.failure
        if not failure:
            try:
                return msgspec.json.decode(b"".join(answer.lines[:1]), type=kind), []
            except msgspec.MsgspecError as error:
                failure = f"the measurement is malformed: {error}"
        return None, [judge_failure(*as_check, failure, hung=answer.hung)]

    def _look_at_host(self) -> list[Finding]:
        host = self._reader.sample()
        self._host = [host]
        self._present = self._reader.gpus_present()
        self._facts |= {
            "holdfast": self._wanted.version,
            "python": platform.python_version(),
            "numpy": _installed_version("numpy"),
            "torch": _installed_version("torch"),
            "machine": platform.machine(),
            "processor": self._reader.processor(),
            "processors": str(host.cpu.visible),
            "memory": f"{host.memory.total_bytes / GIB:.1f} GiB",
            "kernel": platform.release(),
            "links": self._reader.links(),
        }
        self._facts = {name: value for name, value in self._facts.items() if value}
        return [
            *judge_memory(host.memory, self._limits),
            judge_cpu_limits(host.cpu),
            *judge_pressure(host.pressure, self._limits),
            *judge_allowance(host.allowance, self._limits, self._wanted.shared_need_bytes),
            judge_ports(host),
        ]

    def _try_arithmetic(self) -> list[Finding]:
        budget = {"budget_s": self._wanted.pace.arithmetic_s}
        sample, failed = self._ask("arithmetic", ArithmeticSample, budget, ("arithmetic", "numpy"))
        if sample is None:
            return failed
        self._speeds["arithmetic-numpy"] = sample.operations_per_s
        return [judge_arithmetic(sample)]

    def _try_memory(self) -> list[Finding]:
        host = self._host[0]
        arguments = {
            "budget_s": self._wanted.pace.memory_s,
            "available_bytes": host.memory.free_bytes,
            "threads": host.cpu.allowed,
        }
        sample, failed = self._ask("memory", MemorySpeedSample, arguments, ("memory-pattern", ""))
        if sample is None:
            return failed
        self._speeds["memory-copy"] = sample.copied_per_s
        return judge_memory_speed(sample)

    def _try_disk(self) -> list[Finding]:
        pace, directory = self._wanted.pace, self._wanted.directory
        arguments = {
            "directory": directory,
            "syncs": pace.disk_syncs,
            "write_s": pace.disk_write_s,
        }
        disk, failed = self._ask("disk", DiskSample, arguments, ("disk", directory))
        if disk is None:
            return failed
        if disk.write_per_s is not None:
            self._speeds["disk-write"] = disk.write_per_s
        if disk.sync_s:
            self._speeds["disk-syncs"] = 1.0 / disk.sync_s
        return judge_disk(disk, self._limits)

    def _look_at_gpus(self) -> list[Finding]:
        log, failed = self._ask("kernel-log", KernelLogSample, {}, ("kernel-log", ""))
        arguments = {"present": self._present}
        report, more = self._ask("gpu", GpuReport, arguments, ("gpu-driver", ""))
        failed += more
        gpus = report is not None and bool(report.gpus)
        if log is not None:
            failed += judge_kernel_log(log, gpus=gpus)
        if report is None:
            return failed
        if gpus:
            names = sorted({gpu.name for gpu in report.gpus})
            self._facts["gpus"] = f"{len(report.gpus)} x {', '.join(names)}"
            self._facts["driver"] = report.driver
            report = with_logged_xids(report, log or KernelLogSample(unreadable="not asked"))
        return [*failed, *judge_all_gpus(report, self._limits, before_job=True)]

    def _try_torch(self) -> list[Finding]:
        """Try torch out; the quick examination only looks whether it is installed."""
        pace = self._wanted.pace
        if pace.torch_s <= 0 or not self._facts.get("torch"):
            return judge_versions(self._facts, gpus=self._present)
        answer = self._measure("torch", {"budget_s": pace.torch_s}, pace.torch_limit_s)
        found: list[Finding] = []
        trying = "importing it"
        failure = answer.failure
        for line in answer.lines:
            try:
                told = msgspec.json.decode(line, type=TorchLine)
            except msgspec.MsgspecError as error:
                failure = failure or f"the measurement is malformed: {error}"
                break
            trying = told.trying or trying
            if told.facts is not None:
                self._facts |= told.facts
            if told.run is not None:
                found.append(judge_arithmetic(told.run))
                self._note_speed(told.run)
        if failure:
            broken = Grade.FAIL  # workers need it
            found.append(judge_failure("torch", trying, failure, hung=answer.hung, broken=broken))
        return [*judge_versions(self._facts, gpus=self._present), *found]

    def _note_speed(self, run: ArithmeticSample) -> None:
        if run.failure:
            return
        if run.device.startswith("GPU"):
            self._gpu_speeds[run.device] = run.operations_per_s
            self._speeds["arithmetic-gpu"] = min(self._gpu_speeds.values())  # the job waits for it
        else:
            self._speeds["arithmetic-torch"] = run.operations_per_s

    def _meet(self, host: str, port: int) -> list[Finding]:
        arguments = {
            "host": host,
            "port": port,
            "secret": self._wanted.secret.hex(),
            "bandwidth_s": self._wanted.pace.bandwidth_s,
        }
        sample, failed = self._ask("peer", PeerSample, arguments, ("peer", f"{host}:{port}"))
        return failed if sample is None else judge_peer(sample, self._limits)

    def _compare(self) -> list[Finding]:
        found = judge_cpu(self._host[0], self._reader.sample(), self._limits)
        found += compare_siblings(self._gpu_speeds, self._limits)
        for other in self._wanted.against:
            found += compare_facts(self._facts, other)
        found += compare_speeds(self._speeds, self._wanted.against, self._limits)
        if not self._wanted.against:
            speeds = ", ".join(f"{name} {_shorten(value)}" for name, value in self._speeds.items())
            found.append(make_skipped("speed", f"not compared (--against): {speeds}"))
        return found


def _run_external(check: ExternalCheck) -> list[Finding]:
    return [run(check)]


def _shorten(value: float) -> str:
    """Write 1.23e9 as 1.23 G/s."""
    for power, letter in ((12, "T"), (9, "G"), (6, "M"), (3, "k")):
        if value >= 10**power:
            return f"{value / 10**power:.3g} {letter}/s"
    return f"{value:.3g}/s"


def _installed_version(package: str) -> str:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return ""


def examine(wanted: Examination, progress: Progress, limits: Limits | None = None) -> Report:
    """Examine this machine."""
    return Doctor(wanted, limits or Limits(), HostReader(), measure).examine(progress)


def read_report(data: bytes) -> Report:
    """Read another machine's `--json` output. ValueError with its fault."""
    report = msgspec.json.decode(data, type=Report)
    if report.format != Report(facts={}, speeds={}).format:
        raise ValueError(f"it has format {report.format}")
    return report


def to_plain(value: Report | Sequence[Finding]) -> Any:
    """Turn a report or findings into plain data for JSON."""
    return msgspec.to_builtins(value)

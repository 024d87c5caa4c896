"""Repeat the checks that an agent makes while its workers train: milliseconds each, no torch.

Questions that may hang (disk, GPU driver, external commands) are asked in child processes and
answered in a later round; a disk or driver that does not answer is itself a finding. Each answer is
returned once, so that one bad sample counts as one. Use it with `history.Watch`:

    checks, watch = light_checks(directory), Watch()
    every 10 s or so, from one lasting thread:
        verdict = watch.observe(checks.round(now), now)
    at the end: checks.close()
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec

from holdfast.engine.host.bounded import Watcher, child_command
from holdfast.engine.host.checks_gpu import (
    GpuReport,
    judge_all_gpus,
    judge_gpu_change,
    judge_gpu_count,
)
from holdfast.engine.host.checks_host import (
    HostSample,
    judge_cpu,
    judge_memory,
    judge_memory_change,
    judge_ports,
)
from holdfast.engine.host.checks_trials import (
    DiskSample,
    judge_disk_running,
    judge_failure,
    judge_kernel_log,
)
from holdfast.engine.host.external_checks import ExternalCheck, RepeatedCheck, make_repeated_check
from holdfast.engine.host.findings import Finding, Grade, Limits
from holdfast.engine.host.host import HostReader
from holdfast.engine.host.kernel_log import KernelLog, KernelLogTally

LINES_MAX = 200  # lines of the kernel's log in one round
BUSY = ("memory-available", "cpu-steal")
COUNTED = ("memory",)  # by the kernel, so its log is not searched for it


class LightChecks:
    """Light checks are made in rounds, which never wait for a disk, a driver or a command."""

    def __init__(
        self,
        directory: str,
        reader: HostReader,
        disk: Watcher,
        gpu: Watcher,
        log: KernelLog,
        limits: Limits,
        external: Sequence[RepeatedCheck] = (),
    ) -> None:
        self._directory = directory
        self._reader = reader
        self.disk = disk
        self.gpu = gpu
        self._log = log
        self._limits = limits
        self.external = external
        self._host: HostSample | None = None
        self._gpus: GpuReport | None = None
        self._gpus_expected = 0
        self._gpus_none = False  # there are no GPUs, now and later
        self._log_state = "closed"  # open, closed, or why it cannot be read

    def round(self, now: float) -> tuple[Finding, ...]:
        """Make one round. `now`: seconds of a clock that never goes back."""
        return (
            *self._look_at_host(),
            *self._look_at_log(),
            *self._look_at_disk(now),
            *self._look_at_gpus(now),
            *(finding for check in self.external for finding in check.round(now)),
        )

    def close(self) -> None:
        """End the children, without waiting for them."""
        for watcher in (self.disk, self.gpu, *(check.watcher for check in self.external)):
            watcher.close()
        self._log.close()
        self._log_state = "closed"

    def _look_at_host(self) -> list[Finding]:
        host, before = self._reader.sample(), self._host
        self._host = host
        found = [_soften(f) for f in judge_memory(host.memory, self._limits)]
        if host.ports:
            found.append(judge_ports(host))
        if before is not None:
            found += judge_memory_change(before, host, self._limits)
            found += [_soften(f) for f in judge_cpu(before, host, self._limits)]
        return found

    def _look_at_log(self) -> list[Finding]:
        if self._log_state == "closed":
            self._log_state = self._log.open(from_end=True) or "open"
        if self._log_state != "open":
            return []
        tally = KernelLogTally()
        for line in self._log.lines(LINES_MAX, 0.0):
            tally.add(line)
        return judge_kernel_log(tally.sample(), gpus=self._gpus_expected > 0, without=COUNTED)

    def _look_at_disk(self, now: float) -> list[Finding]:
        sample, failure, hung = _answer(self.disk, now, self._limits, DiskSample)
        if sample is not None:
            return judge_disk_running(sample, self._limits)
        return [judge_failure("disk", self._directory, failure, hung=hung)] if failure else []

    def _look_at_gpus(self, now: float) -> list[Finding]:
        if self._gpus_none:
            return []
        report, failure, hung = _answer(self.gpu, now, self._limits, GpuReport)
        if report is None:
            return [judge_failure("gpu-driver", "", failure, hung=hung)] if failure else []
        if not report.gpus and not self._gpus_expected:
            self._gpus_none = True
            self.gpu.close()
            return []
        return self._judge_gpus(report)

    def _judge_gpus(self, report: GpuReport) -> list[Finding]:
        before, self._gpus = self._gpus, report
        self._gpus_expected = max(self._gpus_expected, len(report.gpus))
        found = [
            Finding(check="gpu-driver", grade=Grade.OK, reason=f"driver {report.driver} answers"),
            judge_gpu_count(len(report.gpus), self._gpus_expected),
        ]
        if report.gpus:
            found += judge_all_gpus(report, self._limits, before_job=False)
        past = {gpu.index: gpu for gpu in before.gpus} if before is not None else {}
        for gpu in report.gpus:
            if gpu.index in past:
                found += judge_gpu_change(past[gpu.index], gpu)
        return found


def _soften(finding: Finding) -> Finding:
    """Soften what a busy machine shows: it is not broken, and its work moves on if it is slow."""
    if finding.grade is not Grade.FAIL or finding.check not in BUSY:
        return finding
    return replace(finding, grade=Grade.WARN)


def _answer(watcher: Watcher, now: float, limits: Limits, kind: type[Any]) -> tuple[Any, str, bool]:
    """Ask for the next sample; returns the last one, the problem, and whether it hangs."""
    line, failure = watcher.poll()
    waited_s = watcher.waited_s(now)
    if waited_s > limits.answer_s:
        return None, f"no answer for {waited_s:.0f} s", True
    if failure:
        return None, failure, False
    failure = watcher.ask(now)
    if line is None:
        return None, failure, False
    try:
        return msgspec.json.decode(line, type=kind), "", False
    except msgspec.MsgspecError as error:
        return None, f"the measurement is malformed: {error}", False


def light_checks(
    directory: str, limits: Limits | None = None, external: Sequence[ExternalCheck] = ()
) -> LightChecks:
    """Make the checks of this machine; none is started yet. `directory`: its disk is tried."""
    reader = HostReader()
    disk = {"directory": directory, "syncs": 1, "write_s": 0.0}
    gpu = {"present": reader.gpus_present()}
    return LightChecks(
        directory,
        reader,
        Watcher(child_command("disk", watch=True), msgspec.json.encode(disk)),
        Watcher(child_command("gpu", watch=True), msgspec.json.encode(gpu)),
        KernelLog(),
        limits or Limits(),
        [make_repeated_check(check) for check in external],
    )

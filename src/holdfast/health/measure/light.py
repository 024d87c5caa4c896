"""The checks that an agent repeats while its workers train: a few milliseconds each, no torch.

What may hang (disk, GPU driver) is asked in child processes and answers in a later round; an answer
that does not come is itself a finding. Each answer is told once, so that one bad sample counts as
one. Use it with `core.health.Watch`:

    checks, watch = light_checks(directory), Watch()
    every 10 s or so, from one lasting thread:
        verdict = watch.observe(checks.round(now), now)
    at the end: checks.close()
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import msgspec

from holdfast.health.checks_gpu import GpuReport, judge_gpu_change, judge_gpu_count, judge_gpus
from holdfast.health.checks_host import (
    HostSample,
    judge_cpu,
    judge_memory,
    judge_memory_change,
    judge_ports,
)
from holdfast.health.checks_trials import (
    DiskSample,
    judge_disk_running,
    judge_failure,
    judge_kernel_log,
)
from holdfast.health.history import Finding, Grade
from holdfast.health.limits import Limits
from holdfast.health.measure.bounded import Watcher, probe_command
from holdfast.health.measure.host import HostReader
from holdfast.health.measure.kernel_log import KernelLog, Tally

LINES_MAX = 200  # of the kernel's log, in one round
BUSY = ("memory-available", "cpu-steal")
KINDS = ("hardware", "pcie", "disk", "hung")


class LightChecks:
    """`round` never waits for disk, GPU or network. All state is what the last rounds saw."""

    def __init__(
        self,
        directory: str,
        reader: HostReader,
        disk: Watcher,
        gpu: Watcher,
        log: KernelLog,
        limits: Limits,
    ) -> None:
        self._directory = directory
        self._reader = reader
        self.disk = disk
        self.gpu = gpu
        self._log = log
        self._limits = limits
        self._host: HostSample | None = None
        self._gpus: GpuReport | None = None
        self._gpus_expected = 0
        self._gpus_none = False  # nothing to ask, now and later
        self._log_state = "closed"  # open, closed, or why it cannot be read

    def round(self, now: float) -> tuple[Finding, ...]:
        """One round. `now`: seconds of a clock that never goes back."""
        return (
            *self._look_at_host(),
            *self._look_at_log(),
            *self._look_at_disk(now),
            *self._look_at_gpus(now),
        )

    def close(self) -> None:
        """End the children. Never waits."""
        self.disk.close()
        self.gpu.close()
        self._log.close()
        self._log_state = "closed"

    def _look_at_host(self) -> list[Finding]:
        host, before = self._reader.sample(), self._host
        self._host = host
        found = [_at_most_warn(f) for f in judge_memory(host.memory, self._limits)]
        if host.ports:
            found.append(judge_ports(host))
        if before is not None:
            found += judge_memory_change(before, host, self._limits)
            found += [_at_most_warn(f) for f in judge_cpu(before, host, self._limits)]
        return found

    def _look_at_log(self) -> list[Finding]:
        if self._log_state == "closed":
            self._log_state = self._log.open(from_end=True) or "open"
        if self._log_state != "open":
            return []
        tally = Tally()
        for line in self._log.lines(LINES_MAX, 0.0):
            tally.add(line)
        return judge_kernel_log(tally.sample(), KINDS, gpus=self._gpus_expected > 0)

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
            found += judge_gpus(report, self._limits, before_job=False)
        past = {gpu.index: gpu for gpu in before.gpus} if before is not None else {}
        for gpu in report.gpus:
            if gpu.index in past:
                found += judge_gpu_change(past[gpu.index], gpu)
        return found


def _at_most_warn(finding: Finding) -> Finding:
    """A busy machine is not a broken one: others find out that it is slow, and work moves on."""
    if finding.grade is not Grade.FAIL or finding.check not in BUSY:
        return finding
    return replace(finding, grade=Grade.WARN)


def _answer(watcher: Watcher, now: float, limits: Limits, kind: type[Any]) -> tuple[Any, str, bool]:
    """(the sample that has come, what went wrong, whether it hangs); asks for the next one."""
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


def light_checks(directory: str, limits: Limits | None = None) -> LightChecks:
    """The checks of this machine. `directory`: where the node writes. Starts nothing yet."""
    reader = HostReader()
    disk = {"directory": directory, "syncs": 1, "write_s": 0.0}
    gpu = {"present": reader.gpus_present()}
    return LightChecks(
        directory,
        reader,
        Watcher(probe_command("disk", watch=True), msgspec.json.encode(disk)),
        Watcher(probe_command("gpu", watch=True), msgspec.json.encode(gpu)),
        KernelLog(),
        limits or Limits(),
    )

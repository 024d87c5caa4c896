"""Children with a bound, and the checks that an agent repeats: the agent never waits for them."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import pytest

from conftest import RUN_S
from health_kit import CALM
from holdfast.engine.host import bounded
from holdfast.engine.host.bounded import Watcher, child_command, run_bounded
from holdfast.engine.host.checks_gpu import GpuReport, GpuSample
from holdfast.engine.host.checks_trials import DiskSample
from holdfast.engine.host.findings import GIB, Finding, Grade
from holdfast.engine.host.history import Health, Watch
from holdfast.engine.host.host import HostReader
from holdfast.engine.host.kernel_log import KernelLog
from holdfast.engine.host.light import LightChecks, light_checks
from holdfast.engine.net.descriptors import wait_readable

OK, WARN, FAIL = Grade.OK, Grade.WARN, Grade.FAIL
DISK = DiskSample(directory="/d", free_bytes=100 * GIB, sync_s=0.001)

# ---------------------------------------------------------------- bounds


def python(code: str) -> list[str]:
    return [sys.executable, "-c", code]


def test_a_child_that_ends_well_fails_or_cannot_start() -> None:
    assert run_bounded(["cat"], b"one\ntwo\npart", RUN_S).lines == (b"one", b"two")
    failed = run_bounded(python("import sys; sys.exit('bad disk')"), b"", RUN_S)
    assert (failed.failure, failed.hung) == ("bad disk", False)
    killed = run_bounded(python("import os; os.kill(os.getpid(), 9)"), b"", RUN_S)
    assert "signal 9" in killed.failure
    assert "cannot start" in run_bounded(["/nowhere/x"], b"", RUN_S).failure


def test_a_child_that_hangs_is_killed() -> None:
    found = run_bounded(["sleep", "1000"], b"", 0.2)
    assert (found.failure, found.hung) == ("no answer in 0.2 s", True)


class Undead:
    """Is a process in the kernel's hands, which a kill does not end."""

    stdin = stdout = stderr = None
    returncode = None
    pid = 1

    def __init__(self, *args: object, **kwargs: object) -> None:
        self.kills = 0

    def kill(self) -> None:
        self.kills += 1

    def poll(self) -> None:
        return None

    def communicate(self, request: bytes, timeout: float) -> None:
        raise subprocess.TimeoutExpired("x", timeout, output=b"said\nhalf")

    def wait(self, timeout: float) -> None:
        raise subprocess.TimeoutExpired("x", timeout)


def test_a_child_that_cannot_be_killed_is_left_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(bounded.subprocess, "Popen", Undead)
    found = run_bounded(["x"], b"", 0.1)
    assert found.hung
    assert "cannot even be killed" in found.failure
    assert found.lines == (b"said",), "what it said before counts, whole lines only"


@pytest.fixture
def watcher() -> Iterator[Callable[[list[str]], Watcher]]:
    made: list[Watcher] = []

    def make(command: list[str]) -> Watcher:
        made.append(Watcher(command, b"{}"))
        return made[-1]

    yield make
    for each in made:
        each.close()


def wait(source: Watcher | int) -> None:
    """Wait until there is something to read."""
    assert wait_readable([source], RUN_S)


def polled(watcher: Watcher) -> tuple[bytes | None, str]:
    """Return the next answer."""
    while (found := watcher.poll()) == (None, ""):
        wait(watcher)
    return found


ECHO = "import sys\nfor line in sys.stdin: print(repr(line), flush=True)"


def test_a_watcher_asks_once_and_answers_once(watcher: Callable[[list[str]], Watcher]) -> None:
    child = watcher(python(ECHO))
    assert (child.pid, child.poll()) == (0, (None, ""))
    assert child.ask(1.0) == ""
    assert polled(child) == (b"'{}\\n'", "")
    assert child.waited_s(5.0) == 0.0
    assert polled(child) == (b"'\\n'", ""), "the request and one question"
    assert child.ask(6.0) == child.ask(7.0) == ""
    assert child.waited_s(8.0) == 2.0, "while one is outstanding no other is asked"
    assert polled(child)[0] == b"'\\n'"
    pidfd = os.pidfd_open(child.pid)
    child.close()
    wait(pidfd)
    os.close(pidfd)
    assert (child.pid, child.fileno()) == (0, -1)


def test_a_watcher_whose_child_dies_starts_another_but_not_at_once(
    watcher: Callable[[list[str]], Watcher],
) -> None:
    child = watcher(python("import os, sys; sys.stdin.readline(); os.kill(os.getpid(), 9)"))
    assert child.ask(0.0) == ""
    pidfd = os.pidfd_open(child.pid)
    wait(pidfd)
    os.close(pidfd)
    line, failure = polled(child)
    assert line is None
    assert failure == "the measurement was killed by signal 9"
    assert "later" in child.ask(1.0)
    assert child.pid == 0
    assert child.ask(bounded.RESTART_S + 1.0) == ""
    assert child.pid > 0


def test_a_watcher_that_says_too_much_is_ended(watcher: Callable[[list[str]], Watcher]) -> None:
    child = watcher(python("while True: print('x' * 65536, end='')"))
    child.ask(0.0)
    assert polled(child) == (None, "the measurement says too much")
    assert child.pid == 0


# ---------------------------------------------------------------- while running


def light(
    tmp_path: Path,
    disk: Watcher,
    gpu: Watcher,
    log: Path = Path("/nowhere"),
) -> LightChecks:
    return LightChecks(str(tmp_path), HostReader(), disk, gpu, KernelLog(log), CALM)


def scripted(*samples: Any) -> list[str]:
    """Return the command of a child that gives these answers, the last one for ever."""
    texts = [msgspec.json.encode(sample).decode() for sample in samples]
    code = (
        f"import sys\ntexts = {texts!r}\nsys.stdin.readline()\n"
        "for line in sys.stdin: print(texts.pop(0) if texts[1:] else texts[0], flush=True)"
    )
    return python(code)


SILENT = "import sys\nfor line in sys.stdin: pass"


def test_a_disk_that_stops_answering_drains_the_node(
    tmp_path: Path, watcher: Callable[[list[str]], Watcher]
) -> None:
    gone = scripted(GpuReport(missing="no library"))
    checks = light(tmp_path, watcher(python(SILENT)), watcher(gone))
    watch = Watch()
    healths = []
    for number in range(12):
        now = 10.0 * number
        found = checks.round(now)
        healths.append(watch.observe(found, now).health)
    assert healths[:7] == [Health.HEALTHY] * 7
    assert healths[7:9] == [Health.SUSPECT] * 2
    assert healths[9] is Health.DRAIN
    assert watch.verdict.reason.startswith(f"disk {tmp_path}: no answer for 90 s (3 failed")
    checks.close()


def told(checks: LightChecks, watcher: Watcher, now: float) -> dict[str, Finding]:
    """Return the round that reports the answer to the last question; it may arrive in pieces."""
    while watcher.waited_s(now):
        wait(watcher)
        found = checks.round(now)
        if watcher.waited_s(now) == 0.0:  # answered, and asked again at this very time
            return {f.name: f for f in found}
    raise AssertionError("nothing was asked")


def test_a_busy_machine_is_not_drained(
    tmp_path: Path, watcher: Callable[[list[str]], Watcher]
) -> None:
    greedy = replace(CALM, memory_available=(2, 2), steal=(-1, -1))
    silent = watcher(python(SILENT)), watcher(python(SILENT))
    checks = LightChecks(str(tmp_path), HostReader(), *silent, KernelLog(Path("/none")), greedy)
    checks.round(0.0)
    grades = {f.check: f.grade for f in checks.round(10.0)}
    assert grades["memory-available"] is WARN
    assert grades["cpu-steal"] in (WARN, Grade.SKIPPED)  # skipped if no tick has passed
    checks.close()


def test_gpus_are_counted_compared_and_told_once(
    tmp_path: Path, watcher: Callable[[list[str]], Watcher]
) -> None:
    first = GpuReport(driver="570", gpus=(GpuSample(index=0, corrected=1), GpuSample(index=1)))
    worse = GpuReport(driver="570", gpus=(GpuSample(index=0, corrected=4),))
    gpu = watcher(scripted(first, worse))
    checks = light(tmp_path, watcher(scripted(DISK)), gpu)
    checks.round(0.0)
    found = told(checks, gpu, 1.0)
    assert found["gpu-count"].grade is OK
    assert found["gpu-driver"].grade is OK
    assert "gpu-memory GPU 0" not in found, "while a job runs it is meant to be used"
    found = told(checks, gpu, 2.0)
    assert found["gpu-count"].grade is FAIL
    assert (found["gpu-corrected GPU 0"].grade, found["gpu-corrected GPU 0"].value) == (WARN, 3)
    checks.close()


def test_a_machine_without_gpus_keeps_no_child_for_them(
    tmp_path: Path, watcher: Callable[[list[str]], Watcher]
) -> None:
    gpu = watcher(scripted(GpuReport(missing="no library")))
    checks = light(tmp_path, watcher(scripted(DISK)), gpu)
    checks.round(0.0)
    found = told(checks, gpu, 1.0)
    assert gpu.pid == 0
    assert not [name for name in found if name.startswith("gpu")]
    assert not [f for f in checks.round(5.0) if f.check.startswith("gpu")]
    checks.close()


def test_an_answer_that_makes_no_sense_is_a_warning(
    tmp_path: Path, watcher: Callable[[list[str]], Watcher]
) -> None:
    disk = watcher(scripted({"directory": 7}))
    checks = light(tmp_path, disk, watcher(scripted(GpuReport(missing="none"))))
    checks.round(0.0)
    found = told(checks, disk, 1.0)[f"disk {tmp_path}"]
    assert found.grade is WARN
    assert "malformed" in found.reason
    checks.close()


def test_the_light_checks_of_this_machine(tmp_path: Path) -> None:
    checks = light_checks(str(tmp_path))
    first = {f.check for f in checks.round(0.0)}
    assert "memory-available" in first
    assert "disk" not in first, "it is asked and not waited for"
    pidfd = os.pidfd_open(checks.disk.pid)
    second = told(checks, checks.disk, 10.0)
    assert second[f"disk {tmp_path}"].grade is OK
    assert {"swapping", "cpu-steal"} <= set(second)
    checks.close()
    wait(pidfd)
    os.close(pidfd)
    assert os.listdir(tmp_path) == []


def test_light_checks_need_no_torch_and_no_numpy() -> None:
    code = (
        "import sys, holdfast.engine.host.light, holdfast.engine.host.bounded;"
        "print([m for m in ('torch', 'numpy') if m in sys.modules])"
    )
    assert subprocess.check_output(python(code), text=True).strip() == "[]"


def test_a_child_dies_with_the_process_that_asked(tmp_path: Path) -> None:
    """The child dies even if it has stopped answering."""
    code = (
        "import os, select, signal, sys\n"
        "from holdfast.engine.host.light import light_checks\n"
        "checks = light_checks(sys.argv[1])\n"
        "checks.round(0.0)\n"
        "select.select([checks.disk], [], [], 60)\n"
        "checks.gpu.close()\n"
        "os.kill(checks.disk.pid, signal.SIGSTOP)\n"
        "print(checks.disk.pid, flush=True)\n"
        "signal.pause()\n"
    )
    command = [*python(code), str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as parent:
        assert parent.stdout is not None
        pidfd = os.pidfd_open(int(parent.stdout.readline()))
        parent.kill()
    wait(pidfd)
    os.close(pidfd)


def test_probe_commands_name_our_process() -> None:
    assert child_command("disk")[-3:] == ["once", "disk", str(os.getpid())]

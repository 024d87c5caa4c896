"""Kills by the kernel for lack of memory are recognised: by its log, or by a count."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from conftest import RUN_S
from holdfast.engine.host.kernel_log import WINDOW_S, KernelLog, OomKills
from holdfast.engine.runtime.local_run import LocalRun

V1 = "9:name=systemd:/\n4:memory:/job/7\n1:cpu,cpuacct:/\n"
V2 = "0::/job/7\n"
KILLED = "6,100,{us},-;Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB"


class Machine:
    """Is a folder with the files that the kernel would show."""

    def __init__(self, root: Path, groups: str, file: str) -> None:
        self.root, self.file = root, root / file
        (root / "proc" / "self").mkdir(parents=True)
        (root / "proc" / "self" / "cgroup").write_text(groups)
        if groups == V2:
            (root / "sys/fs/cgroup").mkdir(parents=True)
            (root / "sys/fs/cgroup/cgroup.controllers").write_text("memory")
        self.file.parent.mkdir(parents=True, exist_ok=True)
        self.log = root / "kmsg"
        self.kills = OomKills(root, self.log)

    def count(self, number: int) -> None:
        self.file.write_text(f"low 0\noom 9\noom_kill {number}\noom_group_kill 3\n")


@pytest.mark.parametrize(
    ("groups", "file"),
    [
        (V1, "sys/fs/cgroup/memory/job/7/memory.oom_control"),
        (
            V1,
            "sys/fs/cgroup/memory/memory.oom_control",
        ),  # a container sees its own group at the root
        (V2, "sys/fs/cgroup/job/7/memory.events"),
        (V2, "sys/fs/cgroup/memory.events"),
        ("", "proc/vmstat"),
    ],
)
def test_a_count_that_has_just_grown_explains_as_many_kills(
    groups: str, file: str, tmp_path: Path
) -> None:
    machine = Machine(tmp_path, groups, file)
    machine.count(3)
    machine.kills.look(0.0)
    assert machine.kills.explain(11, 1.0) == ""
    machine.count(4)
    assert machine.kills.explain(12, 2.0) == "its control group counts the kill"
    assert machine.kills.explain(13, 3.0) == "", "one kill explains one end"


def test_a_kill_of_long_ago_explains_nothing(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V2, "sys/fs/cgroup/job/7/memory.events")
    machine.count(0)
    machine.kills.look(0.0)
    machine.count(1)  # a child of a worker, which lives on
    for now in (1.0, 2.0, 2.0 + WINDOW_S, 3.0 + WINDOW_S):
        machine.kills.look(now)
    assert machine.kills.explain(12, 4.0 + WINDOW_S) == ""


def test_without_any_count_nothing_is_explained(tmp_path: Path) -> None:
    machine = Machine(tmp_path, V1, "elsewhere")
    machine.kills.look(0.0)
    assert machine.kills.explain(12, 1.0) == ""


def test_the_line_of_the_kernels_log_on_this_process_is_the_evidence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    machine = Machine(tmp_path, V2, "sys/fs/cgroup/job/7/memory.events")
    us = int(time.clock_gettime(time.CLOCK_BOOTTIME) * 1e6)
    records = [KILLED.format(us=us).encode()]
    machine.log.touch()
    plain = os.read

    def read(descriptor: int, size: int) -> bytes:  # the device gives one record at a time
        if os.readlink(f"/proc/self/fd/{descriptor}") != str(machine.log):
            return plain(descriptor, size)
        return left.pop(0) if left else b""

    monkeypatch.setattr(os, "read", read)
    left = list(records)
    found = machine.kills.explain(4711, 1.0)
    assert found == "Memory cgroup out of memory: Killed process 4711 (python) total-vm:9kB"
    left = list(records)
    assert machine.kills.explain(471, 2.0) == ""


GREEDY = """
import os, sys
from pathlib import Path
import torch, holdfast
job = holdfast.join()
model = torch.nn.Linear(2, 1)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
job.protect(model=model, optimizer=optimizer)
dataset = torch.utils.data.TensorDataset(torch.ones(8, 2), torch.ones(8, 1))
data = job.batches(dataset, batch_size=2)
for step in job.steps(data, until=6):
    if step.index == 2 and job.worker == 1 and os.environ["HOLDFAST_INCARNATION"] == "1":
        Path(sys.argv[1], "tasks").write_text(str(os.getpid()))
        filled = bytearray(1 << 30)
    for x, y in step:
        step.backward((model(x) - y).square().mean())
    optimizer.step()
    optimizer.zero_grad()
"""


@pytest.fixture
def small_group() -> Iterator[Path]:
    """Return a control group with little room in it, whose kills the kernel's log names."""
    if KernelLog().open(from_end=True):
        pytest.skip("the kernel's log cannot be read here")
    lines = Path("/proc/self/cgroup").read_text().splitlines()
    place = next((line.split(":", 2)[2] for line in lines if ":memory:" in line), None)
    group = Path(f"/sys/fs/cgroup/memory{place}/holdfast-test-{os.getpid()}")
    try:
        group.mkdir()
        (group / "memory.limit_in_bytes").write_text(str(256 << 20))
    except OSError:
        pytest.skip("no control group of memory (version 1) can be made here")
    yield group
    subprocess.run(["rmdir", str(group)], check=False, timeout=10)


def test_a_worker_that_the_kernel_has_killed_is_named_with_the_remedy(
    tmp_path: Path, small_group: Path
) -> None:
    script = tmp_path / "greedy.py"
    script.write_text(GREEDY)
    options = ["--nproc", "2", "--virtual", "2"]
    with LocalRun(tmp_path / "run", options, [str(script), str(small_group)]) as run:
        assert run.wait(RUN_S) == 0, run.log()
    (lost,) = run.events("lost")
    assert (
        "worker 1 was lost: killed by the kernel for lack of memory on node node0" in lost["text"]
    )
    assert "run fewer workers there" in lost["text"]
    told = subprocess.run(
        [sys.executable, "-m", "holdfast.cli.main", "explain", str(run.run_dir.path)],
        check=True,
        capture_output=True,
        text=True,
        timeout=RUN_S,
    )
    assert "killed by the kernel for lack of memory on node node0" in told.stdout

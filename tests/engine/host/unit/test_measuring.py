"""The doctor's means: kernel files, arithmetic, memory and disk."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from holdfast.engine.core.exact_products import NARROW, WIDE, digest_of
from holdfast.engine.host import compute, kernel_log
from holdfast.engine.host import disk_speed as disk
from holdfast.engine.host.host import HostReader
from holdfast.engine.host.kernel_log import KernelLog, KernelLogTally, parse_record, read_log
from holdfast.engine.train import selftest

SECRET = b"s" * 32
WAIT_S = 60.0  # bounds a hang

# ---------------------------------------------------------------- the kernel's files

PROC = {
    "proc/meminfo": "MemTotal: 1000 kB\nMemFree: 100 kB\nMemAvailable: 400 kB\n"
    "SwapTotal: 50 kB\nSwapFree: 30 kB\nHugePages_Total: 3\n",
    "proc/vmstat": "pswpin 5\npswpout 7\noom_kill 2\n",
    "proc/stat": "cpu  1 2 3 4 5 6 7 8 9 10\ncpu0 1 1 1 1 1 1 1 1\n",
    "proc/pressure/cpu": "some avg10=1.00 avg60=2.50 avg300=3.00 total=9\n"
    "full avg10=0.00 avg60=0.00 avg300=0.00 total=0\n",
    "proc/pressure/memory": "some avg10=1 avg60=2 avg300=3 total=9\n"
    "full avg10=4.00 avg60=5.50 avg300=6.00 total=0\n",
    "proc/loadavg": "0.1 0.2 0.3 2/500 12345\n",
    "proc/sys/kernel/threads-max": "9000\n",
    "proc/sys/kernel/pid_max": "4000\n",
    "proc/cpuinfo": "processor : 0\nmodel name : A  Processor\n",
}


@pytest.fixture
def host(tmp_path: Path) -> Callable[..., HostReader]:
    """Return host(files), which makes a reader of a made-up machine."""

    def make(files: dict[str, str] | None = None) -> HostReader:
        for name, text in (PROC | (files or {})).items():
            path = tmp_path / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        return HostReader(tmp_path)

    return make


def test_a_plain_machine(host: Callable[..., HostReader]) -> None:
    sample = host().sample()
    assert sample.memory.total_bytes == 1000 * 1024
    assert sample.memory.available_bytes == sample.memory.free_bytes == 400 * 1024
    assert sample.memory.swap_used_bytes == 20 * 1024
    assert (sample.memory.swapped_pages, sample.memory.oom_kills) == (12, 2)
    assert (sample.memory.limit_bytes, sample.memory.uncorrected) == (None, None)
    assert (sample.cpu.ticks, sample.cpu.stolen, sample.cpu.quota) == (36, 8, None)
    assert sample.pressure.cpu_some == 2.5
    assert sample.pressure.memory_full == 5.5
    assert sample.pressure.io_full is None
    assert sample.allowance.processes is not None
    assert sample.allowance.processes <= 3500
    assert sample.allowance.shared_bytes is None
    assert host().processor() == "A Processor"


def test_an_empty_machine_tells_nothing_and_breaks_nothing(tmp_path: Path) -> None:
    sample = HostReader(tmp_path).sample()
    assert sample.memory.total_bytes == 0
    assert sample.allowance.processes is None or sample.allowance.processes > 0
    assert HostReader(tmp_path).links() == ""


V2 = {
    "proc/self/cgroup": "0::/job/task\n",
    "sys/fs/cgroup/cgroup.controllers": "cpu memory pids\n",
    "sys/fs/cgroup/job/task/memory.max": "max\n",
    "sys/fs/cgroup/job/memory.max": str(300 * 1024),
    "sys/fs/cgroup/job/memory.current": str(250 * 1024),
    "sys/fs/cgroup/job/memory.stat": f"anon 5\ninactive_file {50 * 1024}\n",
    "sys/fs/cgroup/job/task/cpu.max": "250000 100000\n",
    "sys/fs/cgroup/job/cpu.max": "150000 100000\n",
    "sys/fs/cgroup/job/cpu.stat": "usage_usec 5\nnr_periods 40\nnr_throttled 10\n",
    "sys/fs/cgroup/job/task/pids.max": "100\n",
    "sys/fs/cgroup/job/task/pids.current": "90\n",
}
V1 = {
    "proc/self/cgroup": "4:memory:/a\n3:cpu,cpuacct:/a\n2:pids:/a\n1:name=systemd:/a\n0::/a\n",
    "sys/fs/cgroup/memory/a/memory.limit_in_bytes": str(300 * 1024),
    "sys/fs/cgroup/memory/a/memory.usage_in_bytes": str(250 * 1024),
    "sys/fs/cgroup/memory/a/memory.stat": f"cache 1\ntotal_inactive_file {50 * 1024}\n",
    "sys/fs/cgroup/memory/memory.limit_in_bytes": "9223372036854771712\n",
    "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_quota_us": "150000\n",
    "sys/fs/cgroup/cpu,cpuacct/a/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_quota_us": "-1\n",
    "sys/fs/cgroup/cpu,cpuacct/cpu.cfs_period_us": "100000\n",
    "sys/fs/cgroup/cpu,cpuacct/a/cpu.stat": "nr_periods 40\nnr_throttled 10\n",
    "sys/fs/cgroup/pids/a/pids.max": "100\n",
    "sys/fs/cgroup/pids/a/pids.current": "90\n",
}
# In a container without a name space for cgroups the path is the host's, and does not exist.
HIDDEN = {
    (name.replace("/a/", "/") if "/memory/memory" not in name else "unused"): text
    for name, text in V1.items()
    if "cpuacct/cpu" not in name
} | {"proc/self/cgroup": V1["proc/self/cgroup"].replace("/a", "/docker/4711")}


@pytest.mark.parametrize("files", [V2, V1, HIDDEN], ids=["v2", "v1", "hidden"])
def test_a_container(files: dict[str, str], host: Callable[..., HostReader]) -> None:
    sample = host(files).sample()
    assert sample.memory.limit_bytes == 300 * 1024
    assert sample.memory.limit_used_bytes == 200 * 1024
    assert sample.memory.free_bytes == 100 * 1024
    assert sample.cpu.quota == 1.5
    assert (sample.cpu.periods, sample.cpu.throttled) == (40, 10)
    assert sample.allowance.processes == 10


def test_devices(host: Callable[..., HostReader]) -> None:
    gpu = {"vendor": "0x10de\n", "class": "0x030200\n"}
    files = {f"sys/bus/pci/devices/0000:0{n}:00.0/{k}": v for n in (1, 2) for k, v in gpu.items()}
    files |= {
        "sys/bus/pci/devices/0000:03:00.0/vendor": "0x10de\n",  # the GPU's sound card
        "sys/bus/pci/devices/0000:03:00.0/class": "0x040300\n",
        "sys/bus/pci/devices/0000:04:00.0/vendor": "0x8086\n",
        "sys/bus/pci/devices/0000:04:00.0/class": "0x030000\n",
        "sys/devices/system/edac/mc/mc0/ce_count": "3\n",
        "sys/devices/system/edac/mc/mc0/ue_count": "0\n",
        "sys/devices/system/edac/mc/mc1/ce_count": "4\n",
        "sys/devices/system/edac/mc/mc1/ue_count": "1\n",
        "sys/class/infiniband/mlx5_0/ports/1/state": "4: ACTIVE\n",
        "sys/class/infiniband/mlx5_1/ports/1/state": "1: DOWN\n",
        "sys/class/net/eth0/speed": "25000\n",
        "sys/class/net/eth0/operstate": "up\n",
        "sys/class/net/eth0/device/x": "",
        "sys/class/net/eth1/speed": "100000\n",
        "sys/class/net/eth1/operstate": "down\n",
        "sys/class/net/eth1/device/x": "",
        "sys/class/net/veth9/speed": "10000\n",  # no device behind it
        "sys/class/net/veth9/operstate": "up\n",
    }
    reader = host(files)
    sample = reader.sample()
    assert reader.gpus_present() == 2
    assert (sample.memory.corrected, sample.memory.uncorrected) == (7, 1)
    assert (sample.ports, sample.ports_down) == (2, ("mlx5_1/1 DOWN",))
    assert reader.links() == "1 x 25000 Mb/s"


# ---------------------------------------------------------------- the kernel's log

LINES = [
    ("NVRM: Xid (PCI:0000:3b:00): 79, pid=1, GPU has fallen off the bus.", "xid"),
    ("mce: [Hardware Error]: Machine check events logged", "hardware"),
    ("EDAC MC0: 1 UE memory read error on CPU_SrcID#0", "hardware"),
    ("pcieport 0000:00:01.0: PCIe Bus Error: severity=Corrected", "pcie"),
    ("blk_update_request: I/O error, dev sda, sector 1", "disk"),
    ("EXT4-fs error (device sda1): ext4_find_entry:1455", "disk"),
    ("nvme nvme0: I/O 5 QID 2 timeout, aborting", "disk"),
    ("INFO: task kworker:1 blocked for more than 120 seconds.", "hung"),
    ("watchdog: BUG: soft lockup - CPU#3 stuck for 22s!", "hung"),
    ("Out of memory: Killed process 4711 (python)", "memory"),
    ("usb 1-1: new high-speed USB device number 2", ""),
    ("EDAC MC: Ver: 3.0.0", ""),
]


@pytest.mark.parametrize(("line", "kind"), LINES)
def test_lines_of_trouble(line: str, kind: str) -> None:
    tally = KernelLogTally()
    tally.add(line)
    sample = tally.sample()
    assert [k for k, _, _ in sample.counts] == ([kind] if kind not in ("", "xid") else [])
    assert sample.xids == ((("0000:3b:00", 79),) if kind == "xid" else ())


def test_records() -> None:
    assert parse_record("6,339,5140900,-;NET: Registered\n SUBSYSTEM=x\n") == (
        5.1409,
        "NET: Registered",
    )
    for wrong in ("", "no record", "6,1;x", "6,1,soon,-;x"):
        assert parse_record(wrong) is None


def test_following_the_log(tmp_path: Path) -> None:
    """A FIFO stands for the device: it gives the bytes that are there, and never waits."""
    device = tmp_path / "kmsg"
    os.mkfifo(device)
    log = KernelLog(device)
    assert log.open(from_end=False) == ""
    with open(device, "wb", buffering=0) as writer:
        assert log.lines(10, 0.0) == []
        writer.write(b"6,1,7000000,-;first\n")
        assert log.lines(10, 0.0) == ["first"]
        writer.write(b"6,2,7000000,-;too old\n")
        assert log.lines(10, 8.0) == []
        writer.write(b"\xff\xfe garbage\n")
        assert log.lines(10, 0.0) == []
    log.close()


def test_a_log_that_cannot_be_read(tmp_path: Path) -> None:
    assert "No such file" in read_log(tmp_path / "none").unreadable


def test_this_machines_log_is_read_or_not_but_never_waited_for() -> None:
    sample = read_log()
    assert sample.unreadable or isinstance(sample.counts, tuple)


# ---------------------------------------------------------------- arithmetic and memory


def entries(product: Any, dtype: Any) -> tuple[Any, Any]:
    return compute.operands(product, dtype)


@pytest.mark.slow
def test_the_digests_are_those_of_whole_numbers() -> None:
    """The oracle never rounds: 64-bit integers, summed by a plain loop."""
    left, right = entries(NARROW, np.int64)
    assert digest_of((left @ right).astype("<i4").tobytes()) == NARROW.digest
    left, right = entries(WIDE, np.float64)
    result = left @ right
    assert compute.result_digest(result) == WIDE.digest
    assert compute.find_wrong_rows(WIDE, result) == []
    some = [0, 1, 511, 1023]
    assert (left[some].astype(np.int64) @ right.astype(np.int64) == result[some]).all()


@pytest.mark.parametrize("seed", range(3))
def test_no_order_of_additions_shows(seed: int) -> None:
    left, right = entries(WIDE, np.float32)
    order = np.random.default_rng(seed).permutation(WIDE.inner)
    result = np.zeros((WIDE.rows, WIDE.columns), np.float32)
    for part in np.array_split(order, 7):
        result += left[:, part] @ right[part]
    assert compute.result_digest(result) == WIDE.digest


@pytest.mark.parametrize("spoil", ["bit", "nan", "half", "swap"])
def test_a_wrong_product_is_found_with_its_row(spoil: str) -> None:
    def multiply(left: Any, right: Any, out: Any) -> None:
        np.matmul(left, right, out=out)
        if spoil == "bit":
            out[7, 9:10].view(np.uint32)[0] ^= 1 << 20
        elif spoil == "nan":
            out[7, 9] = np.nan
        elif spoil == "half":
            out[7, 9] += 0.5
        else:
            out[[7, 8]] = out[[8, 7]]

    sample = compute.try_arithmetic(0.0, multiply)
    assert sample.repeats == sample.wrong == compute.REPEATS_MIN
    rows = "2 of 1024 rows (7, 8)" if spoil == "swap" else "1 of 1024 rows (7)"
    assert sample.where == rows


def test_the_arithmetic_trial_of_a_sound_machine_finds_nothing_wrong() -> None:
    sample = compute.try_arithmetic(0.0)
    assert (sample.wrong, sample.where) == (0, "")
    assert sample.operations_per_s > 0


@pytest.mark.parametrize("pattern", [0, 1, 2])
@pytest.mark.parametrize("byte", [0, 12345, 3 * (1 << 20) + 5])
def test_a_changed_byte_of_memory_is_found(pattern: int, byte: int) -> None:
    words = np.zeros((4 << 20) // 8 - 3, np.uint64)
    compute.write_pattern(words, pattern)
    assert compute.check_pattern(words, pattern) == (0, -1)
    words.view(np.uint8)[byte] ^= 4
    assert compute.check_pattern(words, pattern) == (1, byte)


def test_every_bit_of_memory_is_both_0_and_1() -> None:
    words = np.zeros(8, np.uint64)
    compute.write_pattern(words, 0)
    first = words.copy()
    compute.write_pattern(words, 1)
    assert (first ^ words == np.uint64(2**64 - 1)).all()
    compute.write_pattern(words, 2)
    assert len(set(words.tolist())) == len(words)


def test_memory_is_copied_and_never_more_than_there_is() -> None:
    sample = compute.try_memory(0.0, 16 << 20, threads=2)
    assert sample.tested_bytes == 2 << 20
    assert sample.wrong_bytes == 0
    assert sample.copied_per_s > 0


@pytest.mark.slow
def test_torch_gets_the_same_bits() -> None:
    cpu = torch.device("cpu")
    sample = selftest.try_device(cpu, 0.0)
    assert (sample.device, sample.wrong) == ("processors (torch)", 0)
    assert sample.repeats == 2 + selftest.REPEATS_MIN
    left, right, wanted = selftest.make_tiled(
        cpu, 1
    )  # a processor takes seconds for more in bfloat16
    found = left @ right
    assert torch.equal(found, wanted)
    assert selftest.is_right(NARROW, found)
    wrong = wanted[: NARROW.rows, : NARROW.columns].clone()
    wrong[5, 5] += 1
    assert not selftest.is_right(NARROW, wrong)
    wrong[5, 5] = torch.nan
    assert not selftest.is_right(NARROW, wrong)
    assert selftest.facts()["torch"] == str(torch.__version__)


def test_a_device_that_cannot_compute_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*args: object, **kwargs: object) -> None:
        raise RuntimeError("CUDA error: uncorrectable ECC error\nCompile with ...")

    monkeypatch.setattr(selftest, "try_device", broken)
    sample = selftest.attempt(torch.device("cuda", 3), 0.0)
    assert (sample.device, sample.failure) == ("GPU 3", "CUDA error: uncorrectable ECC error")


@pytest.mark.slow
def test_torch_that_multiplies_wrongly_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    right = torch.mm

    def spoiled(left: torch.Tensor, other: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        right(left, other, out=out)
        out[3, 3] += 1
        return out

    monkeypatch.setattr(torch, "mm", spoiled)
    sample = selftest.try_device(torch.device("cpu"), 0.0)
    assert sample.wrong == selftest.REPEATS_MIN
    assert sample.where == "repeated products"


# ---------------------------------------------------------------- disk


def test_a_disk_is_tried_out_and_left_as_it_was(tmp_path: Path) -> None:
    sample = disk.try_disk(str(tmp_path), syncs=3, write_s=0.05)
    assert sample.failure == ""
    assert sample.free_bytes > 0
    assert sample.sync_s is not None
    assert sample.sync_max_s is not None
    assert 0 < sample.sync_s <= sample.sync_max_s
    assert sample.write_per_s is not None
    assert not sample.read_back_wrong
    assert sample.filesystem
    assert os.listdir(tmp_path) == []
    light = disk.try_disk(str(tmp_path), syncs=1)
    assert (light.write_per_s, light.sync_s is None) == (None, False)


def test_a_disk_that_corrupts_is_found(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread

    def pread(descriptor: int, count: int, offset: int) -> bytes:
        data = bytearray(real(descriptor, count, offset))
        data[100] ^= 1
        return bytes(data)

    monkeypatch.setattr(disk.os, "pread", pread)
    assert disk.try_disk(str(tmp_path), syncs=1, write_s=0.01).read_back_wrong


@pytest.mark.parametrize("number", ["ENOSPC", "EROFS", "EIO"])
def test_a_disk_that_refuses_says_why(
    number: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import errno

    def fsync(descriptor: int) -> None:
        code = getattr(errno, number)
        raise OSError(code, os.strerror(code))

    monkeypatch.setattr(disk.os, "fsync", fsync)
    sample = disk.try_disk(str(tmp_path), syncs=1)
    assert sample.failure == os.strerror(getattr(errno, number))
    assert os.listdir(tmp_path) == []


def test_file_systems_are_told_apart_by_the_longest_path(tmp_path: Path) -> None:
    mounts = tmp_path / "mountinfo"
    mounts.write_text(
        "1 0 8:1 / / rw - ext4 /dev/a rw\n"
        "2 1 0:5 / /data rw shared:1 - nfs4 host:/x rw\n"
        "3 1 0:6 / /database rw - xfs /dev/b rw\n"
        "broken line\n"
    )
    kinds = [disk.filesystem_of(path, mounts) for path in ("/", "/data/run", "/database", "/dat")]
    assert kinds == ["ext4", "nfs4", "xfs", "ext4"]
    assert disk.filesystem_of("/", tmp_path / "none") == ""


def test_the_log_device_is_the_kernels() -> None:
    assert str(kernel_log.DEVICE) == "/dev/kmsg"

"""Look at a host through /proc, /sys and cgroups (v1 and v2): a few small files, no torch.

A value that a kernel or container does not give becomes None. All files are the kernel's own, so
reading them does not wait for a disk or a device. Tests pass another root.
"""

from __future__ import annotations

import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path

from holdfast.engine.host.checks_host import (
    AllowanceSample,
    CpuSample,
    HostSample,
    MemorySample,
    PressureSample,
)
from holdfast.engine.host.findings import KIB

CGROUP_NO_LIMIT = 1 << 60  # version 1 writes "no limit" as a number of this kind
FILE_BYTES_MAX = 1 << 20
CGROUP_LEVELS_MAX = 32
SHARED_MEMORY = Path("/dev/shm")


def advise_on_shared_memory(folder: Path = SHARED_MEMORY) -> str:
    """Return one sentence with the size of this file system, to print when it is full."""
    try:
        found = os.statvfs(folder)
    except OSError as error:
        return f"{folder} cannot be used ({error.strerror}): mount a tmpfs there"
    size = found.f_blocks * found.f_frsize
    return (
        f"{folder} has {size / 2**20:.0f} MiB in all: make it larger (docker run --shm-size=8g, "
        f"mount -o remount,size=8g {folder}), or use fewer data workers or smaller batches"
    )


@dataclass(frozen=True, slots=True)
class KernelFiles:
    """Reads small files under `root`."""

    root: Path

    def text(self, path: str) -> str:
        """Read a file's text; empty when there is none."""
        try:
            with open(self.root / path, encoding="utf-8", errors="replace") as file:
                return file.read(FILE_BYTES_MAX)
        except OSError:
            return ""

    def number(self, path: str) -> int | None:
        return _number(self.text(path))

    def names(self, path: str) -> list[str]:
        try:
            return sorted(os.listdir(self.root / path))
        except OSError:
            return []

    def fields(self, path: str) -> dict[str, int]:
        """Read a file with lines of `name value` or `name: value kB`."""
        found = {}
        for line in self.text(path).splitlines():
            words = line.replace(":", " ").split()
            value = _number(words[1]) if len(words) > 1 else None
            if value is not None:
                found[words[0]] = value * (KIB if words[2:] == ["kB"] else 1)
        return found


@dataclass(frozen=True, slots=True)
class ControlGroups:
    """Reads the limits of the control groups (version 1 or 2) of this process."""

    files: KernelFiles

    def list_folders(self, controller: str) -> list[str]:
        """List the folders that limit this process, innermost first; v1 has one per controller."""
        found: list[str] = []
        for line in self.files.text("proc/self/cgroup").splitlines():
            number, _, rest = line.partition(":")
            names, _, path = rest.partition(":")
            if number == "0" and not names:
                bases = ("sys/fs/cgroup", "sys/fs/cgroup/unified")
                base = next((b for b in bases if self.files.text(f"{b}/cgroup.controllers")), "")
            elif controller in names.split(","):
                base = next(
                    (
                        b
                        for b in (f"sys/fs/cgroup/{controller}", f"sys/fs/cgroup/{names}")
                        if self.files.names(b)
                    ),
                    "",
                )
            else:
                continue
            if base:
                found += self._folders_upwards(base, path)
        return found

    def _folders_upwards(self, base: str, path: str) -> list[str]:
        parts = [p for p in path.split("/") if p and p != ".."]
        folders = ["/".join([base, *parts[:n]]) for n in range(len(parts), -1, -1)]
        # Inside a container the path may be the host's, which is not visible here.
        return [f for f in folders if (self.files.root / f).is_dir()][:CGROUP_LEVELS_MAX]

    def read_cpu_quota(self) -> float | None:
        quotas = []
        for folder in self.list_folders("cpu"):
            words = self.files.text(f"{folder}/cpu.max").split()
            if not words:
                words = [
                    self.files.text(f"{folder}/cpu.cfs_{name}_us").strip()
                    for name in ("quota", "period")
                ]
            quota, period = (_number(w) for w in [*words, "", ""][:2])
            if quota is not None and quota > 0 and period:
                quotas.append(quota / period)
        return min(quotas, default=None)

    def read_cpu_stat(self) -> dict[str, int]:
        for folder in self.list_folders("cpu"):
            stat = self.files.fields(f"{folder}/cpu.stat")
            if stat.get("nr_periods"):
                return stat
        return {}

    def read_memory_limit(self) -> tuple[int | None, int]:
        """Find the tightest limit, and the bytes that count against it."""
        found: list[tuple[int, int]] = []
        for folder in self.list_folders("memory"):
            for limit_name, used_name in (
                ("memory.max", "memory.current"),
                ("memory.limit_in_bytes", "memory.usage_in_bytes"),
            ):
                limit = self.files.number(f"{folder}/{limit_name}")
                if limit is None or limit >= CGROUP_NO_LIMIT:
                    continue
                stat = self.files.fields(f"{folder}/memory.stat")
                droppable = stat.get("total_inactive_file", stat.get("inactive_file", 0))
                used = max(0, (self.files.number(f"{folder}/{used_name}") or 0) - droppable)
                found.append((limit, used))
        if not found:
            return None, 0
        return min(found, key=lambda pair: pair[0] - pair[1])


@dataclass(frozen=True, slots=True)
class HostReader:
    """Reads the kernel's files under `root`."""

    root: Path = Path("/")

    @property
    def files(self) -> KernelFiles:
        return KernelFiles(self.root)

    @property
    def groups(self) -> ControlGroups:
        return ControlGroups(self.files)

    def sample(self) -> HostSample:
        ports, down = self._ports()
        return HostSample(
            at_s=time.monotonic(),
            memory=self.memory(),
            cpu=self._cpu(),
            pressure=PressureSample(
                cpu_some=self._pressure("cpu", "some"),
                memory_full=self._pressure("memory", "full"),
                io_full=self._pressure("io", "full"),
            ),
            allowance=self._allowance(),
            ports=ports,
            ports_down=down,
        )

    def memory(self) -> MemorySample:
        """Read how much memory there is, and the counters of its errors."""
        info, events = self.files.fields("proc/meminfo"), self.files.fields("proc/vmstat")
        limit, used = self.groups.read_memory_limit()
        corrected, uncorrected = self._edac("ce_count"), self._edac("ue_count")
        return MemorySample(
            total_bytes=info.get("MemTotal", 0),
            available_bytes=info.get("MemAvailable", info.get("MemFree", 0)),
            swap_used_bytes=info.get("SwapTotal", 0) - info.get("SwapFree", 0),
            limit_bytes=limit,
            limit_used_bytes=used,
            swapped_pages=events.get("pswpin", 0) + events.get("pswpout", 0),
            oom_kills=events.get("oom_kill", 0),
            corrected=corrected,
            uncorrected=uncorrected,
        )

    def _edac(self, name: str) -> int | None:
        base = "sys/devices/system/edac/mc"
        counts = [
            self.files.number(f"{base}/{mc}/{name}")
            for mc in self.files.names(base)
            if mc.startswith("mc")
        ]
        known = [c for c in counts if c is not None]
        return sum(known) if known else None

    def _cpu(self) -> CpuSample:
        first = self.files.text("proc/stat").partition("\n")[0].split()
        # user nice system idle iowait irq softirq steal; the two after it are part of user and nice
        ticks = [_number(word) or 0 for word in first[1:9]]
        stat = self.groups.read_cpu_stat()
        return CpuSample(
            visible=os.cpu_count() or 1,
            allowed=len(os.sched_getaffinity(0)),
            quota=self.groups.read_cpu_quota(),
            ticks=sum(ticks),
            stolen=ticks[7] if len(ticks) == 8 else 0,
            periods=stat.get("nr_periods", 0),
            throttled=stat.get("nr_throttled", 0),
        )

    def _pressure(self, what: str, who: str) -> float | None:
        for line in self.files.text(f"proc/pressure/{what}").splitlines():
            words = line.split()
            if words and words[0] == who:
                values = dict(w.partition("=")[::2] for w in words[1:])
                try:
                    return float(values["avg60"])
                except (KeyError, ValueError):
                    return None
        return None

    def _allowance(self) -> AllowanceSample:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        shared, free = self._shared_memory()
        return AllowanceSample(
            open_files=None if soft == resource.RLIM_INFINITY else soft,
            open_files_hard=None if hard == resource.RLIM_INFINITY else hard,
            processes=self._processes(),
            shared_bytes=shared,
            shared_free_bytes=free,
        )

    def _shared_memory(self) -> tuple[int | None, int]:
        try:
            found = os.statvfs(self.root / "dev/shm")
        except OSError:
            return None, 0
        return found.f_blocks * found.f_frsize, found.f_bavail * found.f_frsize

    def _processes(self) -> int | None:
        """Count how many more tasks can be started, at least."""
        left = []
        running = self.files.text("proc/loadavg").partition("/")[2].split(" ")[0]
        tasks = _number(running) or 0
        for name in ("threads-max", "pid_max"):
            most = self.files.number(f"proc/sys/kernel/{name}")
            if most is not None:
                left.append(most - tasks)
        soft = resource.getrlimit(resource.RLIMIT_NPROC)[0]
        if soft != resource.RLIM_INFINITY and os.geteuid() != 0:  # root is exempt
            left.append(soft - tasks)  # a lower bound, since not all are ours
        for folder in self.groups.list_folders("pids"):
            most, used = (
                self.files.number(f"{folder}/pids.max"),
                self.files.number(f"{folder}/pids.current"),
            )
            if most is not None:
                left.append(most - (used or 0))
        return max(0, min(left)) if left else None

    def _ports(self) -> tuple[int, tuple[str, ...]]:
        """Count the InfiniBand ports, and name the inactive ones."""
        count, down = 0, []
        base = "sys/class/infiniband"
        for device in self.files.names(base):
            for port in self.files.names(f"{base}/{device}/ports"):
                count += 1
                state = self.files.text(f"{base}/{device}/ports/{port}/state").strip()
                if "ACTIVE" not in state:
                    down.append(f"{device}/{port} {state.partition(':')[2].strip() or 'unknown'}")
        return count, tuple(down)

    def gpus_present(self) -> int:
        """Count NVIDIA display controllers and accelerators on the PCI bus, driver or not."""
        count = 0
        base = "sys/bus/pci/devices"
        for device in self.files.names(base):
            if self.files.text(f"{base}/{device}/vendor").strip() == "0x10de":
                count += self.files.text(f"{base}/{device}/class").startswith(("0x0300", "0x0302"))
        return count

    def links(self) -> str:
        """Return the speeds of physical network links that are up, such as `2 x 25000 Mb/s`."""
        speeds: dict[int, int] = {}
        base = "sys/class/net"
        for name in self.files.names(base):
            speed = self.files.number(f"{base}/{name}/speed")
            up = self.files.text(f"{base}/{name}/operstate").strip() == "up"
            if up and speed and speed > 0 and (self.root / base / name / "device").exists():
                speeds[speed] = speeds.get(speed, 0) + 1
        return ", ".join(f"{n} x {speed} Mb/s" for speed, n in sorted(speeds.items()))

    def processor(self) -> str:
        for line in self.files.text("proc/cpuinfo").splitlines():
            name, _, value = line.partition(":")
            if name.strip() in ("model name", "Model", "cpu model"):
                return " ".join(value.split())
        return ""


def _number(text: str) -> int | None:
    try:
        return int(text.strip())
    except ValueError:
        return None

"""Figures against which the model of the network is checked: published ones, and our own.

A row names its source and its date. `within`: the factor by which the model may differ, in either
direction; a test checks it. Latencies of two networks are fitted to one row each, which is marked;
the other rows of these networks check the fit. Not included are figures of NCCL with switches that
add up (SHARP), which send fewer bytes than any algorithm that the model knows.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.plan.network import H100, GpuNetwork, LinkSpeed, time_double_tree, time_ring

MIB, GIB = 2**20, 2**30
NCCL, TESTS = "https://github.com/NVIDIA/nccl/issues", "https://github.com/NVIDIA/nccl-tests/issues"
ML = "https://github.com/stas00/ml-engineering/tree/master/network"
GIST = "https://gist.github.com/jacobkahn"
RING, TREE, BEST = "ring", "tree", "the faster one"


def link(base: LinkSpeed, line: float, got: float, latency_s: float | None = None) -> LinkSpeed:
    """Return a link with other rates, in bytes per second, and perhaps another latency."""
    return LinkSpeed(
        latency_s=base.latency_s if latency_s is None else latency_s,
        bytes_per_s=got,
        line_bytes_per_s=line,
    )


def other(
    gpu_link: tuple[float, float], nics: int, nic_gbit: float, gpus: int = 8, nic_s: float = 14e-6
) -> GpuNetwork:
    """Return a network like H100 with other links; a NIC gets 96 % of its line rate.

    `gpu_link`: line rate and attained rate, in GB/s.
    """
    line, got = gpu_link
    nic = nic_gbit / 8 * 1e9
    return dataclasses.replace(
        H100,
        gpus_per_machine=gpus,
        nics_per_machine=nics,
        gpu_link=link(H100.gpu_link, line * 1e9, got * 1e9),
        nic=link(H100.nic, nic, 0.96 * nic, nic_s),
    )


NVLINK_2, NVLINK_3, NVLINK_4, NVLINK_5 = (150, 120), (300, 235), (450, 370), (900, 740)
A100 = other(NVLINK_3, 8, 200)
A100_FOUR_NICS = other(NVLINK_3, 4, 200)
H100_FOUR_NICS = other(NVLINK_4, 4, 400)
FOUR_GPUS = other(NVLINK_3, 4, 200, gpus=4)
# Elastic Fabric Adapters: latencies of the protocol for large messages, each fitted to one row.
V100_EFA = other(NVLINK_2, 1, 100, nic_s=183e-6)
B200_EFA = other(NVLINK_5, 8, 400, nic_s=58e-6)
SUMMIT = other((50, 45), 2, 100, gpus=6)


@dataclass(frozen=True, kw_only=True)
class Published:
    """Describes one figure of NCCL."""

    network: GpuNetwork
    workers: int
    #: Bytes of the sum.
    size: float
    algorithm: str
    value: float
    #: "GB/s" for a bus bandwidth, 2 S (1 - 1/N) by the time; "us" for a time.
    unit: str
    what: str
    source: str
    date: str
    within: float = 1.25
    fitted: bool = False

    def predict(self) -> float:
        """Return the same figure as the model has it."""
        ways = {
            RING: [time_ring],
            TREE: [time_double_tree],
            BEST: [time_ring, time_double_tree],
        }[self.algorithm]
        seconds = min(way(self.network, self.workers, self.size, self.size) for way in ways)
        if self.unit == "us":
            return seconds * 1e6
        return 2 * (self.workers - 1) / self.workers * self.size / seconds / 1e9


PUBLISHED: tuple[Published, ...] = (
    Published(
        network=H100,
        workers=8,
        size=16 * GIB,
        algorithm=RING,
        value=367.2,
        unit="GB/s",
        what="one machine with H200, without NVLink SHARP",
        source=ML,
        date="2026",
    ),
    Published(
        network=A100,
        workers=8,
        size=8,
        algorithm=RING,
        value=33.7,
        unit="us",
        what="one DGX A100, 8 bytes",
        source=f"{TESTS}/123",
        date="2022-12-14",
        within=2.5,
    ),
    Published(
        network=A100,
        workers=16,
        size=8 * GIB,
        algorithm=RING,
        value=192,
        unit="GB/s",
        what="DGX A100, 8 NICs with 200 Gb/s",
        source=f"{NCCL}/812",
        date="2023-03-31",
    ),
    Published(
        network=A100_FOUR_NICS,
        workers=16,
        size=8 * GIB,
        algorithm=RING,
        value=91,
        unit="GB/s",
        what="A100, 4 NICs with 200 Gb/s",
        source=f"{TESTS}/100",
        date="2022-01-17",
    ),
    Published(
        network=A100_FOUR_NICS,
        workers=24,
        size=128 * MIB,
        algorithm=BEST,
        value=96,
        unit="GB/s",
        what="A100, 4 NICs with 200 Gb/s, the best size",
        source=f"{TESTS}/119",
        date="2022-11-17",
    ),
    Published(
        network=FOUR_GPUS,
        workers=8,
        size=GIB,
        algorithm=RING,
        value=93.58,
        unit="GB/s",
        what="2 machines with 4 GPUs, 4 NICs with 200 Gb/s",
        source=f"{TESTS}/252",
        date="2024-09-24",
    ),
    Published(
        network=H100,
        workers=16,
        size=8 * GIB,
        algorithm=RING,
        value=380,
        unit="GB/s",
        what="2 machines with H100, 8 NICs with 400 Gb/s, as NVIDIA expects",
        source=f"{TESTS}/309",
        date="2025-06-18",
    ),
    Published(
        network=H100_FOUR_NICS,
        workers=40,
        size=MIB,
        algorithm=RING,
        value=354.9,
        unit="us",
        what="5 machines with H100, 4 NICs with 400 Gb/s, 1 MiB",
        source=f"{NCCL}/1368",
        date="2024-07-18",
        within=2.1,
    ),
    Published(
        network=H100_FOUR_NICS,
        workers=40,
        size=GIB,
        algorithm=RING,
        value=190,
        unit="GB/s",
        what="the same, 1 GiB",
        source=f"{NCCL}/1368",
        date="2024-07-18",
    ),
    Published(
        network=H100_FOUR_NICS,
        workers=40,
        size=GIB,
        algorithm=TREE,
        value=150,
        unit="GB/s",
        what="the same, by trees; the reporter found this slow",
        source=f"{NCCL}/1368",
        date="2024-07-18",
        within=1.6,
    ),
    Published(
        network=H100,
        workers=32,
        size=16 * GIB,
        algorithm=BEST,
        value=369.06,
        unit="GB/s",
        what="4 machines with H200, 3,200 Gb/s each (EFA)",
        source=ML,
        date="2026",
    ),
    Published(
        network=B200_EFA,
        workers=32,
        size=32 * 1024,
        algorithm=BEST,
        value=0.65,
        unit="GB/s",
        what="4 machines with B200, 3,200 Gb/s each (EFA), 32 KiB",
        source=f"{ML}/benchmarks",
        date="2026-10",
        fitted=True,
    ),
    Published(
        network=B200_EFA,
        workers=32,
        size=MIB,
        algorithm=BEST,
        value=12.47,
        unit="GB/s",
        what="the same, 1 MiB",
        source=f"{ML}/benchmarks",
        date="2026-10",
        within=1.5,
    ),
    Published(
        network=B200_EFA,
        workers=32,
        size=32 * MIB,
        algorithm=BEST,
        value=142.9,
        unit="GB/s",
        what="the same, 32 MiB",
        source=f"{ML}/benchmarks",
        date="2026-10",
        within=1.6,
    ),
    Published(
        network=B200_EFA,
        workers=32,
        size=GIB,
        algorithm=BEST,
        value=365.99,
        unit="GB/s",
        what="the same, 1 GiB",
        source=f"{ML}/benchmarks",
        date="2026-10",
    ),
    Published(
        network=V100_EFA,
        workers=16,
        size=8,
        algorithm=RING,
        value=163.4,
        unit="us",
        what="2 machines with V100 (EFA), 8 bytes",
        source=f"{GIST}/a92f4425abf831ac0799fabe9079263d",
        date="2019-07-23",
        fitted=True,
    ),
    Published(
        network=V100_EFA,
        workers=32,
        size=8,
        algorithm=RING,
        value=319.4,
        unit="us",
        what="4 machines of these, 8 bytes",
        source=f"{GIST}/1fb3977e99056b7935a6c63dda1e145f",
        date="2019-07-23",
    ),
    Published(
        network=V100_EFA,
        workers=64,
        size=8,
        algorithm=RING,
        value=631.3,
        unit="us",
        what="8 machines of these, 8 bytes",
        source=f"{GIST}/3150a1a38abba40f58d8263d9c55969f",
        date="2019-07-23",
    ),
    Published(
        network=H100,
        workers=1984,
        size=512 * MIB,
        algorithm=BEST,
        value=350,
        unit="GB/s",
        what="248 machines with H200, 8 NICs with 400 Gb/s, NCCL's choice",
        source=f"{TESTS}/283",
        date="2025-01-18",
    ),
)

# "Up to 180x": the latency of rings divided by the latency of double binary trees on Summit, whose
# machines have 6 V100.
SUMMIT_GPUS, SUMMIT_GAIN, SUMMIT_WITHIN, SUMMIT_DATE = 24_576, 180, 2.0, "2019-02"
SUMMIT_SOURCE = "https://developer.nvidia.com/blog/massively-scale-deep-learning-training-nccl-2-4/"


def predict_summit_gain() -> float:
    """Return the ratio of a ring's time to double binary trees' for 8 bytes on Summit."""
    sizes = SUMMIT, SUMMIT_GPUS, 8.0, 8.0
    return time_ring(*sizes) / time_double_tree(*sizes)


# ---------------------------------------------------------------- measured here

# MANY_WORKERS.md, 2026-11-30: workers, and CPU milliseconds of a step for each of them. All of
# them share two cores; the small model has one bucket of 1 MB or two.
STEP_CPU_MS = ((4, 10.9), (16, 15.8), (32, 20.2))
# STEP_COST.md, 2026-11-25: ranks, MB and milliseconds of one flat exchange of a bucket between
# processes of one machine, over TCP.
FLAT_EXCHANGES = (
    (2, 1.0, 0.27),
    (4, 1.0, 0.93),
    (2, 25.0, 6.67),
    (4, 25.0, 19.1),
    (2, 100.0, 26.7),
    (4, 100.0, 73.9),
)
# The bytes per second that all processes of that machine move together: fitted to 2 ranks, 25 MB.
LOOPBACK_BYTES_PER_S = 7.5e9


def fit_step_cpu(points: Sequence[tuple[int, float]] = STEP_CPU_MS) -> tuple[float, float]:
    """Fit `fixed + doubling * log2(workers)` milliseconds by least squares."""
    levels = [math.log2(workers) for workers, _ in points]
    mean_level = sum(levels) / len(points)
    mean = sum(ms for _, ms in points) / len(points)
    over = sum((x - mean_level) ** 2 for x in levels)
    pairs = list(zip(levels, points, strict=True))
    doubling = sum((x - mean_level) * (ms - mean) for x, (_, ms) in pairs) / over
    return mean - doubling * mean_level, doubling


def predict_flat_exchange(ranks: int, megabytes: float) -> float:
    """Return the milliseconds of a flat exchange between processes that share one memory."""
    moved = ranks * 2 * (ranks - 1) / ranks * megabytes * 1e6
    return moved / LOOPBACK_BYTES_PER_S * 1e3

"""Keeps published figures on failures as data, each with its source, and makes models of them.

A table that counts causes over a known time gives a rate and the shares of the effects. A table of
causes alone gives the shares, and the rate must be taken from elsewhere. The `Effect` of a cause is
our reading of its name, not a figure of the source.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from dataclasses import dataclass, field

from holdfast.engine.core.errors import UserError
from holdfast.plan.distributions import Interval, LogNormal

DAY_S = 86_400.0
HOUR_S = 3_600.0

#: All repairs of LANL: Schroeder and Gibson, DSN 2006. Mean 355 minutes, median 54.
LANL_REPAIR = LogNormal(mean_s=355 * 60, median_s=54 * 60)


class Effect(enum.Enum):
    """Names the harm that a failure does to a job, which decides how it is found and mended."""

    #: A process ends; the machine is sound and starts another.
    PROCESS = "process"
    #: A machine must be repaired or replaced.
    NODE = "node"
    #: All machines of a failure domain are away: a switch, a rack's power.
    DOMAIN = "domain"
    #: A process waits for ever, and no error shows it.
    HANG = "hang"
    #: A machine leaves and has announced it: maintenance, preemption with a notice.
    PLANNED = "planned"
    #: Several machines leave at once, and have announced it: a preemption by another job.
    WAVE = "wave"
    #: A machine is much slower than the rest.
    SLOW = "slow"
    #: All machines are away at once: power, cooling, a file system.
    OUTAGE = "outage"
    #: A machine computes wrong values, and no error shows it.
    SILENT = "silent"


@dataclass(frozen=True, slots=True)
class ReportedCause:
    """Is one row of a published table. `count`: occurrences, or per cent where those are given."""

    name: str
    count: float
    effect: Effect


@dataclass(frozen=True, slots=True, kw_only=True)
class Lemons:
    """Describes nodes that fail far more often than the rest."""

    #: Their share of the nodes.
    share: float
    #: How many times as often as another node such a node fails.
    factor: float

    @property
    def part(self) -> float:
        """Return their share of the failures."""
        theirs = self.share * self.factor
        return theirs / (theirs + 1 - self.share)


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureTable:
    """Is a published table. `source`: authors, place, and the number of the table."""

    name: str
    source: str
    causes: tuple[ReportedCause, ...] = ()
    #: Failures of 1,000 nodes in a day, as measured; None where the source gives none.
    rate: Interval | None = None
    #: GPUs of a node that the rate counts.
    gpus_per_node: int = 8
    #: Shape of the Weibull distribution of times between failures.
    shape: float = 1.0
    #: Whether that shape was found for the times of one node, or of the whole system.
    shape_of: str = "job"
    repair: LogNormal | None = None
    #: Share of the nodes that fail more often, and how many times as often.
    lemons: Lemons | None = None
    note: str = ""

    def shares(self) -> dict[Effect, float]:
        """Return the share of each effect among the causes that interrupt a job."""
        total = sum(cause.count for cause in self.causes)
        found = dict.fromkeys(Effect, 0.0)
        for cause in self.causes:
            found[cause.effect] += cause.count / total
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class FailureModel:
    """Describes how the nodes of a cluster fail. Made by `find_model`, or from a user's trace."""

    name: str
    source: str
    #: Failures of 1,000 nodes in a day.
    rate: Interval
    gpus_per_node: int = 8
    #: Shape of the times between failures of one node (1: exponential).
    shape: float = 1.0
    #: Whether all nodes are new when the job begins; otherwise their ages are spread out.
    is_new: bool = False
    shares: Mapping[Effect, float] = field(default_factory=dict)
    repair: LogNormal = LANL_REPAIR
    lemons: Lemons | None = None
    #: Times in a day that several nodes leave at once, and their number.
    waves: Interval = field(default_factory=lambda: Interval(low=0.0, high=0.0))
    wave_nodes: int = 1

    def per_node_s(self, gpus_per_node: int) -> Interval:
        """Return the failures of a node of this many GPUs in a second."""
        return self.rate.times(gpus_per_node / self.gpus_per_node / 1000 / DAY_S)

    def share(self, effect: Effect) -> float:
        return self.shares.get(effect, 0.0)


N, P, D, H = Effect.NODE, Effect.PROCESS, Effect.DOMAIN, Effect.HANG
PLANNED, SLOW, SILENT = Effect.PLANNED, Effect.SLOW, Effect.SILENT

LLAMA3 = FailureTable(
    name="llama3",
    source="The Llama 3 Herd of Models (arXiv:2407.21783), table 5: 419 unexpected interruptions "
    "of 16,384 H100 in 54 days",
    note="the printed shares of GPUs do not add up; the counts do, and are used",
    rate=Interval(low=419 / 54 / 2.048, high=419 / 54 / 2.048),
    causes=(
        ReportedCause("Faulty GPU", 148, N),
        ReportedCause("GPU HBM3 memory", 72, N),
        ReportedCause("Software bug", 54, P),
        ReportedCause("Network switch or cable", 35, N),
        ReportedCause("Host maintenance", 32, PLANNED),
        ReportedCause("GPU SRAM memory", 19, N),
        ReportedCause("GPU system processor", 17, N),
        ReportedCause("NIC", 7, N),
        ReportedCause("NCCL watchdog timeouts", 7, H),
        ReportedCause("Silent data corruption", 6, SILENT),
        ReportedCause("GPU thermal interface and sensor", 6, N),
        ReportedCause("SSD", 3, N),
        ReportedCause("Power supply", 3, N),
        ReportedCause("Server chassis", 2, N),
        ReportedCause("IO expansion board", 2, N),
        ReportedCause("Dependency", 2, P),
        ReportedCause("CPU", 2, N),
        ReportedCause("System memory", 2, N),
    ),
)
FT_HSDP = FailureTable(
    name="ft-hsdp",
    source="FT-HSDP (arXiv:2602.00277), table 1: 678 unexpected interruptions of jobs on 32K H100, "
    "2.3 a day for 1,000 servers; a mean of 18 minutes at about 100,000 GPUs",
    # 18 minutes between failures at 98,304 GPUs: 12,288 servers.
    rate=Interval(low=2.3, high=80 / 12.288),
    causes=(
        ReportedCause("GPU HBM3 memory", 155, N),
        ReportedCause("PCIe device", 122, N),
        ReportedCause("NCCL watchdog timeouts", 61, H),
        ReportedCause("Faulty GPU compute", 50, N),
        ReportedCause("Software bug", 48, P),
        ReportedCause("Host maintenance", 42, PLANNED),
        ReportedCause("Kernel fault", 39, N),
        ReportedCause("System reboot", 38, N),
        ReportedCause("Silent data corruption", 37, SILENT),
        ReportedCause("Network switch or cable", 36, N),
        ReportedCause("SSD", 30, N),
        ReportedCause("GPU SRAM memory", 8, N),
        ReportedCause("Unknown", 7, P),
        ReportedCause("System memory", 2, N),
        ReportedCause("System cooling", 2, N),
        ReportedCause("GPU thermal interface and sensor", 1, N),
    ),
)
RSC1 = FailureTable(
    name="rsc-1",
    source="Kokolis et al., HPCA 2025 (arXiv:2410.21680): RSC-1, 16,000 A100; 6.50 failures of "
    "1,000 node-days; jobs of 8 GPUs fail every 47.7 days and jobs of 1,024 every 7.9 hours",
    # 6.50 is the rate that the paper projects with; 23.7 follows from the 7.9 h at 1,024 GPUs.
    rate=Interval(low=6.50, high=1000 / 128 / (7.9 / 24)),
    # 40 of 2,000 nodes; without them failures of jobs of 512 GPUs and more fell from 14 % to 4 %,
    # so they caused 10 of 14, and each failed 122 times as often as another.
    lemons=Lemons(share=0.02, factor=0.98 / 0.02 * 10 / 4),
    note="lemon nodes were found with 85 % accuracy",
)
RSC2 = FailureTable(
    name="rsc-2",
    source="Kokolis et al., HPCA 2025 (arXiv:2410.21680): RSC-2, 8,000 A100; 2.34 failures of "
    "1,000 node-days",
    rate=Interval(low=2.34, high=2.34),
)
LANL = FailureTable(
    name="lanl",
    source="Schroeder and Gibson, DSN 2006, and Understanding Failures in Petascale Computers, "
    "2007: 22 systems, 4,750 nodes, 1995 to 2005",
    shape=0.75,
    shape_of="node",
    repair=LANL_REPAIR,
    causes=(
        ReportedCause("Hardware", 53, N),
        ReportedCause("Software", 20, P),
        ReportedCause("Unknown", 25, N),
        ReportedCause("Network", 2, D),
    ),
    note="shape 0.7 to 0.8; hardware more than half, software about 20 %, unknown 20 to 30 %; the "
    "rest, 2 %, is taken to be the network",
)
ACME = FailureTable(
    name="acme",
    source="Hu et al., Characterization of Large Language Model Development in the Datacenter, "
    "NSDI 2024: infrastructure failures of two clusters, and the data loader",
    causes=(
        ReportedCause("NVLink error", 54, N),
        ReportedCause("CUDA error", 21, N),
        ReportedCause("Node failure", 16, N),
        ReportedCause("ECC error", 12, N),
        ReportedCause("Network error", 12, N),
        ReportedCause("Connection error", 147, P),
        ReportedCause("S3 storage error", 10, P),
        ReportedCause("NCCL timeout error", 6, H),
        ReportedCause("NCCL remote error", 3, P),
        ReportedCause("Data loader killed", 6, P),
    ),
    note="errors of scripts are left out: they come again on any machine",
)
PHILLY = FailureTable(
    name="philly",
    source="Jeon et al., Analysis of Large-Scale Multi-Tenant GPU Clusters, ATC 2019: trials",
    causes=(
        ReportedCause("CUDA failure", 1484, N),
        ReportedCause("MPI error", 634, P),
        ReportedCause("MPI runtime failure", 478, P),
        ReportedCause("Job preempted", 147, PLANNED),
        ReportedCause("CUDA initialization failed", 141, N),
        ReportedCause("GPU ECC error", 10, N),
        ReportedCause("Output node error", 3, N),
    ),
    note="errors of scripts and memory limits are left out: they come again on any machine",
)
UNICRON = FailureTable(
    name="unicron",
    source="Unicron (arXiv:2401.00134): ends of jobs, in per cent of all jobs; severities 1 to 3",
    causes=(
        ReportedCause("NCCL timeout", 10.1, H),
        ReportedCause("ECC errors", 5.0, N),
        ReportedCause("NVLink errors", 4.5, N),
        ReportedCause("Other network errors", 4.0, P),
        ReportedCause("Link flapping", 3.9, P),
        ReportedCause("Others", 3.3, P),
        ReportedCause("Task hang", 3.1, H),
        ReportedCause("Illegal memory access", 2.1, P),
        ReportedCause("Invalid DMA mapping", 2.1, N),
        ReportedCause("Connection refused", 2.1, P),
        ReportedCause("CUDA errors", 1.6, P),
        ReportedCause("Connection reset", 1.0, P),
        ReportedCause("GPU driver errors", 0.6, N),
    ),
)
BYTEROBUST = FailureTable(
    name="byterobust",
    source="ByteRobust, SOSP 2025 (arXiv:2509.16293), table 1: shares of 55,366 incidents in three "
    "months; rows that another source repeats",
    causes=(
        ReportedCause("CUDA error", 36.1, N),
        ReportedCause("Job hang", 9.9, H),
        ReportedCause("InfiniBand error", 2.9, N),
        ReportedCause("MFU decline", 0.8, SLOW),
        ReportedCause("NaN value", 0.3, SILENT),
    ),
    note="restarts for changes of code or data (17.3 %) are left out: they are wanted",
)
SILENT_ERRORS = FailureTable(
    name="silent-errors",
    source="Llama 3 (arXiv:2407.21783), table 5: 6 silent corruptions on 2,048 nodes in 54 days; "
    "FT-HSDP (arXiv:2602.00277), table 1: 5.5 % of interruptions",
    rate=Interval(low=6 / 54 / 2.048, high=0.055 * 80 / 12.288),
    causes=(ReportedCause("Silent data corruption", 1, SILENT),),
    note="CPUs: 3.61 of 10,000 processors compute wrongly (Wang et al., SOSP 2023), and a few of "
    "several thousand machines (Hochschild et al., HotOS 2021)",
)

TABLES = {
    table.name: table
    for table in (
        LLAMA3,
        FT_HSDP,
        RSC1,
        RSC2,
        LANL,
        ACME,
        PHILLY,
        UNICRON,
        BYTEROBUST,
        SILENT_ERRORS,
    )
}

# Node-days between failures differ tenfold between sources, so a plan without a model of its own
# takes the whole range.
PUBLISHED_RATES = Interval(low=2.3, high=34.0)

#: GPUs and the seconds that a cold recovery took, and the part of it for NCCL's communicators:
#: FT-HSDP (arXiv:2602.00277), figure 2, read off the figure.
COLD_RECOVERY_S = ((16_000, 200, 17), (22_000, 300, 30), (64_000, 600, 100), (98_000, 900, 200))
#: Seconds to make communicators again among 32 to 1,024 GPUs, as published by other projects.
OPENING_S = Interval(low=1.4, high=4.2)
#: Shares of interruptions by effect where a source counts none.
USUAL = LLAMA3


def find_model(name: str, rate: Interval | None = None) -> FailureModel:
    """Return the model of a published table.

    `rate`: instead of the table's; it is needed where the table has none. A shape that a source
    found for a whole system is not taken for its nodes: many nodes together look exponential
    whatever the shape of each.
    """
    if name == "published":
        return FailureModel(
            name=name,
            source="the range of all published rates, shares of Llama 3",
            rate=rate or PUBLISHED_RATES,
            shares=USUAL.shares(),
        )
    table = TABLES.get(name)
    if table is None:
        known = ", ".join(["published", *TABLES])
        raise UserError(f"there is no failure model {name!r}: use one of {known}, or a CSV file")
    used = rate or table.rate
    if used is None:
        raise UserError(
            f"the source of {name} gives no rate: add --rate with failures of 1,000 nodes in a day"
        )
    return FailureModel(
        name=name,
        source=table.source,
        rate=used,
        gpus_per_node=table.gpus_per_node,
        shape=table.shape if table.shape_of == "node" else 1.0,
        shares=(table if table.causes else USUAL).shares(),
        repair=table.repair or LANL_REPAIR,
        lemons=table.lemons,
    )


def interpolate_cold_recovery_s(gpus: float) -> tuple[float, float]:
    """Return the seconds of a cold recovery among this many GPUs, and of its communicators.

    Between the points of the figure linearly, below the first one in proportion.
    """
    first = COLD_RECOVERY_S[0]
    if gpus <= first[0]:
        share = gpus / first[0]
        return first[1] * share, first[2] * share
    points = COLD_RECOVERY_S
    last = len(points) - 2
    i = next((i for i in range(last) if gpus <= points[i + 1][0]), last)
    (a, cold_a, open_a), (b, cold_b, open_b) = points[i], points[i + 1]
    share = (gpus - a) / (b - a)
    return cold_a + share * (cold_b - cold_a), open_a + share * (open_b - open_a)

"""Predicts how long a step's exchange of gradients takes on a cluster of GPUs. Pure.

It compares the canonical tree (core/sum_plan.py) with the flat exchange, in which each worker sends
each other worker its piece, with NCCL's ring and double binary tree, and with the limit that the
links set. Whatever the algorithm, a bucket passes through stages, and a stage takes the time that
starting its messages takes, then the latency of the farthest link, then its bytes over the slowest
link, then its additions.

Buckets overlap: while one is at a high level of the tree, the next one is at a lower level. So the
whole exchange takes the passage of one bucket, which fills the pipeline, and for each further
bucket the time for which that bucket keeps the busiest resource busy. The resources are the links
between the GPUs of a machine, NICs, the links that leave a rack, GPU memory, and the worker itself,
which starts one message after the other. Traffic of other jobs, and messages that collide in
switches, are not modelled: a network that is not free of them is slower.

Bytes of a level are fractions of the bucket, counted at the busiest worker, NIC and rack. They are
read from real plans (`count_traffic`), or come from a closed form where the number of workers is a
power of two (`predict_traffic`). A test compares both.
"""

from __future__ import annotations

import enum
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.sum_plan import Level, SumPlan

NOTHING = Fraction(0)


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkSpeed:
    """Describes a link, in one direction; the other direction is as fast at the same time."""

    #: Seconds from the start of a large message until its first bytes can be used.
    latency_s: float
    #: Bytes per second that a program gets at best.
    bytes_per_s: float
    #: Bytes per second on the wire, with all overhead of protocols.
    line_bytes_per_s: float


@dataclass(frozen=True, slots=True, kw_only=True)
class GpuNetwork:
    """Describes a cluster. Workers have one GPU each, and are numbered machine by machine."""

    gpus_per_machine: int
    #: GPUs share NICs evenly: neighbours have the same one. Several NICs of one GPU count as one.
    nics_per_machine: int
    machines_per_rack: int
    #: Between GPUs of a machine, for each GPU.
    gpu_link: LinkSpeed
    #: Between machines of a rack, for each NIC.
    nic: LinkSpeed
    #: Latency between machines of different racks.
    fabric_latency_s: float
    #: Bytes per second of all NICs in a rack, divided by those of the links that leave it.
    oversubscription: float = 1.0
    #: Bytes per second that a GPU reads from and writes to its memory, together.
    memory_bytes_per_s: float

    @property
    def gpus_per_rack(self) -> int:
        return self.gpus_per_machine * self.machines_per_rack

    @property
    def rack_bytes_per_s(self) -> float:
        """Return the bytes per second that leave a rack at most."""
        nics = self.nics_per_machine * self.machines_per_rack
        return nics * self.nic.bytes_per_s / self.oversubscription

    def find_nic(self, place: int) -> tuple[int, int]:
        """Return a GPU's machine, and the number of its NIC there."""
        machine, gpu = divmod(place, self.gpus_per_machine)
        return machine, gpu * self.nics_per_machine // self.gpus_per_machine

    def find_rack(self, place: int) -> int:
        return place // self.gpus_per_rack


@dataclass(frozen=True, slots=True, kw_only=True)
class Carriage:
    """Describes how workers start messages and learn of their end, whatever the links are."""

    #: Seconds for which a worker is busy with a message that it sends and one that it receives.
    message_s: float
    #: Number of buckets under way at once; None: all of them.
    buckets_at_once: int | None = None
    #: Seconds until the first look at an exchange under way; 0: its end is noticed at once.
    first_poll_s: float = 0.0
    #: Each later pause between two looks is longer by this factor, up to `poll_s` seconds.
    poll_growth: float = 1.0
    poll_s: float = math.inf
    #: Seconds by which each pause lasts longer than it should.
    poll_extra_s: float = 0.0

    def see_end(self, lasted_s: float) -> float:
        """Return the seconds after which a worker sees the end of an exchange."""
        if not self.first_poll_s:
            return lasted_s
        seen_s, pause_s = 0.0, self.first_poll_s
        while seen_s < lasted_s:
            seen_s += pause_s + self.poll_extra_s
            pause_s = min(pause_s * self.poll_growth, self.poll_s)
        return seen_s


class Span(enum.Enum):
    """Names the farthest link that the messages of a level travel over."""

    MACHINE = "within a machine"
    RACK = "between machines of a rack"
    FABRIC = "between racks"


@dataclass(frozen=True, slots=True, kw_only=True)
class LevelTraffic:
    """Counts one exchange, as fractions of the bucket; each figure is the largest of all."""

    span: Span
    #: Messages that a worker sends or receives, whichever are more.
    messages: int
    #: Bytes that a worker sends to, or receives from, workers of its machine.
    gpu: Fraction = NOTHING
    #: Bytes that a NIC sends or receives.
    nic: Fraction = NOTHING
    #: Bytes that leave or enter a rack.
    rack: Fraction = NOTHING
    #: Size of the sums that a worker computes after the exchange.
    added: Fraction = NOTHING


@dataclass(frozen=True, slots=True, kw_only=True)
class ExchangeTime:
    """Is a prediction. `busy_s`: seconds of one bucket on each resource, the busiest first."""

    total_s: float
    buckets: int
    #: Seconds from the start of a bucket until all workers have its sum, if it is alone.
    passage_s: float
    busy_s: Mapping[str, float]


# NVIDIA DGX H100 and the like. Rates of NCCL on NVLink 4 and on NICs with 400 Gb/s: NVIDIA's
# engineers in NVIDIA/nccl-tests, issues 212 (2024-05-06: 370 of 450 GB/s) and 290 (2025-03-03: 46
# to 48 of 50 GB/s). Latencies of NCCL's protocol for large messages: src/graph/tuning.cc of NCCL,
# read in 2026. Memory: a copy on an H100 measured 2.9 TB/s (aigatech/vpbenchmarking). The latency
# between racks is an assumption: three more switches and some hundred metres of fibre.
H100 = GpuNetwork(
    gpus_per_machine=8,
    nics_per_machine=8,
    machines_per_rack=4,
    gpu_link=LinkSpeed(latency_s=3.4e-6, bytes_per_s=370e9, line_bytes_per_s=450e9),
    nic=LinkSpeed(latency_s=14e-6, bytes_per_s=48e9, line_bytes_per_s=50e9),
    fabric_latency_s=16e-6,
    memory_bytes_per_s=2.9e12,
)
# NCCL charges 1 or 2 microseconds for a message that it hands to a NIC (tuning.cc, net overhead).
POSTED_BY_LIBRARY = Carriage(message_s=2e-6)
# PyTorch takes 20 to 30 microseconds for a call of NCCL (stas00/ml-engineering, network).
CALL_FOR_EACH_LEVEL = Carriage(message_s=25e-6)
# Describes train/exchange/gpu_transport.py: one bucket after the other, and looks for the end of an
# exchange between pauses that grow. A pause in Python lasts 70 microseconds longer (measured on
# Linux).
AS_WRITTEN = Carriage(
    message_s=25e-6,
    buckets_at_once=1,
    first_poll_s=20e-6,
    poll_growth=1.25,
    poll_s=0.5e-3,
    poll_extra_s=70e-6,
)


# ---------------------------------------------------------------- bytes of the canonical tree


def predict_traffic(
    network: GpuNetwork, workers: int
) -> tuple[tuple[LevelTraffic, ...], tuple[LevelTraffic, ...]]:
    """Return the exchanges up and down the tree, where each worker hosts one block.

    At level k a worker exchanges 1 / 2^(k+1) of a bucket with the worker 2^k places from it. All
    GPUs of a machine do so at once, each over its own NIC. UserError if the workers, or the GPUs of
    a machine or rack, are no power of two.
    """
    for count, kind in (
        (workers, "workers"),
        (network.gpus_per_machine, "GPUs in a machine"),
        (network.gpus_per_rack, "GPUs in a rack"),
        (network.nics_per_machine, "NICs in a machine"),
    ):
        if count < 1 or count & (count - 1):
            raise UserError(f"{count} {kind}: not a power of two; count the traffic of a real plan")
    sharing = max(1, network.gpus_per_machine // network.nics_per_machine)
    up = []
    for k in range(workers.bit_length() - 1):
        distance, share = 1 << k, Fraction(1, 2 << k)
        if distance < network.gpus_per_machine:
            level = LevelTraffic(span=Span.MACHINE, messages=1, gpu=share, added=share)
        elif distance < network.gpus_per_rack:
            nic = sharing * share
            level = LevelTraffic(span=Span.RACK, messages=1, nic=nic, added=share)
        else:
            level = LevelTraffic(
                span=Span.FABRIC,
                messages=1,
                nic=sharing * share,
                rack=network.gpus_per_rack * share,
                added=share,
            )
        up.append(level)
    return tuple(up), tuple(_without_additions(each) for each in reversed(up))


def count_traffic(
    network: GpuNetwork, plans: Mapping[int, SumPlan], places: Sequence[int] | None = None
) -> tuple[tuple[LevelTraffic, ...], tuple[LevelTraffic, ...]]:
    """Count the exchanges up and down of real plans, by rank; each rank hosts a virtual rank.

    Plans of some ranks are enough if all ranks of their racks are among them, and no other rank is
    busier. `places`: the number of each rank's GPU in the cluster; without it, its rank.
    """
    up: dict[int, list[tuple[int, Level]]] = {}
    down: dict[int, list[tuple[int, Level]]] = {}
    for rank, plan in plans.items():
        for level in plan.up:
            up.setdefault(level.additions[0].node[1], []).append((rank, level))
        for level in plan.down:
            width = next(m.node[1] for m in (*level.sends, *level.receives))
            down.setdefault(width, []).append((rank, level))
    return (
        tuple(_count_level(network, up[width], places) for width in sorted(up)),
        tuple(_count_level(network, down[width], places) for width in sorted(down, reverse=True)),
    )


def _count_level(
    network: GpuNetwork, levels: Iterable[tuple[int, Level]], places: Sequence[int] | None
) -> LevelTraffic:
    gpu, nic, rack = _Tally(), _Tally(), _Tally()
    spans, messages, added = {Span.MACHINE}, 0, NOTHING
    for rank, level in levels:
        place = rank if places is None else places[rank]
        messages = max(messages, len(level.sends), len(level.receives))
        added = max(added, sum((a.part[1] - a.part[0] for a in level.additions), NOTHING))
        for way, each in [("out", m) for m in level.sends] + [("in", m) for m in level.receives]:
            size = each.part[1] - each.part[0]
            peer = each.peer if places is None else places[each.peer]
            here, there = network.find_nic(place), network.find_nic(peer)
            if here[0] == there[0]:
                gpu.add((way, place), size)
                continue
            spans.add(Span.RACK)
            nic.add((way, *here), size)
            if network.find_rack(place) != network.find_rack(peer):
                spans.add(Span.FABRIC)
                rack.add((way, network.find_rack(place)), size)
    span = next(each for each in (Span.FABRIC, Span.RACK, Span.MACHINE) if each in spans)
    return LevelTraffic(
        span=span, messages=messages, gpu=gpu.most, nic=nic.most, rack=rack.most, added=added
    )


class _Tally:
    """Adds up bytes by resource."""

    def __init__(self) -> None:
        self._sizes: dict[tuple[object, ...], Fraction] = {}

    def add(self, resource: tuple[object, ...], size: Fraction) -> None:
        self._sizes[resource] = self._sizes.get(resource, NOTHING) + size

    @property
    def most(self) -> Fraction:
        return max(self._sizes.values(), default=NOTHING)


def _without_additions(level: LevelTraffic) -> LevelTraffic:
    return LevelTraffic(
        span=level.span, messages=level.messages, gpu=level.gpu, nic=level.nic, rack=level.rack
    )


# ---------------------------------------------------------------- time


def time_tree(
    network: GpuNetwork, carriage: Carriage, workers: int, sum_bytes: float, bucket_bytes: float
) -> ExchangeTime:
    """Predict the exchange along the canonical tree, for a power of two of workers."""
    up, down = predict_traffic(network, workers)
    return time_levels(network, carriage, (*up, *down), sum_bytes, bucket_bytes)


def time_flat(
    network: GpuNetwork, carriage: Carriage, workers: int, sum_bytes: float, bucket_bytes: float
) -> ExchangeTime:
    """Predict an exchange in which each worker sends each other worker its piece, twice."""
    gpus, rack_gpus = network.gpus_per_machine, network.gpus_per_rack
    near, racked = min(workers, gpus), min(workers, rack_gpus)
    sharing = -(-gpus // network.nics_per_machine)
    span = Span.FABRIC if workers > rack_gpus else Span.RACK if workers > gpus else Span.MACHINE
    gather = LevelTraffic(
        span=span,
        messages=workers - 1,
        gpu=Fraction(near - 1, workers),
        nic=sharing * Fraction(workers - near, workers),
        rack=racked * Fraction(workers - racked, workers),
        added=Fraction(workers - 1, workers),
    )
    levels = (gather, _without_additions(gather)) if workers > 1 else ()
    return time_levels(network, carriage, levels, sum_bytes, bucket_bytes)


def time_levels(
    network: GpuNetwork,
    carriage: Carriage,
    levels: Sequence[LevelTraffic],
    sum_bytes: float,
    bucket_bytes: float,
) -> ExchangeTime:
    """Predict exchanges that a bucket passes through one after the other, and that buckets overlap.

    All buckets have one size.
    """
    buckets = _count_buckets(sum_bytes, bucket_bytes)
    size = sum_bytes / buckets
    busy = dict.fromkeys(("GPU links", "NICs", "rack links", "GPU memory", "worker"), 0.0)
    passage_s = 0.0
    for level in levels:
        used = _use(network, carriage, level, size)
        for resource, seconds in used.items():
            busy[resource] += seconds
        links_s = max(used["GPU links"], used["NICs"], used["rack links"])
        stage_s = used["worker"] + _latency(network, level.span) + links_s + used["GPU memory"]
        passage_s += carriage.see_end(stage_s)
    next_s = max(busy.values())
    if carriage.buckets_at_once is not None:
        next_s = max(next_s, passage_s / carriage.buckets_at_once)
    return ExchangeTime(
        total_s=passage_s + (buckets - 1) * next_s,
        buckets=buckets,
        passage_s=passage_s,
        busy_s=dict(sorted(busy.items(), key=lambda each: -each[1])),
    )


def _count_buckets(sum_bytes: float, bucket_bytes: float) -> int:
    if sum_bytes <= 0 or bucket_bytes <= 0:
        sizes = f"{sum_bytes:g} bytes in buckets of {bucket_bytes:g}"
        raise UserError(f"{sizes}: give two positive numbers of bytes")
    return math.ceil(sum_bytes / bucket_bytes)


def _use(
    network: GpuNetwork, carriage: Carriage, level: LevelTraffic, size: float
) -> dict[str, float]:
    """Return the seconds for which one bucket's exchange keeps each resource busy."""
    return {
        "GPU links": float(level.gpu) * size / network.gpu_link.bytes_per_s,
        "NICs": float(level.nic) * size / network.nic.bytes_per_s,
        "rack links": float(level.rack) * size / network.rack_bytes_per_s,
        # An addition reads two operands, and writes the sum.
        "GPU memory": 3 * float(level.added) * size / network.memory_bytes_per_s,
        "worker": level.messages * carriage.message_s,
    }


def _latency(network: GpuNetwork, span: Span) -> float:
    return {
        Span.MACHINE: network.gpu_link.latency_s,
        Span.RACK: network.nic.latency_s,
        Span.FABRIC: network.fabric_latency_s,
    }[span]


# ---------------------------------------------------------------- NCCL, and the limit


@dataclass(frozen=True, slots=True, kw_only=True)
class NcclProtocol:
    """Has the constants of NCCL's tuner for one protocol and one algorithm.

    Latencies of a hop are fractions of a link's latency, which the protocol Simple has in a ring.
    """

    #: Seconds that a call takes before anything is sent.
    base_s: float
    gpu_latency: float
    net_latency: float
    #: The part of a link's bytes that are the user's.
    share: float
    #: Bytes per second at most, on any link.
    bytes_per_s_max: float = math.inf


# In microseconds in src/graph/tuning.cc of NCCL: base, NVLink hop, network hop.
_GPU_HOP_S, _NET_HOP_S = 3.4e-6, 14e-6
RING_PROTOCOLS = (
    NcclProtocol(
        base_s=6.6e-6,
        gpu_latency=0.6e-6 / _GPU_HOP_S,
        net_latency=2.7e-6 / _NET_HOP_S,
        share=0.5,
        bytes_per_s_max=20e9,
    ),
    NcclProtocol(
        base_s=14e-6, gpu_latency=1.9e-6 / _GPU_HOP_S, net_latency=4e-6 / _NET_HOP_S, share=0.92
    ),
    NcclProtocol(base_s=8.4e-6, gpu_latency=1.0, net_latency=1.0, share=1.0),
)
TREE_PROTOCOLS = (
    NcclProtocol(
        base_s=6.8e-6,
        gpu_latency=0.6e-6 / _GPU_HOP_S,
        net_latency=5e-6 / _NET_HOP_S,
        share=0.92 / 3.8,
        bytes_per_s_max=20e9,
    ),
    NcclProtocol(
        base_s=14e-6,
        gpu_latency=1.25e-6 / _GPU_HOP_S,
        net_latency=8.5e-6 / _NET_HOP_S,
        share=0.92 * 120 / 128,
    ),
    NcclProtocol(base_s=8.4e-6, gpu_latency=4e-6 / _GPU_HOP_S, net_latency=1.0, share=0.92),
)


def time_ring(network: GpuNetwork, workers: int, sum_bytes: float, bucket_bytes: float) -> float:
    """Predict NCCL's ring: one ring for each NIC, through all GPUs of a machine, then to the next.

    NCCL carries out one call after the other, with the protocol that is fastest for the bucket.
    """
    machines = -(-workers // network.gpus_per_machine)
    # Some piece's way of 2 (N - 1) hops leaves out two hops within machines.
    net_hops = min(2 * machines, 2 * (workers - 1)) if machines > 1 else 0
    gpu_hops = 2 * (workers - 1) - net_hops
    sent = 2 * (workers - 1) / workers
    load = max(
        sent / network.gpu_link.bytes_per_s,
        sent / _machine_bytes_per_s(network) if machines > 1 else 0.0,
    )
    return _time_nccl(network, RING_PROTOCOLS, (gpu_hops, net_hops, load), sum_bytes, bucket_bytes)


def time_double_tree(
    network: GpuNetwork, workers: int, sum_bytes: float, bucket_bytes: float
) -> float:
    """Predict NCCL's double binary tree: a chain within a machine, two trees of machines.

    A machine is inner in one tree and a leaf in the other. In both together it sends half the sum
    to its parents, and as much to its children, twice over; two machines send half of that.
    """
    machines = -(-workers // network.gpus_per_machine)
    net_hops = 2 * (machines.bit_length() - 1)
    gpu_hops = 2 * (min(workers, network.gpus_per_machine) - 1)
    load = max(
        2 / network.gpu_link.bytes_per_s if gpu_hops else 0.0,
        min(machines - 1, 2) / _machine_bytes_per_s(network),
    )
    return _time_nccl(network, TREE_PROTOCOLS, (gpu_hops, net_hops, load), sum_bytes, bucket_bytes)


def _time_nccl(
    network: GpuNetwork,
    protocols: Sequence[NcclProtocol],
    way: tuple[int, int, float],
    sum_bytes: float,
    bucket_bytes: float,
) -> float:
    """Return the time of the fastest protocol. `way`: hops by GPU link and by network, load."""
    gpu_hops, net_hops, load = way
    buckets = _count_buckets(sum_bytes, bucket_bytes)
    size = sum_bytes / buckets
    times = []
    for each in protocols:
        gpu_s = gpu_hops * each.gpu_latency * network.gpu_link.latency_s
        net_s = net_hops * each.net_latency * network.nic.latency_s
        moved_s = size * max(load / each.share, 2 / each.bytes_per_s_max)
        times.append(each.base_s + gpu_s + net_s + moved_s)
    return buckets * min(times)


def find_limit(network: GpuNetwork, workers: int, sum_bytes: float) -> float:
    """Return the least time that the links' line rates allow where switches add nothing up.

    All NICs of a machine together send at least 2 S (1 - 1/M) among M machines, and each GPU sends
    at least 2 S (1 - 1/N) among N workers, by its links and its share of the NICs.
    """
    machines = -(-workers // network.gpus_per_machine)
    nics = network.nics_per_machine * network.nic.line_bytes_per_s
    gpu = network.gpu_link.line_bytes_per_s
    gpu += nics / network.gpus_per_machine if machines > 1 else 0.0
    return max(2 * sum_bytes * (1 - 1 / machines) / nics, 2 * sum_bytes * (1 - 1 / workers) / gpu)


def _machine_bytes_per_s(network: GpuNetwork) -> float:
    return network.nics_per_machine * network.nic.bytes_per_s

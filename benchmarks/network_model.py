"""Prints how long a step's exchange of gradients takes on large clusters, by the model.

    python benchmarks/network_model.py            # print all tables
    python benchmarks/network_model.py --write    # and draw NETWORK_MODEL.md, docs/scale.*

The model is src/holdfast/plan/network.py, and its figures are in network_figures.py.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Callable, Iterator, Sequence
from fractions import Fraction
from pathlib import Path

import network_figures as figures

from holdfast.engine.core.assignment import assign_at_boundary, assign_mid_step
from holdfast.engine.core.sum_plan import plan_sum
from holdfast.engine.core.tree import find_host_nodes
from holdfast.engine.core.types import WorkerId
from holdfast.plan.network import (
    AS_WRITTEN,
    CALL_FOR_EACH_LEVEL,
    H100,
    POSTED_BY_LIBRARY,
    Carriage,
    count_traffic,
    find_limit,
    predict_traffic,
    time_double_tree,
    time_flat,
    time_levels,
    time_ring,
    time_tree,
)

ROOT = Path(__file__).resolve().parents[1]
PAGES = (ROOT / "benchmarks" / "NETWORK_MODEL.md", ROOT / "docs" / "scale.md")
PLOT = ROOT / "docs" / "scale.svg"
BEGIN, END = "<!-- drawn: {} -->", "<!-- end -->"

WORKERS = (8, 64, 512, 1024, 4096, 16_384, 65_536)
SUM_BYTES = 1e9
BUCKETS = (25e6, 1e9)
AIM_WORKERS, AIM = 16_384, 1.2
LOSS_WORKERS = 64
NEAR = 1.15  # a model as near as this to a measurement is good
MESSAGES_US = (1, 2, 3, 4, 5, 10, 25)
BUCKETS_TRIED = (8e6, 25e6, 50e6, 100e6, 200e6, 500e6)

Way = Callable[[int, float], float]


def tree(carriage: Carriage) -> Way:
    return lambda n, bucket: time_tree(H100, carriage, n, SUM_BYTES, bucket).total_s


WAYS: dict[str, Way] = {
    "flat": lambda n, bucket: time_flat(H100, POSTED_BY_LIBRARY, n, SUM_BYTES, bucket).total_s,
    "NCCL ring": lambda n, bucket: time_ring(H100, n, SUM_BYTES, bucket),
    "NCCL tree": lambda n, bucket: time_double_tree(H100, n, SUM_BYTES, bucket),
    "ours, posted by a library": tree(POSTED_BY_LIBRARY),
    "ours, a call for each level": tree(CALL_FOR_EACH_LEVEL),
    "ours, as written": tree(AS_WRITTEN),
    "limit": lambda n, _: find_limit(H100, n, SUM_BYTES),
}


def draw_times(bucket: float) -> Iterator[str]:
    """Draw milliseconds by number of GPUs and algorithm, and ours divided by the limit."""
    ours = "ours, posted by a library"
    yield f"| GPUs | {' | '.join(WAYS)} | {ours} / limit |"
    yield "|---" * (len(WAYS) + 2) + "|"
    for workers in WORKERS:
        times = {name: way(workers, bucket) for name, way in WAYS.items()}
        cells = " | ".join(write_ms(seconds) for seconds in times.values())
        yield f"| {workers:,} | {cells} | **{times[ours] / times['limit']:.2f}** |"


def write_ms(seconds: float) -> str:
    """Write milliseconds with three digits."""
    ms = seconds * 1e3
    return f"{ms:,.0f}" if ms >= 100 else f"{ms:.3g}"


def draw_parts() -> Iterator[str]:
    """Draw how a bucket's time is spent among AIM_WORKERS GPUs."""
    yield "| bucket | passage | " + " | ".join(busy_names()) + " | whole sum |"
    yield "|---" * (len(busy_names()) + 3) + "|"
    for bucket in BUCKETS_TRIED:
        found = time_tree(H100, POSTED_BY_LIBRARY, AIM_WORKERS, SUM_BYTES, bucket)
        busy = " | ".join(write_ms(found.busy_s[name]) for name in busy_names())
        size = f"{SUM_BYTES / found.buckets / 1e6:.0f} MB"
        yield f"| {size} | {write_ms(found.passage_s)} | {busy} | {write_ms(found.total_s)} |"


def busy_names() -> list[str]:
    return sorted(time_tree(H100, POSTED_BY_LIBRARY, 8, 1, 1).busy_s)


def draw_sensitivity() -> Iterator[str]:
    """Draw the time among AIM_WORKERS GPUs, divided by the limit, by message and bucket."""
    yield "| one message | " + " | ".join(f"{b / 1e6:.0f} MB" for b in BUCKETS_TRIED) + " |"
    yield "|---" * (len(BUCKETS_TRIED) + 1) + "|"
    limit = find_limit(H100, AIM_WORKERS, SUM_BYTES)
    for microseconds in MESSAGES_US:
        way = tree(Carriage(message_s=microseconds * 1e-6))
        ratios = [way(AIM_WORKERS, bucket) / limit for bucket in BUCKETS_TRIED]
        cells = " | ".join(f"**{r:.2f}**" if r <= AIM else f"{r:.2f}" for r in ratios)
        yield f"| {microseconds} us | {cells} |"


def find_message_limit(bucket: float = BUCKETS[0]) -> float:
    """Return the microseconds of a message up to which the aim is reached."""
    least, most = 0.0, 1e-3
    limit = AIM * find_limit(H100, AIM_WORKERS, SUM_BYTES)
    for _ in range(40):
        middle = (least + most) / 2
        is_reached = tree(Carriage(message_s=middle))(AIM_WORKERS, bucket) <= limit
        least, most = (middle, most) if is_reached else (least, middle)
    return least * 1e6


def draw_findings() -> Iterator[str]:
    """Draw the model's findings as sentences."""
    n, (small, _) = AIM_WORKERS, BUCKETS
    limit = find_limit(H100, n, SUM_BYTES)
    ours = WAYS["ours, posted by a library"](n, small) / limit
    written = [write_ms(WAYS["ours, as written"](count, small)) for count in (8, n)]
    large, cut = (write_ms(WAYS["NCCL tree"](n, bucket)) for bucket in (SUM_BYTES, small))
    ratios = [each.predict() / each.value for each in figures.PUBLISHED if not each.fitted]
    ratios.append(figures.predict_summit_gain() / figures.SUMMIT_GAIN)
    near = sum(max(each, 1 / each) <= NEAR for each in ratios)
    yield (
        f"- The *plan* scales: if a message costs no more than NCCL's own do, {n:,} GPUs take "
        f"**{ours:.2f} times** the limit that the NICs set. A message may cost up to "
        f"{find_message_limit():.1f} microseconds before it is more than {AIM} times."
    )
    yield (
        "- Today's *code for GPUs* does not. It issues one call of NCCL for each level, runs one "
        "bucket after the other, and polls for the end of an exchange from Python "
        f"(`engine/train/exchange/gpu_transport.py`). So 8 GPUs need {written[0]} ms, and {n:,} "
        f"need {written[1]} ms. It was written to be right, and has never run on more than one GPU."
    )
    yield (
        f"- NCCL's own trees are as good with one large call: 1 GB among {n:,} GPUs takes {large} "
        f"ms. In buckets of 25 MB they take {cut} ms, since NCCL carries out one call after the "
        "other."
    )
    yield (
        f"- {near} of {len(ratios)} published figures of NCCL are within a factor of {NEAR} of "
        "the model. The sheet has all of them, and says why the others are off."
    )


def draw_price() -> Iterator[str]:
    """Draw the price of a message up to which the aim is reached, as a sentence."""
    yield (
        f"With buckets of {BUCKETS[0] / 1e6:.0f} MB a message may cost up to "
        f"{find_message_limit():.1f} microseconds."
    )


def draw_loads() -> Iterator[str]:
    """Draw peers, messages and bytes of a worker and its machine, for one bucket of size S."""
    yield (
        "| GPUs | connections | messages, ours | flat | ring | a GPU sends | "
        "a machine sends to others, ours | flat | ring |"
    )
    yield "|---" * 9 + "|"
    for workers in WORKERS:
        up, down = predict_traffic(H100, workers)
        levels = (*up, *down)
        nics = H100.nics_per_machine
        flat = 2 * nics * (workers - min(workers, nics)) / workers
        ring = 2 * (workers - 1) / workers if workers > H100.gpus_per_machine else 0
        sent = sum(level.gpu + level.nic for level in levels)
        out = nics * sum(level.nic for level in levels)
        yield (
            f"| {workers:,} | {2 * len(up) - 1} | {len(levels)} | {2 * (workers - 1):,} "
            f"| {2 * (workers - 1):,} | {write_size(sent)} | **{write_size(out)}** "
            f"| {write_size(flat)} | {write_size(ring)} |"
        )


def write_size(times: Fraction | float) -> str:
    """Write bytes as a multiple of the size of the sum."""
    return f"{float(times):.2f} S" if times else "0"


def draw_losses() -> Iterator[str]:
    """Draw what a loss costs until the next step boundary, and from then on."""
    yield "| lost of 64 GPUs | virtual ranks | peers | a NIC carries | milliseconds |"
    yield "|---|---|---|---|---|"
    every = tuple(WorkerId(w) for w in range(LOSS_WORKERS))
    paths = {w: (f"n{w // H100.gpus_per_machine}",) for w in every}
    yield draw_loss("none", "one each", every)
    for name, lost in (("one worker", every[40:41]), ("one machine", every[40:48])):
        left = [w for w in every if w not in lost]
        moved = assign_mid_step(left, every, paths)
        yield draw_loss(name, "lost ones moved, until the next boundary", moved)
        yield draw_loss(
            name,
            "in blocks again, from the boundary on",
            assign_at_boundary(LOSS_WORKERS, left, moved, paths),
        )


def draw_loss(name: str, how: str, owners: Sequence[WorkerId]) -> str:
    """Return the row of one assignment of virtual ranks."""
    places = sorted(set(owners))
    rank_of = {worker: rank for rank, worker in enumerate(places)}
    nodes = find_host_nodes([rank_of[owner] for owner in owners], len(places))
    plans = {rank: plan_sum(nodes, len(owners), rank) for rank in range(len(places))}
    up, down = count_traffic(H100, plans, places)
    levels = (*up, *down)
    found = time_levels(H100, POSTED_BY_LIBRARY, levels, SUM_BYTES, BUCKETS[0])
    peers = max(len(plan.peers) for plan in plans.values())
    nic = write_size(sum(level.nic for level in levels))
    return f"| {name} | {how} | {peers} | {nic} | **{write_ms(found.total_s)}** |"


def draw_published() -> Iterator[str]:
    """Draw a table of the model and published figures."""
    yield "| what | GPUs | algorithm | published | model | model / published | source, date |"
    yield "|---|---|---|---|---|---|---|"
    for each in figures.PUBLISHED:
        found = each.predict()
        mark = " (fitted)" if each.fitted else ""
        value, model = f"{each.value:.4g} {each.unit}", f"{found:.4g} {each.unit}"
        yield (
            f"| {each.what} | {each.workers:,} | {each.algorithm} | {value} | {model} "
            f"| **{found / each.value:.2f}**{mark} | [source]({each.source}), {each.date} |"
        )
    gain = figures.predict_summit_gain()
    yield (
        f"| a ring's latency by a tree's on Summit | {figures.SUMMIT_GPUS:,} | ring, tree "
        f"| up to {figures.SUMMIT_GAIN} | {gain:.0f} | **{gain / figures.SUMMIT_GAIN:.2f}** "
        f"| [source]({figures.SUMMIT_SOURCE}), {figures.SUMMIT_DATE} |"
    )


def draw_measured() -> Iterator[str]:
    """Draw a table of the model and our own measurements."""
    fixed, doubling = figures.fit_step_cpu()
    yield "| what | measured | model | model / measured |"
    yield "|---|---|---|---|"
    for workers, ms in figures.STEP_CPU_MS:
        found = fixed + doubling * math.log2(workers)
        what = f"CPU of a step, {workers} workers ({fixed:.1f} + {doubling:.1f} log2 N, fitted)"
        yield f"| {what} | {ms} ms | {found:.1f} ms | {found / ms:.2f} |"
    for ranks, megabytes, ms in figures.FLAT_EXCHANGES:
        found = figures.predict_flat_exchange(ranks, megabytes)
        what = f"flat exchange of {megabytes:.0f} MB, {ranks} processes of one machine"
        yield f"| {what} | {ms} ms | {found:.3g} ms | {found / ms:.2f} |"


SECTIONS: dict[str, Callable[[], Iterator[str]]] = {
    "times with buckets of 25 MB": lambda: draw_times(BUCKETS[0]),
    "times with one bucket": lambda: draw_times(BUCKETS[1]),
    "parts": draw_parts,
    "sensitivity": draw_sensitivity,
    "price": draw_price,
    "loads": draw_loads,
    "losses": draw_losses,
    "findings": draw_findings,
    "published": draw_published,
    "measured": draw_measured,
}


def draw(text: str) -> str:
    """Return a page with each of its marked sections drawn again."""
    for name, section in SECTIONS.items():
        if BEGIN.format(name) in text:
            text = replace_section(text, name, "\n".join(section()))
    return text


def replace_section(text: str, name: str, body: str) -> str:
    """Return a page with another body of its marked section of this name."""
    begin = BEGIN.format(name)
    head, _, rest = text.partition(begin)
    return f"{head}{begin}\n{body}\n{END}{rest.partition(END)[2]}"


def plot(path: Path) -> None:
    """Plot the times by the number of GPUs."""
    import matplotlib as mpl

    mpl.use("Agg")
    mpl.rcParams.update({"svg.hashsalt": "holdfast", "svg.fonttype": "none"})
    from matplotlib import pyplot as plt

    styles = {
        "flat": ("#969696", "-"),
        "NCCL ring": ("#fd8d3c", "-"),
        "NCCL tree": ("#cb181d", "-"),
        "ours, posted by a library": ("#08306b", "-"),
        "ours, a call for each level": ("#2171b5", "--"),
        "ours, as written": ("#6baed6", ":"),
        "limit": ("#000000", "-"),
    }
    workers = [1 << k for k in range(3, 17)]
    shown, axes = plt.subplots(1, 2, sharey=True, figsize=(9, 4), layout="constrained")
    for axis, bucket in zip(axes, BUCKETS, strict=True):
        for name, (color, line) in styles.items():
            times = [WAYS[name](n, bucket) * 1e3 for n in workers]
            width = 0.8 if name == "limit" else 1.6
            axis.loglog(workers, times, color=color, linestyle=line, linewidth=width, label=name)
        axis.set_xscale("log", base=2)
        axis.set_xticks(WORKERS, [f"{n:,}" for n in WORKERS], rotation=45)
        axis.set_xlabel("GPUs, in machines of 8")
        axis.set_title(f"1 GB in buckets of {bucket / 1e6:,.0f} MB", loc="left", fontsize=10)
    axes[0].set_ylabel("milliseconds, by the model")
    axes[0].legend(fontsize=7, frameon=False)
    shown.savefig(path, metadata={"Date": None})
    plt.close(shown)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--write", action="store_true", help="draw the pages and the plot again")
    if parser.parse_args().write:
        for page in PAGES:
            page.write_text(draw(page.read_text()))
        plot(PLOT)
    for name, section in SECTIONS.items():
        print(f"\n{name}\n", *section(), sep="\n")


if __name__ == "__main__":
    main()

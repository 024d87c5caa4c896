"""`make bench`: all benchmarks, and the dated sheets benchmarks/*.md."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import checkpoint
import coding
import compat
import failover
import joining
import links
import loading
import memory_tier
import moving
import partition
import recovery
import scale
import silent
import spares
import step_cost
import step_time
import stragglers
import torch

from holdfast.lab.sim.swarm import run_seed
from labs.etcd_cluster import EtcdCluster
from labs.network_lab import Lab

FOLDER = Path(__file__).parent
SIM_SEEDS = 100
SIM_NODES = 10_000
LARGE_SEED = 1


def step_lines() -> Iterator[str]:
    yield "## Step time against DistributedDataParallel (gloo)"
    yield ""
    yield "Both in the same processes, blocks of ten steps in turn; ratio block by block. Target:"
    yield "1.02 on 2 workers with at least 5 million parameters."
    yield ""
    yield "| model | parameters | tensors | workers | DDP ms | Holdfast ms | ratio | min .. max |"
    yield "|---|---|---|---|---|---|---|---|"
    for model, workers in step_time.CASES:
        x = step_time.measure(model, workers)
        yield (
            f"| {x.model} | {x.parameters / 1e6:.1f} M | {x.tensors} | {x.workers} "
            f"| {x.ddp_s * 1e3:.1f} | {x.holdfast_s * 1e3:.1f} | **{x.ratio:.3f}** "
            f"| {x.ratio_min:.2f} .. {x.ratio_max:.2f} |"
        )


def cost_lines() -> Iterator[str]:
    yield "## What a step costs a process (gloo)"
    yield ""
    yield "Each library in its own launches, which take turns; medians of"
    yield f"{step_cost.ROUNDS}. CPU: of whole processes with all their threads, for each step."
    yield "Targets: a CPU ratio of 1.05 for steps of 50 ms and more, 1.3 for steps of 4 ms."
    yield "The gain of each change, and the rest of the cost: [STEP_COST.md](STEP_COST.md)."
    yield ""
    yield from step_cost.HEAD
    for model in step_cost.MODELS:
        for workers in step_cost.WORKERS:
            yield step_cost.row(step_cost.measure(model, workers))


def recovery_lines(kills: int = 20, freezes: int = 5) -> Iterator[str]:
    killed = recovery.measure(kills, signal.SIGKILL, seed=1)
    gaps = recovery.measure(freezes, signal.SIGSTOP, seed=2).gaps
    yield "## Recovery of one of 4 workers"
    yield ""
    yield "Pause: from the first sign of the fault to the next committed step, the figure of"
    yield f"`holdfast explain`. A task takes {recovery.TASK_S * 1e3:.0f} ms; one is computed again."
    yield "Stall: the survivors' gap between commits around the fault, less an undisturbed step and"
    yield "the tasks computed again. Targets: stall of a kill under 100 ms, freeze under 5 s."
    yield ""
    yield "| fault | count | figure | median | max |"
    yield "|---|---|---|---|---|"
    for name, times in (("pause", killed.pauses), ("stall", killed.stalls)):
        middle, most = statistics.median(times) * 1e3, max(times) * 1e3
        yield f"| kill -9 | {len(times)} | {name} | **{middle:.0f} ms** | {most:.0f} ms |"
    middle, most = statistics.median(gaps), max(gaps)
    yield f"| kill -STOP | {freezes} | fault to next commit | **{middle:.2f} s** | {most:.2f} s |"


def scale_lines() -> Iterator[str]:
    yield "## Scale of the coordinator"
    yield ""
    yield "One real coordinator process, real sockets, agents that report once a second for 8"
    yield "workers each. View: from when a node counts as lost, which its lease decides, to the"
    yield "last agent's view without it. Targets for 1,250 agents: under 30 % of a core, under 1 s."
    yield ""
    yield "| agents | workers | of one core | all joined after | view, median | view, most |"
    yield "|---|---|---|---|---|---|"
    for agents in (125, 1250):
        x = scale.measure(agents, 8)
        yield (
            f"| {x.agents} | {x.workers} | **{x.cpu:.0%}** | {x.joined_s:.1f} s "
            f"| **{statistics.median(x.view_s):.2f} s** | {max(x.view_s):.2f} s |"
        )


def partition_lines(count: int = 5) -> Iterator[str]:
    yield "## Networks that are cut, and coordinators that die"
    yield ""
    yield "Three nodes in network namespaces, default settings. Longest gap between commits of the"
    yield "side that continues; an undisturbed step takes about 0.05 s. Target: under 5 s."
    yield ""
    yield "| fault | count | median | most |"
    yield "|---|---|---|---|"
    if Lab.available():
        yield f"| not measured: {Lab.available()} | | | |"
        return
    for what in partition.CASES:
        times = partition.measure(what, count).times
        yield f"| {what} | {count} | **{statistics.median(times):.2f} s** | {max(times):.2f} s |"


def failover_lines(count: int = 10) -> Iterator[str]:
    yield "## Election"
    yield ""
    if EtcdCluster.available():
        yield f"Not measured: {EtcdCluster.available()}."
        return
    times = failover.measure(count)
    yield "kill -9 of the coordinator to the next leader, with three members of etcd,"
    middle, most = statistics.median(times), max(times)
    yield f"{count} times: median **{middle:.2f} s**, most {most:.2f} s. Target: under 3 s."


def simulator_lines() -> Iterator[str]:
    yield "## Simulator"
    yield ""
    events, began = 0, time.perf_counter()
    for seed in range(SIM_SEEDS):
        events += run_seed(seed).events
    seconds = time.perf_counter() - began
    speed = f"{events / seconds * 60 / 1e6:.2f} million a minute"
    yield f"Jobs of 1 to 4 nodes, seeds 0 to {SIM_SEEDS - 1}: {events:,} events, {speed}."
    began = time.perf_counter()
    large = run_seed(LARGE_SEED, nodes=SIM_NODES)
    seconds = time.perf_counter() - began
    faults = ", ".join(f"{kind} {count}" for kind, count in sorted(large.faults.items()))
    yield (
        f"{SIM_NODES:,} nodes, seed {LARGE_SEED}: {large.events:,} events, "
        f"**{large.events / seconds * 60 / 1e6:.2f} million a minute** on one core (target: 1), "
        f"{large.views} views, faults: {faults}; {large.failure or 'clean'}."
    )


def checkpoint_lines() -> Iterator[str]:
    yield "## Checkpoints of 1.3 GiB in 150 tensors"
    yield ""
    yield "All ways in turn, 5 rounds, medians, after a first round that is not counted."
    yield "Stall: until training could continue. A save is over when all is durable; a load comes"
    yield "from the page cache. The disk itself: the same bytes in large blocks. In a job of four"
    yield "each worker copies its share (the longest stall counts); the writer of their node saves"
    yield "all four."
    yield ""
    yield "| | stall | of a plain copy | save | of the disk | load | of the page cache |"
    yield "|---|---|---|---|---|---|---|"
    found = checkpoint.measure()
    disk, plain = found["the disk itself"], statistics.median(found[checkpoint.COPY].stall_s)
    disk_s, cache_s = statistics.median(disk.save_s), statistics.median(disk.load_s)
    for way, times in found.items():
        cells = [way]
        for series, against_s, faster in (
            (times.stall_s, plain, False),
            (times.save_s, disk_s, True),
            (times.load_s, cache_s, True),
        ):
            middle = statistics.median(series) if series else 0.0
            ratio = against_s / middle if series and faster else middle / against_s
            cells += [f"{middle:.2f} s", f"{ratio:.2f}"] if series else ["", ""]
        yield f"| {' | '.join(cells)} |"
    series = checkpoint.measure_series()
    yield ""
    yield "Ten checkpoints of a run in which 1 % of the state changes from one to the next take"
    yield f"**{series.ten / series.one:.2f}** times the space of one (target: under 1.2)."
    plain, coded = checkpoint.flip_bits(coded=False), checkpoint.flip_bits(coded=True)
    yield f"Of {plain.count:,} bits flipped one at a time in a checkpoint's files {plain.found:,}"
    yield f"are found; of {coded.count:,} in one kept as 4+2 pieces {coded.found:,} are found and"
    yield f"{coded.repaired:,} repaired."
    yield "Targets: a stall of at most 1.2 copies and half of async_save's; 0.8 of the disk."


def detection_lines() -> Iterator[str]:
    yield "## Finding slow workers"
    yield ""
    yield f"Made-up jobs: {stragglers.NOISE:.0%} noise in each task's time, one step in a hundred"
    yield "1.3 to 3 times as long, all workers' steps varying by 10 % together; one worker becomes"
    yield "1.2 to 10 times slower. Found: within 20 steps. Targets: 99.8 %, and one false alarm in"
    yield "10,000 worker-steps."
    yield ""
    yield "| slow | workers | found | steps, median | most |"
    yield "|---|---|---|---|---|"
    cases = found = 0
    for pattern in stragglers.PATTERNS:
        for workers, seeds in ((4, 100), (64, 20)):
            x = stragglers.detect(pattern, workers, seeds)
            cases, found = cases + x.cases, found + len(x.latencies)
            middle, most = statistics.median(x.latencies), max(x.latencies)
            share = f"{len(x.latencies)} of {x.cases}"
            yield f"| {pattern} | {workers} | {share} | {middle:.0f} | {most} |"
    yield ""
    yield f"In all {found / cases:.2%}."
    yield ""
    yield "| workers | false alarms | in worker-steps | to observe a step, all workers |"
    yield "|---|---|---|---|"
    for workers in (2, 4, 64, 1000, 4000):
        a = stragglers.false_alarms(workers, 400_000)
        yield f"| {workers} | {a.false} | {a.worker_steps:,} | {a.observe_us / 1e3:.3f} ms |"
    yield ""
    yield "Four real workers with tasks of 50 ms; worker 2 becomes slow in step 40 of 80."
    yield ""
    yield "| slow | found | steps, median | most | verdicts on other workers, in worker-steps |"
    yield "|---|---|---|---|---|"
    for what in ("", "at random 0.6"):
        r = stragglers.detect_real(what, stragglers.FACTORS)
        middle = f"{statistics.median(r.latencies):.0f}" if r.latencies else "-"
        yield (
            f"| 1.2 to 10 times {what or 'constantly'} | {len(r.latencies)} of {r.jobs} | {middle} "
            f"| {max(r.latencies, default='-')} | {r.others} in {r.worker_steps:,} |"
        )


def link_lines() -> Iterator[str]:
    yield "## Distinguishing a slow network from slow computing"
    yield ""
    yield "Made-up exchanges: 3 % noise in computing, 20 % in messages, one of both in a hundred"
    yield "1.3 to 3 times as long; a step's messages take 0.6 to 60 ms on a link, during or"
    yield "after 100 ms of computing. Then the messages of one worker, to all or to one other, take"
    yield "60 to 500 ms longer; or it computes 1.2 to 5 times as long, which is no fault of its"
    yield "network. Found: within 20 steps. Target: one false alarm in 10,000 worker-steps."
    yield ""
    yield "| slow | workers | found | wrong verdicts | steps, median | most |"
    yield "|---|---|---|---|---|---|"
    for what in (links.NETWORK, links.LINK, links.COMPUTING):
        for workers, seeds in ((4, 20), (32, 5)):
            x = links.detect(what, workers, seeds)
            share = f"{len(x.latencies)} of {x.cases}"
            middle = f"{statistics.median(x.latencies):.0f}" if x.latencies else "-"
            most = max(x.latencies, default="-")
            yield f"| {what} | {workers} | {share} | {x.wrong} | {middle} | {most} |"
    yield ""
    yield "| workers | false alarms | in worker-steps |"
    yield "|---|---|---|"
    for workers in (2, 4, 32):
        alarms, worker_steps = links.false_alarms(workers, 100_000)
        yield f"| {workers} | {alarms} | {worker_steps:,} |"
    yield ""
    yield f"A member pays {links.wait_ns():.0f} ns for each message that it waits for; the leader,"
    times = {workers: links.observe_us(workers, late=True) / 1e3 for workers in (4, 64, 1000)}
    each = ", ".join(f"{ms:.3f} ms with {workers}" for workers, ms in times.items())
    yield f"for a step in which all other members wait for one: {each} workers."


def balance_lines(pairs: int = 5) -> Iterator[str]:
    yield "## Moving work away from a slow worker"
    yield ""
    yield "Four real workers; one takes twice as long for every task (100 ms); runs in"
    yield "pairs, with and without; medians of the settled steps. A task cannot be split, so the"
    yield "gain has a limit. Target: 1.6 with 16 virtual ranks."
    yield ""
    yield "| virtual ranks | not moving | moving | gain | limit | same bits |"
    yield "|---|---|---|---|---|---|"
    for vranks, task_s, limit in ((16, 0.1, "8 / 5"), (64, 0.025, "32 / 19")):
        x = stragglers.rebalance(vranks, task_s, pairs)
        still, moving = statistics.median(x.still_s), statistics.median(x.moving_s)
        gain = statistics.median(a / b for a, b in zip(x.still_s, x.moving_s, strict=True))
        same = "yes" if len(x.digests) == 1 else "NO"
        yield (
            f"| {vranks} | {still * 1e3:.0f} ms | {moving * 1e3:.0f} ms | **{gain:.2f}** "
            f"| {limit} | {same} |"
        )
    yield ""
    yield "A change takes effect from one step to the next; deciding it and laying out the exchange"
    small, large = stragglers.change_ms(4, 16), stragglers.change_ms(1000, 4000)
    yield f"again takes {small:.2f} ms with 4 workers (target: 2 ms), {large:.1f} ms with 1,000."


def speculation_lines(pairs: int = 3) -> Iterator[str]:
    yield "## Continuing without a late worker"
    yield ""
    yield "Four real workers, steps of 50 ms; one of them stands still in every 25th step, for 0.5"
    yield "to 3 seconds; runs of 300 steps in pairs, with and without speculation. Target: the 99th"
    yield "percentile halved, with at most 2 % of the tasks computed again."
    yield ""
    x = stragglers.speculate(pairs)
    yield from _step_times({"waiting": x.waiting_s, "continuing": x.going_on_s})
    yield ""
    same = "the same" if len(x.digests) == 1 else "OTHER"
    yield f"Suspended {x.suspended} times; {x.suspended / x.tasks:.2%} of the tasks were computed"
    yield f"again. With and without: {same} bits. While it is away three workers do the work of"
    yield "four, which takes them two tasks a step."


def backup_lines(pairs: int = 1) -> Iterator[str]:
    yield "## Dropping late results"
    yield ""
    yield "4 + 1 real workers, steps of 50 ms; each but the leader stands still in one of 20 steps,"
    yield "for 0.02 to 0.2 seconds; with and without `--backup 1`, as the leader sees it."
    yield ""
    x = stragglers.backup(pairs)
    yield from _step_times({"waiting": x.waiting_s, "dropping": x.dropping_s})
    yield ""
    yield f"{statistics.mean(x.shares):.1%} of the samples were dropped: of five results, the last."


def _step_times(runs: dict[str, list[float]]) -> Iterator[str]:
    yield "| | median | p99 | most | mean |"
    yield "|---|---|---|---|---|"
    for name, times in runs.items():
        p99 = statistics.quantiles(times, n=100)[98]
        figures = (statistics.median(times), p99, max(times), statistics.mean(times))
        yield f"| {name} | " + " | ".join(f"{f * 1e3:.0f} ms" for f in figures) + " |"


AUDITED = {
    "gradient": 40,
    "received": 40,
    "NaN": 6,
    "Inf": 6,
    "parameter": 4,
    "optimizer": 3,
    "arithmetic": 1,
}
SAMPLED = {"parameter": 3, "optimizer": 2, "arithmetic": 3}


def silent_lines() -> Iterator[str]:
    yield "## Everything computed twice"
    yield ""
    yield "Jobs of four workers with `--audit 1.0 --fingerprint-steps 8`, in which one wrong bit"
    yield "after another is injected; single mistakes are forgiven here, so that one job can meet"
    yield "many. Latency: steps from the injection to the event that reports it."
    yield ""
    yield from _wrong_lines(silent.audited(AUDITED, jobs=10))
    yield "A flip in a received part that is not detected has changed no bit of the sum: rounding"
    yield "has swallowed it. Of 100 injections a job, those do not count whose worker was away."
    yield ""
    yield "## A share looked at"
    yield ""
    yield "`--audit 0.05 --fingerprint-steps 16`, a checkpoint every 25 steps: what is found too"
    yield "late is done again from a checkpoint."
    yield ""
    yield from _wrong_lines(silent.sampled(SAMPLED, jobs=3))


def _wrong_lines(table: silent.Table) -> Iterator[str]:
    yield "| wrong | injected | detected | located | latency, median | most |"
    yield "|---|---|---|---|---|---|"
    for kind, x in table.kinds.items():
        middle = statistics.median(x.latencies) if x.latencies else 0
        yield (
            f"| {kind} | {x.injected} | **{len(x.latencies)}** | {x.located} | {middle:.0f} "
            f"| {max(x.latencies, default=0)} |"
        )
    yield ""
    right = f"{table.jobs_right} of {table.jobs}"
    yield f"Repaired: the models of {right} jobs have the bits of undisturbed ones."


SHEETS: dict[str, tuple[Callable[[], Iterator[str]], ...]] = {
    "TRAINING": (step_lines, cost_lines, recovery_lines),
    "LOADING": (loading.lines,),
    "COMPAT": (compat.lines,),
    "MOVING": (joining.lines_of_sheet, moving.lines, spares.lines),
    "CHECKPOINTS": (checkpoint_lines,),
    "STRAGGLERS": (
        detection_lines,
        link_lines,
        balance_lines,
        speculation_lines,
        backup_lines,
    ),
    "SILENT": (silent_lines,),
    "CODING": (coding.lines,),
    "MEMORY": (
        memory_tier.cost_lines,
        memory_tier.pattern_lines,
        memory_tier.optimizer_lines,
        memory_tier.spread_lines,
        memory_tier.random_lines,
    ),
    "CONTROL": (scale_lines, partition_lines, failover_lines, simulator_lines),
}


def write_sheet(name: str) -> None:
    today = datetime.datetime.now(datetime.timezone.utc).date()
    machine = (
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}"
    )
    lines = [
        f"# Measured on {today}",
        "",
        f"{machine}, one thread per worker. `make bench` makes this sheet again.",
    ]
    for section in SHEETS[name]:
        lines.append("")
        for line in section():
            print(line, flush=True)
            lines.append(line)
    (FOLDER / f"{name}.md").write_text("\n".join(lines) + "\n")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("sheets", nargs="*", default=list(SHEETS), metavar="SHEET")
    for name in parser.parse_args().sheets:
        write_sheet(name)


if __name__ == "__main__":
    main()

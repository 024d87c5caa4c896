"""`make bench`: all benchmarks, and the dated sheet benchmarks/RESULTS.md."""

from __future__ import annotations

import argparse
import datetime
import os
import platform
import signal
import statistics
import time
from collections.abc import Iterator
from pathlib import Path

import recovery
import step_time
import torch

from holdfast.sim.swarm import run_seed

SHEET = Path(__file__).with_name("RESULTS.md")
SIM_SEEDS = 100


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
        row = (
            f"| {x.model} | {x.parameters / 1e6:.1f} M | {x.tensors} | {x.workers} "
            f"| {x.ddp_s * 1e3:.1f} | {x.holdfast_s * 1e3:.1f} | **{x.ratio:.3f}** "
            f"| {x.ratio_min:.2f} .. {x.ratio_max:.2f} |"
        )
        print(row, flush=True)
        yield row


def recovery_lines(kills: int, freezes: int) -> Iterator[str]:
    stalls, _ = recovery.measure(kills, signal.SIGKILL, seed=1)
    _, gaps = recovery.measure(freezes, signal.SIGSTOP, seed=2)
    yield "## Recovery of one of 4 workers"
    yield ""
    yield "Stall: the survivors' gap between commits around the fault, less an undisturbed step and"
    yield "the tasks computed again. Targets: kill under 100 ms, freeze under 5 s."
    yield ""
    yield "| fault | count | figure | median | max |"
    yield "|---|---|---|---|---|"
    middle, most = statistics.median(stalls) * 1e3, max(stalls) * 1e3
    yield f"| kill -9 | {kills} | stall | **{middle:.0f} ms** | {most:.0f} ms |"
    middle, most = statistics.median(gaps), max(gaps)
    yield f"| kill -STOP | {freezes} | fault to next commit | **{middle:.2f} s** | {most:.2f} s |"


def simulator_lines() -> Iterator[str]:
    events, began = 0, time.perf_counter()
    for seed in range(SIM_SEEDS):
        events += run_seed(seed).events
    seconds = time.perf_counter() - began
    yield "## Simulator"
    yield ""
    speed = f"{events / seconds:,.0f} a second"
    yield f"Seeds 0 to {SIM_SEEDS - 1}: {events} events in {seconds:.1f} s, {speed}."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--kills", type=int, default=20)
    parser.add_argument("--freezes", type=int, default=5)
    options = parser.parse_args()
    lines = [
        f"# Measured on {datetime.datetime.now(datetime.timezone.utc).date()}",
        "",
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}, "
        "one thread per worker. `make bench` makes this sheet anew.",
        "",
        *step_lines(),
        "",
        *recovery_lines(options.kills, options.freezes),
        "",
        *simulator_lines(),
    ]
    SHEET.write_text("\n".join(lines) + "\n")
    print(SHEET.read_text())


if __name__ == "__main__":
    main()

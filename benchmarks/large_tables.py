"""One large table on servers: the longest step after a loss, and as their number changes.

Two workers train a table on two servers with two replicas. One server is killed; it starts again
and copies all its rows. Then the table goes to four servers, and back to two.
"""

from __future__ import annotations

import argparse
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from step_ends import durations, read_ends

from holdfast.engine.runtime.local_run import LocalRun

SCRIPT = Path(__file__).with_name("large_tables_worker.py")
WARM_UP, AFTER, LIMIT_S = 60, 200, 300.0  # AFTER: steps in which a longer one counts
FEW, MANY = 2, 4  # servers


def is_past(told: Path, step: int) -> bool:
    """Return whether a step has ended."""
    return any(number >= step for number, *_ in read_ends(told))


def last_step(told: Path) -> int:
    return max(number for number, *_ in read_ends(told))


def strike(run: LocalRun, told: Path) -> str:
    """Kill a server; return the words on it."""
    (victim, *_) = (each["pid"] for each in run.status()["servers"])
    begun = last_step(told)
    os.kill(victim, signal.SIGKILL)
    run.until(lambda: is_past(told, begun + AFTER), LIMIT_S, "steps after the loss")
    return describe(told, begun, begun + AFTER, "a server was killed")


def scale(run: LocalRun, told: Path, servers: int) -> str:
    """Put the table on another number of servers; return the words on it."""
    begun, start = last_step(told), time.monotonic()
    command = [sys.executable, "-m", "holdfast.cli.main", "scale", str(run.run_dir.path)]
    subprocess.run([*command, "--servers", str(servers)], check=True, capture_output=True)
    took_s = time.monotonic() - start
    end = last_step(told) + 5
    run.until(lambda: is_past(told, end), LIMIT_S, "steps after the change")
    return describe(told, begun, end, f"to {servers} servers in {took_s:.1f} s")


def describe(told: Path, begun: int, end: int, what: str) -> str:
    gaps = durations(read_ends(told))
    usual = statistics.median(s for step, s in gaps.items() if WARM_UP // 2 < step <= begun)
    longest = sorted((s for step, s in gaps.items() if begun < step <= end), reverse=True)[:3]
    words = ", ".join(f"{1e3 * each:.0f}" for each in longest)
    return f"{what}: the longest steps took {words} ms (usually {1e3 * usual:.0f} ms)"


def measure(folder: Path, rows: int, dim: int) -> list[str]:
    """Return the words on each event of one job."""
    told = folder / "told.txt"
    options = ["--nproc", "2", "--threads", "1", "--servers", str(FEW), "--replicas", "2"]
    words = [str(SCRIPT), str(told), str(rows), str(dim)]
    with LocalRun(folder / "run", options, words) as run:
        run.until(lambda: is_past(told, WARM_UP), LIMIT_S, "the first steps")
        lines = [strike(run, told), scale(run, told, MANY), scale(run, told, FEW)]
        told.with_suffix(".stop").touch()
        run.wait(LIMIT_S)
    return lines


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=int, default=2_000_000)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--runs", type=int, default=5)
    options = parser.parse_args()
    for _ in range(options.runs):
        with tempfile.TemporaryDirectory() as folder:
            print(*measure(Path(folder), options.rows, options.dim), sep="\n", flush=True)


if __name__ == "__main__":
    main()

"""How much faster rollouts become when virtual ranks share out their simulators.

    python benchmarks/ppo.py                 writes benchmarks/PPO.md

Runs examples/ppo.py with four virtual ranks on 1 to 4 workers, in turns. A rollout is a step in
which each virtual rank plays its environment. Simulators either wait, as one does that runs on
another machine or device, or compute, which needs a core each.
"""

from __future__ import annotations

import argparse
import os
import platform
import re
import statistics
import subprocess
import sys
import tempfile
import textwrap
import time
from pathlib import Path

import torch
from ddp_launch import STEADY

ROOT = Path(__file__).resolve().parent.parent
SHEET = ROOT / "benchmarks" / "PPO.md"
HOLDFAST = str(Path(sys.executable).parent / "holdfast")
VIRTUAL = 4
WORKERS = (1, 2, 3, 4)
MOVES = 64
WARM = 2  # rollouts at the start, which are not counted
RUN_S = 300.0
FOUND = re.compile(r"^rollout (\d+): .*, ([0-9.]+) s$", re.MULTILINE)
DIGEST = re.compile("^[0-9a-f]{64}$", re.MULTILINE)


def measure(workers: int, simulate_ms: float, rollouts: int) -> tuple[list[float], str]:
    """Run one job; return the seconds of each rollout, and the digest that it ends with."""
    with tempfile.TemporaryDirectory() as folder:
        command = [HOLDFAST, "run", "--run-dir", f"{folder}/run"]
        command += ["--nproc", str(workers), "--virtual", str(VIRTUAL), *STEADY]
        command += [str(ROOT / "examples" / "ppo.py"), "--rollouts", str(WARM + rollouts)]
        command += ["--moves", str(MOVES), "--simulate-ms", str(simulate_ms)]
        done = subprocess.run(command, capture_output=True, text=True, timeout=RUN_S, check=True)
    found = {int(number): float(took_s) for number, took_s in FOUND.findall(done.stdout)}
    (digest,) = set(DIGEST.findall(done.stdout))
    return [took_s for number, took_s in found.items() if number >= WARM], digest


def measure_all(simulate_ms: float, rounds: int, rollouts: int) -> tuple[list[str], bool]:
    """Return the lines of a table, and whether all runs have ended with the same digest."""
    taken: dict[int, list[float]] = {workers: [] for workers in WORKERS}
    digests: set[str] = set()
    for _ in range(rounds):
        for workers in WORKERS:
            took_s, digest = measure(workers, simulate_ms, rollouts)
            taken[workers] += took_s
            digests.add(digest)
    base_s = statistics.median(taken[1])
    lines = ["| workers | a rollout, s (median) | least to most | speed-up |", "|---|---|---|---|"]
    for workers, each in taken.items():
        took_s = statistics.median(each)
        spread = f"{min(each):.3f} to {max(each):.3f}"
        lines.append(f"| {workers} | {took_s:.3f} | {spread} | {base_s / took_s:.2f} |")
    return lines, len(digests) == 1


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--rollouts", type=int, default=6, help="that count, in each run")
    parser.add_argument(
        "--simulate-ms", type=float, default=10.0, help="a waiting move takes so long"
    )
    options = parser.parse_args()
    load = os.getloadavg()[0]
    waits, same = measure_all(options.simulate_ms, options.rounds, options.rollouts)
    computes, alike = measure_all(0.0, options.rounds, options.rollouts)
    intro = (
        f"{os.cpu_count()} cores, Python {platform.python_version()}, torch {torch.__version__}. "
        f"`python benchmarks/ppo.py` writes this sheet. The load was {load:.1f} when it began."
    )
    how = (
        f"[examples/ppo.py](../examples/ppo.py) with {VIRTUAL} virtual ranks. Each has an "
        f"environment of its own and plays {MOVES} moves for a rollout. Medians of "
        f"{options.rounds * options.rollouts} rollouts, {options.rollouts} in each of "
        f"{options.rounds} jobs, which run in turns; the first {WARM} of a job do not count. "
        f"With `{' '.join(STEADY)}`, so that the shares stay equal. With 3 workers one of them "
        "plays two environments, as each of 2 workers does."
    )
    text = [
        f"# Measured on {time.strftime('%Y-%m-%d')}",
        "",
        textwrap.fill(intro, 110, break_on_hyphens=False),
        "",
        textwrap.fill(how, 110, break_on_hyphens=False),
        "",
        f"## Simulators that wait {options.simulate_ms:g} ms for each move",
        "",
        "As they do that run on another machine or device.",
        "",
        *waits,
        "",
        "## Simulators that compute",
        "",
        f"The pole itself, in Python. {os.cpu_count()} cores are the limit.",
        "",
        *computes,
        "",
        "All jobs ended with the same digest."
        if same and alike
        else "**The jobs ended with different digests.**",
    ]
    SHEET.write_text("\n".join(text) + "\n")
    print(SHEET.read_text())
    return int(not (same and alike))


if __name__ == "__main__":
    sys.exit(main())

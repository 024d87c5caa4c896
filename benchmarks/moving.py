"""Moving: what planned moves of workers between nodes cost a job that trains on.

A job has two workers on one node; another node has one worker that waits. Workers are moved to and
fro by `holdfast migrate`. Each move is two changes of the view: one worker joins, one leaves. Steps
far from both show the speed of the job; the rest is the cost of the moves. The start of new
processes is not part of it.
"""

from __future__ import annotations

import argparse
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from step_ends import durations, read_ends

from holdfast.engine.runtime.local_run import LocalRun

HOLDFAST = (sys.executable, "-m", "holdfast.cli.main")
MOVES = 24
UNHURRIED_S = 300.0
SCRIPT = Path(__file__).with_name("moving_worker.py")


def job(folder: Path, name: str, workers: int, task_s: float, until: int) -> LocalRun:
    options = ["--nproc", str(workers), "--virtual", "2", "--nodes-max", "2"]
    options += ["--join-pause", "0", "--fingerprint-steps", "4", "--repeat-steps", "0"]
    words = [str(SCRIPT), str(folder / f"{name}.txt"), str(task_s), str(until)]
    return LocalRun(folder / name, options, words)


def members(run: LocalRun) -> dict[str, list[int]]:
    """Return the members, and the waiting workers ("spare NODE"), by node."""
    found: dict[str, list[int]] = {}
    for each in run.status()["workers"]:
        if each["state"] in ("computing", "waiting"):
            found.setdefault(each["agent"], []).append(each["id"])
        elif each["state"] == "spare":
            found.setdefault(f"spare {each['agent']}", []).append(each["id"])
    return found


def move(run: LocalRun, number: int) -> str:
    """Move a worker to the node on which one waits; returns that node's name."""

    def waits() -> Any:
        found = members(run)
        places = [name.split()[1] for name in found if name.startswith("spare ")]
        full = sum(len(each) for name, each in found.items() if not name.startswith("spare ")) == 2
        return (found, places[0]) if places and full else None

    found, to = run.until(waits, UNHURRIED_S, "a worker that waits")
    others = [name for name in found if not name.startswith("spare ") and name != to]
    worker = found[others[0]][number % len(found[others[0]])]
    run_dir = str(run.run_dir.path)
    command = [*HOLDFAST, "migrate", str(worker), "--to", to, "--run-dir", run_dir]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if "no worker waits" in done.stderr:  # it has started again since
        return move(run, number)
    assert done.returncode == 0, done.stderr
    return to


def end_of(run: LocalRun) -> list[str]:
    """Return the last step and the digest, as workers have printed them."""
    ends = {line for line in run.out if line.startswith("END")}
    (found,) = ends
    return found.split()[1:]


def measure(moves: int = MOVES, task_s: float = 0.2) -> tuple[float, float, float, bool]:
    """Return median and worst stall, share of training time, and whether the digest is right.

    Stalls are in seconds; the digest must equal the undisturbed job's.
    """
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        told = folder / "moved.txt"
        with job(folder, "moved", 2, task_s, 1_000_000) as run:
            run.until_members(2)
            host, port = run.run_dir.address()
            words = ["agent", "--join", f"{host}:{port}", "--name", "b", "--nproc", "1"]
            words += ["--run-dir", str(run.run_dir.path)]
            quiet = subprocess.DEVNULL
            agent = subprocess.Popen([*HOLDFAST, *words], stdout=quiet, stderr=quiet)
            stalls: list[float] = []
            for number in range(moves):
                began = time.monotonic()
                to = move(run, number)
                took = time.monotonic() - began
                step = max(read_ends(told))[0]
                print(f"  move {number + 1} to {to} took {took:.1f} s, step {step}", flush=True)
            told.with_suffix(".stop").touch()
            assert run.wait(UNHURRIED_S) == 0, run.log()
            agent.wait(UNHURRIED_S)
            views = [e["step"] for e in run.events("view") if e.get("step")]
            last, digest = end_of(run)
        gaps = durations(read_ends(told))
        usual = statistics.median(gaps.values())
        stalls = [max(gaps[s] - usual, 0.0) for s in views if s in gaps]
        whole = sum(gaps.values())
        with job(folder, "alone", 1, 0.0, int(last) + 1) as run:
            assert run.wait(UNHURRIED_S) == 0, run.log()
            same = end_of(run) == [last, digest]
    return statistics.median(stalls), max(stalls), 1 - sum(stalls) / whole, same


def lines() -> Iterator[str]:
    """Yield the sheet's section."""
    yield f"## {MOVES} planned moves in one run"
    yield ""
    yield "Two workers, tasks of 0.2 s, moved to and fro between two nodes; a move is two changes"
    yield "of the view. Targets: a stall of 50 ms, 0.99 of the time left for training, equal bits."
    yield ""
    stall, worst, left, same = measure()
    yield "| median stall of a change | worst | left for training | the same bits |"
    yield "|---|---|---|---|"
    yield f"| **{stall * 1e3:.0f} ms** | {worst * 1e3:.0f} ms | **{left:.4f}** | {same} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--moves", type=int, default=MOVES)
    stall, worst, left, same = measure(parser.parse_args().moves)
    print(
        f"median stall {stall * 1e3:.0f} ms, worst {worst * 1e3:.0f} ms; {left:.4f} left; {same=}"
    )


if __name__ == "__main__":
    main()

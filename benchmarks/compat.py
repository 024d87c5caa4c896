"""A script for torchrun, from kill to the next step: under torchrun and under `holdfast run`.

Both run the same script, in turn; each kill strikes one process of a group that trains. The time is
from the signal to the first line that any process of the next group prints after a step.
"""

from __future__ import annotations

import contextlib
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

WORKERS = 2
KILLS = 10
UNHURRIED_S = 120.0
SCRIPT = str(Path(__file__).with_name("compat_worker.py"))
TORCHRUN = [*(sys.executable, "-m", "torch.distributed.run", "--standalone")]
TORCHRUN += ["--nproc-per-node", str(WORKERS), "--max-restarts", "100", "--monitor-interval", "0.1"]
HOLDFAST = [*(sys.executable, "-m", "holdfast.cli.main", "run", "--compat")]
HOLDFAST += ["--nproc", str(WORKERS), "--restarts-max", "100", "--run-dir", "run"]
WAYS = {"torchrun": TORCHRUN, "holdfast run --compat": HOLDFAST}


class Run:
    """Runs the script in one way, and reads what its processes print: time, rank, pid, step."""

    def __init__(self, command: list[str], folder: str) -> None:
        self._command = command
        self._folder = folder
        self._popen: subprocess.Popen[str] | None = None
        self._lines: list[tuple[float, int, int]] = []  # time, rank, pid

    def __enter__(self) -> Run:
        self._popen = subprocess.Popen(
            [*self._command, SCRIPT],
            cwd=self._folder,
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
            env={**os.environ, "OMP_NUM_THREADS": "1"},
        )
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._popen is not None
        self._popen.send_signal(signal.SIGINT)
        try:
            self._popen.wait(30.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        for pid in {pid for _, _, pid in self._lines}:  # torchrun may leave some behind
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self, rank: int) -> float:
        """Kill a rank of the group that trains; return the seconds until the next one trains."""
        found = self._until(lambda: self._pids(0.0), "a step")
        time.sleep(1.0)  # it trains, and those that wait are there
        struck_at = time.time()
        os.kill(found[rank], signal.SIGKILL)
        try:
            self._until(lambda: self._others(struck_at, found), "a restart")
        except TimeoutError:
            return float("inf")
        first = min(
            at for at, _, pid in self._lines if pid not in found.values() and at > struck_at
        )
        self._until(lambda: len(self._pids(first - 0.001)) == WORKERS, "all ranks")
        return first - struck_at

    def _others(self, since: float, before: dict[int, int]) -> set[int]:
        return set(self._pids(since).values()) - set(before.values())

    def _pids(self, since: float) -> dict[int, int]:
        found = {rank: pid for at, rank, pid in list(self._lines) if at > since}
        return found if len(found) == WORKERS or since else {}

    def _read(self) -> None:
        assert self._popen is not None
        assert self._popen.stdout is not None
        for line in self._popen.stdout:
            at, rank, pid = line.split()
            self._lines.append((float(at), int(rank), int(pid)))

    def _until(self, ready: Callable[[], object], what: str) -> dict[int, int]:
        deadline = time.monotonic() + UNHURRIED_S
        while not (found := ready()):
            if time.monotonic() > deadline:
                raise TimeoutError(f"not in {UNHURRIED_S:g} s: {what}")
            time.sleep(0.01)
        return found  # type: ignore[return-value]


def measure(kills: int = KILLS) -> dict[str, list[float]]:
    """Kill processes under both ways in turn; return the times by way."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(kills):
        for way, command in WAYS.items():
            with tempfile.TemporaryDirectory() as folder, Run(command, folder) as run:
                times[way].append(run.kill(number % WORKERS))
                print(f"  {way}, kill {number + 1}: {times[way][-1]:.2f} s", flush=True)
    return times


def lines(kills: int = KILLS) -> Iterator[str]:
    """Yield the sheet's section."""
    yield "## A script for torchrun: from kill to the next step"
    yield ""
    yield f"One DDP script of {WORKERS} processes (gloo), as it is, {kills} times in turn, each"
    yield "in a launch of its own: kill -9 of one process, until the first step of the next group"
    yield "is done. torchrun looks for failures every 0.1 s, as it does by default; under Holdfast"
    yield "processes that have imported PyTorch are waiting. Target: less than torchrun."
    yield ""
    yield "| | median | least | most |"
    yield "|---|---|---|---|"
    times = measure(kills)
    for way, found in times.items():
        figures = (statistics.median(found), min(found), max(found))
        cells = [f"{x:.2f} s" if x < UNHURRIED_S else f"not in {UNHURRIED_S:g} s" for x in figures]
        yield f"| {way} | **{cells[0]}** | {cells[1]} | {cells[2]} |"
    ratio = statistics.median(times["torchrun"]) / statistics.median(times[list(WAYS)[1]])
    yield ""
    yield f"torchrun takes {ratio:.0f} times as long."


if __name__ == "__main__":
    print("\n".join(lines(int(sys.argv[1]) if len(sys.argv) > 1 else KILLS)))

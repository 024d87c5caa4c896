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
KILLS = 6
UNHURRIED_S = 120.0
SCRIPT = str(Path(__file__).with_name("compat_worker.py"))
TORCHRUN = [*(sys.executable, "-m", "torch.distributed.run", "--standalone")]
TORCHRUN += ["--nproc-per-node", str(WORKERS), "--max-restarts", "100", "--monitor-interval", "0.1"]
HOLDFAST = [*(sys.executable, "-m", "holdfast.cli.main", "run", "--compat")]
HOLDFAST += ["--nproc", str(WORKERS), "--restarts-max", "100", "--run-dir", "run"]
OWN_STORE = "TORCH_DISABLE_SHARE_RDZV_TCP_STORE"  # the way round pytorch/pytorch#135712
TORCHRUN_MENDED = f"torchrun with {OWN_STORE}=1"
OURS = "holdfast run --compat"
WAYS: dict[str, tuple[list[str], dict[str, str]]] = {
    "torchrun": (TORCHRUN, {}),
    TORCHRUN_MENDED: (TORCHRUN, {OWN_STORE: "1"}),
    OURS: (HOLDFAST, {}),
}


class Run:
    """Runs the script in one way, and reads what its processes print: time, rank, pid, step."""

    def __init__(self, command: list[str], settings: dict[str, str], folder: str) -> None:
        self._command = command
        self._settings = settings
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
            env={**os.environ, "OMP_NUM_THREADS": "1", **self._settings},
        )
        threading.Thread(target=self._read, daemon=True).start()
        return self

    def __exit__(self, *exc: object) -> None:
        assert self._popen is not None
        left = [*(pid for _, _, pid in self._lines), *children(self._popen.pid)]
        self._popen.send_signal(signal.SIGINT)
        try:
            self._popen.wait(30.0)
        except subprocess.TimeoutExpired:
            self._popen.kill()
        for pid in set(left):  # torchrun may leave some behind
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def kill(self, rank: int) -> float:
        """Kill a rank of the group that trains; return the seconds until the next one trains."""
        found = self._until(lambda: self._pids(0.0), "a step")
        time.sleep(1.0)  # it trains, and the waiting ones are there
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


def children(parent: int) -> Iterator[int]:
    """Find the processes that a process has started itself."""
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            words = path.read_text().rpartition(")")[2].split()
            if int(words[1]) == parent:
                yield int(path.parent.name)


def measure(kills: int = KILLS) -> dict[str, list[float]]:
    """Kill processes under both ways in turn; return the times by way."""
    times: dict[str, list[float]] = {way: [] for way in WAYS}
    for number in range(kills):
        for way, (command, settings) in WAYS.items():
            with tempfile.TemporaryDirectory() as folder, Run(command, settings, folder) as run:
                times[way].append(run.kill(number % WORKERS))
                print(f"  {way}, kill {number + 1}: {times[way][-1]:.2f} s", flush=True)
    return times


def lines(kills: int = KILLS) -> Iterator[str]:
    """Yield the sheet's section."""
    yield "## A script for torchrun: from kill to the next step"
    yield ""
    yield f"One DDP script of {WORKERS} processes (gloo), unchanged, {kills} times in turn, each"
    yield "in a launch of its own: kill -9 of one process, until the first step of the next group"
    yield "is done. torchrun looks for failures every 0.1 s, its default; under Holdfast"
    yield "processes that have imported PyTorch are waiting. Target: less than torchrun."
    yield ""
    yield f"| | back in {UNHURRIED_S:g} s | median of these | least | most |"
    yield "|---|---|---|---|---|"
    medians: dict[str, float] = {}
    for way, times in measure(kills).items():
        found = [each for each in times if each < UNHURRIED_S]
        medians[way] = statistics.median(found) if found else UNHURRIED_S
        least, most = (min(found), max(found)) if found else (UNHURRIED_S, UNHURRIED_S)
        yield (
            f"| {way} | {len(found)} of {kills} | **{medians[way]:.2f} s** "
            f"| {least:.2f} s | {most:.2f} s |"
        )
    yield ""
    ratio = medians[TORCHRUN_MENDED] / medians[OURS]
    yield f"torchrun with the setting takes {ratio:.0f} times as long. Where torchrun does not come"
    yield "back without it, the processes of its next group hang in gloo's connectFullMesh, within"
    yield "init_process_group: they read addresses of the group before, a known fault of torch"
    yield "(https://github.com/pytorch/pytorch/issues/135712), which the setting avoids."

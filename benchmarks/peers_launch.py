"""How `make bench-peers` starts each framework, and how it strikes one worker of a run.

A run is one launch in a folder of its own: `records` has what its workers wrote, `*.log` what its
launchers printed. All processes of a run carry the folder in their environment, by which the last
of them are found and ended.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

HERE = Path(__file__).parent
ROOT = HERE.parent
PEERS = ROOT / "build" / "peers" / "bin"
WORKERS = 3
POLL_S = 0.02
RUN_S = 300.0  # a run that takes longer has failed
LAST_S = 15.0  # after the first worker's end, for the ends of the other workers
Record = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Fault:
    """Describes what happens to a run: worker `worker` is struck within its step `step`.

    `share`: how much of the fixed time of that step has passed.
    """

    number: int
    worker: int
    step: int
    share: float

    @property
    def kind(self) -> str:
        return "freeze" if self.number == signal.SIGSTOP else "kill"


@dataclass(frozen=True, slots=True, kw_only=True)
class RunResult:
    """Describes one run afterwards: its records, and the fault's time and process.

    `error`: why the run did not end, with the last lines of its logs. `load`: the machine's load
    when the run began, over a minute.
    """

    framework: str
    steps: int
    records: Sequence[Record]
    fault: Fault | None = None
    struck_at: float = 0.0
    victim_pid: int = 0
    error: str = ""
    load: float = 0.0


def planned_faults(number: int, count: int, steps: int) -> list[Fault]:
    """Return the faults of one kind; every framework gets the same ones."""
    dice = random.Random(number)
    return [
        Fault(
            number=number,
            worker=(i + dice.randrange(WORKERS)) % WORKERS,
            step=dice.randrange(steps // 8, steps // 4),
            share=dice.random(),
        )
        for i in range(count)
    ]


def free_port() -> int:
    """Return a port that is free now."""
    with socket.socket() as made:
        made.bind(("127.0.0.1", 0))
        return int(made.getsockname()[1])


def holdfast_commands(folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Return the command of Holdfast: its defaults, and checkpoints as often as the other peers."""
    command = [sys.executable, "-m", "holdfast.cli.main", "run", "--nproc", str(WORKERS)]
    command += ["--run-dir", str(folder / "run"), "--store", str(folder / "store")]
    command += ["--save-every", "10", str(HERE / "peers_holdfast.py")]
    return [(command, {})]


def torchrun_commands(folder: Path, share: str = "1") -> list[tuple[list[str], dict[str, str]]]:
    """Return the command of torchrun: one elastic group of all workers.

    `share`: 1 keeps the store of the agent for the agent, or a group that starts again reads the
    addresses of the one before (https://github.com/pytorch/pytorch/issues/135712).
    """
    command = [str(PEERS / "torchrun"), "--standalone", "--nproc-per-node", str(WORKERS)]
    command += ["--max-restarts", "100", "--shutdown-timeout", "5"]
    command += [str(HERE / "peers_torchrun.py")]
    return [(command, {"TORCH_DISABLE_SHARE_RDZV_TCP_STORE": share})]


def ray_commands(folder: Path) -> list[tuple[list[str], dict[str, str]]]:
    """Return the command of Ray Train: its driver, which starts a cluster on this machine."""
    return [([str(PEERS / "python"), str(HERE / "peers_ray.py")], {})]


def torchft_commands(
    folder: Path, *lighthouse_options: str, mended: str = "1"
) -> list[tuple[list[str], dict[str, str]]]:
    """Return the commands of torchft: the lighthouse, and a torchrun for each replica group."""
    port = str(free_port())
    lighthouse = [str(PEERS / "torchft_lighthouse"), "--min_replicas", "1", "--bind"]
    lighthouse += [f"[::]:{port}", "--quorum_tick_ms", "100", *lighthouse_options]
    commands: list[tuple[list[str], dict[str, str]]] = [(lighthouse, {"RUST_BACKTRACE": "1"})]
    for replica in range(WORKERS):
        command = [str(PEERS / "torchrun"), "--standalone", "--nproc-per-node", "1"]
        command += ["--max-restarts", "100", str(HERE / "peers_torchft.py")]
        words = {"REPLICA_GROUP_ID": str(replica), "NUM_REPLICA_GROUPS": str(WORKERS)}
        words["PEERS_MENDED"] = mended
        words["TORCHFT_LIGHTHOUSE"] = f"http://localhost:{port}"
        commands.append((command, words))
    return commands


Commands = Callable[[Path], list[tuple[list[str], dict[str, str]]]]
FRAMEWORKS: Mapping[str, Commands] = {
    "Holdfast": holdfast_commands,
    "torchft": lambda folder: torchft_commands(folder, "--join_timeout_ms", "10000"),
    "torchft, short": lambda folder: torchft_commands(
        folder, "--join_timeout_ms", "1000", "--heartbeat_timeout_ms", "1000"
    ),
    "torchft, own hook": lambda folder: torchft_commands(
        folder, "--join_timeout_ms", "10000", mended="0"
    ),
    "torchrun": torchrun_commands,
    "torchrun, shared store": lambda folder: torchrun_commands(folder, share="0"),
    "Ray Train": ray_commands,
}
PARTIAL = frozenset({"torchft, own hook", "torchrun, shared store"})  # run for few kills
PARTIAL_S = 90.0  # after a kill, for such a run to train on


class RecordReader:
    """Reads the records of a run as its processes write them."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder / "records"
        self._offsets: dict[Path, int] = {}
        self._records: list[Record] = []

    def read(self) -> list[Record]:
        """Return all records that are complete by now, oldest first."""
        for path in self._folder.glob("*.jsonl"):
            offset = self._offsets.get(path, 0)
            if path.stat().st_size > offset:
                with path.open("rb") as file:
                    file.seek(offset)
                    text = file.read()
                text = text[: text.rfind(b"\n") + 1]
                self._offsets[path] = offset + len(text)
                self._records += [json.loads(line) for line in text.splitlines()]
        self._records.sort(key=lambda record: float(record["at"]))
        return self._records


class PeerRun:
    """Runs one framework's script once, and ends all its processes with the context manager."""

    def __init__(self, framework: str, folder: Path, steps: int) -> None:
        self._framework = framework
        self._folder = folder
        self._steps = steps
        self._launchers: list[subprocess.Popen[bytes]] = []
        self._deadline = 0.0
        self._limit_s = RUN_S
        self._reader = RecordReader(folder)

    def __enter__(self) -> PeerRun:
        self._deadline = time.monotonic() + self._limit_s
        (self._folder / "records").mkdir(parents=True)
        shared = {**os.environ, "PEERS_FOLDER": str(self._folder), "PEERS_STEPS": str(self._steps)}
        shared |= {"OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        for i, (command, words) in enumerate(FRAMEWORKS[self._framework](self._folder)):
            with (self._folder / f"launcher-{i}.log").open("wb") as log:
                launcher = subprocess.Popen(
                    command,
                    env={**shared, **words},
                    cwd=self._folder,
                    stdin=subprocess.DEVNULL,
                    stdout=log,
                    stderr=subprocess.STDOUT,
                )
            self._launchers.append(launcher)
        return self

    def __exit__(self, *exc: object) -> None:
        for launcher in self._launchers:
            launcher.terminate()
        with contextlib.suppress(subprocess.TimeoutExpired):
            for launcher in self._launchers:
                launcher.wait(5.0)
        for pid in marked_processes(self._folder):
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for launcher in self._launchers:
            launcher.wait()

    def train(self, fault: Fault | None) -> RunResult:
        """Wait until the run has trained to its end, with the fault; return its result."""
        struck_at, pid, error = 0.0, 0, ""
        try:
            if fault is not None:
                struck_at, pid = self._strike(fault)
                if self._framework in PARTIAL:
                    self._limit_s, self._deadline = PARTIAL_S, struck_at + PARTIAL_S
            self._until(self._has_ended, "the end of a worker")
            until = time.monotonic() + LAST_S
            while len(self._of_kind("end")) < WORKERS and time.monotonic() < until:
                time.sleep(POLL_S)
        except TimeoutError as problem:
            error = f"{problem}\n{self._log_tails()}"
        return RunResult(
            framework=self._framework,
            steps=self._steps,
            records=list(self._reader.read()),
            fault=fault,
            struck_at=struck_at,
            victim_pid=pid,
            error=error,
        )

    def _strike(self, fault: Fault) -> tuple[float, int]:
        def begun() -> list[Record]:
            return [
                record
                for record in self._of_kind("begin")
                if record["step"] == fault.step and record["worker"] == fault.worker
            ]

        found = self._until(begun, f"step {fault.step} of worker {fault.worker}")
        time.sleep(max(found[0]["at"] + fault.share * 0.2 - time.monotonic(), 0.0))
        struck_at = time.monotonic()
        os.kill(found[0]["pid"], fault.number)
        return struck_at, found[0]["pid"]

    def _of_kind(self, kind: str) -> list[Record]:
        return [each for each in self._reader.read() if each["kind"] == kind]

    def _has_ended(self) -> bool:
        return bool(self._of_kind("end")) or all(x.poll() is not None for x in self._launchers)

    def _until(self, ready: Callable[[], Any], what: str) -> Any:
        while not (found := ready()):
            if time.monotonic() > self._deadline:
                raise TimeoutError(f"not in {self._limit_s:g} s: {what}")
            time.sleep(POLL_S)
        return found

    def _log_tails(self) -> str:
        paths = sorted(self._folder.glob("launcher-*.log"))
        texts = ["\n".join(path.read_text(errors="replace").splitlines()[-5:]) for path in paths]
        return "\n".join(texts)


def marked_processes(folder: Path) -> list[int]:
    """Return the processes that were started by the run in `folder`."""
    mark, found = f"PEERS_FOLDER={folder}\0".encode(), []
    for path in Path("/proc").glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in path.read_bytes() + b"\0":
                found.append(int(path.parent.name))
    return found

"""Runs jobs and keeps results for benchmarks/gpu_parts.py."""

from __future__ import annotations

import contextlib
import datetime
import json
import statistics
import subprocess
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from step_ends import Ends, read_ends

from holdfast.engine.runtime.local_run import LocalRun
from holdfast.lab.demo.gpt import GPT

SCRIPT = Path(__file__).with_name("gpu_worker.py")
VRANKS = 4
Row = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class Size:
    """Gives the size of the model, and the length of its training."""

    width: int
    layers: int
    context: int
    batch: int
    steps: int
    text: int  # bytes to train on

    def words(self) -> list[str]:
        """Return the options of gpu_worker.py, all but the number of steps."""
        return [
            *("--width", str(self.width), "--layers", str(self.layers)),
            *("--context", str(self.context), "--batch-size", str(self.batch)),
            *("--bytes", str(self.text)),
        ]

    def parameters(self) -> int:
        with torch.device("meta"):
            return sum(p.numel() for p in GPT(self.width, self.layers, self.context).parameters())


FULL = Size(width=512, layers=8, context=256, batch=8, steps=160, text=2_000_000)
LARGE = Size(width=1024, layers=16, context=256, batch=8, steps=200, text=2_000_000)
TINY = Size(width=32, layers=1, context=16, batch=2, steps=12, text=20_000)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Describes the results of a job. `ends`: when each step ended on each worker."""

    digest: str
    seconds: float
    ends: Ends
    events: Sequence[dict[str, Any]]
    leftovers: int  # processes that are still there

    def kinds(self, kind: str) -> list[dict[str, Any]]:
        return [event for event in self.events if event["kind"] == kind]


class Evidence:
    """Gives a part its tools; keeps each result in a file as soon as there is one."""

    def __init__(self, part: str, device: str, out: Path, limit_s: float) -> None:
        self.device = device
        self.out = out
        self.tiny = device == "cpu"
        self.size = TINY if self.tiny else FULL
        self.failed = False
        self._until = time.monotonic() + limit_s
        self._file = out / f"{part}.json"
        self._told: dict[str, Any] = {
            "part": part,
            "at": datetime.datetime.now(datetime.timezone.utc).strftime("%Y-%m-%d %H:%M UTC"),
            "device": torch.cuda.get_device_name() if device == "cuda" else "the CPU",
            "torch": torch.__version__,
            "ended": False,
            "rows": {},
        }
        out.mkdir(parents=True, exist_ok=True)
        self._save()

    def left_s(self) -> float:
        """Return the seconds that are left of the part's time."""
        return self._until - time.monotonic()

    def add(self, name: str, row: Row) -> None:
        """Keep a result. One whose `ok` is False makes the part fail."""
        self.failed |= row.get("ok") is False
        self._told["rows"][name] = row
        self._save()
        print(f"{name}: {row}", flush=True)

    def attempt(self, name: str, make: Callable[[], Row], least_s: float = 20.0) -> Row:
        """Add what `make` returns; that it failed and why; or that no time was left for it."""
        if self.left_s() < least_s:
            self.add(name, {"ok": False, "error": "no time was left"})
            return {}
        try:
            row = make()
        except Exception as error:  # noqa: BLE001 - the other results are wanted all the same
            traceback.print_exc()
            row = {"ok": False, "error": f"{type(error).__name__}: {str(error)[-600:]}"}
        self.add(name, row)
        return row

    def end(self) -> None:
        self._told["ended"] = True
        self._save()

    def job(
        self,
        workers: int,
        words: Sequence[str] = (),
        options: Sequence[str] = (),
        faults: Sequence[str] = (),
        size: Size | None = None,
    ) -> Outcome:
        """Run a job to its end. RuntimeError if it fails or takes too long."""
        with self.running(workers, words, options, faults, size) as (run, told):
            begun = time.monotonic()
            try:
                code = run.wait(max(self.left_s(), 1.0))
            except subprocess.TimeoutExpired:
                raise RuntimeError(f"the part's time is over:\n{run.log()}") from None
            if code != 0:
                raise RuntimeError(f"exit status {code}:\n{run.log()}")
            return Outcome(
                digest=run.out[-1],
                seconds=time.monotonic() - begun,
                ends=read_ends(told),
                events=run.events(),
                leftovers=len(run.leftovers()),
            )

    @contextlib.contextmanager
    def running(
        self,
        workers: int,
        words: Sequence[str] = (),
        options: Sequence[str] = (),
        faults: Sequence[str] = (),
        size: Size | None = None,
    ) -> Iterator[tuple[LocalRun, Path]]:
        """Run a job for the length of a with statement; yield it and the file of its steps."""
        size = size or self.size
        with tempfile.TemporaryDirectory() as name:
            folder = Path(name)
            told, flags = folder / "told.txt", list(options)
            if faults:
                (folder / "faults.txt").write_text("\n".join(faults))
                flags += ["--faults", str(folder / "faults.txt")]
            if "--virtual" not in flags:
                flags += ["--virtual", str(VRANKS)]
            flags = [each.replace("FOLDER", name) for each in flags]
            command = [str(SCRIPT), "--device", self.device, *size.words(), "--told", str(told)]
            if "--steps" not in words:
                command += ["--steps", str(size.steps)]
            run = LocalRun(folder / "run", ["--nproc", str(workers), *flags], [*command, *words])
            with run:
                yield run, told

    def _save(self) -> None:
        temporary = self._file.with_suffix(".new")
        temporary.write_text(json.dumps(self._told, indent=1))
        temporary.rename(self._file)


def timed(device: str, work: Callable[[], object], rounds: int = 7) -> float:
    """Return the median seconds of some work, the device's part included."""
    found = []
    for _ in range(rounds + 1):
        wait_for(device)
        begun = time.perf_counter()
        work()
        wait_for(device)
        found.append(time.perf_counter() - begun)
    return statistics.median(found[1:])


def wait_for(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()

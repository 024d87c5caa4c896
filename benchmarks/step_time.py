"""Step time against DistributedDataParallel on gloo: same process, model and batches, in turn."""

from __future__ import annotations

import json
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from holdfast.engine.runtime.local_run import LocalRun

CASES = [("mlp", 2), ("transformer", 2), ("many-small", 2), ("mlp", 4)]
RUN_S = 300.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepTime:
    """Medians in seconds over blocks of ten steps; ratios block by block."""

    model: str
    workers: int
    parameters: int
    tensors: int
    ddp_s: float
    holdfast_s: float
    ratio: float
    ratio_min: float
    ratio_max: float


def measure(model: str, workers: int) -> StepTime:
    script = Path(__file__).with_name("step_time_worker.py")
    with tempfile.TemporaryDirectory() as folder:
        out, meeting = Path(folder) / "out.json", Path(folder) / "meeting"
        args = ["--model", model, "--workers", str(workers), "--out", str(out)]
        command = [str(script), *args, "--rendezvous", str(meeting)]
        with LocalRun(Path(folder) / "run", ["--nproc", str(workers)], command) as run:
            assert run.wait(RUN_S) == 0, run.log()
        found = json.loads(out.read_text())
    times = found["times"]
    ratios = [a / b for a, b in zip(times["holdfast"], times["ddp"], strict=True)]
    return StepTime(
        model=model,
        workers=workers,
        parameters=found["parameters"],
        tensors=found["tensors"],
        ddp_s=statistics.median(times["ddp"]),
        holdfast_s=statistics.median(times["holdfast"]),
        ratio=statistics.median(ratios),
        ratio_min=min(ratios),
        ratio_max=max(ratios),
    )

"""Runs a training script and writes down digests of its state at every step, for `holdfast check`.

    holdfast run ... traced.py PLAN SCRIPT ARGS...

PLAN is a JSON file: where traces are written, whether and when worker 1 is killed, and after how
many steps after that it has joined again for long enough.
"""

from __future__ import annotations

import json
import os
import runpy
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from holdfast.train.checkpoint.state import as_bytes
from holdfast.train.step.probe import Probe, current

VICTIM = 1  # the worker that is killed once
JOIN_STEP_S = 0.5  # how long a step is made while the victim's successor starts
JOIN_STEPS_MAX = 240


class Tracer(Probe):
    """Writes one line for each step that this worker takes part in."""

    def __init__(self, traces: Path, kill_step: int | None, worker: int, incarnation: int) -> None:
        self._traces = traces
        self._kill_step = kill_step  # None: nobody is killed
        self._me = worker, incarnation
        self._waited = 0

    def boundary(self, step: int, protected: Mapping[str, Any]) -> None:
        worker, incarnation = self._me
        line = json.dumps({"step": step, "tensors": digests(protected)})
        with (self._traces / f"{worker}-{incarnation}.jsonl").open("a") as file:
            file.write(line + "\n")
        if self._kill_step is None or step <= self._kill_step or self._waited >= JOIN_STEPS_MAX:
            return
        if not (self._traces / f"{VICTIM}-2.jsonl").exists():
            self._waited += 1
            time.sleep(JOIN_STEP_S)

    def task(self, step: int, vrank: int) -> None:
        if self._me == (VICTIM, 1) and step == self._kill_step:
            os.kill(os.getpid(), signal.SIGKILL)


def digests(protected: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of every tensor of the protected objects, by a path that a person reads."""
    found: dict[str, str] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = xxhash.xxh3_64_hexdigest(as_bytes(value).numpy().data)
        elif isinstance(value, dict):
            for key, each in value.items():
                visit(each, f"{path}.{key}" if isinstance(key, str) else f"{path}[{key}]")
        elif isinstance(value, list | tuple):
            for i, each in enumerate(value):
                visit(each, f"{path}[{i}]")
        elif isinstance(value, int | float | str | bool | bytes):
            found[path] = repr(value)[:80]

    for name, each in protected.items():
        visit(each.state_dict(), name)
    return found


def main(argv: list[str]) -> None:
    """Run a script with traces. `argv`: the plan, the training script, its arguments."""
    plan, script = json.loads(Path(argv[0]).read_text()), argv[1]
    worker = int(os.environ.get("HOLDFAST_WORKER", "0"))
    incarnation = int(os.environ.get("HOLDFAST_INCARNATION", "1"))
    current.probe = Tracer(Path(plan["traces"]), plan["kill_step"], worker, incarnation)
    sys.argv = argv[1:]
    sys.path[0] = os.path.dirname(os.path.realpath(script))
    runpy.run_path(script, run_name="__main__")


if __name__ == "__main__":
    main(sys.argv[1:])

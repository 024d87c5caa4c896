"""Runs a training script and writes down digests of its state at every step, for `holdfast check`.

    holdfast run ... traced.py PLAN SCRIPT ARGS...

PLAN is a JSON file: where traces are written, and whether and when worker 1 is killed. The other
workers then wait for its successor, so that scripts of a few steps see a join, too.
"""

from __future__ import annotations

import json
import math
import os
import signal
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import xxhash

from holdfast.engine.runtime import user_script
from holdfast.engine.train.checkpoint.local_tensors import local_of
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.job import join_once
from holdfast.engine.train.step.probe import Probe, current

VICTIM = 1  # the worker that is killed once
JOIN_S = 120.0  # to wait for the victim's successor
LOOK_S = 0.02


class Tracer(Probe):
    """Writes one line for each step that this worker takes part in."""

    def __init__(self, traces: Path, kill_step: int | None, process: tuple[int, int, int]) -> None:
        self._traces = traces
        # None: no worker is killed.
        self._kill_step = kill_step
        self._worker, self._incarnation, self._shard = process
        self._wait_until = math.inf  # begins with the first wait

    def boundary(self, step: int, protected: Mapping[str, Any]) -> None:
        if self._shard:
            # The process of shard 0 writes for its worker.
            return
        line = json.dumps({"step": step, "tensors": digests(protected)})
        with (self._traces / f"{self._worker}-{self._incarnation}.jsonl").open("a") as file:
            file.write(line + "\n")
        if self._kill_step is not None and step > self._kill_step:
            self._await_successor()

    def _await_successor(self) -> None:
        """Wait until the killed worker's successor is a member, or is about to become one."""
        driver = join_once()._driver
        now = time.monotonic()
        self._wait_until = min(self._wait_until, now + JOIN_S)
        while now < self._wait_until and not driver.pending:
            joins = driver.view is not None and VICTIM in driver.view.workers
            if joins or (self._traces / f"{VICTIM}-2.jsonl").exists():
                return
            time.sleep(LOOK_S)
            now = time.monotonic()

    def handle_task(self, step: int, vrank: int) -> None:
        victim = self._worker, self._incarnation, self._shard
        if victim == (VICTIM, 1, 0) and step == self._kill_step:
            os.kill(os.getpid(), signal.SIGKILL)


def digests(protected: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of every tensor of the protected objects, by a path that a person reads."""
    found: dict[str, str] = {}

    def visit(value: Any, path: str) -> None:
        if isinstance(value, torch.Tensor):
            found[path] = xxhash.xxh3_64_hexdigest(as_bytes(local_of(value)).numpy().data)
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
    names = ("HOLDFAST_WORKER", "0"), ("HOLDFAST_INCARNATION", "1"), ("HOLDFAST_SHARD", "0")
    worker, incarnation, shard = (int(os.environ.get(*each)) for each in names)
    process = worker, incarnation, shard
    current.probe = Tracer(Path(plan["traces"]), plan["kill_step"], process)
    user_script.become(argv[1:])
    user_script.run(script)


if __name__ == "__main__":
    main(sys.argv[1:])

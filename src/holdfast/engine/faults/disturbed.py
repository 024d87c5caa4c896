"""Runs a training script while the faults of a fault script strike inside its worker.

    holdfast run --faults FAULTS [OPTIONS] SCRIPT ARGS...

This starts this file in every worker, with FAULTS, SCRIPT and ARGS. Random faults are drawn from
the worker's number and the step, so that a run can be repeated.
"""

from __future__ import annotations

import math
import os
import random
import signal
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.engine.faults.fault_script import Disturbance, parse
from holdfast.engine.runtime import user_script
from holdfast.engine.train.checkpoint.local_tensors import local_of
from holdfast.engine.train.step.probe import Probe, current


class Disturber(Probe):
    """Strikes one worker with the faults that the fault script has for it.

    `marks`: a directory that records faults that have struck, since a step may be done again.
    """

    def __init__(
        self, worker: int, faults: Sequence[Disturbance], marks: Path | None = None
    ) -> None:
        self._marks = marks
        self._worker = worker
        self._faults = faults
        self._step = -1
        self._began = time.perf_counter()  # when this task began
        self._dice = random.Random(worker)
        self.is_noisy = any(fault.action == "noise" for fault in faults)
        self._done: set[tuple[int, str, str]] = set()

    def boundary(self, step: int, protected: Mapping[str, Any]) -> None:
        self._step = step
        self._dice = random.Random(f"{self._worker} {step}")
        for target in ("parameter", "optimizer"):
            if any(self._select_once("flip", target)):
                flip_bit(self._dice, _tensors(protected, target))
        self._began = time.perf_counter()

    def handle_task(self, step: int, vrank: int) -> None:
        took_s = time.perf_counter() - self._began
        for fault in self._faults_due("slow"):
            if self._dice.random() < fault.chance:
                time.sleep(took_s * (fault.number - 1))
        for fault in self._select_once("stall"):
            time.sleep(fault.number)
        for action, number in (("kill", signal.SIGKILL), ("freeze", signal.SIGSTOP)):
            if any(self._select_once(action)):
                os.kill(os.getpid(), number)
        self._began = time.perf_counter()

    def handle_gradient(self, vrank: int, flat: torch.Tensor) -> None:
        if any(self._select_once("flip", "gradient")):
            flip_bit(self._dice, [flat])
        for fault in self._select_once("poison"):
            flat[self._dice.randrange(len(flat))] = math.nan if fault.target == "nan" else math.inf
        if any(self._faults_due("overflow")):
            flat.fill_(math.inf)
        if any(self._faults_due("multiply")):
            flat[self._dice.randrange(len(flat))] *= 1.001
        for fault in self._faults_due("noise"):
            dice = torch.Generator().manual_seed(self._dice.getrandbits(60))
            noise = torch.randn(len(flat), generator=dice).to(flat)
            flat.mul_(1 + fault.number * noise)

    def handle_received(self, flat: torch.Tensor) -> None:
        if len(flat) and any(self._select_once("flip", "received")):
            flip_bit(self._dice, [flat])

    def handle_sending(self, peer: int, size: int) -> None:
        for fault in self._faults_due("link"):
            time.sleep(size / fault.number)

    def _faults_due(self, action: str, target: str | None = None) -> Iterator[Disturbance]:
        for fault in self._faults:
            if fault.action == action and target in (None, fault.target):
                if fault.strikes(self._worker, self._step):
                    yield fault

    def _select_once(self, action: str, target: str = "") -> Iterator[Disturbance]:
        """Select the faults that have not struck in this step, and record that they have."""
        mark = self._step, action, target
        if mark not in self._done:
            for fault in self._faults_due(action, target or None):
                self._done.add(mark)
                if self._is_first(f"worker-{self._worker}-step-{self._step}-{action}-{target}"):
                    yield fault

    def _is_first(self, name: str) -> bool:
        if self._marks is None:
            return True
        self._marks.mkdir(parents=True, exist_ok=True)
        try:
            (self._marks / name).touch(exist_ok=False)
        except FileExistsError:
            return False
        return True


def flip_bit(dice: random.Random, tensors: Sequence[torch.Tensor]) -> None:
    """Flip one bit of one of these contiguous tensors."""
    (chosen,) = dice.choices(tensors, [t.nbytes for t in tensors])
    with torch.no_grad():
        flat = chosen.detach().view(-1).view(torch.uint8)
        flat[dice.randrange(len(flat))] ^= 1 << dice.randrange(8)


def _tensors(protected: Mapping[str, Any], target: str) -> list[torch.Tensor]:
    """Collect the parameters, or all tensors of the optimizers' states."""
    found: list[torch.Tensor] = []
    for each in protected.values():
        if target == "parameter" and isinstance(each, torch.nn.Module):
            found += [p for p in each.parameters() if p.is_contiguous()]
        if target == "optimizer" and isinstance(each, torch.optim.Optimizer):
            states = [value for state in each.state.values() for value in state.values()]
            found += [s for s in states if isinstance(s, torch.Tensor) and s.is_contiguous()]
    return [local for t in found if (local := local_of(t)).nbytes]


def main(argv: list[str]) -> None:
    """Run a script with faults. `argv`: the fault script, the training script, its arguments."""
    faults, script, *_ = argv
    worker = int(os.environ.get("HOLDFAST_WORKER", "0"))
    run_dir = os.environ.get("HOLDFAST_RUN_DIR")
    marks = Path(run_dir) / "faults" if run_dir else None
    current.probe = Disturber(worker, parse(Path(faults).read_text(), faults), marks)
    user_script.become(argv[1:])
    user_script.run(script)


if __name__ == "__main__":
    main(sys.argv[1:])

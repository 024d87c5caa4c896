"""Runs examples/grpo.py, and waits in the middle of the rollouts of one step.

    held_rollout.py STEP FILE [options of grpo.py]

In that step, which has to be one of GRPO, every worker waits in a rollout when each answer has its
first character, until there is FILE; in the meantime FILE.WORKER has the worker's process id.
"""

from __future__ import annotations

import importlib.util
import os
import sys
import time
from pathlib import Path
from typing import Any

import torch

import holdfast

GRPO = Path(__file__).parents[2] / "examples" / "grpo.py"


def load_example() -> Any:
    spec = importlib.util.spec_from_file_location("grpo", GRPO)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def wait_for(file: Path, worker: int) -> None:
    mark = Path(f"{file}.{worker}")
    part = Path(f"{mark}.{os.getpid()}")
    part.write_text(str(os.getpid()))
    part.rename(mark)  # so that it is never seen half written
    while not file.exists():
        time.sleep(0.005)


def main() -> None:
    held, file = int(sys.argv.pop(1)), Path(sys.argv.pop(1))
    grpo = load_example()
    join, roll_out, choose = holdfast.join, grpo.roll_out, grpo.choose
    worker, begun = -1, grpo.ANSWER_MAX  # characters that the rollout has begun

    def join_held() -> holdfast.Job:
        nonlocal worker
        job = join()
        worker = job.worker
        return job

    def roll_out_held(step: holdfast.Step, *arguments: Any) -> dict[str, torch.Tensor]:
        nonlocal begun
        if step.index == held:
            begun = 0
        return roll_out(step, *arguments)

    def choose_held(scores: torch.Tensor) -> torch.Tensor:
        nonlocal begun
        begun += 1
        if begun == 2:
            wait_for(file, worker)
        return choose(scores)

    holdfast.join, grpo.roll_out, grpo.choose = join_held, roll_out_held, choose_held
    grpo.main()


if __name__ == "__main__":
    main()

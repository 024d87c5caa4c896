"""Helpers of tests of jobs whose state is in the nodes' memory."""

from __future__ import annotations

import re

from conftest import RUN_S
from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.runtime.local_run import LocalRun, strike


def until_step(run: LocalRun, step: int) -> None:
    def there() -> bool:
        try:
            return int(run.status()["step"]) >= step
        except HoldfastError:
            return False

    run.until(there, RUN_S, f"step {step}")


def kill_workers(run: LocalRun) -> None:
    """Kill every process that holds the state, at once, and continue the job."""
    for pid in run.members().values():
        strike(pid)
    (run.run_dir.path.parent / "go").touch()


def recalls(run: LocalRun) -> list[int]:
    """Return the steps from which the job has begun again from memory."""
    texts = [event["text"] for event in run.events("view")]
    found = [re.search(r"from step (\d+), as the nodes' memory has it", text) for text in texts]
    return [int(match[1]) for match in found if match is not None]

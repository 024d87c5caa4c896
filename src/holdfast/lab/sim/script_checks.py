"""Checks that what a worker says of its script is where the simulated script stands."""

from __future__ import annotations

from typing import Protocol

from holdfast.engine.core.worker_status import Phase, WorkerStatus
from holdfast.lab.sim.arithmetic import Key
from holdfast.lab.sim.wrong_bits import Violation


class Script(Protocol):
    """Is the script of one simulated process, as it really stands."""

    key: Key
    at_rest: bool
    step: int
    open_step: int
    tokens: dict[int, int]
    total: int | None
    total_step: int

    @property
    def is_busy(self) -> bool: ...

    @property
    def until(self) -> int: ...

    @property
    def can_wait(self) -> bool: ...


def check_script(script: Script, status: WorkerStatus) -> None:
    """Compare a status with the script, once the machine has handled all its events."""
    wrong = _disagreement(script, status)
    if wrong:
        raise Violation(f"worker {script.key} is said to be {status.phase.value}, but {wrong}")


def _disagreement(script: Script, status: WorkerStatus) -> str:
    step, phase = status.committed, status.phase
    open_now, done = script.open_step == step, set(status.hosted) <= set(script.tokens)
    if status.has_state and not step - 1 <= script.step <= step:
        return f"its state is of step {script.step} when {step} are committed"
    if status.reduced and (script.total is None or script.total_step != step):
        return f"it has no gradient of step {step}"
    if script.at_rest and not script.is_busy and phase is not Phase.BOUNDARY:
        return "it waits between two steps"
    match phase:
        case Phase.BOUNDARY if not script.at_rest:
            return "its script goes on"
        case Phase.BOUNDARY if status.has_state and script.step != step:
            return f"it rests after {script.step} of {step} steps"
        case Phase.WAITING | Phase.OVERDUE if not (open_now and done) and not script.can_wait:
            return f"its tasks of step {step} are not done"
        case Phase.COMPUTING if open_now and done and not script.is_busy:
            return f"its tasks of step {step} are done"
        case Phase.LEAVING | Phase.ENDED if script.step < script.until:
            return f"it has come to step {script.step} of {script.until}"
    return ""

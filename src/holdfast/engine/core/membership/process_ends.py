"""Judges how a worker's process has ended: well, by its script's fault, or lost. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.worker_status import Stage

QUIT = (
    "the script ended its process with exit status 0 before its last line: by os._exit, or a "
    "library that calls it"
)


@dataclass(frozen=True, slots=True)
class EndVerdict:
    """Names the stage that a process has reached, the reason, and its machine's own error."""

    stage: Stage
    reason: str
    error: MachineError | None = None


def judge_end(
    code: int, told: str, error: MachineError | None, reported: bool, killed_for: str
) -> EndVerdict:
    """Judge the end of a process with this exit status, negative for a signal.

    `told`: the reason that it gave. `error`: its machine's own error, if that is known. `reported`:
    its script had reported its end. `killed_for`: why the agent has killed it, if it has.

    A process that ends without a report is lost whatever its status: its Python may not have
    started, or some code has called `os._exit`.
    """
    if killed_for:
        return EndVerdict(Stage.LOST, killed_for)
    if code == 0:
        return EndVerdict(Stage.EXITED, told) if reported else EndVerdict(Stage.LOST, QUIT)
    if code < 0:
        return EndVerdict(Stage.LOST, told or f"ended by signal {-code}", error)
    why = told or f"exit code {code}"
    if error is None and (told or reported):
        return EndVerdict(Stage.FAILED, why)
    return EndVerdict(Stage.LOST, why, error or MachineError.UNREPORTED)

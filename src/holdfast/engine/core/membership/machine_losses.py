"""Remembers workers that were lost by errors of their own machines, and judges their number. Pure.

The job does without such a worker while another one has been spared. It ends once the same error
has happened on every worker.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.types import AgentId, WorkerId

REMEMBERED_STEPS = 100  # an error that does not come back for this many steps is forgotten
_PLACE = re.compile(r'File "(.*?)([^"/]+)", line (\d+)')
_LIBRARIES = re.compile("/(site-packages|dist-packages|python3[^/]*)/")


@dataclass(frozen=True, slots=True, kw_only=True)
class MachineLoss:
    """Describes the loss of a worker by its machine's own error. `detail`: often a traceback."""

    error: MachineError
    node: AgentId
    detail: str = ""

    def describe(self) -> str:
        """Return one line: what happened, where, with the script's line, and what to do."""
        remedy = f": {self.error.remedy}" if self.error.remedy else ""
        lines = self.detail.strip().splitlines()
        places = [each for each in _PLACE.findall(self.detail) if not _LIBRARIES.search(each[0])]
        told = [lines[-1].strip()] if lines else []
        told += [f"{name}:{line}" for _, name, line in places[-1:]]
        found = f" ({', '.join(told)})" if told else ""
        return f"{self.error.what} on node {self.node}{found}{remedy}"


@dataclass(frozen=True, slots=True)
class _Counted:
    """Describes a loss that was counted, of a worker at a step."""

    worker: WorkerId
    step: int
    loss: MachineLoss


class MachineLosses:
    """Remembers recent losses by machines' own errors, and judges whether the job can do better."""

    def __init__(self) -> None:
        self._counted: tuple[_Counted, ...] = ()  # the newest two of each worker and kind

    def count(self, worker: WorkerId, loss: MachineLoss, step: int) -> None:
        """Count a loss, at this step of the job."""
        near = self._near(step)
        same = [each for each in near if (each.worker, each.loss.error) == (worker, loss.error)]
        kept = [each for each in near if each not in same]
        self._counted = (*kept, *same[-1:], _Counted(worker, step, loss))

    def reason_to_end(
        self, step: int, list_places: Callable[[], Mapping[WorkerId, AgentId]]
    ) -> str:
        """Return why the job ends; "": it continues, because some worker has been spared.

        `list_places` returns the node of each worker that may run. The only worker gets one more
        try, in a new process whose files and memory are free again. A missing library stays missing
        on its node.
        """
        near = self._near(step)
        places = list_places() if near else {}
        if not places:
            return ""
        newest = near[-1]
        error, loss = newest.loss.error, newest.loss
        same = [each for each in near if each.loss.error is error]
        is_library = error is MachineError.LIBRARY
        if is_library:
            is_everywhere = {each.loss.node for each in same}.issuperset(places.values())
        else:
            is_everywhere = {each.worker for each in same}.issuperset(places) and len(same) > 1
        if not is_everywhere or error is MachineError.KILLED:
            return ""
        where = "node" if is_library else "worker"
        again = f" ({error.what} on every {where})" if len(same) > 1 else ""
        return f"worker {newest.worker} failed{again}: {loss.detail or error.what}"

    def _near(self, step: int) -> list[_Counted]:
        return [each for each in self._counted if abs(step - each.step) <= REMEMBERED_STEPS]

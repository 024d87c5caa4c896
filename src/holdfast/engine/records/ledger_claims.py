"""Finds how many steps a run has committed, from sources other than its ledger.

A ledger that was cut short looks like one of a shorter run. So its proof asks the coordinator's
result and record, and the newest checkpoint, how long it has to be.
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.state.store.regular_files import read_json

RESULT_FILE = "result.json"


@dataclass(frozen=True, slots=True, kw_only=True)
class Claim:
    """States how many steps a run has committed, and which `source` names that number.

    `surely`: every worker had also written the last one to its ledger by then. Otherwise all of
    them may have been lost just after they committed it.
    """

    steps: int
    source: str
    surely: bool = True

    @property
    def least(self) -> int:
        """Return how many steps a complete ledger has at least."""
        return self.steps if self.surely else self.steps - 1


def claim_of_result(run_dir: str | os.PathLike[str]) -> Claim | None:
    """Return the claim of the run's result.json; None if that is missing or damaged."""
    try:
        found = read_json(Path(run_dir) / RESULT_FILE)
        steps, ended_well = int(found["step"]), found["outcome"] == ""
    except (OSError, ValueError, KeyError, TypeError):
        return None
    return Claim(steps=steps, source=RESULT_FILE, surely=ended_well)


def claims_of_record(record: JobRecord | None) -> list[Claim]:
    """Return the claims of the coordinator's journal."""
    if record is None:
        return []
    claims = [
        Claim(steps=step, source="the newest checkpoint") for step in sorted(record.saved)[-1:]
    ]
    if record.view is not None:
        step = record.view.resume_step
        claims.append(Claim(steps=step, source="the journal", surely=False))
    return claims

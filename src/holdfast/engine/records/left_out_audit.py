"""Finds in a run's ledger which records were quarantined when, to prove the use of samples.

A record that a task has reported is left out by all from the script's next step on. No other record
may take the place of a planned one: a worker that uses another one without a report is found.
"""

from __future__ import annotations

import bisect
from collections.abc import Callable, Collection, Mapping, Sequence
from pathlib import Path
from typing import Protocol

import numpy as np
from numpy.typing import NDArray

from holdfast.engine.core.errors import UserError
from holdfast.engine.records.ledger import HeaderLine, StepLine, Uses, read_lines

_BAD, _HEADER = b'"bad"', b'"header"'  # one occurs in each line that matters here


class ReplacingPlan(Protocol):
    """Declares the needed part of a plan."""

    def digest_of(self, indices: NDArray[np.int64]) -> int: ...

    def replace_bad(
        self, indices: NDArray[np.int64], bad: Collection[int]
    ) -> tuple[NDArray[np.int64], set[int]]:
        """Return the records used in place of bad ones, and the bad ones that were met."""
        ...


class LeftOut:
    """Keeps by dataset which records were reported in which of the script's steps."""

    def __init__(self) -> None:
        self._told: dict[int, dict[int, set[int]]] = {}
        self._sums: dict[int, tuple[list[int], list[frozenset[int]]]] = {}

    def read(self, paths: Sequence[Path], withdrawn: Callable[[StepLine], bool]) -> None:
        """Collect the reports in all files, but for steps that do not count."""
        for path in paths:
            dataset = 0
            for line in read_lines(path, having=(_BAD, _HEADER)):
                match line:
                    case HeaderLine() as header:
                        dataset = header.dataset
                    case StepLine() as entry if not withdrawn(entry):
                        self._note(dataset, entry)

    def _note(self, dataset: int, entry: StepLine) -> None:
        if entry.bad and dataset and entry.uses is not Uses.NO_SAMPLES:
            told = self._told.setdefault(dataset, {}).setdefault(entry.place.index, set())
            told.update(*entry.bad.values())

    @property
    def count(self) -> int:
        """Return the number of quarantined records."""
        return sum(len(set().union(*steps.values())) for steps in self._told.values())

    def left_out_records(self, dataset: int, index: int) -> frozenset[int]:
        """Return which records all leave out in this step of the script."""
        if dataset not in self._told:
            return frozenset()
        if dataset not in self._sums:
            found: frozenset[int] = frozenset()
            sums, steps = [found], sorted(self._told[dataset])
            for step in steps:
                found |= self._told[dataset][step]
                sums.append(found)
            self._sums[dataset] = steps, sums
        steps, sums = self._sums[dataset]
        return sums[bisect.bisect_left(steps, index)]

    def used_records(
        self,
        plan: ReplacingPlan,
        task: NDArray[np.int64],
        before: frozenset[int],
        told: Sequence[int],
    ) -> tuple[NDArray[np.int64], str]:
        """Return the records that a task must have used for its indices, or its fault."""
        if not (before or told):
            return task, ""
        try:
            used, met = plan.replace_bad(task, before | set(told))
        except UserError as error:
            return task, str(error)
        again = sorted(set(told) & before)
        if again:
            return task, f"reports record {again[0]} again, which was left out before"
        unmet = sorted(set(told) - met)
        if unmet:
            return task, f"tells of record {unmet[0]}, which it had no reason to read"
        return used, ""

    def find_fault(self, header: HeaderLine, bad: Mapping[int, Sequence[int]]) -> str:
        """Return the fault of a report of bad records under this header; empty: none."""
        if not bad:
            return ""
        if not header.dataset:
            return "leaves out records, which its header does not allow"
        if any(not 0 <= vrank < header.virtual_ranks for vrank in bad):
            return f"leaves out records of virtual ranks {sorted(bad)}"
        return ""

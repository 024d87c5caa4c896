"""Follows the ledger of a run while it grows, and keeps the loss of each step.

It applies the rules of engine/records/step_records.py to one line after the other.
"""

from __future__ import annotations

import contextlib
import math
from pathlib import Path

import msgspec

from holdfast.engine.records.file_tails import FileTail
from holdfast.engine.records.ledger import LEDGER_DIR, DoubtLine, StepLine, Uses, decode_line
from holdfast.reports.charts import thin_points

POINTS_MAX = 1500
Point = tuple[float, float | None]


class LossSeries:
    """Keeps the losses that the files of one ledger tell."""

    def __init__(self, run_dir: Path) -> None:
        self._folder = run_dir / LEDGER_DIR
        self._tails: dict[str, FileTail] = {}
        self._doubts: list[DoubtLine] = []
        self._steps: dict[int, tuple[int, float]] = {}  # by step: view and loss

    def refresh(self) -> bool:
        """Read the new lines of all files; return whether a loss has changed."""
        changed = False
        for path in sorted(self._folder.glob("*.jsonl")):
            tail = self._tails.setdefault(path.name, FileTail(path))
            for data in tail.read():
                if tail.cut:
                    self._tails, self._doubts, self._steps = {}, [], {}
                    return True  # the next look reads all files again
                with contextlib.suppress(msgspec.MsgspecError, ValueError, RecursionError):
                    changed |= self._take(decode_line(data))
        return changed

    def points(self) -> list[Point]:
        """Return some 1,500 steps with their losses; None where the loss is no finite number."""
        steps = sorted(self._steps)
        finite = [(float(s), loss) for s in steps if math.isfinite(loss := self._steps[s][1])]
        odd: list[Point] = [(float(s), None) for s in steps if not math.isfinite(self._steps[s][1])]
        shown: list[Point] = [*thin_points(finite, POINTS_MAX)]
        return sorted([*shown, *odd[-POINTS_MAX:]], key=lambda point: point[0])

    def newest(self) -> tuple[int, float | None] | None:
        """Return the newest step and its loss; None without any."""
        if not self._steps:
            return None
        step = max(self._steps)
        loss = self._steps[step][1]
        return step, loss if math.isfinite(loss) else None

    def _take(self, line: object) -> bool:
        if isinstance(line, DoubtLine) and line.again and line not in self._doubts:
            self._doubts.append(line)
            kept = {s: v for s, v in self._steps.items() if not line.covers(s, v[0])}
            changed = len(kept) != len(self._steps)
            self._steps = kept
            return changed
        if not isinstance(line, StepLine) or line.uses is Uses.NO_SAMPLES:
            return False
        if any(doubt.covers(line.step, line.view) for doubt in self._doubts):
            return False
        known = self._steps.get(line.step)
        if known is not None and known[0] >= line.view:
            return False
        with contextlib.suppress(ValueError, OverflowError):
            self._steps[line.step] = line.view, float.fromhex(line.loss)
            return True
        return False

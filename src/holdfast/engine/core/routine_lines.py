"""Decides which routine lines people see on a terminal; the event log has all of them. Pure.

Other programs on a busy machine make workers slow again and again, and each change is one line of
the event log. Hundreds of such lines would hide the one line that matters. So a terminal shows none
of them: it shows once that machines are busy, and workers that are slow for long, ever more seldom.
"""

from __future__ import annotations

from dataclasses import dataclass

HIDDEN = ("slow", "balance", "copy")
ONCE = ("busy",)
RARE = ("straggler",)
GAP_S = 60.0  # before the second line of a kind; each further gap is twice as long
GAP_MAX_S = 3600.0
SUBJECTS_MAX = 1000  # the newest ones are remembered


@dataclass(slots=True)
class _Subject:
    next_at: float
    gap_s: float
    #: The number of lines since the last shown one.
    passed: int = 0


class RoutineLines:
    """Remembers when each kind of line was shown last, for each worker that it is about."""

    def __init__(self) -> None:
        self._subjects: dict[tuple[str, str], _Subject] = {}

    def show(self, kind: str, text: str, now: float) -> str:
        """Return the line to show for an event; "" if the event log alone has it."""
        if kind in HIDDEN:
            return ""
        if kind not in (*ONCE, *RARE):
            return text
        key = kind, text.partition(":")[0] if kind in RARE else ""
        subject = self._subjects.get(key)
        if subject is None:
            while len(self._subjects) >= SUBJECTS_MAX:
                del self._subjects[next(iter(self._subjects))]
            self._subjects[key] = _Subject(now + GAP_S, GAP_S)
            return text
        if now < subject.next_at or kind in ONCE:
            subject.passed += 1
            return ""
        passed, subject.passed = subject.passed, 0
        subject.gap_s = min(2 * subject.gap_s, GAP_MAX_S)
        subject.next_at = now + subject.gap_s
        lines = "line" if passed == 1 else "lines"
        return f"{text} ({passed} more such {lines} in the event log)" if passed else text

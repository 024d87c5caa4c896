"""Parses fault scripts: which fault strikes inside which worker, and when; one fault a line.

    # who          when             what
    worker 3       steps 10-200     slow 2.0
    worker 1,2     from step 50     slow 5.0 at random 0.1
    worker 0       step 7           stall 2.5
    any worker     step 30          flip parameter

Steps are numbered as by `job.steps`. ACTIONS lists the faults.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from holdfast.engine.core.errors import UserError

ACTIONS = {
    "slow FACTOR": "every task takes FACTOR times as long",
    "slow FACTOR at random P": "the same, for a share P of the tasks",
    "stall SECONDS": "one pause in the first task of the step",
    "slow link BYTES": "it sends at most this many bytes a second",
    "flip parameter|optimizer|gradient|received": "one bit of it, once in the step",
    "poison nan|inf": "one such number in a gradient, once in the step",
    "overflow": "all of every gradient is infinite, as when mixed precision begins",
    "multiply wrongly": "one element of every gradient is a little off",
    "noise SHARE": "every number of a gradient is off by about that share, otherwise each time",
    "kill": "SIGKILL to itself in the first task of the step",
    "freeze": "SIGSTOP to itself in the first task of the step",
}
SHOWN_MAX = 100  # characters of a line
_INT = r"[0-9]{1,15}"
_WHO = rf"(?:worker (?P<workers>{_INT}(?:,{_INT})*)|any worker)"
_WHEN = (
    rf"(?:step (?P<only>{_INT})|steps (?P<first>{_INT})-(?P<last>{_INT})|"
    rf"from step (?P<begin>{_INT})|always)"
)
_LINE = re.compile(rf"{_WHO}\s+{_WHEN}\s+(?P<what>\S.*)")
_NUMBER = rf"({_INT}(?:\.[0-9]{{1,30}})?(?:e-?[0-9]{{1,2}})?)"
_WHAT = {
    "slow": re.compile(rf"slow {_NUMBER}(?: at random {_NUMBER})?"),
    "stall": re.compile(rf"stall {_NUMBER}"),
    "link": re.compile(rf"slow link {_NUMBER}"),
    "flip": re.compile(r"flip (parameter|optimizer|gradient|received)"),
    "poison": re.compile(r"poison (nan|inf)"),
    "overflow": re.compile(r"overflow"),
    "multiply": re.compile(r"multiply wrongly"),
    "noise": re.compile(rf"noise {_NUMBER}"),
    "kill": re.compile(r"kill"),
    "freeze": re.compile(r"freeze"),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Disturbance:
    """Describes one line. `workers`: empty for all. `first` to `last`: steps, both included."""

    workers: tuple[int, ...]
    first: int
    last: int
    action: str  # a key of _WHAT
    number: float = 0.0  # factor, seconds, bytes a second, or share
    chance: float = 1.0
    target: str = ""

    def strikes(self, worker: int, step: int) -> bool:
        return worker in (self.workers or (worker,)) and self.first <= step <= self.last


def parse(text: str, name: str) -> tuple[Disturbance, ...]:
    """Parse a script; UserError names the script and the line that makes no sense."""
    found = []
    for number, line in enumerate(text.splitlines(), start=1):
        words = " ".join(line.partition("#")[0].split())
        if words:
            disturbance = _parse_line(words)
            if disturbance is None:
                known = "; ".join(ACTIONS)
                raise UserError(
                    f"{name}, line {number}: {words[:SHOWN_MAX]!r} is not `worker N step N "
                    f"ACTION`, with an ACTION out of: {known}"
                )
            found.append(disturbance)
    return tuple(found)


def _parse_line(words: str) -> Disturbance | None:
    line = _LINE.fullmatch(words)
    if line is None:
        return None
    matches = ((action, pattern.fullmatch(line["what"])) for action, pattern in _WHAT.items())
    action, what = next((m for m in matches if m[1] is not None), ("", None))
    if what is None:
        return None
    first = int(line["only"] or line["first"] or line["begin"] or 0)
    last = int(line["only"] or line["last"] or 1 << 60)
    values = what.groups()
    numeric = action in ("slow", "stall", "link", "noise")
    return Disturbance(
        workers=tuple(map(int, line["workers"].split(","))) if line["workers"] else (),
        first=first,
        last=last,
        action=action,
        number=float(values[0]) if numeric else 0.0,
        chance=float(values[1]) if action == "slow" and values[1] else 1.0,
        target=values[0] if values and not numeric else "",
    )

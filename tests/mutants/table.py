"""Sums up the outcomes of a sample: how many bugs were caught, by what, and a table of the rest."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from mutants.planting import Mutant

Found = tuple[Mutant, dict[str, Any] | None, str | None]  # mutant, outcome, why it is equivalent


@dataclass(frozen=True, slots=True)
class Report:
    """Describes a sample's results."""

    seed: int
    caught: tuple[Found, ...]
    survived: tuple[Found, ...]
    equivalent: tuple[Found, ...]

    @classmethod
    def of(cls, seed: int, found: Sequence[Found]) -> Report:
        """Sort a sample by the outcome of each mutant."""
        equivalent = [each for each in found if each[2] is not None]
        real = [each for each in found if each[2] is None and each[1] is not None]
        caught = [each for each in real if each[1] and each[1]["by"]]
        survived = [each for each in real if each not in caught]
        return cls(seed, tuple(caught), tuple(survived), tuple(equivalent))

    @property
    def share(self) -> float:
        """Return the share of the mutants that change anything and were caught."""
        real = len(self.caught) + len(self.survived)
        return len(self.caught) / real if real else 1.0

    def record(self) -> dict[str, Any]:
        """Return everything, for programs."""

        def row(found: Found) -> dict[str, Any]:
            mutant, outcome, reason = found
            return asdict(mutant) | {"outcome": outcome, "reason": reason}

        return {
            "seed": self.seed,
            "share": self.share,
            "caught": [row(each) for each in self.caught],
            "survived": [row(each) for each in self.survived],
            "equivalent": [row(each) for each in self.equivalent],
        }

    def markdown(self) -> str:
        """Return the summary and the table of survivors, for people."""
        by = Counter(outcome["by"] for _, outcome, _ in self.caught if outcome)
        stages = ", ".join(f"{count} by {name}" for name, count in by.most_common())
        real = len(self.caught) + len(self.survived)
        lines = [
            f"Seed {self.seed}: {len(self.caught)} of {real} caught ({self.share:.1%}): {stages}. "
            f"{len(self.equivalent)} more are equivalent.",
            "",
            "| where | rule | change | simulated traces |",
            "|---|---|---|---|",
        ]
        for mutant, outcome, _ in self.survived:
            same = (outcome or {}).get("same_traces")
            traces = {True: "all the same", False: "differ", None: "-"}[same]
            where = f"`{mutant.path.removeprefix('src/holdfast/')}` {mutant.function}"
            change = f"`{_cell(mutant.before)}` -> `{_cell(mutant.after)}`"
            lines.append(f"| {where} | {mutant.rule} | {change} | {traces} |")
        return "\n".join(lines)


def _cell(text: str) -> str:
    return text.replace("|", "\\|")

"""Reads the list of mutants whose change no observer can notice, with the reasons."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import msgspec

from mutants.planting import Mutant

FILE = "tests/mutants/equivalent.toml"


class Equivalent(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """Names a mutant by its file, function and text, which outlive the numbers of lines."""

    file: str
    function: str
    before: str
    after: str
    reason: str


class _File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    mutant: list[Equivalent] = []


@dataclass(frozen=True, slots=True)
class Equivalents:
    """Finds the reason why a mutant is equivalent."""

    known: dict[tuple[str, str, str, str], str]

    def reason(self, mutant: Mutant) -> str | None:
        """Return the reason; None if the mutant is not known to be equivalent."""
        key = (mutant.path, mutant.function, mutant.before, mutant.after)
        return self.known.get(key)


def read(file: Path) -> Equivalents:
    """Read the list."""
    found = msgspec.toml.decode(file.read_bytes(), type=_File).mutant
    return Equivalents({(e.file, e.function, e.before, e.after): e.reason for e in found})

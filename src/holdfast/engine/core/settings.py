"""Describes each setting once: a dataclass field carries its own help, flag and limits.

The command line, the configuration file and every check are generated from these descriptions, so
that each fact about a setting is written once. Knows no job: core/job_spec.py has the settings
themselves.
"""

from __future__ import annotations

import math
import types
import typing
from collections.abc import Iterator
from dataclasses import dataclass, field, fields, is_dataclass
from typing import TypeVar

from holdfast.engine.core.errors import require

AUTO = "auto"  # how a person writes None: Holdfast chooses the value
INTEGER_MAX = 2**63 - 1  # every file format and the wire can hold it
METADATA = "setting"

T = TypeVar("T")


@dataclass(frozen=True, slots=True, kw_only=True)
class Description:
    """Describes a setting as its author does; a limit of None is no limit."""

    help: str
    flag: str = ""
    metavar: str | tuple[str, ...] | None = None
    least: float | None = None
    most: float | None = None
    above: float | None = None
    below: float | None = None

    def limits(self) -> str:
        """Return the allowed values in words, to follow "must be"; infinite ones never are."""
        if self.least is not None and self.most is not None:
            return f"from {self.least:g} to {self.most:g}"
        if self.least is not None and self.below is not None:
            return f"from {self.least:g} to below {self.below:g}"
        if self.above is not None:
            return f"greater than {self.above:g}"
        return f"at least {self.least:g}" if self.least is not None else "a finite number"

    def allows(self, number: float) -> bool:
        """Return whether one number is within the limits; infinities and NaN never are."""
        return (
            math.isfinite(number)
            and (self.least is None or number >= self.least)
            and (self.most is None or number <= self.most)
            and (self.above is None or number > self.above)
            and (self.below is None or number < self.below)
        )


def setting(
    default: T,
    help: str,  # noqa: A002 - as argparse calls it
    *,
    flag: str = "",
    metavar: str | tuple[str, ...] | None = None,
    least: float | None = None,
    most: float | None = None,
    above: float | None = None,
    below: float | None = None,
) -> T:
    """Declare a dataclass field as a setting, with its default and its line of help.

    The flag is `--` and the field's name unless `flag` gives another. A field of type `X | None`
    may be left to Holdfast: None is written as `auto`.
    """
    description = Description(
        help=help, flag=flag, metavar=metavar, least=least, most=most, above=above, below=below
    )
    return field(default=default, metadata={METADATA: description})


@dataclass(frozen=True, slots=True, kw_only=True)
class Setting:
    """Describes one setting of a document: its place, its type, its default and its help.

    `base` is int, float, bool or str. `auto`: the value may be None. `size` is 0 for a single
    value, else the number of values of a tuple.
    """

    section: str
    name: str
    base: type
    auto: bool
    size: int
    default: object
    about: Description

    @property
    def key(self) -> str:
        """Return the setting's name in configurations, for example `checkpoints.every`."""
        return f"{self.section}.{self.name}"

    @property
    def flag(self) -> str:
        """Return the setting's name on the command line, for example `--save-every`."""
        return self.about.flag or "--" + self.name.replace("_", "-")

    def value_in(self, document: object) -> object:
        """Return the setting's value in a document."""
        return getattr(getattr(document, self.section), self.name)

    def complaint(self, value: object) -> str:
        """Return the fault of a value of the right type, to follow its name; empty: none."""
        if value is None or isinstance(value, bool):
            return ""
        if isinstance(value, str):
            return text_complaint(value)
        for number in value if isinstance(value, tuple) else (value,):
            if isinstance(number, int) and abs(number) > INTEGER_MAX:
                return f"must be at most {INTEGER_MAX}"
            if not self.about.allows(number):
                auto = f", or {AUTO}" if self.auto else ""
                limits = self.about.limits()
                if not math.isfinite(number) and "finite" not in limits:
                    limits = f"a finite number, {limits}"
                return f"must be {limits}{auto}"
        return ""


def text_complaint(text: str) -> str:
    """Return the reason why a process cannot get a text, to follow its name; empty: it can."""
    if "\0" in text:
        return "must not contain a NUL character"
    if any(0xD800 <= ord(character) < 0xE000 for character in text):
        return "must be valid UTF-8 text"
    return ""


def sections_of(document: type) -> dict[str, type]:
    """Find the sections of a document type: its fields that are dataclasses, by their names."""
    hints: dict[str, type] = typing.get_type_hints(document)
    return {name: kind for name, kind in hints.items() if is_dataclass(kind)}


def settings_of(document: type) -> Iterator[Setting]:
    """Find every setting of a document type, section by section, in the order of its fields."""
    for name, kind in sections_of(document).items():
        hints = typing.get_type_hints(kind)
        for each in fields(kind):
            if isinstance(about := each.metadata.get(METADATA), Description):
                base, auto, size = _take_apart(hints[each.name])
                yield Setting(
                    section=name,
                    name=each.name,
                    base=base,
                    auto=auto,
                    size=size,
                    default=each.default,
                    about=about,
                )


def _take_apart(hint: object) -> tuple[type, bool, int]:
    """Return the type of one value, whether None is allowed too, and the length of a tuple."""
    parts = typing.get_args(hint)
    if isinstance(hint, types.UnionType):
        (base,) = (part for part in parts if part is not type(None))
        return base, True, 0
    size = len(parts)
    base = parts[0] if parts else hint
    require(base in (int, float, bool, str), f"a setting cannot be a {hint}")
    return typing.cast(type, base), False, size


def format_value(value: object) -> str:
    """Format a value as a person types it on the command line."""
    if value is None:
        return AUTO
    if isinstance(value, tuple):
        return " ".join(format_value(each) for each in value)
    return f"{value:g}" if isinstance(value, float) else str(value)

"""Generates the options of `holdfast run` from the job's settings, one group for each section.

Knows no single setting: what the options are called and say is in core/job_spec.py.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any

from holdfast.engine.core.job_spec import SECTIONS, SETTINGS
from holdfast.engine.core.settings import AUTO, Setting, format_value


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for every setting; one that is not given leaves no trace in the namespace."""
    for section, kind in SECTIONS.items():
        group = parser.add_argument_group(section.replace("_", " "), kind.__doc__)
        for each in SETTINGS.values():
            if each.section == section:
                _add(group, each)


def given_settings(options: argparse.Namespace) -> dict[str, object]:
    """Return the settings that the command line gave, by their keys."""
    given = {key: value for key, value in vars(options).items() if key in SETTINGS}
    return {key: tuple(v) if isinstance(v, list) else v for key, v in given.items()}


def _add(group: argparse._ArgumentGroup, setting: Setting) -> None:
    how: dict[str, Any] = {"dest": setting.key, "default": argparse.SUPPRESS}
    how["help"] = _help(setting)
    if setting.base is bool:
        no = setting.flag.replace("--", "--no-", 1)
        group.add_argument(setting.flag, no, action=_Switch, **how)
        return
    how["metavar"] = setting.about.metavar
    how["type"] = _or_auto(setting.base) if setting.auto else setting.base
    if setting.size:
        how["nargs"] = setting.size
    group.add_argument(setting.flag, **how)


def _help(setting: Setting) -> str:
    default = setting.default
    if isinstance(default, bool):
        default = "yes" if default else "no"
    shows = default != ""
    return setting.about.help + (f" (default: {format_value(default)})" if shows else "")


def _or_auto(base: Callable[[str], object]) -> Callable[[str], object]:
    def read(text: str) -> object:
        return None if text == AUTO else base(text)

    read.__name__ = f"{getattr(base, '__name__', '')} or {AUTO}"  # for argparse's message
    return read


class _Switch(argparse.Action):
    """Sets a yes-or-no setting: `--x` to yes, `--no-x` to no."""

    def __init__(self, option_strings: Sequence[str], dest: str, **how: Any) -> None:
        super().__init__(option_strings, dest, nargs=0, **how)

    def __call__(
        self,
        parser: argparse.ArgumentParser,
        namespace: argparse.Namespace,
        values: object,
        option_string: str | None = None,
    ) -> None:
        setattr(namespace, self.dest, not (option_string or "").startswith("--no-"))

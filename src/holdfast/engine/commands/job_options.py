"""Makes a job from its settings: options of `holdfast run`, and a configuration file (TOML).

Both follow the settings of core/job_spec.py, and know no single one: there is an option for each
setting, in one group for each section, and a table in the file for each section. A written file
reads back as the same job.
"""

from __future__ import annotations

import argparse
import difflib
import json
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.job_spec import SECTIONS, SETTINGS, JobSpec
from holdfast.engine.core.settings import AUTO, Setting, format_value
from holdfast.engine.state.store.regular_files import read_named


def add_settings(parser: argparse.ArgumentParser) -> None:
    """Add an option for every setting; an absent option leaves no trace in the namespace."""
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


HEAD = """\
A job of Holdfast: holdfast run --config FILE
Options on the command line win over this file. `auto` leaves a choice to Holdfast."""
COLUMNS = 98
KINDS = {
    int: "a whole number",
    float: "a number",
    bool: "true or false",
    str: 'a text in quotes, like "this"',
}


@dataclass(frozen=True, slots=True, kw_only=True)
class JobConfig:
    """Describes a configuration file; `settings` are its values by their keys."""

    path: Path | None = None
    script: str = ""
    args: tuple[str, ...] = ()
    settings: Mapping[str, object] = field(default_factory=dict)


def read_config(path: Path) -> JobConfig:
    """Read a file. UserError names the file, the key, the value and what to do."""
    try:
        found = msgspec.toml.decode(read_named(path))
    except OSError as error:
        raise UserError(f"--config {path} cannot be read: {error.strerror}") from None
    except (msgspec.MsgspecError, ValueError, RecursionError) as error:
        raise UserError(f"--config {path} is not TOML: {error}") from None
    script, args = found.pop("script", ""), found.pop("args", [])
    if not isinstance(script, str):
        raise UserError(f"{path}: script = {_format_value(script)} must be {KINDS[str]}")
    if not isinstance(args, list) or not all(isinstance(each, str) for each in args):
        raise UserError(
            f'{path}: args = {_format_value(args)} must be a list of texts, like ["a", "b"]'
        )
    settings: dict[str, object] = {}
    for section, table in found.items():
        if section not in SECTIONS:
            names = ["script", "args", *(f"[{name}]" for name in SECTIONS)]
            raise UserError(f"{path}: {_describe_unknown(section, table, names, SECTIONS)}")
        if not isinstance(table, dict):
            raise UserError(
                f"{path}: {section} = {_format_value(table)} must be a table: write [{section}] "
                "and its settings below it"
            )
        known = [each.name for each in SETTINGS.values() if each.section == section]
        for name, value in table.items():
            key = f"{section}.{name}"
            if name not in known:
                raise UserError(f"{path}: {_describe_unknown(key, value, known, known)}")
            settings[key] = _value(path, SETTINGS[key], value)
    return JobConfig(path=path, script=script, args=tuple(args), settings=settings)


def _describe_unknown(
    key: str, value: object, names: list[str], near: Mapping[str, type] | list[str]
) -> str:
    close = difflib.get_close_matches(key.rpartition(".")[2], list(near), 1)
    shown = f"[{key}]" if isinstance(value, dict) else f"{key} = {_format_value(value)}"
    advice = f"did you mean {close[0]}?" if close else f"use one of {', '.join(names)}"
    return f"{shown} is not a setting of a job: {advice}"


def _value(path: Path, setting: Setting, value: object) -> object:
    """Return the value as the job holds it. UserError if it is of the wrong type."""
    if setting.auto and value == AUTO:
        return None
    if setting.size and isinstance(value, list) and len(value) == setting.size:
        parts = [_scalar(setting, each) for each in value]
        if None not in parts:
            return tuple(parts)
    elif not setting.size and (scalar := _scalar(setting, value)) is not None:
        return scalar
    kind = KINDS[setting.base]
    if setting.size:
        kind = f"a list of {setting.size} values, each {kind}"
    auto = f', or "{AUTO}"' if setting.auto else ""
    raise UserError(f"{path}: {setting.key} = {_format_value(value)} must be {kind}{auto}")


def _scalar(setting: Setting, value: object) -> object | None:
    """Return one value of the setting's type, or None. A whole number is a number, too."""
    if setting.base is float and type(value) is int:
        try:
            return float(value)
        except OverflowError:
            return None
    return value if type(value) is setting.base else None


def write_config(spec: JobSpec) -> str:
    """Write the complete configuration of a job, with the help of every setting as a comment."""
    return "\n".join(_lines(spec)) + "\n"


def _lines(spec: JobSpec) -> Iterator[str]:
    for line in HEAD.splitlines():
        yield f"# {line}"
    yield from ("", "# The training script and its arguments.")
    yield f"script = {_format_value(spec.script)}" if spec.script else '# script = "train.py"'
    yield f"args = {_format_value(list(spec.args))}"
    for section, kind in SECTIONS.items():
        yield from ("", f"# {kind.__doc__}", f"[{section}]")
        for each in SETTINGS.values():
            if each.section == section:
                default = _format_value(each.default)
                yield ""
                yield from _comment(f"{each.about.help} (default: {default})")
                yield f"{each.name} = {_format_value(each.value_in(spec))}"


def _comment(text: str) -> list[str]:
    return textwrap.wrap(
        text,
        COLUMNS,
        initial_indent="# ",
        subsequent_indent="# ",
        break_long_words=False,
        break_on_hyphens=False,
    )


def _format_value(value: object) -> str:
    """Format a value as TOML writes it."""
    if value is None:
        return f'"{AUTO}"'
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, str):  # the escapes of JSON, and one more of TOML
        return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")
    if isinstance(value, (list, tuple)):
        return f"[{', '.join(_format_value(each) for each in value)}]"
    return repr(value) if isinstance(value, (int, float)) else str(value)

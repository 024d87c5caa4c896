"""Draw docs/options.md from the job's settings: `python docs/draw_options.py`.

Names, defaults, limits and help are those of engine/core/job_spec.py, so nothing about an option is
written twice. tests/house/test_docs.py fails while the page is not up to date.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from holdfast.engine.core.job_spec import SECTIONS, SETTINGS
from holdfast.engine.core.settings import AUTO, Setting, format_value

PAGE = Path(__file__).with_name("options.md")
HEAD = """\
# Options of a job

Every setting of a job, with its option for `holdfast run` and its key for the file of `--config`.
`holdfast run --write-config job.toml --nproc 4 train.py` writes such a file, with comments. Options
on the command line win over the file. Paths, ports and certificates belong to one launch and not to
the job: `holdfast run --help` lists these too.

`auto` leaves a value to Holdfast. A yes-or-no option `--x` has a counterpart `--no-x`.

<!-- drawn by docs/draw_options.py -->
"""


def draw_page() -> str:
    """Return the page as it should be."""
    return HEAD + "".join(draw_sections())


def draw_sections() -> Iterator[str]:
    """Yield a heading and a table for each section of the job document."""
    for section, kind in SECTIONS.items():
        rows = [each for each in SETTINGS.values() if each.section == section]
        yield f"\n## {section.replace('_', ' ')}\n\n{(kind.__doc__ or '').strip()}\n\n"
        yield f"Section `[{section}]` of the configuration file.\n\n"
        yield "| option | key | default | allowed | meaning |\n|---|---|---|---|---|\n"
        for each in rows:
            default = "empty" if each.default == "" else f"`{describe_default(each)}`"
            yield (
                f"| `{escape(draw_flag(each))}` | `{each.name}` | {default} "
                f"| {describe_limits(each)} | {escape(each.about.help)} |\n"
            )


def draw_flag(setting: Setting) -> str:
    """Return an option as a person types it."""
    metavar = setting.about.metavar
    if setting.base is bool or metavar is None:
        return setting.flag
    return " ".join([setting.flag, *([metavar] if isinstance(metavar, str) else metavar)])


def describe_default(setting: Setting) -> str:
    """Return the default as a person types it."""
    if isinstance(setting.default, bool):
        return "yes" if setting.default else "no"
    return format_value(setting.default)


def describe_limits(setting: Setting) -> str:
    """Return the allowed values in words."""
    if setting.base is bool:
        return "yes, no"
    if setting.base is str:
        return "text"
    kind = "integer" if setting.base is int else "number"
    limits = setting.about.limits()
    limits = "" if limits == "a finite number" else f" {limits}"
    return kind + limits + (f", or `{AUTO}`" if setting.auto else "")


def escape(text: str) -> str:
    """Escape the bars, which would end a cell of a table."""
    return text.replace("|", "\\|")


if __name__ == "__main__":
    PAGE.write_text(draw_page())

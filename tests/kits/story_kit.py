"""Reads stories: scenarios of the core's machines as text, commands with effects below.

A story file begins with two lines that describe it. Then come its parts, with a blank line between
them: remarks (`# ...`), one command or more, `----`, and the effects on the machines.
story_commands.py and story_faults.py define the commands; story_cluster.py is the cluster.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from story_cluster import Cluster, Machines, StoryError
from story_commands import begin
from story_faults import ALL_COMMANDS
from story_text import merged

SEPARATOR = "----"
NOTHING = "(nothing)"
INTRODUCTION_LINES = 2


@dataclass(frozen=True, kw_only=True)
class Part:
    """Commands, and their effects. `line`: the first command's line in its file."""

    line: int
    remarks: tuple[str, ...] = ()
    commands: tuple[str, ...] = ()
    output: tuple[str, ...] = ()


@dataclass(frozen=True, kw_only=True)
class Story:
    """A story as it is written."""

    name: str
    introduction: tuple[str, ...]
    parts: tuple[Part, ...] = field(default=())

    def text(self) -> str:
        """Write it as its file has it."""
        paragraphs = ["\n".join(self.introduction)]
        for part in self.parts:
            paragraphs.append("\n".join([*part.remarks, *part.commands, SEPARATOR, *part.output]))
        return "\n\n".join(paragraphs) + "\n"


def read(path: Path) -> Story:
    """Parse a story's file."""
    return parse(path.read_text(), path.name)


def parse(text: str, name: str) -> Story:
    """Parse a story; text that is none fails with file and line."""
    paragraphs = list(_paragraphs(text))
    if not paragraphs or len(paragraphs[0][1]) != INTRODUCTION_LINES:
        raise StoryError(f"{name}:1: a story begins with two lines that say what it shows")
    parts = [_part(lines, line, name) for line, lines in paragraphs[1:]]
    if not parts:
        raise StoryError(f"{name}:1: nothing happens in this story")
    return Story(name=name, introduction=tuple(paragraphs[0][1]), parts=tuple(parts))


def _paragraphs(text: str) -> Iterator[tuple[int, list[str]]]:
    found: list[str] = []
    for number, line in enumerate([*text.splitlines(), ""], 1):
        if line.strip():
            found.append(line.rstrip())
        elif found:
            yield number - len(found), found
            found = []


def _part(lines: Sequence[str], line: int, name: str) -> Part:
    remarks = tuple(each for each in lines if each.startswith("#"))
    rest = lines[len(remarks) :]
    if SEPARATOR not in rest or rest[0] == SEPARATOR or tuple(lines[: len(remarks)]) != remarks:
        raise StoryError(f"{name}:{line}: a part is remarks, commands, {SEPARATOR} and effects")
    at = rest.index(SEPARATOR)
    return Part(
        line=line + len(remarks),
        remarks=remarks,
        commands=tuple(rest[:at]),
        output=tuple(rest[at + 1 :]),
    )


def told(story: Story, machines: Machines | None = None) -> Story:
    """Return the story as the machines act it out."""
    cluster: Cluster | None = None
    parts: list[Part] = []
    for part in story.parts:
        output: list[str] = []
        for number, command in enumerate(part.commands, part.line):
            try:
                if cluster is None:
                    cluster = begin(command, machines or Machines())
                else:
                    _carry_out(cluster, command)
            except Exception as error:
                raise StoryError(f"{story.name}:{number}: {command}: {error}") from error
            blocks, cluster.blocks = cluster.blocks, []
            output += merged(blocks)
        parts.append(replace(part, output=tuple(output) or (NOTHING,)))
    if all(part.output == (NOTHING,) for part in parts):
        raise StoryError(f"{story.name}:{story.parts[0].line}: no machine does anything")
    return replace(story, parts=tuple(parts))


def _carry_out(cluster: Cluster, command: str) -> None:
    for pattern, carry_out in ALL_COMMANDS.items():
        match = re.fullmatch(pattern, command)
        if match is not None:
            carry_out(cluster, **match.groupdict())
            return
    raise StoryError("unknown command")


def difference(story: Story, other: Story) -> str:
    """Return the place where two versions of a story first differ, for people; empty if nowhere."""
    for mine, theirs in zip(story.parts, other.parts, strict=True):
        if mine.output != theirs.output:
            where = f"{story.name}:{mine.line}: {'; '.join(mine.commands)}"
            rows = difflib.ndiff(mine.output, theirs.output)
            return "\n".join([where, *(row for row in rows if not row.startswith("?"))])
    return "" if story.text() == other.text() else f"{story.name}: not as it would be written"

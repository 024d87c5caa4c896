"""The tutorial's files and commands do what the page says."""

from __future__ import annotations

import ast
import re
import shlex
from pathlib import Path

import pytest

import tutorial_page
from holdfast.engine.plugins import list_commands
from tutorial_page import ROOT, Reader, blocks, blur, lacking

FILES = ROOT / "examples" / "tutorial"


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_tutorial_prints_what_it_shows(tmp_path: Path) -> None:
    reader = Reader(tmp_path)
    reader.follow()
    digests = [line for line in reader.printed if line.startswith("model ")]
    plain, *jobs = digests
    assert len(jobs) == 3  # on one worker; on four, one of them killed; resumed
    assert set(jobs) == {jobs[0]}
    assert plain != jobs[0]  # its batches have another order
    text = "\n".join(reader.printed)
    assert "2016 steps, 128000 samples" in text
    assert "the runs do not differ in their 2016 common steps" in text


def test_the_files_of_the_tutorial_are_kept_as_they_are_shown() -> None:
    shown = {each.title: each.text for each in blocks() if each.kind == "python"}
    assert set(shown) == {path.name for path in FILES.glob("*.py")}
    for name, text in shown.items():
        ast.parse(text)
        assert (FILES / name).read_text() == text, f"{name} is another one on the page"


def test_the_commands_of_the_tutorial_exist() -> None:
    commands = [c for each in blocks() if each.kind == "console" for c, _ in each.commands()]
    assert len(commands) > 10
    for command in commands:
        first, *rest = shlex.split(command)
        assert first in ("python", "holdfast", "kill"), command
        if first == "holdfast":
            assert rest[0] in list_commands(), command


def test_a_line_that_was_not_printed_is_found() -> None:
    printed = ["step 7 after 0.3 s", "model 0123456789abcdef", "2 tasks were lost"]
    shown = ["step 70 after 20 ms", "...", "1 task was lost"]
    assert lacking(shown, printed) == ""
    assert lacking(shown[::-1], printed) == shown[0]
    assert lacking(["step 70 before 20 ms"], printed) == "step 70 before 20 ms"
    assert lacking(["model " + "f" * 16], printed) == ""
    assert lacking(["model none"], printed) == "model none"
    assert blur("a  12 b 3.4 s") == "a N b N s"


def test_every_block_of_the_tutorial_is_run() -> None:
    text = tutorial_page.PAGE.read_text()
    assert len(blocks()) == len(re.findall(r"^```\w", text, re.MULTILINE))
    assert {each.kind for each in blocks()} == {"python", "console", "text"}

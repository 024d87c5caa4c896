"""The errors that docs/errors.md explains are sentences of the source, word for word."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

import pytest

from places import ROOT

PAGE = ROOT / "docs" / "errors.md"
HOLE = "\0"  # a value in a text of the source
FIXED_MIN = 12  # characters of a sentence that are the same in each error
SENTENCE = re.compile(r"^\| `([^`]+)` \|", re.MULTILINE)


def texts_of(source: str) -> Iterator[str]:
    """Yield each text of a module, with a hole for each value."""
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.JoinedStr):
            parts = (p.value if isinstance(p, ast.Constant) else HOLE for p in node.values)
            yield "".join(map(str, parts))
        elif isinstance(node, ast.Constant) and isinstance(node.value, str):
            yield re.sub(r"\{\w*\}", HOLE, node.value)


def pattern_of(sentence: str) -> re.Pattern[str]:
    """Return the pattern of a quoted sentence: `...` is anything."""
    inner = sentence.removeprefix("...").removesuffix("...")
    return re.compile(".*?".join(map(re.escape, inner.split("..."))), re.DOTALL)


def quoted(page: str) -> list[str]:
    """Return the quoted sentences of the tables that have a column of sentences."""
    tables = page.split("\n| sentence |")[1:]
    return [each for table in tables for each in SENTENCE.findall(table.partition("\n\n")[0])]


@pytest.fixture(scope="module")
def texts() -> list[str]:
    sources = sorted((ROOT / "src").rglob("*.py"))
    found = (text for path in sources for text in texts_of(path.read_text()))
    return [text for text in found if len(text) >= FIXED_MIN]


@pytest.mark.parametrize("sentence", quoted(PAGE.read_text()))
def test_a_quoted_error_is_in_the_source(sentence: str, texts: list[str]) -> None:
    fixed = sentence.replace("...", "")
    assert len(fixed) >= FIXED_MIN, "so short a sentence is found anywhere"
    pattern = pattern_of(sentence)
    assert any(pattern.search(text) for text in texts), "no text of src/ has these words"


def test_each_row_of_the_page_is_looked_up() -> None:
    page = PAGE.read_text()
    tables = page.split("\n| sentence |")[1:]
    rows = sum(len(table.partition("\n\n")[0].splitlines()) - 2 for table in tables)
    assert len(quoted(page)) == rows > 30


def test_a_sentence_that_is_not_there_is_found() -> None:
    page = "\n| sentence | x |\n|---|---|\n| `a ... is gone` | y |\n| `not here` | z |\n\nend"
    assert quoted(page) == ["a ... is gone", "not here"]
    source = 'f"a {name} " "is gone", "b {} of {name}"'
    assert {f"a {HOLE} is gone", f"b {HOLE} of {HOLE}"} <= set(texts_of(source))
    assert pattern_of("a ... is gone").search(f"a {HOLE} is gone")
    assert not pattern_of("a ... is gone").search(f"a {HOLE} was gone")

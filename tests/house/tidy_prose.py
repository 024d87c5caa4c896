"""Counts the phrases of our own dialect, for the rule plain-prose.

    python tests/house/tidy_prose.py            # the files with the most, and where
    python tests/house/tidy_prose.py FILE...    # every phrase in these files
    python tests/house/tidy_prose.py --lower    # write the counts that have fallen to the baseline

Readers of any origin stumble over relatives without a noun ("what is kept"), inversions and
half-sentences that only the name before them completes. A file may have PER_1000_WORDS of these
phrases. Files that had more when the rule was made are in the baseline, and may only get better.
"""

from __future__ import annotations

import argparse
import ast
import functools
import io
import json
import math
import re
import sys
import tokenize
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import tidy_docstrings

ROOT = Path(__file__).resolve().parents[2]
BASELINE = Path(__file__).with_name("prose_baseline.json")
CODE_FOLDERS = ("src", "tests", "examples", "benchmarks")
PER_1000_WORDS = 2
WORST = 20  # files that the command shows

BE = "is|are|was|were|be|been|being"
HAVE = "has|have|had"
DO = "do|does|did"
MODAL = "can|could|may|might|must|should|will|would"
VERB = f"(?:{BE}|{HAVE}|{DO}|{MODAL})"

# Where a phrase is looked for: in all prose, at the beginning of a docstring, or at the beginning
# of a comment that follows code on its line.
ANYWHERE, DOCSTRING, TRAILING = "prose", "docstring", "trailing comment"


@dataclass(frozen=True, slots=True)
class Phrase:
    """One phrase of the dialect. `better` says how to write it in plain English."""

    where: str
    pattern: re.Pattern[str]
    better: str


def phrase(where: str, pattern: str, better: str) -> Phrase:
    return Phrase(where, re.compile(pattern, re.IGNORECASE), better)


PHRASES = (
    phrase(
        ANYWHERE,
        rf"\bwhat(?:ever)? (?:{VERB}|it|they|he|we|you|one|others|each|every|all|nobody|somebody"
        r"|anybody|nothing|came|comes|goes|went|lies|stands|remains|holds|tells|counts)\b",
        "name the thing: `the files that are kept`, `the state`",
    ),
    phrase(
        ANYWHERE,
        rf"\bwho(?:ever)? (?:{VERB}|waits?|comes?|came|holds?|lacks?|needs?|knows?|says?|wants?"
        r"|takes?|asks?|reads?|writes?|leaves?|left|lives?|dies?|died)\b",
        "name the subject: `the workers that have it`",
    ),
    phrase(
        ANYWHERE,
        r"\b(?:of|to|for|in|on|at|by|from|with) whom\b|\bof which\b",
        "begin another sentence, or say `its`",
    ),
    phrase(ANYWHERE, r"\b(?:so|as) many\b(?! as\b)", "name the number: `n`, `all of them`"),
    phrase(ANYWHERE, r"\banew\b", "`again`"),
    phrase(ANYWHERE, r"\b(?:comes?|came|coming) (?:up )?to\b", "`reaches`, `is`, `becomes`"),
    phrase(
        ANYWHERE,
        r"\b(?:nobody|anybody|somebody|everybody|nothing|anything|all) (?:that|who|which)\b"
        r"|\b(?:those|he|such) (?:who|as)\b",
        "name the kind: `a worker that`, `no file that`",
    ),
    phrase(
        ANYWHERE,
        rf"\b(?:{BE}) to be (?:had|done|told|given|seen|found|made|kept|taken)\b"
        r"|\b(?:not|never|no longer) so\b|\bis that of\b|\bby itself alone\b",
        "say who does what: `the agent must keep it`",
    ),
    phrase(
        ANYWHERE,
        r"\b(?:tells?|told|telling|says?|said|saying|hears?|heard|hearing|speaks?|spoken|spoke)\b",
        "one verb for each act: print, log, post, record, send, receive",
    ),
    phrase(
        ANYWHERE,
        r"\b(?:nobody|somebody|everybody|anybody|others|nothing)\b",
        "name the subject: `no member`, `another worker`, `the other servers`",
    ),
    phrase(ANYWHERE, r"\b(?:that of|those that|one that)\b", "repeat the noun"),
    phrase(
        ANYWHERE,
        r", (?:since|as) (?:it|they|he|we)\b|\b(?:beside|in vain|meanwhile)\b"
        r"|\b(?:go|goes|going|went|gone) on\b",
        "because; next to, as well as; without success; in the meantime; continue",
    ),
    phrase(
        DOCSTRING,
        r"return (?:what|how|where|why|by|who)\b",
        "`Return the reason`, `the number of`, `the time until`",
    ),
    phrase(DOCSTRING, r"(?:have|let)\b", "the verb of the act: `Start`, `Ask the servers for`"),
    phrase(DOCSTRING, r"notes?\b", "`Record ...`"),
    phrase(DOCSTRING, r"holds\b", "`Keeps ...`, `Describes ...`, `Is ...`"),
    phrase(DOCSTRING, r"says?\b", "`Return the text ...`, `Describes ...`"),
    phrase(
        TRAILING,
        rf"(?:that|which|who|whose|whom|of|than|{BE}|{HAVE}|{MODAL}"
        r"|(?:in|from|for|to|on|at|with) (?:which|whom))\b",
        "a whole statement: `bytes used by those pieces`, not `that it takes`",
    ),
)


@dataclass(frozen=True, slots=True)
class Prose:
    """One piece of prose in a file, by its first line."""

    line: int
    where: str
    text: str


@dataclass(frozen=True, slots=True)
class Found:
    """One phrase of the dialect in a file."""

    line: int
    text: str
    better: str


def prose_of_python(source: str, tree: ast.Module) -> Iterator[Prose]:
    """Yield the docstrings and comments; comments on successive lines are one piece."""
    for line, _, text in tidy_docstrings.docstrings(tree):
        yield Prose(line, DOCSTRING, text)
    block, last = [], (-1, -1)
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type != tokenize.COMMENT:
            continue
        text = token.string.lstrip("#").strip()
        line, column = token.start
        if re.match(r"(tidy:|type:|noqa|fmt:|ruff:|-{5,}|!)", text):
            continue
        if token.line[:column].strip():
            yield Prose(line, TRAILING, text)
            continue
        if block and last != (line - 1, column):
            yield Prose(last[0] - len(block) + 1, ANYWHERE, " ".join(block))
            block = []
        block.append(text)
        last = (line, column)
    if block:
        yield Prose(last[0] - len(block) + 1, ANYWHERE, " ".join(block))


def prose_of_markdown(source: str) -> Iterator[Prose]:
    """Yield the paragraphs, without code."""
    lines: list[str] = []
    begin, is_code = 0, False
    for number, line in enumerate([*source.splitlines(), ""], 1):
        if line.startswith("```"):
            is_code = not is_code
            continue
        if is_code or (line.startswith("    ") and not lines):
            continue
        if line.strip():
            begin = begin if lines else number
            lines.append(line.strip())
        elif lines:
            yield Prose(begin, ANYWHERE, " ".join(lines))
            lines = []


def pieces(path: str, source: str) -> list[Prose]:
    """Return the prose of a file of the repository."""
    if path.endswith(".md"):
        return list(prose_of_markdown(source))
    return list(prose_of_python(source, ast.parse(source)))


def words(prose: list[Prose]) -> int:
    """Count the words of some prose."""
    return sum(len(p.text.split()) for p in prose)


def find(prose: list[Prose]) -> list[Found]:
    """Find every phrase of the dialect."""
    found = []
    for piece in prose:
        text = re.sub(r"`[^`]*`", "`...`", " ".join(piece.text.split()))
        for p in PHRASES:
            if p.where == ANYWHERE:
                hits = list(p.pattern.finditer(text))
            else:
                first = p.pattern.match(text) if p.where == piece.where else None
                hits = [first] if first else []
            for hit in hits:
                around = text[max(0, hit.start() - 30) : hit.end() + 30]
                found.append(Found(piece.line, around, p.better))
    return sorted(found, key=lambda f: f.line)


@functools.cache  # two rules look at all files
def examine(path: str, source: str) -> tuple[int, tuple[Found, ...]]:
    """Return the number of words of a file's prose, and every phrase of the dialect in it."""
    prose = pieces(path, source)
    return words(prose), tuple(find(prose))


def allowed(words_count: int) -> int:
    """Return how many phrases a file with this many words may have."""
    return math.ceil(words_count * PER_1000_WORDS / 1000)


def key(path: str) -> str:
    """Return the name of a file in the baseline: modules of the package keep theirs when moved."""
    base = path.rpartition("/")[2]
    return base if path.startswith("src/") and not base.startswith("__") else path


def read_baseline() -> dict[str, int]:
    """Read the counts of the files that had too many phrases when the rule was made."""
    counts: dict[str, int] = json.loads(BASELINE.read_text(encoding="utf-8"))
    return counts


def judge(path: str, source: str, baseline: dict[str, int]) -> str | None:
    """Return why a file breaks the rule, or None."""
    words_count, found = examine(path, source)
    most = allowed(words_count)
    old = baseline.get(key(path))
    if old is not None and len(found) < old:
        return f"has {len(found)} phrases, not {old}: run python tests/house/tidy_prose.py --lower"
    if len(found) <= max(most, old or 0):
        return None
    shown = "; ".join(f"line {f.line}: `{f.text}` ({f.better})" for f in found[:3])
    limit = most if old is None else old
    return f"has {len(found)} phrases of the dialect, more than {limit}, such as {shown}"


def find_loose(baseline: dict[str, int]) -> list[str]:
    """Find the entries of the baseline that belong to no file, or are higher than needed."""
    tight = lower(baseline)
    return [name for name, count in baseline.items() if tight.get(name) != count]


def repository() -> dict[str, str]:
    """Read every file with prose, by its path from the repository's root."""
    paths = [p for f in CODE_FOLDERS for p in (ROOT / f).rglob("*.py") if not p.is_symlink()]
    paths += [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md")]
    return {p.relative_to(ROOT).as_posix(): p.read_text(encoding="utf-8") for p in sorted(paths)}


def lower(baseline: dict[str, int]) -> dict[str, int]:
    """Return the baseline with the counts of today where these are less."""
    counts = {}
    for path, source in repository().items():
        words_count, found = examine(path, source)
        least = min(len(found), baseline.get(key(path), 0))
        if least > allowed(words_count):
            counts[key(path)] = least
    return dict(sorted(counts.items()))


def main(argv: list[str]) -> int:
    """Show the phrases, or lower the baseline."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("files", nargs="*", help="show every phrase in these")
    parser.add_argument("--lower", action="store_true", help="rewrite the baseline")
    options = parser.parse_args(argv)
    if options.lower:
        BASELINE.write_text(json.dumps(lower(read_baseline()), indent=0) + "\n", encoding="utf-8")
        return 0
    for path in options.files:
        source = Path(path).read_text(encoding="utf-8")
        for f in examine(path, source)[1]:
            print(f"{path}:{f.line}: {f.text}  ->  {f.better}")
    if not options.files:
        files = {path: pieces(path, source) for path, source in repository().items()}
        worst = sorted(files, key=lambda path: -len(find(files[path])))[:WORST]
        for path in worst:
            count, total = len(find(files[path])), words(files[path])
            print(f"{count:4d} in {total:5d} words, {1000 * count / total:5.1f} per 1,000  {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

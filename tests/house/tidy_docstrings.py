"""Finds docstrings that do not begin with a whole sentence, for the rule docstring-sentence.

English has no grammar that a few lines could check. The rule catches the marks of riddles: a first
word that leans on something unsaid, a noun phrase without a verb, one or two words.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator

from tidy_sets import Function

# These words at the start show a part of a sentence; the reader must guess the rest.
FRAGMENT_OPENERS = frozenset(
    "After Again Also Although As At Because Before Beyond But By Else For From Here Hers His How "
    "If In Into It Its Like Nobody None Nor Not Nothing Of Often On Once Only Or Perhaps Same See "
    "Since So Still That Their Then There They Though Through To Told Made Under Unless Until Up "
    "What Whatever When Whenever Where Wherever Whether Which Whichever While Who Whoever Whom "
    "Whose Why With Within Without".split()
)
NOUN_OPENERS = frozenset(
    "A All An Another Any Both Each Every Everybody Everything Everyone Most One Several Some "
    "Somebody Something The This These Those Two".split()
)
AUXILIARIES = frozenset(
    "am are be been can cannot could did do does had has have is may might must need needs should "
    "was were will would".split()
)


def docstrings(tree: ast.Module) -> Iterator[tuple[int, str, str]]:
    """Yields line, name and text of every docstring in the file."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Module | ast.ClassDef | Function):
            text = ast.get_docstring(node)
            if text is not None:
                yield node.body[0].lineno, getattr(node, "name", "the module"), text


def riddle(docstring: str, errors: frozenset[str] = frozenset()) -> str | None:
    """Return why a docstring does not begin with a whole sentence, or None if it does.

    `errors` holds the names of exceptions, which are no sentence's first word.
    """
    paragraph = " ".join(docstring.split("\n\n", 1)[0].split())
    match = re.match(r"(.*?[.:?])(\s|$)", paragraph)
    if not match:
        return "its first sentence has no full stop"
    sentence = match[1]
    words = re.findall(r"`[^`]*`|[^\s`]+", sentence)
    first = words[0]
    bare = first.rstrip(".,:;")
    if not re.match(r"[A-Z]|`.*[^:]$", first):
        return "it begins with neither a capital letter nor `code`"
    if len(words) < 3:
        return f"its first sentence has {len(words)} word{'s' * (len(words) > 1)}"
    if bare in FRAGMENT_OPENERS or bare in errors or re.fullmatch(r"\w+(Error|Exception)", bare):
        return f"`{bare}` begins a part of a sentence"
    if re.fullmatch(r"[A-Z]\w+([^e]ed|[^r]ing)", bare):
        return f"`{bare}` is not what a thing does, but what is done to it or meanwhile"
    if bare in NOUN_OPENERS and not AUXILIARIES & {w.strip("`.,:;()") for w in words}:
        return "it names a thing without saying what it does or is"
    return None

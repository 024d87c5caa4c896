"""Escapes what a terminal or a browser would obey in texts of unknown origin.

Names, reasons and messages come from files, peers and cluster managers. Shown as they are, they
could move the cursor, reverse a line or imitate other output.
"""

from __future__ import annotations

import html
import re
from typing import Any

# Control characters but tab and line break, separators of lines, characters that reorder a line,
# and halves of surrogate pairs, which no encoding has.
_OBEYED = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069\ud800-\udfff]")


def escape_controls(text: str) -> str:
    r"""Return the text with the number of each such character in its place, for example \u001b.

    JSON uses the same form, so escaped JSON keeps its meaning.
    """
    return _OBEYED.sub(lambda found: f"\\u{ord(found[0]):04x}", text)


def fit(text: str, encoding: str | None) -> str:
    """Return an escaped text in characters that an encoding has; None: any."""
    known = encoding or "utf-8"
    return escape_controls(text).encode(known, "backslashreplace").decode(known)


def escape_html(text: str) -> str:
    """Return the text as it stands in a page of HTML, between tags or in quotes."""
    return html.escape(escape_controls(text))


def escape_values(value: Any) -> Any:
    """Return a value of JSON in which all texts, and the keys of objects, are escaped."""
    if isinstance(value, str):
        return escape_controls(value)
    if isinstance(value, dict):
        return {escape_values(key): escape_values(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [escape_values(each) for each in value]
    return value

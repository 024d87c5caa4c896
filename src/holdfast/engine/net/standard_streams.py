"""Keeps the standard streams open, and prints on them: here alone texts reach a terminal or a log.

Texts of unknown origin are escaped here, and characters that the stream's encoding lacks. What a
script prints never passes here.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable
from typing import TextIO

from holdfast.engine.core.plain_text import fit


class RareLines:
    """Passes a line on only if it differs from the last line about the same subject.

    `say`: takes the lines. A problem that lasts is thus printed once.
    """

    def __init__(self, say: Callable[[str], object]) -> None:
        self._say = say
        self._last: dict[str, str] = {}  # by subject

    def put(self, line: str, subject: str = "") -> None:
        if self._last.get(subject) != line:
            self._last[subject] = line
            self._say(line)

    def forget(self, subject: str = "") -> None:
        """Record that the last line is not true any more: the same line is news again."""
        self._last.pop(subject, None)


def fill_standard_streams() -> None:
    """Open standard input, output and error where they are closed, for this process and children.

    Otherwise the next sockets and files would get their numbers, and with these all output.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the kernel takes the lowest number
            os.set_inheritable(number, True)
    # Python has made no streams for closed descriptors: print() would use the wrong one, or none.
    sys.stdin = sys.stdin or os.fdopen(0, closefd=False)
    sys.stdout = sys.stdout or os.fdopen(1, "w", closefd=False)
    sys.stderr = sys.stderr or os.fdopen(2, "w", buffering=1, closefd=False)


def print_plain(
    text: object, *, end: str = "\n", file: TextIO | None = None, flush: bool = False
) -> None:
    """Print a text, escaped, to standard output or another stream, in one write. OSError."""
    stream = sys.stdout if file is None else file
    stream.write(fit(str(text), stream.encoding) + end)
    if flush:
        stream.flush()


def print_line(text: object) -> None:
    """Print a line of ours for people on standard error, at once. OSError."""
    print_plain(f"holdfast: {text}", file=sys.stderr, flush=True)

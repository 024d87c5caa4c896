"""Chains the lines of a ledger's file: each has a digest of itself and of all lines before it.

So a line that was changed, left out or put in is found. A forger can compute all
digests again, but the copies of the other workers have to agree with them.
"""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

from holdfast.engine.state.store.regular_files import regular_stream

CHAIN_BEGIN = ""  # before the first line of a file
LINE_BYTES_MAX = 1 << 26
_CHAIN = re.compile(rb',"chain":"([0-9a-f]{16})"\}\n?$')


def add_chain(line: bytes, before: str) -> tuple[bytes, str]:
    """Return a line, a JSON object, with its chain, and the chain. `before`: that of the last."""
    chain = _digest(line, before)
    return b'%s,"chain":"%s"}' % (line[:-1], chain.encode()), chain


class ChainCheck:
    """Checks the chain of one file, line by line."""

    def __init__(self) -> None:
        self._chain = CHAIN_BEGIN

    def find_problem(self, line: bytes) -> str:
        """Return a problem of a line's chain, or "".

        The lines that follow are compared with the chain that this one has.
        """
        found = _CHAIN.search(line)
        if found is None:
            return "has no digest of the lines before it" if self._chain else ""
        chain, before = found[1].decode(), self._chain
        self._chain = chain
        if chain == _digest(line[: found.start()] + b"}", before):
            return ""
        return "was changed, or lines before it were changed, left out or put in"


def find_last_chain(path: Path) -> str:
    """Return the chain at the end of a file, which other lines may follow. OSError."""
    chain = CHAIN_BEGIN
    with regular_stream(path) as file:
        for line in iter(lambda: file.readline(LINE_BYTES_MAX), b""):
            found = _CHAIN.search(line)
            chain = found[1].decode() if found is not None else chain
    return chain


def _digest(line: bytes, before: str) -> str:
    return hashlib.blake2b(before.encode() + line, digest_size=8).hexdigest()

"""Names this release, and recognizes what a newer one has written.

The magic word of a file is its name and one digit, its format. Whatever else a newer release
changes, its files keep the magic word's name and the digest of this release.
"""

from __future__ import annotations

RELEASE = "0.2.0"  # the only place: pyproject.toml reads it from here


def newer_format(data: bytes, magic: bytes) -> str:
    """Return the end of a sentence on a newer format's file, by its magic word; else empty."""
    name, known, found = magic[:-1], magic[-1:], data[len(magic) - 1 : len(magic)]
    if data[: len(name)] != name or not found.isdigit() or int(found) <= int(known):
        return ""
    return describe_newer_writer(int(found), int(known))


def describe_newer_writer(found: int, known: int) -> str:
    """Return the end of a sentence about a file whose format this release does not know."""
    return (
        f"was written by a newer Holdfast (format {found}); this one reads format {known}: upgrade"
    )

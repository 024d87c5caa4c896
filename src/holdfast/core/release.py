"""Names this release, and says what to do about what a newer one has written."""

from __future__ import annotations

RELEASE = "0.1.0"


def newer_format(found: int, known: int) -> str:
    """Return the end of a sentence about a file whose format this release does not know."""
    return (
        f"was written by a newer Holdfast (format {found}); this one reads format {known}: upgrade"
    )

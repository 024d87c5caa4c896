"""The seam to whatever keeps bytes: directories, buckets, volumes.

A storage keeps named objects that never change. An object is there whole or not at all: what a
crash interrupts is not there. Names are like paths, of parts joined by "/". What is read is not
verified here; a storage that can tell that it holds other bytes than it was given says Damaged.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Protocol

from holdfast.core.errors import UserError, WorldError

NAME_MAX = 200
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(/[A-Za-z0-9][A-Za-z0-9.-]*)*")


class Missing(WorldError):
    """There is no such object."""


class Storage(Protocol):
    """All methods may raise WorldError, and may be called from several threads."""

    def put(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Keep an object, durably once this returns; returns its size in bytes.

        A part may be reused by the caller once the next one is asked for. An object that is there
        is replaced, at once. An exception from `parts` passes through, and nothing is kept.
        """
        ...

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` (writable bytes) from `offset` on. Missing; Damaged where it ends earlier."""
        ...

    def size(self, name: str) -> int | None:
        """In bytes; None where there is no such object."""
        ...

    def names(self, prefix: str) -> list[str]:
        """Of all objects whose names begin so, sorted. `prefix` is empty or ends with "/"."""
        ...

    def delete(self, name: str) -> None:
        """Nothing happens where there is no such object."""
        ...


def read_all(storage: Storage, name: str, bytes_max: int) -> bytes:
    """A small object. Missing; Damaged; UserError when it is larger than can be right."""
    size = storage.size(name)
    if size is None:
        raise Missing(f"there is no {name}")
    if size > bytes_max:
        raise UserError(f"{name} has {size} bytes, more than the {bytes_max} that can be right")
    data = bytearray(size)
    storage.read(name, 0, memoryview(data))
    return bytes(data)


def check_name(name: str) -> None:
    """UserError for a name that could mean something else to a file system or a bucket."""
    if not NAME.fullmatch(name) or len(name) > NAME_MAX:
        raise UserError(f"{name!r} is no name for an object: letters, digits, '-', '.' and '/'")

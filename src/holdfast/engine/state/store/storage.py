"""Declares the interface to places that keep bytes: directories, buckets, volumes.

A storage keeps named objects that never change. An object is there whole or not at all: one whose
writing a crash interrupts is not there. Names are like paths, of parts joined by "/". Bytes that
are read are not verified here; a storage that can detect a wrong byte by itself raises Damaged.

Several processes of several machines share a storage. A name that a process makes up names this
process as well, so that another one can find out whether its owner still exists.
"""

from __future__ import annotations

import functools
import os
import re
import socket
from collections.abc import Iterable
from typing import Protocol

from holdfast.engine.core.errors import Damaged, UserError, WorldError

NAME_MAX = 200
NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9.-]*(/[A-Za-z0-9][A-Za-z0-9.-]*)*")


class Missing(WorldError):
    """Reports that there is no such object."""


class Storage(Protocol):
    """Keeps named objects. All methods may raise WorldError, and be called from several threads."""

    def put(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Keep an object, durably once this returns; return its size in bytes.

        A part may be reused by the caller once the next one is asked for. An existing object is
        replaced atomically. An exception from `parts` passes through, and no object is kept.
        """
        ...

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Fill `into` (writable bytes) from `offset` on. Missing; Damaged if it is shorter."""
        ...

    def size(self, name: str) -> int | None:
        """Return the size in bytes; None if there is no such object."""
        ...

    def names(self, prefix: str) -> list[str]:
        """List all objects whose names begin so, sorted. `prefix` is empty or ends with "/"."""
        ...

    def delete(self, name: str) -> None:
        """Delete an object if it is there."""
        ...


def read_all(storage: Storage, name: str, bytes_max: int) -> bytes:
    """Read a small object. Missing; Damaged, also if it is larger than can be right."""
    size = storage.size(name)
    if size is None:
        raise Missing(f"there is no {name}")
    if size > bytes_max:
        raise Damaged(f"{name} has {size} bytes, more than the {bytes_max} that can be right")
    data = bytearray(size)
    storage.read(name, 0, memoryview(data))
    return bytes(data)


def check_name(name: str) -> None:
    """Raise UserError for a name that could mean something else to a file system or a bucket."""
    if not NAME.fullmatch(name) or len(name) > NAME_MAX:
        raise UserError(f"{name!r} is no name for an object: letters, digits, '-', '.' and '/'")


@functools.cache
def name_scope() -> str:
    """Name the scope of process numbers: this boot of this machine, this PID namespace."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{socket.gethostname()} {file.read().strip()} {os.readlink('/proc/self/ns/pid')}"


def has_ended(at_home: bool, pid: int) -> bool:
    """Return whether a process has certainly ended; of one elsewhere that is never known.

    `at_home`: process `pid` belongs to the scope that `name_scope` names.
    """
    return at_home and not os.path.exists(f"/proc/{pid}")

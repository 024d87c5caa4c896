"""Opens the storage that an operator has named, or a fork of it.

A fork continues a job from one checkpoint of another job's storage, and leaves that storage as it
is. It reads from the original, of whose checkpoints it shows only one, and it writes to a storage
of its own.
"""

from __future__ import annotations

import os
import re
import secrets
from collections.abc import Callable, Iterable
from pathlib import Path
from urllib.parse import urlsplit

from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.state.store.files import FileStorage
from holdfast.engine.state.store.manifest import INVALIDATION, MANIFESTS, PARTS, manifest_name
from holdfast.engine.state.store.storage import Storage
from holdfast.engine.state.store.volumes import VolumeStorage

FORM = "DIR, s3://BUCKET/PREFIX, or ec:K+M:STORE,STORE,... (K + M of them)"
_FORKED = re.compile(r"fork:(\d{1,18}):([^=]+)=(.+)", re.DOTALL)
_CODED = re.compile(r"ec:(\d{1,3})\+(\d{1,3}):(.+)")


class ForkedStorage:
    """Reads from `original` and `own`, writes to `own`; `step`: of the checkpoint that is seen."""

    def __init__(self, original: Storage, own: Storage, step: int) -> None:
        self._original, self._own = original, own
        self._manifest = manifest_name(step)

    def put(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        """Keep an object in the fork."""
        return self._own.put(name, parts)

    def read(self, name: str, offset: int, into: memoryview) -> None:
        """Read an object of the fork, or else of the original."""
        of = self._own if self._own.size(name) is not None or self._hides(name) else self._original
        of.read(name, offset, into)

    def size(self, name: str) -> int | None:
        """Return the size of an object of the fork, or else of the original."""
        found = self._own.size(name)
        return found if found is not None or self._hides(name) else self._original.size(name)

    def names(self, prefix: str) -> list[str]:
        """List the objects of both, without other checkpoints of the original."""
        others = [name for name in self._original.names(prefix) if not self._hides(name)]
        return sorted({*self._own.names(prefix), *others})

    def delete(self, name: str) -> None:
        """Delete an object of the fork; those of the original stay."""
        self._own.delete(name)

    def _hides(self, name: str) -> bool:
        """Return whether an object of the original is not seen here."""
        if name.startswith(INVALIDATION):
            return True  # the checkpoint that is seen was not invalidated
        return name.startswith(MANIFESTS) and name != self._manifest


def open_storage(text: str, say: Callable[[str], None] = lambda line: None) -> Storage:
    """Open the storage that a text of the form FORM names. UserError with its fault.

    It reads and writes no object yet. `say` takes lines on losses of volumes.
    """
    forked = _FORKED.fullmatch(text)
    if forked is not None:
        own = FileStorage(Path(forked[2]))
        return ForkedStorage(open_storage(forked[3], say), own, int(forked[1]))
    coded = _CODED.fullmatch(text)
    if coded is not None:
        k, m, places = int(coded[1]), int(coded[2]), coded[3].split(",")
        if len(set(places)) != len(places):
            raise UserError(f"--store {text}: a volume is named twice")
        return VolumeStorage([_open_one(place) for place in places], k, m, say)
    if text.startswith("ec:"):
        raise UserError(f"--store {text}: the form is {FORM}")
    return _open_one(text)


def fork_store(text: str, step: int, path: Path) -> str:
    """Return the name of a store that holds one checkpoint of another, and keeps its own at `path`.

    UserError for a path that has a "=".
    """
    if "=" in str(path):
        raise UserError(f"{path} has a '=': set TMPDIR to a folder without one")
    return f"fork:{step}:{path.absolute()}={absolute_store(text)}"


def check_writable(storage: Storage, text: str) -> None:
    """Put an object and delete it again. UserError gives the reason if that fails."""
    name = f"{PARTS}probe-{secrets.token_hex(8)}"  # a remainder is collected as garbage
    try:
        storage.put(name, [b"probe"])
        _delete(storage, name)
    except WorldError as error:
        raise UserError(
            f"--store {text} cannot be written: {error}; mend that first, or begin a new job with "
            "another store"
        ) from None


def _delete(storage: Storage, name: str) -> None:
    """Delete an object that another process may just have collected as garbage. WorldError."""
    try:
        storage.delete(name)
    except WorldError:
        if storage.size(name) is not None:
            raise


def absolute_store(text: str) -> str:
    """Make the folders in a storage's name absolute; URLs stay as they are."""
    coded = _CODED.fullmatch(text)
    absolute = [place if "://" in place else os.path.abspath(place) for place in _places(text)]
    head = f"ec:{coded[1]}+{coded[2]}:" if coded is not None else ""
    return head + ",".join(absolute)


def check_exists(text: str) -> None:
    """Raise UserError if a storage that is only read is in folders, and none of these exists.

    A store without some of its volumes exists, and so does every bucket that can be opened.
    """
    places = _places(text)
    if not any("://" in place or os.path.isdir(place) for place in places):
        which = "no such folder" if len(places) == 1 else "none of these folders"
        raise UserError(f"there is {which}: {', '.join(places)}; give the --store of the run")


def _places(text: str) -> list[str]:
    coded = _CODED.fullmatch(text)
    return coded[3].split(",") if coded is not None else [text]


def _open_one(place: str) -> Storage:
    if not place:
        raise UserError(f"--store: an empty place; the form is {FORM}")
    if "://" in place:
        if not urlsplit(place).netloc:
            raise UserError(f"--store {place} names no bucket; the form is {FORM}")
        try:
            from holdfast.engine.state.store.objects import open_bucket
        except ImportError:
            needs = "needs obstore: pip install 'holdfast[objects]'"
            raise UserError(f"--store {place} {needs}") from None
        return open_bucket(place)
    return FileStorage(Path(place))

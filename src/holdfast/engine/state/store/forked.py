"""Forks a storage at one checkpoint: a job goes on from there, and the original stays untouched.

All is read from the original but what the fork has written, which lies in a storage of its own. Of
the original's checkpoints only one is seen.
"""

from __future__ import annotations

from collections.abc import Iterable

from holdfast.engine.state.store.manifest import INVALIDATION, MANIFESTS, manifest_name
from holdfast.engine.state.store.storage import Storage


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

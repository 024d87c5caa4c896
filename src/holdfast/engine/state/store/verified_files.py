"""Reads byte ranges of files whose blocks are verified against an index, once each.

A block that differs is read again, then taken from a mirror: another directory with the same tree.
For datasets over memory-mapped tokens, records or archives; reading a record touches its blocks
only. Several processes may use it, and each verifies the blocks that it reads for itself.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from holdfast.engine.core.errors import Damaged, UserError, first_line
from holdfast.engine.state.store.data_index import (
    FileEntry,
    FileIndex,
    block_digest,
    blocks_of,
    read_index,
)
from holdfast.engine.state.store.regular_files import open_regular

READS = 2  # reads of a block from each directory, until it is given up there


class VerifiedFiles:
    """Offers the bytes of a tree of files, or of a single file, whose name is empty."""

    def __init__(
        self,
        root: str | os.PathLike[str],
        index: str | os.PathLike[str],
        mirrors: Sequence[str | os.PathLike[str]] = (),
    ) -> None:
        self._roots = [Path(root), *map(Path, mirrors)]
        self._index_path = Path(index)
        self._index: FileIndex | None = None
        self._files: dict[str, FileEntry] = {}
        self._good: dict[tuple[str, int], int] = {}  # the directory with a sound block
        self._handles: dict[tuple[str, int], int] = {}
        self.healed: list[str] = []  # blocks that were read again, or from a mirror

    def __getstate__(self) -> dict[str, Any]:
        """Leave out open files: another process opens its own, and verifies for itself."""
        return {"roots": self._roots, "index": self._index_path}

    def __setstate__(self, state: dict[str, Any]) -> None:
        first, *mirrors = state["roots"]
        self.__init__(first, state["index"], mirrors)  # type: ignore[misc]

    def names(self) -> list[str]:
        """Return the names of all files, in order. UserError if the index cannot be read."""
        self._open()
        return list(self._files)

    def size(self, name: str = "") -> int:
        """Return a file's size in bytes, as the index says. UserError if it does not know it."""
        return self._entry(name).size

    def read(self, offset: int, size: int, name: str = "") -> bytes:
        """Read bytes of a file.

        UserError for a file or a range that the index does not know; Damaged if a block is nowhere
        as the index says.
        """
        entry, block_bytes = self._entry(name), self._open().block_bytes
        if not 0 <= offset <= offset + size <= entry.size:
            raise UserError(
                f"{name or self._roots[0]} has {entry.size} bytes: {size} at {offset} are not in it"
            )
        parts, stop = [], offset + size
        while offset < stop:
            block = offset // block_bytes
            begin = block * block_bytes
            end = min(stop, begin + block_bytes)
            parts.append(self._part(entry, block, offset - begin, end - begin))
            offset = end
        return b"".join(parts)

    def close(self) -> None:
        """Close all files; they are opened again when they are read."""
        handles, self._handles = self._handles, {}
        for handle in handles.values():
            os.close(handle)

    def _open(self) -> FileIndex:
        if self._index is None:
            self._index = read_index(self._index_path, FileIndex)
            self._files = {file.name: file for file in self._index.files}
        return self._index

    def _entry(self, name: str) -> FileEntry:
        self._open()
        if name not in self._files:
            known = ", ".join(map(repr, list(self._files)[:5]))
            raise UserError(f"{self._index_path} knows no file {name!r}, but {known}")
        return self._files[name]

    def _part(self, entry: FileEntry, block: int, start: int, stop: int) -> bytes:
        """Return a part of a block, which is verified as a whole when it is first read."""
        begin = block * self._open().block_bytes
        known = self._good.get((entry.name, block))
        if known is not None:
            data = self._pread(entry.name, known, begin + start, stop - start)
            if len(data) == stop - start:
                return data
        return self._read_verified(entry, block)[start:stop]

    def _read_verified(self, entry: FileEntry, block: int) -> bytes:
        block_bytes = self._open().block_bytes
        begin = block * block_bytes
        size = min(block_bytes, entry.size - begin)
        problem = "differs from the index"
        for which in range(len(self._roots)):
            for attempt in range(READS):
                try:
                    data = self._pread(entry.name, which, begin, size)
                except OSError as error:
                    problem = f"cannot be read ({first_line(error)})"
                    self._handles.pop((entry.name, which), None)
                    continue
                if block_digest(data) == entry.digest(block):
                    if which or attempt:
                        where = f"from {self._roots[which]}" if which else "at the second reading"
                        self.healed.append(f"block {block} of {entry.name!r} is sound {where}")
                    self._good[entry.name, block] = which
                    return data
        count = blocks_of(entry.size, block_bytes)
        raise Damaged(
            f"block {block} of {count} of {self._roots[0] / entry.name} {problem}"
            + (", and so in all mirrors" if len(self._roots) > 1 else "")
        )

    def _pread(self, name: str, which: int, offset: int, size: int) -> bytes:
        key = name, which
        if key not in self._handles:
            path = self._roots[which] / name if name else self._roots[which]
            self._handles[key] = open_regular(path)
        parts = []
        while size and (data := os.pread(self._handles[key], size, offset)):
            parts.append(data)
            offset, size = offset + len(data), size - len(data)
        return b"".join(parts)

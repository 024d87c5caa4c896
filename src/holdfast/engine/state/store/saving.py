"""Writes a checkpoint: new chunks go into packs, and the manifest comes last.

Several writers may each save a part; one of them commits. Chunks that an earlier checkpoint holds
are not written again, as long as enough of their pack is still in use. Entries that look as if they
would become much shorter are compressed. An interrupted save leaves packs without references, which
`collect` removes.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import os
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from holdfast.engine.core.errors import WorldError, require
from holdfast.engine.core.types import NO_VIEW, ViewNumber
from holdfast.engine.state.store.manifest import (
    CHUNK_BYTES,
    INTENT_BYTES_MAX,
    INVALIDATION,
    PARTS,
    Entry,
    Intent,
    Manifest,
    Run,
    SavedPart,
    chunks_of,
    decode_intent,
    decode_part,
    digest,
    encode,
    encode_intent,
    encode_part,
    intent_name,
    is_withdrawn,
    is_worthwhile,
    manifest_name,
    pack_name,
    part_name,
    problem_of,
    shorten,
)
from holdfast.engine.state.store.storage import Storage, has_ended, name_scope, read_all

PART_BYTES_MAX = 1 << 30
# Pauses between two checks for the other writers' parts.
POLL_S, POLL_S_MAX = 0.01, 1.0
ALL = ".all"  # ends the name of the announcement of all shares, by the writer that commits
LIVE_MIN = 0.5  # chunks of packs with a smaller share in use are written again


@dataclass(frozen=True, slots=True, kw_only=True)
class Item:
    """Describes one entry to be saved: contiguous bytes, which must not change until written."""

    name: str
    data: memoryview
    dtype: str = ""
    shape: tuple[int, ...] = ()
    offset: tuple[int, ...] = ()
    whole: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class _Place:
    """Describes the place of a chunk."""

    pack: str
    offset: int
    stored: int


class Known:
    """Knows the chunks that earlier checkpoints hold, by size and digest."""

    def __init__(self) -> None:
        self._places: dict[tuple[int, bytes], _Place] = {}
        self.packs: tuple[str, ...] = ()

    def learn(self, manifest: Manifest, sizes: dict[str, int]) -> None:
        """Add a manifest's chunks in the packs that exist: `sizes` gives their bytes."""
        chunks = {(c.pack, c.offset): c for e in manifest.entries for c in chunks_of(manifest, e)}
        live: Counter[str] = Counter()
        for chunk in chunks.values():
            live[chunk.pack] += chunk.stored
        kept = [p for p in manifest.packs if p in sizes and live[p] >= LIVE_MIN * sizes[p]]
        self.packs = tuple(dict.fromkeys([*self.packs, *kept]))
        for (pack, offset), chunk in chunks.items():
            if pack in kept:
                self._places[(chunk.size, chunk.digest)] = _Place(pack, offset, chunk.stored)

    def find(self, size: int, found: bytes) -> _Place | None:
        return self._places.get((size, found))


class Saving:
    """Saves one checkpoint. `known` is only read, and may be shared by its writers.

    `writer`: the number of this one among several with the same token; writer 0 commits.
    """

    def __init__(
        self,
        storage: Storage,
        step: int,
        token: str,
        known: Known,
        writer: int | None = None,
        view: ViewNumber = NO_VIEW,
    ) -> None:
        self.step = step
        self.token = token
        self._storage = storage
        self._writer = writer
        self._view = view
        self._announced: list[str] = []
        self.known = known
        self.base: int | None = None  # the checkpoint that it builds upon

    def announce(self, packs: Sequence[str], suffix: str = "") -> None:
        """Protect what the save builds upon from being collected as garbage.

        Each announcement has a name of its own, by its `suffix`: a collector that removes one gives
        the save up, and the save must notice that when it commits.
        """
        name = f"{intent_name(self.token, self._writer)}{suffix}"
        intent = Intent(
            token=self.token,
            host=name_scope(),
            pid=os.getpid(),
            time=time.time(),
            packs=tuple(packs),
            step=self.step,
            view=self._view,
        )
        self._announced.append(name)
        self._storage.put(name, [encode_intent(intent)])

    def write(
        self, items: Sequence[Item], writer: int = 0, *, state_print: int = 0, shard: int = 0
    ) -> SavedPart:
        """Save these items; `writer` is the number of this writer of the checkpoint. WorldError.

        `state_print`: fingerprint of the whole state of `shard`; all writers of shares of one shard
        must give the same.
        """
        pack = pack_name(self.step, self.token, writer)
        planner = _Planner(items, self.known, pack)
        new = planner.new_chunks()
        first = next(new, None)
        written = 0
        if first is not None:
            written = self._storage.put(pack, itertools.chain([first], new))
        return SavedPart(
            packs=planner.packs(),
            entries=planner.entries,
            written_bytes=written,
            base=self.base,
            shard=shard,
            state_print=state_print,
        )

    def publish(self, part: SavedPart) -> None:
        """Hand a part to the writer that commits. WorldError."""
        self._storage.put(part_name(self.token, self._writer or 0), [encode_part(part)])

    def gather(self, writers: int, wait_s: float, patience_s: float = 0.0) -> list[SavedPart]:
        """Wait for the parts of the other writers. WorldError if one does not come in time.

        `wait_s`: for one whose writer has not begun, or has ended. `patience_s`: for one that is
        being written.
        """
        missing, parts = set(range(1, writers)), {}
        began, pause_s = time.monotonic(), POLL_S
        while True:
            there = set(self._storage.names(PARTS))
            for writer in [w for w in missing if part_name(self.token, w) in there]:
                name = part_name(self.token, writer)
                parts[writer] = decode_part(read_all(self._storage, name, PART_BYTES_MAX), name)
                missing.remove(writer)
            if not missing:
                return [parts[writer] for writer in sorted(parts)]
            passed_s = time.monotonic() - began
            if passed_s >= wait_s and (
                passed_s >= patience_s or not all(self._is_writing(w) for w in missing)
            ):
                some = ", ".join(map(str, sorted(missing)[:5]))
                raise WorldError(f"the share of writer {some} has not come in {passed_s:.0f} s")
            time.sleep(pause_s)
            pause_s = min(pause_s * 2, POLL_S_MAX)

    def _is_writing(self, writer: int) -> bool:
        """Return whether another writer has announced its share, and has not ended since."""
        name = intent_name(self.token, writer)
        try:
            intent = decode_intent(read_all(self._storage, name, INTENT_BYTES_MAX), name)
        except WorldError:  # there is none, or it cannot be read now
            return False
        return not has_ended(intent.host == name_scope(), intent.pid)

    def abandon(self) -> None:
        """Give up the written packs, unless they have been committed."""
        with contextlib.suppress(WorldError):
            if self._writer is not None:
                self._storage.delete(part_name(self.token, self._writer))
            for name in self._announced:
                self._storage.delete(name)

    def commit(self, parts: Sequence[SavedPart], about: dict[str, str]) -> Manifest:
        """Complete the checkpoint once all writers are done; it exists on return. WorldError."""
        shards = {part.shard for part in parts}
        if len({(part.shard, part.state_print) for part in parts}) > len(shards):
            raise WorldError(f"step {self.step} cannot be kept: its shares are of unlike states")
        manifest = merge(self.step, self.token, parts, about)
        problem = problem_of(manifest)
        if problem:
            raise WorldError(f"step {self.step} cannot be kept: {problem}")
        if self._writer is not None:  # as in Checkpoints.begin: first announce, then look
            self.announce(manifest.packs, ALL)
            for base in {part.base for part in parts if part.base is not None}:
                if self._storage.size(manifest_name(base)) is None:
                    raise WorldError(f"step {base}, on which a share builds, has been retired")
        self._refuse_overtaken()
        for pack in manifest.packs:
            if self._storage.size(pack) is None:
                raise WorldError(f"step {self.step} cannot be kept: {pack} has vanished meanwhile")
        self._refuse_invalidated(about)
        self._storage.put(manifest_name(self.step), [encode(manifest)])
        try:
            # Otherwise whoever withdraws, or gives the save up, has seen the manifest.
            self._refuse_invalidated(about)
            self._refuse_overtaken()
        except WorldError:
            self._storage.delete(manifest_name(self.step))
            raise
        with contextlib.suppress(WorldError):  # what stays is garbage; the checkpoint exists
            for writer in range(1, len(parts)) if self._writer is not None else ():
                self._storage.delete(part_name(self.token, writer))
                self._storage.delete(intent_name(self.token, writer))
            for name in self._announced:
                self._storage.delete(name)
        return manifest

    def _refuse_overtaken(self) -> None:
        if any(self._storage.size(name) is None for name in self._announced):
            raise WorldError(
                f"step {self.step} is given up: a newer checkpoint came while it was written"
            )

    def _refuse_invalidated(self, about: dict[str, str]) -> None:
        if any(is_withdrawn(name, self.step, about) for name in self._storage.names(INVALIDATION)):
            raise WorldError(
                f"step {self.step} is invalidated: something wrong had been used before it"
            )


def merge(step: int, token: str, parts: Sequence[SavedPart], about: dict[str, str]) -> Manifest:
    """Join the parts of one checkpoint into its manifest. Pure except for the time."""
    packs = tuple(dict.fromkeys(pack for part in parts for pack in part.packs))
    number = {pack: i for i, pack in enumerate(packs)}
    entries = []
    for part in parts:
        for entry in part.entries:
            runs = tuple(
                dataclasses.replace(r, pack=number[part.packs[r.pack]]) for r in entry.runs
            )
            entries.append(dataclasses.replace(entry, runs=runs))
    return Manifest(
        step=step, time=time.time(), token=token, packs=packs, entries=tuple(entries), about=about
    )


class _Planner:
    """Goes through the items once, digests each chunk and decides which are to be written."""

    def __init__(self, items: Sequence[Item], known: Known, pack: str) -> None:
        self._items = items
        self._known = known
        self._pack = pack
        self._here: dict[tuple[int, bytes], _Place] = {}  # in the new pack
        self._numbers: dict[str, int] = {}
        self._entries: list[Entry] = []

    def packs(self) -> tuple[str, ...]:
        return tuple(self._numbers)

    @property
    def entries(self) -> tuple[Entry, ...]:
        require(len(self._entries) == len(self._items), "not all chunks were asked for")
        return tuple(self._entries)

    def new_chunks(self) -> Iterator[memoryview | bytes]:
        end = 0
        for item in self._items:
            data, runs = item.data.cast("B"), _Runs()
            shrinks = is_worthwhile(data)
            digests = bytearray()
            for start in range(0, len(data), CHUNK_BYTES):
                chunk = data[start : start + CHUNK_BYTES]
                found = digest(chunk)
                digests += found
                place = self._place(len(chunk), found)
                if place is None:
                    stored = shorten(chunk) if shrinks else chunk
                    place = _Place(self._pack, end, len(stored))
                    self._here[(len(chunk), found)] = place
                    end += len(stored)
                    yield stored
                runs.add(self._number(place.pack), place, len(chunk))
            self._entries.append(
                Entry(
                    name=item.name,
                    size=len(data),
                    digests=bytes(digests),
                    runs=runs.finish(),
                    dtype=item.dtype,
                    shape=item.shape,
                    offset=item.offset,
                    whole=item.whole,
                )
            )

    def _place(self, size: int, found: bytes) -> _Place | None:
        return self._here.get((size, found)) or self._known.find(size, found)

    def _number(self, pack: str) -> int:
        return self._numbers.setdefault(pack, len(self._numbers))


class _Runs:
    """Joins chunks that lie one after the other into runs."""

    def __init__(self) -> None:
        self._runs: list[tuple[int, int, list[int], list[int]]] = []  # pack, offset, sizes, stored

    def add(self, pack: int, place: _Place, size: int) -> None:
        if self._runs:
            its_pack, offset, sizes, stored = self._runs[-1]
            if (its_pack, offset + sum(stored)) == (pack, place.offset):
                sizes.append(size)
                stored.append(place.stored)
                return
        self._runs.append((pack, place.offset, [size], [place.stored]))

    def finish(self) -> tuple[Run, ...]:
        return tuple(
            Run(
                chunks=len(sizes),
                pack=pack,
                offset=offset,
                stored=tuple(stored) if stored != sizes else (),
            )
            for pack, offset, sizes, stored in self._runs
        )

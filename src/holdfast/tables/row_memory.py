"""Keeps the memory of rows: arrays with room for whole tables, and a checksum of each row.

A server holds some shards of each table, and may have to hold further ones later. Its arrays have a
place for every row of a table from the start, so a shard comes and goes without a copy of the rest:
the kernel gives memory to pages at their first use, and takes it back on request.

A server's memory holds rows for months, and a flipped bit in one of them would go into a model
unseen. So a row is compared with its checksum before it is read, updated or copied. All checksums
of a shard are summed up to its fingerprint, which is the same on all servers that hold the shard
unless one of them has computed wrongly.
"""

from __future__ import annotations

import mmap
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np
import torch

from holdfast.tables.core.placement import SHARDS
from holdfast.tables.table_shape import hash_keys

RESERVED_MIN = 1 << 20  # bytes; smaller arrays take their memory at once
MAP_NORESERVE = 0x4000  # Linux reserves address space alone, which may exceed the memory
CHECKED_AT_ONCE = 1 << 16  # rows
SPREAD = 0x1E3779B97F4A7C15  # odd: neighbours count by very different factors


class ReservedArrays:
    """Makes arrays of zeros, and frees the memory of their parts.

    `whole`: all parts will be used, so arrays take their memory at once. RuntimeError: there is
    not enough.
    """

    def __init__(self, *, whole: bool = False) -> None:
        self._whole = whole
        self._maps: dict[int, mmap.mmap] = {}  # by the address of the array

    def make(self, count: int, width: int, dtype: torch.dtype = torch.float32) -> torch.Tensor:
        """Return an array [count, width] of zeros; of the shape [count] if `width` is 0."""
        shape = (count, width) if width else (count,)
        size = count * max(width, 1) * dtype.itemsize
        if size >= RESERVED_MIN and not self._whole:
            with suppress(OSError):  # the machine allows no more of them
                flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | MAP_NORESERVE
                room = mmap.mmap(-1, size, flags=flags)
                found = torch.frombuffer(room, dtype=dtype).view(shape)
                self._maps[found.data_ptr()] = room
                return found
        return torch.zeros(shape, dtype=dtype)

    def release(self, arrays: Iterable[torch.Tensor], places: range) -> None:
        """Free the memory of these places [first dimension]; do not read them afterwards."""
        for array in arrays:
            room = self._maps.get(array.data_ptr())
            if room is None:
                continue
            row = array[0].numel() * array.element_size()
            # A page at an edge has rows of a neighbour, too.
            start = -(-places.start * row // mmap.PAGESIZE) * mmap.PAGESIZE
            stop = places.stop * row // mmap.PAGESIZE * mmap.PAGESIZE
            if stop > start:
                room.madvise(mmap.MADV_DONTNEED, start, stop - start)


def check_room(size: int) -> None:
    """Raise RuntimeError if `size` bytes are more than this machine can have at all."""
    torch.empty(size, dtype=torch.uint8)


@dataclass(frozen=True, slots=True)
class Seal:
    """Has the checksums [n] of all rows of one owner, and the sum that counts for its part."""

    sums: torch.Tensor
    total: torch.Tensor


class RowChecksums:
    """Keeps checksums of the rows of some arrays, which have a row for each place.

    `arrays`: [places, width] each, of numbers of 4 or 8 bytes; `memory`: made them. A checksum is
    the sum of a row's 32-bit words, each times an odd number of its own, modulo 2^32: a single
    flipped bit always changes it. `owners`: how many parts the places have. `totals` [owners]: for
    each, the sum of its checksums, each times an odd number of its place's own, modulo 2^64.
    `salt`: a small number that no other checksums of the same places have.
    """

    def __init__(
        self, arrays: Sequence[torch.Tensor], memory: ReservedArrays, owners: int, salt: int = 0
    ) -> None:
        self._words = [array.view(torch.int32) for array in arrays]
        self._memory = memory
        width = sum(words.shape[1] for words in self._words)
        factors = torch.arange(width, dtype=torch.int64) * 0x9E3779B1 + 0x85EBCA6B
        self._factors = (factors | 1).to(torch.int32)
        self._sums = memory.make(len(self._words[0]), 0, torch.int32)
        self._salt = salt << 40
        self.totals = torch.zeros(owners, dtype=torch.int64)

    def sum_up(self, places: range, arrays: Sequence[torch.Tensor]) -> Seal:
        """Return the checksums of all rows of one owner, which these arrays [n, width] have."""
        words = [array.view(torch.int32) for array in arrays]
        sums, total = (
            torch.empty(len(places), dtype=torch.int32),
            torch.zeros((), dtype=torch.int64),
        )
        for part in _split(range(len(places))):
            sums[part] = found = self._sum_rows([each[part] for each in words])
            here = places[part]
            total += (found * self._weigh(torch.arange(here.start, here.stop))).sum()
        return Seal(sums, total)

    def seal_part(self, places: range, owner: int, seal: Seal | None = None) -> None:
        """Take all rows of one owner, at these places, for right with their present bytes.

        `seal`: their checksums, if they are known.
        """
        here = slice(places.start, places.stop)
        if seal is None:
            seal = self.sum_up(places, [words[here] for words in self._words])
        self._sums[here] = seal.sums
        self.totals[owner] = seal.total

    def seal(self, places: torch.Tensor, owners: torch.Tensor) -> torch.Tensor:
        """Take the rows at these places, each there once, for right with their present bytes.

        Returns the change of `totals` [owners].
        """
        parts = [words.index_select(0, places) for words in self._words]
        return self.seal_copies(places, parts, owners)

    def seal_copies(
        self, places: torch.Tensor, parts: Sequence[torch.Tensor], owners: torch.Tensor
    ) -> torch.Tensor:
        """Take the rows at these places for right if they are these, [places, width] each.

        Returns the change of `totals` [owners].
        """
        sums = self._sum_rows([part.view(torch.int32) for part in parts])
        changes = sums.to(torch.int64) - self._sums.index_select(0, places)
        self._sums[places] = sums
        added = torch.zeros_like(self.totals)
        added.index_add_(0, owners, changes * self._weigh(places))
        self.totals += added
        return added

    def find_differing(self, places: torch.Tensor, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return for each of these places whether its rows, copied to `parts`, are damaged."""
        found = self._sum_rows([part.view(torch.int32) for part in parts])
        return found != self._sums.index_select(0, places)

    def find_damaged(self, places: torch.Tensor | range) -> torch.Tensor:
        """Return those of these places whose rows are not as they were sealed."""
        if isinstance(places, torch.Tensor):
            parts = [words.index_select(0, places) for words in self._words]
            return places[self.find_differing(places, parts)]
        damaged = []
        for part in _split(places):
            found = self._sum_rows([words[part] for words in self._words])
            damaged.append((found != self._sums[part]).nonzero().flatten() + part.start)
        return torch.cat(damaged) if damaged else torch.empty(0, dtype=torch.int64)

    def release(self, places: range, owner: int) -> None:
        """Free the memory of an owner's rows and their checksums; do not read them afterwards."""
        self._memory.release([*self._words, self._sums], places)
        self.totals[owner] = 0

    def _weigh(self, places: torch.Tensor) -> torch.Tensor:
        """Return the factors [n] of these places' checksums."""
        return ((places + self._salt) * SPREAD) | 1

    def _sum_rows(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        """Return the checksums [n] of rows, from their words [n, width] in each array."""
        found = torch.zeros(len(parts[0]), dtype=torch.int32)
        at = 0
        for words in parts:
            factors = self._factors[at : at + words.shape[1]]
            found += (words * factors).sum(1, dtype=torch.int32)
            at += words.shape[1]
        return found


def _split(places: range) -> list[slice]:
    starts = range(places.start, places.stop, CHECKED_AT_ONCE)
    return [slice(start, min(start + CHECKED_AT_ONCE, places.stop)) for start in starts]


class FingerprintHistory:
    """Keeps how the last updates have changed the fingerprints of shards."""

    def __init__(self) -> None:
        self._changes: dict[int, torch.Tensor] = {}  # by update, [SHARDS]

    def record(self, number: int, changes: torch.Tensor) -> None:
        """Record what update `number` of some shards has added to fingerprints [SHARDS]."""
        before = self._changes.get(number)
        self._changes[number] = changes if before is None else before + changes

    def drop(self, shard: int) -> None:
        """Forget a shard: it has other rows now."""
        for changes in self._changes.values():
            changes[shard] = 0

    def forget(self, floor: int) -> None:
        """Forget updates up to `floor`."""
        self._changes = {n: each for n, each in self._changes.items() if n > floor}

    def undo(self, fingerprints: torch.Tensor, version: int) -> torch.Tensor:
        """Return fingerprints [SHARDS] as they were after `version` updates."""
        for number, changes in self._changes.items():
            if number > version:
                fingerprints = fingerprints - changes
        return fingerprints


class ShardChecksums:
    """Keeps the checksums of one table's arrays, in sets that are looked at together.

    `sets`: by name, arrays [places, width] with the places of all shards, one after the other.
    """

    def __init__(self, sets: Mapping[str, Sequence[torch.Tensor]], memory: ReservedArrays) -> None:
        used = {name: arrays for name, arrays in sets.items() if arrays and len(arrays[0])}
        self._sets = {
            name: RowChecksums(arrays, memory, SHARDS, salt)
            for salt, (name, arrays) in enumerate(used.items())
        }
        self._sizes = {name: len(arrays[0]) // SHARDS for name, arrays in used.items()}

    @property
    def totals(self) -> torch.Tensor:
        """Return the fingerprint [SHARDS] of each shard."""
        found = torch.zeros(SHARDS, dtype=torch.int64)
        for each in self._sets.values():
            found += each.totals
        return found

    def seal(self, places: torch.Tensor, *names: str) -> torch.Tensor:
        """Take these places of some sets, each there once, for right with their present bytes.

        Returns the change of `totals` [SHARDS].
        """
        added = torch.zeros(SHARDS, dtype=torch.int64)
        for name in names:
            if name in self._sets:
                owners = torch.div(places, self._sizes[name], rounding_mode="floor")
                added += self._sets[name].seal(places, owners)
        return added

    def sum_up(self, shard: int, arrays: Mapping[str, Sequence[torch.Tensor]]) -> list[Seal]:
        """Return the checksums of all of a shard, whose arrays these are, by set."""
        return [
            each.sum_up(self._places_of(shard, name), arrays[name])
            for name, each in self._sets.items()
        ]

    def seal_shard(self, shard: int, seals: Sequence[Seal] = ()) -> None:
        """Take all of a shard as it is now for right. `seals`: its checksums, if they are known."""
        for i, (name, each) in enumerate(self._sets.items()):
            each.seal_part(self._places_of(shard, name), shard, seals[i] if seals else None)

    def _places_of(self, shard: int, name: str) -> range:
        first = shard * self._sizes[name]
        return range(first, first + self._sizes[name])

    def release(self, shard: int) -> None:
        """Free the memory of a shard and its checksums; do not read them afterwards."""
        for name, each in self._sets.items():
            first = shard * self._sizes[name]
            each.release(range(first, first + self._sizes[name]), shard)

    def find_damaged(self, places: torch.Tensor, *names: str) -> set[int]:
        """Return the shards in which these places of some sets have changed by themselves."""
        found: set[int] = set()
        for name in names:
            if name in self._sets:
                damaged = self._sets[name].find_damaged(places)
                found |= set((damaged // self._sizes[name]).tolist())
        return found

    def is_damaged(self, shard: int, part: range) -> bool:
        """Return whether anything in this part of a shard's places has changed by itself."""
        for name, each in self._sets.items():
            size = self._sizes[name]
            first = shard * size
            places = range(first + part.start, first + min(part.stop, size))
            if len(each.find_damaged(places)):
                return True
        return False


RECENT_MIN = 1 << 12  # keys added one update after another, before some are sorted in
RECENT_SHARE = 8
SHARD_BITS = SHARDS.bit_length() - 1
#: Bits of a code, below the bits of the shard.
CODE_BITS = 64 - SHARD_BITS


class KeyIndex:
    """Points from keys to places. `keys` [places] and `uses` [places], int64, are the truth.

    It is empty until `replace`. A place without uses has no key. The index only points: `find`
    compares with the key that is at the place now, and if they differ, memory has changed by
    itself. It is no part of a table's state and can be made again at any time.
    """

    def __init__(self, keys: torch.Tensor, uses: torch.Tensor) -> None:
        self._keys, self._uses = keys, uses
        self._base = self._recent = SortedKeys(keys[:0], keys[:0])

    def replace(self, places: Mapping[int, torch.Tensor]) -> None:
        """Point to the keys at these places [n] of some shards, and drop all earlier ones there."""
        found = {shard: sort_keys(self._keys[each], each) for shard, each in places.items()}
        # A key that is not of the shard is there because memory has changed by itself.
        self._put({n: each.pick(find_shards(each.codes) == n) for n, each in found.items()})

    def find(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the place [n] of each key [n], -1 where it has none."""
        places = self.list_places(keys)
        there = (places >= 0) & (self._keys[places] == keys) & (self._uses[places] > 0)
        return torch.where(there, places, -1)

    def list_places(self, keys: torch.Tensor) -> torch.Tensor:
        """Return the place [n] of each key [n] as known here, -1 where it has none.

        If something else is there, memory has changed by itself.
        """
        codes = encode(keys)
        recent = self._recent.find(codes)
        return torch.where(recent >= 0, recent, self._base.find(codes))

    def add(self, keys: torch.Tensor, places: torch.Tensor) -> None:
        """Record the places [n] of keys [n] that had none."""
        new = sort_keys(keys, places)
        kept = self._recent.pick(~torch.isin(self._recent.codes, new.codes))
        self._recent = kept.merge(new)
        limit = max(RECENT_MIN, len(self._base.codes) // RECENT_SHARE)
        if len(self._recent.codes) > limit:
            self._sort_in()

    def remove(self, keys: torch.Tensor) -> None:
        """Record that keys [n] have no places any longer."""
        codes = encode(keys)
        for part in (self._base, self._recent):
            part.forget(codes)

    def _sort_in(self) -> None:
        """Move the recent keys of one shard, the one with most of them, to its sorted keys."""
        owners = find_shards(self._recent.codes)
        shard = int(torch.bincount(owners, minlength=SHARDS).argmax())
        old = self._base.cut(shard)
        new = self._recent.pick((owners == shard) & (self._recent.places >= 0))
        still = (old.places >= 0) & ~torch.isin(old.codes, new.codes)
        self._put({shard: old.pick(still).merge(new)})

    def _put(self, parts: Mapping[int, SortedKeys]) -> None:
        """Replace the keys of some shards by these."""
        every = [parts[n] if n in parts else self._base.cut(n) for n in range(SHARDS)]
        codes, places = ([getattr(e, name) for e in every] for name in ("codes", "places"))
        self._base = SortedKeys(torch.cat(codes), torch.cat(places))
        is_put = torch.zeros(SHARDS, dtype=torch.bool)
        is_put[list(parts)] = True
        self._recent = self._recent.pick(~is_put[find_shards(self._recent.codes)])


@dataclass(frozen=True, slots=True)
class SortedKeys:
    """Has the codes [n] of keys, each once, in growing order, and a place [n] for each.

    The place -1 stands for a key that has lost its own.
    """

    codes: torch.Tensor
    places: torch.Tensor

    def find(self, codes: torch.Tensor) -> torch.Tensor:
        """Return the place [n] of each code [n], -1 for a code without a place."""
        if not len(self.codes):
            return torch.full_like(codes, -1)
        at = torch.searchsorted(self.codes, codes).clamp_(max=len(self.codes) - 1)
        return torch.where(self.codes[at] == codes, self.places[at], -1)

    def forget(self, codes: torch.Tensor) -> None:
        """Record that keys with these codes have no places any longer."""
        if len(self.codes):
            at = torch.searchsorted(self.codes, codes).clamp_(max=len(self.codes) - 1)
            self.places[at[self.codes[at] == codes]] = -1

    def cut(self, shard: int) -> SortedKeys:
        """Return the keys of one shard."""
        firsts = torch.tensor([shard, shard + 1]) - SHARDS // 2
        # The last shard ends with the largest code, beyond which there is no number.
        first, stop = torch.searchsorted(self.codes, firsts << CODE_BITS).tolist()
        here = slice(first, stop if shard < SHARDS - 1 else len(self.codes))
        return SortedKeys(self.codes[here], self.places[here])

    def pick(self, mask: torch.Tensor) -> SortedKeys:
        """Return the keys where `mask` [n] is true."""
        return self if bool(mask.all()) else SortedKeys(self.codes[mask], self.places[mask])

    def merge(self, other: SortedKeys) -> SortedKeys:
        """Return the keys of both, which have none in common, in less time than sorting takes."""
        if not len(self.codes) or not len(other.codes):
            return other if len(other.codes) else self
        at = torch.searchsorted(self.codes, other.codes) + torch.arange(len(other.codes))
        mine = torch.ones(len(self.codes) + len(other.codes), dtype=torch.bool)
        mine[at] = False
        codes, places = (torch.empty(len(mine), dtype=torch.int64) for _ in range(2))
        codes[at], places[at] = other.codes, other.places
        codes[mine], places[mine] = self.codes, self.places
        return SortedKeys(codes, places)


def sort_keys(keys: torch.Tensor, places: torch.Tensor) -> SortedKeys:
    """Sort keys [n] by their codes, with the place [n] of each."""
    codes, order = encode(keys).sort()
    return SortedKeys(codes, places[order])


def encode(keys: torch.Tensor) -> torch.Tensor:
    """Return the code [n] int64 of each key [n]: its own, and those of one shard are neighbours."""
    hashes = hash_keys(keys)  # its low bits name the shard
    return _sign((hashes >> np.uint64(SHARD_BITS)) | (hashes << np.uint64(CODE_BITS)))


def find_shards(codes: torch.Tensor) -> torch.Tensor:
    """Return the shard [n] of each code [n]."""
    return (codes >> CODE_BITS) + SHARDS // 2


def _sign(codes: np.ndarray) -> torch.Tensor:
    """Return unsigned numbers as signed ones that are in the same order."""
    return torch.from_numpy((codes ^ np.uint64(1 << 63)).view(np.int64))

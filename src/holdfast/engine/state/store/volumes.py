"""Implements a storage over several volumes; any m of them may be lost or return wrong bytes.

Each object is spread with parity over all volumes. Shards that a volume cannot give, or returns
altered, are computed from the remaining ones and reported. A write succeeds while at most m volumes
refuse it; an object that fewer than k volumes can hold was never whole, and is not there. If
volumes do not answer and might have the object, the error names them, and the object does not count
as deleted.
"""

from __future__ import annotations

import queue
import secrets
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING

from holdfast.engine.core.errors import Damaged, UserError, WorldError
from holdfast.engine.state.store.manifest import DIGEST_BYTES, digest
from holdfast.engine.state.store.storage import Missing, Storage, check_name
from holdfast.engine.state.store.stripes import (
    FOOTER_BYTES,
    SHARD_BYTES,
    Footer,
    Geometry,
    Stripe,
    decode_footer,
    encode_footer,
    shard_of,
)

if TYPE_CHECKING:
    from holdfast.engine.state.coding.reed_solomon import ReedSolomon

Version = tuple[int, int]  # see Footer

STRIPES_UNDER_WAY = 8
#: At most this many lines are posted.
LINES_MAX = 1000
STRIPES_AT_ONCE = 16  # read from each volume in one go


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """Describes an object as its volumes report it.

    `volumes[number]`: which volume holds the shards of that number.
    """

    geometry: Geometry
    version: Version
    volumes: dict[int, int]
    #: Digests of the shards, by number.
    tables: dict[int, bytes]


class VolumeStorage:
    """Implements `Storage` over k + m `volumes`, best on different disks or machines."""

    def __init__(
        self,
        volumes: Sequence[Storage],
        k: int,
        m: int,
        say: Callable[[str], None] = lambda line: None,
    ) -> None:
        if len(volumes) != k + m:
            raise UserError(f"{k}+{m} pieces need {k + m} volumes, not {len(volumes)}")
        self.volumes = tuple(volumes)
        self.k = k
        self.m = m
        from holdfast.engine.state.coding.reed_solomon import (
            ReedSolomon,  # with numpy, which few need
        )

        self._code = ReedSolomon(k, m)
        self._say = say
        self._told: set[str] = set()
        self._pool = ThreadPoolExecutor(len(volumes), "holdfast-volume")

    # ------------------------------------------------------------ Storage

    def put(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        check_name(name)
        spread = _Spread(self._code, parts)
        version = _version_after(self._look_everywhere(name))
        order = self._order(name)
        # Each write has threads of its own: two that share a few would wait for each other.
        with ThreadPoolExecutor(len(order), "holdfast-volume") as pool:
            writing = [
                pool.submit(self._put_shards, spread, name, number, volume, version)
                for number, volume in enumerate(order)
            ]
            size = spread.run()
        failures = [str(e) for each in writing if (e := each.exception()) is not None]
        if len(failures) > self.m:
            raise WorldError(f"{len(failures)} of {self.k + self.m} volumes fail: {failures[0]}")
        for failure in failures:
            self._tell(f"{name} is written with less parity: {failure}")
        return size

    def read(self, name: str, offset: int, into: memoryview) -> None:
        placed = self._find(name)
        if offset + len(into) > placed.geometry.size:
            raise Damaged(f"{name} ends at byte {placed.geometry.size}, before it should")
        stripes = list(placed.geometry.stripes_of(offset, len(into)))
        for i in range(0, len(stripes), STRIPES_AT_ONCE):
            for stripe, shards in self._stripes(name, placed, stripes[i : i + STRIPES_AT_ONCE]):
                _copy(stripe, shards, offset, into)

    def size(self, name: str) -> int | None:
        try:
            return self._find(name).geometry.size
        except Missing:
            return None

    def names(self, prefix: str) -> list[str]:
        return [name for name in self.all_names(prefix) if _can_be_there(self, name)]

    def delete(self, name: str) -> None:
        check_name(name)
        # Twice: a repair looks, after it has written, whether the other shards are still there.
        for i, volume in [*enumerate(self.volumes)] * 2:
            try:
                volume.delete(name)
            except WorldError as error:  # found by `repair`, when it is back
                self._tell(f"volume {i}: {error}")

    # ------------------------------------------------------------ repair

    def repair(self, name: str) -> list[str]:
        """Restore every shard of an object; return the faults.

        Missing if too few volumes hold anything of it; Damaged if too much is lost.
        """
        placed = self._find(name)
        order = self._order(name)
        bad: list[str] = []
        wrong = [n for n in range(self.k + self.m) if n not in placed.volumes]
        bad += [f"{name} is missing or cannot be read on volume {order[n]}" for n in wrong]
        for number, volume in placed.volumes.items():
            found = self._check_shards(name, placed, number)
            if found:
                wrong.append(number)
                what = f"{found} of its blocks have changed"
                bad.append(f"{name} on volume {volume}: {what}")
        for number in wrong:
            blocks = self._rebuild(name, placed, number)
            size = placed.geometry.size
            make_footer = partial(self._footer, placed.version, number, size)
            self.volumes[order[number]].put(name, _write_object(blocks, make_footer))
        if wrong and any(self.volumes[v].size(name) is None for v in placed.volumes.values()):
            # Another writer has replaced it in the meantime.
            self.delete(name)
            raise Missing(f"{name} was deleted while it was repaired")
        return bad

    def all_names(self, prefix: str = "") -> list[str]:
        """List every object with a part on any volume, whole or not."""
        found: set[str] = set()
        failures = 0
        for i, volume in enumerate(self.volumes):
            try:
                found.update(volume.names(prefix))
            except WorldError as error:
                failures += 1
                self._tell(f"volume {i}: {error}")
        if failures > self.m:
            raise WorldError(f"{failures} of {len(self.volumes)} volumes cannot be listed")
        return sorted(found)

    # ------------------------------------------------------------ leaves

    def _order(self, name: str) -> list[int]:
        """Choose which volume holds which shard, so that parity is not always on the same ones."""
        count = len(self.volumes)
        first = digest(name.encode())[0] % count
        return [(first + number) % count for number in range(count)]

    def _find(self, name: str) -> Placed:
        """Find the newest version with enough shards. Missing, if certainly none is whole."""
        check_name(name)
        order = self._order(name)
        footers, unknown = {}, []
        for number, found in enumerate(self._look_everywhere(name)):
            if isinstance(found, WorldError):
                unknown.append(found)
            elif found is not None:
                footers[number] = found
        counts = Counter((f.version, f.size, f.shard_bytes) for f, _ in footers.values())
        whole = [what for what, count in counts.items() if count >= self.k]
        if not whole and max(counts.values(), default=0) + len(unknown) < self.k:
            raise Missing(f"there is no {name} on {self.k} of the volumes")
        if not whole:
            rotten = all(isinstance(error, Damaged) for error in unknown)
            text = f"{name} cannot be read on {len(unknown)} of {len(order)} volumes: {unknown[0]}"
            raise Damaged(text) if rotten else WorldError(text)
        version, size, shard_bytes = max(whole)
        mine = [n for n, (f, _) in sorted(footers.items()) if f.version == version]
        return Placed(
            geometry=Geometry(size, self.k, shard_bytes),
            version=version,
            volumes={n: order[n] for n in mine},
            tables={n: footers[n][1] for n in mine},
        )

    def _look_everywhere(self, name: str) -> list[tuple[Footer, bytes] | WorldError | None]:
        """Return the answers of all volumes on an object, by the number of the shards."""
        order = self._order(name)
        return list(self._pool.map(lambda n: self._look(name, n, order[n]), range(len(order))))

    def _look(
        self, name: str, number: int, volume: int
    ) -> tuple[Footer, bytes] | WorldError | None:
        """Return a volume's footer of an object; None if it has no part of it."""
        storage, where = self.volumes[volume], f"{name} on volume {volume}"
        try:
            size = storage.size(name)
            if size is None:
                return None
            if size < FOOTER_BYTES:
                raise Damaged(f"{where} is damaged: it has {size} bytes")
            data = bytearray(FOOTER_BYTES)
            storage.read(name, size - FOOTER_BYTES, memoryview(data))
            footer = decode_footer(bytes(data), size, where)
            if (footer.number, footer.k, footer.m) != (number, self.k, self.m):
                raise Damaged(f"{where} holds shards {footer.number} of {footer.k}+{footer.m}")
            geometry = Geometry(footer.size, footer.k, footer.shard_bytes)
            table = bytearray(geometry.count * DIGEST_BYTES)
            storage.read(name, geometry.shards_bytes, memoryview(table))
            if digest(table) != footer.table:
                raise Damaged(f"{where} is damaged: its digests have changed")
            return footer, bytes(table)
        except Missing:
            return None
        except WorldError as error:
            self._tell(str(error))
            return error

    def _stripes(
        self, name: str, placed: Placed, stripes: Sequence[Stripe]
    ) -> Iterator[tuple[Stripe, list[memoryview]]]:
        """Read the data shards of neighbouring stripes, each verified or computed."""
        wanted = [n for n in range(self.k) if n in placed.volumes]
        read = self._pool.map(lambda n: self._blocks(name, placed, n, stripes), wanted)
        blocks = dict(zip(wanted, read, strict=True))
        for i, stripe in enumerate(stripes):
            shards = {n: block for n in wanted if (block := blocks[n][i]) is not None}
            if len(shards) < self.k:
                shards = self._compute_stripe(name, placed, stripe, shards)
            yield stripe, [shards[n] for n in range(self.k)]

    def _blocks(
        self, name: str, placed: Placed, number: int, stripes: Sequence[Stripe]
    ) -> list[memoryview | None]:
        """Read one volume's shards of neighbouring stripes; None for each that is not intact."""
        volume = placed.volumes[number]
        first, last = stripes[0], stripes[-1]
        data = memoryview(bytearray(last.offset + last.shard - first.offset))
        try:
            self.volumes[volume].read(name, first.offset, data)
        except WorldError as error:
            self._tell(f"volume {volume}: {error}")
            return [None] * len(stripes)
        found: list[memoryview | None] = []
        for stripe in stripes:
            at = stripe.offset - first.offset
            block = data[at : at + stripe.shard]
            good = digest(block) == _entry(placed.tables[number], stripe.index)
            if not good:
                where = f"{stripe.offset} to {stripe.offset + stripe.shard}"
                self._tell(f"{name} on volume {volume}: bytes {where} have changed")
            found.append(block if good else None)
        return found

    def _compute_stripe(
        self,
        name: str,
        placed: Placed,
        stripe: Stripe,
        there: dict[int, memoryview],
    ) -> dict[int, memoryview]:
        """Compute all data shards of a stripe, some of them from parity. Damaged."""
        there = dict(there)
        for number in placed.volumes:
            if len(there) >= self.k:
                break
            if number >= self.k:
                (block,) = self._blocks(name, placed, number, [stripe])
                if block is not None:
                    there[number] = block
        if len(there) < self.k:
            end = stripe.start + stripe.size
            raise Damaged(f"bytes {stripe.start} to {end} of {name} are lost on too many volumes")
        lost = [n for n in range(self.k) if n not in there]
        wanted = {n: memoryview(bytearray(stripe.shard)) for n in lost}
        self._code.rebuild(there, wanted)
        return there | wanted

    def _check_shards(self, name: str, placed: Placed, number: int) -> int:
        """Count how many of a volume's blocks are not intact."""
        geometry, bad = placed.geometry, 0
        for i in range(0, geometry.count, STRIPES_AT_ONCE):
            last = min(i + STRIPES_AT_ONCE, geometry.count)
            stripes = [geometry.stripe(j) for j in range(i, last)]
            bad += self._blocks(name, placed, number, stripes).count(None)
        return bad

    def _rebuild(self, name: str, placed: Placed, number: int) -> Iterator[memoryview]:
        """Yield all shards of one number, computed where they cannot be read."""
        for index in range(placed.geometry.count):
            stripe = placed.geometry.stripe(index)
            blocks = {n: self._blocks(name, placed, n, [stripe])[0] for n in placed.volumes}
            good = {n: block for n, block in blocks.items() if block is not None}
            if number in good:
                yield good[number]
                continue
            if len(good) < self.k:
                raise Damaged(f"stripe {index} of {name} is lost on too many volumes")
            wanted = {number: memoryview(bytearray(stripe.shard))}
            self._code.rebuild(good, wanted)
            table = placed.tables.get(number)
            if table is not None and digest(wanted[number]) != _entry(table, index):
                raise Damaged(f"stripe {index} of {name} does not become what it was")
            yield wanted[number]

    def _footer(self, version: Version, number: int, size: int, table: bytes) -> Footer:
        return Footer(
            version=version,
            number=number,
            k=self.k,
            m=self.m,
            size=size,
            shard_bytes=SHARD_BYTES,
            table=table,
        )

    def _put_shards(
        self, spread: _Spread, name: str, number: int, volume: int, version: Version
    ) -> None:
        def parts() -> Iterator[bytes | memoryview]:
            yield from _write_object(
                spread.shards(number),
                lambda table: self._footer(version, number, spread.size, table),
            )

        try:
            self.volumes[volume].put(name, parts())
        except WorldError as error:
            raise WorldError(f"volume {volume}: {error}") from None
        finally:
            spread.drain(number)

    def _tell(self, line: str) -> None:
        if line not in self._told and len(self._told) < LINES_MAX:
            self._told.add(line)
            self._say(line)


def _can_be_there(storage: Storage, name: str) -> bool:
    try:
        return storage.size(name) is not None
    except WorldError:
        return True


def _version_after(looks: Sequence[tuple[Footer, bytes] | WorldError | None]) -> Version:
    """Return a version after those of all objects found, even if the clock was set back."""
    newest = max((each[0].version[0] for each in looks if isinstance(each, tuple)), default=0)
    return max(time.time_ns(), newest + 1), secrets.randbits(62)


def _entry(table: bytes, index: int) -> bytes:
    return table[index * DIGEST_BYTES : (index + 1) * DIGEST_BYTES]


def _copy(stripe: Stripe, shards: Sequence[memoryview], offset: int, into: memoryview) -> None:
    """Copy what the stripe has of the range that begins at `offset` to its destination."""
    for i, shard in enumerate(shards):
        start = stripe.start + i * stripe.shard  # the shard's place in the object
        end = min(start + stripe.shard, stripe.start + stripe.size, offset + len(into))
        begin = max(start, offset)
        if begin < end:
            into[begin - offset : end - offset] = shard[begin - start : end - start]


def _write_object(
    shards: Iterable[memoryview], footer: Callable[[bytes], Footer]
) -> Iterator[bytes | memoryview]:
    """Yield a volume's object: shards, their digests, and the footer with the digest of these."""
    table = bytearray()
    for shard in shards:
        table += digest(shard)
        yield shard
    yield bytes(table)
    yield encode_footer(footer(digest(table)))


class _Stripe:
    """Keeps one stripe's memory, and counts its readers."""

    def __init__(self, count: int) -> None:
        self.memory = [memoryview(bytearray(SHARD_BYTES)) for _ in range(count)]
        self.readers = 0
        self.shard = 0


class _Spread:
    """Fills stripes from the parts, and hands each volume its shards as fast as it takes them."""

    def __init__(self, code: ReedSolomon, parts: Iterable[bytes | memoryview]) -> None:
        self.size = 0
        self._code = code
        self._parts = parts
        count = code.k + code.m
        self._queues: list[queue.Queue[_Stripe | None]] = [queue.Queue() for _ in range(count)]
        self._free: queue.Queue[_Stripe] = queue.Queue()
        for _ in range(STRIPES_UNDER_WAY):
            self._free.put(_Stripe(count))
        self._lock = threading.Lock()
        self._failed = False
        self._held: dict[int, _Stripe] = {}
        self._ended = [False] * count

    def run(self) -> int:
        """Hand out all parts, then return the object's size."""
        try:
            self._fill()
        except BaseException:
            self._failed = True
            raise
        finally:
            for each in self._queues:
                each.put(None)
        return self.size

    def _fill(self) -> None:
        whole = self._code.k * SHARD_BYTES
        stripe, filled = self._free.get(), 0
        for part in self._parts:
            data = memoryview(part).cast("B")
            while data:
                count = min(len(data), whole - filled, SHARD_BYTES - filled % SHARD_BYTES)
                shard = stripe.memory[filled // SHARD_BYTES]
                at = filled % SHARD_BYTES
                shard[at : at + count] = data[:count]
                data, filled = data[count:], filled + count
                if filled == whole:
                    self._hand_out(stripe, SHARD_BYTES)
                    self.size += filled
                    stripe, filled = self._free.get(), 0
        if filled:
            self._hand_out_last(stripe, filled)
            self.size += filled

    def shards(self, number: int) -> Iterator[memoryview]:
        """Yield the shards of one volume."""
        while self._advance(number):
            stripe = self._held[number]
            yield stripe.memory[number][: stripe.shard]
        if self._failed:
            raise WorldError("the source of what was to be written has failed")

    def drain(self, number: int) -> None:
        """Release a volume that takes no more, perhaps early, so that the rest continue."""
        while not self._ended[number]:
            self._advance(number)

    def _advance(self, number: int) -> bool:
        """Release the volume's present stripe, and wait for the next one."""
        held = self._held.pop(number, None)
        if held is not None:
            self._release(held)
        stripe = self._queues[number].get()
        if stripe is None:
            self._ended[number] = True
            return False
        self._held[number] = stripe
        return True

    def _hand_out_last(self, stripe: _Stripe, filled: int) -> None:
        """Hand out a short last stripe, whose shards are shorter and laid out differently."""
        data = b"".join(bytes(m) for m in stripe.memory[: self._code.k])[:filled]
        shard = shard_of(filled, self._code.k, SHARD_BYTES)
        data = data.ljust(shard * self._code.k, b"\0")
        for i in range(self._code.k):
            stripe.memory[i][:shard] = data[i * shard : (i + 1) * shard]
        self._hand_out(stripe, shard)

    def _hand_out(self, stripe: _Stripe, shard: int) -> None:
        k = self._code.k
        pieces = [m[:shard] for m in stripe.memory]
        self._code.encode(pieces[:k], pieces[k:])
        stripe.shard, stripe.readers = shard, len(self._queues)
        for each in self._queues:
            each.put(stripe)

    def _release(self, stripe: _Stripe) -> None:
        with self._lock:
            stripe.readers -= 1
            free = stripe.readers == 0
        if free:
            self._free.put(stripe)

"""Computes how an object lies on k + m volumes: in stripes of k data and m parity shards. Pure.

Each volume holds the object's shards of one number, one after the other, then the digests of those
shards, then a footer. So each volume knows by itself which of its blocks are intact. Two writes of
one name differ in their version, and only shards of one version belong together.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import msgspec

from holdfast.engine.core.errors import Damaged, OtherRelease, newer_format
from holdfast.engine.state.store.manifest import DIGEST_BYTES, digest
from holdfast.engine.wire.strict import StrictDecoder

SHARD_BYTES = 256 << 10
ALIGN = 64  # a short stripe's shards have a multiple of this many bytes
FOOTER_BYTES = 256
MAGIC = b"HFSHARD1"


@dataclass(frozen=True, slots=True, kw_only=True)
class Footer:
    """Describes one volume's object.

    `version`: a number that grows with each write, even if the clock is set back, and a random one.
    """

    version: tuple[int, int]
    #: Number among the k + m shards.
    number: int
    k: int
    m: int
    #: Bytes of the whole object.
    size: int
    shard_bytes: int
    #: Digest of the table of digests.
    table: bytes


@dataclass(frozen=True, slots=True, kw_only=True)
class Stripe:
    """Describes bytes `start` to `start + size` of the object, on each volume at `offset`."""

    index: int
    start: int
    size: int
    #: Bytes of each shard.
    shard: int
    offset: int


class Geometry:
    """Computes where everything of an object of `size` bytes lies."""

    def __init__(self, size: int, k: int, shard_bytes: int) -> None:
        self.size = size
        self.k = k
        self.shard_bytes = shard_bytes
        self.stripe_bytes = k * shard_bytes
        self.count = -(-size // self.stripe_bytes)

    def stripe(self, index: int) -> Stripe:
        start = index * self.stripe_bytes
        size = min(self.stripe_bytes, self.size - start)
        return Stripe(
            index=index,
            start=start,
            size=size,
            shard=shard_of(size, self.k, self.shard_bytes),
            offset=index * self.shard_bytes,
        )

    def stripes_of(self, offset: int, size: int) -> Iterator[Stripe]:
        """Return the stripes that hold a range."""
        if size > 0:
            first, last = offset // self.stripe_bytes, (offset + size - 1) // self.stripe_bytes
            yield from (self.stripe(i) for i in range(first, last + 1))

    @property
    def shards_bytes(self) -> int:
        """Return the bytes of all shards on one volume."""
        if not self.count:
            return 0
        last = self.stripe(self.count - 1)
        return last.offset + last.shard

    @property
    def volume_bytes(self) -> int:
        return self.shards_bytes + self.count * DIGEST_BYTES + FOOTER_BYTES


def shard_of(size: int, k: int, shard_bytes: int) -> int:
    """Return the bytes of each shard of a stripe that holds `size` bytes."""
    return min(shard_bytes, -(-size // (k * ALIGN)) * ALIGN)


_ENCODER = msgspec.msgpack.Encoder()
_DECODER = StrictDecoder(Footer)


def encode_footer(footer: Footer) -> bytes:
    payload = _ENCODER.encode(footer)
    head = MAGIC + len(payload).to_bytes(2, "little") + payload
    return (head + digest(head)).ljust(FOOTER_BYTES, b"\0")


def decode_footer(data: bytes, volume_bytes: int, where: str) -> Footer:
    """Decode a footer; Damaged, unless it fits a volume's object of this size."""
    end = len(MAGIC) + 2 + int.from_bytes(data[len(MAGIC) : len(MAGIC) + 2], "little")
    head, found = data[:end], data[end : end + DIGEST_BYTES]
    newer = newer_format(data, MAGIC)
    if not (newer or data.startswith(MAGIC)) or digest(head) != found:
        raise Damaged(f"{where} is damaged: it has no footer")
    if newer:
        raise OtherRelease(f"{where} {newer}")
    try:
        footer = _DECODER.decode(head[len(MAGIC) + 2 :])
    except (msgspec.MsgspecError, UnicodeDecodeError) as error:
        raise OtherRelease(f"{where} is of another release of Holdfast: {error}") from None
    sound = footer.k >= 1 and footer.m >= 0 and 0 <= footer.number < footer.k + footer.m
    sound = sound and footer.size >= 0 and footer.shard_bytes >= ALIGN
    if (
        not sound
        or Geometry(footer.size, footer.k, footer.shard_bytes).volume_bytes != volume_bytes
    ):
        raise Damaged(f"{where} is damaged: its footer does not fit its {volume_bytes} bytes")
    return footer

"""Carries what a member sends to a worker that follows, over a TCP connection of its own.

Both sides first prove that they are of the job (net/peer_stream.py). Then messages go one way: a
head in MessagePack, and buffers whose digests are in it. They are never executed or unpickled.
"""

from __future__ import annotations

import socket
from collections.abc import Sequence

import msgspec
import xxhash

from holdfast.engine.core.errors import WireError
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_stream import UNLIMITED, SendRate
from holdfast.engine.net.tls import PeerIdentity

MAGIC = b"hfeed\0\0\1"
HEAD_BYTES_MAX = 1 << 20


class FeedHead(msgspec.Struct, frozen=True, kw_only=True):
    """Describes the message that follows. `buffers`: bytes and digest of each.

    `kind`: "state" (first, with the skeleton from rank 0), "part" (of the state), "step" or "end".
    `step`: the step of the state, or of the gradient. `index`: the number of the part. `plan`: 63
    bits that stand for the summed parameters. `tables`: for each, the number of rows sent, and
    whether these are all of its rows. `compared`: the members know that they have copied the same
    state.
    """

    kind: str
    step: int = 0
    index: int = 0
    plan: int = 0
    tables: tuple[tuple[int, bool], ...] = ()
    compared: bool = False
    buffers: tuple[tuple[int, bytes], ...] = ()


def connect(
    address: str, identity: PeerIdentity, number: int, rank: int, size: int
) -> socket.socket:
    """Connect to a follower as rank `rank` of `size` that feed by an order. OSError, WireError."""
    return peer_stream.connect(address, identity, MAGIC, (number, rank, size))


def send(
    channel: socket.socket,
    head: FeedHead,
    buffers: Sequence[memoryview],
    rate: SendRate = UNLIMITED,
    digest: bytes = b"",
) -> None:
    """Send one message. `digest`: the digest of its only buffer, if known. OSError."""
    named = tuple((len(each), digest or xxhash.xxh3_128_digest(each)) for each in buffers)
    peer_stream.send_message(channel, msgspec.structs.replace(head, buffers=named))
    for each in buffers:
        rate.send(channel, each)


def read_head(channel: socket.socket) -> FeedHead:
    """Read the head of the next message. OSError, WireError."""
    return peer_stream.receive_message(channel, FeedHead, HEAD_BYTES_MAX)


def read_into(channel: socket.socket, place: memoryview, named: tuple[int, bytes]) -> None:
    """Read a buffer to where it belongs, and check it. OSError, WireError."""
    count, digest = named
    if count != len(place):
        raise WireError(f"a follower was sent {count} bytes where {len(place)} belong")
    peer_stream.fill(channel, place)
    if xxhash.xxh3_128_digest(place) != digest:
        raise WireError("what a follower was sent has arrived damaged")

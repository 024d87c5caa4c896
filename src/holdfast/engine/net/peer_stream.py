"""Opens TCP connections on which both sides first prove that they are of the same job.

The connecting side names its purpose, in a magic word and three numbers; net/peer_listener.py
listens. With certificates all of it is encrypted (TLS). Messages are MessagePack with their length
before them; their meaning, and any bytes after them, are up to the callers.

The proofs are tokens. Only a holder of the job's peer key can make a token. It is bound to its
sender, its receiver and all earlier words of both sides, which contain a fresh random number of
each and so belong to one connection alone. A token that was overheard is of no use in another group
or to another member. It proves the identity of members as the group is built. It neither hides nor
seals later data.
"""

from __future__ import annotations

import hashlib
import hmac
import os
import socket
import ssl
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, TypeVar

import msgspec

from holdfast.engine.core.errors import WireError
from holdfast.engine.net import tls
from holdfast.engine.net.tls import PeerIdentity, split_address

TOKEN_BYTES = 32
NONCE_BYTES = 16


def group_name(addresses: Sequence[bytes]) -> bytes:
    """Digest a group's `addresses` by rank, each with its owner's nonce: no other group has it."""
    digest = hashlib.sha256(b"holdfast group 1")
    for address in addresses:
        digest.update(len(address).to_bytes(4, "big") + address)
    return digest.digest()


def token(key: bytes, group: bytes, sender: int, receiver: int) -> bytes:
    """Make the token that rank `sender` shows to rank `receiver`."""
    text = b"holdfast peer 1|%s|%d|%d" % (group, sender, receiver)
    return hmac.digest(key, text, hashlib.sha256)


def is_token(claim: bytes, key: bytes, group: bytes, sender: int, receiver: int) -> bool:
    """Compare tokens in constant time."""
    return hmac.compare_digest(claim, token(key, group, sender, receiver))


HELLO = struct.Struct("!8sQII16s")  # magic, three numbers, nonce
REACH_S = 10.0  # to connect and to exchange proofs: a process that listens may just be starting
LATE = "the other side did not finish the handshake in time"
BLOCK_BYTES = 1 << 20  # sent or received at a time
LENGTH = struct.Struct("!I")
MESSAGE_BYTES_MAX = 64 << 20

Purpose = tuple[int, int, int]
T = TypeVar("T")

_decoders: dict[Any, msgspec.msgpack.Decoder[Any]] = {}  # by kind of message
# msgspec must not look into a type in two threads at once: one may see what the other has begun,
# and the process ends by a segmentation fault.
_making = threading.Lock()


def connect(
    address: str,
    identity: PeerIdentity,
    magic: bytes,
    purpose: Purpose,
    patience_s: float | None = None,
    reach_s: float = REACH_S,
) -> socket.socket:
    """Connect to an announced address and prove that this is a peer of the job. OSError, WireError.

    `patience_s`: how long the other side may be silent afterwards; None: for ever. `reach_s`: for
    the connection and the proofs of both sides together.
    """
    host, port, name = split_address(address)
    until = time.monotonic() + reach_s
    channel = socket.create_connection((host, port), reach_s)
    try:
        channel = begin_tls(channel, identity, name)
        introduce(channel, identity.key, magic, purpose, until)
        channel.settimeout(patience_s)
    except ssl.SSLError as error:
        channel.close()
        raise WireError(f"{address}: {tls.describe_error(error)}") from None
    except WireError as error:
        channel.close()
        raise WireError(f"{address}: {error}") from None
    except BaseException:
        channel.close()
        raise
    return channel


def begin_tls(channel: socket.socket, identity: PeerIdentity, name: str) -> socket.socket:
    """Return the connection to use instead of `channel`: encrypted, if we have certificates.

    No byte has been sent yet when it returns; `introduce` shakes hands. `name`: what the
    listener's certificate must be for. OSError.
    """
    if identity.tls is None:
        return channel
    # The end of the handshake and the hello leave one after the other; neither may wait for an
    # acknowledgement.
    channel.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    return identity.tls.client.wrap_socket(
        channel, server_hostname=name, do_handshake_on_connect=False
    )


def shut(channel: socket.socket) -> None:
    """End a connection in both directions, which frees its blocked threads. Never blocks.

    SSLSocket.shutdown would let a thread that is still sending continue without encryption.
    """
    with suppress(OSError):
        socket.socket.shutdown(channel, socket.SHUT_RDWR)


def introduce(
    channel: socket.socket, key: bytes, magic: bytes, purpose: Purpose, until: float
) -> None:
    """Send the listener our purpose and exchange proofs, before `until`. OSError, WireError."""
    if isinstance(channel, ssl.SSLSocket):
        channel.settimeout(max(until - time.monotonic(), 0.001))
        try:
            channel.do_handshake()
        except TimeoutError:
            raise TimeoutError(LATE) from None
    hello = HELLO.pack(magic, *purpose, os.urandom(NONCE_BYTES))
    channel.sendall(hello)
    group = group_name([hello, _receive_by(until, channel, NONCE_BYTES)])
    channel.sendall(token(key, group, 0, 1))
    claim = _receive_by(until, channel, TOKEN_BYTES)
    if not is_token(claim, key, group, 1, 0):
        raise WireError("what listens there has not proved that it is of this job")


def _receive_by(until: float, channel: socket.socket, count: int) -> bytes:
    """Receive `count` bytes before a moment, however slowly they come. OSError, WireError."""
    data = b""
    while len(data) < count:
        left_s = until - time.monotonic()
        if left_s <= 0:
            raise TimeoutError(LATE)
        channel.settimeout(left_s)
        more = channel.recv(count - len(data))
        if not more:
            raise WireError("the other side has ended the connection")
        data += more
    return data


class PeerProof:
    """Conducts the listening side of the proof: bytes in, bytes out, without a socket or a clock.

    `purpose` is None until the other side has proved that it is of the job; then it is what that
    side has connected for.
    """

    def __init__(self, key: bytes, magic: bytes) -> None:
        self.purpose: Purpose | None = None
        self._key = key
        self._magic = magic
        self._hello = b""
        self._data = b""  # bytes received of the hello, or of the token after it
        self._group = b""  # empty: the hello has not come yet

    @property
    def wants(self) -> int:
        """Return the number of bytes to read at most; later ones belong to another reader."""
        size = TOKEN_BYTES if self._group else HELLO.size
        return size - len(self._data)

    def feed(self, data: bytes) -> bytes:
        """Take up to `wants` bytes in; returns what to send. WireError: this is no peer."""
        self._data += data
        if self._group:
            return self._check_token() if not self.wants else b""
        if not self._magic.startswith(self._data[: len(self._magic)]):
            raise WireError(f"not a peer of this job: it begins with {self._data[:8]!r}")
        if self.wants:
            return b""
        nonce = os.urandom(NONCE_BYTES)
        self._hello, self._data = self._data, b""
        self._group = group_name([self._hello, nonce])
        return nonce

    def _check_token(self) -> bytes:
        if not is_token(self._data, self._key, self._group, 0, 1):
            raise WireError("it does not know this job's secret")
        _, first, second, third, _ = HELLO.unpack(self._hello)
        self.purpose = first, second, third
        return token(self._key, self._group, 1, 0)


def send_message(channel: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. OSError."""
    data = msgspec.msgpack.encode(message)
    channel.sendall(LENGTH.pack(len(data)) + data)


def receive_message(channel: socket.socket, kind: type[T], most: int = MESSAGE_BYTES_MAX) -> T:
    """Receive a message of this kind, of at most `most` bytes. OSError, WireError."""
    (length,) = LENGTH.unpack(receive_exactly(channel, LENGTH.size))
    if length > most:
        raise WireError(f"a message has {length} bytes, where {most} are the most")
    try:
        found: T = _decoder_of(kind).decode(receive_exactly(channel, length))
    except msgspec.MsgspecError as error:
        raise WireError(f"a message cannot be read: {error}") from None
    return found


def _decoder_of(kind: Any) -> msgspec.msgpack.Decoder[Any]:
    with _making:
        if kind not in _decoders:
            _decoders[kind] = msgspec.msgpack.Decoder(kind)
        return _decoders[kind]


def receive_exactly(channel: socket.socket, count: int) -> bytes:
    """Receive `count` bytes. OSError, WireError."""
    data = bytearray()
    # The count is only a claim, so memory is taken as the bytes come.
    while len(data) < count:
        part = bytearray(min(count - len(data), BLOCK_BYTES))
        fill(channel, memoryview(part))
        data += part
    return bytes(data)


def fill(channel: socket.socket, place: memoryview) -> None:
    """Receive bytes until `place` is full. OSError, WireError."""
    at, count = 0, len(place)
    while at < count:
        read = channel.recv_into(place[at:], min(count - at, BLOCK_BYTES))
        if not read:
            raise WireError("the other side has ended the connection")
        at += read


class SendRate:
    """Keeps to a rate of `bytes_per_s`, for all connections together; 0: to none."""

    def __init__(self, bytes_per_s: float) -> None:
        self._rate = bytes_per_s
        self._free_at = 0.0
        self._lock = threading.Lock()

    def send(self, channel: socket.socket, data: memoryview) -> None:
        """Send data in blocks, as fast as the rate allows. OSError."""
        if not self._rate:
            channel.sendall(data)
            return
        for start in range(0, len(data), BLOCK_BYTES):
            block = data[start : start + BLOCK_BYTES]
            channel.sendall(block)
            self.count_sent(len(block))

    def count_sent(self, count: int) -> None:
        """Record `count` sent bytes, and wait until the rate allows more."""
        if not self._rate:
            return
        with self._lock:
            now = time.monotonic()
            self._free_at = free_at = max(self._free_at, now) + count / self._rate
        if free_at > now + 0.001:
            time.sleep(free_at - now)


UNLIMITED = SendRate(0.0)

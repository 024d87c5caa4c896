"""Bytes of a stream <-> authenticated frames. No sockets here.

A frame is a 4-byte length, a 16-byte tag and the payload. The tag is a keyed BLAKE2b over the
frame's number and its payload, so a frame that is altered, replayed, reordered or from a stranger
is refused. Channels that are private by construction (an inherited socket pair) use no key: their
frames have no tag.

The handshake proves to both sides that the other knows the job's secret, without sending it:
    server -> client   magic, version, server nonce
    client -> server   client nonce, proof("client")
    server -> client   proof("server")
"""

from __future__ import annotations

import hashlib
import hmac

from holdfast.core.errors import WireError

MAGIC = b"HOLDFAST"
VERSION = 1
NONCE_BYTES = 16
PROOF_BYTES = 32
TAG_BYTES = 16
FRAME_BYTES_MAX = 64 << 20
GREETING_BYTES = len(MAGIC) + 2 + NONCE_BYTES
ANSWER_BYTES = NONCE_BYTES + PROOF_BYTES


class Sealer:
    """Turns payloads into frames of one direction of one connection."""

    def __init__(self, key: bytes | None) -> None:
        self._key = key
        self._number = 0

    def seal(self, payload: bytes) -> bytes:
        if len(payload) > FRAME_BYTES_MAX:
            raise WireError(f"a message of {len(payload)} bytes is over {FRAME_BYTES_MAX}")
        tag = _tag(self._key, self._number, payload) if self._key is not None else b""
        self._number += 1
        return len(payload).to_bytes(4, "big") + tag + payload


class Opener:
    """Collects bytes of one direction and returns the payloads of whole frames."""

    def __init__(self, key: bytes | None, bytes_max: int = FRAME_BYTES_MAX) -> None:
        self._key = key
        self._bytes_max = bytes_max
        self._number = 0
        self._buffer = bytearray()

    def feed(self, data: bytes) -> list[bytes]:
        """Payloads completed by `data`. WireError: the connection must be closed."""
        self._buffer += data
        payloads: list[bytes] = []
        head = 4 + (TAG_BYTES if self._key is not None else 0)
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            if size > self._bytes_max:
                raise WireError(f"a frame of {size} bytes is over the limit of {self._bytes_max}")
            if len(self._buffer) < head + size:
                break
            payload = bytes(self._buffer[head : head + size])
            if self._key is not None:
                expected = _tag(self._key, self._number, payload)
                if not hmac.compare_digest(expected, bytes(self._buffer[4:head])):
                    raise WireError(f"frame {self._number} is not authentic")
            self._number += 1
            del self._buffer[: head + size]
            payloads.append(payload)
        return payloads


def greeting(nonce: bytes) -> bytes:
    return MAGIC + VERSION.to_bytes(2, "big") + nonce


def read_greeting(data: bytes) -> bytes:
    """The server's nonce."""
    if data[: len(MAGIC)] != MAGIC:
        raise WireError(f"this is not a Holdfast server: it greets with {data[:8]!r}")
    version = int.from_bytes(data[len(MAGIC) : len(MAGIC) + 2], "big")
    if version != VERSION:
        raise WireError(f"the server speaks version {version}, we speak {VERSION}: use one release")
    return data[len(MAGIC) + 2 :]


def proof(secret: bytes, role: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    text = b"%s|%d|%s|%s" % (role.encode(), VERSION, server_nonce, client_nonce)
    return hmac.digest(secret, text, hashlib.sha256)


def check_proof(
    data: bytes, secret: bytes, role: str, server_nonce: bytes, client_nonce: bytes
) -> None:
    if not hmac.compare_digest(data, proof(secret, role, server_nonce, client_nonce)):
        raise WireError(f"the {role} does not know this job's secret")


def session_key(secret: bytes, sender: str, server_nonce: bytes, client_nonce: bytes) -> bytes:
    """The key for frames sent by `sender` ("client" or "server")."""
    return proof(secret, f"{sender} frames", server_nonce, client_nonce)


def _tag(key: bytes, number: int, payload: bytes) -> bytes:
    mac = hashlib.blake2b(number.to_bytes(8, "big"), key=key, digest_size=TAG_BYTES)
    mac.update(payload)
    return mac.digest()

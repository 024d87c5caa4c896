"""Turns the bytes of a stream into authenticated frames and back, without sockets.

A frame is a 4-byte length, a 16-byte tag and the payload. The tag is a keyed BLAKE2b over the
frame's number and its payload, so a frame that is altered, replayed, reordered or from a stranger
is refused. Channels that are private by construction (an inherited socket pair) use no key: their
frames have no tag.

The handshake proves to both sides that the other knows the secret, without sending it, and the
other's job:
    server -> client   magic, version, release, server nonce, its job
    client -> server   magic, version, release, client nonce, its job, proof("client")
    server -> client   proof("server")
Both nonces and both jobs are part of every proof and key. The nonces are fresh, so no part of a
connection can be used again in another; and without the secret nobody can pass one job off as
another. A client that is of no job yet names none. It sends these bytes and not one more before it
has seen the server's proof. Jobs are compared after the proofs, so that both sides can rely on
each other's words.
"""

from __future__ import annotations

import hashlib
import hmac
from collections.abc import Iterator
from dataclasses import dataclass

from holdfast.engine.core.errors import RELEASE, WireError
from holdfast.engine.core.job_problems import JOB_BYTES_MAX

MAGIC = b"HOLDFAST"
VERSION = 2  # 1 named neither release nor job
RELEASE_BYTES = 16
NONCE_BYTES = 16
PROOF_BYTES = 32
TAG_BYTES = 16
FRAME_BYTES_MAX = 64 << 20
FIRST_FRAME_BYTES_MAX = 4 << 20  # until the first frame has been authenticated
HEAD_BYTES = len(MAGIC) + 2  # a greeting's start, the same in all releases
GREETING_BYTES = HEAD_BYTES + RELEASE_BYTES + NONCE_BYTES


class Sealer:
    """Turns payloads into frames, for one direction of one connection."""

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
    """Collects bytes of one direction and returns the payloads of whole frames.

    It never holds more than one frame of the allowed size plus the bytes of one feed. At first that
    size is `first_bytes_max`, since a frame's length is read before its tag can be checked.
    """

    def __init__(
        self,
        key: bytes | None,
        bytes_max: int = FRAME_BYTES_MAX,
        first_bytes_max: int = FIRST_FRAME_BYTES_MAX,
    ) -> None:
        self._key = key
        self._bytes_max = bytes_max
        self._first_bytes_max = min(first_bytes_max, bytes_max)
        self._number = 0
        self._buffer = bytearray()

    @property
    def held_bytes(self) -> int:
        return len(self._buffer)

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take `data` and yield the payloads it completes; iterate to the end before feeding again.

        WireError, after the payloads that came before the bad frame: close the connection.
        """
        self._buffer += data
        return self._frames()

    def _frames(self) -> Iterator[bytes]:
        head = 4 + (TAG_BYTES if self._key is not None else 0)
        while len(self._buffer) >= 4:
            size = int.from_bytes(self._buffer[:4], "big")
            size_max = self._bytes_max if self._number else self._first_bytes_max
            if size > size_max:
                raise WireError(f"a frame of {size} bytes is over the limit of {size_max}")
            if len(self._buffer) < head + size:
                return
            with memoryview(self._buffer) as view:
                tag, payload = bytes(view[4:head]), bytes(view[head : head + size])
            if self._key is not None:
                if not hmac.compare_digest(_tag(self._key, self._number, payload), tag):
                    raise WireError(f"frame {self._number} is not authentic")
            self._number += 1
            del self._buffer[: head + size]  # moves the array's start, not its bytes
            yield payload


_RELEASE = RELEASE.encode().ljust(RELEASE_BYTES, b"\0")


def greeting(nonce: bytes) -> bytes:
    return MAGIC + VERSION.to_bytes(2, "big") + _RELEASE + nonce


def check_start(data: bytes, whose: str) -> None:
    """Raise WireError as soon as the first bytes cannot become a greeting of ours.

    Greetings of other versions have other lengths: waiting for all of ours could take for ever.
    """
    if not MAGIC.startswith(data[: len(MAGIC)]):
        raise WireError(f"this is not a Holdfast {whose}: it begins with {bytes(data[:8])!r}")
    if len(data) < HEAD_BYTES:
        return
    version = int.from_bytes(data[len(MAGIC) : HEAD_BYTES], "big")
    if version != VERSION:
        raise WireError(
            f"the {whose} speaks version {version}, we speak {VERSION}: "
            "install one release on all machines"
        )


def read_greeting(data: bytes, whose: str) -> bytes:
    """Return the nonce in a greeting of the "server" or "client". WireError."""
    check_start(data, whose)
    if len(data) != GREETING_BYTES:
        raise WireError(f"the {whose}'s greeting has {len(data)} bytes, not {GREETING_BYTES}")
    release = data[HEAD_BYTES:-NONCE_BYTES]
    if release != _RELEASE:
        theirs = release.rstrip(b"\0").decode("ascii", "backslashreplace")
        raise WireError(
            f"the {whose} is Holdfast {theirs!r} and this is {RELEASE!r}: "
            "install one release on all machines"
        )
    return data[-NONCE_BYTES:]


def write_job(job: str) -> bytes:
    """Return the field that names a job, or that names none if `job` is empty."""
    return job.encode().ljust(JOB_BYTES_MAX, b"\0")


def read_job(field: bytes) -> str:
    """Return the job in a field that its sender has proved; empty if it names none."""
    return field.rstrip(b"\0").decode(errors="replace")


@dataclass(frozen=True, slots=True, kw_only=True)
class Encounter:
    """Keeps the words of both sides of a connection before their proofs.

    `server_job` and `client_job` are fields of JOB_BYTES_MAX bytes.
    """

    server_nonce: bytes
    client_nonce: bytes
    server_job: bytes
    client_job: bytes


def proof(secret: bytes, role: str, encounter: Encounter) -> bytes:
    """Make the proof that only a holder of the secret can make, in this encounter and role."""
    nonces = (encounter.server_nonce, encounter.client_nonce)
    jobs = (encounter.server_job, encounter.client_job)
    text = b"|".join([role.encode(), b"%d" % VERSION, *nonces, *jobs])
    return hmac.digest(secret, text, hashlib.sha256)


def check_proof(data: bytes, secret: bytes, role: str, encounter: Encounter) -> None:
    """Raise WireError unless `data` is the proof of the "server" or "client"."""
    if not hmac.compare_digest(data, proof(secret, role, encounter)):
        raise WireError(f"the {role} does not know this job's secret")


def session_key(secret: bytes, sender: str, encounter: Encounter) -> bytes:
    """Derive the key for frames sent by `sender` ("client" or "server")."""
    return proof(secret, f"{sender} frames", encounter)


def _tag(key: bytes, number: int, payload: bytes) -> bytes:
    mac = hashlib.blake2b(number.to_bytes(8, "big"), key=key, digest_size=TAG_BYTES)
    mac.update(payload)
    return mac.digest()

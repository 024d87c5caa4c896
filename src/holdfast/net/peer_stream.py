"""Opens TCP connections on which both sides first prove that they are of the same job.

Whoever connects says what it is for, in a magic word and three numbers. The proofs are those of
net/proof.py; what follows is up to the callers.
"""

from __future__ import annotations

import os
import socket
import struct

from holdfast.core.errors import WireError
from holdfast.net import proof

HELLO = struct.Struct("!8sQII16s")  # magic, three numbers, nonce
PROOF_S = 10.0  # for the proofs of both sides
BLOCK_BYTES = 1 << 20  # that are received at a time

Purpose = tuple[int, int, int]


def connect(
    address: str, key: bytes, magic: bytes, purpose: Purpose, patience_s: float | None = None
) -> socket.socket:
    """Connect to HOST:PORT, to which the job's peer `key` is proved. OSError, WireError.

    `patience_s`: how long the other side may be silent later on; None: for ever.
    """
    host, _, port = address.rpartition(":")
    channel = socket.create_connection((host, int(port)), PROOF_S)
    try:
        hello = HELLO.pack(magic, *purpose, os.urandom(proof.NONCE_BYTES))
        channel.sendall(hello)
        group = proof.group_name([hello, exactly(channel, proof.NONCE_BYTES)])
        channel.sendall(proof.token(key, group, 0, 1))
        if not proof.is_token(exactly(channel, proof.TOKEN_BYTES), key, group, 1, 0):
            raise WireError(f"what listens at {address} has not proved that it is of this job")
        channel.settimeout(patience_s)
    except BaseException:
        channel.close()
        raise
    return channel


def accept(channel: socket.socket, key: bytes, magic: bytes) -> Purpose:
    """Prove each other's job to whoever has connected, and return for what. OSError, WireError."""
    channel.settimeout(PROOF_S)
    hello = exactly(channel, HELLO.size)
    found, first, second, third, _ = HELLO.unpack(hello)
    if found != magic:
        raise WireError("a connection that is none of Holdfast's")
    nonce = os.urandom(proof.NONCE_BYTES)
    channel.sendall(nonce)
    group = proof.group_name([hello, nonce])
    if not proof.is_token(exactly(channel, proof.TOKEN_BYTES), key, group, 0, 1):
        raise WireError("a connection that has not proved that it is of this job")
    channel.sendall(proof.token(key, group, 1, 0))
    channel.settimeout(None)
    return first, second, third


def listen(host: str) -> tuple[socket.socket, str]:
    """Listen at a free port; returns the listener, and its HOST:PORT. OSError."""
    family = socket.getaddrinfo(host, None)[0][0]
    listener = socket.create_server((host, 0), family=family)
    return listener, f"{host}:{listener.getsockname()[1]}"


def exactly(channel: socket.socket, count: int) -> bytes:
    """Receive so many bytes. OSError, WireError."""
    data = bytearray(count)
    fill(channel, memoryview(data))
    return bytes(data)


def fill(channel: socket.socket, place: memoryview) -> None:
    """Receive as many bytes as fit into `place`. OSError, WireError."""
    at, count = 0, len(place)
    while at < count:
        read = channel.recv_into(place[at:], min(count - at, BLOCK_BYTES))
        if not read:
            raise WireError("the other side has ended the connection")
        at += read

"""Opens TCP connections on which both sides first prove that they are of the same job.

Whoever connects says what it is for, in a magic word and three numbers. The proofs are those of
net/proof.py. Messages are MessagePack with their length before them; what they say, and what
follows them, is up to the callers.
"""

from __future__ import annotations

import os
import socket
import struct
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar

import msgspec

from holdfast.core.errors import WireError
from holdfast.net import proof
from holdfast.net.tcp import tune

HELLO = struct.Struct("!8sQII16s")  # magic, three numbers, nonce
PROOF_S = 10.0  # for the proofs of both sides
BLOCK_BYTES = 1 << 20  # that are received at a time
LENGTH = struct.Struct("!I")
MESSAGE_BYTES_MAX = 64 << 20
STRANGERS_MAX = 64  # connections that have proved nothing yet
SILENT_S = 20.0  # for which a machine answers nothing before a connection counts as ended
RETRY_S = 0.1

Purpose = tuple[int, int, int]
Handler = Callable[[socket.socket, Purpose], object]
T = TypeVar("T")


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
    tune(channel, SILENT_S)
    return first, second, third


def serve(host: str, key: bytes, magic: bytes, handle: Handler) -> str:
    """Serve whoever is of the job, each in a thread of its own; returns HOST:PORT. OSError.

    `handle` is called with each connection, which ends with it; OSError and WireError end it, too.
    """
    family = socket.getaddrinfo(host, None)[0][0]
    listener = socket.create_server((host, 0), family=family)
    strangers = threading.BoundedSemaphore(STRANGERS_MAX)

    def meet(channel: socket.socket) -> None:
        with channel, suppress(OSError, WireError):
            try:
                purpose = accept(channel, key, magic)
            finally:
                strangers.release()
            handle(channel, purpose)

    def wait() -> None:
        while True:
            welcome(listener, strangers, meet)

    threading.Thread(target=wait, name="holdfast-serve", daemon=True).start()
    return f"{host}:{listener.getsockname()[1]}"


def welcome(
    listener: socket.socket,
    strangers: threading.BoundedSemaphore,
    meet: Callable[[socket.socket], None],
) -> None:
    """Accept one connection, and call `meet` in a thread of its own, which releases `strangers`.

    With too many strangers it is closed. If no descriptor or thread is left, for a while, it waits.
    """
    taken, channel = False, None
    try:
        channel, _ = listener.accept()
        if taken := strangers.acquire(blocking=False):
            threading.Thread(target=meet, args=(channel,), daemon=True).start()
        else:
            channel.close()
    except (OSError, RuntimeError):
        if taken:
            strangers.release()
        if channel is not None:
            channel.close()
        time.sleep(RETRY_S)


def send_message(channel: socket.socket, message: msgspec.Struct) -> None:
    """Send a message. OSError."""
    data = msgspec.msgpack.encode(message)
    channel.sendall(LENGTH.pack(len(data)) + data)


def receive_message(channel: socket.socket, kind: type[T], most: int = MESSAGE_BYTES_MAX) -> T:
    """Receive a message of this kind, of at most so many bytes. OSError, WireError."""
    (length,) = LENGTH.unpack(exactly(channel, LENGTH.size))
    if length > most:
        raise WireError(f"a message has {length} bytes, where {most} are the most")
    try:
        return msgspec.msgpack.decode(exactly(channel, length), type=kind)
    except msgspec.MsgspecError as error:
        raise WireError(f"a message cannot be read: {error}") from None


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

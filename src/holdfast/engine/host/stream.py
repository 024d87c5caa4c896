"""Move plain bytes between two machines, for measuring bandwidth; blocking, in threads.

A stream is let in by a token that was given through an authenticated channel and works once. Its
bytes mean nothing and are thrown away. Each side bounds bytes and time by itself. The port is of
the system's choice, as are those of gloo and NCCL: whoever cannot reach it could not train either.
"""

from __future__ import annotations

import contextlib
import hmac
import os
import socket
import time

from holdfast.engine.host.limits import GIB, MIB
from holdfast.engine.net.readiness import wait_readable
from holdfast.engine.net.strangers import Strangers

TOKEN_BYTES = 32
COUNT_BYTES = 8
BLOCK_BYTES = 1 * MIB
STREAM_BYTES_MAX = 4 * GIB
STREAM_S_MAX = 10.0
SILENCE_S = 5.0
STRANGERS_MAX = 16


class Acceptor:
    """An acceptor is the server's side of one stream: a port for one connection with the token."""

    def __init__(self, listener: socket.socket, direction: str, token: bytes) -> None:
        self._listener = listener
        self._direction = direction
        self.token = token

    @classmethod
    def open(cls, host: str, direction: str) -> Acceptor:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, 0), family=family, backlog=STRANGERS_MAX)
        listener.setblocking(False)
        return cls(listener, direction, os.urandom(TOKEN_BYTES))

    @property
    def port(self) -> int:
        return int(self._listener.getsockname()[1])

    def close(self) -> None:
        self._listener.close()

    def run(self) -> int:
        """Serve the one stream, then close; returns the bytes moved. OSError when nobody comes."""
        with self._listener:
            connection = self._meet()
        with connection:
            connection.settimeout(SILENCE_S)
            if self._direction == "up":
                moved = drain(connection, STREAM_S_MAX)
                connection.sendall(moved.to_bytes(COUNT_BYTES, "big"))
                return moved
            return pour(connection, STREAM_S_MAX)

    def _meet(self) -> socket.socket:
        """Return the connection that has sent the token. OSError if none does in time."""
        strangers: Strangers[socket.socket] = Strangers(STRANGERS_MAX)
        end = time.monotonic() + SILENCE_S
        try:
            while (left_s := end - time.monotonic()) > 0:
                # The listener comes last, because an admission may close one of the others.
                for each in wait_readable([*strangers.list_all(), self._listener], left_s):
                    if each is self._listener:
                        self._admit(strangers, left_s)
                        continue
                    strangers.leave(each)
                    if self._has_token(each):
                        return each
                    each.close()
        finally:
            for stranger in strangers.list_all():
                stranger.close()
        raise TimeoutError("timed out")

    def _admit(self, strangers: Strangers[socket.socket], left_s: float) -> None:
        with contextlib.suppress(BlockingIOError, ConnectionAbortedError):
            connection, address = self._listener.accept()
            # It can be read once the whole token is there, or the connection has ended.
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, TOKEN_BYTES)
            host = str(address[0])
            for closed, _ in strangers.enter(connection, host, time.monotonic(), left_s):
                closed.close()

    def _has_token(self, connection: socket.socket) -> bool:
        try:
            data = connection.recv(TOKEN_BYTES, socket.MSG_DONTWAIT)
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        except OSError:
            return False
        return hmac.compare_digest(data, self.token)


def send_stream(host: str, port: int, token: bytes, budget_s: float) -> tuple[int, float]:
    """Send a stream; returns (bytes that arrived, bytes a second). OSError."""
    with socket.create_connection((host, port), SILENCE_S) as connection:
        connection.sendall(token)
        started = time.perf_counter()
        pour(connection, budget_s)
        connection.shutdown(socket.SHUT_WR)
        moved = int.from_bytes(receive_exactly(connection, COUNT_BYTES), "big")
        return moved, moved / max(time.perf_counter() - started, 1e-9)


def receive_stream(host: str, port: int, token: bytes, budget_s: float) -> tuple[int, float]:
    """Fetch a stream; returns (bytes that came, bytes a second). OSError."""
    with socket.create_connection((host, port), SILENCE_S) as connection:
        connection.sendall(token)
        started = time.perf_counter()
        moved = drain(connection, budget_s)
        return moved, moved / max(time.perf_counter() - started, 1e-9)


def pour(connection: socket.socket, budget_s: float) -> int:
    """Send zeros for so long, one block at least; until then also until the other side leaves."""
    block = bytes(BLOCK_BYTES)
    moved, end = 0, time.perf_counter() + budget_s
    while moved < STREAM_BYTES_MAX and (not moved or time.perf_counter() < end):
        try:
            connection.sendall(block)
        except (BrokenPipeError, ConnectionResetError):
            break
        moved += len(block)
    return moved


def drain(connection: socket.socket, budget_s: float) -> int:
    """Read and drop bytes for `budget_s` seconds, one block at least, or to their end."""
    buffer = bytearray(BLOCK_BYTES)
    moved, end = 0, time.perf_counter() + budget_s
    while moved < STREAM_BYTES_MAX and (moved < BLOCK_BYTES or time.perf_counter() < end):
        count = connection.recv_into(buffer)
        if not count:
            break
        moved += count
    return moved


def receive_exactly(connection: socket.socket, count: int) -> bytes:
    data = b""
    while len(data) < count:
        more = connection.recv(count - len(data))
        if not more:
            raise ConnectionError("the stream ended early")
        data += more
    return data

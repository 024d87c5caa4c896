"""Measures the way to a peer: round trip, clock and bandwidth, for peers that know the secret.

A reply carries two time stamps of the server; the reply to a request for a stream also has the
address and a token for plain bytes. The bytes of a stream are thrown away, and its token works
once. The system chooses the port, as for gloo and NCCL: a machine that cannot reach it could not
train either. Streams block, in threads. Every side bounds messages, bytes and time by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import os
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass, replace

from holdfast.engine.core.errors import WireError
from holdfast.engine.host.checks_peers import PeerSample, clock_offset
from holdfast.engine.host.findings import GIB, MIB
from holdfast.engine.net.channel import Channel, Gate, GatePolicy, connect
from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.net.strangers import Strangers
from holdfast.engine.wire.messages import PeerReply, PeerRequest

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
        """Serve the one stream, then close; returns the bytes moved. OSError: no peer comes."""
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
                # The listener comes last, because an admission may close another connection.
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


ROUND_TRIPS = 16
ANSWER_S = 5.0

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePolicy:
    """Bounds the work of one server for its peers.

    `strangers_max`: simultaneous connections without proof that they know the secret. The other
    bounds are for connections with the proof.
    """

    strangers_max: int = 128
    connections_max: int = 16
    connection_s: float = 60.0
    streams_max: int = 4
    messages_max: int = 1000


class PeerServer:
    """Answers the measurements of peers that know the secret.

    Strangers meet the same gate as at a coordinator (net/channel.py): they take no peer's place.
    """

    def __init__(
        self,
        secret: bytes,
        say: Callable[[str], None],
        clock: Clock = time.time,
        policy: ServePolicy | None = None,
    ) -> None:
        self._secret = secret
        self._say = say
        self._clock = clock
        self.policy = policy or ServePolicy()
        self._open = 0

    async def serve(self, listener: socket.socket, for_s: float) -> None:
        """Listen for `for_s` seconds; answers under way at the end are broken off."""
        policy = GatePolicy(strangers_max=self.policy.strangers_max)
        gate = Gate(self._secret, self._meet, self._say, policy=policy)
        gate.open(listener)
        try:
            await asyncio.sleep(for_s)
        finally:
            gate.close()

    async def _meet(self, channel: Channel) -> None:
        peer = channel.peer
        if self._open >= self.policy.connections_max:
            self._say(f"{peer}: refused, {self._open} measurements are going on")
            return
        self._open += 1
        try:
            await asyncio.wait_for(self._answer(channel), self.policy.connection_s)
        except asyncio.TimeoutError:
            self._say(f"{peer}: cut off after {self.policy.connection_s:g} s")
        except OSError as error:
            self._say(f"{peer}: {error}")
        finally:
            self._open -= 1

    async def _answer(self, channel: Channel) -> None:
        """Answer one peer's requests until it closes the connection. WireError, OSError."""
        moved = streams = 0
        for _ in range(self.policy.messages_max):
            request: PeerRequest | None = await channel.receive(PeerRequest)
            received_s = self._clock()
            if request is None:
                self._say(f"{channel.peer}: measured, {moved / MIB:.0f} MiB moved")
                return
            streams += bool(request.stream)
            if streams > self.policy.streams_max or request.stream not in ("", "up", "down"):
                raise WireError(
                    f"{channel.peer}: it asks for stream {streams}, {request.stream[:10]!r}"
                )
            here = channel.local_host
            acceptor = Acceptor.open(here, request.stream) if request.stream else None
            channel.send(
                PeerReply(
                    number=request.number,
                    received_s=received_s,
                    answered_s=self._clock(),
                    stream_port=acceptor.port if acceptor else 0,
                    stream_token=acceptor.token if acceptor else b"",
                )
            )
            if acceptor is not None:
                moved += await asyncio.get_running_loop().run_in_executor(None, acceptor.run)
        raise WireError(f"{channel.peer}: it asks too much")


async def measure_peer(
    host: str, port: int, secret: bytes, *, bandwidth_s: float, clock: Clock = time.time
) -> PeerSample:
    """Measure all of one peer; `bandwidth_s` is for each direction, and 0 leaves bandwidth out."""
    peer = f"{host}:{port}"
    late = "no answer to a connection"
    try:
        channel = await connect(host, port, secret)
        late = f"no answer for {ANSWER_S:g} s"
        try:
            return await _measure(channel, host, port, bandwidth_s, clock)
        finally:
            channel.close()
    except asyncio.TimeoutError:
        return PeerSample(peer=peer, failure=late)
    except (OSError, WireError) as error:
        return PeerSample(peer=peer, failure=str(error) or repr(error))


def try_peer(host: str, port: int, secret: str, bandwidth_s: float) -> PeerSample:
    """Measure one peer, waiting for it. `secret`: in hexadecimal digits."""
    return asyncio.run(measure_peer(host, port, bytes.fromhex(secret), bandwidth_s=bandwidth_s))


async def _measure(
    channel: Channel, host: str, port: int, bandwidth_s: float, clock: Clock
) -> PeerSample:
    peer = f"{host}:{port}"
    times = []
    for number in range(ROUND_TRIPS):
        sent_s = clock()
        channel.send(PeerRequest(number=number))
        reply = await _reply(channel)
        times.append((sent_s, reply.received_s, reply.answered_s, clock()))
    offset_s, round_trip_s = clock_offset(times)
    sample = PeerSample(peer=peer, round_trip_s=round_trip_s, offset_s=offset_s)
    if bandwidth_s <= 0:
        return sample
    try:
        up, sent_per_s = await _stream(channel, host, "up", bandwidth_s)
        down, received_per_s = await _stream(channel, host, "down", bandwidth_s)
    except OSError as error:
        return replace(sample, stream_failure=str(error) or repr(error))
    return replace(
        sample, sent_per_s=sent_per_s, received_per_s=received_per_s, moved_bytes=up + down
    )


async def _stream(
    channel: Channel, host: str, direction: str, budget_s: float
) -> tuple[int, float]:
    """Move bytes one way; returns (bytes moved, bytes a second)."""
    channel.send(PeerRequest(number=0, stream=direction))
    reply = await _reply(channel)
    run = send_stream if direction == "up" else receive_stream
    loop = asyncio.get_running_loop()
    return await loop.run_in_executor(
        None, run, host, reply.stream_port, reply.stream_token, budget_s
    )


async def _reply(channel: Channel) -> PeerReply:
    reply: PeerReply | None = await asyncio.wait_for(channel.receive(PeerReply), ANSWER_S)
    if reply is None:
        raise ConnectionError("the peer closed the connection")
    return reply

"""The way to a peer: round trip, clock and bandwidth, over channels that know the job's secret.

One request and one reply do everything: a reply carries two time stamps of the server and as many
bytes as were asked for. Every side bounds messages, bytes and time by itself.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from holdfast.core.checks_peers import PeerSample, clock_offset
from holdfast.core.errors import WireError
from holdfast.core.limits import MIB
from holdfast.runtime.channel import Channel, accept, connect
from holdfast.wire.messages import PeerReply, PeerRequest

BLOCK_BYTES = 1 * MIB
BLOCKS_AHEAD = 8  # on their way at once: enough to fill a long fat pipe, far below the backlog
ROUND_TRIPS = 16
BYTES_MAX = 256 * MIB  # of one direction of one measurement
ANSWER_S = 5.0

Clock = Callable[[], float]


@dataclass(frozen=True, slots=True, kw_only=True)
class ServePolicy:
    """What one server gives to others at most."""

    connections_max: int = 16
    connection_s: float = 60.0
    connection_bytes_max: int = 4 * BYTES_MAX
    messages_max: int = 10_000


class PeerServer:
    """Answers the measurements of peers that know the secret, until it is cancelled."""

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
        """Listens for `for_s` seconds; whoever is being answered then is cut off."""
        server = await asyncio.start_server(self._meet, sock=listener)
        with contextlib.suppress(asyncio.TimeoutError):
            async with server:
                await asyncio.wait_for(server.serve_forever(), for_s)

    async def _meet(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        peer = "{}:{}".format(*writer.get_extra_info("peername", ("?", "?"))[:2])
        if self._open >= self.policy.connections_max:
            self._say(f"{peer}: refused, {self._open} measurements are going on")
            writer.close()
            return
        self._open += 1
        try:
            await asyncio.wait_for(self._answer(reader, writer, peer), self.policy.connection_s)
        except asyncio.TimeoutError:
            self._say(f"{peer}: cut off after {self.policy.connection_s:g} s")
        except (WireError, OSError) as error:
            self._say(f"{peer}: {error}")
        finally:
            self._open -= 1
            writer.close()

    async def _answer(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, peer: str
    ) -> None:
        channel = await accept(reader, writer, self._secret)
        moved = 0
        for _ in range(self.policy.messages_max):
            request: PeerRequest | None = await channel.receive(PeerRequest)
            received_s = self._clock()
            if request is None:
                self._say(f"{peer}: measured, {moved / MIB:.0f} MiB moved")
                return
            moved += len(request.payload) + request.reply_bytes
            if not 0 <= request.reply_bytes <= BLOCK_BYTES or len(request.payload) > BLOCK_BYTES:
                raise WireError(f"asks for a block of {request.reply_bytes} bytes")
            if moved > self.policy.connection_bytes_max:
                raise WireError(f"wants to move more than {self.policy.connection_bytes_max} bytes")
            payload = bytes(request.reply_bytes)
            channel.send(
                PeerReply(
                    number=request.number,
                    received_s=received_s,
                    answered_s=self._clock(),
                    payload=payload,
                )
            )


async def measure_peer(
    host: str, port: int, secret: bytes, *, bandwidth_s: float, clock: Clock = time.time
) -> PeerSample:
    """Everything about one peer. `bandwidth_s`: time for each direction; 0 leaves bandwidth out."""
    peer = f"{host}:{port}"
    try:
        channel = await connect(host, port, secret)
    except asyncio.TimeoutError:
        return PeerSample(peer=peer, failure="no answer to a connection")
    except (OSError, WireError) as error:
        return PeerSample(peer=peer, failure=str(error) or repr(error))
    try:
        return await _measure(channel, peer, bandwidth_s, clock)
    except asyncio.TimeoutError:
        return PeerSample(peer=peer, failure=f"no answer for {ANSWER_S:g} s")
    except (OSError, WireError) as error:
        return PeerSample(peer=peer, failure=str(error) or repr(error))
    finally:
        channel.close()


async def _measure(channel: Channel, peer: str, bandwidth_s: float, clock: Clock) -> PeerSample:
    times = []
    for number in range(ROUND_TRIPS):
        sent_s = clock()
        channel.send(PeerRequest(number=number))
        reply = await _reply(channel)
        times.append((sent_s, reply.received_s, reply.answered_s, clock()))
    offset_s, round_trip_s = clock_offset(times)
    sent_per_s = received_per_s = None
    moved = 0
    if bandwidth_s > 0:
        up, sent_per_s = await _move(channel, BLOCK_BYTES, 0, bandwidth_s)
        down, received_per_s = await _move(channel, 0, BLOCK_BYTES, bandwidth_s)
        moved = up + down
    return PeerSample(
        peer=peer,
        round_trip_s=round_trip_s,
        offset_s=offset_s,
        sent_per_s=sent_per_s,
        received_per_s=received_per_s,
        moved_bytes=moved,
    )


async def _move(
    channel: Channel, send_bytes: int, reply_bytes: int, budget_s: float
) -> tuple[int, float]:
    """(bytes moved, bytes a second) with several blocks on their way at once."""
    request = PeerRequest(number=0, reply_bytes=reply_bytes, payload=bytes(send_bytes))
    started = time.perf_counter()
    asked = answered = 0
    while True:
        enough = time.perf_counter() - started > budget_s
        enough = enough or (asked + 1) * BLOCK_BYTES > BYTES_MAX
        if (not enough or asked == 0) and asked - answered < BLOCKS_AHEAD:
            channel.send(request)
            asked += 1
        elif asked > answered:
            await _reply(channel)
            answered += 1
        else:
            break
    moved = answered * BLOCK_BYTES
    return moved, moved / max(time.perf_counter() - started, 1e-9)


async def _reply(channel: Channel) -> Any:
    reply = await asyncio.wait_for(channel.receive(PeerReply), ANSWER_S)
    if reply is None:
        raise ConnectionError("the peer closed the connection")
    return reply

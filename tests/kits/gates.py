"""Runs a gate on the loopback address with its log, and clients of it, honest or not."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Coroutine
from dataclasses import dataclass, field
from typing import Any, TypeVar

from holdfast.engine.core.errors import WireError
from holdfast.engine.core.job_problems import JOB_BYTES_MAX
from holdfast.engine.net.channel import Channel, Gate, GatePolicy, Serve, connect
from holdfast.engine.wire import frames
from holdfast.engine.wire.messages import StatusReply, StatusRequest

HOST = "127.0.0.1"
SECRET = b"s" * 32
NO_JOB = frames.write_job("")
PATIENCE_S = 20.0  # bounds a hang; everything here takes milliseconds
T = TypeVar("T")


@dataclass
class Site:
    """Keeps a gate's records. `lines`: its log. `channels`: connections that were let in."""

    port: int
    gate: Gate
    lines: list[str]
    channels: list[Channel] = field(default_factory=list)


async def answer(channel: Channel) -> None:
    """Serve one client: a reply to every request."""
    while await channel.receive(StatusRequest) is not None:
        channel.send(StatusReply(text="hello"))


@contextlib.asynccontextmanager
async def site(
    serve: Serve = answer, tls: ssl.SSLContext | None = None, job: str = "", **policy: Any
) -> AsyncIterator[Site]:
    """Open a gate; all of it is gone afterwards."""

    async def keep_and_serve(channel: Channel) -> None:
        here.channels.append(channel)
        await serve(channel)

    lines: list[str] = []
    gate = Gate(SECRET, keep_and_serve, lines.append, tls, GatePolicy(**policy), job)
    with socket.create_server((HOST, 0), backlog=1024) as listener:
        here = Site(listener.getsockname()[1], gate, lines)
        gate.open(listener)
        try:
            yield here
        finally:
            gate.close()
            for channel in here.channels:
                channel.close()


def play(scene: Callable[[], Coroutine[Any, Any, T]]) -> T:
    """Run a scene; a complaint of the event loop fails the test."""
    complaints: list[dict[str, Any]] = []

    async def watched() -> T:
        loop = asyncio.get_running_loop()
        loop.set_exception_handler(lambda _, context: complaints.append(context))
        return await asyncio.wait_for(scene(), PATIENCE_S)

    result = asyncio.run(watched())
    if complaints:
        raise AssertionError(str(complaints))
    return result


async def until(ready: Callable[[], Any]) -> None:
    async def poll() -> None:
        while not ready():
            await asyncio.sleep(0.002)

    await asyncio.wait_for(poll(), PATIENCE_S)


async def ask(channel: Channel) -> object:
    channel.send(StatusRequest())
    return await channel.receive(StatusReply)


async def honest(here: Site, tls: ssl.SSLContext | None = None) -> None:
    """Check that other peers are unaffected: a client with the secret is served."""
    patient = dataclasses.replace(here.gate.policy, handshake_s=PATIENCE_S)
    here.gate.policy = patient  # only strangers are pressed for time, however slow the machine is
    channel = await connect(HOST, here.port, SECRET, tls=tls)
    assert await ask(channel) == StatusReply(text="hello")
    channel.close()


@dataclass
class Stranger:
    """A plain connection that can send any bytes."""

    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    @property
    def name(self) -> str:
        host, port = self.writer.get_extra_info("sockname")[:2]
        return f"{host}:{port}"

    def say(self, data: bytes) -> None:
        self.writer.write(data)

    async def ended(self) -> bytes:
        """Wait until the other side has closed the connection; return its last bytes."""
        said = b""
        with contextlib.suppress(ConnectionError):
            while data := await asyncio.wait_for(self.reader.read(1 << 16), PATIENCE_S):
                said += data
        self.writer.close()
        return said


async def stranger(here: Site, source: str = HOST) -> Stranger:
    return Stranger(*await asyncio.open_connection(HOST, here.port, local_addr=(source, 0)))


async def shaken_hands(here: Site) -> tuple[Stranger, frames.Sealer]:
    """Return a client inside the gate that can send any bytes, with the sealer of its frames."""
    found = await stranger(here)
    theirs = frames.read_greeting(await found.reader.readexactly(frames.GREETING_BYTES), "server")
    mine = b"n" * frames.NONCE_BYTES
    encounter = frames.Encounter(
        server_nonce=theirs,
        client_nonce=mine,
        server_job=await found.reader.readexactly(JOB_BYTES_MAX),
        client_job=NO_JOB,
    )
    found.say(frames.greeting(mine) + NO_JOB + frames.proof(SECRET, "client", encounter))
    claim = await found.reader.readexactly(frames.PROOF_BYTES)
    frames.check_proof(claim, SECRET, "server", encounter)
    return found, frames.Sealer(frames.session_key(SECRET, "client", encounter))


@dataclass
class Tapped:
    """Is one connection seen from between its ends; `alter` changes the client's bytes."""

    port: int = 0
    client_said: bytes = b""
    server_said: bytes = b""
    alter: Callable[[bytes], bytes] = bytes


@contextlib.asynccontextmanager
async def between(port: int) -> AsyncIterator[Tapped]:
    """Listen, pass one connection on to `port`, and end with it."""
    tapped = Tapped()
    over = asyncio.Event()

    async def relay(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        async def up() -> None:
            while data := await reader.read(1 << 16):
                tapped.client_said += data
                far_writer.write(tapped.alter(data))
            far_writer.close()

        async def down() -> None:
            with contextlib.suppress(ConnectionError):
                while data := await far_reader.read(1 << 16):
                    tapped.server_said += data
                    writer.write(data)
            writer.close()

        far_reader, far_writer = await asyncio.open_connection(HOST, port)
        await asyncio.gather(up(), down())
        over.set()

    server = await asyncio.start_server(relay, HOST, 0)
    tapped.port = server.sockets[0].getsockname()[1]
    yield tapped
    server.close()
    await over.wait()


async def refusal(attempt: Coroutine[Any, Any, Any]) -> str:
    """Return the text of the error with which an attempt to connect or to be served ends."""
    try:
        channel = await attempt
        await ask(channel)
    except (WireError, OSError) as error:
        return str(error)
    channel.close()
    return ""

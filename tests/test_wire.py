"""Frames and messages: what is damaged, replayed, foreign or malformed is refused, cleanly."""

from __future__ import annotations

import asyncio
import contextlib

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import WireError
from holdfast.core.types import (
    AgentId,
    AgentReport,
    Directive,
    Incarnation,
    Member,
    Stage,
    View,
    ViewNumber,
    WorkerId,
    WorkerStatus,
)
from holdfast.runtime import channel
from holdfast.wire import frames
from holdfast.wire.messages import KINDS, StatusReply, StatusRequest, decode, encode

KEY = b"k" * 32
STATUS = WorkerStatus(worker=WorkerId(3), incarnation=Incarnation(2), stage=Stage.LOST, detail="x")
VIEW = View(
    number=ViewNumber(7),
    members=(Member(worker=WorkerId(3), incarnation=Incarnation(2), agent=AgentId("a")),),
    owners=(WorkerId(3),) * 4,
    resume_step=9,
    leader=WorkerId(3),
)
MESSAGES = [
    STATUS,
    AgentReport(agent=AgentId("a"), incarnation=Incarnation(1), seq=4, slots=2, workers=(STATUS,)),
    Directive(
        term=1,
        seq=2,
        agent=AgentId("a"),
        agent_incarnation=Incarnation(1),
        wanted=((WorkerId(3), Incarnation(2)),),
        view=VIEW,
    ),
    StatusReply(text="{}"),
]


@pytest.mark.parametrize("message", MESSAGES, ids=lambda m: type(m).__name__)
def test_messages_survive_the_wire(message: object) -> None:
    assert decode(encode(message), *KINDS.values()) == message


@given(payload=st.lists(st.binary(max_size=300), max_size=8), cut=st.integers(1, 50))
def test_frames_survive_any_cutting(payload: list[bytes], cut: int) -> None:
    for key in (None, KEY):
        sealer, opener = frames.Sealer(key), frames.Opener(key)
        stream = b"".join(sealer.seal(p) for p in payload)
        found = [p for i in range(0, len(stream), cut) for p in opener.feed(stream[i : i + cut])]
        assert found == payload


@given(position=st.integers(4, 200), bit=st.integers(0, 7))
def test_a_flipped_bit_is_refused(position: int, bit: int) -> None:
    frame = bytearray(frames.Sealer(KEY).seal(b"p" * 100))
    frame[position % (len(frame) - 4) + 4] ^= 1 << bit
    with pytest.raises(WireError, match="not authentic"):
        frames.Opener(KEY).feed(bytes(frame))


def test_a_replayed_or_reordered_frame_is_refused() -> None:
    sealer = frames.Sealer(KEY)
    one, two = sealer.seal(b"one"), sealer.seal(b"two")
    opener = frames.Opener(KEY)
    assert opener.feed(one) == [b"one"]
    with pytest.raises(WireError, match="not authentic"):
        opener.feed(one)
    with pytest.raises(WireError, match="not authentic"):
        frames.Opener(KEY).feed(two)


def test_an_oversize_frame_is_refused_before_it_comes() -> None:
    with pytest.raises(WireError, match="over the limit"):
        frames.Opener(KEY, bytes_max=1000).feed((1001).to_bytes(4, "big"))


@settings(max_examples=2000)
@given(data=st.binary(max_size=400))
def test_no_bytes_crash_the_decoder(data: bytes) -> None:
    with contextlib.suppress(WireError):
        decode(data, *KINDS.values())
    for key in (None, KEY):
        with contextlib.suppress(WireError):
            for payload in frames.Opener(key, bytes_max=1 << 16).feed(data):
                decode(payload, *KINDS.values())


@settings(max_examples=500)
@given(
    index=st.integers(0, len(MESSAGES) - 1),
    position=st.integers(0, 10_000),
    new=st.binary(max_size=3),
)
def test_no_damaged_message_crashes_the_decoder(index: int, position: int, new: bytes) -> None:
    data = bytearray(encode(MESSAGES[index]))
    at = position % len(data)
    data[at : at + 1] = new
    with contextlib.suppress(WireError):
        decode(bytes(data), *KINDS.values())


def test_only_accepted_kinds_are_decoded() -> None:
    with pytest.raises(WireError, match="came where Directive was expected"):
        decode(encode(STATUS), Directive)


async def _meet(client_secret: bytes, server_secret: bytes) -> tuple[object, object]:
    """(what the server got, what the client got): messages or the errors of the handshake."""
    outcome: asyncio.Future[object] = asyncio.get_running_loop().create_future()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            accepted = await channel.accept(reader, writer, server_secret)
            outcome.set_result(await accepted.receive(StatusRequest))
            accepted.send(StatusReply(text="hello"))
        except WireError as error:
            outcome.set_result(error)

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    port = server.sockets[0].getsockname()[1]
    client: object
    try:
        connected = await channel.connect("127.0.0.1", port, client_secret)
        connected.send(StatusRequest())
        client = await connected.receive(StatusReply)
        connected.close()
    except (WireError, OSError) as error:
        client = error
    server.close()
    return await outcome, client


def test_the_handshake_lets_those_in_who_know_the_secret() -> None:
    server, client = asyncio.run(_meet(b"secret", b"secret"))
    assert server == StatusRequest()
    assert client == StatusReply(text="hello")


def test_the_handshake_refuses_strangers() -> None:
    server, client = asyncio.run(_meet(b"guess", b"secret"))
    assert isinstance(server, WireError)
    assert "does not know" in str(server)
    assert isinstance(client, ConnectionError)


def test_another_version_is_refused() -> None:
    greeting = bytearray(frames.greeting(b"n" * frames.NONCE_BYTES))
    greeting[len(frames.MAGIC) + 1] += 1
    with pytest.raises(WireError, match="version"):
        frames.read_greeting(bytes(greeting))
    with pytest.raises(WireError, match="not a Holdfast server"):
        frames.read_greeting(b"SSH-2.0-OpenSSH_9.6 and more bytes")

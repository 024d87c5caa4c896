"""The way to another machine is measured, and strangers are bounded."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any

import pytest

from holdfast.engine.host import network_speed as network
from holdfast.engine.host.checks_peers import PeerSample
from holdfast.engine.host.network_speed import PeerServer, ServePolicy, measure_peer
from holdfast.engine.net.channel import connect
from holdfast.engine.wire.messages import PeerReply, PeerRequest

SECRET = b"s" * 32
WAIT_S = 60.0  # bounds a hang


@contextlib.contextmanager
def listening() -> Iterator[socket.socket]:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        yield listener


def against_a_server(
    ask: Callable[[int], Any],
    *,
    secret: bytes = SECRET,
    clock: Callable[[], float] = time.time,
    policy: ServePolicy | None = None,
) -> tuple[Any, list[str]]:
    """Return the result of `ask(port)`, and the server's lines."""
    said: list[str] = []

    async def both(listener: socket.socket) -> Any:
        server = PeerServer(secret, said.append, clock, policy)
        serving = asyncio.ensure_future(server.serve(listener, WAIT_S))
        try:
            return await asyncio.wait_for(ask(listener.getsockname()[1]), WAIT_S)
        finally:
            serving.cancel()
            with contextlib.suppress(asyncio.CancelledError):
                await serving

    with listening() as listener:
        return asyncio.run(both(listener)), said


def measured(**changes: Any) -> PeerSample:
    async def ask(port: int) -> PeerSample:
        return await measure_peer("127.0.0.1", port, SECRET, bandwidth_s=0.01)

    found, _ = against_a_server(ask, **changes)
    assert isinstance(found, PeerSample)
    return found


def test_a_peer_is_measured() -> None:
    sample = measured()
    assert sample.failure == ""
    assert 0 < sample.round_trip_s < WAIT_S
    assert abs(sample.offset_s) <= sample.round_trip_s, "one clock cannot differ from itself"
    assert sample.sent_per_s
    assert sample.received_per_s
    assert sample.moved_bytes >= 2 * network.BLOCK_BYTES
    assert sample.stream_failure == ""


@pytest.mark.parametrize("wrong_s", [-7.0, 0.5, 3600.0])
def test_a_peers_wrong_clock_is_found(wrong_s: float) -> None:
    sample = measured(clock=lambda: time.time() + wrong_s)
    assert abs(sample.offset_s - wrong_s) <= sample.round_trip_s


def test_a_peer_with_another_secret() -> None:
    assert measured(secret=b"other" * 8).failure


def test_a_peer_that_does_not_listen_is_a_failed_measurement() -> None:
    with listening() as listener:
        port = listener.getsockname()[1]
    sample = asyncio.run(measure_peer("127.0.0.1", port, SECRET, bandwidth_s=0.0))
    assert "refused" in sample.failure or "Connect call failed" in sample.failure


def test_a_port_that_is_not_reached_is_told_apart_from_a_dead_peer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def refused(*args: object) -> None:
        raise ConnectionRefusedError("Connection refused")

    monkeypatch.setattr(network, "send_stream", refused)
    monkeypatch.setattr(network, "SILENCE_S", 0.05)
    sample = measured()
    assert (sample.failure, sample.stream_failure) == ("", "Connection refused")
    assert sample.round_trip_s > 0


def test_a_server_answers_a_bounded_number_of_questions() -> None:
    assert measured(policy=ServePolicy(messages_max=3)).failure
    one = measured(policy=ServePolicy(streams_max=1))
    assert (one.failure, bool(one.stream_failure)) == ("", True)


def test_a_server_knows_two_directions() -> None:
    async def ask(port: int) -> object:
        channel = await connect("127.0.0.1", port, SECRET)
        channel.send(PeerRequest(number=0, stream="sideways"))
        return await channel.receive(PeerReply)

    found, said = against_a_server(ask)
    assert found is None
    assert any("sideways" in line for line in said)


@contextlib.contextmanager
def accepting(direction: str) -> Iterator[tuple[network.Acceptor, Future[int]]]:
    acceptor = network.Acceptor.open("127.0.0.1", direction)
    with ThreadPoolExecutor(1) as pool:
        future = pool.submit(acceptor.run)
        yield acceptor, future


def test_a_stream_is_let_in_by_its_token_only() -> None:
    with accepting("up") as (acceptor, future), contextlib.ExitStack() as stack:
        here = "127.0.0.1", acceptor.port
        with pytest.raises(OSError, match=r"early|reset|not connected"):
            network.send_stream(*here, bytes(network.TOKEN_BYTES), 0.0)
        for _ in range(2 * network.STRANGERS_MAX):  # silent ones delay no other
            stack.enter_context(socket.create_connection(here, WAIT_S))
        assert network.send_stream(*here, acceptor.token, 0.0)[0] == future.result(WAIT_S) > 0
        with pytest.raises(OSError, match="refused"):
            network.send_stream(*here, acceptor.token, 0.0)


def test_every_byte_of_a_stream_is_counted() -> None:
    with accepting("up") as (acceptor, future):
        moved, rate = network.send_stream("127.0.0.1", acceptor.port, acceptor.token, 0.0)
        assert moved == network.BLOCK_BYTES == future.result(WAIT_S)
        assert rate > 0


@pytest.mark.parametrize("direction", ["up", "down"])
def test_a_stream_is_bounded_by_the_server(direction: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client would continue for a minute; the server's limit of bytes ends it."""
    monkeypatch.setattr(network, "STREAM_BYTES_MAX", 3 * network.BLOCK_BYTES)
    with accepting(direction) as (acceptor, future):
        client = network.send_stream if direction == "up" else network.receive_stream
        moved, _ = client("127.0.0.1", acceptor.port, acceptor.token, 60.0)
        assert moved <= 4 * network.BLOCK_BYTES
        assert future.result(WAIT_S) <= 4 * network.BLOCK_BYTES


def test_a_stream_that_nobody_comes_for_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(network, "SILENCE_S", 0.01)
    with pytest.raises(OSError, match="timed out"):
        network.Acceptor.open("127.0.0.1", "up").run()


def test_a_server_lets_in_a_bounded_number() -> None:
    async def ask(port: int) -> PeerSample:
        first = await connect("127.0.0.1", port, SECRET)
        sample = await measure_peer("127.0.0.1", port, SECRET, bandwidth_s=0.0)
        first.close()
        return sample

    found, said = against_a_server(ask, policy=ServePolicy(connections_max=1))
    assert found.failure
    assert any("refused" in line for line in said)


def test_strangers_take_nobodys_place() -> None:
    """Each stranger without a proof is turned away, the oldest first; a peer is still measured."""

    async def ask(port: int) -> PeerSample:
        strangers = [await asyncio.open_connection("127.0.0.1", port) for _ in range(5)]
        sample = await measure_peer("127.0.0.1", port, SECRET, bandwidth_s=0.0)
        for _, writer in strangers:
            writer.close()
        return sample

    policy = ServePolicy(connections_max=1, strangers_max=2)
    found, said = against_a_server(ask, policy=policy)
    assert found.failure == ""
    assert any("too many connections have not proved themselves" in line for line in said)


def test_a_silent_connection_is_cut_off() -> None:
    async def ask(port: int) -> object:
        channel = await connect("127.0.0.1", port, SECRET)
        return await channel.receive(PeerReply)

    found, said = against_a_server(ask, policy=ServePolicy(connection_s=0.1))
    assert found is None
    assert any("cut off" in line for line in said)


def test_a_server_ends_by_itself() -> None:
    with listening() as listener:
        server = PeerServer(SECRET, lambda text: None)
        asyncio.run(asyncio.wait_for(server.serve(listener, 0.01), WAIT_S))

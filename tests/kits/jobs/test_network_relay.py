"""Relays inside the hosts of a network laboratory."""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator

import pytest

from holdfast.engine.core.errors import WorldError
from labs.network_lab import Host, Lab
from labs.relay import Relay
from network_peers import PATIENCE_S, SILENCE_S, call, connected, receive, serve, until

pytestmark = pytest.mark.skipif(bool(Lab.available()), reason=Lab.available())

LATE_S = 1.0  # a busy machine's delays


@pytest.fixture(scope="module")
def shared() -> Iterator[Lab]:
    with Lab(2) as lab:
        yield lab


@pytest.fixture
def hosts(shared: Lab) -> Iterator[tuple[Host, ...]]:
    yield shared.hosts
    shared.heal_all()
    shared.crash_all()


def echo_s(connection: socket.socket, data: bytes = b"x") -> float:
    """Return the time that the echo of `data` takes."""
    began = time.monotonic()
    connection.sendall(data)
    assert receive(connection, len(data)) == data
    return time.monotonic() - began


@pytest.mark.parametrize("taken_in", [False, True])
def test_a_relay_delays_both_directions(hosts, taken_in):
    a, b = hosts
    _, port = serve(b)
    with Relay(a, None if taken_in else (b.address, port), delay_s=0.1) as relay:
        where = (b.address, port) if taken_in else relay.address
        with connected(a, *where) as connection:
            assert 0.2 <= echo_s(connection) < 0.2 + LATE_S
            assert connection.getpeername() == where
            assert relay.connections() == 1
            relay.reshape(delay_s=0.0)
            fastest = min(echo_s(connection) for _ in range(10))
            assert fastest < 0.1
        assert call(a, *where) == "over the wire"
        until(lambda: relay.connections() == 0)


def test_jitter_varies_but_keeps_the_order(hosts):
    a, b = hosts
    _, port = serve(b)
    with (
        Relay(a, (b.address, port), delay_s=0.01, jitter_s=0.05) as relay,
        connected(a, *relay.address) as connection,
    ):
        times = [echo_s(connection) for _ in range(10)]
        assert all(0.02 <= t < 0.12 + LATE_S for t in times)
        assert max(times) - min(times) > 0.01
        text = bytes(range(256)) * 400
        assert echo_s(connection, text) > 0.02


def test_the_rate_is_kept_in_each_direction(hosts):
    a, b = hosts
    _, port = serve(b)
    with (
        Relay(a, (b.address, port), rate_bytes_s=1e6) as relay,
        connected(a, *relay.address) as connection,
        connected(a, *relay.address) as other,
    ):
        # 200 kB at 1 MB/s, there and back at the same time
        assert 0.19 <= echo_s(connection, bytes(200_000)) < 0.2 + LATE_S
        other.sendall(bytes(100_000))
        assert echo_s(connection, bytes(100_000)) >= 0.18  # it shares the path


def test_a_paused_relay_stops_only_connections_from_its_host_to_others(hosts):
    a, b = hosts
    _, here = serve(a)
    _, there = serve(b)
    _, local = serve(a, address="127.0.0.1")
    with Relay(a) as relay:
        relay.pause()
        assert call(a, "127.0.0.1", local) == call(a, a.address, here) == "over the wire"
        assert call(b, a.address, here) == "over the wire"
        assert call(a, b.address, there, SILENCE_S) == "TimeoutError"
    assert call(a, b.address, there) == "over the wire"


def test_both_hosts_may_have_relays(hosts):
    a, b = hosts
    _, port = serve(b)
    with Relay(a, delay_s=0.05), Relay(b, delay_s=0.05) as second:
        with connected(a, b.address, port) as connection:
            assert 0.1 <= echo_s(connection) < 0.1 + LATE_S
            assert second.connections() == 0
        assert call(b, a.address, serve(a)[1]) == "over the wire"


def test_a_paused_relay_is_silent_and_loses_nothing(hosts):
    a, b = hosts
    _, port = serve(b)
    with (
        Relay(a, (b.address, port)) as relay,
        connected(a, *relay.address) as connection,
    ):
        echo_s(connection)
        relay.pause()
        connection.sendall(b"held back")
        connection.settimeout(SILENCE_S)
        with pytest.raises(TimeoutError):
            connection.recv(1)
        assert call(a, *relay.address, SILENCE_S) == "TimeoutError"
        relay.resume()
        connection.settimeout(PATIENCE_S)
        assert connection.recv(100) == b"held back"


def test_a_reset_reaches_both_sides(hosts):
    a, b = hosts
    listener = b.socket()
    with contextlib.closing(listener):
        listener.bind((b.address, 0))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        with (
            Relay(a, listener.getsockname()) as relay,
            connected(a, *relay.address) as near,
            listener.accept()[0] as far,
        ):
            far.settimeout(PATIENCE_S)
            until(lambda: relay.connections() == 1)
            assert relay.reset() == 1
            for end in (near, far):
                with pytest.raises(ConnectionResetError):
                    end.recv(1)
            until(lambda: relay.connections() == 0)


def test_ends_and_breaks_are_passed_on(hosts):
    a, b = hosts
    listener = b.socket()
    with contextlib.closing(listener):
        listener.bind((b.address, 0))
        listener.listen()
        listener.settimeout(PATIENCE_S)
        with Relay(a, listener.getsockname()) as relay:
            near = connected(a, *relay.address)
            far, _ = listener.accept()
            with near, far:
                far.settimeout(PATIENCE_S)
                near.sendall(b"the last words")
                near.shutdown(socket.SHUT_WR)  # one direction has ended, the other continues
                assert receive(far, 100) == b"the last words"
                far.sendall(b"understood")
                assert receive(near, 10) == b"understood"
                far.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                far.close()  # with a reset
                with pytest.raises(ConnectionResetError):
                    near.recv(1)
            listener.close()
            assert call(a, *relay.address) in ("ConnectionResetError", "BrokenPipeError")


def test_a_relay_that_cannot_listen_or_has_died_says_so(hosts):
    a, _ = hosts
    with pytest.raises(WorldError, match=r"the relay in host 0 failed: .*address"):
        Relay(a, ("10.73.0.2", 1), listen=("192.0.2.1", 0)).__enter__()
    with Relay(a) as relay:
        assert a.crash() == 1
        with pytest.raises(WorldError, match="relay in host 0"):
            relay.connections()

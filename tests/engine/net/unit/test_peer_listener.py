"""Listeners for a job's own peers, over real sockets: strangers cannot keep a peer out.

Pieces, feeds and the processes of a spread worker are all served by this listener.
"""

from __future__ import annotations

import contextlib
import errno
import queue
import re
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Any

import pytest

from holdfast.engine.core.errors import WireError
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_listener import ListenerLimits, PeerListener, open_listener
from holdfast.engine.net.strangers import Strangers
from holdfast.engine.net.tcp import name_of
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.node_memory import (
    MAGIC,
    NodeMemory,
    PieceAnswer,
    PieceRequest,
    PieceServer,
)
from support import until

IDENTITY = PeerIdentity(key=b"k" * 32)
HOST = "127.0.0.1"
HELLO = struct.pack("!8sQII16s", MAGIC, 0, 0, 0, b"n" * 16)
PATIENCE_S = 20.0  # bounds a hang


def reach(address: str) -> socket.socket:
    host, _, port = address.rpartition(":")
    return socket.create_connection((host, int(port)), PATIENCE_S)


def drip(channels: list[socket.socket], pause_s: float, over: threading.Event) -> None:
    """Send the beginning of a true handshake on every connection, a byte at a time."""
    for byte in HELLO:
        for channel in channels:
            with suppress(OSError):
                channel.send(bytes([byte]))
        if over.wait(pause_s):
            return


@pytest.fixture
def dripping() -> Iterator[Callable[[list[socket.socket], float], None]]:
    over = threading.Event()
    threads: list[threading.Thread] = []

    def begin(channels: list[socket.socket], pause_s: float) -> None:
        threads.append(threading.Thread(target=drip, args=(channels, pause_s, over)))
        threads[-1].start()

    yield begin
    over.set()
    for thread in threads:
        thread.join()


def test_silent_and_dripping_strangers_do_not_keep_a_peer_from_its_pieces(
    dripping: Callable[[list[socket.socket], float], None],
) -> None:
    address = PieceServer(NodeMemory(), IDENTITY).listen(HOST)
    with ExitStack() as stack:
        silent = [stack.enter_context(reach(address)) for _ in range(64)]
        slow = [stack.enter_context(reach(address)) for _ in range(64)]
        dripping(slow, 1.0)
        for _ in range(3):
            began = time.monotonic()
            peer = stack.enter_context(peer_stream.connect(address, IDENTITY, MAGIC, (0, 0, 0)))
            peer_stream.send_message(peer, PieceRequest())
            assert peer_stream.receive_message(peer, PieceAnswer).sound
            assert time.monotonic() - began < 5.0, "a peer waits for strangers"
        for channel in (*silent, *slow):  # none of them keeps its place for good
            channel.settimeout(PATIENCE_S)
            with suppress(ConnectionError):
                assert channel.recv(100) == b""


# ---------------------------------------------------------------- the listener by itself


class Site:
    """Is a listener; its peers end up in `arrived`, and its complaints in `lines`."""

    def __init__(self, listener: socket.socket, limits: ListenerLimits) -> None:
        self.port = listener.getsockname()[1]
        self.address = f"{HOST}:{self.port}"
        self.arrived: queue.Queue[tuple[socket.socket, peer_stream.Purpose]] = queue.Queue()
        self.lines: queue.Queue[str] = queue.Queue()
        self.listening = PeerListener(
            listener, IDENTITY, MAGIC, self.admit, self.lines.put, limits=limits
        )
        self.listening.start()

    def admit(self, channel: socket.socket, purpose: peer_stream.Purpose) -> None:
        if purpose == (9, 9, 9):
            raise WireError("it comes too late")
        self.arrived.put((channel, purpose))

    def stranger(self, source: str = HOST) -> socket.socket:
        return socket.create_connection((HOST, self.port), PATIENCE_S, (source, 0))

    def serves(self, purpose: peer_stream.Purpose = (1, 2, 3)) -> None:
        """Check that a peer gets in, and that the handler receives its bytes at once."""
        with peer_stream.connect(self.address, IDENTITY, MAGIC, purpose) as peer:
            peer.sendall(b"hello")
            channel, found = self.arrived.get(timeout=PATIENCE_S)
            with channel:
                assert found == purpose
                assert peer_stream.receive_exactly(channel, 5) == b"hello"

    def line(self) -> str:
        return self.lines.get(timeout=PATIENCE_S)


@contextmanager
def site(listener: socket.socket | None = None, **limits: Any) -> Iterator[Site]:
    here = Site(listener or open_listener(HOST)[0], ListenerLimits(**limits))
    try:
        yield here
    finally:
        here.listening.close()


def is_closed(channel: socket.socket) -> bool:
    """Return whether the other side closes the connection, without a word after its nonce."""
    try:
        while len(channel.recv(100)) > 0:
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


@pytest.mark.parametrize(
    ("words", "why"),
    [
        (b"GET / HTTP/1.1\r\n\r\n", "not a peer of this job: it begins with b'GET / HT'"),
        (b"\x16", r"not a peer of this job: it begins with b'\x16'"),
        (HELLO + b"t" * 32, "it does not know this job's secret"),
        (HELLO + b"t" * 1_000, "it does not know this job's secret"),
    ],
    ids=["http", "byte", "token", "more than a token"],
)
def test_wrong_words_end_a_connection_with_one_line(words: bytes, why: str) -> None:
    with site() as here, here.stranger() as stranger:
        stranger.sendall(words)
        name = name_of(stranger.getsockname())
        assert is_closed(stranger)
        assert here.line() == f"refused {name}: {why}"
        here.serves()
        assert here.lines.empty()


def test_a_replayed_handshake_opens_nothing() -> None:
    with site() as here, socket.create_server((HOST, 0)) as relay:
        heard: list[bytes] = []

        def pass_on() -> None:
            near, _ = relay.accept()
            with near, here.stranger() as far:
                heard.append(peer_stream.receive_exactly(near, len(HELLO)))
                far.sendall(heard[0])
                near.sendall(peer_stream.receive_exactly(far, 16))
                heard.append(peer_stream.receive_exactly(near, 32))
                far.sendall(heard[1])
                near.sendall(peer_stream.receive_exactly(far, 32))

        thread = threading.Thread(target=pass_on)
        thread.start()
        peer_stream.connect(name_of(relay.getsockname()), IDENTITY, MAGIC, (1, 2, 3)).close()
        thread.join()
        here.arrived.get(timeout=PATIENCE_S)[0].close()
        with here.stranger() as again:
            again.sendall(heard[0] + heard[1])
            assert is_closed(again)
        assert "does not know this job's secret" in here.line()


@pytest.mark.parametrize("words", [b"", MAGIC, HELLO, HELLO + b"t" * 31])
def test_a_peer_that_never_finishes_the_handshake_is_hung_up_on(words: bytes) -> None:
    with site(proof_s=0.2) as here, here.stranger() as stranger:
        stranger.sendall(words)
        assert is_closed(stranger)
        assert "did not finish the handshake in 0.2 s" in here.line()


def test_dripping_bytes_gain_no_time(
    dripping: Callable[[list[socket.socket], float], None],
) -> None:
    with site(proof_s=0.3) as here, here.stranger() as stranger:
        began = time.monotonic()
        dripping([stranger], 0.1)  # all of it takes four seconds
        assert is_closed(stranger)
        assert time.monotonic() - began < 3.0
        assert "did not finish the handshake in 0.3 s" in here.line()


def test_a_client_does_not_wait_for_a_dripping_server() -> None:
    with socket.create_server((HOST, 0)) as listener:
        address = name_of(listener.getsockname())
        over = threading.Event()

        def serve() -> None:
            channel, _ = listener.accept()
            with channel, suppress(OSError):
                while not over.wait(0.1):
                    channel.sendall(b"n")

        thread = threading.Thread(target=serve)
        thread.start()
        with pytest.raises(TimeoutError):
            peer_stream.connect(address, IDENTITY, MAGIC, (0, 0, 0), reach_s=0.4)
        over.set()
        thread.join()


def test_a_flood_from_one_address_does_not_push_others_out() -> None:
    with site(proof_s=PATIENCE_S, strangers_max=8) as here, ExitStack() as stack:
        slow = stack.enter_context(here.stranger("127.0.0.3"))  # the oldest of all, but alone
        slow.sendall(HELLO)
        assert len(peer_stream.receive_exactly(slow, 16)) == 16  # it has been accepted
        flood = [stack.enter_context(here.stranger("127.0.0.2")) for _ in range(30)]
        assert all(is_closed(each) for each in flood[:23])
        here.serves()
        slow.settimeout(0.0)
        with pytest.raises(BlockingIOError):  # still open
            slow.recv(1)
        said = "".join(here.line() for _ in range(10))
        assert "127.0.0.3" not in said
        assert "too many connections have not proved themselves: 8" in said


def test_complaints_are_bounded_and_none_is_lost() -> None:
    with site(lines_max=3, window_s=0.5) as here:
        for _ in range(30):
            with here.stranger() as stranger:
                stranger.sendall(b"nonsense")
                assert is_closed(stranger)
        told, lines = 0, 0
        while told < 30:
            found = re.match(r"and (\d+) more in 0.5 s, the last: refused ", here.line())
            told, lines = told + (int(found[1]) if found else 1), lines + 1
        assert told == 30
        assert lines < 30


class Exhausted(socket.socket):
    """Is a listener that finds no free descriptor the first time."""

    tries = 0

    def accept(self) -> tuple[socket.socket, Any]:
        self.tries += 1
        if self.tries == 1:
            raise OSError(errno.EMFILE, "Too many open files")
        return super().accept()


def test_running_out_of_descriptors_is_a_pause() -> None:
    listener = Exhausted()
    listener.bind((HOST, 0))
    listener.listen()
    with site(listener) as here:
        here.serves()
        assert here.line() == "accepting no connections for now: Too many open files"


def test_a_peer_that_is_not_wanted_is_told_of_and_closed() -> None:
    with site() as here:
        with peer_stream.connect(here.address, IDENTITY, MAGIC, (9, 9, 9)) as late:
            assert is_closed(late)
        assert here.line().endswith(": it comes too late")
        here.serves()


def test_a_listener_that_wakes_while_it_is_closed_is_closed_once() -> None:
    with site() as here:

        class BusyEvent(threading.Event):
            """Lets the listener's thread see the end before `close` continues."""

            def set(self) -> None:
                super().set()
                with contextlib.ExitStack() as stack:
                    # There is no need to wake a thread that has looked at the end by itself.
                    with contextlib.suppress(ConnectionRefusedError):
                        stack.enter_context(here.stranger())
                    until(lambda: here.listening._selector.get_map() is None, "the thread ends")

        here.listening._closed = BusyEvent()
        here.serves()  # by now the thread looks at this event
        here.listening.close()


def test_a_closed_listener_lets_nobody_in_and_keeps_its_connections() -> None:
    with site(proof_s=PATIENCE_S) as here:
        inside = peer_stream.connect(here.address, IDENTITY, MAGIC, (1, 2, 3))
        channel, _ = here.arrived.get(timeout=PATIENCE_S)
        with inside, channel, here.stranger() as waiting:
            waiting.sendall(HELLO)
            assert len(peer_stream.receive_exactly(waiting, 16)) == 16
            here.listening.close()
            assert is_closed(waiting)
            inside.sendall(b"still here")
            assert peer_stream.receive_exactly(channel, 10) == b"still here"
            with pytest.raises(ConnectionRefusedError):
                here.stranger()


# ---------------------------------------------------------------- the rules


def test_the_oldest_of_the_address_with_the_most_makes_room() -> None:
    strangers: Strangers[str] = Strangers(3)
    assert strangers.deadline() is None
    assert strangers.make_room() == strangers.expire(1e9) == []
    assert strangers.enter("a1", "a", 0.0, 2.0) == []
    assert strangers.enter("b1", "b", 1.0, 2.0) == []
    assert strangers.enter("b2", "b", 2.0, 2.0) == []
    why = "too many connections have not proved themselves: 3"
    assert strangers.enter("b3", "b", 3.0, 2.0) == [("b1", why)]
    strangers.leave("b2")
    strangers.leave("b2")  # it is gone already
    assert strangers.list_all() == ["a1", "b3"]
    assert strangers.make_room() == [("a1", "too many connections have not proved themselves: 2")]
    assert len(strangers) == 1


def test_the_whole_proof_has_one_deadline() -> None:
    strangers: Strangers[str] = Strangers(3)
    strangers.enter("a", "x", 10.0, 3.0)
    strangers.enter("b", "x", 11.0, 1.5)
    assert strangers.deadline() == 12.5
    assert strangers.expire(12.4) == []
    assert strangers.expire(12.5) == [("b", "it did not finish the handshake in 1.5 s")]
    assert strangers.deadline() == 13.0
    assert strangers.expire(14.0) == [("a", "it did not finish the handshake in 3 s")]
    assert strangers.deadline() is None

"""Listens for a job's own peers, and lets in only connections that prove to belong to it.

One thread conducts the proofs of all connections at once, so that a stranger costs a descriptor and
a few bytes for `proof_s` at most; with certificates that includes the handshake of TLS. Which
strangers have to go is decided in net/strangers.py; the reasons are logged in a bounded number of
lines.
"""

from __future__ import annotations

import os
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from dataclasses import dataclass

from holdfast.engine.core.errors import HoldfastError, WireError, first_line
from holdfast.engine.net import tls
from holdfast.engine.net.peer_stream import PeerProof, Purpose
from holdfast.engine.net.standard_streams import print_line
from holdfast.engine.net.strangers import Complaints, Strangers
from holdfast.engine.net.tcp import name_of, tune
from holdfast.engine.net.tls import PeerIdentity

BACKLOG = 1024  # connections that the kernel holds until they are accepted
ACCEPTS_AT_ONCE = 16  # between two looks at what strangers have sent
SILENT_S = 20.0  # after this time without an acknowledgement a machine's connections end
LEFT = "it left before the handshake was done"
EXHAUSTED_S = 0.1  # pause in accepting when descriptors or memory have run out

Admit = Callable[[socket.socket, Purpose], None]
Handler = Callable[[socket.socket, Purpose], object]


@dataclass(frozen=True, slots=True, kw_only=True)
class ListenerLimits:
    """Limits what a listener spends on strangers, and on lines in the log about them.

    `proof_s`: for the whole proof of one. `strangers_max`: how many at once.
    """

    proof_s: float = 3.0
    strangers_max: int = 128
    lines_max: int = 10
    window_s: float = 10.0


@dataclass(slots=True, eq=False)
class _Stranger:
    """Represents a connection whose proof is not complete."""

    sock: socket.socket
    peer: str
    proof: PeerProof
    shakes_hands: bool  # TLS is not established yet


def say_to_log(text: str) -> None:
    """Write a line to this process's log."""
    print_line(text)


def open_listener(host: str) -> tuple[socket.socket, str]:
    """Bind to a free port of `host`; returns the socket and its HOST:PORT. OSError."""
    family, _, _, _, address = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)[0]
    listener = socket.create_server(address[:2], family=family, backlog=BACKLOG)
    return listener, f"{host}:{listener.getsockname()[1]}"


class PeerListener:
    """Accepts connections, and calls `admit` with each connection that is proved to be of the job.

    `admit` runs in the listener's thread, so it must not block; the connection is its to close. If
    it raises an OSError, a RuntimeError or one of Holdfast's errors, the connection is closed and
    the reason is logged. `say` gets the lines for the log, in place of this process's own log.
    `close` closes `listener`, too.
    """

    def __init__(
        self,
        listener: socket.socket,
        identity: PeerIdentity,
        magic: bytes,
        admit: Admit,
        say: Callable[[str], None] | None = None,
        limits: ListenerLimits | None = None,
    ) -> None:
        self._listener = listener
        self._identity = identity
        self._magic = magic
        self._admit = admit
        self._limits = limits or ListenerLimits()
        self._strangers: Strangers[_Stranger] = Strangers(self._limits.strangers_max)
        self._complaints = Complaints(
            say or say_to_log, self._limits.lines_max, self._limits.window_s
        )
        self._selector = selectors.DefaultSelector()
        self._paused_until: float | None = None  # None: connections are being accepted
        self._closed = threading.Event()
        self._wake = -1  # an eventfd that wakes the thread when the listener closes
        self._closing = threading.Lock()  # held as long as `_wake` is needed

    def start(self) -> None:
        """Begin to accept, in a thread of its own."""
        self._listener.setblocking(False)
        self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        self._selector.register(self._wake, selectors.EVENT_READ)
        self._selector.register(self._listener, selectors.EVENT_READ)
        threading.Thread(target=self._run, name="holdfast-listen", daemon=True).start()

    def close(self) -> None:
        """Stop accepting and turn the strangers away; connections that were let in stay."""
        with self._closing:
            if not self._closed.is_set():
                self._closed.set()
                os.eventfd_write(self._wake, 1)

    def _run(self) -> None:
        while not self._closed.is_set():
            dues = (self._strangers.deadline(), self._complaints.deadline(), self._paused_until)
            wait_s = min((at for at in dues if at is not None), default=None)
            if wait_s is not None:
                wait_s = max(0.0, wait_s - time.monotonic())
            ready = self._selector.select(wait_s)
            for key, _ in ready:
                if isinstance(key.data, _Stranger):
                    self._hear(key.data)
            if any(key.fileobj is self._listener for key, _ in ready):
                self._accept()
            now = time.monotonic()
            self._turn_away(self._strangers.expire(now))
            self._complaints.flush(now)
            if self._paused_until is not None and now >= self._paused_until:
                self._paused_until = None
                self._selector.register(self._listener, selectors.EVENT_READ)
        self._listener.close()
        for stranger in self._strangers.list_all():
            stranger.sock.close()
        self._selector.close()
        with self._closing:
            os.close(self._wake)
        self._complaints.flush(time.monotonic(), force=True)

    def _accept(self) -> None:
        for _ in range(ACCEPTS_AT_ONCE):
            try:
                sock, address = self._listener.accept()
            except (BlockingIOError, InterruptedError, ConnectionAbortedError):
                return
            except OSError as error:  # no descriptors or no memory: accepting again would spin
                self._complain(f"accepting no connections for now: {error.strerror}")
                self._turn_away(self._strangers.make_room())
                self._selector.unregister(self._listener)
                self._paused_until = time.monotonic() + EXHAUSTED_S
                return
            sock.setblocking(False)
            ours = self._identity.tls
            if ours is not None:
                try:
                    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    sock = ours.server.wrap_socket(
                        sock, server_side=True, do_handshake_on_connect=False
                    )
                except OSError:  # it has gone already
                    sock.close()
                    continue
            proof = PeerProof(self._identity.key, self._magic)
            stranger = _Stranger(sock, name_of(address), proof, ours is not None)
            self._selector.register(sock, selectors.EVENT_READ, stranger)
            host, proof_s = str(address[0]), self._limits.proof_s
            self._turn_away(self._strangers.enter(stranger, host, time.monotonic(), proof_s))
            self._hear(stranger)  # an honest peer has mostly sent its hello by now

    def _hear(self, stranger: _Stranger) -> None:
        """Read everything that a stranger has sent, and answer it."""
        try:
            while (purpose := stranger.proof.purpose) is None:
                self._advance(stranger)
        except (BlockingIOError, ssl.SSLWantReadError):
            self._selector.modify(stranger.sock, selectors.EVENT_READ, stranger)
        except ssl.SSLWantWriteError:
            self._selector.modify(stranger.sock, selectors.EVENT_WRITE, stranger)
        except WireError as error:
            self._turn_away([(stranger, str(error))])
        except ssl.SSLError as error:
            gone = isinstance(error, ssl.SSLEOFError)
            self._turn_away([(stranger, LEFT if gone else tls.describe_error(error))])
        except OSError:
            self._turn_away([(stranger, LEFT)])
        else:
            self._let_in(stranger, purpose)

    def _advance(self, stranger: _Stranger) -> None:
        """Take one step of the handshake or the proof. OSError, WireError."""
        if stranger.shakes_hands:
            assert isinstance(stranger.sock, ssl.SSLSocket)
            stranger.sock.do_handshake()
            stranger.shakes_hands = False
        data = stranger.sock.recv(stranger.proof.wants)
        if not data:
            raise WireError(LEFT)
        answer = stranger.proof.feed(data)
        if answer:
            stranger.sock.sendall(answer)  # a few bytes: they fit, or the peer is no peer

    def _let_in(self, stranger: _Stranger, purpose: Purpose) -> None:
        self._strangers.leave(stranger)
        self._selector.unregister(stranger.sock)
        try:
            stranger.sock.setblocking(True)
            tune(stranger.sock, SILENT_S)
            self._admit(stranger.sock, purpose)
        except (OSError, RuntimeError, HoldfastError) as error:  # RuntimeError: no more threads
            stranger.sock.close()
            self._complain(f"refused {stranger.peer}: {first_line(error)}")

    def _turn_away(self, strangers: list[tuple[_Stranger, str]]) -> None:
        for stranger, why in strangers:
            self._strangers.leave(stranger)
            self._selector.unregister(stranger.sock)
            stranger.sock.close()
            self._complain(f"refused {stranger.peer}: {why}")

    def _complain(self, text: str) -> None:
        self._complaints.add(text, time.monotonic())


def serve(
    host: str,
    identity: PeerIdentity,
    magic: bytes,
    handle: Handler,
    say: Callable[[str], None] | None = None,
) -> tuple[str, PeerListener]:
    """Serve the job's peers, each in a thread of its own. OSError, UserError.

    Returns the address to announce, and what listens there. `handle` is called with each
    connection, which is closed when it returns. OSError and WireError end the connection as well.
    """

    def meet(channel: socket.socket, purpose: Purpose) -> None:
        with channel, suppress(OSError, WireError):
            handle(channel, purpose)

    def admit(channel: socket.socket, purpose: Purpose) -> None:
        threading.Thread(target=meet, args=(channel, purpose), daemon=True).start()

    listener, address = open_listener(host)
    found = PeerListener(listener, identity, magic, admit, say)
    found.start()
    return identity.address(host, address), found

"""The signs in TCP of a peer that is cut off, and of a peer that is merely frozen (SIGSTOP).

With keepalive after 1 s, then every 1 s, and a TCP_USER_TIMEOUT of 2 s, on Linux 6.18:

| the connection           | its peer is cut off           | frozen, or only does not read |
|--------------------------|-------------------------------|-------------------------------|
| idle                     | ETIMEDOUT 2.0 s after a word  | lives: the kernel answers     |
| data sent, window open   | ETIMEDOUT after 2.4 s         | lives: the kernel takes it    |
| window full              | ETIMEDOUT after 2.0 s         | ETIMEDOUT after 2.3 s (!)     |
| window full, no time-out | lives (by the rules, 15 minutes) | lives                         |
| idle, no keepalive       | lives for ever                | lives                         |

So TCP_USER_TIMEOUT does not distinguish a cut from a frozen peer once the window is full (some 130
kB that the peer does not read): a window that stays closed counts as silence, although every probe
is answered. Three other signs do:

- a second, quiet connection with keepalive and TCP_USER_TIMEOUT, without large messages:
  it ends when the peer is cut off, and only then;
- the dead connection's TCP_INFO, read at once: `tcpi_last_ack_recv` has reached the time-out if the
  peer was cut off, and was 0.7 s if its kernel was there to the end. Not with a time-out of 1 s or
  less: Linux answers such probes only every 0.5 s (tcp_invalid_ratelimit), so the last one may find
  no answer either;
- a new connect, which a frozen listener's kernel accepts until its backlog is full.

A frozen machine is as silent as a cut one, and no sign on the network shows the difference.
"""

from __future__ import annotations

import contextlib
import errno
import os
import select
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Hashable
from dataclasses import dataclass
from typing import TypeVar

import pytest

from labs.network_lab import Host, Lab
from network_peers import PATIENCE_S, PYTHON, SILENCE_S, connected, until

pytestmark = pytest.mark.skipif(bool(Lab.available()), reason=Lab.available())

KEEPALIVE_S = 1  # until the first probe, and from one to the next; the kernel's smallest
SLACK_S = 2.0  # a retransmission's time (0.2 to 0.4 s), and a busy machine

DEAF = """
import socket, sys
server = socket.create_server((sys.argv[1], 0))
print(server.getsockname()[1], flush=True)
kept = [server.accept() for _ in range(int(sys.argv[2]))]
print("accepted", flush=True)
input()
connection = kept[0][0]
connection.settimeout(20)
count = 0
try:
    while data := connection.recv(65536):
        count += len(data)
    print("ended", count, flush=True)
except OSError as error:
    print(type(error).__name__, count, flush=True)
"""


Name = TypeVar("Name", bound=Hashable)


@dataclass(frozen=True, kw_only=True)
class Seen:
    """A connection at its end, or when it had been watched for long enough."""

    error: str  # "" if it lives
    after_s: float
    unanswered: int  # probes and retransmissions since the last word of the peer
    unheard_s: float  # since that word; continues to grow after the end


def look(connection: socket.socket, began: float) -> Seen:
    code = connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
    after_s = time.monotonic() - began
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 104)
    retransmits, probes = struct.unpack_from("BB", info, 2)  # struct tcp_info in <linux/tcp.h>
    (unheard_ms,) = struct.unpack_from("I", info, 56)
    return Seen(
        error=errno.errorcode.get(code, ""),
        after_s=after_s,
        unanswered=retransmits + probes,
        unheard_s=unheard_ms / 1000,
    )


def watch(connections: dict[Name, socket.socket], began: float, until_s: float) -> dict[Name, Seen]:
    """Watch until all have ended, or until `until_s` after `began`."""
    seen: dict[Name, Seen] = {}
    poll = select.poll()
    names = {connection.fileno(): name for name, connection in connections.items()}
    for number in names:
        poll.register(number, 0)  # errors only
    while len(seen) < len(names) and (left_s := began + until_s - time.monotonic()) > 0:
        for number, _ in poll.poll(left_s * 1000):
            poll.unregister(number)
            seen[names[number]] = look(connections[names[number]], began)
    return {name: seen.get(name) or look(c, began) for name, c in connections.items()}


def watchful(
    host: Host, to: tuple[str, int], user_s: float = 0.0, keepalive: bool = True
) -> socket.socket:
    connection = connected(host, *to)
    if keepalive:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE, 1)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPIDLE, KEEPALIVE_S)
        connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_KEEPINTVL, KEEPALIVE_S)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, int(user_s * 1000))
    return connection


def fill(connection: socket.socket) -> int:
    """Send until the kernel takes no more; return the number of bytes."""
    connection.setblocking(False)
    sent = 0
    with contextlib.suppress(BlockingIOError):
        while True:
            sent += connection.send(bytes(65536))
    return sent


def closed_window(connection: socket.socket) -> bool:
    """Return whether the peer has acknowledged everything sent and takes no more."""
    info = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 256)
    (unacked,) = struct.unpack_from("I", info, 24)
    (notsent,) = struct.unpack_from("I", info, 144)
    return unacked == 0 and notsent > 0


@dataclass(frozen=True, kw_only=True)
class Observed:
    user_s: float
    cut: dict[str, Seen]
    frozen: dict[str, Seen]
    busy: dict[str, Seen]  # the peer runs and does not read
    accepts: dict[str, bool]  # whether a new connect to the peer succeeds in that time
    thawed: str  # what the frozen peer then found on its connection "full"


@dataclass(frozen=True, kw_only=True)
class Peer:
    """Is a process that accepts connections and reads none of them before a line comes in."""

    process: subprocess.Popen[bytes]
    address: tuple[str, int]
    connections: dict[str, socket.socket]

    def send(self) -> None:
        for kind, connection in self.connections.items():
            if "full" in kind:
                fill(connection)
            elif kind == "data":
                connection.sendall(bytes(1000))


def peer(host: Host, client: Host, user_s: float, stack: contextlib.ExitStack) -> Peer:
    kinds = {
        "full": (user_s, True),
        "idle": (user_s, True),
        "data": (user_s, True),
        "full, no time-out": (0.0, True),
        "idle, no keepalive": (user_s, False),
    }
    command = [*PYTHON, DEAF, host.address, str(len(kinds))]
    process = host.popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    stack.enter_context(process.stdin)
    stack.enter_context(process.stdout)
    address = (host.address, int(process.stdout.readline()))
    connections = {k: watchful(client, address, *how) for k, how in kinds.items()}
    for connection in connections.values():
        stack.enter_context(connection)
    process.stdout.readline()  # all are accepted
    return Peer(process=process, address=address, connections=connections)


def accepts(client: Host, address: tuple[str, int]) -> bool:
    with client.socket() as connection:
        connection.settimeout(SILENCE_S)
        with contextlib.suppress(TimeoutError):
            connection.connect(address)
            return True
    return False


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((1.5, 4.0), id="4s"),
        pytest.param((2.0, 10.0), id="10s", marks=pytest.mark.slow),
    ],
)
def observed(request: pytest.FixtureRequest) -> Observed:
    """Return the outcomes of all cases, observed at the same time."""
    user_s, watched_s = request.param
    with Lab(3) as lab, contextlib.ExitStack() as stack:
        a, b, c = lab.hosts
        cut, frozen, busy = (peer(host, a, user_s, stack) for host in (b, c, c))
        peers = {"cut": cut, "frozen": frozen, "busy": busy}
        frozen.process.send_signal(signal.SIGSTOP)
        os.waitid(os.P_PID, frozen.process.pid, os.WSTOPPED | os.WNOWAIT)
        full = [connection for kind, connection in cut.connections.items() if "full" in kind]
        for connection in full:
            fill(connection)
        until(lambda: all(map(closed_window, full)))
        lab.cut(b)
        began = time.monotonic()
        for each in (frozen, busy):
            each.send()
        cut.connections["data"].sendall(bytes(1000))
        reached = {name: accepts(a, each.address) for name, each in peers.items()}
        everything = {(n, k): s for n, each in peers.items() for k, s in each.connections.items()}
        seen = watch(everything, began, watched_s)
        frozen.process.send_signal(signal.SIGCONT)
        frozen.process.stdin.write(b"\n")
        frozen.process.stdin.flush()
        thawed = frozen.process.stdout.readline().decode()
        lab.crash_all()
    by_peer = {n: {k: s for (m, k), s in seen.items() if m == n} for n in peers}
    for name, each in by_peer.items():  # shown if a test fails
        print(name, *each.items(), sep="\n  ")
    return Observed(user_s=user_s, accepts=reached, thawed=thawed, **by_peer)


@pytest.mark.parametrize("kind", ["idle", "data", "full"])
def test_a_cut_is_reported_in_time(observed, kind):
    seen = observed.cut[kind]
    assert seen.error == "ETIMEDOUT"
    latest = {"idle": max(observed.user_s, 2 * KEEPALIVE_S)}.get(kind, observed.user_s)
    assert observed.user_s - KEEPALIVE_S - SILENCE_S < seen.after_s < latest + SLACK_S


@pytest.mark.parametrize("kind", ["idle, no keepalive", "full, no time-out"])
def test_a_cut_is_not_reported_without_both_settings(observed, kind):
    """Keepalive is silent while data waits for the window, the time-out when no data waits."""
    assert observed.cut[kind].error == ""


@pytest.mark.parametrize("peer", ["frozen", "busy"])
@pytest.mark.parametrize("kind", ["idle", "data", "idle, no keepalive", "full, no time-out"])
def test_a_frozen_peer_is_not_taken_for_cut_off(observed, peer, kind):
    assert getattr(observed, peer)[kind].error == ""


@pytest.mark.parametrize("peer", ["frozen", "busy"])
@pytest.mark.parametrize("kind", ["idle", "data"])
def test_keepalives_are_answered_for_a_process_that_cannot(observed, peer, kind):
    assert getattr(observed, peer)[kind].unheard_s < KEEPALIVE_S + SLACK_S


@pytest.mark.parametrize("peer", ["frozen", "busy"])
def test_a_window_that_stays_closed_ends_the_connection_although_the_peer_lives(observed, peer):
    seen = getattr(observed, peer)["full"]
    assert seen.error == "ETIMEDOUT"
    assert observed.user_s <= seen.after_s < observed.user_s + SLACK_S


def test_the_dead_connection_tells_which_it_was(observed):
    for kind in ("idle", "data", "full"):
        assert observed.cut[kind].unanswered > 0
        assert observed.cut[kind].unheard_s >= observed.user_s
    for seen in (observed.frozen["full"], observed.busy["full"]):
        assert seen.unanswered == 0
        assert seen.unheard_s < observed.user_s


def test_a_new_connect_tells_them_apart(observed):
    assert observed.accepts == {"cut": False, "frozen": True, "busy": True}


def test_a_peer_that_wakes_up_reads_what_it_was_sent_and_then_a_reset(observed):
    error, count = observed.thawed.split()
    assert error == "ConnectionResetError"
    assert int(count) > 0


def test_the_other_side_of_a_cut_learns_nothing_until_it_speaks():
    """Its peer gave up, and the reset was lost: only its own keepalive would notice."""
    with Lab(2) as lab, contextlib.ExitStack() as stack:
        a, b = lab.hosts
        listener = stack.enter_context(b.socket())
        listener.bind((b.address, 0))
        listener.listen()
        near = stack.enter_context(watchful(a, listener.getsockname(), 0.2, keepalive=False))
        far = stack.enter_context(listener.accept()[0])
        lab.cut(b)
        near.sendall(b"lost")
        assert watch({"near": near}, time.monotonic(), PATIENCE_S)["near"].error == "ETIMEDOUT"
        lab.heal_all()
        far.settimeout(SILENCE_S)
        with pytest.raises(TimeoutError):
            far.recv(1)
        far.settimeout(PATIENCE_S)
        far.sendall(b"anybody there?")
        with pytest.raises(ConnectionResetError):
            far.recv(1)

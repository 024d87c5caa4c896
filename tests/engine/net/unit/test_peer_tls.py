"""TLS between workers: their traffic is encrypted, and only the operator's certificates get in."""

from __future__ import annotations

import os
import queue
import re
import select
import signal
import socket
import ssl
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path

import pytest
import torch
import trustme

from certificates import make_certificates
from holdfast.engine.core.errors import Aborted, UserError, WireError
from holdfast.engine.net import peer_stream
from holdfast.engine.net.peer_listener import ListenerLimits, PeerListener, open_listener
from holdfast.engine.net.tls import PeerIdentity, TlsFiles, client_context, split_address
from holdfast.engine.state.memory.node_memory import (
    MAGIC,
    NodeMemory,
    PieceAnswer,
    PieceRequest,
    PieceServer,
)
from holdfast.engine.train.exchange.group_network import GroupNetwork
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.exchange.tcp_transport import TcpListener, TcpTransport
from holdfast.engine.train.exchange.wires import RECORD_BYTES, WRITE_BYTES, TlsWire
from holdfast.lab.contracts.transports import (
    CONTRACT,
    GroupMember,
    MakeTransport,
    SharedRendezvous,
    aborts_amid_messages,
    run_contract,
    run_contract_in_threads,
)

KEY = b"k" * 32
HOST = "127.0.0.1"
PATIENCE_S = 20.0  # bounds a hang
UNKNOWN = "its certificate is not accepted: (unable to get local issuer|self.signed) certificate"


@pytest.fixture(scope="module")
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory, authority: trustme.CA) -> Path:
    return make_certificates(tmp_path_factory.mktemp("ours"), HOST, authority=authority)


@pytest.fixture(scope="module")
def others(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Return certificates of an authority that the job does not know."""
    return make_certificates(tmp_path_factory.mktemp("others"), HOST)


def transport(folder: Path) -> Transport:
    listener = TcpListener(HOST, PeerIdentity.of(KEY, folder))
    return TcpTransport(listener, ended_s=0.5)


# ---------------------------------------------------------------- the transport


@pytest.mark.parametrize(
    "case", [c for c in CONTRACT if c is not aborts_amid_messages], ids=lambda case: case.__name__
)
def test_the_contract_over_tls(case: Callable[[GroupMember], None], ours: Path) -> None:
    assert run_contract_in_threads(case, partial(transport, ours), size=3) == []


def of_rank(folder: Path, other: Path, rank: int, build_s: float = 2.0) -> MakeTransport:
    """Return the maker of one process's transport; the last of three uses `other`."""
    listener = TcpListener(HOST, PeerIdentity.of(KEY, other if rank == 2 else folder))
    return lambda: TcpTransport(listener, build_s=build_s, ended_s=0.5)


@pytest.mark.slow
@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.__name__)
def test_the_contract_over_tls_in_processes(
    case: Callable[[GroupMember], None], ours: Path
) -> None:
    assert run_contract(case, partial(of_rank, ours, ours), size=3) == []


class FreezesOnceKnown(SharedRendezvous):
    """A rendezvous of a process that is stopped as soon as other processes know its address."""

    def publish(self, address: bytes) -> None:
        self.addresses["frozen pid"] = os.getpid()
        super().publish(address)
        os.kill(os.getpid(), signal.SIGSTOP)


def leaves_a_frozen_peer(member: GroupMember) -> None:
    """Check that a frozen peer is left: its kernel accepts, but no process shakes hands."""
    kind = FreezesOnceKnown if member.rank == 1 else SharedRendezvous
    rendezvous = kind(member.addresses, "frozen", member.rank, threading.Event())
    transport, began = member.make(), time.monotonic()
    with pytest.raises(Aborted, match=r"^rank 1 cannot be reached: .*the handshake in time"):
        transport.open(member.rank, member.size, rendezvous)
    assert time.monotonic() - began < PATIENCE_S
    transport.close()
    os.kill(member.addresses["frozen pid"], signal.SIGKILL)


@pytest.mark.slow
def test_a_peer_that_freezes_in_the_handshake_is_left_in_time(ours: Path) -> None:
    assert run_contract(leaves_a_frozen_peer, partial(of_rank, ours, ours), size=2) == []


def test_a_peer_that_never_shakes_hands_is_left_in_time(ours: Path) -> None:
    """It looks frozen: its kernel takes connections in, and no process answers them."""
    with socket.create_server((HOST, 0)) as silent:
        number = b"\0" * 8
        addresses = {"silent/1": number + f"{HOST}:{silent.getsockname()[1]}/{HOST}".encode()}
        rendezvous = SharedRendezvous(addresses, "silent", 0, threading.Event())
        transport, began = of_rank(ours, ours, 0, build_s=0.3)(), time.monotonic()
        with pytest.raises(Aborted, match=r"^rank 1 cannot be reached: .*the handshake in time"):
            transport.open(0, 2, rendezvous)
        assert time.monotonic() - began < PATIENCE_S
        transport.close()


def names_the_untrusted(member: GroupMember) -> None:
    with pytest.raises(Aborted) as told:
        member.open("untrusted")
    member.addresses[f"reason/{member.rank}"] = str(told.value)
    member.meet("untrusted")
    reasons = [member.addresses[f"reason/{rank}"] for rank in range(2)]
    assert any(re.match(f"rank 2 cannot be trusted: {UNKNOWN}", r) for r in reasons), reasons


@pytest.mark.slow
def test_a_member_with_certificates_of_another_authority_is_refused(
    ours: Path, others: Path
) -> None:
    assert run_contract(names_the_untrusted, partial(of_rank, ours, others), size=3) == []


class Tapped(SharedRendezvous):
    """Is a rendezvous whose connections go through a relay that records their bytes."""

    heard: bytearray

    def publish(self, address: bytes) -> None:
        number, (host, port, name) = address[:8], split_address(address[8:].decode())
        here = relay((host, port), self.heard)
        super().publish(number + f"{here}/{name}".encode())


def relay(target: tuple[str, int], heard: bytearray) -> str:
    """Pass all connections on to `target`; return the address."""
    listener = socket.create_server((HOST, 0))

    def carry(near: socket.socket, far: socket.socket) -> None:
        with suppress(OSError):
            while data := near.recv(1 << 16):
                heard.extend(data)
                far.sendall(data)
        for each in (near, far):
            with suppress(OSError):
                each.shutdown(socket.SHUT_RDWR)

    def accept() -> None:
        while True:
            near, _ = listener.accept()
            far = socket.create_connection(target)
            for pair in ((near, far), (far, near)):
                threading.Thread(target=carry, args=pair, daemon=True).start()

    threading.Thread(target=accept, daemon=True).start()
    host, port = listener.getsockname()
    return f"{host}:{port}"


@pytest.mark.parametrize("encrypted", [False, True])
def test_a_tensor_can_be_read_on_the_path_only_without_tls(encrypted: bool, ours: Path) -> None:
    pattern, heard = b"a tensor that can be recognised ", bytearray()

    def exchange(member: GroupMember) -> None:
        rendezvous = Tapped(member.addresses, "group", member.rank, threading.Event())
        rendezvous.heard = heard
        made = member.make()
        made.open(member.rank, member.size, rendezvous)
        sent = torch.frombuffer(bytearray(pattern * 10_000), dtype=torch.uint8)
        got = torch.zeros_like(sent)
        peer = 1 - member.rank
        made.exchange([(peer, sent)], [(peer, got)], 1).wait()
        assert torch.equal(sent, got)
        member.meet("done")
        made.close()

    folder = ours if encrypted else None
    make = lambda: TcpTransport(TcpListener(HOST, PeerIdentity.of(KEY, folder)))  # noqa: E731
    assert run_contract_in_threads(exchange, make, size=2) == []
    assert len(heard) > 2 * len(pattern) * 10_000
    assert (pattern in heard) != encrypted


def wires(folder: Path) -> tuple[TlsWire, TlsWire]:
    """Return two connected ends."""
    identity = PeerIdentity.of(KEY, folder)
    arrived: queue.Queue[socket.socket] = queue.Queue()
    listener, address = open_listener(HOST)
    listening = PeerListener(listener, identity, MAGIC, lambda channel, _: arrived.put(channel))
    listening.start()
    dialed = [peer_stream.connect(address, identity, MAGIC, (0, 0, 0)) for _ in range(2)]
    taken = [arrived.get(timeout=PATIENCE_S) for _ in range(2)]
    by_name = {each.getpeername(): each for each in taken}
    taken = [by_name[each.getsockname()] for each in dialed]
    listening.close()
    return TlsWire(*dialed), TlsWire(taken[1], taken[0])


def test_a_send_that_would_block_goes_on_where_it_stopped(ours: Path) -> None:
    near, far = wires(ours)
    sizes = (16, RECORD_BYTES - 3, 5, RECORD_BYTES, 3 * WRITE_BYTES + 7, 0, 9, 8 * WRITE_BYTES, 1)
    data = torch.randint(0, 256, (sum(sizes),), dtype=torch.uint8)
    parts = [memoryview(each.numpy()) for each in data.split(list(sizes))] * 4
    got = memoryview(bytearray(4 * len(data)))

    def receive() -> None:
        at = 0
        while at < len(got):
            count = far.receive(got[at:])
            at += count or 0
            if count is None:
                select.select([far.receives], [], [], PATIENCE_S)

    reader = threading.Thread(target=receive)
    sent = near.send(parts)
    assert 0 < sent < len(got)  # no process reads yet
    reader.start()
    flat = memoryview(b"".join(parts))
    while sent < len(flat):
        rest, before = [], sent
        for part in parts:  # as a link leaves them
            if before < len(part):
                rest.append(part[before:])
            before = max(before - len(part), 0)
        count = near.send(rest)
        sent += count
        if not count:
            select.select([], [near.sends], [], PATIENCE_S)
    reader.join(PATIENCE_S)
    assert got == flat
    near.shut()
    assert far.receive(got) == 0
    with pytest.raises(OSError, match=r".+"):
        near.send([b"x"])
    near.close()
    far.close()


def test_a_send_that_is_stuck_ends_with_the_group(ours: Path) -> None:
    near, far = wires(ours)
    network = GroupNetwork()
    network.connect(1, near)
    data = memoryview(bytearray(64 << 20))  # no process reads it
    expected, leaving = network.exchange({network.link(1): [(1, data)]}, [], 1)
    assert leaving
    threading.Timer(0.1, network.abort).start()
    with pytest.raises(Aborted):
        network.wait(expected, leaving)
    network.close()
    far.close()


# ---------------------------------------------------------------- strangers


@contextmanager
def pieces(folder: Path) -> Iterator[str]:
    """Serve pieces; yield the address."""
    yield PieceServer(NodeMemory(), PeerIdentity.of(KEY, folder)).listen(HOST)


def is_served(address: str, identity: PeerIdentity) -> bool:
    with peer_stream.connect(address, identity, MAGIC, (0, 0, 0)) as channel:
        peer_stream.send_message(channel, PieceRequest())
        return peer_stream.receive_message(channel, PieceAnswer).sound


def without_certificate(folder: Path) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.load_verify_locations(folder / "ca.crt")
    return context


def of_another_authority(folder: Path, others: Path) -> ssl.SSLContext:
    return client_context(
        TlsFiles(cert=others / "tls.crt", key=others / "tls.key", ca=folder / "ca.crt")
    )


def is_refused(channel: socket.socket) -> bool:
    """Return whether a process that knows the key is not let in."""
    with channel:
        try:
            peer_stream.introduce(channel, KEY, MAGIC, (0, 0, 0), time.monotonic() + PATIENCE_S)
        except TimeoutError:
            return False
        except (OSError, WireError):  # the alert, or the end that follows it
            return True
    return False


def test_strangers_are_refused_and_disturb_nobody(ours: Path, others: Path) -> None:
    lines: queue.Queue[str] = queue.Queue()
    identity = PeerIdentity.of(KEY, ours)
    listener, address = open_listener(HOST)
    arrived: queue.Queue[socket.socket] = queue.Queue()
    listening = PeerListener(
        listener,
        identity,
        MAGIC,
        lambda channel, _: arrived.put(channel),
        lines.put,
        ListenerLimits(proof_s=0.5, lines_max=100),
    )
    listening.start()
    host, port, _ = split_address(address)

    def stranger() -> socket.socket:
        return socket.create_connection((host, port), PATIENCE_S)

    silent, dripping = [stranger() for _ in range(20)], stranger()
    dripping.sendall(b"\x16\x03\x01")
    for _ in range(2):
        peer_stream.connect(address, identity, MAGIC, (0, 0, 0)).close()
        arrived.get(timeout=PATIENCE_S).close()
    for channel in (*silent, dripping):
        assert channel.recv(1) == b""
        channel.close()
        assert "did not finish the handshake in 0.5 s" in lines.get(timeout=PATIENCE_S)
    assert is_refused(stranger())
    assert "it does not speak TLS" in lines.get(timeout=PATIENCE_S)
    for context, why in (
        (without_certificate(ours), "it shows no certificate"),
        (of_another_authority(ours, others), UNKNOWN),
    ):
        assert is_refused(context.wrap_socket(stranger(), server_hostname=HOST))
        assert re.search(why, lines.get(timeout=PATIENCE_S))
    wrong = PeerIdentity.of(b"j" * 32, ours)
    with pytest.raises(WireError, match="has ended the connection"):
        peer_stream.connect(address, wrong, MAGIC, (0, 0, 0))
    assert "does not know this job's secret" in lines.get(timeout=PATIENCE_S)
    peer_stream.connect(address, identity, MAGIC, (0, 0, 0)).close()
    arrived.get(timeout=PATIENCE_S).close()
    assert lines.empty()
    listening.close()


def test_a_listener_without_tls_is_not_trusted(ours: Path) -> None:
    plain = PieceServer(NodeMemory(), PeerIdentity(key=KEY)).listen(HOST)
    with pytest.raises((WireError, ConnectionResetError)):
        is_served(plain, PeerIdentity.of(KEY, ours))


# ---------------------------------------------------------------- whom a certificate is for


@pytest.mark.parametrize(
    ("names", "announced"),
    [
        ([HOST], HOST),
        (["node7.example", HOST], HOST),
        (["node7.example"], "node7.example"),
        (["*.jobs.svc"], "any.jobs.svc"),
    ],
)
def test_a_certificate_is_checked_against_the_announced_name(
    names: list[str], announced: str, authority: trustme.CA, tmp_path: Path
) -> None:
    folder = make_certificates(tmp_path, *names, authority=authority)
    identity = PeerIdentity.of(KEY, folder)
    with pieces(folder) as address:
        host, port, name = split_address(address)
        assert (host, name) == (HOST, announced)
        assert is_served(address, identity)
        with pytest.raises(WireError, match="its certificate is not accepted: Hostname mismatch"):
            is_served(f"{HOST}:{port}/node8.example", identity)


def test_certificates_that_workers_cannot_use(
    ours: Path, others: Path, authority: trustme.CA, tmp_path: Path
) -> None:
    (tmp_path / "tls.crt").write_bytes((ours / "tls.crt").read_bytes())
    (tmp_path / "tls.key").write_bytes((ours / "tls.key").read_bytes())
    (tmp_path / "ca.crt").write_bytes((others / "ca.crt").read_bytes())
    with pytest.raises(UserError, match="cannot be shown to other workers") as told:
        PeerIdentity.of(KEY, tmp_path)
    assert "\n" not in str(told.value)
    assert str(tmp_path / "tls.crt") in str(told.value)

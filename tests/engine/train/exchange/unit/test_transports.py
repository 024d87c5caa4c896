"""Every transport passes the one contract suite, in real processes."""

from __future__ import annotations

import itertools
import os
import signal
import socket
import threading
import time
from collections.abc import Callable

import pytest
import torch

from holdfast.engine.core.errors import Aborted, UserError
from holdfast.engine.net import peer_listener, peer_stream
from holdfast.engine.net.peer_stream import PeerProof
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.train.exchange import tcp_transport
from holdfast.engine.train.exchange.gpu_transport import NcclTransport
from holdfast.engine.train.exchange.group_link import HEAD
from holdfast.engine.train.exchange.group_network import GroupNetwork
from holdfast.engine.train.exchange.seam import AloneTransport
from holdfast.engine.train.exchange.tcp_transport import TcpListener, TcpTransport
from holdfast.engine.train.exchange.wires import PlainWire
from holdfast.engine.train.script.environment import WorkerEnvironment, take_channel
from holdfast.lab.contracts.memory_transport import MemoryNetwork, MemoryTransport
from holdfast.lab.contracts.transports import (
    CONTRACT,
    GroupMember,
    MakeTransport,
    SharedRendezvous,
    aborts,
    look_after,
    refuses_impostors,
    run_contract,
    run_contract_in_threads,
    takes_any_order,
)

KEY = b"k" * 32
IDENTITY = PeerIdentity(key=KEY)
PATIENCE_S = 30.0  # time limit for events that must happen
BUILD_S = 2.0  # an impostor waits for this long, though the other members give up at once


def tcp(rank: int) -> MakeTransport:
    listener = TcpListener("127.0.0.1", IDENTITY)
    return lambda: TcpTransport(listener, ended_s=0.5)


def tcp_with_impostor(rank: int) -> MakeTransport:
    """Return the transport of a rank; of three, the last has another job's key."""
    listener = TcpListener("127.0.0.1", IDENTITY if rank < 2 else PeerIdentity(key=b"j" * 32))
    return lambda: TcpTransport(listener, build_s=BUILD_S)


def tcp_with_keyless_impostor(rank: int) -> MakeTransport:
    listener = TcpListener("127.0.0.1", IDENTITY if rank < 2 else PeerIdentity())
    return lambda: TcpTransport(listener, build_s=BUILD_S)


class Echo(PeerProof):
    """Is an impostor without the key: it repeats to everyone the token that it was just shown."""

    def _check_token(self) -> bytes:
        return self._data


class Silence(PeerProof):
    """Is an impostor that takes connections and stays silent."""

    def feed(self, data: bytes) -> bytes:
        return b""


def tcp_with_echo(rank: int) -> MakeTransport:
    if rank == 2:
        peer_listener.PeerProof = Echo
    listener = TcpListener("127.0.0.1", IDENTITY)
    return lambda: TcpTransport(listener, build_s=BUILD_S)


def tcp_with_silent_impostor(rank: int) -> MakeTransport:
    if rank == 2:
        peer_listener.PeerProof = Silence
    listener = TcpListener("127.0.0.1", IDENTITY)
    return lambda: TcpTransport(listener, build_s=BUILD_S)


def nccl(rank: int) -> MakeTransport:
    listener = TcpListener("127.0.0.1", IDENTITY)
    return lambda: NcclTransport(TcpTransport(listener), torch.device("cuda", rank))


@pytest.mark.slow_with("aborts_amid_messages", "delivers", "gives_up_opening", "takes_any_order")
@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.__name__)
def test_tcp(case: Callable[[GroupMember], None]) -> None:
    assert run_contract(case, tcp, size=3) == []


@pytest.mark.slow_with("aborts_amid_messages")
@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.__name__)
def test_memory(case: Callable[[GroupMember], None]) -> None:
    assert run_contract_in_threads(case, MemoryNetwork().transport, size=3) == []


class Deaf(MemoryTransport):
    """Is a broken transport: it does not notice that other members gave the group up."""

    def check(self, peer: int = -1) -> None:
        return


def test_the_contract_finds_a_broken_transport() -> None:
    network = MemoryNetwork()
    numbers = itertools.count()
    complaints = run_contract_in_threads(
        aborts, lambda: Deaf(network, b"%d" % next(numbers)), size=3, timeout_s=1.0
    )
    assert complaints


def test_the_fake_notices_a_tensor_that_is_touched_too_early() -> None:
    def touches(member: GroupMember) -> None:
        transport = member.open("touched")
        sent = [(p, member.make_full(1, 1000)) for p in member.peers()]
        got = [(p, member.make_full(0, 1000)) for p in member.peers()]
        pending = transport.exchange(sent, got, 1)
        sent[0][1][3] = 2.0
        pending.wait()

    complaints = run_contract_in_threads(touches, MemoryNetwork().transport, size=2)
    assert "was touched before the wait" in complaints[0]


def test_the_fake_names_unplugged_members() -> None:
    def unplugged(member: GroupMember) -> None:
        transport = member.open("unplugged")
        assert transport.lost_ranks() == []
        member.meet("open")
        if member.rank == 1:
            transport.unplug()
        member.meet("unplugged")
        assert transport.lost_ranks() == ([0, 2] if member.rank == 1 else [1])

    assert run_contract_in_threads(unplugged, MemoryNetwork().transport, size=3) == []


def ends_beside_a_frozen_member(member: GroupMember) -> None:
    """Check that an abort frees threads that send to a stopped process, or wait for it."""
    transport = member.open("frozen")
    member.addresses[f"pid/{member.rank}"] = os.getpid()
    member.meet("frozen")
    frozen = member.size - 1
    if member.rank == frozen:
        os.kill(os.getpid(), signal.SIGSTOP)
    got = [(p, member.make_full(-1, 1 << 24)) for p in member.peers()]
    sends = [(p, member.make_full(1, 1 << 24)) for p in member.peers()]
    if member.rank == 0:
        threading.Timer(0.2, transport.abort).start()
    done = threading.Event()
    threading.Thread(target=look_after, args=(transport, done)).start()
    with pytest.raises(Aborted):  # the abort may come before a member is here
        transport.exchange(sends, got, 5).wait()
    done.set()
    began = time.monotonic()
    transport.close()
    assert time.monotonic() - began < 5.0, "a close waits for a frozen peer"
    member.addresses[f"freed/{member.rank}"] = True
    if member.rank == 0:
        while not all(f"freed/{rank}" in member.addresses for rank in range(frozen)):
            threading.Event().wait(0.001)
        os.kill(member.addresses[f"pid/{frozen}"], signal.SIGKILL)


@pytest.mark.slow
def test_tcp_ends_beside_a_frozen_member() -> None:
    assert run_contract(ends_beside_a_frozen_member, tcp, size=3) == []


@pytest.mark.parametrize(
    "make_of",
    [
        pytest.param(tcp_with_impostor, marks=pytest.mark.slow),
        tcp_with_keyless_impostor,
        pytest.param(tcp_with_echo, marks=pytest.mark.slow),
    ],
    ids=["another key", "no key", "echo"],
)
def test_tcp_refuses_impostors(make_of: Callable[[int], MakeTransport]) -> None:
    assert run_contract(refuses_impostors, make_of, size=3) == []


def test_a_peer_may_leave_as_soon_as_it_has_everything() -> None:
    near, far = socket.socketpair()
    network = GroupNetwork()
    network.connect(1, PlainWire(near))
    link, data = network.link(1), memoryview(bytearray(8 << 20))
    expected, leaving = network.exchange({link: [(1, data)]}, [], 1)
    assert leaving

    def receive_all() -> None:
        with far:
            far.recv_into(bytearray(HEAD.size + len(data)), 0, socket.MSG_WAITALL)

    peer = threading.Thread(target=receive_all)
    peer.start()
    network.wait(expected, leaving)
    peer.join(PATIENCE_S)
    network.close()


def test_a_message_that_leaves_as_its_connection_comes_wakes_who_waits_for_it() -> None:
    near, far = socket.socketpair()
    network = GroupNetwork()
    sends = {network.link(1): [(1, memoryview(bytes(100)))]}
    expected, leaving = network.exchange(sends, [], 1)
    assert leaving
    waiting = threading.Thread(target=network.wait, args=(expected, leaving), daemon=True)
    waiting.start()
    deadline = time.monotonic() + PATIENCE_S
    while not network._is_polling:  # it is about to ask the kernel
        assert time.monotonic() < deadline
        threading.Event().wait(0.001)
    network.connect(1, PlainWire(near))
    waiting.join(PATIENCE_S)
    assert not waiting.is_alive()
    with far:
        network.close()


def test_messages_move_while_no_thread_waits() -> None:
    near, far = socket.socketpair()
    network = GroupNetwork()
    network.connect(1, PlainWire(near))
    data = memoryview(bytearray(8 << 20))
    expected, leaving = network.exchange({network.link(1): [(1, data)]}, [], 1)
    network.go_on()
    with far:
        far.recv_into(bytearray(HEAD.size + len(data)), 0, socket.MSG_WAITALL)
        deadline = time.monotonic() + PATIENCE_S
        while not network.are_done(expected, leaving):
            assert time.monotonic() < deadline
            threading.Event().wait(0.001)
    network.close()


def reaches_others_later(member: GroupMember) -> None:
    """Check that ranks are connected when they are first needed."""
    transport = member.make()
    rendezvous = SharedRendezvous(member.addresses, "later", member.rank, threading.Event())
    transport.open(member.rank, member.size, rendezvous, peers=())
    got = [(p, member.make_full(-1, 300_000)) for p in member.peers()]
    sends = [(p, member.make_full(member.rank, 300_000)) for p in member.peers()]
    transport.exchange(sends, got, 5).wait()
    assert all(bool((tensor == peer).all()) for peer, tensor in got)
    member.meet("later")
    transport.close()


def test_tcp_reaches_others_when_they_are_needed() -> None:
    assert run_contract(reaches_others_later, tcp, size=4) == []


def opens_for_nobody(member: GroupMember) -> None:
    with pytest.raises(Aborted):
        member.open("silent")


@pytest.mark.slow
def test_tcp_does_not_wait_for_a_silent_impostor() -> None:
    assert run_contract(opens_for_nobody, tcp_with_silent_impostor, size=3) == []


def test_a_token_is_bound_to_key_group_sender_and_receiver() -> None:
    group = peer_stream.group_name([b"a", b"b", b"c"])
    good = peer_stream.token(KEY, group, 0, 1)
    assert len(good) == peer_stream.TOKEN_BYTES
    assert peer_stream.is_token(good, KEY, group, 0, 1)
    assert not peer_stream.is_token(good, b"j" * 32, group, 0, 1)
    assert not peer_stream.is_token(good, KEY, group, 1, 0)
    assert not peer_stream.is_token(good, KEY, group, 0, 2)
    assert not peer_stream.is_token(good[:-1], KEY, group, 0, 1)
    for other in ([b"a", b"b", b"d"], [b"b", b"a", b"c"], [b"ab", b"", b"c"], [b"a", b"b"]):
        assert not peer_stream.is_token(good, KEY, peer_stream.group_name(other), 0, 1)


def test_the_peer_key_is_taken_out_of_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOLDFAST_PEER_KEY", KEY.hex())
    environment = WorkerEnvironment.read(os.environ)
    take_channel(environment)
    assert environment.peer_key == KEY
    assert "HOLDFAST_PEER_KEY" not in os.environ
    assert KEY.hex() not in repr(environment)
    assert str(KEY) not in repr(environment)
    with pytest.raises(UserError, match=r"^HOLDFAST_PEER_KEY is not hexadecimal: unset it$"):
        WorkerEnvironment.read({"HOLDFAST_PEER_KEY": "xyz"})


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each process: 2")
@pytest.mark.parametrize(
    "case", [c for c in CONTRACT if c is not takes_any_order], ids=lambda case: case.__name__
)
def test_nccl(case: Callable[[GroupMember], None]) -> None:
    assert run_contract(case, nccl, size=2, device="cuda") == []


def test_the_transport_of_a_lone_worker_refuses_peers() -> None:
    transport = AloneTransport()
    transport.exchange([], [], 1).wait()
    with pytest.raises(Aborted):
        transport.exchange([(1, torch.zeros(1))], [], 1)
    transport.abort()
    with pytest.raises(Aborted):
        transport.exchange([], [], 1)


class Forgetful(TcpTransport):
    """Plants a bug: aborting has no effect."""

    def abort(self) -> None:
        return


class Trusting(GroupNetwork):
    """Plants a bug: waiting threads are not woken when the group is given up."""

    def abort(self) -> None:
        self.aborted = True


class Scrambled(TcpTransport):
    """Plants a bug: messages of one pair may overtake each other."""

    def exchange(self, sends: list, receives: list, tag: int, sent_us: int = 0) -> object:
        return super().exchange(list(reversed(sends)), receives, tag, sent_us)


def forgetful(rank: int) -> MakeTransport:
    listener = TcpListener("127.0.0.1")
    return lambda: Forgetful(listener)


def trusting(rank: int) -> MakeTransport:
    tcp_transport.GroupNetwork = Trusting
    return tcp(rank)


def scrambled(rank: int) -> MakeTransport:
    listener = TcpListener("127.0.0.1")
    return lambda: Scrambled(listener)


@pytest.mark.slow
def test_the_contract_catches_planted_bugs() -> None:
    case = {c.__name__: c for c in CONTRACT}
    assert run_contract(case["aborts"], forgetful, size=2, timeout_s=2.0) != []
    assert run_contract(case["aborts"], trusting, size=2, timeout_s=2.0) != []
    assert run_contract(case["keeps_order"], scrambled, size=2) != []

"""Every transport passes the one contract suite, in real processes."""

from __future__ import annotations

import itertools
import os
import threading
from collections.abc import Callable

import pytest
import torch

from holdfast.core.errors import Aborted, UserError
from holdfast.net import proof
from holdfast.testing.memory_transport import MemoryNetwork, MemoryTransport
from holdfast.testing.transports import (
    CONTRACT,
    GroupMember,
    MakeTransport,
    SharedRendezvous,
    aborts,
    refuses_impostors,
    run_contract,
    run_contract_in_threads,
)
from holdfast.train.environment import WorkerEnvironment, take_channel
from holdfast.train.transport import sockets
from holdfast.train.transport.gloo import TAG_PROOF, GlooDevice, GlooTransport, _AddressStore
from holdfast.train.transport.nccl import NcclTransport
from holdfast.train.transport.seam import AloneTransport

KEY = b"k" * 32


def gloo(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1", KEY)
    return lambda: GlooTransport(device, ended_s=0.5)


def gloo_with_impostor(rank: int) -> MakeTransport:
    """Of three, the last has another job's key."""
    device = GlooDevice("127.0.0.1", KEY if rank < 2 else b"j" * 32)
    return lambda: GlooTransport(device)


def gloo_with_keyless_impostor(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1", KEY if rank < 2 else b"")
    return lambda: GlooTransport(device)


class Echo(GlooTransport):
    """An impostor without the key: it shows everyone the token that they have just shown it."""

    def _prove(self, rank: int, size: int, group: bytes) -> None:
        for peer in range(size - 1):
            heard = torch.zeros(proof.TOKEN_BYTES, dtype=torch.uint8)
            self.exchange([], [(peer, heard)], TAG_PROOF).wait()
            self.exchange([(peer, heard)], [], TAG_PROOF).wait()
        raise Aborted("it has nothing more to try")


def gloo_with_echo(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1", KEY)
    return lambda: GlooTransport(device) if rank < 2 else Echo(device)


class Silent(GlooTransport):
    """An impostor that connects and says nothing."""

    def _prove(self, rank: int, size: int, group: bytes) -> None:
        self.exchange([], [(0, torch.zeros(1))], 77).wait()


def gloo_with_silent_impostor(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1", KEY)
    return lambda: (GlooTransport if rank < 2 else Silent)(device, build_s=1.0)


def nccl(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1", KEY)
    return lambda: NcclTransport(GlooTransport(device), torch.device("cuda", rank))


@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.__name__)
def test_gloo(case: Callable[[GroupMember], None]) -> None:
    assert run_contract(case, gloo, size=3) == []


@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.__name__)
def test_memory(case: Callable[[GroupMember], None]) -> None:
    assert run_contract_in_threads(case, MemoryNetwork().transport, size=3) == []


class Deaf(MemoryTransport):
    """A broken transport: it does not hear that others gave the group up."""

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
        sent = [(p, member.full(1, 1000)) for p in member.peers()]
        got = [(p, member.full(0, 1000)) for p in member.peers()]
        pending = transport.exchange(sent, got, 1)
        sent[0][1][3] = 2.0
        pending.wait()

    complaints = run_contract_in_threads(touches, MemoryNetwork().transport, size=2)
    assert "was touched before the wait" in complaints[0]


def test_the_fake_tells_who_is_unplugged() -> None:
    def unplugged(member: GroupMember) -> None:
        transport = member.open("unplugged")
        assert transport.lost() == []
        member.meet("open")
        if member.rank == 1:
            transport.unplug()
        member.meet("unplugged")
        assert transport.lost() == ([0, 2] if member.rank == 1 else [1])

    assert run_contract_in_threads(unplugged, MemoryNetwork().transport, size=3) == []


@pytest.mark.parametrize(
    "make_of",
    [gloo_with_impostor, gloo_with_keyless_impostor, gloo_with_echo],
    ids=["another key", "no key", "echo"],
)
def test_gloo_refuses_impostors(make_of: Callable[[int], MakeTransport]) -> None:
    assert run_contract(refuses_impostors, make_of, size=3) == []


def opens_for_nobody(member: GroupMember) -> None:
    with pytest.raises(Aborted):
        member.open("silent")


def test_gloo_does_not_wait_for_a_silent_impostor() -> None:
    assert run_contract(opens_for_nobody, gloo_with_silent_impostor, size=3) == []


def test_a_token_is_bound_to_key_group_sender_and_receiver() -> None:
    group = proof.group_name([b"a", b"b", b"c"])
    good = proof.token(KEY, group, 0, 1)
    assert len(good) == proof.TOKEN_BYTES
    assert proof.is_token(good, KEY, group, 0, 1)
    assert not proof.is_token(good, b"j" * 32, group, 0, 1)
    assert not proof.is_token(good, KEY, group, 1, 0)
    assert not proof.is_token(good, KEY, group, 0, 2)
    assert not proof.is_token(good[:-1], KEY, group, 0, 1)
    for other in ([b"a", b"b", b"d"], [b"b", b"a", b"c"], [b"ab", b"", b"c"], [b"a", b"b"]):
        assert not proof.is_token(good, KEY, proof.group_name(other), 0, 1)


def test_every_group_has_a_name_of_its_own() -> None:
    """The same members, ports and gloo addresses: what was overheard once is of no use again."""
    published: list[bytes] = []
    for _ in range(2):
        rendezvous = SharedRendezvous({}, "again", 0, threading.Event())
        store = _AddressStore(0, "127.0.0.1", 4711, rendezvous)
        store.set("rank/0", b"gloo's address")
        assert store.get("rank/0") == b"gloo's address"
        published.append(rendezvous.lookup(0))
    assert proof.group_name(published[:1]) != proof.group_name(published[1:])


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
@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.__name__)
def test_nccl(case: Callable[[GroupMember], None]) -> None:
    assert run_contract(case, nccl, size=2, device="cuda") == []


def test_alone_refuses_company() -> None:
    transport = AloneTransport()
    transport.exchange([], [], 1).wait()
    with pytest.raises(Aborted):
        transport.exchange([(1, torch.zeros(1))], [], 1)
    transport.abort()
    with pytest.raises(Aborted):
        transport.exchange([], [], 1)


class Forgetful(GlooTransport):
    """A planted bug: aborting does nothing."""

    def abort(self) -> None:
        return


class Trusting(GlooTransport):
    """A planted bug: to cut the connections is taken for enough."""

    def abort(self) -> None:
        sockets.cut(self._sockets)
        self.aborted = True


class Scrambled(GlooTransport):
    """A planted bug: messages of one pair may overtake each other."""

    def exchange(self, sends: list, receives: list, tag: int) -> object:
        return super().exchange(list(reversed(sends)), receives, tag)


def forgetful(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1")
    return lambda: Forgetful(device)


def trusting(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1")
    return lambda: Trusting(device)


def scrambled(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1")
    return lambda: Scrambled(device)


@pytest.mark.slow
def test_the_contract_catches_planted_bugs() -> None:
    case = {c.__name__: c for c in CONTRACT}
    assert run_contract(case["aborts"], forgetful, size=2, timeout_s=2.0) != []
    assert run_contract(case["aborts_amid_messages"], trusting, size=2, timeout_s=4.0) != []
    assert run_contract(case["keeps_order"], scrambled, size=2) != []

"""Defines the contract of every Transport, as functions that each member of a group runs.

`run_contract` starts real processes, hands each a rendezvous, and collects the faults that they
find; `run_contract_in_threads` does so within one process. A transport must pass all of CONTRACT;
an `ordered` one is excused from `takes_any_order`.
"""

from __future__ import annotations

import multiprocessing as mp
import os
import signal
import threading
import time
import traceback
from collections.abc import Callable, MutableMapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from holdfast.engine.core.errors import Aborted
from holdfast.engine.train.exchange.seam import Message, Transport

POLL_S = 0.001
LOOK_S = 0.1
AMID_NUMEL = 8 << 20  # large enough to be half way for many milliseconds
MakeTransport = Callable[[], Transport]


@dataclass(slots=True)
class SharedRendezvous:
    """Implements a rendezvous over a dictionary that all test processes share."""

    addresses: MutableMapping[str, bytes]
    group: str
    rank: int
    given_up: threading.Event

    def publish(self, address: bytes) -> None:
        self.addresses[f"{self.group}/{self.rank}"] = address

    def lookup(self, rank: int) -> bytes:
        while f"{self.group}/{rank}" not in self.addresses:
            if self.given_up.is_set():
                raise Aborted("the view was given up")
            time.sleep(POLL_S)
        return self.addresses[f"{self.group}/{rank}"]


def _kill_process(transport: Transport) -> None:
    os.kill(os.getpid(), signal.SIGKILL)


@dataclass(frozen=True, slots=True)
class GroupMember:
    """Represents one process, or one thread, in a contract test; `die` ends it."""

    rank: int
    size: int
    make: MakeTransport
    addresses: MutableMapping[str, Any]
    device: str
    die: Callable[[Transport], None] = _kill_process

    def open(self, group: str) -> Transport:
        transport = self.make()
        rendezvous = SharedRendezvous(self.addresses, group, self.rank, threading.Event())
        transport.open(self.rank, self.size, rendezvous)
        return transport

    def meet(self, name: str) -> None:
        """Wait until every process has come here."""
        self.addresses[f"meet/{name}/{self.rank}"] = True
        while not all(f"meet/{name}/{r}" in self.addresses for r in range(self.size)):
            time.sleep(POLL_S)

    def peers(self) -> list[int]:
        return [r for r in range(self.size) if r != self.rank]

    def make_full(
        self, value: float, numel: int, dtype: torch.dtype = torch.float32
    ) -> torch.Tensor:
        return torch.full((numel,), value, dtype=dtype, device=self.device)


def delivers(member: GroupMember) -> None:
    """Check that everyone's tensors reach everyone, of several types and sizes, several at once."""
    transport = member.open("delivers")
    for dtype in (torch.float32, torch.bfloat16, torch.int64, torch.uint8):
        for numel in (1, 1000, 300_000):
            waits, got = [], {}
            for tag in (5, 6):
                got[tag] = {p: member.make_full(0, numel, dtype) for p in member.peers()}
                sends = [
                    (p, member.make_full(member.rank + tag, numel, dtype)) for p in member.peers()
                ]
                waits.append((transport.exchange(sends, list(got[tag].items()), tag), sends))
            for pending, _ in waits:
                pending.wait()
            for tag, tensors in got.items():
                for peer, tensor in tensors.items():
                    assert torch.equal(tensor, member.make_full(peer + tag, numel, dtype)), (
                        dtype,
                        numel,
                    )
    transport.close()


def keeps_order(member: GroupMember) -> None:
    """Check that messages of one pair under one tag arrive in the order sent."""
    transport = member.open("order")
    sends = [(p, member.make_full(i, 1000)) for p in member.peers() for i in range(20)]
    got = [(p, member.make_full(-1, 1000)) for p in member.peers() for _ in range(20)]
    transport.exchange(sends, got, 9).wait()
    assert [t[0].item() for _, t in got] == [float(i) for _ in member.peers() for i in range(20)]
    transport.close()


def takes_any_order(member: GroupMember) -> None:
    """Check that a member may wait for messages in another order than its peers send them."""
    transport = member.open("any order")
    sizes = {1: 2_000_000, 2: 10, 3: 2_000_000, 4: 10}
    sent = [
        transport.exchange([(p, member.make_full(tag, numel)) for p in member.peers()], [], tag)
        for tag, numel in sizes.items()
    ]
    for tag, numel in reversed(sizes.items()):
        got = [(p, member.make_full(-1, numel)) for p in member.peers()]
        transport.exchange([], got, tag).wait()
        assert all(bool((t == tag).all()) for _, t in got), tag
    for pending in sent:
        pending.wait()
    member.meet("any order")
    transport.close()


def aborts(member: GroupMember) -> None:
    """Check that an abort on one side ends every wait on all sides, for good."""
    transport = member.open("aborts")
    member.meet("aborts")
    if member.rank == 0:
        threading.Timer(0.05, transport.abort).start()
    _check_aborts(lambda: _wait_for_nothing(member, transport))
    _check_aborts(lambda: _wait_for_nothing(member, transport))
    transport.close()


def aborts_amid_messages(member: GroupMember) -> None:
    """Check that an abort ends the waits of senders and receivers in the middle of messages."""
    for i in range(4):
        transport = member.open(f"amid{i}")
        got = [(p, member.make_full(-1, AMID_NUMEL)) for p in member.peers() for _ in range(2)]
        sends = [(p, member.make_full(i, AMID_NUMEL)) for p in member.peers() for _ in range(2)]
        member.meet(f"amid{i}")
        if member.rank == i % member.size:
            threading.Timer(0.004 * i, transport.abort).start()
        done = threading.Event()
        threading.Thread(target=look_after, args=(transport, done)).start()
        _check_aborts(partial(_exchange_on, transport, sends, got))
        done.set()
        transport.close()


def survives_rebuilding(member: GroupMember) -> None:
    """Check that group after group works after the one before was aborted."""
    for i in range(4):
        transport = member.open(f"rebuilt{i}")
        got = [(p, member.make_full(-1, 1000)) for p in member.peers()]
        transport.exchange([(p, member.make_full(i, 1000)) for p in member.peers()], got, 3).wait()
        assert all(bool((t == i).all()) for _, t in got)
        member.meet(f"rebuilt{i}")
        transport.abort()
        transport.close()


def gives_up_opening(member: GroupMember) -> None:
    """Check that the rendezvous ends the opening of a group if a member never comes."""
    if member.rank == member.size - 1:
        return
    given_up = threading.Event()
    rendezvous = SharedRendezvous(member.addresses, "absent", member.rank, given_up)
    transport = member.make()
    threading.Timer(0.05, given_up.set).start()
    _check_aborts(lambda: transport.open(member.rank, member.size, rendezvous))
    transport.close()


def notices_death(member: GroupMember) -> None:
    """Check that a member's death in an exchange ends the waits of members that abort."""
    transport = member.open("death")
    member.meet("death")
    if member.rank == member.size - 1:
        member.die(transport)
    if member.rank > 0:  # rank 0 must notice by itself; its own abort then frees the others
        threading.Timer(2.0, transport.abort).start()
    _check_aborts(lambda: _wait_for_nothing(member, transport))
    transport.close()


def refuses_impostors(member: GroupMember) -> None:
    """Check that if a member cannot prove itself, no group opens and it is named.

    It needs a `make_of` whose last rank is an impostor, so it is not in CONTRACT.
    """
    try:
        member.open("impostor")
    except Aborted as error:
        member.addresses[f"reason/{member.rank}"] = str(error)
    else:
        raise AssertionError("a group with an impostor opened")
    member.meet("impostor")
    reasons = [member.addresses[f"reason/{r}"] for r in range(member.size - 1)]
    expected = f"the peer at rank {member.size - 1} has not proved"
    assert any(r.startswith(expected) for r in reasons), reasons


CONTRACT = [
    delivers,
    keeps_order,
    takes_any_order,
    aborts,
    aborts_amid_messages,
    survives_rebuilding,
    gives_up_opening,
    notices_death,
]


def run_contract(
    case: Callable[[GroupMember], None],
    make_of: Callable[[int], MakeTransport],
    size: int,
    device: str = "cpu",
    timeout_s: float = 60.0,
) -> list[str]:
    """Run one case in `size` processes; return complaints. `make_of(rank)` is pickled to them."""
    context = mp.get_context("forkserver")  # it imports torch once
    context.set_forkserver_preload([__name__])
    with context.Manager() as manager:
        addresses = manager.dict()
        processes = [
            context.Process(target=_member, args=(case, rank, size, make_of, addresses, device))
            for rank in range(size)
        ]
        for process in processes:
            process.start()
        complaints: list[str] = []
        deadline = time.monotonic() + timeout_s
        for rank, process in enumerate(processes):
            process.join(max(deadline - time.monotonic(), 0))
            if process.is_alive():
                process.kill()
                complaints.append(f"rank {rank} hangs in {case.__name__}")
        return complaints + [v for k, v in addresses.items() if k.startswith("error/")]


class _Died(BaseException):
    """Ends the thread of a member that dies."""


def run_contract_in_threads(
    case: Callable[[GroupMember], None],
    make: MakeTransport,
    size: int,
    timeout_s: float = 60.0,
    device: str = "cpu",
) -> list[str]:
    """Run one case in `size` threads of this process; return complaints."""
    addresses: dict[str, Any] = {}

    def die(transport: Transport) -> None:
        transport.close()
        raise _Died

    def run(rank: int) -> None:
        try:
            case(GroupMember(rank, size, make, addresses, device, die))
        except _Died:
            pass
        except BaseException:  # noqa: BLE001 - every complaint counts
            addresses[f"error/{rank}"] = f"rank {rank}: {traceback.format_exc()}"

    threads = [threading.Thread(target=run, args=(rank,), daemon=True) for rank in range(size)]
    for thread in threads:
        thread.start()
    deadline = time.monotonic() + timeout_s
    for thread in threads:
        thread.join(max(deadline - time.monotonic(), 0))
    hanging = [rank for rank, thread in enumerate(threads) if thread.is_alive()]
    complaints = [f"rank {rank} hangs in {case.__name__}" for rank in hanging]
    return complaints + [v for k, v in list(addresses.items()) if k.startswith("error/")]


def _member(
    case: Callable[[GroupMember], None],
    rank: int,
    size: int,
    make_of: Callable[[int], MakeTransport],
    addresses: MutableMapping[str, Any],
    device: str,
) -> None:
    torch.set_num_threads(1)
    try:
        case(GroupMember(rank, size, make_of(rank), addresses, device))
    except BaseException:  # noqa: BLE001 - every complaint counts
        addresses[f"error/{rank}"] = f"rank {rank}: {traceback.format_exc()}"
    os._exit(0)


def _exchange_on(transport: Transport, sends: list[Message], receives: list[Message]) -> None:
    """Exchange the same messages again and again, until that fails."""
    while True:
        _exchange(transport, sends, receives)


def _exchange(transport: Transport, sends: list[Message], receives: list[Message]) -> None:
    transport.exchange(sends, receives, 3).wait()


def look_after(transport: Transport, done: threading.Event) -> None:
    """Look at the group's connections now and then, as a worker's control thread does."""
    while not done.wait(LOOK_S):
        transport.lost_ranks()


def _wait_for_nothing(member: GroupMember, transport: Transport) -> None:
    """Wait for messages that no member sends."""
    transport.exchange([], [(p, member.make_full(0, 1000)) for p in member.peers()], 77).wait()


def _check_aborts(action: Callable[[], None]) -> None:
    try:
        action()
    except Aborted:
        return
    raise AssertionError("the exchange ended without raising Aborted")

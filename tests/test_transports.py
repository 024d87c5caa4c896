"""Every transport passes the one contract suite, in real processes."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from holdfast.core.errors import Severed
from holdfast.testing.transports import CONTRACT, MakeTransport, Seat, run_contract
from holdfast.train.gloo import GlooDevice, GlooTransport
from holdfast.train.nccl import NcclTransport
from holdfast.train.transport import AloneTransport


def gloo(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1")
    return lambda: GlooTransport(device)


def nccl(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1")
    return lambda: NcclTransport(device, torch.device("cuda", rank))


@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.__name__)
def test_gloo(case: Callable[[Seat], None]) -> None:
    assert run_contract(case, gloo, size=3) == []


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="NCCL needs a GPU for each process: 2")
@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.__name__)
def test_nccl(case: Callable[[Seat], None]) -> None:
    assert run_contract(case, nccl, size=2, device="cuda") == []


def test_alone_refuses_company() -> None:
    transport = AloneTransport()
    transport.exchange([], [], 1).wait()
    with pytest.raises(Severed):
        transport.exchange([(1, torch.zeros(1))], [], 1)
    transport.sever()
    with pytest.raises(Severed):
        transport.exchange([], [], 1)


class Forgetful(GlooTransport):
    """A planted bug: severing does nothing."""

    def sever(self) -> None:
        return


class Scrambled(GlooTransport):
    """A planted bug: messages of one pair may overtake each other."""

    def exchange(self, sends: list, receives: list, tag: int) -> object:
        return super().exchange(list(reversed(sends)), receives, tag)


def forgetful(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1")
    return lambda: Forgetful(device)


def scrambled(rank: int) -> MakeTransport:
    device = GlooDevice("127.0.0.1")
    return lambda: Scrambled(device)


def test_the_contract_catches_planted_bugs() -> None:
    case = {c.__name__: c for c in CONTRACT}
    assert run_contract(case["severs"], forgetful, size=2, timeout_s=10.0) != []
    assert run_contract(case["keeps_order"], scrambled, size=2) != []

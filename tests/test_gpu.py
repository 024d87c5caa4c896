"""What differs on a GPU, on a fake one: copies that lag, tensors that are not the host's."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable
from typing import Any

import pytest
import torch

from fake_gpu import fake_gpu, move, on_gpu
from holdfast.core.job_spec import with_settings
from holdfast.core.types import WorkerId
from holdfast.testing.memory_transport import MemoryNetwork
from holdfast.testing.transports import (
    CONTRACT,
    GroupMember,
    SharedRendezvous,
    aborts_amid_messages,
    run_contract_in_threads,
)
from holdfast.train.checkpoint import state
from holdfast.train.job import Job
from holdfast.train.transport import nccl
from holdfast.train.transport.nccl import NO_NCCL, GpuTransport
from holdfast.train.transport.seam import Transport
from holdfast.train.transport.staged import Copy, DeviceCopies, HostRooms, Moment, StagedTransport
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

__all__ = ["fake_gpu"]


def staged(network: MemoryNetwork, copies: DeviceCopies | None = None) -> StagedTransport:
    rooms = HostRooms(copies or DeviceCopies(torch.device("cuda", 0)))
    return StagedTransport(network.transport(), rooms)


def exchanged(copies: Callable[[], DeviceCopies]) -> list[list[float]]:
    """Return what two members on the fake GPU receive of each other in three exchanges."""
    network, found = MemoryNetwork(), []

    def case(member: GroupMember) -> None:
        transport = member.open("staged")
        got = []
        for number in range(3):
            sent = on_gpu(torch.full((1000,), 10.0 * number + member.rank))
            room = on_gpu(torch.full((1000,), -1.0))
            transport.exchange([(1 - member.rank, sent)], [(1 - member.rank, room)], 5).wait()
            got += room[:1].tolist()
        found.append(got)

    assert run_contract_in_threads(case, lambda: staged(network, copies()), size=2) == []
    return sorted(found)


RIGHT = [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0]]


def test_tensors_on_a_gpu_travel_by_way_of_the_host(fake_gpu: torch.device) -> None:
    assert exchanged(lambda: DeviceCopies(fake_gpu)) == RIGHT


class Hasty(DeviceCopies):
    """A planted bug: it does not wait until copies to the host have arrived."""

    def to_host(self, copies: list[Copy], after: Moment) -> None:
        self._copy(copies, after)


class Careless(DeviceCopies):
    """A planted bug: what is computed from now on does not wait for copies to the device."""

    def to_device(self, copies: list[Copy], after: Moment) -> Moment:
        return self._copy(copies, after)


@pytest.mark.parametrize("broken", [Hasty, Careless])
def test_the_fake_shows_copies_that_nobody_waited_for(
    broken: type[DeviceCopies], fake_gpu: torch.device
) -> None:
    assert exchanged(lambda: broken(fake_gpu)) != RIGHT


@pytest.mark.parametrize(
    "case",
    [
        pytest.param(case, marks=pytest.mark.slow if case is aborts_amid_messages else ())
        for case in CONTRACT
    ],
    ids=lambda case: case.__name__,
)
def test_the_staged_transport_keeps_the_contract(
    case: Callable[[GroupMember], None], fake_gpu: torch.device
) -> None:
    network = MemoryNetwork()
    assert run_contract_in_threads(case, lambda: staged(network), size=3, device="cuda") == []


# ---------------------------------------------------------------- which way tensors travel


class Connected(StagedTransport):
    """Stands where NCCL connects the members, and exchanges as a staged transport does."""

    def __init__(self, host: Transport, device: torch.device) -> None:
        super().__init__(host, HostRooms(DeviceCopies(device)))

    def connect(self, rank: int, size: int) -> None:
        return


@pytest.mark.parametrize(
    ("gpus", "by_nccl"),
    [
        ((b"a" * 16, b"b" * 16, b"c" * 16), True),
        ((b"a" * 16, b"b" * 16, b"a" * 16), False),  # two workers share one
        ((b"a" * 16, NO_NCCL, b"c" * 16), False),
    ],
)
def test_members_use_nccl_only_if_each_has_a_gpu_of_its_own(
    gpus: tuple[bytes, ...], by_nccl: bool, fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(nccl, "NcclTransport", Connected)
    network, chosen, rooms = MemoryNetwork(), [], HostRooms(DeviceCopies(fake_gpu))

    def case(member: GroupMember) -> None:
        transport = GpuTransport(network.transport(), fake_gpu, rooms, gpus[member.rank])
        rendezvous = SharedRendezvous(member.addresses, "gpus", member.rank, threading.Event())
        transport.open(member.rank, member.size, rendezvous)
        chosen.append(type(transport._over))
        got = {peer: member.full(-1, 100) for peer in member.peers()}
        sends = [(peer, member.full(member.rank, 100)) for peer in member.peers()]
        transport.exchange(sends, list(got.items()), 5).wait()
        assert all(torch.equal(room, member.full(peer, 100)) for peer, room in got.items())

    complaints = run_contract_in_threads(case, network.transport, size=3, device="cuda")
    assert complaints == []
    assert chosen == [Connected if by_nccl else StagedTransport] * 3


@pytest.mark.slow
def test_a_process_that_forks_workers_leaves_cuda_alone() -> None:
    """What has begun to use CUDA cannot use it in a fork."""
    code = """
import torch

def touched(*given, **options):
    raise SystemExit("CUDA was touched")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, touched)
import holdfast.train.preload, holdfast.runtime.node.fork_server
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- whole jobs


def stage(worker: ThreadWorker) -> None:
    """Have a worker's messages pass through the host."""
    rooms = HostRooms(DeviceCopies(torch.device("cuda", 0)))
    make = worker.transport

    def made() -> Transport:
        return StagedTransport(make(), rooms)

    object.__setattr__(worker.control, "make_transport", made)


def net() -> torch.nn.Sequential:
    """A model that does not depend on torch's own generator, which belongs to all threads."""
    model = torch.nn.Sequential(
        torch.nn.Linear(6, 8), torch.nn.BatchNorm1d(8), torch.nn.Tanh(), torch.nn.Linear(8, 2)
    )
    generator = torch.Generator().manual_seed(3)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, generator=generator)
    return model


def trained(
    workers: int,
    settings: dict[str, Any] | None = None,
    *,
    gpu: bool = True,
    kill_at: dict[WorkerId, int] | None = None,
    disturb: Callable[[Job, torch.nn.Module, int], None] = lambda job, model, step: None,
) -> tuple[list[bytes], ThreadCluster]:
    """Train on the fake GPU, or on the host; returns the bytes of the final parameters."""
    results: dict[int, list[bytes]] = {}
    inputs = torch.randn(64, 6, generator=torch.Generator().manual_seed(5))
    data = torch.utils.data.TensorDataset(inputs)

    def script(job: Job, worker: ThreadWorker) -> None:
        if gpu:
            stage(worker)
        model = move(net()) if gpu else net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        job.protect(model=model, optimizer=optimizer)
        for step in job.steps(job.batches(data, batch_size=2), until=6):
            disturb(job, model, step.index)
            for (x,) in step:
                step.backward(model(on_gpu(x) if gpu else x).square().mean())
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
        results[job.worker] = [state.as_bytes(p).numpy().tobytes() for p in model.parameters()]

    spec = with_settings(SPEC, {"workers.nproc": workers, "workers.virtual": 4, **(settings or {})})
    cluster = ThreadCluster(spec, script, kill_at)
    assert cluster.run() == "", cluster.errors
    assert len({tuple(r) for r in results.values()}) == 1
    return results[min(results)], cluster


def test_a_job_on_a_gpu_has_the_bits_of_one_on_the_host(fake_gpu: torch.device) -> None:
    on_host, _ = trained(1, gpu=False)
    for workers in (1, 2, 4):
        assert trained(workers)[0] == on_host


@pytest.mark.parametrize("exchange", [3, 7, 11, 20])
def test_a_worker_on_a_gpu_dies_and_comes_back(exchange: int, fake_gpu: torch.device) -> None:
    on_host, _ = trained(1, gpu=False)
    assert trained(3, kill_at={WorkerId(1): exchange})[0] == on_host


def test_audits_find_a_bit_that_flips_on_a_gpu(fake_gpu: torch.device) -> None:
    def flip(job: Job, model: torch.nn.Module, step: int) -> None:
        if job.worker == 1 and step == 3:
            with torch.no_grad():
                model[0].weight.view(torch.int32)[0, 0].bitwise_xor_(1)

    settings = {"silent_errors.audit": 1.0, "silent_errors.fingerprint_steps": 1}
    found, cluster = trained(3, settings, disturb=flip)
    assert cluster.told("wrong")
    assert found == trained(1, gpu=False)[0]

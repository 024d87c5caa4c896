"""What differs on a GPU, on a fake one: copies that lag, tensors that are not the host's."""

from __future__ import annotations

import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from conftest import RUN_S, SCRIPTS
from fake_gpu import FakeCudart, fake_gpu, move, on_gpu
from holdfast.engine.core.job_spec import with_settings
from holdfast.engine.core.redundancy import Piece, read_redundancy
from holdfast.engine.core.types import WorkerId
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.state.memory.pieces import Image, PieceCoder
from holdfast.engine.train.exchange import gpu_transport
from holdfast.engine.train.exchange.gpu_transport import (
    NO_NCCL,
    Copy,
    DeviceCopies,
    GpuTransport,
    HostRooms,
    Moment,
    StagedTransport,
    UniqueIdStore,
    gpu_id_of,
)
from holdfast.engine.train.exchange.seam import Transport
from holdfast.engine.train.exchange.tcp_transport import TcpListener, TcpTransport
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.job import Job
from holdfast.engine.train.state.gpu_pieces import DeviceImage, TensorCode
from holdfast.engine.train.state.share import StateShare
from holdfast.lab.contracts.memory_transport import MemoryNetwork
from holdfast.lab.contracts.transports import (
    CONTRACT,
    GroupMember,
    MakeTransport,
    SharedRendezvous,
    aborts_amid_messages,
    notices_death,
    run_contract,
    run_contract_in_threads,
)
from labs.local_nodes import LocalNodes, names
from mailboxes import together
from peer_kit import OpenConnections, lay_out
from support import SPEC
from thread_cluster import ThreadCluster, ThreadWorker

__all__ = ["fake_gpu"]


def staged(network: MemoryNetwork, copies: DeviceCopies | None = None) -> StagedTransport:
    rooms = HostRooms(copies or DeviceCopies(torch.device("cuda", 0)))
    return StagedTransport(network.transport(), rooms)


def exchanged(copies: Callable[[], DeviceCopies]) -> list[list[float]]:
    """Return the messages that two members on the fake GPU receive in three exchanges."""
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


LONG = (aborts_amid_messages, notices_death)
RIGHT = [[0.0, 10.0, 20.0], [1.0, 11.0, 21.0]]


def test_tensors_on_a_gpu_travel_by_way_of_the_host(fake_gpu: torch.device) -> None:
    assert exchanged(lambda: DeviceCopies(fake_gpu)) == RIGHT


class Hasty(DeviceCopies):
    """Plants a bug: it does not wait until copies to the host have arrived."""

    def to_host(self, copies: list[Copy], after: Moment) -> None:
        self._copy(copies, after)


class Careless(DeviceCopies):
    """Plants a bug: later computing does not wait for copies to the device."""

    def to_device(self, copies: list[Copy], after: Moment) -> Moment:
        return self._copy(copies, after)


@pytest.mark.parametrize("broken", [Hasty, Careless])
def test_the_fake_shows_copies_that_nobody_waited_for(
    broken: type[DeviceCopies], fake_gpu: torch.device
) -> None:
    assert exchanged(lambda: broken(fake_gpu)) != RIGHT


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=pytest.mark.slow if case in LONG else ()) for case in CONTRACT],
    ids=lambda case: case.__name__,
)
def test_the_staged_transport_keeps_the_contract(
    case: Callable[[GroupMember], None], fake_gpu: torch.device
) -> None:
    network = MemoryNetwork()
    assert run_contract_in_threads(case, lambda: staged(network), size=3, device="cuda") == []


@pytest.mark.parametrize(("size", "room"), [(1, 4096), (5000, 8192), ((64 << 20) + 1, 128 << 20)])
def test_a_room_is_used_again_once_the_device_has_read_it(size: int, room: int) -> None:
    class Later:
        passed = False

        def query(self) -> bool:
            return self.passed

    rooms, moment = HostRooms(DeviceCopies(torch.device("cpu"))), Later()
    first = rooms.take(size)
    assert first.nbytes == room
    rooms.give_back([first], moment)
    second = rooms.take(size)
    assert second is not first
    moment.passed = True
    assert rooms.take(size) is first


def on_one_gpu(rank: int) -> MakeTransport:
    gpu, listener = torch.device("cuda", 0), TcpListener("127.0.0.1", PeerIdentity(key=b"k" * 32))
    rooms = HostRooms(DeviceCopies(gpu))
    return lambda: GpuTransport(TcpTransport(listener, ended_s=0.5), gpu, rooms, gpu_id_of(gpu))


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
@pytest.mark.parametrize("case", CONTRACT, ids=lambda case: case.__name__)
def test_processes_that_share_a_real_gpu_keep_the_contract(
    case: Callable[[GroupMember], None],
) -> None:
    assert run_contract(case, on_one_gpu, size=3, device="cuda") == []


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
    monkeypatch.setattr(gpu_transport, "NcclTransport", Connected)
    network, chosen, rooms = MemoryNetwork(), [], HostRooms(DeviceCopies(fake_gpu))

    def case(member: GroupMember) -> None:
        transport = GpuTransport(network.transport(), fake_gpu, rooms, gpus[member.rank])
        rendezvous = SharedRendezvous(member.addresses, "gpus", member.rank, threading.Event())
        transport.open(member.rank, member.size, rendezvous)
        chosen.append(type(transport._over))
        got = {peer: member.make_full(-1, 100) for peer in member.peers()}
        sends = [(peer, member.make_full(member.rank, 100)) for peer in member.peers()]
        transport.exchange(sends, list(got.items()), 5).wait()
        assert all(torch.equal(room, member.make_full(peer, 100)) for peer, room in got.items())

    complaints = run_contract_in_threads(case, network.transport, size=3, device="cuda")
    assert complaints == []
    assert chosen == [Connected if by_nccl else StagedTransport] * 3


@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_members_on_gpus_open_by_messages_between_those_that_are_connected(
    size: int, fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpu_transport, "NcclTransport", Connected)
    network, addresses, rooms = (
        MemoryNetwork(),
        dict[str, bytes](),
        HostRooms(DeviceCopies(fake_gpu)),
    )
    layouts = lay_out([v % size for v in range(2 * size)], size)
    hosts = [OpenConnections(network, layout.rank, layout.peers) for layout in layouts]
    unique_ids: dict[int, bytes] = {}

    def open_one(rank: int) -> None:
        transport = GpuTransport(hosts[rank], fake_gpu, rooms, b"%016d" % rank)
        rendezvous = SharedRendezvous(addresses, "gpus", rank, threading.Event())
        store = UniqueIdStore(rank, size, hosts[rank])
        try:
            transport.open(rank, size, rendezvous, layouts[rank].peers)
            assert isinstance(transport._over, Connected)
            if not rank:
                store.set("id", b"of the communicator")
            unique_ids[rank] = store.get("id")
        except BaseException:
            transport.abort()  # the other members need not wait
            raise

    assert together(*[lambda r=r: open_one(r) for r in range(size)]) == []
    assert unique_ids == dict.fromkeys(range(size), b"of the communicator")
    assert max(len(host.sent) for host in hosts) <= 3 * (size - 1).bit_length()


@pytest.mark.slow
def test_a_process_that_forks_workers_leaves_cuda_alone() -> None:
    """A process that uses CUDA must not be forked."""
    code = """
import torch

def touched(*given, **options):
    raise SystemExit("CUDA was touched")

for name in ("is_available", "device_count", "init", "_lazy_init", "current_device"):
    setattr(torch.cuda, name, touched)
from holdfast.engine.runtime.node import fork_server
fork_server._load([])
"""
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


# ---------------------------------------------------------------- whole jobs


def stage(worker: ThreadWorker) -> None:
    """Pass a worker's messages through the host."""
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
        results[job.worker] = [as_bytes(p).numpy().tobytes() for p in model.parameters()]

    spec = with_settings(SPEC, {"workers.nproc": workers, "workers.virtual": 4, **(settings or {})})
    cluster = ThreadCluster(spec, script, kill_at)
    assert cluster.run() == "", cluster.errors
    assert len({tuple(r) for r in results.values()}) == 1
    return results[min(results)], cluster


def test_a_job_on_a_gpu_has_the_bits_of_one_on_the_host(fake_gpu: torch.device) -> None:
    on_host, _ = trained(1, gpu=False)
    for workers in (1, 2, 4):
        assert trained(workers)[0] == on_host


@pytest.mark.slow
@pytest.mark.parametrize("exchange", [3, 7, 11, 20])
def test_a_worker_on_a_gpu_dies_and_comes_back(exchange: int, fake_gpu: torch.device) -> None:
    on_host, _ = trained(1, gpu=False)
    assert trained(3, kill_at={WorkerId(1): exchange})[0] == on_host


@pytest.mark.slow
def test_audits_find_a_bit_that_flips_on_a_gpu(fake_gpu: torch.device) -> None:
    def flip(job: Job, model: torch.nn.Module, step: int) -> None:
        if job.worker == 1 and step == 3:
            with torch.no_grad():
                model[0].weight.view(torch.int32)[0, 0].bitwise_xor_(1)

    settings = {"silent_errors.audit": 1.0, "silent_errors.fingerprint_steps": 1}
    found, cluster = trained(3, settings, disturb=flip)
    assert cluster.told("wrong")
    assert found == trained(1, gpu=False)[0]


# ---------------------------------------------------------------- copies of the state


@pytest.mark.parametrize("code", [0, 1])
def test_a_checkpoint_copies_the_state_before_the_next_update(
    code: int, fake_gpu: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "cudart", lambda: FakeCudart(code))
    model = move(net())
    places, at = [], 0
    for tensor in model.state_dict().values():
        places.append((at, tensor))
        at += -(-tensor.nbytes // 64) * 64
    memory = memoryview(bytearray(at))
    share = StateShare({"model": model})
    for _ in range(2):
        before = [tensor.cpu() for _, tensor in places]
        share.copy(memory, places)
        assert share.is_busy  # parameters are not there yet
        share.wait_before_update()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter += 1
        share.wait_for_copies()
        assert not share.is_busy
        for (start, tensor), wanted in zip(places, before, strict=True):
            assert bytes(memory[start : start + tensor.nbytes]) == bytes(as_bytes(wanted))
    share.release()


@pytest.mark.parametrize("text", ["replicate:2", "rs:2+1"])
def test_pieces_of_an_image_partly_on_a_gpu_equal_those_made_on_the_host(
    text: str, fake_gpu: torch.device
) -> None:
    redundancy = read_redundancy(text)
    dice = torch.Generator().manual_seed(1)
    tensors = [torch.randn(count, generator=dice) for count in (7, 300, 41)]
    on_host = Image([as_bytes(each).numpy().data for each in tensors])
    image = DeviceImage([tensors[0], *map(on_gpu, tensors[1:])], fake_gpu)
    coder = PieceCoder(redundancy, 3, image.size)
    code = TensorCode(redundancy.data, redundancy.parity) if redundancy.data > 1 else None
    for part in range(3 // redundancy.data):
        for number in range(redundancy.data + redundancy.parity):
            found, wanted = (memoryview(bytearray(coder.size)) for _ in "ab")
            piece = Piece(part, number)
            digests = image.make(coder, code, piece, found), coder.make(on_host, piece, wanted)
            assert found == wanted
            assert digests[0] == digests[1]


# ---------------------------------------------------------------- whole jobs of processes

STEPS = 40
SEVERAL = ("--nproc", "3", "--virtual", "4")
STORED = ("--store", "STORE", "--save-every", "5")


def finished(
    folder: Path, *words: str, options: Sequence[str] = SEVERAL
) -> tuple[str, list[dict[str, Any]]]:
    """Run tests/scripts/on_fake_gpu.py to its end; return its digest, and the workers lost."""
    flags = [str(folder / "store") if each == "STORE" else each for each in options]
    script = [str(SCRIPTS / "on_fake_gpu.py"), "--steps", str(STEPS), *words]
    with LocalRun(folder / "run", flags, script) as run:
        assert run.wait(RUN_S) == 0, run.log()
    return run.out[-1], run.events("lost")


@pytest.fixture(scope="module")
def on_the_host(tmp_path_factory: pytest.TempPathFactory) -> str:
    alone = ("--nproc", "1", "--virtual", "4")
    return finished(tmp_path_factory.mktemp("host"), "--host", options=alone)[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    "options",
    [
        (*SEVERAL, *STORED),
        (*SEVERAL, "--join-pause", "0", "--fingerprint-steps", "4"),
        (*SEVERAL, "--spares", "1", "--hot-spares"),
    ],
    ids=["checkpoints", "feeding", "hot spares"],
)
def test_a_process_on_a_gpu_is_killed_and_replaced(
    options: Sequence[str], on_the_host: str, tmp_path: Path
) -> None:
    found, lost = finished(tmp_path, "--kill", "8:1", "--rejoin", "20", options=options)
    assert found == on_the_host
    assert len(lost) == 1


@pytest.mark.slow
def test_all_processes_on_a_gpu_are_killed_at_once(on_the_host: str, tmp_path: Path) -> None:
    found, lost = finished(tmp_path, "--kill", "23:0,1,2", options=(*SEVERAL, *STORED))
    assert found == on_the_host
    assert len(lost) == 3


@pytest.mark.slow
@pytest.mark.parametrize("redundancy", ["replicate:2", "rs:2+1"])
def test_a_state_on_gpus_comes_back_from_the_nodes_memory(
    redundancy: str, on_the_host: str, tmp_path: Path
) -> None:
    flags = ["--nproc", "1", "--virtual", "4", "--nodes-min", "3", "--nodes-max", "3"]
    flags += ["--redundancy", redundancy, "--protect-every", "5"]
    words = ["--steps", str(STEPS), "--kill", "23:0,1,2"]
    script = [str(SCRIPTS / "on_fake_gpu.py"), *words]
    with LocalRun(tmp_path / "run", flags, script) as run, LocalNodes(run) as others:
        run.until(run.run_dir.coordinator.exists, RUN_S, "the coordinator listens")
        for name in names(3):
            others.add(name)
        assert run.wait(RUN_S) == 0, run.log()
        assert on_the_host in others.last_lines()
    assert len(run.events("lost")) == 3
    assert any("as the nodes' memory has it" in each["text"] for each in run.events("view"))

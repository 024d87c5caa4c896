"""Saving and loading the same state by Holdfast's store and by the alternatives, in turn.

About 1.3 GiB in 150 tensors, on one disk, in one process. A save is over when everything is durable
(a file that its library does not sync is synced here); files are read once before loads are timed,
so these come from the page cache. The disk itself: the same bytes, written past the page cache in
large blocks, and read from it into memory that has been used before.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import socket
import statistics
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import safetensors.torch
import torch
import torch.distributed.checkpoint as dcp

from holdfast.engine.commands.run_command import make_spec, parser
from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import SaveEnded, SinkKind
from holdfast.engine.core.types import AgentId, Incarnation, Peer, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.files import FileStorage, RealDisk, aligned
from holdfast.engine.state.store.manifest import SUSPECT
from holdfast.engine.state.store.storage import Storage
from holdfast.engine.state.store.volumes import VolumeStorage
from holdfast.engine.train.checkpoint.formats import item_of
from holdfast.engine.train.exchange.tensor_bytes import memory_of
from holdfast.engine.train.state.saver import Saver, WriterLink

TENSORS = 150
ELEMENTS = 2_300_000  # float32, of each
BLOCK_BYTES = 8 << 20
State = dict[str, torch.Tensor]


@dataclass(slots=True)
class Times:
    stall_s: list[float] = field(default_factory=list)  # until training could continue
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)


class Protected:
    """Is a training script's state, as `job.protect` takes it."""

    def __init__(self, state: State) -> None:
        self._state = state

    def state_dict(self) -> State:
        return self._state

    def load_state_dict(self, state: State) -> None:
        raise NotImplementedError


class RunningJob:
    """Runs the work of a job's workers at a step boundary, in turn, and their node's writer."""

    def __init__(self, state: State, workers: int, folder: Path) -> None:
        self.store = folder / "store"
        self._durable: list[int] = []
        self._step = 0
        run_dir = RunDir(folder / "run")
        run_dir.create(make_spec(parser().parse_args(["--store", str(self.store), __file__])), b"")
        orders, taken = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        self._writer = subprocess.Popen(
            [
                *(
                    sys.executable,
                    "-m",
                    "holdfast.engine.runtime.node.checkpoint_writer",
                    str(run_dir.path),
                ),
                *(str(taken.fileno()), str(os.getpid())),
            ],
            pass_fds=[taken.fileno()],
        )
        taken.close()
        self._orders = orders
        protected = {"model": Protected(state)}
        names = [WorkerId(i) for i in range(workers)]
        self._savers = [
            Saver(WriterLink(orders, "job", Peer(me)), protected, self._ended, lambda: 0)
            for me in names
        ]
        node = AgentId("node0")
        self._view = View(
            number=ViewNumber(1),
            members=tuple(Member(worker=w, incarnation=Incarnation(1), agent=node) for w in names),
            owners=tuple(names),
            resume_step=0,
            leader=names[0],
        )

    def begin(self) -> float:
        """The longest time for which a worker could not train on."""
        self._step += 1
        stalls = []
        for saver in self._savers:
            began = time.perf_counter()
            saver.copy(ef.CopyState(SinkKind.STORE, self._step, self._view))
            stalls.append(time.perf_counter() - began)
        return max(stalls)

    def finish(self) -> None:
        """Returns when the checkpoint is durable."""
        for saver in self._savers:
            saver.finish()
        assert self._durable[-1] == self._step

    def _ended(self, save: SaveEnded) -> None:
        if save.durable:
            self._durable.append(save.step)

    def close(self) -> None:
        self._orders.close()
        self._writer.wait()


def make_state() -> State:
    generator = torch.Generator().manual_seed(0)
    return {f"layer{i}.weight": torch.randn(ELEMENTS, generator=generator) for i in range(TENSORS)}


def sync(folder: Path) -> None:
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        handle = os.open(path, os.O_RDONLY)
        os.fsync(handle)
        os.close(handle)


def warm(folder: Path) -> None:
    for path in [p for p in folder.rglob("*") if p.is_file()]:
        with open(path, "rb") as file:
            while file.read(1 << 24):
                pass


def save_holdfast(state: State, folder: Path) -> None:
    Checkpoints(FileStorage(folder)).save(1, [item_of(k, v) for k, v in state.items()], {})


def load_holdfast(state: State, folder: Path) -> None:
    Checkpoints(FileStorage(folder)).load(
        1, lambda manifest: [(e, memory_of(state[e.name])) for e in manifest.entries]
    )


def copy(state: State, copies: State) -> None:
    for name, tensor in state.items():
        copies[name].copy_(tensor)


def save_torch(state: State, folder: Path) -> None:
    torch.save(state, folder / "state.pt")


def load_torch(state: State, folder: Path) -> None:
    for name, tensor in torch.load(folder / "state.pt").items():
        state[name].copy_(tensor)


def save_safetensors(state: State, folder: Path) -> None:
    safetensors.torch.save_file(state, folder / "state.safetensors")


def load_safetensors(state: State, folder: Path) -> None:
    for name, tensor in safetensors.torch.load_file(folder / "state.safetensors").items():
        state[name].copy_(tensor)


def save_dcp(state: State, folder: Path) -> None:
    dcp.save(state, checkpoint_id=folder / "dcp", no_dist=True)


def load_dcp(state: State, folder: Path) -> None:
    dcp.load(state, checkpoint_id=folder / "dcp", no_dist=True)


def begin_async(state: State, folder: Path) -> Any:
    return dcp.async_save(state, checkpoint_id=folder / "dcp", no_dist=True)


def save_raw(state: State, folder: Path) -> None:
    disk, block, offset = RealDisk(), aligned(BLOCK_BYTES), 0
    handle = disk.create(str(folder / "raw"))
    total = sum(t.nbytes for t in state.values())
    while offset < total:
        disk.write(handle, block, offset)
        offset += BLOCK_BYTES
    disk.close(handle, total, keep=True)


def load_raw(state: State, folder: Path) -> None:
    storage, offset = FileStorage(folder), 0
    for tensor in state.values():
        storage.read("raw", offset, memory_of(tensor))
        offset += tensor.nbytes


WAYS: dict[str, tuple[Callable[[State, Path], None], Callable[[State, Path], None]]] = {
    "the disk itself": (save_raw, load_raw),
    "Holdfast": (save_holdfast, load_holdfast),
    "torch.save": (save_torch, load_torch),
    "safetensors": (save_safetensors, load_safetensors),
    "DCP save": (save_dcp, load_dcp),
}
COPY, ASYNC = "a plain copy in memory", "DCP async_save"
JOBS = {"Holdfast, in a job of 1": 1, "Holdfast, in a job of 4": 4}


def measure(rounds: int = 5, within: Path | None = None) -> dict[str, Times]:
    """Run each way in turn, `rounds` times; each must load exactly the saved state.

    One further round comes first and is not counted: it makes buffers that are used again.
    """
    warnings.filterwarnings("ignore", category=UserWarning)
    state = make_state()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    found = {way: Times() for way in (*WAYS, COPY, *JOBS, ASYNC)}
    with contextlib.ExitStack() as stack:
        home = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=within)))
        jobs = {way: RunningJob(state, count, home / str(count)) for way, count in JOBS.items()}
        for job in jobs.values():
            stack.callback(job.close)
        for number in range(rounds + 1):
            times = {way: Times() for way in found} if number == 0 else found
            for way in WAYS:
                one_round(way, times[way], state, loaded, within)
            measure_stalls(times, jobs, state, loaded, within)
    return found


def one_round(way: str, times: Times, state: State, loaded: State, within: Path | None) -> None:
    save, load = WAYS[way]
    with tempfile.TemporaryDirectory(dir=within) as name:
        folder = Path(name)
        os.sync()
        began = time.perf_counter()
        save(state, folder)
        sync(folder)
        times.save_s.append(time.perf_counter() - began)
        warm(folder)
        began = time.perf_counter()
        load(loaded, folder)
        times.load_s.append(time.perf_counter() - began)
    if way != "the disk itself":
        assert all(torch.equal(loaded[k], v) for k, v in state.items()), way


def measure_stalls(
    found: dict[str, Times],
    jobs: dict[str, RunningJob],
    state: State,
    loaded: State,
    within: Path | None,
) -> None:
    """Measure how long training stands still for a save in the background.

    The plain copy is taken under the same conditions, just before each.
    """
    for way, job in jobs.items():
        os.sync()
        began = time.perf_counter()
        copy(state, loaded)
        found[COPY].stall_s.append(time.perf_counter() - began)
        began = time.perf_counter()
        found[way].stall_s.append(job.begin())
        job.finish()
        found[way].save_s.append(time.perf_counter() - began)
        shutil.rmtree(job.store)
    with tempfile.TemporaryDirectory(dir=within) as name:
        os.sync()
        began = time.perf_counter()
        saving = begin_async(state, Path(name))
        found[ASYNC].stall_s.append(time.perf_counter() - began)
        saving.result()
        sync(Path(name))
        found[ASYNC].save_s.append(time.perf_counter() - began)


@dataclass(frozen=True, slots=True, kw_only=True)
class Series:
    """Bytes on disk of one checkpoint, and of ten of a run that trains a small part."""

    one: int
    ten: int


def measure_series() -> Series:
    """Ten checkpoints; 1 % of the parameters, and their optimizer's state, change each time."""
    state, folder = make_state(), Path(tempfile.mkdtemp())
    try:
        store, sizes = Checkpoints(FileStorage(folder)), []
        for step in range(10):
            state["layer0.weight"] = torch.randn(ELEMENTS)
            state["layer1.weight"][: ELEMENTS // 2] = torch.randn(ELEMENTS // 2)
            store.save(step, [item_of(k, v) for k, v in state.items()], {})
            sizes.append(sum(p.stat().st_size for p in folder.rglob("*") if p.is_file()))
        return Series(one=sizes[0], ten=sizes[-1])
    finally:
        shutil.rmtree(folder)


@dataclass(slots=True)
class Flips:
    """Outcomes of `count` flipped bits, one at a time, anywhere in a checkpoint's files."""

    count: int
    found: int = 0
    repaired: int = 0  # the original bytes were restored


def flip_bits(coded: bool, count: int = 1000) -> Flips:
    """Flip bits of a checkpoint of 16 MiB, kept in one folder, or as 4+2 pieces in six."""
    folder, flips, rng = Path(tempfile.mkdtemp()), Flips(count), random.Random(1)
    volumes = [FileStorage(folder / str(i)) for i in range(6 if coded else 1)]
    storage = VolumeStorage(volumes, 4, 2) if coded else volumes[0]
    try:
        state = {f"layer{i}": torch.randn(1 << 20) for i in range(4)}
        Checkpoints(storage).save(1, [item_of(k, v) for k, v in state.items()], {})
        files = sorted(path for path in folder.rglob("*") if path.is_file())
        sizes = [path.stat().st_size for path in files]
        for _ in range(count):
            (path,) = rng.choices(files, sizes)
            good = path.read_bytes()
            at = rng.randrange(len(good))
            path.write_bytes(good[:at] + bytes([good[at] ^ 1 << rng.randrange(8)]) + good[at + 1 :])
            if isinstance(storage, VolumeStorage):
                flips.found += any(storage.repair(name) for name in storage.all_names())
                flips.repaired += path.read_bytes() == good
            else:
                flips.found += is_damaged(storage)
            path.write_bytes(good)
            for name in storage.names(SUSPECT):
                storage.delete(name)
    finally:
        shutil.rmtree(folder)
    return flips


def is_damaged(storage: Storage) -> bool:
    try:
        return bool(Checkpoints(storage).verify(1))
    except Damaged:
        return True


def main() -> None:
    for way, times in measure().items():
        series = {"stall": times.stall_s, "save": times.save_s, "load": times.load_s}
        medians = {k: f"{statistics.median(v):.2f} s" for k, v in series.items() if v}
        print(way, medians, flush=True)
    print(measure_series())
    print(flip_bits(coded=False), flip_bits(coded=True))


if __name__ == "__main__":
    main()

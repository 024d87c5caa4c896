"""Saving and loading the same state by Holdfast's store and by the alternatives, in turn.

About 1.3 GiB in 150 tensors, on one disk, in one process. A save is over when everything is durable
(a file that its library does not sync is synced here); files are read once before loads are timed,
so these come from the page cache. The disk itself: the same bytes, written past the page cache in
large blocks, and read from it into memory that has been used before.
"""

from __future__ import annotations

import contextlib
import os
import shutil
import statistics
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

from holdfast.store.checkpoints import Checkpoints
from holdfast.store.disk import RealDisk, aligned
from holdfast.store.files import FileStorage
from holdfast.train.formats import bytes_of, item_of

TENSORS = 150
ELEMENTS = 2_300_000  # float32, of each
BLOCK_BYTES = 8 << 20
State = dict[str, torch.Tensor]


@dataclass(slots=True)
class Times:
    save_s: list[float] = field(default_factory=list)
    load_s: list[float] = field(default_factory=list)


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
        1, lambda manifest: [(e, bytes_of(state[e.name])) for e in manifest.entries]
    )


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


def save_async(state: State, folder: Path) -> None:
    saving: Any = dcp.async_save(state, checkpoint_id=folder / "dcp", no_dist=True)
    saving.result()


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
        storage.read("raw", offset, bytes_of(tensor))
        offset += tensor.nbytes


WAYS: dict[str, tuple[Callable[[State, Path], None], Callable[[State, Path], None]]] = {
    "the disk itself": (save_raw, load_raw),
    "Holdfast": (save_holdfast, load_holdfast),
    "torch.save": (save_torch, load_torch),
    "safetensors": (save_safetensors, load_safetensors),
    "DCP save": (save_dcp, load_dcp),
    "DCP async_save": (save_async, load_dcp),
}


def measure(rounds: int = 5, within: Path | None = None) -> dict[str, Times]:
    """Each way in turn, `rounds` times; what each has loaded must be what was saved."""
    warnings.filterwarnings("ignore", category=UserWarning)
    state = make_state()
    loaded = {name: torch.zeros_like(tensor) for name, tensor in state.items()}
    found = {way: Times() for way in WAYS}
    for _ in range(rounds):
        for way, (save, load) in WAYS.items():
            with contextlib.ExitStack() as stack:
                folder = Path(stack.enter_context(tempfile.TemporaryDirectory(dir=within)))
                os.sync()
                began = time.perf_counter()
                save(state, folder)
                sync(folder)
                found[way].save_s.append(time.perf_counter() - began)
                warm(folder)
                began = time.perf_counter()
                load(loaded, folder)
                found[way].load_s.append(time.perf_counter() - began)
                if way != "the disk itself":
                    assert all(torch.equal(loaded[k], v) for k, v in state.items()), way
    return found


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


def main() -> None:
    for way, times in measure().items():
        saved, loaded = statistics.median(times.save_s), statistics.median(times.load_s)
        print(f"{way}: save {saved:.2f} s, load {loaded:.2f} s")
    print(measure_series())


if __name__ == "__main__":
    main()

"""Lets `torch.distributed.checkpoint` use a Holdfast store, by changing one argument.

    dcp.save(state, storage_writer=HoldfastWriter("/ckpt", step=100))
    dcp.load(state, storage_reader=HoldfastReader("/ckpt"))          # the newest one

Its checkpoints are incremental and verified, repaired where the store has parity, and can be loaded
on any number of ranks: only the chunks that hold the wanted rows of a tensor are read. DCP's
metadata is kept as plain data. (A planner chooses how to encode objects that are not tensors:
PyTorch's own pickles them.)
"""

from __future__ import annotations

import dataclasses
import io
import math
import os
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import (
    LoadItemType,
    LoadPlan,
    LoadPlanner,
    ReadItem,
    SavePlan,
    SavePlanner,
    WriteItem,
    WriteItemType,
)
from torch.distributed.checkpoint.storage import StorageReader, StorageWriter, WriteResult
from torch.futures import Future

from holdfast.engine.core.errors import Damaged, UserError
from holdfast.engine.state.memory.free_memory import check_room
from holdfast.engine.state.store.checkpoint_reading import OneEntry, load, load_range
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.manifest import Entry, Manifest, SavedPart
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.state.store.saving import Item, Saving
from holdfast.engine.state.store.storage import Storage
from holdfast.engine.train.exchange.tensor_bytes import memory_of

METADATA = ".dcp"  # the entry with DCP's metadata
METADATA_BYTES_MAX = 1 << 30
Say = Callable[[str], None]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Turn:
    """Is the coordinator's message to each rank of a save."""

    step: int
    token: str
    base: int | None  # the previous checkpoint, on which it builds
    writer: int


class _OfStep:
    """Is what writer and reader have in common: a store, and the step of one checkpoint."""

    def __init__(self, store: str, step: int | None = None, say: Say = lambda line: None) -> None:
        super().__init__()
        self._store = Checkpoints(open_storage(store, say), say)
        self._step = step

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        if checkpoint_id is not None:
            self._step = _step_of(checkpoint_id)

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        return os.fspath(checkpoint_id).isdecimal()

    def prepare_local_plan(self, plan: Any) -> Any:
        return plan


class HoldfastWriter(_OfStep, StorageWriter):
    """Saves one checkpoint. `store`: as for `holdfast ckpt`; `step`: or give a checkpoint_id."""

    _saving: tuple[Saving, ...] = ()  # on the coordinator: none or one
    _ranks = 0

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        if self._step is None:
            raise UserError("HoldfastWriter needs a step: HoldfastWriter(store, step=100)")

    def storage_meta(self) -> StorageMeta | None:
        return None

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        assert self._step is not None
        saving = self._store.begin(self._step)
        self._saving, self._ranks = (saving,), len(plans)
        turn = _Turn(step=self._step, token=saving.token, base=saving.base, writer=0)
        return [
            dataclasses.replace(plan, storage_data=dataclasses.replace(turn, writer=i))
            for i, plan in enumerate(plans)
        ]

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        turn: _Turn = plan.storage_data
        saving = self._store.join(turn.step, turn.token, turn.base)
        part = saving.write([_item(i, planner.resolve_data(i)) for i in plan.items], turn.writer)
        results = [
            WriteResult(index=item.index, size_in_bytes=entry.size, storage_data=None)
            for item, entry in zip(plan.items, part.entries, strict=True)
        ]
        if results:
            results[0] = dataclasses.replace(results[0], storage_data=part)
        done: Future[list[WriteResult]] = Future()
        done.set_result(results)
        return done

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        (saving,) = self._saving
        self._saving = ()
        try:
            data = memoryview(_encode(metadata))
            own = saving.write([Item(name=METADATA, data=data)], self._ranks)
            parts: list[SavedPart] = [rank[0].storage_data for rank in results if rank]
            saving.commit([*parts, own], {"by": "torch.distributed.checkpoint"})
        except BaseException:
            saving.abandon()
            raise


class HoldfastReader(_OfStep, StorageReader):
    """Loads one checkpoint: the one of `step`, else the newest that can be read."""

    _manifest: Manifest
    _entries: dict[tuple[str, tuple[int, ...]], Entry]

    def read_metadata(self, *args: Any, **kwargs: Any) -> Metadata:
        target = OneEntry(METADATA, METADATA_BYTES_MAX)
        if self._step is not None:
            manifest = self._store.load(self._step, target)
        else:
            newest = self._store.load_newest(target)
            if newest is None:
                raise UserError("there is no checkpoint in this store: is it the right one?")
            manifest = newest
        return _decode(bytes(target.data), manifest.step)

    def set_up_storage_reader(
        self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any
    ) -> None:
        self._manifest = self._store.manifest(metadata.storage_data["step"])
        self._entries = {(e.name, e.offset): e for e in self._manifest.entries}

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read in place if the saved tensor goes into host memory whole and without gaps."""
        with self._store.reading() as storage:
            self._read(storage, plan, planner)
        done: Future[None] = Future()
        done.set_result(None)
        return done

    def _read(self, storage: Storage, plan: LoadPlan, planner: LoadPlanner) -> None:
        manifest = self._manifest
        direct: list[tuple[ReadItem, Entry, torch.Tensor]] = []
        for item in plan.items:
            entry = self._entry(item.storage_index)
            if item.type == LoadItemType.BYTE_IO:
                check_room(entry.size, entry.label)
                data = bytearray(entry.size)
                load(storage, manifest, [(entry, memoryview(data))])
                planner.load_bytes(item, io.BytesIO(data))
                continue
            target = planner.resolve_tensor(item).detach()
            if _fits(item, entry, target):
                direct.append((item, entry, target))
                continue
            target.copy_(_read_part(storage, manifest, entry, item, target.dtype))
            planner.commit_tensor(item, target)
        load(storage, manifest, [(entry, memory_of(target)) for _, entry, target in direct])
        for item, _, target in direct:
            planner.commit_tensor(item, target)

    def _entry(self, index: MetadataIndex) -> Entry:
        offset = tuple(index.offset) if index.offset is not None else ()
        entry = self._entries.get((index.fqn, offset)) or self._entries.get((index.fqn, ()))
        if entry is None:
            raise Damaged(f"{index.fqn} at {list(offset)} is not in the checkpoint")
        return entry


def _step_of(checkpoint_id: str | os.PathLike[str]) -> int:
    text = os.fspath(checkpoint_id)
    if not text.isdecimal():
        raise UserError(f"checkpoint_id={text!r} is no step: give a number such as '100'")
    return int(text)


def _item(item: WriteItem, data: torch.Tensor | io.BytesIO) -> Item:
    if item.type == WriteItemType.BYTE_IO:
        assert isinstance(data, io.BytesIO)
        return Item(name=item.index.fqn, data=data.getbuffer())
    assert isinstance(data, torch.Tensor)
    assert item.tensor_data is not None
    host = data.detach().cpu().contiguous()
    return Item(
        name=item.index.fqn,
        data=memory_of(host),
        dtype=str(host.dtype).removeprefix("torch."),
        shape=tuple(host.shape),
        offset=tuple(item.tensor_data.chunk.offsets),
        whole=tuple(item.tensor_data.size),
    )


def _fits(item: ReadItem, entry: Entry, target: torch.Tensor) -> bool:
    whole = tuple(item.lengths) == entry.shape and not any(item.storage_offsets)
    same = str(target.dtype) == f"torch.{entry.dtype}" and tuple(target.shape) == entry.shape
    return whole and same and target.is_contiguous() and target.device.type == "cpu"


def _read_part(
    storage: Storage, manifest: Manifest, entry: Entry, item: ReadItem, dtype: torch.dtype
) -> torch.Tensor:
    """Return the wanted part of a saved tensor, reading only its rows."""
    saved = getattr(torch, entry.dtype, dtype)
    if not entry.shape:
        rows = torch.empty((), dtype=saved)
        load(storage, manifest, [(entry, memory_of(rows))])
        return rows
    first, count = item.storage_offsets[0], item.lengths[0]
    row_bytes = math.prod(entry.shape[1:]) * saved.itemsize
    check_room(count * row_bytes, entry.label)
    rows = torch.empty((count, *entry.shape[1:]), dtype=saved)
    load_range(storage, manifest, entry, first * row_bytes, memory_of(rows))
    for dim in range(1, rows.dim()):
        rows = rows.narrow(dim, item.storage_offsets[dim], item.lengths[dim])
    return rows


# ---------------------------------------------------------------- metadata without pickle


@dataclass(frozen=True, slots=True, kw_only=True)
class _Tensor:
    dtype: str
    size: tuple[int, ...]
    offsets: tuple[tuple[int, ...], ...]
    sizes: tuple[tuple[int, ...], ...]
    requires_grad: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class _Described:
    """Describes a checkpoint as DCP's Metadata does. A name without a tensor is of bytes."""

    tensors: dict[str, _Tensor | None]
    flattened: dict[str, tuple[str | int, ...]] | None  # names to paths, from DCP's own planners


def _encode(metadata: Metadata) -> bytes:
    """Encode the metadata; UserError for what another library's planner has added."""
    flattened = metadata.planner_data
    if flattened is not None and not isinstance(flattened, dict):
        raise UserError(f"planner_data of type {type(flattened).__name__} cannot be kept")
    described = _Described(
        tensors={
            name: _Tensor(
                dtype=str(found.properties.dtype).removeprefix("torch."),
                size=tuple(found.size),
                offsets=tuple(tuple(chunk.offsets) for chunk in found.chunks),
                sizes=tuple(tuple(chunk.sizes) for chunk in found.chunks),
                requires_grad=found.properties.requires_grad,
            )
            if isinstance(found, TensorStorageMetadata)
            else None
            for name, found in metadata.state_dict_metadata.items()
        },
        flattened=None if flattened is None else {k: tuple(v) for k, v in flattened.items()},
    )
    try:
        return msgspec.msgpack.encode(described)
    except TypeError as error:
        raise UserError(f"planner_data cannot be kept: {error}") from None


def _decode(data: bytes, step: int) -> Metadata:
    try:
        described = msgspec.msgpack.decode(data, type=_Described)
    except msgspec.MsgspecError as error:
        raise Damaged(f"DCP's metadata of step {step} is of another release: {error}") from None
    found: dict[str, Any] = {}
    for name, tensor in described.tensors.items():
        if tensor is None:
            found[name] = BytesStorageMetadata()
            continue
        dtype = getattr(torch, tensor.dtype, None)
        if not isinstance(dtype, torch.dtype):
            raise UserError(f"{name} is of {tensor.dtype}, which this PyTorch does not know")
        found[name] = TensorStorageMetadata(
            properties=TensorProperties(dtype=dtype, requires_grad=tensor.requires_grad),
            size=torch.Size(tensor.size),
            chunks=[
                ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
                for offsets, sizes in zip(tensor.offsets, tensor.sizes, strict=True)
            ],
        )
    return Metadata(
        state_dict_metadata=found,
        planner_data=described.flattened,
        storage_data={"step": step},
        storage_meta=StorageMeta(),
    )

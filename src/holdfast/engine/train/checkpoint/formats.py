"""Converts checkpoints to files of other formats and back, without unpickling anything."""

from __future__ import annotations

import json
import math
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from holdfast.engine.core.errors import UserError, first_line
from holdfast.engine.state.memory.free_memory import check_room
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.manifest import Entry, Manifest, is_of_one_shard
from holdfast.engine.state.store.saving import Item
from holdfast.engine.train.exchange.tensor_bytes import memory_of

# Files of a model of Hugging Face without its weights: configuration, tokenizer, code.
_BESIDE = (".jinja", ".json", ".model", ".py", ".tiktoken", ".txt")
_NOT_BESIDE = (".index.json", "trainer_state.json")


def read_tensors(
    store: Checkpoints, step: int, only: str = "", prefix: str = ""
) -> dict[str, torch.Tensor]:
    """Read all tensors of a checkpoint whose name contains `only`; no other is read.

    `prefix`: their names begin with it. Raises Missing, Damaged, and UserError if they do not fit
    into the free memory, or for a dtype that this PyTorch does not know.
    """
    tensors: dict[str, torch.Tensor] = {}
    parts: list[tuple[Entry, torch.Tensor]] = []

    def targets(manifest: Manifest) -> Sequence[tuple[Entry, memoryview]]:
        chosen = [
            entry
            for entry in manifest.entries
            if entry.dtype
            and only in entry.name
            and entry.name.startswith(prefix)
            and not is_of_one_shard(entry.name)
        ]
        check_room(_bytes_to_read(chosen), f"the checkpoint of step {step}")
        for entry in chosen:
            parts.append((entry, torch.empty(entry.shape, dtype=_dtype(entry))))
        return [(entry, memory_of(tensor)) for entry, tensor in parts]

    store.load(step, targets)
    for entry, tensor in parts:
        if entry.whole in ((), entry.shape):
            tensors[entry.name] = tensor
            continue
        if (whole := tensors.get(entry.name)) is None:
            whole = tensors[entry.name] = torch.empty(entry.whole, dtype=tensor.dtype)
        place = zip(entry.offset, entry.shape, strict=True)
        whole[tuple(slice(start, start + size) for start, size in place)] = tensor
    return tensors


def write_file(tensors: dict[str, torch.Tensor], file: Path, kind: str) -> None:
    """Write "safetensors", "torch", or "dcp", which makes `file` a folder. UserError."""
    failures: tuple[type[BaseException], ...] = (OSError, RuntimeError, ValueError)
    try:
        if kind == "torch":
            torch.save(tensors, file)
        elif kind == "dcp":
            import torch.distributed.checkpoint as dcp

            failures += (dcp.CheckpointException,)  # it is not an Exception
            dcp.save(tensors, checkpoint_id=file, no_dist=True)
        else:
            library = _safetensors()
            failures += (library.SafetensorError,)
            library.torch.save_file(tensors, str(file))
    except failures as error:
        raise UserError(f"cannot write {file}: {first_line(error)}") from None


def write_folder(
    tensors: dict[str, torch.Tensor], folder: Path, shard_bytes: int, beside: Path
) -> None:
    """Write a folder that Hugging Face's `from_pretrained` loads.

    A file of weights has at most `shard_bytes`, or one tensor. `beside`: a folder with the model's
    config.json and tokenizer, which are copied. UserError.
    """
    library = _safetensors()
    if not (beside / "config.json").is_file():
        raise UserError(f"{beside} has no config.json: give the folder of the model's original")
    shards = cut_shards(tensors, shard_bytes)
    places: dict[str, str] = {}
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if any(folder.iterdir()):
            raise UserError(f"{folder} is not empty: give a new folder")
        for number, names in enumerate(shards, 1):
            part = f"-{number:05d}-of-{len(shards):05d}" if len(shards) > 1 else ""
            file = f"model{part}.safetensors"
            places |= dict.fromkeys(names, file)
            shard = {name: tensors[name] for name in names}
            library.torch.save_file(shard, str(folder / file), metadata={"format": "pt"})
        if len(shards) > 1:
            size = sum(tensor.nbytes for tensor in tensors.values())
            index = {"metadata": {"total_size": size}, "weight_map": places}
            (folder / "model.safetensors.index.json").write_text(json.dumps(index, indent=2))
        for each in sorted(beside.iterdir()):
            if each.name.endswith(_BESIDE) and not each.name.endswith(_NOT_BESIDE):
                shutil.copyfile(each, folder / each.name)
    except (OSError, library.SafetensorError) as error:
        raise UserError(f"cannot write {folder}: {first_line(error)}") from None


def cut_shards(tensors: dict[str, torch.Tensor], shard_bytes: int) -> list[list[str]]:
    """Cut names of tensors, in their order, into shards of at most these bytes, or one tensor."""
    shards: list[list[str]] = []
    room = 0
    for name, tensor in tensors.items():
        if not shards or tensor.nbytes > room:
            shards.append([])
            room = shard_bytes
        shards[-1].append(name)
        room -= tensor.nbytes
    return shards


def read_file(file: Path) -> list[Item]:
    """Read the tensors of a safetensors file, by name, to be saved. UserError."""
    library = _safetensors()
    try:
        tensors: dict[str, torch.Tensor] = library.torch.load_file(str(file))
    except (OSError, library.SafetensorError) as error:
        raise UserError(f"{file} is no safetensors file: {first_line(error)}") from None
    return [item_of(name, tensor) for name, tensor in sorted(tensors.items())]


def item_of(name: str, tensor: torch.Tensor) -> Item:
    """Make an item of a host tensor to be saved; it must not change until it is."""
    return Item(
        name=name,
        data=memory_of(tensor.detach().contiguous()),
        dtype=str(tensor.dtype).removeprefix("torch."),
        shape=tuple(tensor.shape),
    )


def _bytes_to_read(entries: Sequence[Entry]) -> int:
    """Return the bytes that `read_tensors` allocates: for entries, and for tensors of several."""
    wholes = {
        entry.name: math.prod(entry.whole) * _dtype(entry).itemsize
        for entry in entries
        if entry.whole not in ((), entry.shape)
    }
    return sum(entry.size for entry in entries) + sum(wholes.values())


def find_unknown(entries: Sequence[Entry]) -> list[str]:
    """Return a sentence on each entry whose type this PyTorch does not know."""
    found = []
    for entry in entries:
        try:
            _dtype(entry)
        except UserError as error:
            found.append(str(error))
    return found


def _dtype(entry: Entry) -> torch.dtype:
    found, is_quantized = getattr(torch, entry.dtype, None), entry.dtype.startswith("q")
    if isinstance(found, torch.dtype) and not is_quantized:
        if found.itemsize * math.prod(entry.shape) == entry.size:
            return found
    problem = f"is of {entry.dtype!r}, which this PyTorch does not know"
    raise UserError(f"{entry.name!r} {problem}: use the one that saved it")


def _safetensors() -> Any:
    try:
        import safetensors.torch
    except ImportError:
        raise UserError("this needs safetensors: pip install safetensors") from None
    return safetensors

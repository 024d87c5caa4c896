"""Computes digests of samples, and describes a dataset in a few texts to compare it by.

A digest is of a sample's values, not of their layout in memory. Each digested value comes with its
kind and its length, so that different samples cannot give the same bytes. Two samples have the same
digest if dtypes, shapes and all bits are the same.

By the texts workers find that their datasets are not the same. A text is the dataset's length, a
setting of its batches, the order of a Subset, or the digest of a sample. Reading the samples
changes no random generator.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash
from torch.utils.data import Subset

from holdfast.engine.core.errors import UserError
from holdfast.engine.state.store.data_index import SampleIndex
from holdfast.engine.train.data.datasets import dataset_length, load_samples
from holdfast.engine.train.data.random_streams import (
    enter_stream,
    key_apart,
    limit_to_one_thread,
    stream_seed,
)
from holdfast.engine.train.exchange.tensor_bytes import as_bytes

_DOUBLE = struct.Struct("<d").pack
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NATIVE = frozenset((*_WHOLE, torch.float16, torch.float32, torch.float64))  # NumPy has them, too
SAMPLES_COMPARED = 2  # at a time
PLACES_COMPARED = 4
SUBSETS_MAX = 8  # one inside the other
#: Texts by name. A name begins with an entry of step/state_differences.DATA.
Facts = dict[str, str]


def sample_digest(sample: Any) -> bytes:
    """Return the digest of one sample. UserError names a value that has none."""
    found = xxhash.xxh3_128()
    _add(sample, found.update, "the sample")
    return found.digest()


def fingerprint_content(value: Any) -> int:
    """Return 63 bits that depend on the values of a sample or batch; 0 if it cannot be digested."""
    try:
        return int.from_bytes(sample_digest(value)[:8], "big") >> 1
    except (UserError, RuntimeError):
        return 0


def index_samples(dataset: Any, seen: Callable[[int], None] = lambda count: None) -> SampleIndex:
    """Compute the digests of all samples of a map-style dataset. UserError.

    A sample must have the same bits whenever it is read: random changes belong into `collate_fn`.
    `seen` is called with the number of samples done since the last call.
    """
    digests = []
    for number in range(dataset_length(dataset)):
        digests.append(sample_digest(read_sample(dataset, number)))
        seen(1)
    return SampleIndex(digests=b"".join(digests))


def read_sample(dataset: Any, number: int) -> Any:
    """Read one sample, also from a dataset that has only `__getitems__`."""
    if hasattr(dataset, "__getitem__"):
        return dataset[number]
    return dataset.__getitems__([number])[0]


def _add(value: Any, put: Callable[[Any], None], path: str) -> None:
    match value:
        case torch.Tensor() if value.layout != torch.strided:
            _add_sparse(value, put, path)
        case torch.Tensor():
            put(_tensor_head(value.dtype, value.shape))
            plain = value.is_cpu and value.is_contiguous() and value.dtype in _NATIVE
            whole = value if plain else value.detach().resolve_conj().resolve_neg()
            put(whole.detach().numpy() if plain else as_bytes(whole).numpy())
        case np.ndarray() | np.generic() if not value.dtype.hasobject:
            put(_array_head(value.dtype, value.shape))
            put(np.ascontiguousarray(value).reshape(-1).view(np.uint8).data)
        case None | bool():
            put(b"0" if value is None else b"T" if value else b"F")
        case int():
            _put(put, b"i", str(value).encode())
        case float():
            put(b"f" + _DOUBLE(value))
        case str():
            _put(put, b"s", value.encode("utf-8", "surrogatepass"))
        case bytes() | bytearray():
            _put(put, b"b", bytes(value))
        case list() | tuple():
            put(b"[" + struct.pack("<q", len(value)))
            for i, each in enumerate(value):
                _add(each, put, f"{path}[{i}]")
        case Mapping():
            put(b"{" + struct.pack("<q", len(value)))
            for key, each in value.items():
                _add(key, put, f"a key of {path}")
                _add(each, put, f"{path}[{key!r}]")
        case set() | frozenset():  # independent of the set's order
            found = sorted(sample_digest(each) for each in value)
            put(b"{}" + struct.pack("<q", len(found)) + b"".join(found))
        case _:
            _add_other(value, put, path)


def _add_sparse(value: torch.Tensor, put: Callable[[Any], None], path: str) -> None:
    """Add the places and values of a sparse tensor; those of one place are summed up before."""
    put(_frame(b"S", f"{value.layout}{list(value.shape)}".encode()))
    value = value.detach()
    if value.layout == torch.sparse_coo:
        value = value.coalesce()
        parts = [value.indices(), value.values()]
    elif value.layout in (torch.sparse_csr, torch.sparse_bsr):
        parts = [value.crow_indices(), value.col_indices(), value.values()]
    elif value.layout in (torch.sparse_csc, torch.sparse_bsc):
        parts = [value.ccol_indices(), value.row_indices(), value.values()]
    else:
        raise UserError(f"{path} is a tensor of layout {value.layout}: give a dense or sparse one")
    for part in parts:
        _add(part, put, path)


def _add_other(value: Any, put: Callable[[Any], None], path: str) -> None:
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        fields = {each.name: getattr(value, each.name) for each in dataclasses.fields(value)}
        _add(fields, put, path)
    elif all(hasattr(value, name) for name in ("mode", "size", "tobytes")):  # an image of PIL's
        _add([str(value.mode), list(value.size), value.tobytes()], put, path)
    else:
        raise UserError(
            f"{path} is a {type(value).__name__}, for which Holdfast has no digest: return "
            "tensors, arrays, numbers, strings, bytes, or tuples, lists and dictionaries of them"
        )


@functools.lru_cache(maxsize=256)
def _tensor_head(dtype: torch.dtype, shape: tuple[int, ...]) -> bytes:
    return _frame(b"t", f"{dtype}{list(shape)}".encode())


@functools.lru_cache(maxsize=256)
def _array_head(dtype: np.dtype[Any], shape: tuple[int, ...]) -> bytes:
    return _frame(b"n", f"{dtype.str}{list(shape)}".encode())


def _put(put: Callable[[Any], None], kind: bytes, data: bytes) -> None:
    put(_frame(kind, data))


def _frame(kind: bytes, data: bytes) -> bytes:
    return kind + struct.pack("<q", len(data)) + data


def describe_data(
    dataset: Any, collate_fn: Callable[[list[Any]], Any], seed: int, step: int
) -> Facts:
    """Return the length of a dataset, its order if it is a Subset, and digests of a few samples.

    `step`: chooses the samples, and keys their random numbers. Samples that cannot be read are left
    out: that may be the fault of this machine.
    """
    length = len(dataset) if hasattr(dataset, "__len__") else 0
    found = {"the dataset's length": str(length), **_describe_subsets(dataset)}
    with key_apart(seed, step, "compared"):
        for i in range(SAMPLES_COMPARED if length else 0):
            index = stream_seed(seed, step, i, "compared") % length
            with contextlib.suppress(Exception):
                found[f"sample {index} of the dataset"] = digest_sample(
                    dataset, collate_fn, index, seed=seed, step=step, number=i
                )
    return found


def find_difference(mine: Facts, theirs: Facts) -> str:
    """Return the first name that has other texts in two descriptions; "" if there is none."""
    return next((name for name in mine if theirs.get(name, mine[name]) != mine[name]), "")


def digest_sample(
    dataset: Any,
    collate_fn: Callable[[list[Any]], Any],
    key: Any,
    *,
    seed: int,
    step: int,
    number: int,
) -> str:
    """Return the digest of a sample, with generators keyed by (seed, step, number)."""
    enter_stream(seed, step, number, "compared")
    with limit_to_one_thread():
        return f"{fingerprint_content(collate_fn(load_samples(dataset, [key]))):016x}"


def describe_sample(
    dataset: Any,
    collate_fn: Callable[[list[Any]], Any],
    key: Any,
    *,
    seed: int,
    step: int,
    number: int,
) -> str:
    """Return the digest of a sample, or the name of the error that its task will meet."""
    try:
        return digest_sample(dataset, collate_fn, key, seed=seed, step=step, number=number)
    except Exception as error:  # noqa: BLE001 - the task that needs it will meet it
        return type(error).__name__


def _describe_subsets(dataset: Any) -> Facts:
    """Describe the places of a Subset, also of those inside it."""
    found: Facts = {}
    for level in range(SUBSETS_MAX):
        if not isinstance(dataset, Subset):
            break
        try:
            indices = np.asarray(dataset.indices, np.int64).reshape(-1)
        except (TypeError, ValueError, OverflowError):
            break  # its keys are no numbers
        which = "the Subset" if not level else f"the Subset {level} levels inside"
        for place, index in enumerate(indices[:PLACES_COMPARED].tolist()):
            found[f"place {place} of {which}"] = f"sample {index}"
        digest = xxhash.xxh3_64_hexdigest(indices.astype("<i8").tobytes())
        found[f"the dataset's order, in {which},"] = digest
        dataset = dataset.dataset
    return found

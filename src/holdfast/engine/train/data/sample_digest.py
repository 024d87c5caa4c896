"""Computes the digest of a sample: of its values, not of its layout in memory.

Each digested value comes with its kind and its length, so that different samples cannot give the
same bytes. Two samples have the same digest if dtypes, shapes and all bits are the same.
"""

from __future__ import annotations

import dataclasses
import functools
import struct
from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import xxhash

from holdfast.engine.core.errors import UserError
from holdfast.engine.state.store.data_index import SampleIndex
from holdfast.engine.train.data.map_style import dataset_length
from holdfast.engine.train.exchange.tensor_bytes import as_bytes

_DOUBLE = struct.Struct("<d").pack
_WHOLE = (torch.bool, torch.uint8, torch.int8, torch.int16, torch.int32, torch.int64)
_NATIVE = frozenset((*_WHOLE, torch.float16, torch.float32, torch.float64))  # NumPy has them, too


def sample_digest(sample: Any) -> bytes:
    """Return the digest of one sample. UserError names a value that has none."""
    found = xxhash.xxh3_128()
    _add(sample, found.update, "the sample")
    return found.digest()


def content_print(value: Any) -> int:
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

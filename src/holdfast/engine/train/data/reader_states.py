"""Takes and loads the states of a stream's readers: their positions, as plain values.

A worker that takes over a shard need not go through it again if it has a state of its reader. Only
the worker that reads the shard knows the state, so it sends it to the others now and then.
Invariant: a state only saves time; one from which a reader goes on with other samples is not used.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import msgspec
import numpy as np
import torch

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.checkpoint.state import to_plain

TELL_STEPS = 64  # steps of the script between two reports of the states
STATE_BYTES_MAX = 1 << 20  # limit for the state of one reader
PARTS_MAX = 1000  # parts of a reader that are searched at most
ReaderState = tuple[int, int, bytes]  # epoch, samples of it that were read, and the packed state
_decode = msgspec.msgpack.Decoder(ReaderState).decode


def pack_state(reader: Any) -> bytes:
    """Return a reader's state. UserError if it is not whole, not of plain values, or too large."""
    if any("BufferShuffled" in type(each).__name__ for each in _parts(reader)):
        raise UserError("the samples in its shuffle buffer are not in its state")
    found = msgspec.msgpack.encode(to_plain(reader.state_dict(), "the state of a stream's reader"))
    if len(found) > STATE_BYTES_MAX:
        raise UserError(
            f"the state of a stream's reader has {len(found)} bytes, more than {STATE_BYTES_MAX}"
        )
    return found


def _parts(reader: Any) -> list[Any]:
    """Return the objects behind a reader, as loaders and Hugging Face's datasets nest them."""
    found = [reader]
    for each in found:
        held = [getattr(each, name, None) for name in ("dataset", "_ex_iterable", "ex_iterable")]
        held += getattr(each, "ex_iterables", None) or []
        found += [part for part in held if part is not None]
        if len(found) > PARTS_MAX:
            break
    return found


def load(reader: Any, data: bytes) -> None:
    """Let a reader that has not begun go on from another reader's position."""
    reader.load_state_dict(msgspec.msgpack.decode(data))


def encode_state(state: ReaderState) -> bytes:
    """Encode a state for the other workers."""
    return msgspec.msgpack.encode(state)


def decode_state(data: bytes) -> ReaderState | None:
    """Decode a state from another worker; None if it is not valid."""
    try:
        return _decode(data)
    except msgspec.MsgspecError:
        return None


def are_alike(left: Any, right: Any) -> bool:
    """Return whether two samples, or lists of them, have the same values."""
    if type(left) is not type(right):
        return False
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, np.ndarray):
        return left.dtype == right.dtype and np.array_equal(left, right)
    if isinstance(left, Mapping):
        return list(left) == list(right) and all(are_alike(left[k], right[k]) for k in left)
    if isinstance(left, Sequence) and not isinstance(left, str | bytes):
        return len(left) == len(right) and all(map(are_alike, left, right))
    return bool(left == right)

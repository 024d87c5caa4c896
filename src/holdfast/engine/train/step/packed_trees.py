"""Packs trees of tensors, arrays, numbers and strings into bytes, and unpacks them.

The unpacked tree is a copy, with tensors on their former kind of device. Nothing is executed.
"""

from __future__ import annotations

from typing import Any

import msgspec
import torch

from holdfast.engine.core.errors import UserError, WireError
from holdfast.engine.train.checkpoint.state import allocate, flatten_named, metas, restore
from holdfast.engine.train.exchange.tensor_bytes import as_bytes

Packed = tuple[bytes, list[str], list[bytes]]  # skeleton, kinds of devices, the tensors' bytes
_decode = msgspec.msgpack.Decoder(Packed).decode


def pack(value: object, name: str) -> bytes:
    """Pack a tree; UserError, which uses this name, for an unsuitable value.

    Tensors are taken without their graphs. Equal trees give equal bytes.
    """
    skeleton, found = flatten_named(value, name)
    for each in found:
        if each.box is not None:
            raise UserError(
                f"{each.path} is distributed over the processes of a worker: give its "
                "full_tensor(), or its to_local()"
            )
    kinds = [each.tensor.device.type for each in found]
    parts = [as_bytes(each.tensor).numpy().tobytes() for each in found]
    return msgspec.msgpack.encode((skeleton, kinds, parts))


def unpack(data: bytes) -> Any:
    """Return a copy of the tree that was packed. WireError if the bytes are damaged."""
    try:
        skeleton, kinds, parts = _decode(data)
        tensors = []
        for meta, kind, part in zip(metas(skeleton), kinds, parts, strict=True):
            tensor = allocate(meta)
            flat = tensor.reshape(-1).view(torch.uint8)
            if len(part) != len(flat):
                raise WireError(f"a packed tensor {meta} has {len(part)} bytes")
            if part:
                flat.copy_(torch.frombuffer(bytearray(part), dtype=torch.uint8))
            is_here = kind == "cuda" and torch.cuda.is_available()
            tensors.append(tensor.to(kind) if is_here else tensor)
        return restore(skeleton, tensors)
    except (msgspec.MsgspecError, ValueError, RuntimeError, UnicodeDecodeError) as error:
        raise WireError(f"packed values cannot be read: {error}") from None


def count_tensors(data: bytes) -> int:
    """Return the number of tensors in a packed tree."""
    _, kinds, _ = _decode(data)
    return len(kinds)

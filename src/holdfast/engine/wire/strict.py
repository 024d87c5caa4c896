"""Decodes MessagePack into exact types, and refuses fields that those do not have.

msgspec refuses unknown fields of its own structs, but drops those of dataclasses. Values here are
dataclasses, because the core knows only the standard library; so each of them is given a
struct with the same fields, against which the bytes are checked before they are decoded.
"""

from __future__ import annotations

import dataclasses
import functools
import types
import typing
from typing import Any, Generic, TypeVar

import msgspec

T = TypeVar("T")


class StrictDecoder(Generic[T]):
    """Decodes values of one dataclass, and refuses unknown fields at any depth."""

    def __init__(self, kind: type[T]) -> None:
        self._checks: msgspec.msgpack.Decoder[Any] = msgspec.msgpack.Decoder(_make_strict(kind))
        self._decoder = msgspec.msgpack.Decoder(kind)

    def decode(self, data: bytes | memoryview) -> T:
        """Return the value. msgspec.MsgspecError names the field that is wrong or unknown."""
        self._checks.decode(data)
        return self._decoder.decode(data)


@functools.cache
def _struct_like(kind: type[Any]) -> type[msgspec.Struct]:
    """Return a struct with the fields of a dataclass that refuses all other fields."""
    hints = typing.get_type_hints(kind, include_extras=True)
    fields: list[Any] = []
    for each in dataclasses.fields(kind):
        given = (each.default, each.default_factory) != (dataclasses.MISSING, dataclasses.MISSING)
        default = (msgspec.UNSET,) if given else ()
        fields.append((each.name, _make_strict(hints[each.name]), *default))
    return msgspec.defstruct(kind.__name__, fields, kw_only=True, forbid_unknown_fields=True)


def _make_strict(hint: Any) -> Any:
    """Return this type with a strict struct in the place of each dataclass."""
    if dataclasses.is_dataclass(hint):
        return _struct_like(typing.cast(type, hint))
    inner = tuple(_make_strict(each) for each in typing.get_args(hint))
    origin = typing.get_origin(hint)
    if origin is None or origin is typing.Literal or not inner:
        return hint
    if origin is typing.Annotated:
        return hint
    if origin in (typing.Union, types.UnionType):
        return typing.Union[inner]  # noqa: UP007 - made of a tuple
    return origin[inner]

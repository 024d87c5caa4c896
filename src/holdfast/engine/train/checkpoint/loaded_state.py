"""Loads the job's state into the protected objects, and compares it with the state that they hold.

A worker that joins runs its script from the first line. It receives the state in its first loop,
and then executes the lines between the loops that are over, which may change that state; so it is
loaded once more. Of compared states only the order of a dictionary's keys may differ: an object may
put its keys in another order when it loads a state, and still be equal. Where states do differ, the
first difference is reported as a path and two values.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash

from holdfast.engine.core.errors import StateMismatch
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.sharded_optimizers import ShardedOptimizers
from holdfast.engine.train.exchange.tensor_bytes import as_bytes

TEXT_CHARS_MAX = 100  # limit for each value in a message
_MISSING = "missing"
_TENSORS = ("t", "n")  # tags of places for tensors
Captured = tuple[bytes, list[torch.Tensor]]  # skeleton and tensors, as in train/checkpoint/state


def fingerprint(skeleton: bytes, tensors: list[torch.Tensor]) -> int:
    """Compute 63 bits over every value of the state (xxh3: against accidents, not attackers)."""
    plain, ordered = _put_in_order(skeleton, tensors)
    digest = xxhash.xxh3_64(plain)
    for tensor in ordered:
        digest.update(as_bytes(tensor).numpy().data)
    return digest.intdigest() >> 1


def _put_in_order(skeleton: bytes, tensors: list[torch.Tensor]) -> Captured:
    """Return a state in an order that equal states share: first the skeleton, then its tensors."""
    supply = iter(tensors)
    try:
        node, ordered = _sort_node(msgspec.msgpack.decode(skeleton), supply)
        return msgspec.msgpack.encode(node), [*ordered, *supply]
    except (ValueError, TypeError, LookupError, StopIteration, RecursionError):
        return skeleton, tensors  # damaged: equal to no other


def check_loaded(given: Captured, held: Captured) -> None:
    """Raise StateMismatch, which names a value, if the protected objects do not hold `given`."""
    if _are_equal(_put_in_order(*given), _put_in_order(*held)):
        return
    raise StateMismatch(
        f"{_first_difference(given, held)}: make its load_state_dict() keep every value of its "
        "state_dict()"
    )


def _are_equal(given: Captured, held: Captured) -> bool:
    """Compare two states in the same order, without reading tensors that share their memory."""
    (plain, tensors), (others_plain, others) = given, held
    return plain == others_plain and all(map(_have_same_bytes, tensors, others))


def _have_same_bytes(one: torch.Tensor, other: torch.Tensor) -> bool:
    where = [(t.data_ptr(), t.dtype, t.shape, t.stride(), t.device) for t in (one, other)]
    if where[0] == where[1]:
        return True
    return torch.equal(as_bytes(one), as_bytes(other))


def _first_difference(given: Captured, held: Captured) -> str:
    theirs, mine = (dict(_leaves(msgspec.msgpack.decode(s), iter(t))) for s, t in (given, held))
    for path in [*theirs, *(path for path in mine if path not in theirs)]:
        was, now = theirs.get(path, (_MISSING, 0)), mine.get(path, (_MISSING, 0))
        if was[0] != now[0]:
            return f"{path} is {now[0]} after loading a state in which it is {was[0]}"
        if was != now:
            return f"{path}, {now[0]}, has other values after loading a state"
    return "the protected objects do not hold the state that was loaded"


def _sort_node(node: Any, supply: Iterator[torch.Tensor]) -> tuple[Any, list[torch.Tensor]]:
    """Return a skeleton's node with the keys of its plain dictionaries in order, and its tensors.

    An OrderedDict keeps its order, which it has on purpose.
    """
    tag = node[0]
    if tag in _TENSORS:
        return node, [next(supply)]
    if tag == "m":
        pairs = []
        for key, value in node[2]:
            new_key, of_key = _sort_node(key, supply)
            new_value, of_value = _sort_node(value, supply)
            pairs.append(([new_key, new_value], of_key + of_value))
        if node[1] != "OrderedDict":
            pairs.sort(key=lambda pair: msgspec.msgpack.encode(pair[0][0]))
        return ["m", node[1], [p for p, _ in pairs]], [t for _, kept in pairs for t in kept]
    first = {"s": 2, "c": 3, "p": 4}.get(tag)
    if first is None:
        return node, []
    every = node[2] if tag == "s" else node[first:]
    found = [_sort_node(each, supply) for each in every]
    parts = [part for part, _ in found]
    rest = [parts] if tag == "s" else parts
    return [*node[:first], *rest], [t for _, kept in found for t in kept]


def _leaves(
    node: Any, supply: Iterator[torch.Tensor], path: str = ""
) -> Iterator[tuple[str, tuple[str, int]]]:
    """Walk over a skeleton's values: path, text, and a digest that covers the rest."""
    match node[0]:
        case "m":
            for key, value in node[2]:
                name = _text(key)
                inner = f"{path}[{name}]" if path else str(key[-1])
                yield from _leaves(value, supply, inner)
            yield f"the number of keys of {path}", (str(len(node[2])), 0)
        case "s":
            for i, each in enumerate(node[2]):
                yield from _leaves(each, supply, f"{path}[{i}]")
            yield f"the length of {path}", (str(len(node[2])), 0)
        case "t" | "n":
            data = as_bytes(next(supply)).numpy().data
            text = f"a tensor {node[2]} of {node[1]}"
            yield path, (text, xxhash.xxh3_64_intdigest(data))
        case "c" | "p":
            for i, each in enumerate(node[3 if node[0] == "c" else 4 :]):
                yield from _leaves(each, supply, f"{path}.part {i}")
        case _:
            yield path, (_text(node), 0)


def _text(node: Any) -> str:
    """Write a plain value as a script would."""
    match node[0]:
        case "i":
            text = str(node[1])
        case "f":
            text = repr(float.fromhex(node[1]))
        case "v":
            text = repr(node[1])
        case "g":
            text = repr(np.frombuffer(node[2], dtype=node[1])[0])
        case _:
            text = str(node[-1])
    return text if len(text) <= TEXT_CHARS_MAX else f"{text[:TEXT_CHARS_MAX]}..."


class LoadedState:
    """Keeps the protected objects, and the last loaded state until `forget`.

    `sharding`: shares out their optimizers' state; other members' states are then neither captured
    nor loaded.
    """

    def __init__(
        self, protected: Mapping[str, Any], sharding: ShardedOptimizers | None = None
    ) -> None:
        self._protected = protected
        self._sharding = sharding
        self._loaded: tuple[bytes, list[torch.Tensor]] | None = None

    def capture(self) -> tuple[bytes, list[torch.Tensor]]:
        """Capture the state that all members of a view must have alike."""
        if self._sharding is None:
            return state.capture(self._protected)
        return state.flatten(self._sharding.common(), "state")

    def load(self, skeleton: bytes, tensors: list[torch.Tensor]) -> None:
        """Load a captured state. StateMismatch describes the difference."""
        self._apply(skeleton, tensors)
        self._loaded = skeleton, tensors

    def check(self) -> None:
        """Raise StateMismatch if the protected objects do not hold the state that was loaded."""
        if self._loaded is not None:
            check_loaded(self._loaded, self.capture())

    def load_again(self) -> None:
        """Load the same state once more, if any was loaded."""
        if self._loaded is not None:
            self._apply(*self._loaded)

    def forget(self) -> None:
        """Free the memory of the loaded state."""
        self._loaded = None

    def _apply(self, skeleton: bytes, tensors: list[torch.Tensor]) -> None:
        only = dict if self._sharding is None else self._sharding.drop_others
        state.apply(self._protected, skeleton, tensors, only)

"""Turns the job's state into bytes and tensors: no pickle, no code, one fingerprint.

`flatten` separates what `state_dict()` of every protected object returned into a skeleton
(MessagePack of plain values, with numbered places for tensors) and the list of tensors; `restore`
does the reverse. Equal states give equal skeletons and so equal fingerprints.
"""

from __future__ import annotations

import collections
import functools
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import msgspec
import numpy as np
import torch

from holdfast.engine.core.errors import StateMismatch, UserError, WireError, first_line
from holdfast.engine.train.checkpoint.local_tensors import (
    Box,
    box_of,
    check_is_plain,
    cut_like,
    distributed,
    is_distributed,
    local_of,
    meshes_of,
    placement_of,
)

PROTECTED_AS = "holdfast"  # its name among the script's own
_EXTRA_STATE = "_extra_state"  # torch's name for the result of a module's get_extra_state
Meta = tuple[str, tuple[int, ...]]  # dtype name, shape

# what a defaultdict may make for a missing key; a script's own function cannot be kept
_DEFAULTS: dict[str, type | None] = {
    **{kind.__name__: kind for kind in (int, float, bool, str, list, dict, set, tuple)},
    "None": None,
}
_DICTS: dict[str, Callable[[list], Any]] = {
    "dict": dict,
    "OrderedDict": collections.OrderedDict,
    "Counter": lambda items: collections.Counter(dict(items)),
    **{
        f"defaultdict of {name}": functools.partial(collections.defaultdict, make)
        for name, make in _DEFAULTS.items()
    },
}
_SEQUENCES: dict[str, Callable[[list], Any]] = {
    "list": list,
    "tuple": tuple,
    "set": set,
    "frozenset": frozenset,
    "Size": torch.Size,
}


@dataclass(frozen=True, slots=True)
class NamedTensor:
    """Is this process's part of one tensor of a state, with its path there.

    `box`: which part of the tensor this is, if it is distributed over a worker's processes.
    `private`: it was made for this capture, so its bytes never change.
    """

    path: str
    tensor: torch.Tensor
    box: Box | None = None
    private: bool = False


class Extent(NamedTuple):
    """Names bytes `start` to before `stop` of one of a state's tensors."""

    tensor: int
    start: int
    stop: int


# Returns which bytes of a state the member of a rank needs, given its skeleton and its tensors.
Wanted = Callable[[bytes, Sequence[torch.Tensor], int], list[Extent]]
# Captures a state; only the wanted bytes of its tensors are valid. WorldError: this has failed.
Capture = Callable[[Wanted], tuple[bytes, list[NamedTensor]]]


def flatten(state: object, name: str) -> tuple[bytes, list[torch.Tensor]]:
    """Return the skeleton and the tensors of `state`. UserError names an unsuitable value."""
    skeleton, found = flatten_named(state, name)
    return skeleton, [each.tensor for each in found]


def flatten_named(state: object, name: str = "state") -> tuple[bytes, list[NamedTensor]]:
    """Return the skeleton and the tensors of `state`, with their paths. UserError, as above."""
    found: list[NamedTensor] = []
    skeleton = msgspec.msgpack.encode(_encode(state, found, name))
    return skeleton, found


def metas(skeleton: bytes) -> list[Meta]:
    """Return dtype and shape of every tensor of a skeleton, in order."""
    found: list[Meta] = []
    _decode(_parse(skeleton), found.append)
    return found


def restore(
    skeleton: bytes, tensors: list[torch.Tensor], meshes: Mapping[str, Any] | None = None
) -> Any:
    """Reverse `flatten`. WireError if the skeleton is malformed, or the tensors are not its own.

    `meshes`: over which tensors are distributed here, by local_tensors.name_of_mesh; without them
    each process's part of such a tensor stands for it.
    """
    supply = list(reversed(tensors))
    found = _decode(_parse(skeleton), lambda meta: supply.pop(), meshes)
    if supply:
        raise WireError(f"a state skeleton names {len(supply)} tensors fewer than there are")
    return found


def allocate(meta: Meta, device: str = "cpu") -> torch.Tensor:
    """Allocate an uninitialised tensor for one place of a skeleton, on the host by default."""
    dtype = getattr(torch, meta[0], None)
    if not isinstance(dtype, torch.dtype) or any(n < 0 for n in meta[1]):
        raise WireError(f"a state skeleton names an impossible tensor {meta}")
    return torch.empty(meta[1], dtype=dtype, device=device)


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Walk over the tensors of a state, or of a part of one."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, Mapping | list | tuple):
        for each in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(each)


def size_of(meta: Meta) -> int:
    """Return the bytes of the tensor at one place of a skeleton, without allocating it.

    WireError: no tensor can be that large.
    """
    try:
        return allocate(meta, "meta").nbytes
    except (RuntimeError, TypeError, OverflowError):
        raise WireError(f"a state skeleton names an impossible tensor {meta}") from None


def kind_of_dict(value: dict[Any, Any]) -> str | None:
    """Return the name by which a skeleton keeps this kind of dictionary; None: it cannot."""
    kind = type(value)
    if isinstance(value, collections.defaultdict) and kind is collections.defaultdict:
        kinds = (name for name, make in _DEFAULTS.items() if make is value.default_factory)
        return next((f"defaultdict of {name}" for name in kinds), None)
    known = (dict, collections.OrderedDict, collections.Counter)
    return kind.__name__ if kind in known else None


def is_scalar_of_numpy(value: object) -> bool:
    """Return whether a value is a number or text of NumPy's, which a skeleton keeps as it is."""
    return isinstance(value, np.generic) and value.dtype.kind not in "OV"


def keeps_state(value: object) -> bool:
    """Return whether a value has methods that return and load its state."""
    found = (getattr(value, name, None) for name in ("state_dict", "load_state_dict"))
    return all(map(callable, found))


def capture(protected: Mapping[str, Any]) -> tuple[bytes, list[torch.Tensor]]:
    """Capture the state of all protected objects together."""
    return flatten({name: obj.state_dict() for name, obj in protected.items()}, "state")


def capture_named(protected: Mapping[str, Any]) -> tuple[bytes, list[NamedTensor]]:
    """Capture the same state, with the path of each tensor."""
    return flatten_named({name: obj.state_dict() for name, obj in protected.items()}, "state")


def apply(
    protected: Mapping[str, Any],
    skeleton: bytes,
    tensors: list[torch.Tensor],
    only: Callable[[Mapping[str, Any]], Mapping[str, Any]] = dict,
) -> None:
    """Load a captured state into the protected objects; StateMismatch describes the difference.

    `only` selects the part of the state to load here.
    """
    _load(protected, only(restore(skeleton, tensors, meshes_of(protected.values()))))


def apply_whole(protected: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    """Load a state of whole tensors; each process takes its own part of them. StateMismatch."""
    _load(protected, {name: _cut(protected.get(name), value) for name, value in state.items()})


def _cut(target: object, state: Any) -> Any:
    """Cut the tensors of a module's or optimizer's state in the way its present ones are cut."""
    if isinstance(target, torch.nn.Module):
        mine = target.state_dict()
        return {
            key: _cut_tensor(mine.get(key), value) if isinstance(value, torch.Tensor) else value
            for key, value in state.items()
        }
    if isinstance(target, torch.optim.Optimizer):
        params = [p for group in target.param_groups for p in group["params"]]
        places = [place for group in state["param_groups"] for place in group["params"]]
        of = dict(zip(places, params, strict=False))
        held = {
            place: {key: _cut_tensor(of.get(place), value) for key, value in values.items()}
            for place, values in state["state"].items()
        }
        return {**state, "state": held}
    return state


def _cut_tensor(like: Any, value: Any) -> Any:
    alike = isinstance(like, torch.Tensor) and isinstance(value, torch.Tensor)
    return cut_like(like, value) if alike and like.shape == value.shape else value


def _load(protected: Mapping[str, Any], state: Mapping[str, Any]) -> None:
    if list(state) != list(protected):
        raise StateMismatch(
            f"this script protects {list(protected)} but the job protects {list(state)}: "
            "every worker must run the same script"
        )
    sharing = _sharing_groups(protected)
    for name, obj in protected.items():
        if isinstance(obj, torch.nn.Module):
            _compare(name, obj.state_dict(), state[name])
        try:
            obj.load_state_dict(state[name])
        except (RuntimeError, ValueError, KeyError, TypeError) as error:
            raise StateMismatch(
                f"{name} cannot take the job's state ({first_line(error)}): every worker must "
                "build the same objects before its first step"
            ) from None
        if isinstance(obj, torch.optim.Optimizer):
            _keep_precision(obj, state[name])
    for first, other in sharing:
        other.param_groups = first.param_groups


def _sharing_groups(
    protected: Mapping[str, Any],
) -> list[tuple[torch.optim.Optimizer, torch.optim.Optimizer]]:
    """Return pairs of optimizers that share one list of groups: a wrapper and its inner one.

    Each of them makes a list of its own as it loads a state, and a scheduler would change only one.
    """
    firsts: dict[int, torch.optim.Optimizer] = {}
    found = []
    for each in protected.values():
        if isinstance(each, torch.optim.Optimizer):
            first = firsts.setdefault(id(each.param_groups), each)
            found += [] if first is each else [(first, each)]
    return found


def _keep_precision(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Undo the rounding of load_state_dict, which casts the state to the parameters' type."""
    params = [p for group in optimizer.param_groups for p in group["params"]]
    places = [place for group in state["param_groups"] for place in group["params"]]
    for param, place in zip(params, places, strict=True):
        for key, value in state["state"].get(place, {}).items():
            if isinstance(value, torch.Tensor) and value.is_floating_point():
                held = optimizer.state[param].get(key)
                if isinstance(held, torch.Tensor) and held.dtype != value.dtype:
                    optimizer.state[param][key] = value.to(held.device, copy=True)


def _compare(name: str, mine: Mapping[str, Any], theirs: Mapping[str, Any]) -> None:
    for key in [*mine, *[k for k in theirs if k not in mine]]:
        # What get_extra_state returns may change its shape; set_extra_state takes any.
        if key.rpartition(".")[2] == _EXTRA_STATE:
            continue
        here, there = mine.get(key), theirs.get(key)
        if not (isinstance(here, torch.Tensor) or isinstance(there, torch.Tensor)):
            continue
        here_is, there_is = _describe(here), _describe(there)
        if here_is != there_is:
            raise StateMismatch(
                f"{name}.{key} is {here_is} on this worker and {there_is} in the job: "
                "build the same model on every worker, all of it before the first step"
            )


def _describe(value: object) -> str:
    if not isinstance(value, torch.Tensor):
        return "missing" if value is None else type(value).__name__
    return f"{list(value.shape)} of {str(value.dtype).removeprefix('torch.')}"


def _encode(value: object, tensors: list[NamedTensor], path: str) -> list:
    if isinstance(value, np.generic) and is_scalar_of_numpy(value):
        return ["g", value.dtype.str, value.tobytes()]
    if value is None or isinstance(value, bool | str | bytes):
        return ["v", value]
    if isinstance(value, int):
        return ["i", str(int(value))]
    if isinstance(value, float):
        return ["f", float(value).hex()]
    if isinstance(value, torch.Tensor):
        check_is_plain(path, value)
    if isinstance(value, torch.Tensor) and value.layout == torch.sparse_coo:
        named = {"indices": value._indices(), "values": value._values()}
        parts = [_encode(part, tensors, f"{path}.{name}") for name, part in named.items()]
        return ["c", list(value.shape), value.is_coalesced(), *parts]
    if isinstance(value, torch.Tensor) and is_distributed(value):
        local = local_of(value)
        tensors.append(NamedTensor(path, local, box_of(value)))
        shard = ["t", str(local.dtype).removeprefix("torch."), list(local.shape)]
        return ["p", list(value.shape), list(value.stride()), placement_of(value), shard]
    if isinstance(value, torch.Tensor) and value.layout == torch.strided:
        tensors.append(NamedTensor(path, value))
        return ["t", str(value.dtype).removeprefix("torch."), list(value.shape)]
    if isinstance(value, np.ndarray) and value.dtype.hasobject is False:
        tensors.append(NamedTensor(path, torch.from_numpy(np.ascontiguousarray(value))))
        dtype = str(tensors[-1].tensor.dtype).removeprefix("torch.")
        return ["n", dtype, list(value.shape)]
    if isinstance(value, np.generic):
        return _encode(value.item(), tensors, path)
    if isinstance(value, torch.dtype | torch.device):
        return ["d" if isinstance(value, torch.dtype) else "D", str(value).removeprefix("torch.")]
    kind = type(value).__name__
    if isinstance(value, dict):
        kind = kind_of_dict(value) or "dict"
        pairs = [
            [_encode(k, tensors, path), _encode(v, tensors, f"{path}[{k!r}]")]
            for k, v in value.items()
        ]
        return ["m", kind, pairs]
    if isinstance(value, list | tuple | set | frozenset):
        kind = kind if kind in _SEQUENCES else "list" if isinstance(value, list) else "tuple"
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return ["s", kind, [_encode(v, tensors, f"{path}[{i}]") for i, v in enumerate(items)]]
    raise UserError(
        f"{path} is a {kind}, which cannot travel between workers: keep tensors, numbers, strings, "
        "lists and dictionaries in state_dict()"
    )


def _sparse(parts: list[torch.Tensor], shape: list[int], coalesced: bool) -> torch.Tensor:
    places, values = parts
    found = torch.sparse_coo_tensor(places, values, shape, check_invariants=True)
    return found._coalesced_(coalesced)


def _parse(skeleton: bytes) -> Any:
    try:
        return msgspec.msgpack.decode(skeleton)
    except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
        raise WireError(f"a state skeleton cannot be read: {error}") from None


def _decode(
    node: Any, tensor: Callable[[Meta], Any], meshes: Mapping[str, Any] | None = None
) -> Any:
    try:
        match node[0]:
            case "v":
                return node[1]
            case "i":
                return int(node[1])
            case "f":
                return float.fromhex(node[1])
            case "g":
                return np.frombuffer(node[2], dtype=node[1])[0]
            case "t":
                return tensor((str(node[1]), tuple(node[2])))
            case "c":
                parts = [_decode(part, tensor) for part in node[3:]]
                return None if parts[0] is None else _sparse(parts, node[1], node[2])
            case "p":
                part = _decode(node[4], tensor)
                if part is None or meshes is None:
                    return part
                return distributed(part, tuple(node[1]), tuple(node[2]), node[3], meshes)
            case "n":
                found = tensor((str(node[1]), tuple(node[2])))
                return found.numpy() if isinstance(found, torch.Tensor) else found
            case "d":
                dtype = getattr(torch, str(node[1]), None)
                if isinstance(dtype, torch.dtype):
                    return dtype
            case "D":
                return torch.device(str(node[1]))
            case "m":
                pairs = [(_decode(k, tensor), _decode(v, tensor, meshes)) for k, v in node[2]]
                return _DICTS[node[1]](pairs)
            case "s":
                return _SEQUENCES[node[1]]([_decode(v, tensor, meshes) for v in node[2]])
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        raise WireError(f"a state skeleton is malformed: {error!r}") from None
    raise WireError(f"a state skeleton has an unknown part {node[0]!r}")


def to_plain(value: Any, name: str) -> Any:
    """Return a copy of `value` in plain values; UserError names a value that is not plain."""
    match value:
        case None | bool() | str() | bytes():
            return value
        case int() if -(1 << 63) <= value < 1 << 63:
            return int(value)
        case int():
            raise UserError(f"{name} is {value}, which has more than 64 bits: give it as a string")
        case float():
            return float(value)
        case list() | tuple():
            return [to_plain(each, f"{name}[{i}]") for i, each in enumerate(value)]
        case dict():
            if any(isinstance(key, tuple) for key in value):
                raise UserError(f"{name} has a tuple as a key: give strings or numbers as keys")
            keys = [to_plain(key, f"the key {key!r} of {name}") for key in value]
            found = [to_plain(each, f"{name}[{key!r}]") for key, each in value.items()]
            return dict(zip(keys, found, strict=True))
    raise UserError(
        f"{name} is a {type(value).__module__}.{type(value).__name__}: give numbers, strings, or "
        "lists and dictionaries of them (value.item() makes a number of a tensor or an array)"
    )

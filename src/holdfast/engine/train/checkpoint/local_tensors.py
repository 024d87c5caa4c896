"""Converts between a distributed tensor and the part of it that this process has."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import is_traceable_wrapper_subclass

from holdfast.engine.core.errors import StateMismatch, UserError

_PLAIN = (torch.Tensor, torch.nn.Parameter)
Placement = list[str]  # the name of a mesh, and a word for each of its dimensions


@dataclass(frozen=True, slots=True)
class Box:
    """Describes which part of a distributed tensor a process has, in numbers of elements.

    `first`: of several processes that have the same part, this one saves it.
    """

    offset: tuple[int, ...]
    whole: tuple[int, ...]  # shape of the whole tensor
    first: bool


def is_distributed(tensor: object) -> bool:
    """Return whether a tensor is a DTensor, without importing DTensor's module."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def check_is_plain(name: str, tensor: torch.Tensor) -> None:
    """Refuse a tensor that is made of several, as torchao makes them. UserError."""
    if type(tensor) not in _PLAIN and is_traceable_wrapper_subclass(local_of(tensor)):
        raise UserError(
            f"{name} is of type {type(local_of(tensor)).__name__}, which consists of several "
            "tensors and cannot travel between workers: keep plain tensors in models and "
            "optimizers, and quantize after training"
        )


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return this process's part of a tensor: all of it, unless it is distributed."""
    found: Any = tensor
    return found.detach().to_local() if is_distributed(tensor) else tensor


def local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return this process's part of a parameter's gradient, placed as the parameter is."""
    grad: Any = param.grad
    if grad is None or not is_distributed(grad):
        return param.grad
    like: Any = param
    if grad.placements != like.placements:
        grad = grad.redistribute(like.device_mesh, like.placements)
    return grad.to_local()


def place_as(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Make a tensor that is distributed as `param` is from this process's part."""
    if not is_distributed(param):
        return local
    from torch.distributed.tensor import DTensor

    like: Any = param
    return DTensor.from_local(
        local,
        like.device_mesh,
        like.placements,
        run_check=False,
        shape=like.shape,
        stride=like.stride(),
    )


def placement_of(tensor: torch.Tensor) -> Placement:
    """Describe how a distributed tensor is placed, one word for each dimension of its mesh.

    "S0": cut along dimension 0; "S0/2": the same, but of each of 2 equal parts, as FSDP2 cuts what
    tensor parallelism has cut before; "R": copied. Raises UserError for anything else.
    """
    found: Any = tensor
    return [name_of_mesh(found.device_mesh), *(_word(each) for each in found.placements)]


def _word(placement: Any) -> str:
    kind = type(placement).__name__
    if kind == "Replicate":
        return "R"
    if kind == "Shard":
        return f"S{placement.dim}"
    if kind == "_StridedShard":
        return f"S{placement.dim}/{placement.split_factor}"
    raise UserError(
        f"a protected tensor is distributed as {placement}, which is no state: protect tensors "
        "that are cut (Shard) or copied (Replicate)"
    )


def _placement(word: str) -> Any:
    from torch.distributed.tensor import Replicate, Shard
    from torch.distributed.tensor.placement_types import _StridedShard

    if word == "R":
        return Replicate()
    dim, _, factor = word.removeprefix("S").partition("/")
    return _StridedShard(int(dim), split_factor=int(factor)) if factor else Shard(int(dim))


def box_of(tensor: torch.Tensor) -> Box | None:
    """Return the part of a tensor that this process has; None if it is not distributed."""
    if not is_distributed(tensor):
        return None
    from torch.distributed.tensor._utils import compute_local_shape_and_global_offset

    found: Any = tensor
    mesh, placements = found.device_mesh, found.placements
    shape, offset = compute_local_shape_and_global_offset(found.shape, mesh, placements)
    place = mesh.get_coordinate()
    copies = [at for at, each in zip(place, placements, strict=True) if each.is_replicate()]
    # Of parts without elements, one is saved.
    empty = 0 in shape and any(place)
    return Box(tuple(offset), tuple(found.shape), first=not any(copies) and not empty)


def cut_like(like: torch.Tensor, whole: torch.Tensor) -> torch.Tensor:
    """Cut a whole tensor as `like` is, which is distributed or not, and has the same shape."""
    box = box_of(like)
    if box is None:
        return whole
    local = local_of(like)
    place = zip(box.offset, local.shape, strict=True)
    part = whole[tuple(slice(start, start + size) for start, size in place)]
    return place_as(like, part.to(local.device, copy=True).contiguous())


def name_of_mesh(mesh: Any) -> str:
    """Return a mesh's name, which all workers share: its shape and dimensions."""
    names = mesh.mesh_dim_names or ()
    return f"{list(mesh.mesh.shape)} {' '.join(names)}".strip()


def meshes_of(objects: Iterable[Any]) -> dict[str, Any]:
    """Return the meshes over which these modules' parameters are distributed, by name."""
    modules = [each for each in objects if isinstance(each, torch.nn.Module)]
    params: list[Any] = [p for module in modules for p in module.parameters() if is_distributed(p)]
    return {name_of_mesh(p.device_mesh): p.device_mesh for p in params}


def distributed(
    local: torch.Tensor,
    shape: tuple[int, ...],
    stride: tuple[int, ...],
    placement: Placement,
    meshes: Mapping[str, Any],
) -> torch.Tensor:
    """Make a distributed tensor from this process's part. StateMismatch without its mesh."""
    from torch.distributed.tensor import DTensor

    name, *words = placement
    if name not in meshes:
        raise StateMismatch(
            f"the job's state is distributed over a mesh {name}, which this worker does not have: "
            "build the same model, over the same mesh, on every worker"
        )
    places = [_placement(word) for word in words]
    return DTensor.from_local(
        local, meshes[name], places, run_check=False, shape=torch.Size(shape), stride=stride
    )


def check_meshes(params: Iterable[tuple[str, torch.Tensor]], procs: int) -> None:
    """Raise UserError for a parameter on a mesh that is not made of all of a worker's processes."""
    for name, param in params:
        like: Any = param
        if is_distributed(param) and (size := like.device_mesh._get_root_mesh().size()) != procs:
            raise UserError(
                f"{name} is distributed over a mesh of {size} processes, and each worker of this "
                f"job has {procs}: give fully_shard or parallelize_module job.mesh, and start the "
                "job with that number of processes by --procs-per-worker"
            )


def check_split(protected: Mapping[str, Any], count: int) -> None:
    """Raise UserError for a parameter that would be trained with `count` parts of a batch apart."""
    modules = [(n, each) for n, each in protected.items() if isinstance(each, torch.nn.Module)]
    named = ((n, *found) for n, module in modules for found in module.named_parameters())
    for module_name, within, param in named:
        like: Any = param
        held = like.device_mesh.size() if is_distributed(param) else 1
        if param.requires_grad and held < count:
            raise UserError(
                f"{module_name}.{within} is distributed over {held} processes, and the worker's "
                f"{count} processes train on as many parts of a batch: call "
                f"fully_shard({module_name}, mesh=job.mesh), or say with split= in job.batches "
                "which processes train on parts: False, or a dimension of their mesh"
            )

"""Finds in a distributed tensor what this process holds of it, and makes one of what it holds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from holdfast.core.errors import StateMismatch

Placement = list[str]  # the name of a mesh, and for each of its dimensions how it is used


def is_distributed(tensor: object) -> bool:
    """Tell whether a tensor is a DTensor, without importing what defines them."""
    return hasattr(tensor, "device_mesh") and hasattr(tensor, "placements")


def local_of(tensor: torch.Tensor) -> torch.Tensor:
    """Return what this process holds of a tensor: all of it, unless it is distributed."""
    found: Any = tensor
    return found.detach().to_local() if is_distributed(tensor) else tensor


def local_gradient(param: torch.Tensor) -> torch.Tensor | None:
    """Return what this process holds of a parameter's gradient, placed as the parameter is."""
    grad: Any = param.grad
    if grad is None or not is_distributed(grad):
        return param.grad
    like: Any = param
    if grad.placements != like.placements:
        grad = grad.redistribute(like.device_mesh, like.placements)
    return grad.to_local()


def placed_as(param: torch.Tensor, local: torch.Tensor) -> torch.Tensor:
    """Make of what this process holds a tensor that is distributed as `param` is."""
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
    """Describe how a distributed tensor is placed: "S0" cut along dimension 0, "R" copied."""
    found: Any = tensor
    words = [f"S{each.dim}" if each.is_shard() else "R" for each in found.placements]
    return [name_of_mesh(found.device_mesh), *words]


def name_of_mesh(mesh: Any) -> str:
    """Return what processes of different workers call the same mesh: its shape and dimensions."""
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
    """Make a distributed tensor of what is here of it. StateMismatch without its mesh."""
    from torch.distributed.tensor import DTensor, Replicate, Shard

    name, *words = placement
    if name not in meshes:
        raise StateMismatch(
            f"the job's state is distributed over a mesh {name}, which this worker does not have: "
            "build the same model, over the same mesh, on every worker"
        )
    places = [Shard(int(word[1:])) if word.startswith("S") else Replicate() for word in words]
    return DTensor.from_local(
        local, meshes[name], places, run_check=False, shape=torch.Size(shape), stride=stride
    )

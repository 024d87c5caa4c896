"""Makes settings of this process, and looks for settings of torch that break the promise.

glibc gives memory at the top of the heap back to the kernel as soon as it is free. An optimizer's
temporaries are freed after every step, and the kernel then has to find and clear the same pages
again in the next: thousands of page faults a step. The memory kept here never exceeds a step's
peak.

A compiled model may have kernels that depend on the batches that a process has seen before; it
gets a warning. Its kernels are kept in files, which stay whole if this process is killed.
"""

from __future__ import annotations

import ctypes
import functools
import os
import sys
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.ground.events import (
    EventNoted,
    WorkerEvent,
)
from holdfast.engine.train.checkpoint.local_tensors import check_meshes

_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3  # glibc's malloc.h
_USERS = ("MALLOC_TRIM_THRESHOLD_", "MALLOC_MMAP_THRESHOLD_", "MALLOC_MMAP_MAX_")
_TUNES = "glibc.malloc."
KEPT_BYTES_MAX = 1 << 30  # free memory at the top of the heap
HEAP_BLOCK_BYTES_MAX = 32 << 20  # larger blocks are mapped one by one: glibc allows no more


def keep_freed_memory(environ: Mapping[str, str]) -> bool:
    """Set glibc's limits for this process; False if the user has, or if it is not glibc."""
    if any(name in environ for name in _USERS) or _TUNES in environ.get("GLIBC_TUNABLES", ""):
        return False
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is None:
        return False
    # Setting either limit ends glibc's own adapting of both, so both are set.
    limits = ((_M_MMAP_THRESHOLD, HEAP_BLOCK_BYTES_MAX), (_M_TRIM_THRESHOLD, KEPT_BYTES_MAX))
    return all(mallopt(name, value) == 1 for name, value in limits)


def check_torch(
    modules: list[tuple[str, torch.nn.Module]],
    trained: list[tuple[str, torch.nn.Parameter]],
    procs: int,
    *,
    is_joined: bool,
    post: Callable[[WorkerEvent], None],
) -> None:
    """Look for settings of torch that break the promise. UserError.

    `is_joined`: the worker has several processes, which are in a group of torch.distributed.
    """
    check_meshes(trained, procs)
    initialized = torch.distributed.is_available() and torch.distributed.is_initialized()
    if initialized and not is_joined:
        raise UserError(
            "torch.distributed is initialised, and its groups end with the first worker that is "
            "lost: leave out init_process_group(), as Holdfast exchanges gradients itself"
        )
    for name, module in modules:
        if isinstance(module, torch.nn.parallel.DistributedDataParallel | torch.nn.DataParallel):
            raise UserError(
                f"job.protect({name}=...): a {type(module).__name__} exchanges gradients by "
                "itself; protect the module inside it, and train that"
            )
    if any(p.is_cuda for _, p in trained) and torch.backends.cudnn.benchmark:
        text = "torch.backends.cudnn.benchmark is on: each worker chooses kernels by its own timing"
        text = f"{text}, and bits may differ; set it to False"
        post(EventNoted("script", text))


_check_scale = torch.amp.GradScaler._check_scale_growth_tracker


def _make_scale_first(scaler: torch.amp.GradScaler, caller: str) -> Any:
    if scaler._scale is None:
        scaler._lazy_init_scale_growth_tracker(torch.device(scaler._device))
    return _check_scale(scaler, caller)


def prepare_scalers() -> None:
    """Make GradScalers create their scale on first use, which may come before their first loss.

    A worker without samples unscales gradients before it has computed a loss. The script may hold
    its scaler in any object.
    """
    setattr(torch.amp.GradScaler, _check_scale.__name__, _make_scale_first)


def write_kernels_whole() -> None:
    """Make torch.compile put a C++ kernel into its cache when the kernel is whole.

    The compiler writes to the place where all processes look for the kernel, now and in later jobs.
    If a worker is killed while it compiles, they would find a part of the kernel there, and fail.
    """
    builder: Any = getattr(sys.modules.get("torch._inductor.cpp_builder"), "CppBuilder", None)
    if builder is not None and not hasattr(builder.build, "__wrapped__"):
        builder.build = _build_apart(builder.build)


def _build_apart(build: Callable[[Any], None]) -> Callable[[Any], None]:
    @functools.wraps(build)
    def build_apart(builder: Any) -> None:
        target, before = builder.get_target_file_path(), dict(vars(builder))
        for name in ("_output", "_target_file"):  # releases of torch make the command of either
            if name in before:
                setattr(builder, name, before[name].replace(target, f"{target}.part"))
        build(builder)
        vars(builder).update(before)
        os.replace(f"{target}.part", target)

    return build_apart


def advice(modules: Mapping[str, nn.Module]) -> str:
    """Return a warning about protected modules that torch.compile has wrapped, or "".

    With automatic dynamic shapes it compiles one kernel for the first shape and a second one for
    all sizes. The two give different bits, so the bits depend on the shapes that a worker has seen
    before.
    """
    dynamo: Any = sys.modules.get("torch._dynamo")
    if dynamo is None or not dynamo.config.automatic_dynamic_shapes:
        return ""
    found = [name for name, module in modules.items() if _is_automatic(module, dynamo)]
    if not found:
        return ""
    return (
        f"{', '.join(found)} is compiled with automatic dynamic shapes, so that its bits depend on "
        "the shapes that a worker has seen before: if batches have several shapes, use "
        "torch.compile(..., dynamic=False) and set "
        "torch._dynamo.config.fail_on_recompile_limit_hit = True"
    )


def _is_automatic(module: nn.Module, dynamo: Any) -> bool:
    for each in module.modules():
        if isinstance(each, dynamo.eval_frame.OptimizedModule):
            if getattr(each.dynamo_ctx, "_dynamic", None) is None:
                return True
        elif each._compiled_call_impl is not None and not _is_static(each):
            return True
    return False


def _is_static(module: nn.Module) -> bool:
    """Return whether `module.compile` was given a value for `dynamic`; a closure keeps it."""
    call: Any = module._compiled_call_impl
    cells = [each.cell_contents for each in call.__closure__ or ()]
    return any(getattr(each, "_dynamic", None) is not None for each in cells)

"""Warns of compiled models whose kernels depend on the batches that a process has seen before."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from typing import Any

from torch import nn


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

"""Detects whether a shard's reader asks for the process's rank, or for the ids of data workers.

A shard belongs to a virtual rank, which any process may host, so samples cut by processes would be
cut twice, or not at all. Invariant: watching a reader does not change what the reader does.
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Iterator
from types import CodeType, FrameType
from typing import Any

import torch.distributed
import torch.utils.data

VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_PROCID")
_FUNCTIONS: dict[CodeType, str] = {
    torch.utils.data.get_worker_info.__code__: "torch.utils.data.get_worker_info()",
    torch.distributed.is_initialized.__code__: "torch.distributed.is_initialized()",
    torch.distributed.get_rank.__code__: "torch.distributed.get_rank()",
    torch.distributed.get_world_size.__code__: "torch.distributed.get_world_size()",
}
_ENVIRON = type(os.environ).__getitem__.__code__
_WAYS_THERE = ("os", "_collections_abc")  # modules between os.environ.get and its caller
# These are harmless: they do not cut samples, or only in data workers, where no shard is read.
_HARMLESS = ("datasets", "fsspec", "holdfast", "huggingface_hub", "torch", "torchdata")


@contextlib.contextmanager
def ranks_watched() -> Iterator[list[str]]:
    """Collect the names of process facts read within, in this thread; none under a profiler."""
    found: list[str] = []

    def note(frame: FrameType, event: str, _argument: Any) -> None:
        if event == "call" and (name := _find_fact(frame)) and name not in found:
            found.append(name)

    if sys.getprofile() is not None:
        yield found
        return
    sys.setprofile(note)
    try:
        yield found
    finally:
        sys.setprofile(None)


def _find_fact(frame: FrameType) -> str:
    """Return the name of the process fact that a call reads; "" if none, or if it is harmless."""
    if frame.f_code is _ENVIRON:
        key = frame.f_locals.get("key")
        name = f"os.environ[{key!r}]" if key in VARIABLES else ""
    else:
        name = _FUNCTIONS.get(frame.f_code, "")
    if not name:
        return ""
    caller = frame.f_back
    while caller is not None and caller.f_globals.get("__name__") in _WAYS_THERE:
        caller = caller.f_back
    module = "" if caller is None else str(caller.f_globals.get("__name__"))
    return "" if module.split(".")[0] in _HARMLESS else name

"""Keeps all work on gradients in one order: that of their GPU's default stream.

A task, the sums and the exchanges of a step use the same memory from several threads, each of which
queues its work on the default stream. A backward pass may use other streams as well: FSDP2 reduces
gradients in one of its own, and calls the hooks of parameters there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator

import torch

from holdfast.core.errors import UserError


def order_before_default(tensor: torch.Tensor) -> None:
    """Let later work on the default stream wait for the present stream's work so far."""
    if tensor.is_cuda:
        here, default = _streams_of(tensor)
        if here != default:
            default.wait_stream(here)


@contextlib.contextmanager
def on_default_stream(tensor: torch.Tensor) -> Iterator[None]:
    """Queue the body's work on the default stream; later work of the present one waits for it.

    The body may use what the present stream has computed so far, and free memory of its.
    """
    if not tensor.is_cuda:
        yield
        return
    here, default = _streams_of(tensor)
    if here == default:
        yield
        return
    default.wait_stream(here)
    with torch.cuda.stream(default):
        yield
    here.wait_stream(default)


def check_stream(tensor: torch.Tensor) -> None:
    """Raise UserError if the script computes in another stream than the default one."""
    if tensor.is_cuda:
        here, default = _streams_of(tensor)
        if here != default:
            raise UserError(
                "the loop over a step's batches runs in a CUDA stream of its own, for which the "
                "sums of gradients would not wait: run it outside of torch.cuda.stream(...); "
                "copies of data may have a stream"
            )


def _streams_of(tensor: torch.Tensor) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the present stream of a tensor's GPU, and its default one."""
    device = tensor.device
    return torch.cuda.current_stream(device), torch.cuda.default_stream(device)

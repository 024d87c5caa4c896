"""Keeps all work on gradients in one order: that of their GPU's default stream.

A task, the sums and the exchanges of a step use the same memory from several threads, each of which
queues its work on the default stream. A backward pass may use other streams as well: FSDP2 reduces
gradients in one of its own, and calls the hooks of parameters there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator

import torch

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.checkpoint.local_tensors import local_of


def order_gradient(param: torch.Tensor) -> None:
    """Let the default stream wait for a parameter's gradient, which the present stream computes.

    The gradient's memory is not used again before the default stream has read it.
    """
    if param.is_cuda and param.grad is not None:
        here, default = _streams_of(param)
        if here != default:
            default.wait_stream(here)
            grad = local_of(param.grad)
            for part in (grad._indices(), grad._values()) if grad.is_sparse else (grad,):
                part.record_stream(default)


@contextlib.contextmanager
def on_default_stream(tensor: torch.Tensor) -> Iterator[None]:
    """Queue the body's work on the default stream of a tensor's GPU, if it is on one."""
    if not tensor.is_cuda:
        yield
        return
    with torch.cuda.stream(_streams_of(tensor)[1]):
        yield


def check_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Raise UserError if the script computes in another stream than a GPU's default one."""
    for tensor in {tensor.device: tensor for tensor in tensors if tensor.is_cuda}.values():
        here, default = _streams_of(tensor)
        if here != default:
            raise UserError(
                "the loop over a step's batches runs in a CUDA stream of its own, which would not "
                "wait for the sums of gradients: run it outside of torch.cuda.stream(...); copies "
                "of data may have a stream"
            )


def _streams_of(tensor: torch.Tensor) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the present stream of a tensor's GPU, and its default one."""
    device = tensor.device
    return torch.cuda.current_stream(device), torch.cuda.default_stream(device)

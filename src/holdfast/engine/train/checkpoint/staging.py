"""Copies tensors into a snapshot's memory: from the host at once, from a GPU beside training.

Copies from a GPU run in a stream of their own into pinned memory. Training must wait for them
before it changes the tensors: module buffers before the next forward pass, the rest before the next
update. `hold` makes the GPU wait, not the host.
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from holdfast.engine.core.errors import WorldError
from holdfast.engine.train.checkpoint.local_tensors import local_of


class Copier:
    """Copies the job's objects, `protected`; their modules' buffers change in a forward pass."""

    def __init__(self, protected: Mapping[str, Any]) -> None:
        self._protected = protected
        self._streams: dict[torch.device, torch.cuda.Stream] = {}
        self._under_way: list[torch.cuda.Event] = []
        self._pinned: memoryview = memoryview(b"")

    def copy(self, memory: memoryview, places: Sequence[tuple[int, torch.Tensor]]) -> None:
        """Copy each tensor's bytes to its place; `wait_for_copies` waits for those on GPUs."""
        on_gpu = []
        for start, tensor in places:
            if tensor.is_cuda:
                on_gpu.append((start, tensor))
            elif tensor.nbytes:
                _room(memory, start, tensor).copy_(tensor)
        if on_gpu:
            self._pin(memory, on_gpu[0][1].device)
            changing = {
                local_of(buffer).untyped_storage().data_ptr()
                for module in self._protected.values()
                if isinstance(module, torch.nn.Module)
                for buffer in module.buffers()
            }
            early = [p for p in on_gpu if p[1].untyped_storage().data_ptr() in changing]
            late = [p for p in on_gpu if p[1].untyped_storage().data_ptr() not in changing]
            self._start(memory, early)
            self.hold()
            self._start(memory, late)

    @property
    def is_busy(self) -> bool:
        """Return whether copies may be under way."""
        return not all(event.query() for event in self._under_way)

    def hold(self) -> None:
        """Make all work queued later on the GPUs' present streams wait for the copies."""
        for event in self._under_way:
            torch.cuda.current_stream(event.device).wait_event(event)

    def wait_for_copies(self) -> None:
        """Wait until all copies are complete. WorldError if a GPU has failed."""
        try:
            for event in self._under_way:
                event.synchronize()
        except RuntimeError as error:
            raise WorldError(f"a copy from the GPU has failed: {error}") from None

    def release(self) -> None:
        """Prepare for giving the memory back."""
        if self._pinned:
            torch.cuda.cudart().cudaHostUnregister(_address(self._pinned))
        self._pinned = memoryview(b"")

    def _start(self, memory: memoryview, places: Sequence[tuple[int, torch.Tensor]]) -> None:
        devices = {tensor.device for _, tensor in places}
        for device in sorted(devices, key=str):
            if device not in self._streams:
                self._streams[device] = torch.cuda.Stream(device)
            stream = self._streams[device]
            stream.wait_stream(torch.cuda.current_stream(device))
            with torch.cuda.stream(stream):
                for start, tensor in places:
                    if tensor.device == device and tensor.nbytes:
                        _room(memory, start, tensor).copy_(tensor, non_blocking=True)
                        tensor.record_stream(stream)
                event = torch.cuda.Event()
                event.record(stream)
            self._under_way.append(event)

    def _pin(self, memory: memoryview, device: torch.device) -> None:
        """Pin the memory; otherwise the copies are slower, and hold up the host."""
        self._under_way = []
        if not self._pinned:
            failed = torch.cuda.cudart().cudaHostRegister(_address(memory), len(memory), 0)
            self._pinned = memoryview(b"") if int(failed) else memory
            if int(failed):
                # CUDA also reports this error to the next kernel that is started: let it be this
                # one, and not the script's.
                with contextlib.suppress(RuntimeError):
                    torch.zeros(1, device=device)


def find_steady_storages(protected: Mapping[str, Any]) -> set[int]:
    """Return the storages of parameters and optimizers' states, which no task changes."""
    found: list[torch.Tensor] = []
    for each in protected.values():
        if isinstance(each, torch.nn.Module):
            found += each.parameters()
        elif isinstance(each, torch.optim.Optimizer):
            values = (v for held in each.state.values() for v in held.values())
            found += [v for v in values if isinstance(v, torch.Tensor)]
    return {local_of(tensor).untyped_storage().data_ptr() for tensor in found}


def _room(memory: memoryview, start: int, tensor: torch.Tensor) -> torch.Tensor:
    place = torch.frombuffer(memory, dtype=torch.uint8, count=tensor.nbytes, offset=start)
    return place.view(tensor.dtype).view(tensor.shape)


def _address(memory: memoryview) -> int:
    return torch.frombuffer(memory, dtype=torch.uint8).data_ptr()

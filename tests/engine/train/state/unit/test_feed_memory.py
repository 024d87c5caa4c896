"""What feeding costs the training next to it: waits and memory."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import nn

from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.transfer import parts_of
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.state import share
from holdfast.engine.train.state.share import StagedState
from holdfast.engine.train.state.step_image import LARGE_BYTES, StepMemory

WAIT_S = 30.0


def test_a_part_can_be_sent_before_the_next_one_is_copied(monkeypatch: pytest.MonkeyPatch) -> None:
    """Sending used to begin once all of the state was copied."""
    goes_on, take = threading.Event(), StagedState._take

    def take_slowly(self: StagedState, piece: share._Piece, arena: torch.Tensor) -> None:
        if piece.number > 0:
            assert goes_on.wait(WAIT_S)
        take(self, piece, arena)

    monkeypatch.setattr(StagedState, "_take", take_slowly)
    model = nn.Linear(3, 2)
    skeleton, tensors = state.capture({"model": model})
    parts = parts_of([t.nbytes for t in tensors], 1)
    staged = StagedState({"model": model}, compares=True)
    staged.copy(skeleton, tensors, parts, 0)
    staged.await_part(0)
    assert staged.digest(0)
    assert not staged.digest(1)
    goes_on.set()
    staged.await_part(1)
    staged.wait_before_update()
    sent = b"".join(bytes(data) for _, data in staged.messages(parts, 0))
    assert sent == b"".join(as_bytes(t).numpy().tobytes() for t in tensors)


def test_a_thread_that_waits_for_a_part_hears_that_the_copy_has_failed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(self: StagedState, piece: share._Piece, arena: torch.Tensor) -> None:
        raise RuntimeError("no memory is left")

    monkeypatch.setattr(StagedState, "_take", fail)
    model = nn.Linear(3, 2)
    skeleton, tensors = state.capture({"model": model})
    parts = parts_of([t.nbytes for t in tensors], 1)
    staged = StagedState({"model": model}, compares=True)
    staged.copy(skeleton, tensors, parts, 0)
    with pytest.raises(RuntimeError, match="the state cannot be copied: no memory is left"):
        staged.await_part(1)


def test_blocks_are_used_again() -> None:
    memory = StepMemory()
    block = memory.block(LARGE_BYTES)
    where = block.data_ptr()
    memory.give_back([block.view(torch.float32)])
    assert memory.block(LARGE_BYTES).data_ptr() == where
    assert memory.block(LARGE_BYTES).data_ptr() != where

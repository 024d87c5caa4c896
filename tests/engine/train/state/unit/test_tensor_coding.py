"""Pieces of tensors, coded where they lie, equal the pieces of the host's coder to the byte."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.core.redundancy import Piece, read_redundancy
from holdfast.engine.state.coding.reed_solomon import ReedSolomon
from holdfast.engine.state.memory.pieces import Image, PieceCoder
from holdfast.engine.train.state.gpu_pieces import DeviceImage, TensorCode

DEVICES = [
    "cpu",
    pytest.param(
        "cuda", marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
    ),
]


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize(("k", "m"), [(1, 1), (2, 1), (4, 2), (10, 4), (16, 8)])
def test_every_piece_is_that_of_the_fast_library(k: int, m: int, device: str) -> None:
    rng = np.random.default_rng(k)
    data = rng.integers(0, 256, (k, 4096), dtype=np.uint8)
    fast, code = ReedSolomon(k, m), TensorCode(k, m)
    words = [torch.from_numpy(row.copy()).view(torch.int64).to(device) for row in data]
    for number in range(k + m):
        target = np.zeros(4096, np.uint8)
        fast.encode_piece(number, [row.data for row in data], target.data)
        found = code.make(number, words)
        assert np.array_equal(found.cpu().view(torch.uint8).numpy(), target)
    assert np.array_equal(words[0].cpu().view(torch.uint8).numpy(), data[0])


@settings(max_examples=60, deadline=None)
@given(
    text=st.sampled_from(["replicate:1", "replicate:3", "rs:2+1", "rs:4+2"]),
    parts=st.integers(1, 5),
    sizes=st.lists(st.integers(0, 90), min_size=1, max_size=5),
    seed=st.integers(0, 99),
)
def test_pieces_of_tensors_are_those_of_their_bytes(
    text: str, parts: int, sizes: list[int], seed: int
) -> None:
    torch.manual_seed(seed)
    redundancy = read_redundancy(text)
    tensors = [torch.randint(-9999, 9999, (size,), dtype=torch.int16) for size in sizes]
    host = Image([t.view(torch.uint8).numpy().data for t in tensors])
    there = DeviceImage(tensors, torch.device("cpu"))
    assert there.size == host.size
    coder = PieceCoder(redundancy, parts, host.size)
    code = TensorCode(redundancy.data, redundancy.parity) if redundancy.data > 1 else None
    for part in range(parts):
        for number in range(redundancy.pieces):
            rooms = [np.zeros(coder.size, np.uint8) for _ in range(2)]
            digest = coder.make(host, Piece(part, number), rooms[0].data)
            assert there.make(coder, code, Piece(part, number), rooms[1].data) == digest
            assert np.array_equal(*rooms)

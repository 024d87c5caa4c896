"""torch.distributed.checkpoint with a Holdfast store: other ranks, fewer bytes, no wrong ones."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.api import CheckpointException

from holdfast.cli.main import main
from holdfast.engine.core.errors import Damaged, UserError
from holdfast.engine.core.replica.retention import Retention
from holdfast.engine.state.store.checkpoint_reading import load_range
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.train.checkpoint.dcp import HoldfastReader, HoldfastWriter
from holdfast.engine.train.checkpoint.formats import item_of, read_tensors
from holdfast.engine.train.exchange.tensor_bytes import memory_of
from holdfast.lab.contracts.storages import MemoryStorage
from places import TESTS

RANKS = TESTS / "scripts" / "dcp_ranks.py"
RUN_S = 100.0


@pytest.mark.slow
def test_any_number_of_ranks_loads_a_checkpoint_that_three_ranks_saved(tmp_path: Path) -> None:
    store = tmp_path / "store"
    words = [str(tmp_path), str(store), "100", "save:3", "load:2", "load:1"]
    done = subprocess.run(
        [sys.executable, str(RANKS), *words],
        stderr=subprocess.PIPE,
        text=True,
        timeout=RUN_S,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    found = read_tensors(Checkpoints(open_storage(str(store))), 100, only="rows")
    assert found["rows"].shape == (24, 1000)
    expected = torch.randn(24, 1000, generator=torch.Generator().manual_seed(100))
    assert torch.equal(found["rows"], expected)
    assert main(["ckpt", "verify", str(store)]) == 0


def alone(seed: int = 0) -> dict[str, object]:
    torch.manual_seed(seed)
    big = torch.randn(700, 1000)
    return {"model": nn.Linear(300, 200).state_dict(), "big": big, "step": seed, "list": [1, "two"]}


def save(store: Path, step: int, state: dict[str, object]) -> None:
    dcp.save(state, storage_writer=HoldfastWriter(str(store), step=step), no_dist=True)


def loaded(store: Path, step: int | None = None) -> dict[str, object]:
    state = alone(999)
    dcp.load(state, storage_reader=HoldfastReader(str(store), step), no_dist=True)
    return state


def same(a: dict[str, object], b: dict[str, object]) -> bool:
    model_a, model_b = a["model"], b["model"]
    assert isinstance(model_a, dict)
    assert isinstance(model_b, dict)
    tensors = [(a["big"], b["big"]), *((model_a[k], model_b[k]) for k in model_a)]
    equal = all(torch.equal(x, y) for x, y in tensors)
    return equal and (a["step"], a["list"]) == (b["step"], b["list"])


def test_a_process_alone_saves_and_loads_and_a_checkpoint_id_is_the_step(tmp_path: Path) -> None:
    save(tmp_path, 1, alone(1))
    writer = HoldfastWriter(str(tmp_path))
    dcp.save(alone(2), storage_writer=writer, checkpoint_id="2", no_dist=True)
    assert same(loaded(tmp_path), alone(2))
    assert same(loaded(tmp_path, 1), alone(1))


def test_saving_unchanged_tensors_again_costs_nothing(tmp_path: Path) -> None:
    state = alone(1)
    save(tmp_path, 1, state)
    state["step"] = 2
    save(tmp_path, 2, state)
    packs = sorted(p.stat().st_size for p in (tmp_path / "packs").iterdir())
    assert packs[-1] > 2_800_000
    assert sum(packs[:-1]) < 20_000
    store = Checkpoints(open_storage(str(tmp_path)))
    store.collect(Retention(last=1))
    assert same(loaded(tmp_path), state)


def test_a_flipped_bit_is_never_loaded(tmp_path: Path) -> None:
    save(tmp_path, 1, alone(1))
    save(tmp_path, 2, alone(2))
    rng, files, refused = random.Random(4), sorted(tmp_path.glob("*/000000000002*")), 0
    for _ in range(30):
        path = rng.choice(files)
        intact = path.read_bytes()
        data = bytearray(intact)
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        path.write_bytes(bytes(data))
        state, said = alone(999), ""
        try:
            dcp.load(state, storage_reader=HoldfastReader(str(tmp_path)), no_dist=True)
        except CheckpointException as error:
            said = str(error)
        if said:  # the metadata is well, something else is not
            assert "Rotten" in said
            refused += 1
        else:  # the newest whose metadata can be read is the older one
            assert same(state, alone(1))
        path.write_bytes(intact)
    assert refused > 3
    assert same(loaded(tmp_path), alone(2))


def test_only_the_rows_that_are_asked_for_are_read() -> None:
    read = []

    class Counting(MemoryStorage):
        def read(self, name: str, offset: int, into: memoryview) -> None:
            read.append(len(into))
            super().read(name, offset, into)

    store, tensor = Checkpoints(Counting()), torch.randn(4000, 1000)
    manifest = store.save(1, [item_of("t", tensor)], {})
    read.clear()
    rows = torch.empty(10, 1000)
    load_range(store.storage, manifest, manifest.entries[0], 1000 * 4000, memory_of(rows))
    assert torch.equal(rows, tensor[1000:1010])
    assert sum(read) <= 1 << 20
    with pytest.raises(ValueError, match="has 16000000 bytes"):
        load_range(store.storage, manifest, manifest.entries[0], 15_999_999, memory_of(rows))


def test_misuse_is_said_in_one_sentence(tmp_path: Path) -> None:
    with pytest.raises(UserError, match="needs a step"):
        HoldfastWriter(str(tmp_path)).set_up_storage_writer(True)
    with pytest.raises(UserError, match="'abc' is no step"):
        HoldfastWriter(str(tmp_path)).reset("abc")
    with pytest.raises(UserError, match="no checkpoint in this store"):
        HoldfastReader(str(tmp_path)).read_metadata()
    Checkpoints(open_storage(str(tmp_path))).save(5, [], {})
    with pytest.raises(Damaged, match=r"step 5 has no \.dcp"):
        HoldfastReader(str(tmp_path), 5).read_metadata()

"""States of random bytes, and what saves and loads them."""

from __future__ import annotations

import random

from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.manifest import CHUNK_BYTES, PACKS, Entry, Manifest
from holdfast.engine.state.store.saving import Item
from holdfast.lab.contracts.storages import MemoryStorage

State = dict[str, bytearray]
SIZES = {
    "weight": 3 * CHUNK_BYTES + 17,
    "bias": 40,
    "empty": 0,
    "table": 3 * CHUNK_BYTES,
    "sparse": 2 * CHUNK_BYTES + 9,
}


def make_state(seed: int) -> State:
    """Return a state of random bytes, except `sparse`, which can be compressed."""
    rng = random.Random(seed)
    state = {name: bytearray(rng.randbytes(size)) for name, size in SIZES.items()}
    state["sparse"] = bytearray(SIZES["sparse"])
    for at in range(0, SIZES["sparse"], 500):
        state["sparse"][at] = rng.randrange(256)
    state["sparse"][-9:] = rng.randbytes(9)  # a chunk of its own
    return state


def items(state: State) -> list[Item]:
    return [
        Item(name=name, data=memoryview(data), dtype="uint8", shape=(len(data),))
        for name, data in state.items()
    ]


def save(store: Checkpoints, step: int, state: State) -> Manifest:
    return store.save(step, items(state), {"job": "test"})


class Loaded:
    """Targets that remember which bytes they got."""

    def __init__(self, only: str = "") -> None:
        self.state: State = {}
        self._only = only

    def __call__(self, manifest: Manifest) -> list[tuple[Entry, memoryview]]:
        wanted = [e for e in manifest.entries if self._only in e.name]
        self.state = {e.name: bytearray(e.size) for e in wanted}
        return [(e, memoryview(self.state[e.name])) for e in wanted]


def stored_bytes(storage: MemoryStorage) -> int:
    return sum(len(data) for name, data in storage.objects.items() if name.startswith(PACKS))

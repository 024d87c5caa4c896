"""Saves one checkpoint after the other, from the newest one on, until it is killed.

The state of a step follows from its number, so a reader of a checkpoint knows its right contents.
Half of the state changes with each step. Garbage is collected in between.
"""

from __future__ import annotations

import random
import sys
from pathlib import Path

from holdfast.engine.core.replica.retention import Retention
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.files import FileStorage
from holdfast.engine.state.store.saving import Item

PARTS, PART_BYTES = 4, 3_000_000


def state(step: int) -> dict[str, bytes]:
    """Part i keeps its last version: even parts change at every step, odd ones at every fourth."""
    made = {i: step if i % 2 == 0 else step - step % 4 for i in range(PARTS)}
    return {
        f"part{i}": random.Random(at * PARTS + i).randbytes(PART_BYTES) for i, at in made.items()
    }


def main() -> None:
    store = Checkpoints(FileStorage(Path(sys.argv[1])))
    step = max(store.steps(), default=-1)
    while True:
        step += 1
        items = [Item(name=name, data=memoryview(data)) for name, data in state(step).items()]
        store.save(step, items, {})
        print(step, flush=True)
        store.collect(Retention(last=2))


if __name__ == "__main__":
    main()

"""What verifying training data costs: loading with an index next to loading without.

One process loads batches as a worker does, in turn with and without, from data that are in the page
cache: a disk would only hide the cost. CPU time, because other users may use the machine as well.
"""

from __future__ import annotations

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.engine.state.store.data_index import VerifiedFiles, index_files, write_index
from holdfast.engine.train.data.batch_loading import BatchSource
from holdfast.engine.train.data.batch_tasks import LoadOptions
from holdfast.engine.train.data.sample_digest import index_samples
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.verified_samples import Checks

ROUNDS = 7
FILE_BYTES = 128 << 20
CONTEXT = 1024  # tokens of a record, of two bytes each
PICTURES = 2048


class Pictures:
    """Pictures in memory: 3 x 64 x 64 bytes and a label."""

    def __init__(self) -> None:
        self.data = torch.randint(0, 256, (PICTURES, 3, 64, 64), dtype=torch.uint8)

    def __len__(self) -> int:
        return len(self.data)

    def __getitem__(self, record: int) -> Any:
        return self.data[record].float().div(255), record % 10


class Mapped:
    """Records of a token file that is mapped into memory."""

    def __init__(self, path: Path) -> None:
        self.tokens = np.memmap(path, np.uint16, "r")

    def __len__(self) -> int:
        return len(self.tokens) // CONTEXT

    def __getitem__(self, record: int) -> Any:
        start = record * CONTEXT
        return torch.from_numpy(self.tokens[start : start + CONTEXT].astype(np.int64))


class Verified:
    """The same records, whose blocks are verified when they are first read."""

    def __init__(self, path: Path, index: Path) -> None:
        self.files = VerifiedFiles(path, index)

    def __len__(self) -> int:
        return self.files.size() // (2 * CONTEXT)

    def __getitem__(self, record: int) -> Any:
        data = self.files.read(2 * record * CONTEXT, 2 * CONTEXT)
        return torch.from_numpy(np.frombuffer(data, np.uint16).astype(np.int64))


def epoch_s(dataset: Any, checks: Checks | None = None, epochs: int = 1) -> float:
    """Return the CPU seconds of loading `epochs` epochs."""
    plan = SamplePlan(length=len(dataset), batch_size=32, virtual_ranks=1, seed=0)
    source = BatchSource(dataset, plan, LoadOptions(), checks)
    began = time.process_time()
    source.follow([0], 0, epochs * plan.steps_per_epoch)
    for step in range(epochs * plan.steps_per_epoch):
        source.batch(step, 0)
    found = time.process_time() - began
    source.close()
    return found


def compare(without: Callable[[], float], with_: Callable[[], float], rounds: int) -> dict:
    """Return the medians of both, taken in turn, and their ratio."""
    pairs = [(without(), with_()) for _ in range(rounds)]
    plain, verified = (statistics.median(each) for each in zip(*pairs, strict=True))
    return {"without_s": plain, "with_s": verified, "ratio": verified / plain}


def measure(folder: Path, rounds: int) -> dict[str, Any]:
    """Measure all cases."""
    path, index = folder / "tokens.bin", folder / "tokens.index"
    path.write_bytes(np.random.default_rng(0).bytes(FILE_BYTES))
    began = time.process_time()
    files = index_files(path, 512 << 10, lambda count: None, leave_out=index)
    indexing_s = time.process_time() - began
    write_index(files, index)
    pictures, mapped = Pictures(), Mapped(path)
    of_pictures = Checks(index=index_samples(pictures))
    of_tokens = Checks(index=index_samples(mapped))
    return {
        "indexing_gb_s": FILE_BYTES / indexing_s / 1e9,
        "pictures": compare(
            lambda: epoch_s(pictures), lambda: epoch_s(pictures, of_pictures), rounds
        ),
        "token records": compare(
            lambda: epoch_s(mapped), lambda: epoch_s(mapped, of_tokens), rounds
        ),
        "token file, first epoch": compare(
            lambda: epoch_s(mapped), lambda: epoch_s(Verified(path, index)), rounds
        ),
        "token file, ten epochs": compare(
            lambda: epoch_s(mapped, epochs=10),
            lambda: epoch_s(Verified(path, index), epochs=10),
            rounds,
        ),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    options = parser.parse_args()
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        print(json.dumps(measure(Path(folder), options.rounds), indent=2))


if __name__ == "__main__":
    main()

"""The speed of loading: batches a second of `job.batches`, next to DataLoader's own.

Both go through the same dataset with the same batches and equally many loading processes, in turns,
in one process. The batches are not used for anything, so that only loading counts.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.utils.data import DataLoader, TensorDataset

from holdfast.engine.train.data.batch_loading import BatchSource
from holdfast.engine.train.data.batch_tasks import LoadOptions
from holdfast.engine.train.data.sampling import SamplePlan

ROUNDS = 15
PROCESSES = (0, 1, 2)
BATCH_SIZE = 32
WARM = 10  # batches before each measurement, and left after it


class Pictures:
    """Pictures that are flipped and scaled, as an augmentation does; some 90 us for each."""

    def __init__(self, count: int) -> None:
        self._count = count
        self._bytes = np.random.default_rng(1).integers(0, 256, (64, 3, 64, 64), dtype=np.uint8)

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, index: int) -> tuple[torch.Tensor, int]:
        picture = torch.from_numpy(self._bytes[index % 64]).float().div_(255.0)
        if torch.rand(()) < 0.5:
            picture = picture.flip(2)
        return (picture - 0.5) / 0.25, index % 10


class Rows:
    """Rows of a table in memory: only the work around the samples costs time."""

    def __init__(self, count: int) -> None:
        self._rows = torch.randn(count, 32)

    def __len__(self) -> int:
        return len(self._rows)

    def __getitem__(self, index: int) -> torch.Tensor:
        return self._rows[index]


def tensors(count: int) -> TensorDataset:
    """Return the rows of two tensors; no code of a script reads them."""
    return TensorDataset(torch.randn(count, 32), torch.arange(count) % 10)


def tuples(count: int) -> list[tuple[torch.Tensor, float, int]]:
    """Return a list of samples; no code of a script reads them."""
    return [(row, 1.0, number % 10) for number, row in enumerate(torch.randn(count, 8))]


KINDS = {  # and the batches of each measurement
    "pictures": (Pictures, 100),
    "rows": (Rows, 800),
    "tensors": (tensors, 800),
    "tuples": (tuples, 800),
}


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadingRate:
    """Gives the batches a second of each round."""

    kind: str
    processes: int
    loader: tuple[float, ...]
    holdfast: tuple[float, ...]

    @property
    def ratio(self) -> float:
        """Return the median of the rounds' ratios, Holdfast to DataLoader.

        Both of a round were measured within a second or two, so other work disturbed both alike.
        """
        pairs = zip(self.holdfast, self.loader, strict=True)
        return statistics.median(mine / theirs for mine, theirs in pairs)


def by_loader(dataset: Any, processes: int) -> Iterator[Any]:
    loader = DataLoader(dataset, batch_size=BATCH_SIZE, shuffle=True, num_workers=processes)
    return iter(loader)


def by_holdfast(dataset: Any, processes: int) -> Iterator[Any]:
    """Load as a worker that hosts the only virtual rank."""
    plan = SamplePlan(length=len(dataset), batch_size=BATCH_SIZE, virtual_ranks=1, seed=3)
    source = BatchSource(dataset, plan, LoadOptions(num_workers=processes))
    try:
        source.follow((0,), 0, plan.steps_per_epoch)
        for step in range(plan.steps_per_epoch):
            yield source.batch(step, 0)
    finally:
        source.close()


def rate(batches: Iterator[Any], count: int) -> float:
    """Return batches a second, without the first few and without the end of the processes."""
    for _ in range(WARM):
        next(batches)
    began = time.perf_counter()
    for _ in range(count):
        next(batches)
    return count / (time.perf_counter() - began)


def measure(kind: str, processes: int, rounds: int = ROUNDS) -> LoadingRate:
    make, batches = KINDS[kind]
    dataset = make((batches + 2 * WARM) * BATCH_SIZE)
    loader, holdfast = [], []
    for number in range(rounds):
        turns = [(loader, by_loader), (holdfast, by_holdfast)]
        for rates, load in turns if number % 2 else reversed(turns):
            rates.append(rate(load(dataset, processes), batches))
    return LoadingRate(
        kind=kind, processes=processes, loader=tuple(loader), holdfast=tuple(holdfast)
    )


def row(found: LoadingRate) -> str:
    """Return the row of the table."""
    loader, holdfast = (statistics.median(each) for each in (found.loader, found.holdfast))
    return (
        f"| {found.kind} | {found.processes} | {loader:.0f} | {holdfast:.0f} "
        f"| **{found.ratio:.2f}** |"
    )


def lines(rounds: int = ROUNDS) -> Iterator[str]:
    """Return the lines of the sheet."""
    yield "## Loading against DataLoader"
    yield ""
    yield f"The same dataset, batches of {BATCH_SIZE}, as many loading processes; one thread;"
    yield f"nothing is computed with the batches. Both in turn, {rounds} rounds; the ratio is the"
    yield "median of the rounds'. Target: 0.95."
    yield ""
    yield "| samples | processes | DataLoader, batches/s | Holdfast, batches/s | ratio |"
    yield "|---|---|---|---|---|"
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    for kind in KINDS:
        for processes in PROCESSES:
            yield row(measure(kind, processes, rounds))
    torch.set_num_threads(threads)
    yield ""
    yield "Pictures and rows are read by a class of the script's, which may draw random numbers:"
    yield "the generators are keyed for each of their batches, in 15 to 25 microseconds, half of"
    yield "them NumPy's. No code of the script's reads tensors (a `TensorDataset`): nothing is"
    yield "keyed, and nothing for tuples (a list) after a look at the types in the batch."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    for line in lines(parser.parse_args().rounds):
        print(line, flush=True)


if __name__ == "__main__":
    main()

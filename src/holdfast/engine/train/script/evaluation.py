"""Computes one virtual rank's share of an evaluation, and the mean of all shares.

Batch number b of the dataset, in its own order, falls to virtual rank b modulo V. So the order of
the additions depends on V only, and the mean has the same bits on any workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from holdfast.engine.core import tree
from holdfast.engine.core.errors import UserError
from holdfast.engine.train.data.data_facts import Facts, describe_data, find_difference
from holdfast.engine.train.data.map_style import load_samples
from holdfast.engine.train.data.random_streams import enter_stream
from holdfast.engine.train.step.state_differences import SAME_DATA

Metrics = dict[str, tuple[float, float]]  # sum and weight, by name
ALONE = ""  # the name of a metric that is the only one, and has no name of its own
_decode = msgspec.msgpack.Decoder(tuple[int, Facts, Metrics]).decode


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Describes an evaluation. `fn` gets a batch, without gradients."""

    fn: Callable[[Any], Any]
    dataset: Any
    length: int
    batch_size: int
    collate_fn: Callable[[list[Any]], Any]
    virtual_ranks: int
    seed: int
    worker: int

    @property
    def act(self) -> str:
        """Return what the workers do together."""
        batches = f"{self.length} samples in batches of {self.batch_size}"
        return f"calls job.evaluate ({batches})"

    def describe(self, step: int) -> Facts:
        """Describe the dataset as this worker has it."""
        return describe_data(self.dataset, self.collate_fn, self.seed, step)

    def share(self, step: int, vrank: int, facts: Facts) -> bytes:
        """Sum up the metrics of a virtual rank's batches, and encode the sums. UserError.

        `facts`: describe the dataset; all shares must have been made with the same data.
        """
        found: Metrics = {}
        for start in range(
            vrank * self.batch_size, self.length, self.batch_size * self.virtual_ranks
        ):
            indices = list(range(start, min(start + self.batch_size, self.length)))
            enter_stream(self.seed, step, start, "evaluate")
            batch = self.collate_fn(load_samples(self.dataset, indices))
            for name, (total, weight) in _read_metrics(self.fn(batch), len(indices)).items():
                before = found.get(name, (0.0, 0.0))
                found[name] = before[0] + total, before[1] + weight
        return msgspec.msgpack.encode((self.worker, facts, found))

    def mean(self, told: Mapping[int, bytes]) -> float | dict[str, float]:
        """Return each metric's mean over all samples, from the shares of all virtual ranks.

        UserError if two workers have other data.
        """
        decoded = {vrank: _decode(data) for vrank, data in sorted(told.items())}
        _check_data([(worker, facts) for worker, facts, _ in decoded.values()])
        shares = {vrank: share for vrank, (_, _, share) in decoded.items()}
        names = sorted({name for share in shares.values() for name in share})
        found = {name: self._mean(name, shares) for name in names}
        return found[ALONE] if names == [ALONE] else found

    def _mean(self, name: str, shares: Mapping[int, Metrics]) -> float:
        parts = {(vrank, 1): share.get(name, (0.0, 0.0)) for vrank, share in shares.items()}
        total, weight = tree.fold(parts, self.virtual_ranks, _add)
        return total / weight if weight else float("nan")


@contextlib.contextmanager
def suspend_training(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode, without gradients; restore each one's mode afterwards."""
    before = [(each, each.training) for module in modules for each in module.modules()]
    for module, _ in before:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in before:
            module.training = training


def _check_data(described: Sequence[tuple[int, Facts]]) -> None:
    """Compare descriptions of the dataset, each with the worker that has it. UserError."""
    (first, mine), *others = described
    for worker, theirs in others:
        if name := find_difference(mine, theirs):
            raise UserError(
                f"{name} is {mine[name]} on worker {first} and {theirs[name]} on worker {worker}, "
                f"in job.evaluate(...): {SAME_DATA}"
            )


def _add(left: tuple[float, float], right: tuple[float, float]) -> tuple[float, float]:
    return left[0] + right[0], left[1] + right[1]


def _read_metrics(value: Any, count: int) -> Metrics:
    """Read what an evaluation function has returned for a batch of `count` samples."""
    if isinstance(value, Mapping):
        return {str(name): _read_mean(each, count) for name, each in value.items()}
    return {ALONE: _read_mean(value, count)}


def _read_mean(value: Any, count: int) -> tuple[float, float]:
    try:
        if isinstance(value, Sequence) and len(value) == 2:
            return float(value[0]), float(value[1])
        return float(value) * count, float(count)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"the evaluated function returned {type(value).__name__}: return a number (the mean "
            "over the batch), a pair (sum, weight), or a dictionary of these"
        ) from None

"""Cuts the batches of a script's own sampler into steps: the next V batches for each.

Every worker draws an epoch's order itself, with all generators keyed by (seed, epoch): the global
ones, and the sampler's own. All workers must draw the same. Invariant: a task's
samples follow from the position in the order, which is a part of the job's state, and from the
sampler.
"""

from __future__ import annotations

import array
import contextlib
import operator
import random
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import numpy as np
import torch
import xxhash
from numpy.typing import NDArray
from torch.utils.data import (
    BatchSampler,
    DataLoader,
    DistributedSampler,
    IterableDataset,
    RandomSampler,
    Sampler,
    SequentialSampler,
)

from holdfast.engine.core.errors import UserError, require
from holdfast.engine.train.data.batch_loading import BatchSource
from holdfast.engine.train.data.batch_tasks import WHOLE, BatchPart, LoadOptions
from holdfast.engine.train.data.datasets import dataset_length
from holdfast.engine.train.data.random_streams import key_apart, stream_seed
from holdfast.engine.train.data.read_plans import OrderFacts, OrderPlan, OrderPosition, encode_facts
from holdfast.engine.train.data.sample_digest import (
    SAMPLES_COMPARED,
    describe_data,
    describe_sample,
)
from holdfast.engine.train.data.sources import ReadData

EPOCH_SAMPLES_MAX = 1 << 28
_GENERATORS = (torch.Generator, np.random.Generator, np.random.RandomState, random.Random)
_TWINS = "torchdata.stateful_dataloader.sampler"  # of PyTorch's samplers, with a state
ORDERS_MAX = 2  # the orders of the present epoch, and of the next as batches are loaded ahead


class DrawnOrder:
    """Is one epoch's batches: the keys of its samples, and the place where each batch begins."""

    def __init__(self, keys: Sequence[Any] | NDArray[np.int64], begins: NDArray[np.int64]) -> None:
        #: The places where batches begin, and the end.
        self.begins = begins
        self._keys = keys

    def __len__(self) -> int:
        return len(self.begins) - 1

    def batch(self, number: int) -> list[Any]:
        """Return the keys of a batch's samples; none past the last batch."""
        if number >= len(self):
            return []
        found = self._keys[self.begins[number] : self.begins[number + 1]]
        return found.tolist() if isinstance(found, np.ndarray) else list(found)

    def facts(self, epoch: int) -> OrderFacts:
        """Return the order's facts for the ledger."""
        keys = self._keys
        data = keys.tobytes() if isinstance(keys, np.ndarray) else _encode(keys)
        digest = xxhash.xxh3_64(self.begins.astype("<i8").tobytes())
        digest.update(data)
        return OrderFacts(
            epoch=epoch,
            order=digest.intdigest() >> 1,
            batches=len(self),
            samples=int(self.begins[-1]),
        )


def draw_order(sampler: Iterable[Any], seed: int, epoch: int) -> DrawnOrder:
    """Draw an epoch's order from a batch sampler. UserError if it is none."""
    name = _name(sampler)
    with key_apart(seed, epoch, "order"), _key_own_generators(sampler, seed, epoch):
        for each in _find_nested(sampler):
            if callable(getattr(each, "set_epoch", None)):
                each.set_epoch(epoch)
        keys: array.array[int] | list[Any] = array.array("q")
        begins = array.array("q", [0])
        for batch in sampler:
            for key in batch:
                try:
                    keys.append(operator.index(key))
                except (TypeError, OverflowError):
                    keys = keys if isinstance(keys, list) else list(keys)
                    keys.append(key)
            begins.append(len(keys))
            if begins[-1] == begins[-2]:
                raise UserError(f"{name} gave an empty batch in epoch {epoch}: leave it out")
            if begins[-1] > EPOCH_SAMPLES_MAX:
                raise UserError(
                    f"{name} has not come to an end after {begins[-1]} samples of epoch {epoch}: "
                    "give one that does"
                )
    if len(begins) == 1:
        raise UserError(f"{name} gave no batch in epoch {epoch}: give one that does")
    places = np.array(begins, dtype=np.int64)
    return DrawnOrder(keys if isinstance(keys, list) else np.array(keys, dtype="<i8"), places)


def check_sampler(sampler: Any) -> None:
    """Raise UserError for a sampler that shares an epoch out over processes itself."""
    for each in _find_nested(sampler):
        if isinstance(each, DistributedSampler):
            raise UserError(
                f"this DataLoader draws samples by a {type(each).__name__}, which gives each "
                "process a share: leave it out, as job.batches shares the samples over the "
                "virtual ranks"
            )


def _encode(keys: Sequence[Any]) -> bytes:
    try:
        return msgspec.msgpack.encode(keys)
    except (TypeError, OverflowError) as error:
        raise UserError(
            f"a sampler gave samples that are not named by plain values ({error}): let it give "
            "whole numbers, strings, or tuples of these"
        ) from None


def _name(sampler: Any) -> str:
    return " of ".join(type(each).__name__ for each in _find_nested(sampler))


def _find_nested(sampler: Any) -> list[Any]:
    """Return a sampler and the samplers from which it draws."""
    found = [sampler]
    for each in found:
        for name, value in getattr(each, "__dict__", {}).items():
            if name == "sampler" or isinstance(value, Sampler):
                if not any(value is known for known in found):
                    found.append(value)
    return found


@contextlib.contextmanager
def _key_own_generators(sampler: Any, seed: int, epoch: int) -> Iterator[None]:
    """Replace the generators of a sampler, and of samplers inside it, by keyed ones."""
    before = [
        (each, name, value)
        for each in _find_nested(sampler)
        for name, value in getattr(each, "__dict__", {}).items()
        if isinstance(value, _GENERATORS)
    ]
    try:
        for number, (each, name, value) in enumerate(before):
            setattr(
                each, name, _make_keyed_like(value, stream_seed(seed, epoch, number, "sampler"))
            )
        yield
    finally:
        for each, name, value in before:
            setattr(each, name, value)


def _make_keyed_like(value: Any, seed: int) -> Any:
    if isinstance(value, torch.Generator):
        return torch.Generator(device=value.device).manual_seed(seed)
    if isinstance(value, np.random.Generator):
        return np.random.Generator(type(value.bit_generator)(seed))
    if isinstance(value, np.random.RandomState):
        return np.random.RandomState(seed % (1 << 32))
    return random.Random(seed)


class EpochOrders:
    """Draws each epoch's order once, and finds the epoch and place of a step."""

    def __init__(self, sampler: Iterable[Any], plan: OrderPlan) -> None:
        self._sampler = sampler
        self._plan = plan
        self._kept: dict[int, tuple[DrawnOrder, OrderFacts]] = {}

    def of(self, epoch: int) -> tuple[DrawnOrder, OrderFacts]:
        """Return an epoch's order."""
        if epoch not in self._kept:
            order = draw_order(self._sampler, self._plan.seed, epoch)
            for old in sorted(self._kept)[: len(self._kept) - ORDERS_MAX + 1]:
                del self._kept[old]
            self._kept[epoch] = order, order.facts(epoch)
        return self._kept[epoch]

    def steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        return -(-len(self.of(epoch)[0]) // self._plan.virtual_ranks)

    def position_after(self, position: OrderPosition, steps: int) -> tuple[int, int]:
        """Return (epoch, its step) that lies `steps` steps after this position. UserError."""
        require(steps >= 0, f"an order is asked for {-steps} steps that are over")
        epoch, batches, _, order, *_ = position
        if order and order != self.of(epoch)[1].order:
            raise make_order_error(epoch)
        steps += batches // self._plan.virtual_ranks
        while steps >= self.steps(epoch):
            steps -= self.steps(epoch)
            epoch += 1
        return epoch, steps


def make_order_error(epoch: int) -> UserError:
    """Return the error to raise when the samplers of two workers disagree."""
    return UserError(
        f"the sampler gives another order in epoch {epoch} here than on another worker, or than "
        "before: it may depend on set_epoch, on the global generators of Python, NumPy and torch "
        "and on generators that it holds, not on earlier epochs, sets or other randomness"
    )


class DrawnTasks:
    """Maps tasks to samples, counted from the job's present position in the order."""

    #: The dataset's length does not matter.
    length = None

    def __init__(
        self,
        plan: OrderPlan,
        orders: EpochOrders,
        positions: list[OrderPosition],
        now: Callable[[], int],
    ) -> None:
        self.seed = plan.seed
        self._plan = plan
        self._orders = orders
        self._positions = positions
        self._now = now  # the script's step of these positions

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within that epoch) of a step of the script."""
        return self._orders.position_after(self._positions[0], step - self._now())

    def keys(self, step: int, vrank: int) -> list[Any]:
        """Return the sampler's batch for the task; it is empty after an epoch's last batch."""
        epoch, within = self.epoch_of(step)
        return self._orders.of(epoch)[0].batch(within * self._plan.virtual_ranks + vrank)

    def task_samples(self, step: int, vrank: int) -> int:
        """Count the samples that the task uses."""
        return len(self.keys(step, vrank))

    def digest(self, step: int, vrank: int) -> int:
        """Return the digest of the place of the task's samples in their epoch's order."""
        epoch, within = self.epoch_of(step)
        order, facts = self._orders.of(epoch)
        batch = min(within * self._plan.virtual_ranks + vrank, len(order))
        count = self.task_samples(step, vrank)
        return self._plan.digest(facts, batch, int(order.begins[batch]), count)

    def scale(self, step: int, vrank: int) -> None:
        """Return None, as each of the step's samples counts alike."""


class SampledBatches(ReadData[OrderPlan]):
    """Cuts the batches of a sampler over a dataset into steps; made by `Job.batches`."""

    has_epochs = True

    def __init__(
        self,
        dataset: Any,
        sampler: Iterable[Any],
        options: LoadOptions,
        plan: OrderPlan,
        positions: list[OrderPosition],
        now: Callable[[], int],
        part: BatchPart = WHOLE,
    ) -> None:
        super().__init__(plan, positions, part)
        self.dataset = dataset
        self.options = options
        self._orders = EpochOrders(sampler, plan)
        self._now = now

    def look(self) -> SampledBatches:
        """Describe the dataset as it is now; return this."""
        self.facts = describe_data(self.dataset, self.options.collate_fn, self.plan.seed, 0)
        return self

    @property
    def steps_per_epoch(self) -> int:
        """Return the number of steps of the first epoch; later ones may have more or fewer."""
        return self._orders.steps(0)

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within it) of a step of the script that is not over.

        It does not ask the sampler about the present step: after the last epoch there may be no
        further order.
        """
        if step == self._now():
            epoch, batches, *_ = self.positions[0]
            return epoch, batches // self.plan.virtual_ranks
        return self._orders.position_after(self.positions[0], step - self._now())

    def epoch_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch."""
        return self._orders.steps(epoch)

    def source(self, plan: OrderPlan) -> BatchSource:
        """Return the loader of the batches."""
        tasks = DrawnTasks(plan, self._orders, self.positions, self._now)
        return BatchSource(self.dataset, tasks, self.options, part=self.part)

    def check(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> str:
        """Check that all workers have drawn the same order; returns its facts if it begins."""
        told = self._order_text()
        try:
            self.plan.position_after(self.positions, step, counts, digests, told)
        except UserError as error:
            raise make_order_error(self.positions[0][0]) from error
        return told

    def samples(self, step: int) -> dict[str, str]:
        """Return digests of the epoch's order, and of a few samples of the present step."""
        epoch, within = self._orders.position_after(self.positions[0], 0)
        order, facts = self._orders.of(epoch)
        found = {f"sample order that the sampler gives in epoch {epoch}": f"{facts.order:016x}"}
        for number, key in enumerate(order.batch(within * self.plan.virtual_ranks)):
            if number < SAMPLES_COMPARED:
                name = f"sample {key!r} of the dataset"
                found[name] = describe_sample(
                    self.dataset,
                    self.options.collate_fn,
                    key,
                    seed=self.plan.seed,
                    step=step,
                    number=number,
                )
        return found

    def _order_text(self) -> str:
        epoch, *_, batches, _ = self.positions[0]
        return "" if batches else encode_facts(self._orders.of(epoch)[1])


@dataclass(frozen=True, slots=True, kw_only=True)
class LoaderSettings:
    """Keeps the settings of a DataLoader for Holdfast.

    `sampler`: gives the batches of an epoch; None if they are cut from all samples in turn, or from
    a permutation of them.
    """

    dataset: Any
    batch_size: int | None
    shuffle: bool
    drop_last: bool
    options: LoadOptions
    sampler: Iterable[Any] | None


def of_loader(loader: DataLoader[Any]) -> LoaderSettings:
    """Read what `loader` loads and how; UserError for settings that Holdfast cannot follow.

    A warning names settings that are ignored because they change no sample.
    """
    if isinstance(loader.dataset, IterableDataset):
        dataset_length(loader.dataset)
    if loader.batch_sampler is None:
        raise UserError(
            "this DataLoader's batches come from a NoneType: give job.batches one with batch_size= "
            "or batch_sampler="
        )
    if getattr(loader, "next_iter_state", None) is not None:
        raise UserError(
            f"this {type(loader).__name__} has loaded the place of another run, which job.batches "
            "does not use: leave its load_state_dict() out, as the job's own state and checkpoints "
            "hold the place in the data"
        )
    check_sampler(loader.batch_sampler)
    plain = _is_stock(loader.batch_sampler, BatchSampler) and loader.batch_size is not None
    shuffles = plain and _shuffles(loader)
    _warn_of_unused(loader)
    options: dict[str, Any] = {"num_workers": loader.num_workers, "collate_fn": loader.collate_fn}
    if loader.prefetch_factor is not None:
        options["prefetch_factor"] = loader.prefetch_factor
    return LoaderSettings(
        dataset=loader.dataset,
        batch_size=loader.batch_size,
        shuffle=shuffles,
        drop_last=loader.drop_last,
        options=LoadOptions(
            pin_memory=loader.pin_memory,
            multiprocessing_context=loader.multiprocessing_context,
            **options,
        ),
        sampler=None
        if shuffles or (plain and type(loader.sampler) is SequentialSampler)
        else loader.batch_sampler,
    )


def _shuffles(loader: DataLoader[Any]) -> bool:
    """Return whether an epoch is a permutation of all samples."""
    sampler: Any = loader.sampler
    return (
        _is_stock(sampler, RandomSampler)
        and not sampler.replacement
        and sampler.num_samples == dataset_length(loader.dataset)
    )


def _is_stock(sampler: Any, kind: type) -> bool:
    """Return whether a sampler is PyTorch's own one of this kind, or torchdata's twin of it."""
    found = type(sampler)
    twin = (found.__module__, found.__name__) == (_TWINS, kind.__name__)
    return found is kind or twin


def _warn_of_unused(loader: DataLoader[Any]) -> None:
    lost = {
        "worker_init_fn": loader.worker_init_fn,
        "generator": loader.generator,
        "timeout": loader.timeout,
    }
    names = [name for name, value in lost.items() if value]
    if names:
        are = "is" if len(names) == 1 else "are"
        warnings.warn(
            f"this DataLoader's {' and '.join(names)} {are} not used: "
            "random numbers are keyed by the job's seed, the step and the virtual rank",
            UserWarning,
            stacklevel=5,
        )

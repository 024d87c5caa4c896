"""Decides which samples a task reads: a pure function of (plan, step, virtual rank).

The worker has no influence. Must not know workers, views, datasets or torch. Every epoch visits the
dataset in the order of a keyed bijection on [0, length), computed a task at a time, so that no
memory here grows with the dataset. Invariant: over the steps of one epoch every sample is used
exactly once (with `drop_last`, at most once, and the same number in every epoch).

The order is part of a job's meaning: changing any constant here changes every trajectory, so it
must come with a new ORDER, by which old ledgers and checkpoints are recognised.
"""

from __future__ import annotations

import functools
import hashlib
import math
import struct
from collections.abc import Collection, Mapping
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from holdfast.engine.core.errors import InvariantError, UserError
from holdfast.engine.train.data.quarantine import replace_bad
from holdfast.engine.train.data.read_plans import OrderPlan, StreamPlan

ORDER = "feistel-1"  # names the bijection in ledgers and checkpoints
LENGTH_MAX = 1 << 48
SEED_MAX = 1 << 64
TABLE_LENGTH_MAX = 1 << 16  # up to here an epoch's order is a sorted table of 512 KiB at most
KEPT_LENGTH_MAX = 1 << 16  # the order of a task with more samples is computed each time
ROUNDS = 8  # rounds of the Feistel network; four already mix, eight leave a margin

Indices = NDArray[np.int64]


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplePlan:
    """Cuts one dataset into epochs, steps and virtual ranks. `batch_size` is per vrank.

    Steps are the job's; the plan's first epoch begins at step `first_step`. In the last step of an
    epoch without `drop_last` the remaining samples are spread over vranks, sizes differing by at
    most one, larger first; a vrank may have none. With `packed` they make as few tasks as a loader
    would make batches, so that none is smaller than the loader's last one; jobs that older releases
    have begun spread them over all vranks. `weight` makes the mean over vranks of weight * (mean
    over the vrank's samples) the mean over the step's samples.
    """

    length: int
    batch_size: int
    virtual_ranks: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    first_step: int = 0
    packed: bool = True

    def __post_init__(self) -> None:
        if not 1 <= self.length <= LENGTH_MAX:
            raise UserError(
                f"a dataset of length {self.length} cannot be sampled: give 1 to 2**48 samples"
            )
        if self.batch_size < 1:
            raise UserError(f"batch_size={self.batch_size} is not a size: give 1 or more samples")
        if self.virtual_ranks < 1:
            raise UserError(f"virtual_ranks={self.virtual_ranks} is not a count: give 1 or more")
        if not 0 <= self.seed < SEED_MAX:
            raise UserError(f"seed={self.seed} is out of range: give an integer in [0, 2**64)")
        if self.first_step < 0:
            raise UserError(f"first_step={self.first_step} is negative: give 0 or more")
        if self.drop_last and self.length < self._full_step:
            raise UserError(
                f"a dataset of length {self.length} is shorter than one step of {self._full_step} "
                "samples (batch_size * virtual ranks): lower batch_size or give drop_last=False"
            )

    @property
    def _full_step(self) -> int:
        return self.batch_size * self.virtual_ranks

    @property
    def steps_per_epoch(self) -> int:
        step = self._full_step
        return self.length // step if self.drop_last else -(-self.length // step)

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within that epoch) of a step of the job."""
        if step < self.first_step:
            raise InvariantError(f"step {step} is before the first, {self.first_step}")
        return divmod(step - self.first_step, self.steps_per_epoch)

    def step_samples(self, step: int) -> int:
        """Count the samples that the step uses over all virtual ranks."""
        return self._samples_within(self.epoch_of(step)[1])

    def task_samples(self, step: int, vrank: int) -> int:
        """Count the samples that the task uses; 0 is possible in the last step of an epoch."""
        start, stop = self._share(self.step_samples(step), vrank)
        return stop - start

    def samples_before(self, step: int) -> int:
        """Compute how many samples the steps first_step .. step-1 use together."""
        epoch, within = self.epoch_of(step)
        whole_epoch = min(self.length, self.steps_per_epoch * self._full_step)
        return epoch * whole_epoch + within * self._full_step

    def weight(self, step: int, vrank: int) -> float:
        """Return the task's share of the step, times V; exactly 1.0 in every full step."""
        return self.task_samples(step, vrank) * self.virtual_ranks / self.step_samples(step)

    def scale(self, step: int, vrank: int) -> float:
        """Return the weight of the task's mean in the step's."""
        return self.weight(step, vrank) / self.virtual_ranks

    def all_weights(self, step: int) -> list[float]:
        """Return `weight(step, v)` for every vrank v."""
        total = self.step_samples(step)
        spans = (self._share(total, vrank) for vrank in range(self.virtual_ranks))
        return [(stop - start) * self.virtual_ranks / total for start, stop in spans]

    def indices(self, step: int, vrank: int) -> Indices:
        """Return the dataset indices of one task, in the order in which they are collated."""
        epoch, within = self.epoch_of(step)
        return _read(self, epoch, within, *self._share(self._samples_within(within), vrank))

    def keys(self, step: int, vrank: int) -> list[int]:
        """Return `indices` as a list of keys for a dataset."""
        found: list[int] = self.indices(step, vrank).tolist()
        return found

    def step_tasks(self, step: int) -> list[Indices]:
        """Return `indices(step, v)` for every vrank v, in one pass."""
        epoch, within = self.epoch_of(step)
        total = self._samples_within(within)
        whole = _read(self, epoch, within, 0, total)
        return [whole[slice(*self._share(total, v))] for v in range(self.virtual_ranks)]

    def digest(self, step: int, vrank: int) -> int:
        return self.digest_of(self.indices(step, vrank))

    @staticmethod
    def digest_of(indices: Indices) -> int:
        """Compute xxh3_64 over the indices as little-endian int64."""
        return xxhash.xxh3_64_intdigest(indices.astype("<i8", copy=False).tobytes())

    def replace_bad(self, indices: Indices, bad: Collection[int]) -> tuple[Indices, set[int]]:
        """Replace bad records; return the records to use, and the bad ones that were met."""
        return replace_bad(indices, bad, self.length)

    def to_dict(self) -> dict[str, Any]:
        """Return the plan in plain values, for ledgers and checkpoints."""
        found = {"order": ORDER, **asdict(self)}
        if not self.packed:
            del found["packed"]  # as older releases have written it
        return found

    @classmethod
    def from_dict(cls, plain: Mapping[str, Any]) -> SamplePlan:
        """Reverse `to_dict`. UserError unless the plan is one of ours."""
        if plain.get("order") != ORDER:
            raise UserError(
                f"sample order {plain.get('order')!r} is not {ORDER!r}: "
                "use the Holdfast that wrote it"
            )
        values = {"packed": False, **plain}  # older releases lack it
        del values["order"]
        for name, kind in _FIELDS.items():
            if type(values.get(name)) is not kind:
                raise UserError(
                    f"plan field {name}={values.get(name)!r} is not of type {kind.__name__}: "
                    "write plans with to_dict"
                )
        if len(values) != len(_FIELDS):
            raise UserError(f"plan {sorted(values)} has unknown fields: write plans with to_dict")
        return cls(**values)

    def _share(self, total: int, vrank: int) -> tuple[int, int]:
        """Return the start and the end of vrank's part of a step of `total` samples."""
        if not 0 <= vrank < self.virtual_ranks:
            raise InvariantError(f"vrank {vrank} of {self.virtual_ranks}")
        tasks = -(-total // self.batch_size) if self.packed else self.virtual_ranks
        if vrank >= tasks:
            return total, total
        base, extra = divmod(total, tasks)
        start = vrank * base + min(vrank, extra)
        return start, start + base + (1 if vrank < extra else 0)

    def _samples_within(self, within: int) -> int:
        """Count the samples of an epoch's step."""
        return min(self._full_step, self.length - within * self._full_step)


def plan_of(plain: Mapping[str, Any]) -> SamplePlan | OrderPlan | StreamPlan:
    """Return the plan that a ledger's header names; UserError unless it is one of ours."""
    for kind in (OrderPlan, StreamPlan):
        if plain.get("order") == kind.order:
            return kind.from_dict(plain)
    return SamplePlan.from_dict(plain)


_FIELDS = {
    "length": int,
    "batch_size": int,
    "virtual_ranks": int,
    "seed": int,
    "shuffle": bool,
    "drop_last": bool,
    "first_step": int,
    "packed": bool,
}


def permute(positions: Indices, length: int, seed: int, epoch: int) -> Indices:
    """Return the images of `positions` under the bijection on [0, length) for (seed, epoch)."""
    if length <= TABLE_LENGTH_MAX:
        return _table(length, seed, epoch)[positions]
    keys = _round_keys(seed, epoch)
    rows = math.isqrt(length - 1) + 1
    columns = -(-length // rows)
    image = _feistel(positions.astype(np.uint64), rows, columns, keys)
    # rows * columns exceeds length by less than rows, so fewer than one in 256 has to walk on.
    while True:
        outside = np.flatnonzero(image >= length)
        if not len(outside):
            return image.astype(np.int64)
        image[outside] = _feistel(image[outside], rows, columns, keys)


def _read(plan: SamplePlan, epoch: int, within: int, start: int, stop: int) -> Indices:
    """Return a part of the samples of an epoch's step, in the order of the plan."""
    offset = within * plan._full_step
    first, end = offset + start, offset + stop
    if not plan.shuffle:
        return np.arange(first, end, dtype=np.int64)
    if plan.length <= TABLE_LENGTH_MAX:
        return _table(plan.length, plan.seed, epoch)[first:end]
    read = _read_order if end - first <= KEPT_LENGTH_MAX else _read_order.__wrapped__
    return read(plan.length, plan.seed, epoch, first, end)


@functools.lru_cache(maxsize=8)
def _read_order(length: int, seed: int, epoch: int, first: int, end: int) -> Indices:
    """Return these places of an epoch's order. A task's are wanted for its data and its digest."""
    found = permute(np.arange(first, end, dtype=np.int64), length, seed, epoch)
    found.flags.writeable = False
    return found


def _feistel(
    values: NDArray[np.uint64], rows: int, columns: int, keys: tuple[np.uint64, ...]
) -> NDArray[np.uint64]:
    """Map [0, rows * columns) to itself: each coordinate is shifted by a hash of the other."""
    high, low = np.uint64(rows), np.uint64(columns)
    row: NDArray[np.uint64] = values // low
    column: NDArray[np.uint64] = values % low
    for first, second in zip(keys[::2], keys[1::2], strict=True):
        row = (row + _hash(column ^ first)) % high
        column = (column + _hash(row ^ second)) % low
    return row * low + column


def _hash(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    """Return 48 well-mixed bits: multiplying mixes upwards, so the high half is folded back."""
    values = values * np.uint64(0xBF58476D1CE4E5B9)
    values = (values ^ (values >> np.uint64(32))) * np.uint64(0x94D049BB133111EB)
    return values >> np.uint64(16)


@functools.lru_cache(maxsize=16)
def _round_keys(seed: int, epoch: int) -> tuple[np.uint64, ...]:
    packed = hashlib.blake2b(
        struct.pack("<QQ", seed, epoch), digest_size=8 * ROUNDS, person=b"holdfast-epoch"
    ).digest()
    return tuple(np.frombuffer(packed, dtype="<u8").astype(np.uint64))


@functools.lru_cache(maxsize=4)
def _table(length: int, seed: int, epoch: int) -> Indices:
    """Return a small epoch's whole order: its positions sorted by keyed hashes.

    The order of numpy's own shuffles may change between versions; a stable sort's cannot.
    """
    keys = _round_keys(seed, epoch)
    hashes = np.arange(length, dtype=np.uint64)
    for key in keys[:4]:
        hashes = _hash(hashes ^ key)
    table = np.argsort(hashes, kind="stable").astype(np.int64)
    table.flags.writeable = False
    return table

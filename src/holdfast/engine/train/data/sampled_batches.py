"""Cuts the batches of a script's own sampler into steps: the next V batches for each.

Every worker draws the orders itself, and all must draw the same. Invariant: which samples a task
reads follows from the position in the order, which is a part of the job's state, and from the
sampler.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from holdfast.engine.core.errors import UserError, require
from holdfast.engine.train.data.batch_loading import BatchSource, LoadOptions
from holdfast.engine.train.data.batch_parts import WHOLE, BatchPart, PartOfPlan
from holdfast.engine.train.data.data_facts import (
    SAMPLES_COMPARED,
    Facts,
    describe_data,
    print_sample,
)
from holdfast.engine.train.data.order_plan import OrderFacts, OrderPlan, OrderPosition, tell
from holdfast.engine.train.data.sampler_orders import DrawnOrder, draw_order

ORDERS_MAX = 2  # the orders of the present epoch, and of the next as batches are loaded ahead


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
        """Return how many steps an epoch has."""
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

    length = None  # the dataset's length does not matter

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


class SampledBatches:
    """Cuts the batches of a sampler over a dataset into steps; made by `Job.batches`.

    `positions`: the place reached in the order; a part of the job's state. `part`: the part of each
    batch that this process of the worker reads.
    """

    has_epochs = True
    quarantine = None

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
        self.part = part
        self.dataset = dataset
        self.options = options
        self.plan = plan
        self.positions = positions
        self._orders = EpochOrders(sampler, plan)
        self._now = now
        self._first_step: int | None = None  # None: no loop has used it
        self.facts: Facts = {}  # describe the dataset at the time of `look`

    def look(self) -> SampledBatches:
        """Describe the dataset as it is now; return this."""
        self.facts = describe_data(self.dataset, self.options.collate_fn, self.plan.seed, 0)
        return self

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps of the first epoch; others may have more or fewer."""
        return self._orders.steps(0)

    def begin(self, step: int) -> OrderPlan:
        """Record that a loop over it begins at `step`; returns the plan from its first use."""
        if self._first_step is None:
            self._first_step = step
            self.plan = dataclasses.replace(self.plan, first_step=step)
        return self.plan

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
        """Return how many steps an epoch has."""
        return self._orders.steps(epoch)

    def source(self, plan: OrderPlan) -> BatchSource:
        """Return the loader of the batches."""
        tasks = DrawnTasks(plan, self._orders, self.positions, self._now)
        cut = tasks if self.part.count == 1 else PartOfPlan(tasks, self.part)
        return BatchSource(self.dataset, cut, self.options)

    def check(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> str:
        """Check that all workers have drawn the same order; returns its facts if it begins."""
        told = self._order_text()
        try:
            self.plan.position_after(self.positions, step, counts, digests, told)
        except UserError as error:
            raise make_order_error(self.positions[0][0]) from error
        return told

    def advance(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> None:
        """Advance past the batches that a script's step has used, by virtual rank. UserError."""
        self.positions[:] = self.plan.position_after(
            self.positions, step, counts, digests, self._order_text()
        )

    def samples(self, step: int) -> dict[str, str]:
        """Return digests of the epoch's order, and of a few samples of the present step."""
        epoch, within = self._orders.position_after(self.positions[0], 0)
        order, facts = self._orders.of(epoch)
        found = {f"sample order that the sampler gives in epoch {epoch}": f"{facts.order:016x}"}
        for number, key in enumerate(order.batch(within * self.plan.virtual_ranks)):
            if number < SAMPLES_COMPARED:
                stream = self.plan.seed, step, number
                name = f"sample {key!r} of the dataset"
                found[name] = print_sample(self.dataset, self.options.collate_fn, key, stream)
        return found

    def _order_text(self) -> str:
        epoch, *_, batches, _ = self.positions[0]
        return "" if batches else tell(self._orders.of(epoch)[1])

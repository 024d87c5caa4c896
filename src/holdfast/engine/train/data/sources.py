"""Provides the input of a loop's tasks: batches of a dataset, or tasks without data."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

from holdfast.engine.core.errors import InvariantError
from holdfast.engine.train.data.batch_loading import BatchSource
from holdfast.engine.train.data.batch_tasks import (
    WHOLE,
    BatchPart,
    LoadOptions,
    Source,
)
from holdfast.engine.train.data.quarantine import Quarantine
from holdfast.engine.train.data.random_streams import stream_seed
from holdfast.engine.train.data.read_plans import OrderPlan, StreamPlan
from holdfast.engine.train.data.sample_digest import (
    SAMPLES_COMPARED,
    Facts,
    describe_data,
    describe_sample,
)
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.verified_samples import Checks

# a job without a dataset has this many tasks; each counts as a sample of its own
TASKS_MAX = 1 << 40
SETTINGS = ("batch_size", "shuffle", "drop_last")  # the fields of a plan that come from the script


Plan = SamplePlan | OrderPlan | StreamPlan


class LoopData:
    """Is the data that a loop goes through: here without epochs, positions and samples.

    `part`: the part of each batch that this process of the worker reads.
    """

    #: The data decide where an epoch ends.
    has_epochs = False
    #: None: no record may be left out.
    quarantine: Quarantine | None = None

    def __init__(self, part: BatchPart = WHOLE) -> None:
        self.part = part
        #: The description of the data that all workers must share, on each start.
        self.facts: Facts = {}

    def begin(self, step: int) -> Plan:
        """Record that a loop over it begins at `step`; returns the plan from its first use."""
        raise NotImplementedError

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within it) of a step of the script; see has_epochs.

        Without epochs it is (0, steps since the data were used first).
        """
        raise NotImplementedError

    def epoch_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch. InvariantError without epochs."""
        raise InvariantError(f"{type(self).__name__} was asked how long its epochs are")

    def source(self, plan: Any) -> Source:
        """Return the source of the tasks' inputs."""
        raise NotImplementedError

    def check(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> str:
        """Check the samples that a script's step has used, by virtual rank. UserError.

        Returns the text for the ledger.
        """
        return ""

    def advance(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> None:
        """Advance past the samples that all tasks of that step have used, at its end."""

    def samples(self, step: int) -> dict[str, str]:
        """Return digests of a few samples, by descriptions, to compare them between workers."""
        return {}


AnyReadPlan = TypeVar("AnyReadPlan", OrderPlan, StreamPlan)


class ReadData(LoopData, Generic[AnyReadPlan]):
    """Is data that are read in order. `positions`: a part of the job's state."""

    def __init__(self, plan: AnyReadPlan, positions: list[Any], part: BatchPart) -> None:
        super().__init__(part)
        self.plan: AnyReadPlan = plan
        self.positions = positions
        self._first_step: int | None = None  # None: no loop has used it

    def begin(self, step: int) -> AnyReadPlan:
        """Record that a loop over it begins at `step`; returns the plan from its first use."""
        if self._first_step is None:
            self._first_step = step
            self.plan = dataclasses.replace(self.plan, first_step=step)
        if all(position[:2] == (0, 0) for position in self.positions):
            self.positions[:] = self.plan.start()
        return self.plan

    def advance(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> None:
        """Advance past the samples that a script's step has used, by virtual rank. UserError."""
        self.positions[:] = self.plan.position_after(
            self.positions, step, counts, digests, self._order_text()
        )

    def _order_text(self) -> str:
        """Return the ledger's text of the present order; "" if it has none."""
        return ""


class Batches(LoopData):
    """Cuts the samples of a dataset into steps.

    Made by `Job.batches`.

        data = job.batches(dataset, batch_size=16, num_workers=2)
        scheduler = CosineAnnealingLR(optimizer, T_max=20 * data.steps_per_epoch)
    """

    has_epochs = True

    def __init__(
        self,
        dataset: Any,
        options: LoadOptions,
        plan: SamplePlan,
        checks: Checks | None = None,
        quarantine: Quarantine | None = None,
        log: Callable[[str], None] = lambda text: None,
        part: BatchPart = WHOLE,
    ) -> None:
        super().__init__(part)
        self.dataset = dataset
        self.options = options
        self.plan = plan
        #: None: no loop has used it.
        self.first_step: int | None = None
        self.quarantine = quarantine
        self._checks = checks
        self._log = log

    def look(self) -> Batches:
        """Describe the dataset as it is now, and the settings of its batches; return this."""
        settings = {f"the dataset's {name}": str(getattr(self.plan, name)) for name in SETTINGS}
        self.facts = {"the dataset's length": str(self.plan.length), **settings}
        if not self._is_verified:
            seed = self.plan.seed
            self.facts |= describe_data(self.dataset, self.options.collate_fn, seed, 0)
        return self

    @property
    def _is_verified(self) -> bool:
        return self._checks is not None and bool(self._checks.index or self._checks.quarantines)

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps in which every sample is used once (but for a dropped tail)."""
        return self.plan.steps_per_epoch

    def begin(self, step: int) -> SamplePlan:
        """Record that a loop over it begins at `step`; returns the plan from its first use."""
        if self.first_step is None:
            self.first_step = step
        return dataclasses.replace(self.plan, first_step=self.first_step)

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within it) of a step of the script, once a loop has begun."""
        return divmod(step - (self.first_step or 0), self.plan.steps_per_epoch)

    def epoch_steps(self, epoch: int) -> int:
        """Return the number of steps of an epoch, which is the same for all."""
        return self.plan.steps_per_epoch

    def source(self, plan: SamplePlan) -> BatchSource:
        """Return the loader of the batches."""
        how = self.options, self._checks, self.quarantine, self._log
        return BatchSource(self.dataset, plan, *how, self.part)

    def samples(self, step: int) -> dict[str, str]:
        """Return digests of a few samples, chosen by the step; of none if each is verified."""
        found: dict[str, str] = {}
        if self._is_verified:
            return found
        for i in range(SAMPLES_COMPARED):
            index = stream_seed(self.plan.seed, step, i, "compared") % self.plan.length
            found[f"sample {index} of the dataset"] = describe_sample(
                self.dataset,
                self.options.collate_fn,
                index,
                seed=self.plan.seed,
                step=step,
                number=i,
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Names one task of a step for which the script makes its own batch.

    `step` and `vrank`, its step and virtual rank, key the global generators of Python, NumPy and
    torch: the random numbers do not depend on the worker that computes the task.

        for step in job.steps(until=10):
            for task in step:
                inputs = torch.randn(16, 8)  # the same for this task on any worker
                step.backward(model(inputs).square().mean())
            optimizer.step()
            optimizer.zero_grad()
    """

    step: int
    vrank: int


class NoDataset(LoopData):
    """Is the data of a loop whose script makes its batches by itself."""

    def __init__(self, virtual_ranks: int, seed: int) -> None:
        super().__init__()
        self._plan = SamplePlan(
            length=TASKS_MAX - TASKS_MAX % virtual_ranks,
            batch_size=1,
            virtual_ranks=virtual_ranks,
            seed=seed,
            shuffle=False,
        )

    def begin(self, step: int) -> SamplePlan:
        """Return the plan: every task is a sample, used once."""
        return self._plan

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (0, step): the script counts its steps over the whole job."""
        return 0, step

    def source(self, plan: SamplePlan) -> _TaskSource:
        """Return the source of the tasks."""
        return _TaskSource(plan)


class _TaskSource(Source):
    """Hands each task to the script unchanged."""

    plan: SamplePlan

    def __init__(self, plan: SamplePlan) -> None:
        self.plan, self.seed = plan, plan.seed

    def batch(self, step: int, vrank: int) -> Task:
        """Return the task."""
        return Task(step=step, vrank=vrank)

    def usage_of(self, step: int, vrank: int) -> tuple[int, int]:
        """Return 1, since the task counts as one sample, and the task's digest."""
        return self.plan.task_samples(step, vrank), self.plan.digest(step, vrank)

    def scale(self, step: int, vrank: int) -> float:
        """Return the weight of a task's mean in the step's."""
        return 1 / self.plan.virtual_ranks

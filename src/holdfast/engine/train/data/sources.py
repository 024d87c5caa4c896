"""Provides the input of a loop's tasks: batches of a dataset, or tasks without data."""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from torch.utils.data import (
    BatchSampler,
    DataLoader,
    IterableDataset,
    RandomSampler,
    SequentialSampler,
)

from holdfast.engine.core.errors import InvariantError, UserError
from holdfast.engine.train.data.batch_loading import BatchSource, LoadOptions, LoadPlan
from holdfast.engine.train.data.batch_parts import WHOLE, BatchPart, PartOfPlan
from holdfast.engine.train.data.data_facts import (
    SAMPLES_COMPARED,
    Facts,
    describe_data,
    print_sample,
)
from holdfast.engine.train.data.map_style import dataset_length
from holdfast.engine.train.data.order_plan import OrderPlan
from holdfast.engine.train.data.quarantine import Quarantine
from holdfast.engine.train.data.random_streams import stream_seed
from holdfast.engine.train.data.sampler_orders import check_sampler
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.shard_positions import StreamPlan
from holdfast.engine.train.data.verified_samples import Checks

# a job without a dataset has this many tasks; each counts as a sample of its own
TASKS_MAX = 1 << 40
SETTINGS = ("batch_size", "shuffle", "drop_last")  # the fields of a plan that come from the script


Plan = SamplePlan | OrderPlan | StreamPlan


class Source(Protocol):
    """Provides the inputs that a worker's tasks compute with."""

    @property
    def plan(self) -> Plan | LoadPlan: ...

    def follow(self, vranks: Sequence[int], from_step: int, until: int) -> None: ...

    def batch(self, step: int, vrank: int) -> Any: ...

    def load_again(self, step: int, vrank: int, *, in_data_worker: bool = False) -> Any:
        """Load the batch of a task once more; `in_data_worker`: there, if there are any."""
        ...

    def usage_of(self, step: int, vrank: int) -> tuple[int, int]:
        """Return how many samples a task uses, and their digest, after its batch was handed out."""
        ...

    def report_of(self, step: int, vrank: int) -> bytes:
        """Return a task's report of bad records, after its batch was handed out."""
        ...

    def scale(self, step: int, vrank: int) -> float | None:
        """Return the weight of a task's mean in the step's; None if each sample counts alike."""
        ...

    def close(self) -> None: ...


class LoopData(Protocol):
    """Is the data that a loop goes through."""

    @property
    def part(self) -> BatchPart:
        """Return which part of each batch this process of the worker reads."""
        ...

    @property
    def quarantine(self) -> Quarantine | None:
        """Return the quarantine of the dataset; None if no record may be left out."""
        ...

    @property
    def facts(self) -> Facts:
        """Return the description of the data that all workers must share, on each start."""
        ...

    @property
    def has_epochs(self) -> bool:
        """Return whether the data decide where an epoch ends."""
        ...

    def begin(self, step: int) -> Plan:
        """Record that a loop over it begins at `step`; returns the plan from its first use."""
        ...

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (epoch, step within it) of a step of the script; see has_epochs.

        Without epochs it is (0, steps since the data were used first).
        """
        ...

    def epoch_steps(self, epoch: int) -> int:
        """Return how many steps an epoch has."""
        ...

    def source(self, plan: Any) -> Source: ...

    def check(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> str:
        """Check the samples that a script's step has used, by virtual rank. UserError.

        Returns the text for the ledger.
        """
        ...

    def advance(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> None:
        """Advance past the samples that all tasks of that step have used, at its end."""
        ...

    def samples(self, step: int) -> dict[str, str]:
        """Return digests of a few samples, by descriptions, to compare them between workers."""
        ...


class Batches:
    """Cuts the samples of a dataset into steps; made by `Job.batches`."""

    has_epochs = True

    def __init__(
        self,
        dataset: Any,
        options: LoadOptions,
        plan: SamplePlan,
        checks: Checks | None = None,
        quarantine: Quarantine | None = None,
        say: Callable[[str], None] = lambda text: None,
        part: BatchPart = WHOLE,
    ) -> None:
        self.dataset = dataset
        self.options = options
        self.plan = plan
        self.first_step: int | None = None  # None: no loop has used it
        self.quarantine = quarantine
        self._checks = checks
        self._say = say
        self.part = part  # the part of each batch that this process of the worker reads
        self.facts: Facts = {}  # describe the data at the time of `look`

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
        """Return how many steps an epoch has: all have the same number."""
        return self.plan.steps_per_epoch

    def source(self, plan: SamplePlan) -> BatchSource:
        """Return the loader of the batches."""
        cut = plan if self.part.count == 1 else PartOfPlan(plan, self.part)
        return BatchSource(
            self.dataset, cut, self.options, self._checks, self.quarantine, self._say
        )

    def check(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> str:
        """Return no text for the ledger, since the plan decides which samples a step uses."""
        return ""

    def advance(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> None:
        """Do nothing, since the plan decides which samples a step uses."""

    def samples(self, step: int) -> dict[str, str]:
        """Return digests of a few samples, chosen by the step; of none if each is verified."""
        found: dict[str, str] = {}
        if self._is_verified:
            return found
        for i in range(SAMPLES_COMPARED):
            index = stream_seed(self.plan.seed, step, i, "compared") % self.plan.length
            found[f"sample {index} of the dataset"] = print_sample(
                self.dataset, self.options.collate_fn, index, (self.plan.seed, step, i)
            )
        return found


@dataclass(frozen=True, slots=True, kw_only=True)
class Task:
    """Names one task of a step for which the script makes its own batch.

    The task's numbers key the global generators of Python, NumPy and torch: the random numbers do
    not depend on the worker that computes the task.
    """

    step: int
    vrank: int


class NoDataset:
    """Is the data of a loop whose script makes its batches by itself."""

    has_epochs = False
    quarantine = None
    part = WHOLE

    def __init__(self, virtual_ranks: int, seed: int) -> None:
        self._plan = SamplePlan(
            length=TASKS_MAX - TASKS_MAX % virtual_ranks,
            batch_size=1,
            virtual_ranks=virtual_ranks,
            seed=seed,
            shuffle=False,
        )

    @property
    def facts(self) -> Facts:
        """Return no description, since the script makes its batches by itself."""
        return {}

    def begin(self, step: int) -> SamplePlan:
        """Return the plan: every task is a sample, used once."""
        return self._plan

    def epoch_of(self, step: int) -> tuple[int, int]:
        """Return (0, step): the script counts its steps over the whole job."""
        return 0, step

    def epoch_steps(self, epoch: int) -> int:
        """Raise InvariantError, since there are no epochs."""
        raise InvariantError("a loop without data was asked how long its epochs are")

    def source(self, plan: SamplePlan) -> _TaskSource:
        """Return the source of the tasks."""
        return _TaskSource(plan)

    def check(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> str:
        """Return no text for the ledger, since the plan decides which tasks a step has."""
        return ""

    def advance(self, step: int, counts: Sequence[int], digests: Sequence[int]) -> None:
        """Do nothing, since the plan decides which tasks a step has."""

    def samples(self, step: int) -> dict[str, str]:
        """Return no digests, since there is no dataset."""
        return {}


class _TaskSource:
    """Hands each task to the script unchanged."""

    def __init__(self, plan: SamplePlan) -> None:
        self.plan = plan

    def follow(self, vranks: Sequence[int], from_step: int, until: int) -> None:
        """Do nothing, since nothing is loaded ahead."""

    def batch(self, step: int, vrank: int) -> Task:
        """Return the task."""
        return Task(step=step, vrank=vrank)

    def load_again(self, step: int, vrank: int, *, in_data_worker: bool = False) -> Task:
        """Return the task."""
        return Task(step=step, vrank=vrank)

    def usage_of(self, step: int, vrank: int) -> tuple[int, int]:
        """Return 1, since the task counts as one sample, and the task's digest."""
        return self.plan.task_samples(step, vrank), self.plan.digest(step, vrank)

    def report_of(self, step: int, vrank: int) -> bytes:
        """Return b"", since there are no records to report."""
        return b""

    def scale(self, step: int, vrank: int) -> float:
        """Return the weight of a task's mean in the step's."""
        return 1 / self.plan.virtual_ranks

    def close(self) -> None:
        """Do nothing, since the source keeps no resources."""


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
    check_sampler(loader.batch_sampler)
    plain = type(loader.batch_sampler) is BatchSampler and loader.batch_size is not None
    shuffles = plain and _shuffles(loader)
    _tell_unused(loader)
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
    sampler = loader.sampler
    return (
        type(sampler) is RandomSampler
        and not sampler.replacement
        and sampler.num_samples == dataset_length(loader.dataset)
    )


def _tell_unused(loader: DataLoader[Any]) -> None:
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

"""Makes the data of a script's loops: batches of a dataset, of a sampler, or of a stream.

They are numbered in the order in which the script makes them; by these numbers the job's state
keeps their positions and the records that are left out.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from typing import Any

from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.ground.events import EventNoted, WorkerEvent
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.train.data.batch_tasks import WHOLE, BatchPart, LoadOptions
from holdfast.engine.train.data.datasets import dataset_length
from holdfast.engine.train.data.quarantine import Quarantine
from holdfast.engine.train.data.read_plans import OrderPlan, StreamPlan
from holdfast.engine.train.data.sampled_batches import SampledBatches, of_loader
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.sources import Batches
from holdfast.engine.train.data.streams import Stream, shards_of
from holdfast.engine.train.data.verified_samples import SampleReader, checks_of
from holdfast.engine.train.script.script_state import ScriptState
from holdfast.engine.train.shards.inner_group import InnerGroup


class ScriptData:
    """Makes the data of one script.

    `find_inner`: returns the connection of a worker's processes, if it has several.
    """

    def __init__(
        self,
        spec: JobSpec,
        seed: int,
        progress: ScriptState,
        post: Callable[[WorkerEvent], None],
        find_inner: Callable[[], InnerGroup | None],
    ) -> None:
        self._spec = spec
        self._seed = seed
        self._progress = progress
        self._post = post
        self._find_inner = find_inner
        self._datasets = 0  # datasets made so far, whose records may be quarantined
        self._streams = 0  # streams and samplers made so far

    def batches(
        self,
        dataset: Any,
        batch_size: int | None,
        *,
        shuffle: bool,
        drop_last: bool,
        index: str | os.PathLike[str] | None,
        mirrors: Sequence[Any],
        on_error: str,
        split: bool | DeviceMesh,
        loading: dict[str, Any],
    ) -> Batches | SampledBatches:
        """Return batches of a map-style dataset or of a DataLoader, as `Job.batches` describes."""
        part = self._part(split, on_error)
        if isinstance(dataset, DataLoader):
            if batch_size is not None or loading:
                raise UserError(
                    "job.batches(loader, ...): the DataLoader says how batches are made; give "
                    "nothing else"
                )
            found = of_loader(dataset)
            dataset, batch_size, options = found.dataset, found.batch_size, found.options
            if found.sampler is not None:
                if index is not None or mirrors or on_error != "raise":
                    raise UserError(
                        f"job.batches(loader) with a {type(found.sampler).__name__} takes neither "
                        "index=, mirrors= nor on_error=: verify what the dataset itself reads"
                    )
                return self._batches_of_sampler(dataset, found.sampler, options, part)
            shuffle, drop_last = found.shuffle, found.drop_last
        else:
            options = _options(dataset, loading)
        if batch_size is None:
            raise UserError(
                f"job.batches({type(dataset).__name__}) has no batch size: give batch_size=, the "
                "samples for each virtual rank in a step"
            )
        plan = SamplePlan(
            length=dataset_length(dataset),
            batch_size=batch_size,
            virtual_ranks=self._spec.virtual_ranks,
            seed=self._seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        checks = checks_of(self._spec, index, mirrors, on_error)
        SampleReader(dataset, plan.length, checks).check_first(type(dataset).__name__)
        quarantine = self._new_quarantine(plan.length) if checks.quarantines else None
        return Batches(
            dataset,
            options,
            plan,
            checks,
            quarantine,
            lambda text: self._post(EventNoted("data", text)),
            part,
        ).look()

    def stream(
        self,
        dataset: Any,
        batch_size: int,
        collate_fn: Callable[[list[Any]], Any] | None,
        split: bool | DeviceMesh,
    ) -> Stream:
        """Return batches of a stream, as `Job.stream` describes."""
        self._check_nothing_dropped("job.stream", "a stream")
        plan = StreamPlan(
            batch_size=batch_size, virtual_ranks=self._spec.virtual_ranks, seed=self._seed
        )
        number = self._next_stream()
        return Stream(
            shards_of(dataset),
            collate_fn or LoadOptions().collate_fn,
            plan,
            self._progress.places.streams.setdefault(number, plan.start()),
            self._progress.places.readers.setdefault(number, {}),
            lambda text: self._post(EventNoted("stream", text)),
            self._part(split),
        )

    def _part(self, split: bool | DeviceMesh, on_error: str = "raise") -> BatchPart:
        """Return which part of each batch this process trains on. UserError."""
        inner = self._find_inner()
        if inner is None or split is False:
            return WHOLE
        if inner.size > 1 and on_error == "quarantine":
            raise UserError(
                'on_error="quarantine" in a worker of several processes: each would leave out '
                "records of its own part; give split=False"
            )
        if split is True:
            return BatchPart(inner.shard, inner.size)
        return BatchPart(split.get_local_rank(), split.size())

    def _batches_of_sampler(
        self, dataset: Any, sampler: Iterable[Any], options: LoadOptions, part: BatchPart
    ) -> SampledBatches:
        """Return batches that a script's own sampler gives."""
        self._check_nothing_dropped("job.batches(loader)", "a sampler's order")
        number, progress = self._next_stream(), self._progress
        plan = OrderPlan(number=number, virtual_ranks=self._spec.virtual_ranks, seed=self._seed)
        positions = progress.places.orders.setdefault(number, plan.start())
        return SampledBatches(
            dataset, sampler, options, plan, positions, lambda: progress.steps, part
        ).look()

    def _check_nothing_dropped(self, call: str, what: str) -> None:
        if self._spec.backup().workers:
            raise UserError(
                f"{call} with --backup: dropped results of {what} would be lost; use "
                "job.batches(dataset, batch_size), or no backup workers"
            )

    def _next_stream(self) -> int:
        self._streams += 1
        return self._streams - 1

    def _new_quarantine(self, length: int) -> Quarantine:
        """Return the quarantine of the script's next dataset, which has `length` records."""
        self._datasets += 1
        records = self._progress.places.quarantined.setdefault(self._datasets, {})
        return Quarantine(self._datasets, length, records, self._spec.data.bad_samples_max)


def _options(dataset: Any, loading: dict[str, Any]) -> LoadOptions:
    try:
        return LoadOptions(**loading)
    except TypeError as error:
        raise UserError(f"job.batches({type(dataset).__name__}): {error}") from None

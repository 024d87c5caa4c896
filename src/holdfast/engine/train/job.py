"""Offers training to scripts: `join` and `Job`."""

from __future__ import annotations

import os
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import msgspec
import torch
from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.ground.events import EventNoted, StepKind
from holdfast.engine.train.checkpoint.local_tensors import check_split
from holdfast.engine.train.checkpoint.saved_state import load_saved
from holdfast.engine.train.checkpoint.state import PROTECTED_AS, to_plain
from holdfast.engine.train.compose import Control, compose_control, compose_progress, compose_worker
from holdfast.engine.train.data.batch_loading import LoadOptions
from holdfast.engine.train.data.batch_parts import WHOLE, BatchPart
from holdfast.engine.train.data.map_style import dataset_length
from holdfast.engine.train.data.order_plan import OrderPlan
from holdfast.engine.train.data.quarantine import Quarantine
from holdfast.engine.train.data.random_streams import enter_stream, seed_generators
from holdfast.engine.train.data.sampled_batches import SampledBatches
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.shard_positions import StreamPlan
from holdfast.engine.train.data.sources import Batches, LoopData, NoDataset, Source, Task, of_loader
from holdfast.engine.train.data.streams import Stream, shards_of
from holdfast.engine.train.data.verified_samples import SampleReader, checks_of
from holdfast.engine.train.host_memory import keep_freed_memory
from holdfast.engine.train.script.environment import WorkerEnvironment, take_channel
from holdfast.engine.train.script.epochs import Epoch, EpochWalk
from holdfast.engine.train.script.evaluation import Evaluation, suspend_training
from holdfast.engine.train.script.job_step import Step, end_step, is_begun
from holdfast.engine.train.script.job_values import Values
from holdfast.engine.train.script.loop_ends import EndsAtStep, EndsWithEpoch, LoopEnd
from holdfast.engine.train.script.rank_states import RankState
from holdfast.engine.train.script.script_thread import ScriptThread
from holdfast.engine.train.shards.inner_group import InnerGroup
from holdfast.engine.train.step.values import PROPOSAL

__all__ = ["Batches", "Epoch", "Job", "RankState", "Step", "Stream", "Task", "join"]

STEPS_MAX = 1 << 62  # more than any job takes

_jobs: list[Job] = []  # jobs that this process has joined; the end of its script ends their loops


def join(*, seed: int | None = None) -> Job:
    """Become a worker of the job that launched this process; alone, a job of one worker.

    Seeds Python's, NumPy's and torch's generators from the job's seed, so that every worker builds
    the same model. `seed` overrides the launcher's. Raises UserError on a broken environment.
    """
    environment = WorkerEnvironment.read(os.environ)
    keep_freed_memory(os.environ)
    job_seed = environment.spec.workers.seed if seed is None else seed
    seed_generators(job_seed)
    _jobs.append(Job(compose_control(environment, job_seed, take_channel(environment))))
    return _jobs[-1]


def join_once(*, seed: int | None = None) -> Job:
    """Return the job that this process has joined last; join one, with `seed`, if it has not."""
    return _jobs[-1] if _jobs else join(seed=seed)


def count_servers() -> int:
    """Return how many servers hold the tables of the job that was joined last; 0 without a job."""
    return _jobs[-1]._environment.spec.servers.count if _jobs else 0


def end_script() -> None:
    """End the loops that this process's script has left by `break`, since it is over. UserError."""
    for job in _jobs:
        job._end_open_loop()
        job._check_over()
        job._wait_for_others()


class Job:
    """Connects one worker's script with the whole job. Made by `join`, never directly."""

    def __init__(self, control: Control) -> None:
        self.seed = control.seed
        self._control = control
        self._environment = control.environment
        self._driver = control.driver
        self._protected: dict[str, Any] = {}
        self._progress = compose_progress(control)
        self._script: ScriptThread | None = None  # once there is something to train
        self._step: Step | None = None  # the step that the script is in, or has left by `break`
        self._asked = 0  # where the script wanted its last loop to end
        self._datasets = 0  # datasets made so far, whose records may be quarantined
        self._streams = 0  # streams and samplers that the script has made
        self._at_step_end: list[Callable[[Step], None]] = []

    # ------------------------------------------------------------ what the job is

    @property
    def virtual_ranks(self) -> int:
        """Return V, the number of shares into which every step falls for the life of the job."""
        return self._environment.spec.virtual_ranks

    @property
    def worker(self) -> int:
        """Return this worker's number; a restarted worker keeps it."""
        return self._environment.worker

    @property
    def is_leader(self) -> bool:
        """True in exactly one live process of the present view."""
        return self._driver.leads

    @property
    def run_dir(self) -> Path | None:
        """Return the run's directory; None without a launcher."""
        return self._environment.run_dir

    @property
    def values(self) -> Values:
        """Return the script's shared variables: numbers, strings, tuples, lists, dictionaries.

        They are a part of the job's state, as a model is, and must be the same on all workers.
        """
        return self._progress.values

    @property
    def scratch(self) -> dict[str, Any]:
        """Return a dictionary for values on which no result depends, for plots say.

        Each worker has its own; it is neither carried to others nor saved, and no guard looks at
        it.
        """
        return self._progress.scratch

    @property
    def stopped(self) -> bool:
        """Return whether a worker's script has called `stop`, so that loops end early."""
        return self._progress.stopped

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh of this worker's processes: one dimension, "shard", of size G.

        G is what `--procs-per-worker` says, 1 without it. Give it to `fully_shard`, or to
        `parallelize_module`; the gradients of each shard are summed over all workers.
        """
        if self._control.inner is None:
            self._control = replace(self._control, inner=InnerGroup(0, 1, HashStore()))
        assert self._control.inner is not None
        return self._control.inner.mesh

    # ------------------------------------------------------------ before the steps

    def protect(self, **objects: Any) -> None:
        """Name everything that makes up the job's state: models, optimizers, schedulers, scalers.

        Each must have `state_dict` and `load_state_dict`. Gradients of every nn.Module's parameters
        are reduced; rows of tables of `holdfast.tables` are updated as well. Call it once, before
        the first `steps`. Raises UserError.
        """
        if self._script is not None:
            raise UserError(
                "job.protect(...) came after the first steps, evaluate or agree: protect "
                "everything before"
            )
        for name, value in objects.items():
            if name == PROTECTED_AS:
                raise UserError(f"job.protect({name}=...): Holdfast uses that name; give another")
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(value, method, None)):
                    raise UserError(
                        f"job.protect({name}=...): a {type(value).__name__} has no {method}(); "
                        "give it one, or leave it out if it holds no state"
                    )
            self._protected[name] = value
            self._protected |= self._progress.row_updates.find(name, value)
        for name, value in self._protected.items():
            self._progress.row_updates.check(name, value)

    def batches(
        self,
        dataset: Any,
        batch_size: int | None = None,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        index: str | os.PathLike[str] | None = None,
        mirrors: Sequence[Any] = (),
        on_error: str = "raise",
        split: bool | DeviceMesh = True,
        **loading: Any,
    ) -> Batches | SampledBatches:
        """Return batches of a map-style dataset: `batch_size` samples per virtual rank and step.

        Every epoch is a permutation that depends on the job's seed only. Without `drop_last` an
        epoch's last step shares out the remaining samples, and gradients are weighted so that they
        stay the mean over the step's samples. `loading`: fields of LoadOptions. `dataset` may be a
        DataLoader, whose settings are then used; each virtual rank takes its sampler's next batch.

        `index`: a file that `holdfast data index` has written; each sample is compared with it. A
        sample that differs is read again, then from `mirrors`, other datasets of the same samples.
        `on_error`: "raise", or "quarantine" to have all workers leave out a bad record from then
        on. `split`: each process of a worker trains on an equal part of each batch, as FSDP needs;
        False: on all of it, as tensor parallelism needs; or the mesh whose processes take parts.
        """
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
            virtual_ranks=self.virtual_ranks,
            seed=self.seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        checks = checks_of(self._environment.spec, index, mirrors, on_error)
        SampleReader(dataset, plan.length, checks).check_first(type(dataset).__name__)
        quarantine = self._new_quarantine(plan.length) if checks.quarantines else None
        return Batches(
            dataset,
            options,
            plan,
            checks,
            quarantine,
            lambda text: self._driver.post(EventNoted("data", text)),
            part,
        ).look()

    def stream(
        self,
        dataset: Any,
        batch_size: int,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
        split: bool | DeviceMesh = True,
    ) -> Stream:
        """Return batches of a stream: `batch_size` samples of each shard, read in order.

        `dataset`: a function of (shard, shards) that returns the samples of one of them, or a
        dataset that is cut by `shard(num_shards, index)`, as those of Hugging Face. Each virtual
        rank reads a shard of its own, and starts again at its end. The positions in the shards are
        a part of the job's state; when a shard moves to another worker, that worker reads it from
        its beginning. `split`: as for `batches`; every process of a worker reads all samples.
        Raises UserError.
        """
        self._check_nothing_dropped("job.stream", "a stream")
        plan = StreamPlan(batch_size=batch_size, virtual_ranks=self.virtual_ranks, seed=self.seed)
        number = self._next_stream()
        return Stream(
            shards_of(dataset),
            collate_fn or LoadOptions().collate_fn,
            plan,
            self._progress.places.streams.setdefault(number, plan.start()),
            self._progress.places.readers.setdefault(number, {}),
            lambda text: self._driver.post(EventNoted("stream", text)),
            self._part(split),
        )

    def begin_at(self, step: int) -> None:
        """Begin a new job at this step, for a state that was trained for so long elsewhere.

        Data, epochs and random numbers go on from there. Call it before the first loop; a job that
        has already begun keeps its own step and gives it to this worker. Raises UserError.
        """
        if self._script is not None or step < 0:
            raise UserError(
                f"job.begin_at({step}): give 0 or more, before the first steps, evaluate or agree"
            )
        self._progress.steps = step

    def begin_from(self, store: str, step: int | None = None) -> int:
        """Begin a new job with the state that another job has saved; returns its number of steps.

        `store`: as its --store was; `step`: of the checkpoint, by default the newest. The two jobs
        may have different numbers of virtual ranks and of processes per worker, and must protect
        the same objects by the same names. job.values are taken over, too. Call it after `protect`,
        before the first loop; a job that has begun keeps its own state. Raises UserError.
        """
        if self._script is not None or not self._protected:
            raise UserError(
                f"job.begin_from({store!r}): call it after job.protect(...), before the first "
                "steps, evaluate or agree"
            )
        found = load_saved(store, step, self._protected)
        self.begin_at(found.steps)
        self.values.update(found.values)
        return found.steps

    def rank_state(self, name: str, make: Callable[[int], Any]) -> RankState:
        """Declare a state that each virtual rank has for itself: hidden states, environments.

        In the loop over a step's batches, `value` of the returned object is the state of the
        batch's virtual rank, as its last task has left it; set it, or change it in place.
        `make(virtual rank)` returns the first state: tensors, numbers, or a tree of them, or an
        object with `state_dict` and `load_state_dict`. Each worker keeps the states of all virtual
        ranks, as a part of the job's state; the changed ones travel with the step. Call it on all
        workers, once for each name. Raises UserError.
        """
        if self._environment.spec.workers.procs > 1:
            raise UserError(
                f"job.rank_state({name!r}, ...) with --procs-per-worker "
                f"{self._environment.spec.workers.procs}: the processes of one worker would leave "
                "different states; keep states of virtual ranks in workers of one process"
            )
        return self._progress.rank_states.declare(name, make, self.seed, self.virtual_ranks)

    def _part(self, split: bool | DeviceMesh, on_error: str = "raise") -> BatchPart:
        """Return which part of each batch this process trains on. UserError."""
        inner = self._control.inner
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
        plan = OrderPlan(number=number, virtual_ranks=self.virtual_ranks, seed=self.seed)
        positions = progress.places.orders.setdefault(number, plan.start())
        return SampledBatches(
            dataset, sampler, options, plan, positions, lambda: progress.steps, part
        ).look()

    def _check_nothing_dropped(self, call: str, what: str) -> None:
        if self._environment.spec.backup().workers:
            raise UserError(
                f"{call} with --backup: dropped results of {what} would be lost; use "
                "job.batches(dataset, batch_size), or no backup workers"
            )

    def _next_stream(self) -> int:
        self._streams += 1
        return self._streams - 1

    # ------------------------------------------------------------ steps

    def steps(
        self, data: Batches | SampledBatches | Stream | None = None, *, until: int
    ) -> Iterator[Step]:
        """Yield the job's steps from where it stands up to (not including) number `until`.

        Without `data` each step yields `Task`s, for which the script makes its own batches; the
        global random generators are keyed by them. The loop's end is a meeting point: the leader
        leaves it first; the others follow once the leader's script has ended or asked for steps
        again, so that one of them can take its place.
        """
        script = self._prepare_loop("job.steps")
        before = min(self._asked, script.begins_at)
        if until < before:
            raise UserError(
                f"job.steps(until={until}) after a loop that has ended at {before}: steps are "
                "counted over the whole job, so until must not go back"
            )
        self._asked = until
        loop = self._loop_data(data)
        yield from self._walk(script, loop, EndsAtStep(until))

    def epochs(
        self,
        data: Batches | SampledBatches | Stream | None = None,
        *,
        until: int,
        steps_per_epoch: int | None = None,
    ) -> Iterator[Epoch]:
        """Yield the epochs of `data` from the job's present one up to (not including) `until`.

        Each `epoch` has an `index`; `for step in epoch:` goes through its steps, as job.steps does.
        Calls that all workers make together (evaluate, agree) may stand before and after that loop.
        All epochs are one loop to the job: a worker that joins enters the present epoch and runs
        the lines before its steps; there it gets the same values that the others got.
        `steps_per_epoch`: for a stream, or without data. Epochs are counted from the first use of
        `data`; without data over the whole job. Raises UserError.
        """
        script = self._prepare_loop("job.epochs")
        loop = self._loop_data(data)
        ends = EndsWithEpoch(loop, until, steps_per_epoch)
        self._asked = STEPS_MAX
        steps = self._walk(script, loop, ends)
        yield from EpochWalk(script, steps, ends, self._at_step_end).epochs()

    def _prepare_loop(self, call: str) -> ScriptThread:
        """Return the script's thread, for another loop. UserError within a loop."""
        if self._script is not None and self._script.is_yielding:
            raise UserError(
                f"{call}(...) within the loop over other steps: end that loop first, by `break` "
                "or at its end, and keep no reference to what job.steps or job.epochs returned"
            )
        return self._find_script()

    def _loop_data(self, data: Batches | SampledBatches | Stream | None) -> LoopData:
        """Return the data that a loop goes through. UserError if processes cannot share it."""
        loop: LoopData = NoDataset(self.virtual_ranks, self.seed) if data is None else data
        if loop.part.count > 1:
            check_split(self._protected, loop.part.count)
        return loop

    def _walk(
        self, script: ScriptThread, data: LoopData, ends: LoopEnd
    ) -> Generator[Step, None, None]:
        """Yield the steps of one loop from where the job stands."""
        source: Source | None = None
        try:
            for index, plan in script.loop(data, ends):
                source = source or data.source(plan)
                self._step = Step(script, source, index, ends)
                enter_stream(self.seed, index, self.virtual_ranks, "step")
                yield self._step
                end_step(self._step, self._at_step_end)
            self._step = None
        finally:
            if source is not None:
                source.close()

    def on_step_end(self, fn: Callable[[Step], None]) -> None:
        """Have `fn(step)` called at the end of each step on one worker only, for loggers.

        It is called after the body of the loop, with `step.index`, `step.loss` and the script's
        `step.metrics`. It is never called twice for one step, even on different workers; it may not
        be called for a step in which the leader is lost. Steps that are repeated from a checkpoint
        are called again. Call this on all workers, before the loops. `fn` must not call functions
        for all workers (evaluate, agree), nor change protected objects.
        """
        self._at_step_end.append(fn)

    def stop(self) -> None:
        """End the loops of all workers after the next step: for early stopping, or a time limit.

        One worker's call is enough. Later loops have no steps. It does nothing where steps are
        computed again (`holdfast replay`), since a script may stop for a reason outside the job.
        """
        if not self._environment.replays:
            (self._script or self._find_script()).stop()

    # ------------------------------------------------------------ what workers do together

    def agree(self, value: Any) -> Any:
        """Return the leader's `value`, on all workers: a time, a choice, a number from outside.

        All workers must call it, at the same place of the script. The value is made of numbers,
        strings, lists and dictionaries, and is recorded in the ledger. Raises UserError.
        """
        proposal = msgspec.msgpack.encode(to_plain(value, "job.agree(...)'s value"))

        def tell(script: ScriptThread) -> bytes:
            script.open(StepKind.VALUES, proposal=proposal, act="calls job.agree")
            for task in script.tasks():
                script.runner.tell(task, None)
            return script.values_of_all()[PROPOSAL]

        return msgspec.msgpack.decode(self._tell_all(tell))

    def evaluate(
        self,
        fn: Callable[[Any], Any],
        data: Any,
        batch_size: int | None = None,
        *,
        collate_fn: Callable[[list[Any]], Any] | None = None,
    ) -> Any:
        """Evaluate a dataset, shared over all workers; returns the same exact mean on all of them.

        `fn` gets a batch and returns a number (the mean over the batch), a pair (sum, weight), or a
        dictionary of these; it runs without gradients, the protected modules in evaluation mode.
        `data`: a map-style dataset with `batch_size`, or a DataLoader of all its samples, whose
        order and worker processes do not matter. All workers must call it, at the same place of the
        script. Raises UserError.
        """
        if isinstance(data, DataLoader):
            loader = of_loader(data)
            if loader.sampler is not None:
                raise UserError(
                    "job.evaluate(fn, loader): this DataLoader has a sampler of its own; give one "
                    "of all samples of a dataset (torch.utils.data.Subset makes one of a part)"
                )
            data, collate_fn = loader.dataset, collate_fn or loader.options.collate_fn
            batch_size = batch_size or loader.batch_size
        if batch_size is None or batch_size < 1:
            raise UserError(
                f"job.evaluate(fn, dataset) with batch_size={batch_size}: give 1 or more samples"
            )
        evaluation = Evaluation(
            fn=fn,
            dataset=data,
            length=dataset_length(data),
            batch_size=batch_size,
            collate_fn=collate_fn or LoadOptions().collate_fn,
            virtual_ranks=self.virtual_ranks,
            seed=self.seed,
            worker=self.worker,
        )
        modules = [each for each in self._protected.values() if isinstance(each, torch.nn.Module)]

        def tell(script: ScriptThread) -> bytes:
            step = script.open(StepKind.VALUES, act=evaluation.act)
            with suspend_training(modules):
                facts = evaluation.describe(step)
                for task in script.tasks():
                    script.runner.begin_values()
                    script.runner.tell(task, evaluation.share(step, task.vrank, facts))
            enter_stream(self.seed, step, self.virtual_ranks, "evaluated")
            return msgspec.msgpack.encode(evaluation.mean(script.values_of_all()))

        return msgspec.msgpack.decode(self._tell_all(tell))

    def _new_quarantine(self, length: int) -> Quarantine:
        """Return the quarantine of the script's next dataset, which has `length` records."""
        self._datasets += 1
        records = self._progress.places.quarantined.setdefault(self._datasets, {})
        most = self._environment.spec.data.bad_samples_max
        return Quarantine(self._datasets, length, records, most)

    def _end_open_loop(self) -> None:
        """End a loop that the script has left by `break`. UserError if its step is not complete."""
        step, script = self._step, self._script
        if step is not None and script is not None and script.in_loop:
            self._step = None
            if is_begun(step) or not script.epoch_start.is_above:
                end_step(step, self._at_step_end)
                script.end_turn()
            script.epoch_start.leave()
            script.leave_loop()

    def _check_over(self) -> None:
        """Raise UserError if the script has ended within an evaluation or an agreement."""
        if self._script is not None and self._script.in_loop:
            raise UserError(
                "the script ended within job.evaluate(...) or job.agree(...): let it return first"
            )

    def _wait_for_others(self) -> None:
        """Wait until the others can do without this worker, whose script is over."""
        if self._script is not None:
            self._script.end_script()

    def _tell_all(self, tell: Callable[[ScriptThread], bytes]) -> bytes:
        """Have all workers tell each other something: within a step, or in a loop of its own."""
        if self._script is not None and self._script.is_yielding:
            script = self._script
            return script.epoch_start.tell(lambda: tell(script))
        script = self._find_script()
        return script.exchange_once(NoDataset(self.virtual_ranks, self.seed), lambda: tell(script))

    def _find_script(self) -> ScriptThread:
        """Return the script's thread, in no loop that is over."""
        if not self._protected:
            raise UserError(
                "nothing is protected: call job.protect(model=...) before anything else"
            )
        if self._script is None:
            self._script = compose_worker(self._control, self._protected, self._progress)
        self._end_open_loop()
        return self._script


def _options(dataset: Any, loading: dict[str, Any]) -> LoadOptions:
    try:
        return LoadOptions(**loading)
    except TypeError as error:
        raise UserError(f"job.batches({type(dataset).__name__}): {error}") from None

"""Offers training to scripts: `join` and `Job`."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from torch.distributed import HashStore
from torch.distributed.device_mesh import DeviceMesh
from torch.utils.data import DataLoader

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.checkpoint.state import PROTECTED_AS
from holdfast.engine.train.compose import Control, compose_control, compose_progress, compose_worker
from holdfast.engine.train.data.batch_tasks import LoadOptions
from holdfast.engine.train.data.datasets import dataset_length
from holdfast.engine.train.data.random_streams import seed_generators
from holdfast.engine.train.data.sampled_batches import SampledBatches, of_loader
from holdfast.engine.train.data.sources import Batches, Task
from holdfast.engine.train.data.streams import Stream
from holdfast.engine.train.process_settings import keep_freed_memory
from holdfast.engine.train.script.environment import WorkerEnvironment, take_channel
from holdfast.engine.train.script.job_step import Epoch, Step
from holdfast.engine.train.script.loops import Evaluation, Loops
from holdfast.engine.train.script.rank_states import RankState
from holdfast.engine.train.script.script_data import ScriptData
from holdfast.engine.train.script.script_state import Values
from holdfast.engine.train.script.script_thread import ScriptThread
from holdfast.engine.train.shards.inner_group import InnerGroup
from holdfast.engine.train.state.restorer import load_saved

__all__ = ["Batches", "Epoch", "Job", "RankState", "Step", "Stream", "Task", "join"]

_jobs: list[Job] = []  # jobs that this process has joined; the end of its script ends their loops


def join(*, seed: int | None = None) -> Job:
    """Become a worker of the job that launched this process; alone, a job of one worker.

    Seeds Python's, NumPy's and torch's generators from the job's seed, so that every worker builds
    the same model. `seed` overrides the launcher's. Raises UserError on a broken environment,
    and in a worker that has joined its job already.

        job = holdfast.join()
        model = torch.nn.Linear(8, 4)  # every worker makes the same one
    """
    environment = WorkerEnvironment.read(os.environ)
    if _jobs and environment.run_dir is not None:
        raise UserError(
            "holdfast.join() was called a second time: a worker takes part in one job, so call it "
            "once, and start one run for each job (for each one of Hydra's --multirun, too)"
        )
    keep_freed_memory(os.environ)
    job_seed = environment.spec.workers.seed if seed is None else seed
    seed_generators(job_seed)
    _jobs.append(Job(compose_control(environment, job_seed, take_channel(environment))))
    return _jobs[-1]


def join_once(*, seed: int | None = None) -> Job:
    """Return the job that this process has joined last; join one, with `seed`, if it has not."""
    return _jobs[-1] if _jobs else join(seed=seed)


def count_servers(service: str) -> int:
    """Return the number of a hosted service's servers in the job that was joined last, or 0."""
    found = _jobs[-1]._environment.spec.servers if _jobs else None
    return found.count if found is not None and found.service == service else 0


def end_script() -> None:
    """End the loops that this process's script, which is over, has left by `break`. UserError."""
    for job in _jobs:
        job._loops.end_open_loop()
        job._loops.check_over()
        job._loops.wait_for_others()


def plain_batches(job: Job, loader: DataLoader[Any]) -> Batches:
    """Return the job's batches of a loader; UserError for a sampler, whose epochs have no length.

    A loop of the script's own, over `job.steps`, takes any sampler.
    """
    data = job.batches(loader)
    if not isinstance(data, Batches):
        raise UserError(
            f"this DataLoader draws samples by a {type(loader.sampler).__name__}: give one with "
            "shuffle=True or shuffle=False, or write the loop with job.steps"
        )
    return data


class JobFacts:
    """Knows a job and this worker's part in it."""

    def __init__(self, control: Control) -> None:
        self.seed = control.seed
        self._control = control
        self._environment = control.environment
        self._driver = control.driver
        self._progress = compose_progress(control)

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
        """Return a dictionary for values on which no result depends, such as plots.

        Each worker has its own; it is neither carried to other workers nor saved, and no guard
        looks at it.
        """
        return self._progress.scratch

    @property
    def stopped(self) -> bool:
        """Return whether a worker's script has called `stop`, so that loops end early."""
        return self._progress.stopped

    @property
    def mesh(self) -> DeviceMesh:
        """Return the mesh of this worker's processes: one dimension, "shard", of size G.

        G is the value of `--procs-per-worker`, 1 without it. Give it to `fully_shard`, or to
        `parallelize_module`; the gradients of each shard are summed over all workers.
        """
        if self._control.inner is None:
            self._control = replace(self._control, inner=InnerGroup(0, 1, HashStore()))
        assert self._control.inner is not None
        return self._control.inner.mesh


class Job(JobFacts):
    """Connects one worker's script with the whole job. Made by `join`, never directly.

    `seed`: the job's.

        job = holdfast.join()
        job.protect(model=model, optimizer=optimizer, scheduler=scheduler)
        data = job.batches(dataset, batch_size=16)
        for epoch in job.epochs(data, until=2):
            for step in epoch:
                for inputs, targets in step:
                    step.backward(loss_fn(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
            score = job.evaluate(lambda batch: loss_fn(model(batch[0]), batch[1]), dataset, 64)
            if job.is_leader:
                print(epoch.index, score)
    """

    def __init__(self, control: Control) -> None:
        super().__init__(control)
        spec, driver = control.environment.spec, control.driver
        self._protected: dict[str, Any] = {}
        self._loops = Loops(self._compose, self._protected, spec.virtual_ranks, self.seed)
        self._data = ScriptData(
            spec, self.seed, self._progress, driver.post, lambda: self._control.inner
        )

    def _compose(self) -> ScriptThread:
        return compose_worker(self._control, self._protected, self._progress)

    # ------------------------------------------------------------ before the steps

    def protect(self, **objects: Any) -> None:
        """Name everything that makes up the job's state: models, optimizers, schedulers, scalers.

        Each must have `state_dict` and `load_state_dict`. Gradients of every nn.Module's parameters
        are reduced; rows of tables of `holdfast.tables` are updated as well. Call it once, before
        the first `steps`. `objects`: their names are those in checkpoints. Raises UserError.
        """
        if self._loops.script is not None:
            raise UserError(
                "job.protect(...) came after the first steps, evaluate or agree: protect "
                "everything before"
            )
        for name, value in objects.items():
            if name == PROTECTED_AS:
                raise UserError(f"job.protect({name}=...): Holdfast uses that name; give another")
            if isinstance(value, DataLoader):
                raise UserError(
                    f"job.protect({name}=...): leave the {type(value).__name__} out, and give it "
                    "to job.batches: the place in the data is a part of the job's state already"
                )
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

        With `shuffle` every epoch is a permutation that depends on the job's seed only. Without
        `drop_last` an epoch's last step shares out the remaining samples, and gradients are
        weighted so that they stay the mean over the step's samples. `loading`: `num_workers`,
        `collate_fn`, `pin_memory`, `prefetch_factor`, `multiprocessing_context`, as for a
        DataLoader. `dataset` may be a DataLoader, whose settings are then used; each virtual rank
        takes its sampler's next batch. Raises UserError.

        `index`: a file that `holdfast data index` has written; each sample is compared with it. A
        sample that differs is read again, then from `mirrors`, other datasets of the same samples.
        `on_error`: "raise", or "quarantine" to have all workers leave out a bad record from then
        on. `split`: each process of a worker trains on an equal part of each batch, as FSDP needs;
        False: on all of it, as tensor parallelism needs; or the mesh whose processes take parts.
        """
        return self._data.batches(
            dataset,
            batch_size,
            shuffle=shuffle,
            drop_last=drop_last,
            index=index,
            mirrors=mirrors,
            on_error=on_error,
            split=split,
            loading=loading,
        )

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
        its beginning. `collate_fn`: as for a DataLoader. `split`: as for `batches`; every process
        of a worker reads all samples. Raises UserError.

            numbers = job.stream(lambda shard, shards: range(shard, 1000, shards), batch_size=4)
        """
        return self._data.stream(dataset, batch_size, collate_fn, split)

    def begin_at(self, step: int) -> None:
        """Begin a new job at this step, for a state that was trained for so long elsewhere.

        Data, epochs and random numbers continue from there. Call it before the first loop; a job
        that has already begun keeps its own step and gives it to this worker. Raises UserError.

            job.begin_at(5000)
        """
        if self._loops.script is not None or step < 0:
            raise UserError(
                f"job.begin_at({step}): give 0 or more, before the first steps, evaluate or agree"
            )
        self._progress.steps = step

    def begin_from(self, store: str, step: int | None = None) -> int:
        """Begin a new job with the state that another job has saved; returns its number of steps.

        `store`: as its --store was; `step`: of the checkpoint, by default the newest. The two jobs
        may have different numbers of virtual ranks and of processes per worker, and must protect
        the same objects by the same names. job.values are taken over, too. Call it after `protect`,
        before the first loop; a job that has begun keeps its own state. Raises UserError, and
        WorldError if the store cannot be read.
        """
        if self._loops.script is not None or not self._protected:
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

    # ------------------------------------------------------------ steps

    def steps(
        self, data: Batches | SampledBatches | Stream | None = None, *, until: int
    ) -> Iterator[Step]:
        """Yield the job's steps from where it stands up to (not including) number `until`.

        Without `data` each step yields `Task`s, for which the script makes its own batches; the
        global random generators are keyed by them. The loop's end is a meeting point: the leader
        leaves it first; the other workers follow once the leader's script has ended or asked for
        steps again, so that one of them can take its place. Raises UserError.
        """
        return self._loops.steps(data, until)

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
        the lines before its steps; there it gets the same values that the other workers got.
        `steps_per_epoch`: for a stream, or without data. Epochs are counted from the first use of
        `data`; without data over the whole job. Raises UserError.
        """
        return self._loops.epochs(data, until, steps_per_epoch)

    def on_step_end(self, fn: Callable[[Step], None]) -> None:
        """Call `fn(step)` at the end of each step on one worker only, for loggers.

        It is called after the body of the loop, with `step.index`, `step.loss` and the script's
        `step.metrics`. It is never called twice for one step, even on different workers; it may not
        be called for a step that is under way when the leader is lost. Steps that are repeated from
        a checkpoint are called again. Call this on all workers, before the loops. `fn` must not
        call functions for all workers (evaluate, agree), nor change protected objects.

            job.on_step_end(lambda step: print(step.index, step.loss))
        """
        self._loops.at_step_end.append(fn)

    def stop(self) -> None:
        """End the loops of all workers after the next step: for early stopping, or a time limit.

        One worker's call is enough. Later loops have no steps. It has no effect where steps are
        computed again (`holdfast replay`), because a script may stop for a reason outside the job.

            if time.time() > ends_at:
                job.stop()
        """
        if not self._environment.replays:
            (self._loops.script or self._loops.find_script()).steps.stop()

    # ------------------------------------------------------------ what workers do together

    def agree(self, value: Any) -> Any:
        """Return the leader's `value`, on all workers: a time, a choice, a number from outside.

        All workers must call it, at the same place of the script. The value is made of numbers,
        strings, lists and dictionaries, and is recorded in the ledger. Raises UserError.

            began = job.agree(time.time())
        """
        return self._loops.agree(value)

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
        order and worker processes do not matter; its `collate_fn` is used unless another is given.
        All workers must call it, at the same place of the script. Raises UserError.
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
        return self._loops.evaluate(evaluation)

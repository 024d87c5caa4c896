"""Offers training to scripts: `join`, `Job` and `Step`.

The script's thread lives here. It computes tasks, waits for what the engine and the machine decide,
and never takes part in the exchange itself.
"""

from __future__ import annotations

import dataclasses
import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.core.errors import UserError
from holdfast.core.step import effects as ef
from holdfast.train.compose import Control, compose_control, compose_worker
from holdfast.train.data.batch_loading import BatchSource, LoadOptions, dataset_length
from holdfast.train.data.random_streams import enter_stream
from holdfast.train.data.sampling import SamplePlan
from holdfast.train.environment import WorkerEnvironment, take_channel
from holdfast.train.host_memory import keep_freed_memory
from holdfast.train.script_thread import ScriptThread
from holdfast.train.step.speculative import FinishedTask


def join(*, seed: int | None = None) -> Job:
    """Become a worker of the job that launched this process; alone, a job of one worker.

    Seeds Python's, NumPy's and torch's generators from the job's seed, so that every worker builds
    the same model. `seed` overrides the launcher's. Raises UserError on a broken environment.
    """
    environment = WorkerEnvironment.read(os.environ)
    keep_freed_memory(os.environ)
    job_seed = environment.spec.workers.seed if seed is None else seed
    random.seed(job_seed)
    np.random.seed(job_seed % 2**32)
    torch.manual_seed(job_seed)
    return Job(compose_control(environment, job_seed, take_channel(environment)))


class Batches:
    """Holds a dataset and the way its samples fall into steps; made by `Job.batches`."""

    def __init__(
        self, dataset: Any, options: LoadOptions, plan: SamplePlan, first_step: int | None = None
    ) -> None:
        self.dataset = dataset
        self.options = options
        self.plan = plan
        self.first_step = first_step

    @property
    def steps_per_epoch(self) -> int:
        """Return the steps in which every sample is used once (but for a dropped tail)."""
        return self.plan.steps_per_epoch


class Job:
    """Connects one worker's script with the whole job. Made by `join`, never directly."""

    def __init__(self, control: Control) -> None:
        self.seed = control.seed
        self._control = control
        self._environment = control.environment
        self._driver = control.driver
        self._protected: dict[str, Any] = {}
        self._script: ScriptThread | None = None  # once there is something to train
        self._loops_until = 0  # where the newest loop of this script ends

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
        """True on exactly one live worker of the present view."""
        return self._driver.leads

    @property
    def run_dir(self) -> Path | None:
        """Return the run's directory; None without a launcher."""
        return self._environment.run_dir

    def protect(self, **objects: Any) -> None:
        """Name everything that makes up the job's state: models, optimizers, schedulers, scalers.

        Each must have `state_dict` and `load_state_dict`. Gradients of every nn.Module's parameters
        are reduced. Call it once, before the first `steps`. Raises UserError.
        """
        if self._script is not None:
            raise UserError("job.protect(...) came after job.steps(...): protect everything first")
        for name, value in objects.items():
            for method in ("state_dict", "load_state_dict"):
                if not callable(getattr(value, method, None)):
                    raise UserError(
                        f"job.protect({name}=...): a {type(value).__name__} has no {method}(); "
                        "give it one, or leave it out if it holds no state"
                    )
            self._protected[name] = value

    def batches(
        self,
        dataset: Any,
        batch_size: int,
        *,
        shuffle: bool = True,
        drop_last: bool = False,
        **loading: Any,
    ) -> Batches:
        """Batches of a map-style dataset: `batch_size` samples for each virtual rank and step.

        Every epoch is a permutation that depends on the job's seed only. Without `drop_last` an
        epoch's last step shares out what remains, and gradients are weighted so that they stay the
        mean over the step's samples. `loading`: fields of LoadOptions (num_workers, collate_fn,
        pin_memory, prefetch_factor, ...). Raises UserError.
        """
        try:
            options = LoadOptions(**loading)
        except TypeError as error:
            raise UserError(f"job.batches({type(dataset).__name__}): {error}") from None
        plan = SamplePlan(
            length=dataset_length(dataset),
            batch_size=batch_size,
            virtual_ranks=self.virtual_ranks,
            seed=self.seed,
            shuffle=shuffle,
            drop_last=drop_last,
        )
        return Batches(dataset, options, plan)

    def steps(self, data: Batches, until: int) -> Iterator[Step]:
        """Yield the job's steps from where it stands up to (not including) number `until`.

        The loop's end is a meeting point: the leader leaves it first; the others follow once the
        leader's script has ended or asked for steps again, so that one of them can take its place.
        """
        if not self._protected:
            raise UserError("nothing is protected: call job.protect(model=...) before job.steps")
        if until < self._loops_until:
            raise UserError(
                f"job.steps(until={until}) after a loop until {self._loops_until}: steps are "
                "counted over the whole job, so until must not go back"
            )
        if self._script is None:
            self._script = compose_worker(self._control, self._protected)
        if data.first_step is None:
            data.first_step = self._loops_until
        self._loops_until = until
        plan = dataclasses.replace(data.plan, first_step=data.first_step)
        source = BatchSource(data.dataset, plan, data.options)
        try:
            for index in self._script.loop(plan, until):
                step = Step(self._script, source, index, until)
                yield step
                if not step.complete:
                    raise UserError(f"step {index} was left early: iterate over all its batches")
        finally:
            source.close()


class Step:
    """Runs one step of the job in its script: iterate over it, then use `.grad` and `loss`."""

    def __init__(self, script: ScriptThread, source: BatchSource, index: int, until: int) -> None:
        self.index = index
        self.epoch, self.step_in_epoch = source.plan.epoch_of(index)
        self.loss = float("nan")  # after the batches: mean over the step's samples, all workers
        self.complete = False
        self._script = script
        self._source = source
        self._until = until  # where the loop ends
        self._scale = 0.0
        self._owed: int | None = None  # the virtual rank whose backward has not been called yet
        self._task_loss = 0.0

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches; there are more if another worker fails in this step."""
        for task in self._script.tasks(self._source, self._until):
            yield from self._task(task)
        self.loss = self._script.finish(self.index)
        self.complete = True

    def backward(self, loss: torch.Tensor, scaler: torch.amp.GradScaler | None = None) -> None:
        """Compute this batch's share of the gradient; once for each batch.

        `loss`: a scalar, the mean over the batch. `scaler`: scale it by this GradScaler first.
        Raises UserError when called out of turn.
        """
        if self._owed is None:
            raise UserError("step.backward(loss) was called without a new batch: once per batch")
        if loss.numel() != 1:
            raise UserError(
                f"step.backward needs a scalar loss, not {list(loss.shape)}: use mean()"
            )
        self._owed = None
        share = loss if self._scale == 1.0 else loss * self._scale
        (scaler.scale(share) if scaler is not None else share).backward()
        self._task_loss = float(loss.detach())

    def _task(self, task: ef.Compute) -> Iterator[Any]:
        plan, runner, vrank = self._source.plan, self._script.runner, task.vrank
        count = plan.task_samples(self.index, vrank)
        self._task_loss = 0.0
        runner.begin(task)
        if count:
            self._scale = plan.weight(self.index, vrank) / plan.virtual_ranks
            self._owed = vrank
            batch = self._source.batch(self.index, vrank)
            enter_stream(plan.seed, self.index, vrank, "model")
            yield batch
            if self._owed is not None:
                raise UserError("a batch had no step.backward(loss): call it once for each one")
        digest = plan.digest(self.index, vrank)
        runner.end(task, FinishedTask(loss=self._task_loss, count=count, digest=digest))

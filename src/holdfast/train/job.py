"""The public face of training: `join`, `Job` and `Step`.

The script's thread lives here. It computes tasks, waits for what the engine and the machine decide,
and never takes part in the exchange itself.
"""

from __future__ import annotations

import dataclasses
import os
import random
import socket
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch

from holdfast.core import tree
from holdfast.core.errors import UserError
from holdfast.core.step import worker as machine
from holdfast.core.step.audit import Audit, Classes, plan
from holdfast.core.step.save_interval import Pace
from holdfast.core.step.speculation import Patience, worth_copying
from holdfast.core.step.trust import Trust
from holdfast.core.types import View, ViewNumber
from holdfast.store.checkpoints import Checkpoints
from holdfast.store.open import open_storage
from holdfast.train.agent_link import AgentLink, SoloLink
from holdfast.train.checkpoint.restorer import Restorer
from holdfast.train.checkpoint.saver import Saver, say
from holdfast.train.data.batch_loading import BatchSource, LoadOptions, dataset_length
from holdfast.train.data.random_streams import enter_stream
from holdfast.train.data.sampling import SamplePlan
from holdfast.train.driver import Driver
from holdfast.train.environment import WorkerEnvironment, take_channel
from holdfast.train.ledger_recorder import Accounts
from holdfast.train.step.buckets import Gradients, Role
from holdfast.train.step.clock import TaskClock
from holdfast.train.step.copies import Done
from holdfast.train.step.engine import Engine
from holdfast.train.step.fingerprints import Fingerprints
from holdfast.train.step.probe import current
from holdfast.train.step.reduction import Prints
from holdfast.train.step.step_state import StepState
from holdfast.train.step.step_table import Buffers, StepTable
from holdfast.train.transport.gloo import GlooDevice, GlooTransport
from holdfast.train.transport.nccl import NcclTransport
from holdfast.train.transport.seam import Transport

SAVE_S_MAX = 600.0  # how long the end of a loop waits for a checkpoint under way


def join(*, seed: int | None = None) -> Job:
    """Become a worker of the job that launched this process; alone, a job of one worker.

    Seeds Python's, NumPy's and torch's generators from the job's seed, so that every worker builds
    the same model. `seed` overrides the launcher's. Raises UserError on a broken environment.
    """
    environment = WorkerEnvironment.read(os.environ)
    job_seed = environment.spec.workers.seed if seed is None else seed
    random.seed(job_seed)
    np.random.seed(job_seed % 2**32)
    torch.manual_seed(job_seed)
    fd = take_channel(environment)
    link: AgentLink | SoloLink
    if fd is None:
        link = SoloLink(environment.worker, environment.spec.virtual_ranks)
    else:
        link = AgentLink(socket.socket(fileno=fd), environment.worker)
    copies = 0.0 if environment.spec.backup().workers else environment.spec.copies
    patience = Patience(copies=copies)
    driver = Driver(environment.worker, environment.incarnation, link, patience)
    job = Job(environment, job_seed, driver, link)
    if isinstance(link, AgentLink):
        link.start(driver)
    return job


class Batches:
    """A dataset and the way its samples fall into steps; made by `Job.batches`."""

    def __init__(
        self, dataset: Any, options: LoadOptions, plan: SamplePlan, first_step: int | None = None
    ) -> None:
        self.dataset = dataset
        self.options = options
        self.plan = plan
        self.first_step = first_step

    @property
    def steps_per_epoch(self) -> int:
        """Steps in which every sample is used once (but for a dropped tail)."""
        return self.plan.steps_per_epoch


class Job:
    """One worker's handle on the whole job. Made by `join`, never directly."""

    def __init__(
        self,
        environment: WorkerEnvironment,
        seed: int,
        driver: Driver,
        link: AgentLink | SoloLink,
    ) -> None:
        self.seed = seed
        self._environment = environment
        self._driver = driver
        self._link = link
        self._protected: dict[str, Any] = {}
        self._work: _Work | None = None
        self._loops_until = 0  # where the newest loop of this script ends

    @property
    def virtual_ranks(self) -> int:
        """V: into how many fixed shares every step falls, for the life of the job."""
        return self._environment.spec.virtual_ranks

    @property
    def worker(self) -> int:
        """This worker's number; a restarted worker keeps it."""
        return self._environment.worker

    @property
    def is_leader(self) -> bool:
        """True on exactly one live worker of the present view."""
        return self._driver.leads

    @property
    def run_dir(self) -> Path | None:
        """The run's directory; None without a launcher."""
        return self._environment.run_dir

    def protect(self, **objects: Any) -> None:
        """Name everything that makes up the job's state: models, optimizers, schedulers, scalers.

        Each must have `state_dict` and `load_state_dict`. Gradients of every nn.Module's parameters
        are reduced. Call it once, before the first `steps`. Raises UserError.
        """
        if self._work is not None:
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
        """The job's steps from where it stands up to (not including) number `until`.

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
        if self._work is None:
            self._work = _Work(self)
            here = GlooDevice(self._environment.host, self._environment.peer_key)
            self._work.start(self._link, here)
        if data.first_step is None:
            data.first_step = self._loops_until
        self._loops_until = until
        yield from self._work.loop(data, until)


class Step:
    """One step of the job as its script sees it: iterate over it, then use `.grad` and `loss`."""

    def __init__(self, work: _Work, source: BatchSource, index: int) -> None:
        self.index = index
        self.epoch, self.step_in_epoch = source.plan.epoch_of(index)
        self.loss = float("nan")  # after the batches: mean over the step's samples, all workers
        self.complete = False
        self._work = work
        self._source = source
        self._scale = 0.0
        self._owed: int | None = None  # the virtual rank whose backward has not been called yet
        self._task_loss = 0.0

    def __iter__(self) -> Iterator[Any]:
        """This worker's batches. There are more after another worker has failed in this step."""
        while (task := self._work.next_task(self.index)) is not None:
            yield from self._task(*task)
        self._work.finish(self)
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

    def _task(self, vrank: int, role: Role) -> Iterator[Any]:
        plan, work = self._source.plan, self._work
        count = plan.task_samples(self.index, vrank)
        self._task_loss = 0.0
        work.begin_task(vrank, role)
        if count:
            self._scale = plan.weight(self.index, vrank) / plan.virtual_ranks
            self._owed = vrank
            batch = self._source.batch(self.index, vrank)
            enter_stream(plan.seed, self.index, vrank, "model")
            yield batch
            if self._owed is not None:
                raise UserError("a batch had no step.backward(loss): call it once for each one")
        digest = plan.digest(self.index, vrank)
        work.end_task(vrank, role, Done(loss=self._task_loss, count=count, digest=digest))


class _Work:
    """Everything behind the job's loop; `loop`, `next_task`, ... run in the script's thread."""

    def __init__(self, job: Job) -> None:
        self._job = job
        self._driver = job._driver
        modules = [(n, o) for n, o in job._protected.items() if isinstance(o, torch.nn.Module)]
        params = [(f"{n}.{k}", p) for n, m in modules for k, p in m.named_parameters()]
        trained = [(k, p) for k, p in params if p.requires_grad]
        if not trained:
            raise UserError("nothing to train: protect a torch.nn.Module with parameters")
        self._devices = [p.device for _, p in trained if p.is_cuda]
        self._gradients = Gradients(trained, job.virtual_ranks, self._driver.changed)
        table = StepTable(job.virtual_ranks, len(trained))
        clock = TaskClock(self._devices[0] if self._devices else None)
        self._step = StepState(self._gradients, table, Buffers(modules), clock)
        self._source: list[BatchSource] = []  # the present loop's, once there is one
        self._followed: tuple[int, ...] = ()
        self._until = 0
        self._loop = 0
        self._saver: list[Saver] = []  # none or one
        self._stepped = False  # in the present loop
        self._finishing = False  # the present loop has no further step
        self._accounts = Accounts(job._environment, job.seed, self._driver)
        cycle = job._environment.spec.silent_errors.fingerprint_steps
        self._fingerprints = Fingerprints(job._protected, cycle)

    def start(self, link: AgentLink | SoloLink, gloo: GlooDevice) -> None:
        self._gradients.attach()
        self._gradients.on_leaf = self._step.audits.note

        def make_transport() -> Transport:
            return NcclTransport(gloo, self._devices[0]) if self._devices else GlooTransport(gloo)

        environment, protected = self._job._environment, self._job._protected
        spec = environment.spec
        restorer = saver = None
        if spec.checkpoints.store:
            store = Checkpoints(open_storage(spec.checkpoints.store, say), say)
            restorer = Restorer(store, protected)
            if environment.orders_fd is not None:
                orders = socket.socket(fileno=environment.orders_fd)
                pace = Pace(spec.pace(), time.monotonic())
                every = spec.checkpoints.every or 0
                saver = Saver(
                    orders, spec.job, every, pace, protected, self._saved, self._tell_of_save
                )
                self._saver = [saver]
        engine = Engine(self._driver, link, self._step, protected, make_transport, restorer, saver)
        engine.backup = spec.backup()
        # How long what is dropped takes is not known.
        engine.rebalance = spec.stragglers.rebalance and not spec.stragglers.backup
        engine.plan = self.audits
        engine.judge.seed = self._job.seed
        engine.judge.trust = Trust(spec.silent_errors.fingerprint_steps)
        engine.judge.note = self._accounts.doubt
        engine.judge.whole_print = lambda: self._fingerprints.of_all(self._step.buffers.start)
        self._step.audits.share = spec.silent_errors.audit
        self._step.audits.classes = Classes(spec.silent_errors.audit_tolerance)
        engine.start()

    def _saved(self, step: int, view: int) -> None:
        """A checkpoint counts once the state that was copied has been compared with others'."""
        driver = self._driver
        with driver.changed:
            while self._fingerprints.cycle and driver.committed <= step:
                if self._finishing or driver.stops:
                    break
                driver.changed.wait()
        driver.post(machine.Saved(step, ViewNumber(view)))

    def _tell_of_save(self, text: str) -> None:
        self._driver.post(machine.EventNoted("save", text))

    def loop(self, data: Batches, until: int) -> Iterator[Step]:
        """One `Job.steps` loop."""
        driver = self._driver
        plan = dataclasses.replace(data.plan, first_step=data.first_step or 0)
        source = BatchSource(data.dataset, plan, data.options)
        self._source = [source]
        self._followed, self._until = (), until
        self._stepped = self._finishing = False
        self._accounts.begin(plan)
        self._loop += 1
        driver.post(machine.LoopEntered())
        if isinstance(self._job._link, SoloLink) and driver.view is None:
            self._job._link.start(driver)
        try:
            while (index := self._enter_step()) < until:
                step = Step(self, source, index)
                yield step
                if not step.complete:
                    raise UserError(f"step {index} was left early: iterate over all its batches")
            with driver.changed:
                self._finishing = True
                driver.changed.notify_all()
            self._accounts.end()
            for saver in self._saver:
                saver.finish(SAVE_S_MAX)
            driver.post(machine.LoopEnded())
            self._wait(lambda: driver.released >= self._loop)
        finally:
            source.close()

    def _enter_step(self) -> int:
        """Wait at the boundary; returns the step that may be computed now."""
        driver = self._driver
        with driver.changed:
            if driver.begun is not None and driver.committed >= self._until:
                return driver.committed
            driver.begun = None
            committed = driver.committed
            # The script has applied the last step, and is still in the loop of that step: what it
            # does between two loops it would do again to a state that was saved after it.
            whole = self._stepped and self._step.index == committed - 1
            agreed = driver.to_save
        for saver in self._saver:
            if whole and agreed is not None and agreed[0] == committed:
                saver.at_boundary(committed, agreed[1], driver.worker)
        with driver.changed:
            driver.post(machine.AtBoundary())
            self._wait(lambda: driver.begun is not None)
            index = driver.committed
        if index < self._until:
            current.probe.boundary(index, self._job._protected)
            self._gradients.begin_step()
            self._step.buffers.remember()
            self._stepped = True
            prints = self._take_prints(index, whole=agreed is not None and agreed[0] == index)
            with driver.changed:
                self._step.open(index)
                self._step.prints = prints
                audits, view = self._step.audits, driver.view
                audits.open(driver.worker)
                if view is not None and audits.agreed_in == view.number:
                    audits.plan(view.number, self.audits(view, index))
                driver.changed.notify_all()
        return index

    def _take_prints(self, index: int, *, whole: bool) -> Prints:
        """Of all of the state in the first step after a copy of it, and in a loop's last."""
        prints, buffers = self._fingerprints, self._step.buffers.start
        whole = (whole or index == self._until - 1) and prints.cycle > 1
        return prints.of_step(index, buffers), prints.of_all(buffers) if whole else 0

    def audits(self, view: View, index: int) -> tuple[Audit, ...]:
        """Of a step: none of one that this worker only catches up with."""
        share = self._step.audits.share_of(index) if index >= view.resume_step else 0.0
        return plan(self._job.seed, index, self._driver.owners, view.workers, share)

    def next_task(self, index: int) -> tuple[int, Role] | None:
        """The next virtual rank to compute for step `index`; None once the step is committed."""
        driver, step = self._driver, self._step
        with driver.changed:
            said = driver.status().waiting
            while driver.committed <= index:
                hosted = () if step.dropped else driver.hosted()
                host = driver.worker, driver.status().incarnation
                missing = [v for v in hosted if v not in step.done]
                step.done.update(v for v in missing if step.copies.adopt(v, host))
                if step.done.issuperset(hosted) and missing:
                    driver.changed.notify_all()
                    continue
                task = self._own_task(hosted)
                if task is not None:
                    if said:
                        driver.post(machine.LocalDone(False))
                    if task[1] is Role.HOSTED:
                        self._follow(hosted, index)
                    return task
                if not said:
                    said, driver.copying = True, None
                    driver.post(machine.LocalDone(True))
                if driver.copying == index and (late := self._late_task()) is not None:
                    step.copying = True
                    return late, Role.COPIED
                self._check()
                driver.wait()
        return None

    def _own_task(self, hosted: Sequence[int]) -> tuple[int, Role] | None:
        """What this worker owes of the step."""
        for vrank in hosted:
            if vrank not in self._step.done:
                return vrank, Role.HOSTED
        view = self._driver.view
        owed = self._step.audits.owed(view.number if view else 0)
        return (owed[0], Role.AUDITED) if owed else None

    def _late_task(self) -> int | None:
        """What this worker would host if those who are late were suspended."""
        view, driver = self._driver.view, self._driver
        if view is None:
            return None
        late = [view.workers[rank] for rank in self._step.awaited()]
        tasks = worth_copying(driver.owners, view.workers, late, driver.worker)
        return next((vrank for vrank in tasks if vrank not in self._step.copies), None)

    def begin_task(self, vrank: int, role: Role) -> None:
        if role is Role.HOSTED:
            self._step.clock.begin()
        self._step.buffers.restore()
        self._step.audits.begin(vrank)
        self._gradients.begin_task(vrank, role)

    def end_task(self, vrank: int, role: Role, done: Done) -> None:
        self._gradients.end_task()
        step, driver = self._step, self._driver
        if role is Role.HOSTED:
            current.probe.task(step.index or 0, vrank)
            step.clock.end()
        left = None
        # With backup workers virtual rank 0 may be dropped.
        first = vrank == 0 or self._job._environment.spec.stragglers.backup
        if first and len(step.buffers) and role is not Role.AUDITED:
            left = step.buffers.changes()
        with driver.changed:
            match role:
                case Role.HOSTED:
                    me = driver.status()
                    host = me.worker, me.incarnation
                    step.own.put(vrank, done.loss, done.count, done.digest, host)
                    if left is not None:
                        step.buffers.keep(vrank, left)
                    step.done.add(vrank)
                case Role.AUDITED:
                    step.audits.done.add(vrank)
                case Role.COPIED:
                    step.copying = False
                    step.copies.keep(vrank, dataclasses.replace(done, left=left))
                    driver.post(machine.Copied())
            driver.changed.notify_all()

    def finish(self, step: Step) -> None:
        """The step is committed: hand its gradient, buffers and loss to the script."""
        table, job = self._step.table, self._job
        for saver in self._saver:
            saver.before_update()
        self._step.buffers.apply()
        plan = self._source[0].plan
        samples, counted = plan.step_samples(step.index), sum(table.counts())
        scale = samples / counted  # 1 unless something was dropped
        self._gradients.publish(table.used, scale)
        enter_stream(job.seed, step.index, job.virtual_ranks, "job")
        losses = {
            (v, 1): loss * plan.weight(step.index, v) for v, loss in enumerate(table.losses())
        }
        total = tree.fold(losses, job.virtual_ranks, lambda a, b: a + b)
        step.loss = total / job.virtual_ranks * scale
        dropped = samples - counted
        self._accounts.commit(step.index, self._step.reduced_in, table, step.loss, dropped)

    def _follow(self, hosted: tuple[int, ...], index: int) -> None:
        if hosted != self._followed:
            self._followed = hosted
            self._source[0].follow(hosted, index, self._until)

    def _wait(self, ready: Callable[[], bool]) -> None:
        with self._driver.changed:
            while not ready():
                self._check()
                self._driver.changed.wait()

    def _check(self) -> None:
        if self._driver.failure is not None:
            raise self._driver.failure

"""Offers the job's steps to its script: batches, `backward`, rounds, the loss, and whole epochs.

The script's thread runs this code. It computes tasks, waits for decisions of the engine and the
machine, and never takes part in the exchange itself.

All epochs of a loop are one loop to the job: the lines between two epochs are within that loop. So
a worker that joins enters the job's present epoch, and runs none of the lines of finished ones.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from holdfast.engine.core.errors import UserError, WorldError, first_line
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import Purpose, StepKind
from holdfast.engine.core.step.audit import FICKLE, RUNS_DISPUTED, Sketch
from holdfast.engine.train.data.batch_tasks import Source
from holdfast.engine.train.data.random_streams import enter_stream
from holdfast.engine.train.data.read_plans import OrderPlan
from holdfast.engine.train.data.sample_digest import fingerprint_content
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.streams import StreamSource
from holdfast.engine.train.script.repeated_tasks import (
    RUN_ELSEWHERE,
    RunMark,
    count_tasks_before,
    fingerprint_result,
)
from holdfast.engine.train.script.script_thread import (
    STATE_OF_EARLIER_LINE,
    EndsWithEpoch,
    LoopEnd,
    ScriptThread,
)
from holdfast.engine.train.script.step_runner import StepRunner
from holdfast.engine.train.step.step_data import FinishedTask
from holdfast.engine.train.step.step_table import LEFT_OUT, UNWEIGHTED
from holdfast.engine.train.step.values import NOTHING, GatheredValues, TaskReport, pack

CAUGHT = (
    "the script caught an error in step.backward ({}), so only a part of this batch's gradient is "
    "here: let the error end the script, or decide before step.backward, by the batch itself, "
    "whether to leave it out by step.skip()"
)


@dataclass(slots=True)
class OpenTask:
    """Is one task of a step, from the moment in which the script gets its batch."""

    #: The virtual rank, and the number of samples in its batch.
    vrank: int
    count: int
    #: Its last backward has not been completed yet.
    is_owed: bool = True
    #: The error that has ended a backward of this task; empty if there was none.
    caught: str = ""
    loss: float = 0.0
    #: The weight of its losses; None: no backward has been called.
    weight: float | None = None
    #: The values that it has gathered, by name.
    values: dict[str, bytes] = field(default_factory=dict)

    def check_weight(self, weight: float) -> None:
        """Check a further loss of this weight, or UNWEIGHTED. UserError."""
        if self.caught:
            raise UserError(CAUGHT.format(self.caught))
        if weight < 0 and self.weight is not None and self.weight >= 0:
            raise UserError("a batch's losses were given a weight once and not another time")

    def run_backward(
        self,
        loss: torch.Tensor,
        taking: AbstractContextManager[None],
        *,
        retain_graph: bool,
        counts: bool,
    ) -> None:
        """Compute gradients, which `taking` takes in; without any if the loss does not count.

        A pass that fails makes the whole task fail, also if the script catches the error.
        """
        try:
            with taking:
                if counts:
                    loss.backward(retain_graph=retain_graph)
        except BaseException as error:
            self.caught = first_line(error)
            raise

    def add_loss(self, loss: float, weight: float, *, is_mean: bool, last: bool) -> None:
        """Add a loss of this weight, or UNWEIGHTED; `is_mean`: the weight is the batch's own."""
        self.loss += loss
        if is_mean or weight < 0:
            self.weight = weight
        else:
            self.weight = max(self.weight or 0.0, 0.0) + weight
        self.is_owed = not last

    def leave_out(self) -> None:
        """Leave the batch out. UserError after a backward."""
        if not self.is_owed or self.weight is not None or self.caught:
            raise UserError(
                "step.skip was called without a new batch: call it once for a batch, in place of "
                "step.backward"
            )
        self.is_owed, self.weight = False, LEFT_OUT

    def check_done(self) -> None:
        """Check that the script has computed the whole task. UserError."""
        if self.caught:
            raise UserError(CAUGHT.format(self.caught))
        if self.is_owed:
            raise UserError(
                "a batch had no last step.backward(loss): call it once for each batch, or with "
                "last=False for all but the last time; step.skip() leaves a batch out"
            )

    @property
    def weight_of_losses(self) -> float:
        """Return the weight of the task's losses, or UNWEIGHTED."""
        return UNWEIGHTED if self.weight is None else self.weight


class Step:
    """Runs one step of the job in its script: iterate over it, then use `.grad` and `loss`.

    `index`: its number, from 0. `epoch`, `step_in_epoch`: its place in the data. After the batches
    `loss` is the mean over the samples of all workers, and `gathered` has what tasks have handed
    over. `metrics`: a dictionary of the script, for callbacks. Made by `Job.steps` and by an Epoch.

        for step in job.steps(data, until=10):
            for inputs, targets in step:
                step.backward(loss_fn(model(inputs), targets))
            optimizer.step()
            optimizer.zero_grad()
    """

    def __init__(self, steps: StepRunner, source: Source, index: int, ends: LoopEnd) -> None:
        self.index = index
        # The epoch of a stream's step is known in job.epochs only.
        self.epoch, self.step_in_epoch = ends.place(index) or source.plan.epoch_of(index)
        #: After the batches: mean over the step's samples, all workers.
        self.loss = float("nan")
        #: Values of all tasks, after the batches.
        self.gathered = GatheredValues(index, {})
        #: The script sets them for callbacks.
        self.metrics: dict[str, Any] = {}
        self._steps = steps
        self._source = source
        self._ends = ends  # decides where the loop ends
        self._rounds = 0  # number of complete rounds
        self._ended = False  # the script is through with the body of its loop
        self._open: OpenTask | None = None  # the task whose batch the script has

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's batches; there are more if another worker fails in this step."""
        return self.round()

    def round(self, *names: str) -> Iterator[Any]:
        """Yield this worker's batches, to train only the modules protected under these names.

        With several rounds, one after the other, a step serves several optimizers: each round is
        reduced and committed as a step is, with the same batches. Without names all modules are
        trained. Raises UserError for a name that is not a protected module's.

            for inputs, targets in step.round("model"):
                step.backward(loss_fn(model(inputs), targets))
        """
        steps = self._steps
        steps.open(of=steps.modules_named(names) if names else None)
        for task in steps.tasks(self._source, self._ends.loads_until(self.index)):
            yield from self._task(task)
        self.loss = steps.finish(first=not self._rounds)
        self.gathered = GatheredValues(self.index, steps.reports)
        self._rounds += 1

    def backward(
        self,
        loss: torch.Tensor,
        scaler: torch.amp.GradScaler | None = None,
        *,
        weight: float | torch.Tensor | None = None,
        last: bool = True,
        retain_graph: bool = False,
    ) -> None:
        """Compute this batch's share of the gradient.

        `loss`: a scalar, the mean over the batch; the step's gradient is then the mean over the
        step's samples. With `weight` it is a sum of that many terms, such as tokens, and the step's
        gradient is the sum over all batches of all workers divided by their total weight. `last`:
        False if another `backward` follows for the same batch; their gradients, losses and weights
        add up, and `retain_graph` keeps the graph for the next. `scaler`: scale the loss by this
        GradScaler first. Raises UserError when called out of turn, or for an unusable loss or
        weight.
        """
        task = self._open
        if task is None or not task.is_owed:
            raise UserError(
                "step.backward was called without a new batch: call it once for each batch, or "
                "with last=False for all but the last time"
            )
        if loss.numel() != 1:
            raise UserError(
                f"step.backward needs a scalar loss, not {list(loss.shape)}: use mean(), or sum() "
                "with weight="
            )
        self._steps.progress.row_updates.check_scaler(scaler)
        told = None if weight is None else _weight(weight)
        share, implied = loss, UNWEIGHTED
        if told is None:
            scale = self._source.scale(self.index, task.vrank)
            if scale is None:  # samples are weighted after the step
                scale = implied = float(task.count)
            share = loss if scale == 1.0 else loss * scale
        task.check_weight(implied if told is None else told)
        found = scaler.scale(share) if scaler is not None else share
        runner = self._steps.runner
        # Processes of one worker run their backward passes together, whatever their own weights.
        counts = told != 0 or runner.inner is not None
        taking = runner.backward_pass(last=last)
        task.run_backward(found, taking, retain_graph=retain_graph, counts=counts)
        added = float(loss.detach()) * max(implied, 1.0) if counts else 0.0
        task.add_loss(added, implied if told is None else told, is_mean=told is None, last=last)

    def skip(self) -> None:
        """Leave this batch out, in place of `backward`.

        The step's gradient and `loss` are then means over its other batches. If a step leaves out
        all of them, gradients are zeros and `loss` is NaN. The ledger keeps count. Whether a batch
        is left out must follow from the batch, the model or the step. Raises UserError when called
        out of turn.

            for inputs, targets in step:
                if inputs.isfinite().all():
                    step.backward(loss_fn(model(inputs), targets))
                else:
                    step.skip()
        """
        if self._open is None:
            raise UserError(
                "step.skip was called without a new batch: call it in the loop over a step's "
                "batches, in place of step.backward"
            )
        self._open.leave_out()

    @property
    def virtual_rank(self) -> int:
        """Return the virtual rank of the script's present batch. UserError without a batch."""
        if self._open is None:
            raise UserError("step.virtual_rank is known in the loop over a step's batches only")
        return self._open.vrank

    def gather(self, name: str, value: Any) -> None:
        """Hand over a value of this task to all workers: tensors, numbers, or a tree of them.

        After the batches `step.gathered[name]` is the list of the values from the step's tasks, in
        the order of virtual ranks, the same on all workers; tensors are on the same kind of device
        as before. A task that is repeated, or computed by several workers, counts once. Raises
        UserError outside of a task, for a name that the task has used, and for a value that cannot
        be sent.

            for inputs, targets in step:
                step.gather("largest", inputs.max().item())
                step.backward(loss_fn(model(inputs), targets))
            largest = max(step.gathered["largest"])
        """
        if self._open is None:
            raise UserError(
                f"step.gather({name!r}, ...) was called without a batch: call it in the loop over "
                "a step's batches; outside of it use job.agree, or job.evaluate"
            )
        values = self._open.values
        if name in values:
            raise UserError(
                f"step.gather({name!r}, ...) was called twice in one task: give a list of values"
            )
        values[name] = pack(value, f"the value {name!r} of step.gather")

    @property
    def complete(self) -> bool:
        """Return whether a round has begun, and the script has gone through all begun rounds."""
        return bool(self._rounds) and not self._steps.is_open

    def _task(self, task: ef.Compute) -> Iterator[Any]:
        """Compute a task, and now and then compute it again, to see that the results are equal."""
        source, runner, guard = self._source, self._steps.runner, self._steps.guard
        hosted, began = task.purpose is Purpose.HOSTED, time.monotonic()
        if task.disputed and guard.is_exact:
            yield from self._dispute(task)
            return
        repeated = hosted and guard.repeats.is_due(task.step, task.vrank)
        runs = [(yield from self._repeat(task))] if repeated else []
        runner.begin(task, repeated=repeated, sketch=repeated and guard.repeats.wants_sketches)
        batch = runner.load(lambda: source.batch(self.index, task.vrank))
        batch_fingerprint = fingerprint_content(batch) if repeated else 0
        finished = runner.end(task, (yield from self._run(task, batch)))
        if repeated:
            runs.append(_mark(batch_fingerprint, finished, finished.bits, finished.sketch))
            while (told := self._judge(task, runs, time.monotonic() - began)) is False:
                yield from self._repeat_after_others(task, runs)
            if told is None:
                finished = replace(finished, gradient=FICKLE)
        runner.report(task, finished)

    def _judge(self, task: ef.Compute, runs: list[RunMark], spent_s: float) -> bool | None:
        """Judge runs of a task; False: one more is needed. None: other workers must judge it.

        All processes of this worker return the same.
        """
        guard, runner = self._steps.guard, self._steps.runner
        try:
            told = guard.judge_runs(runs, _name(task), spent_s=spent_s, compared=task.compared)
        except WorldError as error:
            if guard.is_alone:
                raise
            self._steps.start_again(str(error), is_wrong=True)
        if runner.is_set_anywhere(told is None):
            return None
        return not runner.is_set_anywhere(told is False)

    def _dispute(self, task: ef.Compute) -> Iterator[Any]:
        """Compute a task several times, and report whether the results of this worker agree."""
        source, runner = self._source, self._steps.runner
        self._steps.guard.begin_runs()
        runner.begin(task, repeated=True)
        batch = source.batch(self.index, task.vrank)
        batch_fingerprint = fingerprint_content(batch)
        finished = runner.end(task, (yield from self._run(task, batch)))
        runs = [_mark(batch_fingerprint, finished, finished.bits)]
        while len(runs) < RUNS_DISPUTED:
            yield from self._repeat_after_others(task, runs)
        if runner.is_set_anywhere(self._steps.guard.contradicts_itself(runs, _name(task))):
            finished = replace(finished, gradient=FICKLE)
        runner.report(task, finished)

    def _repeat_after_others(self, task: ef.Compute, runs: list[RunMark]) -> Iterator[Any]:
        """Compute a task once more, now and then after other tasks; adds the run to `runs`."""
        for vrank in self._other_vranks(task.vrank)[: count_tasks_before(len(runs))]:
            yield from self._repeat(replace(task, vrank=vrank))
        runs.append((yield from self._repeat(task, in_data_worker=len(runs) == RUN_ELSEWHERE)))

    def _other_vranks(self, vrank: int) -> list[int]:
        """Return other virtual ranks, for a stream only the hosted ones, which it can read."""
        hosted = self._steps.hosted
        plan = self._source.plan
        theirs = range(plan.virtual_ranks) if isinstance(plan, SamplePlan | OrderPlan) else ()
        every = dict.fromkeys([*hosted, *theirs])
        return [each for each in every if each != vrank]

    def _repeat(
        self, task: ef.Compute, *, in_data_worker: bool = False
    ) -> Generator[Any, None, RunMark]:
        """Compute a task only to compare its result; `in_data_worker`: its batch comes from one."""
        runner = self._steps.runner
        batch = self._source.load_again(self.index, task.vrank, in_data_worker=in_data_worker)
        batch_fingerprint = fingerprint_content(batch)
        runner.begin_repeat(task, sketch=self._steps.guard.repeats.wants_sketches)
        finished = yield from self._run(task, batch)
        gradient, sketch = runner.end_repeat()
        return _mark(batch_fingerprint, finished, gradient, sketch)

    def _run(self, task: ef.Compute, batch: Any) -> Generator[Any, None, FinishedTask]:
        """Give a task to the script, unless it has no samples."""
        source, vrank = self._source, task.vrank
        count, digest = source.usage_of(self.index, vrank)
        states: dict[str, bytes] = {}
        found = OpenTask(vrank, count)
        if count:
            purpose = f"model {self._rounds}" if self._rounds else "model"
            enter_stream(source.seed, self.index, vrank, purpose)
            self._open = found
            rank_states = self._steps.progress.rank_states
            rank_states.begin_task(vrank)
            yield batch
            states = rank_states.end_task()
            found.check_done()
            self._open = None
        bad, values = source.report_of(self.index, vrank), found.values
        report = (
            TaskReport(bad=bad, values=values, states=states)
            if bad or values or states
            else NOTHING
        )
        weight = found.weight_of_losses
        return FinishedTask(
            loss=found.loss, count=count, digest=digest, weight=weight, report=report
        )


def _name(task: ef.Compute) -> str:
    return f"the task of virtual rank {task.vrank} in step {task.step}"


def end_step(step: Step, callbacks: Iterable[Callable[[Step], None]]) -> None:
    """End a step once, after the body of the script's loop. UserError if it was left early.

    The worker that acts for the job makes the callbacks.
    """
    if step._ended:
        return
    if not step.complete:
        raise UserError(f"step {step.index} was left early: iterate over all its batches")
    step._ended = True
    steps, source = step._steps, step._source
    steps.runner.settle_rows(steps.progress)
    for fn in callbacks if steps.acts else ():
        try:
            fn(step)
        except SystemExit as end:
            raise UserError(
                f"sys.exit({end.code}) in a function given to job.on_step_end would end one "
                "worker's loop only: call job.stop() there"
            ) from None
    if isinstance(source, StreamSource) and source.stream.tells_states:
        steps.open(StepKind.VALUES, act="exchanges positions in a stream")
        for task in steps.tasks():
            steps.runner.report_value(task, source.state(task.vrank))
        source.stream.take_states(steps.values_of_all())


def is_begun(step: Step) -> bool:
    """Return whether the script has asked for batches of the step."""
    return bool(step._rounds) or step._steps.is_open


def _mark(batch: int, finished: FinishedTask, gradient: int, sketch: Sketch = ()) -> RunMark:
    result = fingerprint_result(finished.loss, finished.weight, gradient)
    handed, bad = finished.report.digest, finished.report.bad
    return RunMark(batch=batch, result=result, sketch=sketch, handed=handed, bad=bad)


def _weight(weight: float | torch.Tensor) -> float:
    if isinstance(weight, torch.Tensor) and weight.numel() != 1:
        raise UserError(
            f"step.backward's weight has {weight.numel()} elements: give their sum, a number"
        )
    found = float(weight)
    if not (math.isfinite(found) and found >= 0):
        raise UserError(f"step.backward(weight={found}) is no weight: give a number of 0 or more")
    return found


class Epoch:
    """Is one pass over the data: iterate over it, once, to go through its steps.

    `index`: its number, from 0. A worker that joins in the middle of it goes through the remaining
    steps. Made by `Job.epochs`.

        for epoch in job.epochs(data, until=2):
            for step in epoch:
                for inputs, targets in step:
                    step.backward(loss_fn(model(inputs), targets))
                optimizer.step()
                optimizer.zero_grad()
            scheduler.step()
    """

    def __init__(self, index: int, walk: EpochWalk, first: Step) -> None:
        self.index = index
        self._walk = walk
        self._first = first
        self._begun = False

    def __iter__(self) -> Iterator[Step]:
        """Yield the steps of this epoch that the job has not taken yet. UserError if called twice.

        The lines after this loop still belong to the epoch, such as an evaluation.
        """
        if self._begun or self._walk.step is not self._first:
            raise UserError(
                f"the steps of epoch {self.index} can be gone through once, and before the next "
                "epoch: write `for step in epoch:` once in the body of the loop over job.epochs"
            )
        self._begun = True
        yield from self._walk.steps_of(self.index)


class EpochWalk:
    """Goes through the steps of one loop, epoch by epoch.

    `steps`: of the loop. `callbacks`: of the script, at the end of each step.
    """

    def __init__(
        self,
        script: ScriptThread,
        steps: Generator[Step, None, None],
        ends: EndsWithEpoch,
        callbacks: Sequence[Callable[[Step], None]],
    ) -> None:
        #: The newest step.
        self.step: Step | None = None
        self._script = script
        self._steps = steps
        self._ends = ends
        self._callbacks = callbacks

    def epochs(self) -> Iterator[Epoch]:
        """Yield the epochs from the job's present one on."""
        script = self._script
        try:
            self.step = next(self._steps, None)
            while self.step is not None:
                index, _ = self._ends.epoch_of(self.step.index)
                script.epoch_start.enter(script.number, index)
                yield Epoch(index, self, self.step)
                script.epoch_start.leave()
                self._end_epoch(index)
                self.step = next(self._steps, None)
        finally:
            self._steps.close()

    def steps_of(self, epoch: int) -> Iterator[Step]:
        """Yield the epoch's remaining steps; the next epoch begins with the job's next step."""
        self._script.epoch_start.leave()
        while self.step is not None:
            yield self.step
            end_step(self.step, self._callbacks)
            if self._is_last(self.step):
                return
            self.step = next(self._steps)
            if self._ends.epoch_of(self.step.index)[0] != epoch:
                self._script.steps.start_again(STATE_OF_EARLIER_LINE)

    def _end_epoch(self, index: int) -> None:
        """End the epoch's last step, if that was left by `break`. UserError if it is another."""
        assert self.step is not None, "an epoch without a step"
        if not is_begun(self.step) or not self._is_last(self.step):
            raise UserError(
                f"epoch {index} was left early, at step {self.step.index}: go through all its "
                "steps, leave the loop over epochs by `break` as well, or call job.stop() to end "
                "all loops"
            )
        end_step(self.step, self._callbacks)

    def _is_last(self, step: Step) -> bool:
        """Return whether the epoch has no step after this one."""
        return self._script.progress.stopped or self._ends.ends_epoch(step.index)

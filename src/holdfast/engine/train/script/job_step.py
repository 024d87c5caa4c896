"""Offers one step of the job to its script: its batches, `backward`, rounds, and the loss.

The script's thread runs this code. It computes tasks, waits for decisions of the engine and the
machine, and never takes part in the exchange itself.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from dataclasses import replace
from typing import Any

import torch

from holdfast.engine.core.errors import UserError, WorldError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import Purpose, StepKind
from holdfast.engine.core.step.audit import FICKLE, RUNS_DISPUTED, Sketch
from holdfast.engine.train.data.order_plan import OrderPlan
from holdfast.engine.train.data.random_streams import enter_stream
from holdfast.engine.train.data.sample_digest import content_print
from holdfast.engine.train.data.sampling import SamplePlan
from holdfast.engine.train.data.sources import Source
from holdfast.engine.train.data.streams import StreamSource
from holdfast.engine.train.script.loop_ends import LoopEnd
from holdfast.engine.train.script.open_task import OpenTask
from holdfast.engine.train.script.repeated_tasks import (
    RUN_ELSEWHERE,
    RunMark,
    count_tasks_before,
    result_print,
)
from holdfast.engine.train.script.script_thread import ScriptThread
from holdfast.engine.train.step.packed_trees import pack
from holdfast.engine.train.step.speculative import FinishedTask
from holdfast.engine.train.step.step_table import UNWEIGHTED
from holdfast.engine.train.step.task_report import NOTHING, GatheredValues, TaskReport


class Step:
    """Runs one step of the job in its script: iterate over it, then use `.grad` and `loss`."""

    def __init__(self, script: ScriptThread, source: Source, index: int, ends: LoopEnd) -> None:
        self.index = index
        # The epoch of a stream's step is known in job.epochs only.
        self.epoch, self.step_in_epoch = ends.place(index) or source.plan.epoch_of(index)
        self.loss = float("nan")  # after the batches: mean over the step's samples, all workers
        self.gathered = GatheredValues(index, {})  # values of all tasks, after the batches
        self.metrics: dict[str, Any] = {}  # the script sets them for callbacks
        self._script = script
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
        """
        script = self._script
        script.open(of=script.modules_named(names) if names else None)
        for task in script.tasks(self._source, self._ends.loads_until(self.index)):
            yield from self._task(task)
        self.loss = script.finish(first=not self._rounds)
        self.gathered = GatheredValues(self.index, script.reports)
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
        step's samples. With `weight` it is a sum of that many terms (tokens, say), and the step's
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
        self._script.progress.row_updates.check_scaler(scaler)
        told = None if weight is None else _weight(weight)
        share, implied = loss, UNWEIGHTED
        if told is None:
            scale = self._source.scale(self.index, task.vrank)
            if scale is None:  # samples are weighted after the step
                scale = implied = float(task.count)
            share = loss if scale == 1.0 else loss * scale
        task.check_weight(implied if told is None else told)
        found = scaler.scale(share) if scaler is not None else share
        runner = self._script.runner
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
        return bool(self._rounds) and not self._script.is_open

    def _task(self, task: ef.Compute) -> Iterator[Any]:
        """Compute a task, and now and then compute it again, to see that the results are equal."""
        source, runner, guard = self._source, self._script.runner, self._script.guard
        hosted, began = task.purpose is Purpose.HOSTED, time.monotonic()
        if task.disputed and guard.is_exact:
            yield from self._dispute(task)
            return
        repeated = hosted and guard.repeats.is_due(task.step, task.vrank)
        runs = [(yield from self._repeat(task))] if repeated else []
        runner.begin(task, repeated=repeated, sketch=repeated and guard.repeats.wants_sketches)
        batch = runner.load(lambda: source.batch(self.index, task.vrank))
        batch_print = content_print(batch) if repeated else 0
        finished = runner.end(task, (yield from self._run(task, batch)))
        if repeated:
            runs.append(_mark(batch_print, finished, finished.bits, finished.sketch))
            while (told := self._judge(task, runs, time.monotonic() - began)) is False:
                yield from self._repeat_after_others(task, runs)
            if told is None:
                finished = replace(finished, gradient=FICKLE)
        runner.report(task, finished)

    def _judge(self, task: ef.Compute, runs: list[RunMark], spent_s: float) -> bool | None:
        """Judge runs of a task; False: one more is needed. None: other workers must judge it.

        All processes of this worker return the same.
        """
        guard, runner = self._script.guard, self._script.runner
        try:
            told = guard.judge_runs(runs, _name(task), spent_s=spent_s, compared=task.compared)
        except WorldError as error:
            if guard.is_alone:
                raise
            self._script.start_again(str(error), is_wrong=True)
        if runner.is_set_anywhere(told is None):
            return None
        return not runner.is_set_anywhere(told is False)

    def _dispute(self, task: ef.Compute) -> Iterator[Any]:
        """Compute a task several times, and report whether the results of this worker agree."""
        source, runner = self._source, self._script.runner
        self._script.guard.begin_runs()
        runner.begin(task, repeated=True)
        batch = source.batch(self.index, task.vrank)
        batch_print = content_print(batch)
        finished = runner.end(task, (yield from self._run(task, batch)))
        runs = [_mark(batch_print, finished, finished.bits)]
        while len(runs) < RUNS_DISPUTED:
            yield from self._repeat_after_others(task, runs)
        if runner.is_set_anywhere(self._script.guard.contradicts_itself(runs, _name(task))):
            finished = replace(finished, gradient=FICKLE)
        runner.report(task, finished)

    def _repeat_after_others(self, task: ef.Compute, runs: list[RunMark]) -> Iterator[Any]:
        """Compute a task once more, now and then after others; adds the run to `runs`."""
        for vrank in self._other_vranks(task.vrank)[: count_tasks_before(len(runs))]:
            yield from self._repeat(replace(task, vrank=vrank))
        runs.append((yield from self._repeat(task, in_data_worker=len(runs) == RUN_ELSEWHERE)))

    def _other_vranks(self, vrank: int) -> list[int]:
        """Return other virtual ranks, for a stream only hosted ones: it cannot read the others."""
        hosted = self._script.hosted
        plan = self._source.plan
        theirs = range(plan.virtual_ranks) if isinstance(plan, SamplePlan | OrderPlan) else ()
        every = dict.fromkeys([*hosted, *theirs])
        return [each for each in every if each != vrank]

    def _repeat(
        self, task: ef.Compute, *, in_data_worker: bool = False
    ) -> Generator[Any, None, RunMark]:
        """Compute a task only to compare its result; `in_data_worker`: its batch comes from one."""
        runner = self._script.runner
        batch = self._source.load_again(self.index, task.vrank, in_data_worker=in_data_worker)
        batch_print = content_print(batch)
        runner.begin_repeat(task, sketch=self._script.guard.repeats.wants_sketches)
        finished = yield from self._run(task, batch)
        gradient, sketch = runner.end_repeat()
        return _mark(batch_print, finished, gradient, sketch)

    def _run(self, task: ef.Compute, batch: Any) -> Generator[Any, None, FinishedTask]:
        """Have the script compute a task; one without samples is left out."""
        source, vrank = self._source, task.vrank
        count, digest = source.usage_of(self.index, vrank)
        states: dict[str, bytes] = {}
        found = OpenTask(vrank, count)
        if count:
            purpose = f"model {self._rounds}" if self._rounds else "model"
            enter_stream(source.plan.seed, self.index, vrank, purpose)
            self._open = found
            rank_states = self._script.progress.rank_states
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
    script, source = step._script, step._source
    script.runner.settle_rows(script.progress)
    for fn in callbacks if script.acts else ():
        try:
            fn(step)
        except SystemExit as end:
            raise UserError(
                f"sys.exit({end.code}) in a function given to job.on_step_end would end one "
                "worker's loop only: call job.stop() there"
            ) from None
    if isinstance(source, StreamSource) and source.stream.tells_states:
        script.open(StepKind.VALUES, act="exchanges positions in a stream")
        for task in script.tasks():
            script.runner.tell(task, source.state(task.vrank))
        source.stream.hear(script.values_of_all())


def is_begun(step: Step) -> bool:
    """Return whether the script has asked for batches of the step."""
    return bool(step._rounds) or step._script.is_open


def _mark(batch: int, finished: FinishedTask, gradient: int, sketch: Sketch = ()) -> RunMark:
    result = result_print(finished.loss, finished.weight, gradient)
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

"""Runs the loops of a script, and the calls that all workers make together within or between them.

The end of a loop is a meeting point. A loop that the script has left by `break` is ended by the
next call that needs the loop to be over, or by the end of the script.

In an evaluation batch number b of the dataset, in its own order, falls to virtual rank b modulo V.
So the order of the additions depends on V only, and the mean has the same bits on any workers.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch

from holdfast.engine.core import tree
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.ground.events import StepKind
from holdfast.engine.train.checkpoint.local_tensors import check_split
from holdfast.engine.train.checkpoint.state import to_plain
from holdfast.engine.train.data.batch_tasks import Source
from holdfast.engine.train.data.datasets import load_samples
from holdfast.engine.train.data.random_streams import enter_stream
from holdfast.engine.train.data.sample_digest import Facts, describe_data, find_difference
from holdfast.engine.train.data.sources import LoopData, NoDataset
from holdfast.engine.train.script.job_step import Epoch, EpochWalk, Step, end_step, is_begun
from holdfast.engine.train.script.script_thread import (
    EndsAtStep,
    EndsWithEpoch,
    LoopEnd,
    ScriptThread,
)
from holdfast.engine.train.step.state_differences import SAME_DATA
from holdfast.engine.train.step.values import PROPOSAL

Metrics = dict[str, tuple[float, float]]  # sum and weight, by name
ALONE = ""  # the name of a metric that is the only one, and has no name of its own
_decode = msgspec.msgpack.Decoder(tuple[int, Facts, Metrics]).decode
STEPS_MAX = 1 << 62  # more than any job takes


@dataclass(frozen=True, slots=True, kw_only=True)
class Evaluation:
    """Describes an evaluation. `fn` gets a batch, without gradients."""

    fn: Callable[[Any], Any]
    dataset: Any
    length: int
    batch_size: int
    collate_fn: Callable[[list[Any]], Any]
    virtual_ranks: int
    seed: int
    worker: int

    @property
    def act(self) -> str:
        """Return a description of the evaluation, the same on all workers."""
        batches = f"{self.length} samples in batches of {self.batch_size}"
        return f"calls job.evaluate ({batches})"

    def describe(self, step: int) -> Facts:
        """Describe the dataset as this worker has it."""
        return describe_data(self.dataset, self.collate_fn, self.seed, step)

    def share(self, step: int, vrank: int, facts: Facts) -> bytes:
        """Sum up the metrics of a virtual rank's batches, and encode the sums. UserError.

        `facts`: describe the dataset; all shares must have been made with the same data.
        """
        found: Metrics = {}
        for start in range(
            vrank * self.batch_size, self.length, self.batch_size * self.virtual_ranks
        ):
            indices = list(range(start, min(start + self.batch_size, self.length)))
            enter_stream(self.seed, step, start, "evaluate")
            batch = self.collate_fn(load_samples(self.dataset, indices))
            for name, (total, weight) in _read_metrics(self.fn(batch), len(indices)).items():
                before = found.get(name, (0.0, 0.0))
                found[name] = before[0] + total, before[1] + weight
        return msgspec.msgpack.encode((self.worker, facts, found))

    def mean(self, told: Mapping[int, bytes]) -> float | dict[str, float]:
        """Return each metric's mean over all samples, from the shares of all virtual ranks.

        UserError if two workers have other data.
        """
        decoded = {vrank: _decode(data) for vrank, data in sorted(told.items())}
        _check_data([(worker, facts) for worker, facts, _ in decoded.values()])
        shares = {vrank: share for vrank, (_, _, share) in decoded.items()}
        names = sorted({name for share in shares.values() for name in share})
        found = {name: self._mean(name, shares) for name in names}
        return found[ALONE] if names == [ALONE] else found

    def _mean(self, name: str, shares: Mapping[int, Metrics]) -> float:
        parts = {(vrank, 1): share.get(name, (0.0, 0.0)) for vrank, share in shares.items()}
        total, weight = tree.fold(parts, self.virtual_ranks, _add)
        return total / weight if weight else float("nan")


@contextlib.contextmanager
def suspend_training(modules: Iterable[torch.nn.Module]) -> Iterator[None]:
    """Put modules into evaluation mode, without gradients; restore each one's mode afterwards."""
    before = [(each, each.training) for module in modules for each in module.modules()]
    for module, _ in before:
        module.training = False
    try:
        with torch.no_grad():
            yield
    finally:
        for module, training in before:
            module.training = training


def _check_data(described: Sequence[tuple[int, Facts]]) -> None:
    """Compare descriptions of the dataset, each with the worker that has it. UserError."""
    (first, mine), *others = described
    for worker, theirs in others:
        if name := find_difference(mine, theirs):
            raise UserError(
                f"{name} is {mine[name]} on worker {first} and {theirs[name]} on worker {worker}, "
                f"in job.evaluate(...): {SAME_DATA}"
            )


def _add(left: tuple[float, float], right: tuple[float, float]) -> tuple[float, float]:
    return left[0] + right[0], left[1] + right[1]


def _read_metrics(value: Any, count: int) -> Metrics:
    """Read what an evaluation function has returned for a batch of `count` samples."""
    if isinstance(value, Mapping):
        return {str(name): _read_mean(each, count) for name, each in value.items()}
    return {ALONE: _read_mean(value, count)}


def _read_mean(value: Any, count: int) -> tuple[float, float]:
    try:
        if isinstance(value, Sequence) and len(value) == 2:
            return float(value[0]), float(value[1])
        return float(value) * count, float(count)
    except (TypeError, ValueError, RuntimeError):
        raise UserError(
            f"the evaluated function returned {type(value).__name__}: return a number (the mean "
            "over the batch), a pair (sum, weight), or a dictionary of these"
        ) from None


class Loops:
    """Runs the loops of one script.

    `compose`: makes the script's thread, once there is something to train. `protected`: the
    protected objects by name, as far as the script has named them.
    """

    def __init__(
        self,
        compose: Callable[[], ScriptThread],
        protected: Mapping[str, Any],
        virtual_ranks: int,
        seed: int,
    ) -> None:
        #: None until there is something to train.
        self.script: ScriptThread | None = None
        #: The step that the script is in, or has left by `break`.
        self.step: Step | None = None
        #: The script's functions to call at the end of each step.
        self.at_step_end: list[Callable[[Step], None]] = []
        self._compose = compose
        self._protected = protected
        self._virtual_ranks = virtual_ranks
        self._seed = seed
        self._asked = 0  # where the script wanted its last loop to end

    def find_script(self) -> ScriptThread:
        """Return the script's thread, in no loop that is over."""
        if not self._protected:
            raise UserError(
                "nothing is protected: call job.protect(model=...) before anything else"
            )
        if self.script is None:
            self.script = self._compose()
        self.end_open_loop()
        return self.script

    # ------------------------------------------------------------ loops

    def steps(self, data: LoopData | None, until: int) -> Iterator[Step]:
        """Yield the job's steps from where it stands up to (not including) number `until`."""
        script = self._prepare("job.steps")
        before = min(self._asked, script.steps.begins_at)
        if until < before:
            raise UserError(
                f"job.steps(until={until}) after a loop that has ended at {before}: steps are "
                "counted over the whole job, so until must not go back"
            )
        self._asked = until
        loop = self._check_data(data)
        yield from self._walk(script, loop, EndsAtStep(until))

    def epochs(
        self, data: LoopData | None, until: int, steps_per_epoch: int | None
    ) -> Iterator[Epoch]:
        """Yield the epochs of `data` from the job's present one up to (not including) `until`."""
        script = self._prepare("job.epochs")
        loop = self._check_data(data)
        ends = EndsWithEpoch(loop, until, steps_per_epoch)
        self._asked = STEPS_MAX
        steps = self._walk(script, loop, ends)
        yield from EpochWalk(script, steps, ends, self.at_step_end).epochs()

    def _prepare(self, call: str) -> ScriptThread:
        """Return the script's thread, for another loop. UserError within a loop."""
        if self.script is not None and self.script.is_yielding:
            raise UserError(
                f"{call}(...) within the loop over other steps: end that loop first, by `break` "
                "or at its end, and keep no reference to what job.steps or job.epochs returned"
            )
        return self.find_script()

    def _check_data(self, data: LoopData | None) -> LoopData:
        """Return the data that a loop goes through. UserError if processes cannot share it."""
        loop: LoopData = NoDataset(self._virtual_ranks, self._seed) if data is None else data
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
                self.step = Step(script.steps, source, index, ends)
                enter_stream(self._seed, index, self._virtual_ranks, "step")
                yield self.step
                end_step(self.step, self.at_step_end)
            self.step = None
        finally:
            if source is not None:
                source.close()

    # ------------------------------------------------------------ ends

    def end_open_loop(self) -> None:
        """End a loop that the script has left by `break`. UserError if its step is not complete."""
        step, script = self.step, self.script
        if step is not None and script is not None and script.in_loop:
            self.step = None
            if is_begun(step) or not script.epoch_start.is_above:
                end_step(step, self.at_step_end)
                script.end_turn()
            script.epoch_start.leave()
            script.leave_loop()

    def check_over(self) -> None:
        """Raise UserError if the script has ended within an evaluation or an agreement."""
        if self.script is not None and self.script.in_loop:
            raise UserError(
                "the script ended within job.evaluate(...) or job.agree(...): let it return first"
            )

    def wait_for_others(self) -> None:
        """Wait until the other workers do not need this one, whose script is over."""
        if self.script is not None:
            self.script.end_script()

    # ------------------------------------------------------------ calls of all workers

    def agree(self, value: Any) -> Any:
        """Return the leader's `value`, on all workers."""
        proposal = msgspec.msgpack.encode(to_plain(value, "job.agree(...)'s value"))

        def exchange(script: ScriptThread) -> bytes:
            script.steps.open(StepKind.VALUES, proposal=proposal, act="calls job.agree")
            for task in script.steps.tasks():
                script.steps.runner.report_value(task, None)
            return script.steps.values_of_all()[PROPOSAL]

        return self._exchange(exchange)

    def evaluate(self, evaluation: Evaluation) -> Any:
        """Return the mean of an evaluation's shares, which all workers compute together."""
        modules = [each for each in self._protected.values() if isinstance(each, torch.nn.Module)]

        def exchange(script: ScriptThread) -> bytes:
            step = script.steps.open(StepKind.VALUES, act=evaluation.act)
            with suspend_training(modules):
                facts = evaluation.describe(step)
                for task in script.steps.tasks():
                    script.steps.runner.begin_values()
                    script.steps.runner.report_value(
                        task, evaluation.share(step, task.vrank, facts)
                    )
            enter_stream(self._seed, step, self._virtual_ranks, "evaluated")
            return msgspec.msgpack.encode(evaluation.mean(script.steps.values_of_all()))

        return self._exchange(exchange)

    def _exchange(self, exchange: Callable[[ScriptThread], bytes]) -> Any:
        """Exchange values between all workers: within a step, or in a loop of its own."""
        if self.script is not None and self.script.is_yielding:
            script = self.script
            found = script.epoch_start.exchange(lambda: exchange(script))
        else:
            script = self.find_script()
            data = NoDataset(self._virtual_ranks, self._seed)
            found = script.exchange_once(data, lambda: exchange(script))
        return msgspec.msgpack.decode(found)

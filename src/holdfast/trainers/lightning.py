"""Offers a strategy for Lightning's Trainer: one batch of its loop is one step of the job.

Lightning's loop gets the job's steps in place of batches. The strategy runs `training_step` for
each task of a step, and the optimizer continues when the step is committed. Loops, callbacks and
schedulers are protected as `trainer`, in their state between two steps.
"""

from __future__ import annotations

import contextlib
import copy
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.job import Batches, Job, Step, join_once, plain_batches

try:
    import lightning.pytorch as pl
    from lightning.pytorch.loops.optimization.automatic import ClosureResult
    from lightning.pytorch.strategies import SingleDeviceStrategy
    from lightning.pytorch.trainer import call
    from lightning.pytorch.utilities.rank_zero import rank_zero_only
except ImportError:
    raise UserError(
        "holdfast.trainers.lightning needs the package lightning: pip install 'holdfast[lightning]'"
    ) from None


class Strategy(SingleDeviceStrategy):
    """Trains on the job's steps: `Trainer(strategy=Strategy(), devices=1)`.

    `device`: of this worker. Validation and tests run on each worker, over all of their data.
    """

    strategy_name = "holdfast"

    def __init__(self, device: str | torch.device = "cpu", **kwargs: Any) -> None:
        """Join the job, unless the script has."""
        super().__init__(device=device, **kwargs)
        self.job: Job = join_once()
        #: The loss of the whole job in its last step.
        self.loss = float("nan")
        self._steps: Iterator[Step] | None = None  # steps of the job's one loop
        self._step: Step | None = None  # the one in which Lightning's loop is
        self._batch: Any = None  # the batch of the task under way
        self._kept: FitProgress | None = None
        self._segments = 0  # optimizers' steps that the running training_step has called
        self._round: int | None = None  # set for a module that optimizes by itself
        self._is_fitting = False  # between the first step and the end of fit

    # ------------------------------------------------------------ data

    def process_dataloader(self, dataloader: Any) -> Any:
        """Return the job's steps for the training data, other loaders as they are. UserError."""
        trainer = self._trainer
        if not trainer.training:
            return dataloader
        self._refuse(dataloader)
        data = plain_batches(self.job, dataloader)
        limit = trainer.limit_train_batches
        per_epoch = data.steps_per_epoch
        per_epoch = min(per_epoch, limit if isinstance(limit, int) else int(per_epoch * limit))
        ends = [1 << 40]
        if trainer.max_steps not in (None, -1):
            ends.append(trainer.max_steps)
        if trainer.max_epochs not in (None, -1):
            ends.append(trainer.max_epochs * per_epoch)
        module = self.lightning_module
        self._kept = FitProgress(trainer)
        configs = enumerate(self.lr_scheduler_configs)
        protected = {f"optimizer{i or ''}": each for i, each in enumerate(self.optimizers)}
        protected |= {f"scheduler{i or ''}": each.scheduler for i, each in configs}
        if (scaler := trainer.scaler) is not None:
            protected["scaler"] = scaler
        self.job.protect(model=module, **protected, trainer=self._kept)
        self._steps = self.job.steps(data, until=min(ends))
        # The first step is begun before Lightning's loops are: it brings the job's state.
        self._kept.keep()
        return StepLoader(self._steps, self._kept, data, next(self._steps, None))

    def batch_to_device(self, batch: Any, device: Any = None, dataloader_idx: int = 0) -> Any:
        """Move a batch; a step of the job stands for the batches that its tasks will have."""
        if isinstance(batch, Step):
            return batch
        return super().batch_to_device(batch, device, dataloader_idx)

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        """Begin a step of the job."""
        self._step, self._is_fitting = batch, True
        self.follow_leader()

    def on_train_end(self) -> None:
        """Leave the job's loop."""
        self._is_fitting = False
        if self._steps is not None:
            self._steps.close()  # type: ignore[attr-defined]
        super().on_train_end()

    def _tasks(self, step: Step, batches: Iterator[Any]) -> Iterator[None]:
        """Walk through the tasks of a step, or of a round of it."""
        for batch in batches:
            module = self.lightning_module
            batch = self._trainer.precision_plugin.convert_input(batch)
            batch = module._on_before_batch_transfer(batch, dataloader_idx=0)
            self._batch = super().batch_to_device(batch, None, 0)
            self._trainer._logger_connector.on_batch_start(self._batch)
            yield
        self.loss = step.loss
        self.follow_leader()

    # ------------------------------------------------------------ one optimizer

    def optimizer_step(
        self, optimizer: Any, closure: Callable[[], Any], model: Any = None, **kwargs: Any
    ) -> Any:
        """Compute all tasks of the step, and then the optimizer step, once."""
        step = self._step
        if self._round is not None:  # within training_step: done after the round
            self._segments += 1
            return None
        if step is None or not self.lightning_module.automatic_optimization:
            return super().optimizer_step(optimizer, closure, model, **kwargs)

        def all_tasks() -> Any:
            found = None
            for _ in self._tasks(step, iter(step)):
                found = closure()
                if found is None:  # training_step returned None
                    step.skip()
            known = getattr(closure, "_result", None)
            if found is None or known is None:  # none of the step's batches was this worker's
                known = ClosureResult(closure_loss=None)
            known.loss = torch.tensor(step.loss)
            vars(closure)["_result"] = known
            return known.loss

        return super().optimizer_step(optimizer, all_tasks, model, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's training_step on the batch of the task under way."""
        if self.lightning_module.automatic_optimization:
            return super().training_step(self._batch, *args[1:], **kwargs)
        return self._rounds(*args[1:], **kwargs)

    def backward(self, closure_loss: Any, optimizer: Any, *args: Any, **kwargs: Any) -> Any:
        """Compute the task's share of the gradient; in a round, for its own optimizer only."""
        if self._round is not None and self._round != self._segments:
            return closure_loss
        if self._step is None or args or kwargs:
            raise UserError("backward takes a loss and nothing else in a job, in training_step")
        module, plugin = self.lightning_module, self.precision_plugin
        self.pre_backward(closure_loss)
        scaled = plugin.pre_backward(closure_loss, module)
        last, scaler = True if self._round is None else self._is_last, self._trainer.scaler
        self._step.backward(scaled if scaler is None else closure_loss, scaler, last=last)
        closure_loss = plugin.post_backward(closure_loss, module)
        self.post_backward(closure_loss)
        return closure_loss

    # ------------------------------------------------------------ several optimizers

    _is_last = True  # one backward for each step of an optimizer

    def _rounds(self, *args: Any, **kwargs: Any) -> Any:
        """Run a training_step that optimizes by itself: a round for each step of an optimizer.

        In each round it is run as a whole for every task, and the gradients of one of its steps
        count; the parameters are as the round before has left them.
        """
        step, kept, output = self._step, self._kept, None
        if step is None or kept is None:
            raise UserError("training_step was called outside of trainer.fit")
        loop = self._trainer.fit_loop.epoch_loop.manual_optimization
        number = 0
        while True:
            order: list[int] = []
            self._round = number
            with self._recording(order, quiet=number > 0):
                for _ in self._tasks(step, step.round()):
                    order.clear()
                    self._segments = 0
                    output = super().training_step(self._batch, *args, **kwargs)
            self._round = None
            kept.order = order or kept.order
            if number >= len(kept.order):
                raise UserError("training_step has called no optimizer's step()")
            loop._on_before_step()
            optimizer = self.optimizers[kept.order[number]]
            super().optimizer_step(optimizer, lambda: None, self.lightning_module)
            loop._on_after_step()
            number += 1
            if number == len(kept.order):
                return output

    @contextlib.contextmanager
    def _recording(self, order: list[int], quiet: bool) -> Iterator[None]:
        """Record which optimizers step, and let only `backward` change gradients."""
        module, both = self.lightning_module, [*self.optimizers, *self._lightning_optimizers]
        for index, each in enumerate(self._lightning_optimizers):
            each._on_before_step = lambda index=index: order.append(index)
            each._on_after_step = _do_nothing
        for each in both:
            each.zero_grad = _do_nothing
        module.clip_gradients = _refuse_clipping
        if quiet:
            module.log = module.log_dict = _do_nothing
        try:
            yield
        finally:
            for each in both:
                each.__dict__.pop("zero_grad", None)
            for each in self._lightning_optimizers:
                each._on_before_step = each._on_after_step = _do_nothing
            for name in ("clip_gradients", "log", "log_dict"):
                module.__dict__.pop(name, None)

    # ------------------------------------------------------------ workers

    @property
    def is_global_zero(self) -> bool:
        """Return whether this worker leads the job: that one writes and logs."""
        return self.job.is_leader

    def follow_leader(self) -> None:
        """Make this process rank 0 if it leads the job."""
        rank = 0 if self.job.is_leader else max(int(self.job.worker), 1)
        self.global_rank = self.local_rank = rank_zero_only.rank = rank

    def setup_environment(self) -> None:
        """Begin as a worker that may lead or not."""
        self.follow_leader()
        super().setup_environment()

    def broadcast(self, obj: Any, src: int = 0) -> Any:
        """Return the leader's, while training."""
        return self.job.agree(obj) if self._is_fitting else obj

    def reduce_boolean_decision(self, decision: bool, all: bool = True) -> bool:  # noqa: A002
        """Return the leader's decision, while training, such as to stop early."""
        return bool(self.job.agree(bool(decision))) if self._is_fitting else decision

    def save_checkpoint(
        self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None
    ) -> None:
        """Write a checkpoint on the leader, and return once a leader has."""
        written = False
        while True:
            if self.is_global_zero and not written:
                io = self.checkpoint_io
                io.save_checkpoint(checkpoint, filepath, storage_options=storage_options)
                written = True
            if not self._is_fitting or self.job.agree(written):
                break

    @property
    def _trainer(self) -> Any:
        return self.lightning_module.trainer

    def _refuse(self, loader: Any) -> None:
        """Raise UserError for a setting without a counterpart."""
        trainer, module = self._trainer, self.lightning_module
        if self._kept is not None:
            raise UserError("trainer.fit can be called once in a job: start a job for each")
        if not isinstance(loader, DataLoader):
            raise UserError(f"training data in a {type(loader).__name__}: give one DataLoader")
        if trainer.accumulate_grad_batches != 1:
            raise UserError(
                f"accumulate_grad_batches={trainer.accumulate_grad_batches} does not work in a "
                "job: its virtual ranks accumulate gradients; start it with more of them"
            )
        if trainer.reload_dataloaders_every_n_epochs:
            raise UserError("reload_dataloaders_every_n_epochs does not work in a job")
        if type(module).backward is not pl.LightningModule.backward:
            raise UserError("a LightningModule's own backward() does not work in a job: remove it")


class StepLoader:
    """Gives the job's steps to Lightning's loop, an epoch at a time."""

    def __init__(
        self, steps: Iterator[Step], kept: FitProgress, data: Batches, first: Step | None
    ) -> None:
        self.dataset = data.dataset
        self.batch_size = data.plan.batch_size * data.plan.virtual_ranks
        self._length = data.steps_per_epoch
        self._steps = steps
        self._kept = kept
        self._first = first

    def __len__(self) -> int:
        return self._length

    def __iter__(self) -> Iterator[Step]:
        while True:
            first, self._first = self._first, None
            self._kept.keep()
            step = first if first is not None else next(self._steps, None)
            if step is None:
                return
            yield step


class FitProgress:
    """Keeps the progress of Lightning's loops and callbacks between two steps, to be protected."""

    def __init__(self, trainer: Any) -> None:
        #: Optimizers in the order in which a module steps them.
        self.order: list[int] = []
        self._trainer = trainer
        self._state: dict[str, Any] = {}

    def keep(self) -> None:
        """Record the progress of all loops and callbacks."""
        trainer = self._trainer
        loops = copy.deepcopy(trainer.fit_loop.state_dict())
        progress = loops["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
        for counts in progress["zero_grad"].values():  # as many as this worker has had tasks
            counts.update(dict.fromkeys(counts, 0))
        callbacks = copy.deepcopy(call._call_callbacks_state_dict(trainer))
        self._state = {"loops": loops, "callbacks": callbacks, "order": list(self.order)}

    def state_dict(self) -> dict[str, Any]:
        """Return the progress that was recorded last."""
        return self._state

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the job's."""
        self._state = copy.deepcopy(dict(state))
        self.order = list(state["order"])
        trainer, callbacks = self._trainer, state["callbacks"]
        for each in trainer.callbacks:
            known = callbacks.get(each.state_key)
            if known is not None:
                if "dirpath" in known and hasattr(each, "dirpath"):
                    each.dirpath = known["dirpath"]
                each.load_state_dict(copy.deepcopy(known))
        trainer.fit_loop.load_state_dict(copy.deepcopy(state["loops"]))


def _do_nothing(*args: Any, **kwargs: Any) -> None:
    """Replace a call whose work is done elsewhere."""


def _refuse_clipping(*args: Any, **kwargs: Any) -> None:
    raise UserError("self.clip_gradients does not work in a job: gradients are not whole yet")

"""Offers Hugging Face's Trainer on the job's steps: one update is one step over V virtual ranks.

The loop is Holdfast's own; everything that it calls (losses, clipping, callbacks, logs, checkpoint
files) is the Trainer's. What the Trainer keeps in variables is protected as `trainer`.
"""

from __future__ import annotations

import math
import os
import shutil
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.data.sources import Batches
from holdfast.engine.train.data.streams import Stream
from holdfast.engine.train.job import Job, Step, join_once

try:
    import transformers
    from transformers.trainer_callback import ExportableState
    from transformers.trainer_utils import EvalLoopOutput, rotate_checkpoints

    from holdfast.trainers.accelerate import follow_leader, use_half_precision
except ImportError:
    raise UserError(
        "holdfast.trainers.transformers needs the package transformers: "
        "pip install 'holdfast[transformers]'"
    ) from None

# What differs between machines in a log's entry; it is not carried to workers that join.
_MEASURED = ("_runtime", "_per_second", "_preparation_time", "_mem_cpu", "_mem_gpu")
_OF_THIS_WORKER = ("is_local_process_zero", "is_world_process_zero", "stateful_callbacks")


class TrainerMixin:
    """Runs the training loop of a transformers.Trainer on the job's steps.

    `class MyTrainer(TrainerMixin, SFTTrainer)` does so for another subclass of it that leaves
    the training loop alone. `job`: the job that the script has joined, or that is joined now with
    the arguments' seed.
    """

    job: Job
    control: Any

    if TYPE_CHECKING:

        def __getattr__(self, name: str) -> Any: ...  # what transformers.Trainer has

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        """Take what transformers.Trainer takes. Raises UserError for what cannot be kept."""
        given = kwargs.get("args") or next(
            (each for each in args if isinstance(each, transformers.TrainingArguments)), None
        )
        self.job = join_once(seed=None if given is None else given.data_seed or given.seed)
        if given is not None:
            given.disable_tqdm = True  # a bar that a leader has begun cannot be taken over
        super().__init__(*args, **kwargs)
        _refuse(self.args, self.job.virtual_ranks)
        use_half_precision(self.accelerator)
        self._kept = TrainerProgress(self)
        self._turn: tuple[Step, float | None]  # the step, and the items of the batch under way
        self._is_protected = False
        self._begun = False  # on_train_begin was called
        self._writing: str | None = None  # where a checkpoint is written before it has its name
        follow_leader(self.job)

    # ------------------------------------------------------------ the loop

    def _inner_training_loop(
        self,
        batch_size: int | None = None,
        args: Any = None,
        resume_from_checkpoint: str | None = None,
        trial: Any = None,
        ignore_keys_for_eval: list[str] | None = None,
    ) -> Any:
        """Train on the job's steps; called by `train`."""
        if self._is_protected or trial is not None:
            raise UserError(
                "trainer.train() can be called once in a job, and not by hyperparameter_search: "
                "start a job for each training"
            )
        job, args = self.job, self.args
        loader = self.get_train_dataloader()
        data, per_epoch = _data_of(job, loader)
        if not per_epoch and args.max_steps <= 0:
            raise UserError("training on a stream needs TrainingArguments(max_steps=...)")
        max_steps = args.max_steps
        if max_steps <= 0:
            max_steps = math.ceil(args.num_train_epochs * per_epoch)
        per_epoch = per_epoch or max_steps
        epochs = math.ceil(max_steps / per_epoch)
        self._init_training_state(max_steps, per_epoch, epochs, resume_from_checkpoint, trial)
        model, _ = self._prepare_for_training(max_steps, loader, resume_from_checkpoint)
        self._initial_num_input_tokens_seen = 0
        self._initial_global_step = self._globalstep_last_logged = self.state.global_step
        self._tr_loss, self._total_loss_scalar = torch.tensor(0.0, dtype=torch.float64), 0.0
        self.current_gradient_accumulation_steps = 1
        self.accelerator.backward = self._backward
        self._is_protected = True
        optimizer = getattr(self.optimizer, "optimizer", self.optimizer)  # as Accelerate wraps it
        protected: dict[str, Any] = {"optimizer": optimizer, "scheduler": self.lr_scheduler}
        if self.accelerator.scaler is not None:
            protected["scaler"] = self.accelerator.scaler
        job.protect(model=self.model, **protected, trainer=self._kept)
        job.begin_at(self.state.global_step)
        start, samples = time.time(), max_steps * args.train_batch_size * job.virtual_ranks
        for step in job.steps(data, until=max_steps):
            if not self._begun:
                self._begin(trial, ignore_keys_for_eval)
            self._train_step(step, model, per_epoch)
            last = (step.index + 1) % per_epoch == 0
            self._finish_step(model, trial, ignore_keys_for_eval, start, last)
            if self.control.should_training_stop:
                break
        if not self._begun:
            self._begin(trial, None)
        return self._finalize_training(trial, samples, start)

    def _begin(self, trial: Any, ignore_keys: list[str] | None) -> None:
        """Make the calls that precede the first step, once the job's state has arrived."""
        self._begun = True
        self._follow()
        args, control = self.args, self.control
        self.control = self.callback_handler.on_train_begin(args, self.state, control)
        if args.eval_on_start and self.state.global_step == 0:
            self._is_protected = False  # each worker by itself, as the step has begun
            self._evaluate(trial, ignore_keys, skip_scheduler=True)
            self._is_protected = True

    def _train_step(self, step: Step, model: Any, per_epoch: int) -> None:
        """Compute this worker's tasks of a step, and update the parameters."""
        self._follow()
        call, args, state = self.callback_handler, self.args, self.state
        if step.index % per_epoch == 0:
            self.control = call.on_epoch_begin(args, state, self.control)
        self.control = call.on_step_begin(args, state, self.control)
        for inputs in step:
            items = self._get_num_items_in_batch([inputs], args.device)
            count = None if items is None else float(items)
            self._turn = step, count
            # The model divides by the batch's own items, and `_backward` multiplies again: right
            # also for models that ignore the number of items they are given.
            self.training_step(model, inputs, None if items is None else items.clamp(min=1))
        self._follow()  # the leader may have changed
        norm = self._clip_grad_norm(model) if args.max_grad_norm > 0 else None
        self._norm = self._get_grad_norm(model, grad_norm=norm)
        self.control = call.on_pre_optimizer_step(args, state, self.control)
        self.optimizer.step()
        self.control = call.on_optimizer_step(args, state, self.control)
        self._rate = self._get_learning_rate()
        skipped = self.accelerator.optimizer_step_was_skipped
        if not skipped and not _waits_for_metrics(self.lr_scheduler):
            self.lr_scheduler.step()
        model.zero_grad()
        if args.logging_nan_inf_filter and not math.isfinite(step.loss):
            self._tr_loss += self._tr_loss / (1 + state.global_step - self._globalstep_last_logged)
        else:
            self._tr_loss += step.loss
        state.global_step = step.index + 1
        state.epoch = state.global_step / per_epoch
        self.control = call.on_step_end(args, state, self.control)

    def _finish_step(
        self, model: Any, trial: Any, ignore_keys: Any, start: float, last_of_epoch: bool
    ) -> None:
        """Log, evaluate and save, where callbacks have asked for it."""
        if self.control.should_epoch_stop:
            raise UserError(
                "a callback has set should_epoch_stop: an epoch of a job cannot be cut short; set "
                "should_training_stop"
            )

        def attend() -> None:
            self._maybe_log_save_evaluate(
                self._tr_loss, self._norm, model, trial, self.state.epoch, ignore_keys, start,
                learning_rate=self._rate,
            )  # fmt: skip

        attend()
        if last_of_epoch or self.control.should_training_stop:
            self.control = self.callback_handler.on_epoch_end(self.args, self.state, self.control)
            attend()

    def _backward(self, loss: torch.Tensor, **kwargs: Any) -> None:
        step, items = self._turn
        share = loss if items is None else loss * max(items, 1.0)
        step.backward(share, self.accelerator.scaler, weight=items)

    def _follow(self) -> None:
        leads = follow_leader(self.job)
        self.state.is_world_process_zero = self.state.is_local_process_zero = leads

    # ------------------------------------------------------------ evaluation

    def evaluation_loop(
        self,
        dataloader: Any,
        description: str,
        prediction_loss_only: bool | None = None,
        ignore_keys: list[str] | None = None,
        metric_key_prefix: str = "eval",
    ) -> Any:
        """Share an evaluation for the loss over all workers; do any other on each."""
        alone = isinstance(dataloader.dataset, IterableDataset)
        if not (self._is_protected and prediction_loss_only) or self.compute_metrics or alone:
            args = dataloader, description, prediction_loss_only, ignore_keys, metric_key_prefix
            return super().evaluation_loop(*args)  # type: ignore[misc]
        self.callback_handler.eval_dataloader = dataloader

        def loss_of(inputs: Any) -> torch.Tensor:
            loss, _, _ = self.prediction_step(self.model_wrapped, inputs, True, ignore_keys)
            if loss is None:
                raise UserError("the evaluation's batches have no labels: use trainer.predict")
            return loss.mean()

        data, batch_size = dataloader.dataset, self.args.eval_batch_size
        found = self.job.evaluate(loss_of, data, batch_size, collate_fn=dataloader.collate_fn)
        return EvalLoopOutput(
            predictions=None,
            label_ids=None,
            metrics={f"{metric_key_prefix}_loss": found},
            num_samples=len(data),
        )

    def _determine_best_metric(self, metrics: dict[str, float], trial: Any) -> bool:
        better: bool = super()._determine_best_metric(metrics, trial)  # type: ignore[misc]
        if better and self.args.load_best_model_at_end:
            is_peft = hasattr(self.model, "peft_config")  # then its base never changes
            frozen = find_frozen(self.model, self.optimizer) if is_peft else ()
            self._kept.best = {
                name: value.detach().cpu().clone()
                for name, value in self.model.state_dict().items()
                if name not in frozen
            }
        return better

    def _load_best_model(self) -> None:
        """Load the best parameters: from the job's state, which the loss of a disk cannot hurt."""
        if self._kept.best:
            self.model.load_state_dict(self._kept.best, strict=False)
        else:
            super()._load_best_model()  # type: ignore[misc]

    # ------------------------------------------------------------ files

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the model for `from_pretrained`, on the leader only."""
        if follow_leader(self.job):
            super().save_model(output_dir, _internal_call)  # type: ignore[misc]

    def _get_output_dir(self, trial: Any) -> str:
        return self._writing or self.args.output_dir

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Write a checkpoint on the leader, and return once a leader has.

        It gets its name when it is complete: one of a leader that died is never half there.
        """
        folder, state = Path(self.args.output_dir), self.state
        name = f"checkpoint-{state.global_step}"
        best, written = state.best_global_step, False
        if best:
            state.best_model_checkpoint = os.path.join(folder, f"checkpoint-{best}")
        while True:
            if follow_leader(self.job) and not written:
                known = state.best_model_checkpoint
                self._writing = os.path.join(folder, f"partial-{name}")
                shutil.rmtree(self._writing, ignore_errors=True)
                super()._save_checkpoint(model, trial)  # type: ignore[misc]
                state.best_model_checkpoint = known
                partial = Path(self._writing, name)
                state.save_to_json(str(partial / "trainer_state.json"))
                shutil.rmtree(folder / name, ignore_errors=True)
                partial.rename(folder / name)
                mark_newest(folder / name)
                Path(self._writing).rmdir()
                self._writing, written = None, True
                limit = self.args.save_total_limit
                rotate_checkpoints(
                    output_dir=str(folder), save_total_limit=limit, best_model_checkpoint=known,
                    use_mtime=True,
                )  # fmt: skip
            if self.job.agree(written):
                break


def find_frozen(model: torch.nn.Module, optimizer: Any) -> set[str]:
    """Return the names of all parameters that the optimizer does not update."""
    updated = {id(p) for group in optimizer.param_groups for p in group["params"]}
    every = model.named_parameters(remove_duplicate=False)
    return {name for name, parameter in every if id(parameter) not in updated}


def mark_newest(path: Path) -> None:
    """Give a checkpoint the latest time of all in its folder.

    Transformers removes those with the earliest times, and the clocks of two leaders may differ.
    """
    others = path.parent.glob("checkpoint-*")
    newest = max((each.stat().st_mtime for each in others if each != path), default=0.0)
    if path.stat().st_mtime <= newest:
        os.utime(path, (newest + 1, newest + 1))


class Trainer(TrainerMixin, transformers.Trainer):
    """Is transformers.Trainer, fault-tolerant: the same arguments, methods and callbacks."""


class TrainerProgress:
    """Keeps a Trainer's variables in the form that Holdfast protects."""

    def __init__(self, trainer: Any) -> None:
        self._trainer = trainer
        #: The best parameters, without the base of a PEFT model, for load_best_model_at_end.
        self.best: dict[str, torch.Tensor] = {}

    def state_dict(self) -> dict[str, Any]:
        """Return all of it that does not differ between workers."""
        trainer = self._trainer
        state = {k: v for k, v in vars(trainer.state).items() if k not in _OF_THIS_WORKER}
        state["log_history"] = [
            {k: v for k, v in entry.items() if not k.endswith(_MEASURED)}
            for entry in state["log_history"]
        ]
        return {
            "state": state,
            "control": dict(vars(trainer.control)),
            "callbacks": [each.state()["attributes"] for each in self._callbacks()],
            "loss": float(trainer._tr_loss),
            "total_loss": trainer._total_loss_scalar,
            "logged_at": trainer._globalstep_last_logged,
            "began_at": trainer._initial_global_step,
            "best": dict(self.best),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the job's."""
        trainer = self._trainer
        vars(trainer.state).update(state["state"])
        vars(trainer.control).update(state["control"])
        for each, attributes in zip(self._callbacks(), state["callbacks"], strict=True):
            vars(each).update(attributes)
        trainer._tr_loss.fill_(state["loss"])
        trainer._total_loss_scalar = state["total_loss"]
        trainer._globalstep_last_logged = state["logged_at"]
        trainer._initial_global_step = state["began_at"]
        self.best = dict(state["best"])

    def _callbacks(self) -> list[Any]:
        known = self._trainer.callback_handler.callbacks
        return [each for each in known if isinstance(each, ExportableState)]


def _data_of(job: Job, loader: Any) -> tuple[Batches | Stream, int]:
    """Return the training data, and its steps per epoch; 0 of a stream."""
    if isinstance(loader.dataset, IterableDataset):
        stream = job.stream(loader.dataset, loader.batch_size, collate_fn=loader.collate_fn)
        return stream, 0
    batches = loader.batch_sampler
    if type(batches).__name__ != "BatchSampler":
        raise UserError(
            f"batches by a {type(batches).__name__} cannot be kept in a job: leave out the "
            "train_sampling_strategy, as each virtual rank draws batches of its own"
        )
    shuffles = type(batches.sampler).__name__ in ("RandomSampler", "SeedableRandomSampler")
    order: dict[str, Any] = {"shuffle": True} if shuffles else {"sampler": batches.sampler}
    with warnings.catch_warnings():  # the Trainer's own generator is passed on purpose
        warnings.filterwarnings("ignore", message="of this DataLoader")
        data = job.batches(
            DataLoader(  # as it was before Accelerate had it
                loader.dataset,
                batch_size=batches.batch_size,
                **order,
                drop_last=batches.drop_last,
                num_workers=loader.num_workers,
                collate_fn=loader.collate_fn,
                pin_memory=loader.pin_memory,
                prefetch_factor=loader.prefetch_factor,
                multiprocessing_context=loader.multiprocessing_context,
            )
        )
    if not isinstance(data, Batches):
        raise UserError(
            f"samples by a {type(batches.sampler).__name__} cannot be kept in this Trainer: leave "
            "out the train_sampling_strategy"
        )
    return data, data.steps_per_epoch


def _waits_for_metrics(scheduler: Any) -> bool:
    return type(scheduler).__name__ in ("ReduceLROnPlateau", "GreedyLR")


def _refuse(args: Any, virtual_ranks: int) -> None:
    """Raise UserError for arguments that have no counterpart."""
    accumulated = args.gradient_accumulation_steps
    if accumulated not in (1, virtual_ranks):
        raise UserError(
            f"gradient_accumulation_steps={accumulated} in a job of {virtual_ranks} virtual ranks: "
            "these take the place of accumulation; start the job with "
            f"--virtual {accumulated}, or give 1"
        )
    reasons = {
        "deepspeed": "each worker holds the whole model",
        "fsdp": "each worker holds the whole model",
        "fp16_full_eval": "evaluate in the precision of training",
        "bf16_full_eval": "evaluate in the precision of training",
        "auto_find_batch_size": "the batch size is a part of the job",
        "push_to_hub": "call trainer.push_to_hub() after training where trainer.job.is_leader",
    }
    for name, why in reasons.items():
        if getattr(args, name, None):
            raise UserError(f"TrainingArguments({name}=...) does not work in a job: {why}")
    if args.include_num_input_tokens_seen not in (False, "no"):
        raise UserError(
            "TrainingArguments(include_num_input_tokens_seen=...) does not work in a job: a worker "
            "sees its own batches only"
        )
    args._n_gpu = min(args.n_gpu, 1)  # no DataParallel within a worker

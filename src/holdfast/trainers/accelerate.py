"""Offers Accelerate's Accelerator on the job's steps, for loops that people have written.

The body of the training loop runs once for each task. Its calls of optimizers, schedulers and
clipping are recorded, and carried out, in order, once the step is committed: until then another
worker may fail, and this one compute more tasks.

Transformers and Accelerate ask PartialState for the process that writes and logs; it follows the
job's leader. A worker of a job is a world of its own to them, so that none of their collectives is
ever called.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau
from torch.utils.data import DataLoader

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.job import Batches, Job, Step, join_once, plain_batches

try:
    import accelerate
    from accelerate import PartialState
    from accelerate.utils import send_to_device
except ImportError:
    raise UserError(
        "holdfast.trainers.accelerate needs the package accelerate: "
        "pip install 'holdfast[accelerate]'"
    ) from None


def follow_leader(job: Job) -> bool:
    """Make this process the main one if it leads the job, else not; returns which."""
    state, leads = PartialState(), job.is_leader
    state.process_index = state.local_process_index = 0 if leads else max(int(job.worker), 1)
    return leads


def use_half_precision(accelerator: accelerate.Accelerator) -> None:
    """Use float16 and a scaler for fp16 on a CPU, too, where Accelerate computes in float32."""
    if accelerator.mixed_precision == "fp16" and accelerator.device.type == "cpu":
        handler = accelerator.scaler_handler
        options = {} if handler is None else handler.to_kwargs()
        accelerator.scaler = torch.amp.GradScaler("cpu", **options)
        accelerator.native_amp = True


class RecordedCalls:
    """Records the calls of a loop's body, to be made once the step is committed.

    It is protected: a worker without a batch in the last step of an epoch makes the calls of
    earlier bodies. The gradients are those of the whole step by then, so all workers find the same
    ones too large for float16, and leave out the same updates.
    """

    def __init__(self) -> None:
        self.scaler: torch.amp.GradScaler | None = None
        #: Optimizers, by number, whose last update was left out.
        self.skipped: list[int] = []
        #: The parameters of all prepared models.
        self.parameters: list[torch.nn.Parameter] = []
        self.optimizers: list[Optimizer] = []
        self.schedulers: list[Any] = []
        #: Steps of a scheduler for one call, as Accelerate does for each process.
        self.times = 1
        self.is_recording = False
        #: The norm of the last gradient that was clipped by norm.
        self.norm = torch.tensor(float("nan"))
        self._calls: list[list[Any]] = []  # calls of the body under way
        self._done: list[list[Any]] = []  # in the last step
        self._unscaled: list[int] = []  # optimizers whose gradients are

    def begin_step(self) -> None:
        """Begin a step, in which this worker may have no batch."""
        self._calls = self._done

    def begin(self) -> None:
        """Begin a body; what the body before has called counts no more."""
        self.is_recording, self._calls = True, []

    def add(self, *call: Any) -> None:
        """Record a call, or make it at once outside of bodies."""
        if self.is_recording:
            self._calls.append(list(call))
        else:
            self._do(*call)

    def do_all(self) -> None:
        """Carry out what the last body has called. UserError if it has made no update."""
        self.is_recording = False
        if not any(call[0] == "step" for call in self._calls):
            raise UserError(
                "a step's loop body did not call optimizer.step(): call it for every batch, as "
                "virtual ranks take the place of gradient accumulation"
            )
        self._done = self._calls
        self.skipped.clear()
        for call in self._done:
            self._do(*call)
        self._unscaled.clear()
        if self.scaler is not None:
            self.scaler.update()

    def places(self, parameters: Iterable[torch.nn.Parameter] | torch.Tensor) -> list[int]:
        """Return the places of parameters among all; UserError for one of no prepared model."""
        given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
        known = {id(each): place for place, each in enumerate(self.parameters)}
        try:
            return [known[id(each)] for each in given]
        except KeyError:
            raise UserError(
                "gradients of a parameter were to be clipped that no prepared model has: give the "
                "model to accelerator.prepare"
            ) from None

    def state_dict(self) -> dict[str, Any]:
        """Return the calls of the last step."""
        return {"calls": [list(call) for call in self._done], "skipped": list(self.skipped)}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the job's."""
        self._done = [list(call) for call in state["calls"]]
        self.skipped = list(state.get("skipped", ()))

    def _do(self, kind: str, *arguments: Any) -> None:
        match kind, arguments:
            case "step", (index,):
                self._step(index)
            case "zero", (index,):
                self.optimizers[index].zero_grad()
            case "schedule", (index,):
                self._schedule(self.schedulers[index])
            case "unscale", ():
                self._unscale()
            case "norm", (places, most, norm_type):
                self._unscale()
                clipped = [self.parameters[place] for place in places]
                self.norm = torch.nn.utils.clip_grad_norm_(clipped, most, norm_type)
            case "value", (places, most):
                self._unscale()
                clipped = [self.parameters[place] for place in places]
                torch.nn.utils.clip_grad_value_(clipped, most)

    def _step(self, index: int) -> None:
        optimizer = self.optimizers[index]
        if self.scaler is None:
            optimizer.step()
            return
        self.scaler.step(optimizer)
        if any(bool(found) for found in self.scaler._found_inf_per_device(optimizer).values()):
            self.skipped.append(index)

    def _schedule(self, scheduler: Any) -> None:
        """Step a scheduler, unless the update of its optimizer was left out."""
        owner = getattr(scheduler.optimizer, "optimizer", scheduler.optimizer)
        if all(self.optimizers[index] is not owner for index in self.skipped):
            for _ in range(self.times):
                scheduler.step()

    def _unscale(self) -> None:
        """Divide the gradients by the scale, once in a step."""
        for index, optimizer in enumerate(self.optimizers):
            if self.scaler is not None and index not in self._unscaled:
                self._unscaled.append(index)
                self.scaler.unscale_(optimizer)


class RecordedOptimizer(Optimizer):
    """Wraps an optimizer so that only `step` and `zero_grad` are recorded."""

    def __init__(self, optimizer: Optimizer, calls: RecordedCalls, index: int) -> None:
        self.optimizer = optimizer
        self._calls = calls
        self._index = index

    def step(self, closure: Any = None) -> None:  # type: ignore[override]
        """Record a step of the optimizer. UserError with a closure."""
        if closure is not None:
            raise UserError("optimizer.step(closure) does not work in a job: call backward before")
        self._calls.add("step", self._index)

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Record that gradients are dropped."""
        self._calls.add("zero", self._index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["optimizer"], name)

    def state_dict(self) -> dict[str, Any]:
        """Return the optimizer's state."""
        return self.optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load the optimizer's state."""
        self.optimizer.load_state_dict(state_dict)


class RecordedScheduler:
    """Wraps a scheduler so that `step` is recorded."""

    def __init__(self, scheduler: Any, calls: RecordedCalls, index: int) -> None:
        self.scheduler = scheduler
        self._calls = calls
        self._index = index

    def step(self, *args: Any) -> None:
        """Record a step of the scheduler. UserError with a metric."""
        if args:
            raise UserError(
                "scheduler.step(metric) does not work in a loop's body: step the scheduler itself"
            )
        self._calls.add("schedule", self._index)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["scheduler"], name)


class JobLoader:
    """Is a DataLoader: while the model trains, an epoch of the job's steps, else as it was.

    A worker gets the batches of its own tasks, and evaluates all of a dataset by itself.
    """

    def __init__(self, owner: Accelerator, loader: DataLoader[Any]) -> None:
        self._owner = owner
        self._loader = loader
        self._data: Batches | None = None

    def __iter__(self) -> Iterator[Any]:
        owner = self._owner
        if owner.is_training:
            yield from owner._train(self._batches())
        else:
            for batch in self._loader:
                yield send_to_device(batch, owner.device)

    def __len__(self) -> int:
        """Return the steps of an epoch: V virtual ranks share each."""
        return self._batches().steps_per_epoch

    def __getattr__(self, name: str) -> Any:
        return getattr(self.__dict__["_loader"], name)

    @property
    def total_batch_size(self) -> int:
        """Return the samples of a step of the job."""
        return (self._loader.batch_size or 1) * self._owner.num_processes

    def set_epoch(self, epoch: int) -> None:
        """Take no notice: the job knows in which epoch it is."""

    def _batches(self) -> Batches:
        if self._data is None:
            self._data = plain_batches(self._owner.job, self._loader)
        return self._data


class EachForItself(accelerate.Accelerator):
    """Is an Accelerator whose processes exchange no data by themselves: the job's steps do it.

    Each worker evaluates all of a dataset, so a gathered or reduced tensor is the tensor itself.
    """

    @contextlib.contextmanager
    def accumulate(self, *models: Any) -> Iterator[None]:
        """Enter an empty block: virtual ranks take the place of accumulation."""
        yield

    def no_sync(self, model: Any = None) -> Any:
        """Refuse to leave gradients alone. UserError."""
        raise UserError("accelerator.no_sync does not work in a job: leave it out")

    def wait_for_everyone(self) -> None:
        """Return at once: workers meet in steps and at the ends of loops."""

    def gather(self, tensor: Any) -> Any:
        """Return the tensor."""
        return tensor

    def gather_for_metrics(self, input_data: Any, use_gather_object: bool = False) -> Any:
        """Return the data."""
        return input_data

    def reduce(self, tensor: Any, reduction: str = "sum", scale: float = 1.0) -> Any:
        """Return the tensor."""
        return tensor

    def save_state(self, *args: Any, **kwargs: Any) -> str:
        """Refuse to save in this form. UserError."""
        raise UserError(
            "accelerator.save_state does not work in a job: start it with --store, which saves the "
            "whole job's state; save_model writes the model for use elsewhere"
        )

    def load_state(self, *args: Any, **kwargs: Any) -> None:
        """Refuse to load in this form. UserError."""
        raise UserError(
            "accelerator.load_state does not work in a job: `holdfast resume` goes on from a "
            "checkpoint of the job"
        )


class Accelerator(EachForItself):
    """Is accelerate.Accelerator with virtual ranks for processes.

    `max_steps`: training loops end after this number of steps, instead of a `break`. UserError for
    settings that a job cannot keep.
    """

    def __init__(self, *args: Any, max_steps: int | None = None, **kwargs: Any) -> None:
        """Join the job, unless the script has, and prepare for it."""
        super().__init__(*args, **kwargs)
        self.job = join_once()
        #: The loss of the whole job in its last step.
        self.last_loss = float("nan")
        self.completed_steps = 0  # the job's
        self._max_steps = max_steps
        self._calls = RecordedCalls()
        self._calls.times = self.job.virtual_ranks
        self._modules: list[torch.nn.Module] = []
        self._step: Step | None = None
        self._until = 0  # where the training loop ends that was entered last
        self._is_protected = False
        accumulated = self.gradient_accumulation_steps
        if accumulated not in (1, self.job.virtual_ranks):
            raise UserError(
                f"gradient_accumulation_steps={accumulated} in a job of {self.job.virtual_ranks} "
                "virtual ranks: these take the place of accumulation; start the job with "
                f"--virtual {accumulated}, or give 1"
            )
        if self.fp8_enabled or self.distributed_type.value != "NO":
            raise UserError(
                f"an Accelerator of {self.distributed_type} with mixed_precision="
                f"{self.mixed_precision!r} does not work in a job: give 'no', 'bf16' or 'fp16', "
                "and no DeepSpeed, FSDP or other plugin"
            )
        use_half_precision(self)
        self._calls.scaler = self.scaler

    # ------------------------------------------------------------ what is prepared

    def prepare(self, *args: Any, device_placement: list[bool] | None = None) -> Any:
        """Return each object in the form that the loop uses it in."""
        found = [self._prepare_one(each) for each in args]
        return found[0] if len(found) == 1 else tuple(found)

    def _prepare_one(self, each: Any) -> Any:
        calls = self._calls
        if isinstance(each, torch.nn.Module):
            self._modules.append(each)
            calls.parameters.extend(each.parameters())
            return self.prepare_model(each)
        if isinstance(each, RecordedOptimizer | RecordedScheduler | JobLoader):
            return each
        if isinstance(each, Optimizer):
            calls.optimizers.append(each)
            return RecordedOptimizer(each, calls, len(calls.optimizers) - 1)
        if isinstance(each, LRScheduler | ReduceLROnPlateau):
            calls.schedulers.append(each)
            return RecordedScheduler(each, calls, len(calls.schedulers) - 1)
        return JobLoader(self, each) if isinstance(each, DataLoader) else each

    def _protect(self) -> None:
        if self._is_protected:
            return
        self._is_protected = True
        named: dict[str, list[Any]] = {"model": self._modules, "optimizer": self._calls.optimizers}
        named["scheduler"] = self._calls.schedulers
        found: dict[str, Any]
        found = {f"{n}{i or ''}": each for n, all_ in named.items() for i, each in enumerate(all_)}
        if self.scaler is not None:
            found["scaler"] = self.scaler
        self.job.protect(**found, calls=self._calls)

    # ------------------------------------------------------------ the loop

    @property
    def is_training(self) -> bool:
        """Return whether a loop over a loader trains: a prepared model does, and with gradients."""
        return torch.is_grad_enabled() and any(each.training for each in self._modules)

    def _train(self, data: Batches) -> Iterator[Any]:
        self._protect()
        self._until += data.steps_per_epoch
        if self._max_steps is not None:
            self._until = min(self._until, self._max_steps)
        for step in self.job.steps(data, until=self._until):
            follow_leader(self.job)
            self._step = step
            self._calls.begin_step()
            for batch in step:
                self._calls.begin()
                yield send_to_device(batch, self.device)
            self._step, self.last_loss, self.completed_steps = None, step.loss, step.index + 1
            follow_leader(self.job)
            self._calls.do_all()
        self.completed_steps = self._until

    def backward(self, loss: torch.Tensor, *, weight: Any = None, **kwargs: Any) -> None:
        """Compute this batch's share of the gradient; `weight` as for `step.backward`."""
        if self._step is None:
            raise UserError(
                "accelerator.backward was called outside of a training loop: give the loader to "
                "accelerator.prepare, and call model.train() before the loop"
            )
        self._step.backward(loss, self.scaler, weight=weight)

    def unscale_gradients(self, optimizer: Any = None) -> None:
        """Record that gradients are divided by the scale, as clipping does by itself."""
        self._calls.add("unscale")

    @property
    def optimizer_step_was_skipped(self) -> bool:
        """Return whether the last step left out an update, as gradients were not finite."""
        return bool(self._calls.skipped)

    def clip_grad_norm_(
        self, parameters: Any, max_norm: float, norm_type: float = 2
    ) -> torch.Tensor:
        """Record that gradients are clipped; returns the norm of the step before."""
        self._calls.add("norm", self._calls.places(parameters), float(max_norm), float(norm_type))
        return self._calls.norm

    def clip_grad_value_(self, parameters: Any, clip_value: float) -> None:
        """Record that gradients are clipped."""
        self._calls.add("value", self._calls.places(parameters), float(clip_value))

    # ------------------------------------------------------------ processes

    @property
    def num_processes(self) -> int:
        """Return V, the virtual ranks: batch sizes and schedules are those of V processes."""
        return self.job.virtual_ranks if "job" in vars(self) else 1

    @property
    def is_main_process(self) -> bool:
        """Return whether this worker leads the job."""
        return follow_leader(self.job)

    @property
    def is_local_main_process(self) -> bool:
        """Return whether this worker leads the job."""
        return follow_leader(self.job)

    def print(self, *args: Any, **kwargs: Any) -> None:
        """Print on the leader."""
        if self.is_main_process:
            super().print(*args, **kwargs)

    def save_model(self, model: Any, *args: Any, **kwargs: Any) -> None:
        """Save a model, on the leader only."""
        if self.is_main_process:
            super().save_model(model, *args, **kwargs)

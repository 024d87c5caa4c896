"""Trains by Downpour SGD: replicas compute at stale parameters, and their pushes never wait.

A recipe: copy this file next to your script, and import it from there.

Dean et al. described it in "Large Scale Distributed Deep Networks" (2012). There each replica goes
at its own pace, so two runs of one job differ. Here a virtual rank is a replica, and the order in
which pushes are applied is fixed, so they do not.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.func import functional_call

from holdfast import Step, UserError
from holdfast.tables import (
    Embedding,
    EmbeddingBag,
    EmbeddingBagCollection,
    EmbeddingCollection,
    RowOptimizer,
)

# The name under which tasks hand their pushes over.
PUSH = "downpour"
TABLES = (Embedding, EmbeddingBag, EmbeddingCollection, EmbeddingBagCollection)
Push = list[torch.Tensor]


class Downpour(torch.optim.Optimizer):
    """Updates a model by the pushes of many replicas, which train copies of it for a while.

        downpour = Downpour(model, holdfast.tables.Adagrad(lr=0.05), n_push=4, n_fetch=8)
        job.protect(model=model, downpour=downpour)
        data = job.batches(dataset, batch_size=4 * 32)  # 4 minibatches of 32 for each replica
        for step in job.steps(data, until=1000):
            for batch in step:
                for inputs, targets in downpour.minibatches(step, batch):
                    downpour.backward(loss_fn(downpour(inputs), targets))
            downpour.step(step)

    Each virtual rank is a replica. In a step of the job it takes `n_push` minibatches, updates its
    own copy of the parameters after each, by gradient descent with the rate `local_lr`, and pushes
    the sum of the gradients. After the step `optimizer` applies the pushes to the model one after
    the other, in the order of virtual ranks. A replica fetches the model's parameters after every
    `n_fetch` minibatches; replicas take turns. In the first `warm_start` steps all replicas fetch,
    and the mean of their pushes is applied once.

    `optimizer`: a rule for rows, applied to each parameter as a matrix whose rows belong to the
    first dimension; its rate is this optimizer's, so schedulers work. `local_lr`: None for the same
    rate. `n_fetch`: a multiple of `n_push`; None for `n_push`. If it is larger, each worker keeps a
    copy of the parameters for each virtual rank. Every push travels to every worker.

    It trains the parameters that require gradients, and freezes them: step.backward does not see
    them. Buffers are the model's own. UserError for bad settings, for a model without parameters
    to train, and for one with tables of holdfast.tables, which have an optimizer of their own.
    """

    # A job whose parameters are all frozen is refused, unless one of its objects has this.
    trains_frozen = True

    def __init__(
        self,
        model: nn.Module,
        optimizer: RowOptimizer,
        *,
        local_lr: float | None = None,
        n_push: int = 1,
        n_fetch: int | None = None,
        warm_start: int = 0,
    ) -> None:
        n_fetch = n_push if n_fetch is None else n_fetch
        _check(optimizer, local_lr, n_push, n_fetch, warm_start)
        if found := next((each for each in model.modules() if isinstance(each, TABLES)), None):
            raise UserError(
                f"Downpour: the model contains holdfast.tables.{type(found).__name__}, whose rows "
                "have an optimizer of their own: keep it outside of this model"
            )
        self._names = [name for name, p in model.named_parameters() if p.requires_grad]
        if not self._names:
            raise UserError("Downpour: no parameter of the model requires a gradient")
        params = [model.get_parameter(name) for name in self._names]
        settings = {"lr": optimizer.lr, "local_lr": local_lr, "pushes": 0}
        super().__init__(params, settings)
        model.requires_grad_(False)
        self._model, self._rule = model, optimizer
        self._n_push, self._warm_start = n_push, warm_start
        # Steps from one fetch of a replica to the next.
        self._period = n_fetch // n_push
        self._params: Sequence[torch.Tensor] = params
        # The parameters of the replica whose batch the script has, the sum of its gradients, and
        # a loss for each minibatch of the batch.
        self._replica: Push = []
        self._push: Push = []
        self._losses: list[float] = []

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Call the model with the parameters of the replica whose minibatch the script has."""
        if not self._replica:
            raise UserError(
                "Downpour: the model of a replica was called without a minibatch: call it in the "
                "loop over downpour.minibatches(step, batch), and the model itself elsewhere"
            )
        names = zip(self._names, self._replica, strict=True)
        return functional_call(self._model, dict(names), args, kwargs)

    def minibatches(self, step: Step, batch: Any) -> Iterator[Any]:
        """Yield the minibatches of a batch: its tensors cut along the first dimension.

        After the last one, hand over the push and the mean of the losses. `batch`: a tensor, or a
        tuple, list or dictionary of tensors of one length; of any kind if `n_push` is 1. UserError
        if it cannot be cut, and for a minibatch without `backward`.
        """
        rank = step.virtual_rank
        self._begin(rank)
        sizes = []
        for size, part in _cut(batch, self._n_push) if self._n_push > 1 else [(1, batch)]:
            yield part
            sizes.append(size)
            if len(self._losses) != len(sizes):
                raise UserError(
                    f"a minibatch had {len(self._losses) - len(sizes) + 1} calls of "
                    "downpour.backward(loss): make one for each minibatch"
                )
        total = sum(size * loss for size, loss in zip(sizes, self._losses, strict=True))
        step.gather(PUSH, [rank, *self._push])
        self._replica = []
        # It has no other gradient than its own: the parameters' are in the push.
        mean = torch.tensor(total / sum(sizes), dtype=torch.float64, requires_grad=True)
        step.backward(mean)

    def backward(self, loss: torch.Tensor) -> None:
        """Add the gradient of a minibatch's mean loss to the push, and update the replica.

        `loss`: a scalar. UserError for anything else, and outside of a minibatch.
        """
        if not self._replica:
            raise UserError("downpour.backward was called without a minibatch")
        if loss.numel() != 1:
            raise UserError(
                f"downpour.backward needs a scalar loss, not {list(loss.shape)}: use mean()"
            )
        found = torch.autograd.grad(loss, self._replica, allow_unused=True, materialize_grads=True)
        grads = [each.to_dense() if each.is_sparse else each for each in found]
        first = not self._losses
        self._losses.append(float(loss.detach()))
        with torch.no_grad():
            self._push = grads if first else list(torch._foreach_add(self._push, grads))
            if self._n_push > 1:
                moved = torch._foreach_add(self._replica, grads, alpha=-self._local_lr)
                self._replica = [each.requires_grad_() for each in moved]

    @torch.no_grad()
    def step(self, step: Step) -> None:  # type: ignore[override]
        """Apply the pushes of a step, after its batches. UserError if no task has made one."""
        if callable(step) or PUSH not in step.gathered:
            raise UserError(
                "downpour.step(step) needs a step of the job whose batches went through "
                "downpour.minibatches(step, batch), and takes no closure"
            )
        pushes: dict[int, Push] = {rank: push for rank, *push in step.gathered[PUSH]}
        if self._period > 1:
            self._keep_replicas(pushes)
        warm = step.index < self._warm_start
        for push in [_mean(list(pushes.values()))] if warm else pushes.values():
            self._apply(push)
        if self._period > 1:
            for rank, push in pushes.items():
                due = warm or (step.index + 1 + rank) % self._period == 0
                self._move_replica(rank, None if due else push)

    # ------------------------------------------------------------ the model

    @property
    def _local_lr(self) -> float:
        group = self.param_groups[0]
        return float(group["lr"] if group["local_lr"] is None else group["local_lr"])

    def _apply(self, push: Push) -> None:
        """Update the model's parameters by one push."""
        group = self.param_groups[0]
        group["pushes"] += 1
        for param, grad in zip(self._params, push, strict=True):
            rows, state = _as_rows(param), self.state[param]
            sizes = self._rule.slots(rows.shape[1])
            for name, (width, first) in sizes.items():
                if name not in state:
                    state[name] = rows.new_full((len(rows), width), first)
            slots = {name: state[name] for name in sizes}
            self._rule.update(rows, slots, _as_rows(grad), float(group["lr"]), group["pushes"])
            # The rows of a parameter that are not contiguous were copied.
            if rows.data_ptr() != param.data_ptr():
                param.copy_(rows.view(param.shape))

    # ------------------------------------------------------------ replicas

    def _begin(self, rank: int) -> None:
        """Begin a task with the replica of this virtual rank, as the last step has left it."""
        self._losses, self._push = [], []
        kept = [self.state[p].get(_name(rank), p) for p in self._params]
        self._replica = [each.detach().requires_grad_() for each in kept]

    def _keep_replicas(self, ranks: Mapping[int, Push]) -> None:
        """Make a copy of the parameters for each replica that has none."""
        for rank, param in itertools.product(ranks, self._params):
            if _name(rank) not in self.state[param]:
                self.state[param][_name(rank)] = param.clone()

    def _move_replica(self, rank: int, push: Push | None) -> None:
        """Update a replica by its own push; None: by the model's parameters, which it fetches."""
        for number, param in enumerate(self._params):
            copy = self.state[param][_name(rank)]
            if push is None:
                copy.copy_(param)
            else:
                copy.add_(push[number], alpha=-self._local_lr)


def _check(
    optimizer: RowOptimizer, local_lr: float | None, n_push: int, n_fetch: int, warm_start: int
) -> None:
    if not isinstance(optimizer, RowOptimizer):
        raise UserError(
            f"Downpour: {type(optimizer).__name__} is no rule for rows: give "
            "holdfast.tables.Adagrad(lr=...) or another RowOptimizer"
        )
    if local_lr is not None and not 0 <= local_lr < float("inf"):
        raise UserError(f"Downpour(local_lr={local_lr}): give a number of 0 or more")
    if n_push < 1:
        raise UserError(f"Downpour(n_push={n_push}): give 1 or more")
    if n_fetch < 1 or n_fetch % n_push:
        raise UserError(f"Downpour(n_fetch={n_fetch}): give a multiple of n_push, {n_push}")
    if warm_start < 0:
        raise UserError(f"Downpour(warm_start={warm_start}): give a number of steps, 0 or more")


def _name(rank: int) -> str:
    """Return the name of a replica's copy in the state of a parameter."""
    return f"replica_{rank}"


def _as_rows(tensor: torch.Tensor) -> torch.Tensor:
    """Return a matrix with a row for each index of the first dimension; one row for a vector."""
    return tensor.reshape(len(tensor), -1) if tensor.dim() > 1 else tensor.reshape(1, -1)


def _mean(pushes: Sequence[Push]) -> Push:
    total = functools.reduce(lambda a, b: list(torch._foreach_add(a, b)), pushes)
    return list(torch._foreach_div(total, len(pushes)))


def _cut(batch: Any, count: int) -> Iterator[tuple[int, Any]]:
    """Cut a batch into `count` parts, or fewer if it is short; yield their lengths, too."""
    if isinstance(batch, torch.Tensor):
        size = -(-len(batch) // count)
        yield from ((len(part), part) for part in batch.split(size))
        return
    if not isinstance(batch, list | tuple | dict) or not batch:
        raise UserError(
            f"Downpour cannot cut a batch of type {type(batch).__name__} into minibatches: give "
            "tensors, or a tuple, list or dictionary of them; or n_push=1"
        )
    values = batch.values() if isinstance(batch, dict) else batch
    columns = [list(_cut(each, count)) for each in values]
    if len({sum(size for size, _ in column) for column in columns}) > 1:
        raise UserError("Downpour cannot cut a batch of tensors of different lengths")
    for parts in zip(*columns, strict=True):
        found = [part for _, part in parts]
        yield (
            parts[0][0],
            dict(zip(batch, found, strict=True)) if isinstance(batch, dict) else found,
        )

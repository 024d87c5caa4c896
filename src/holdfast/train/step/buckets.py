"""Gradients on their way from autograd into flat buckets, one partial sum per node of the tree.

A bucket holds consecutive parameters of one dtype and device. As a task's backward pass fills it,
its gradients are copied into a flat leaf, and leaves are combined along the canonical tree as soon
as siblings meet. Nothing here knows about workers: it only says, through `on_filled`, that another
virtual rank has contributed to a bucket. Partial sums are kept until the step is committed, so a
reduction can be repeated after a failure and gives the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Sequence

import torch

from holdfast.core import tree
from holdfast.core.errors import UserError
from holdfast.core.step.events import Purpose
from holdfast.train.monitor import Monitor
from holdfast.train.step.probe import current

FIRST_BUCKET_BYTES = 1 << 20  # a small first one lets the exchange start early
BUCKET_BYTES = 8 << 20


class Flat:
    """Holds one flat buffer with a view of it for every parameter of the bucket."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        total = sum(p.numel() for p in params)
        self.data = torch.zeros(total, dtype=params[0].dtype, device=params[0].device)
        self.views: list[torch.Tensor] = []
        start = 0
        for p in params:
            self.views.append(self.data[start : start + p.numel()].view(p.shape))
            start += p.numel()


class Bucket:
    """Holds some parameters, their partial sums of the present step, and the reduced result."""

    def __init__(
        self,
        index: int,
        params: list[torch.nn.Parameter],
        places: list[int],
        owner: str = "",
    ) -> None:
        self.index = index
        self.owner = owner  # the name under which its parameters' module is protected
        self.params = params
        self.places = places  # of each parameter in the model's own order
        self.result = Flat(params)
        self.partials: dict[tree.Node, Flat] = {}
        self.contributed: set[int] = set()
        self.missing = len(params)  # gradients that the running backward pass still owes
        self._spare: list[Flat] = []
        self._scratch = self.result.data[:0]

    def scratch(self, numel: int) -> torch.Tensor:
        """Return at least `numel` elements to receive into; reused, so its pages stay touched."""
        if self._scratch.numel() < numel:
            self._scratch = self.result.data.new_zeros(numel)
        return self._scratch

    def leaf(self) -> Flat:
        """Move the gradients now in `.grad` to a flat buffer; a missing one counts as 0."""
        leaf = self._spare.pop() if self._spare else Flat(self.params)
        grads = [p.grad for p in self.params if p.grad is not None]
        if len(grads) == len(self.params):
            torch._foreach_copy_(leaf.views, grads)
        else:
            for view, p in zip(leaf.views, self.params, strict=True):
                view.zero_() if p.grad is None else view.copy_(p.grad)
        for p in self.params:
            p.grad = None
        return leaf

    def contribute(self, vrank: int, leaf: Flat, vranks: int) -> None:
        tree.merge(self.partials, (vrank, 1), leaf, vranks, self._add)
        self.contributed.add(vrank)

    def without_share(self, nodes: Iterable[tree.Node]) -> Bucket:
        """Return the bucket with zeros for these partial sums, which may still be written."""
        found = copy.copy(self)
        found.partials = dict.fromkeys(nodes, Flat(self.params))
        return found

    def reuse(self, leaf: Flat) -> None:
        """Take back a buffer that is not needed any more, to use its memory again."""
        self._spare.append(leaf)

    def reset(self) -> None:
        """Forget the step's partial sums; their memory is reused by the next."""
        self._spare.extend(self.partials.values())
        self.partials.clear()
        self.contributed.clear()
        self.missing = len(self.params)

    def _add(self, left: Flat, right: Flat) -> Flat:
        left.data.add_(right.data)
        self._spare.append(right)
        return left


class Gradients:
    """Holds all buckets of the protected models.

    `on_filled(bucket)` is called with `lock` held when a task has contributed to a bucket;
    `on_leaf(bucket index, gradient)` sees every bucket of every task, before it is added.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, torch.nn.Parameter]],
        vranks: int,
        lock: Monitor,
        on_filled: Callable[[Bucket], None] = lambda bucket: None,
        on_leaf: Callable[[int, torch.Tensor], None] = lambda bucket, leaf: None,
    ) -> None:
        self._named = [(n, p) for n, p in params if p.requires_grad]
        self._vranks = vranks
        self._lock = lock
        self._vrank: int | None = None  # whose backward pass is running
        self._purpose = Purpose.HOSTED
        self._copies: dict[int, dict[int, Flat]] = {}  # by virtual rank and bucket
        self._reached: set[int] = set()  # buckets that the running task has filled
        self._on_filled = on_filled
        self._on_leaf = on_leaf
        self._used = bytearray(len(self._named))  # plain bytes: marked once per parameter and task
        self.buckets: list[Bucket] = []
        self.active: list[Bucket] = []  # those that the present step sums
        self.holds = False  # the running backward pass is not the task's last one
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    @property
    def used(self) -> torch.Tensor:
        """Return which parameters this worker's tasks of the step have used: [parameters] bool."""
        if not self._used:
            return torch.zeros(0, dtype=torch.bool)
        return torch.frombuffer(bytearray(self._used), dtype=torch.bool)

    def attach(self) -> None:
        """Build the buckets and hook every parameter."""
        order = {id(p): i for i, (_, p) in enumerate(self._named)}
        for owner, group in _plan(list(reversed(self._named))):
            places = [order[id(p)] for p in group]
            bucket = Bucket(len(self.buckets), group, places, owner)
            self.buckets.append(bucket)
            for param, place in zip(group, bucket.places, strict=True):
                hook = self._hook(bucket, place)
                self._handles.append(param.register_post_accumulate_grad_hook(hook))

        self.active = list(self.buckets)

    def detach(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles.clear()

    def begin_step(self, of: Collection[str] | None = None) -> None:
        """Begin a step that sums gradients of the modules protected as `of`, or of all."""
        self.active = [b for b in self.buckets if of is None or b.owner in of]
        self.clear()

    def sit_out(self) -> None:
        """Begin a step that sums no gradients: those of the step before stay where they are."""
        self.active = []

    def clear(self) -> None:
        """Forget all gradients of the step: they are computed from the beginning."""
        with self._lock:
            for bucket in self.buckets:
                bucket.reset()
                for leaves in self._copies.values():
                    if bucket.index in leaves:
                        bucket.reuse(leaves[bucket.index])
            self._copies.clear()
            self._used = bytearray(len(self._named))
        for _, p in self._named:
            p.grad = None

    def begin_task(self, vrank: int, purpose: Purpose = Purpose.HOSTED) -> None:
        """Begin a task; gradients of audited and speculative ones are not added to the sums."""
        self._vrank, self._purpose, self.holds = vrank, purpose, False
        self._reached.clear()
        for bucket in self.buckets:
            bucket.missing = len(bucket.params)

    def end_task(self) -> None:
        """Parameters that the backward pass did not reach contribute zeros."""
        vrank, self._vrank = self._vrank, None
        if vrank is None:
            return
        for bucket in self.active:
            if bucket.index not in self._reached:
                self._fill(bucket, vrank)

    def copy_of(self, vrank: int) -> dict[int, torch.Tensor]:
        """Return the gradient of a task that was copied, by bucket."""
        return {bucket: leaf.data for bucket, leaf in self._copies[vrank].items()}

    def adopt(self, vrank: int) -> None:
        """Contribute the copy of this task to the sums."""
        leaves = self._copies.pop(vrank)
        for bucket in self.active:
            bucket.contribute(vrank, leaves[bucket.index], self._vranks)
            self._on_filled(bucket)

    def publish(self, used: torch.Tensor, scale: float = 1.0, weight: float = 1.0) -> None:
        """Point `.grad` at the reduced sums; None where no virtual rank used the parameter.

        `scale`: to multiply them by, if not 1. `weight`: to divide them by, if not 1.
        """
        flags = used.tolist()
        for bucket in self.buckets:
            if bucket not in self.active:
                for param in bucket.params:
                    param.grad = None  # what tasks have left of it is not the step's
        for bucket in self.active:
            if scale != 1.0:
                bucket.result.data.mul_(scale)
            if weight != 1.0:
                bucket.result.data.div_(weight)
            whole = zip(bucket.params, bucket.result.views, bucket.places, strict=True)
            for param, view, place in whole:
                param.grad = view if flags[place] else None

    def _hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        def arrived(param: torch.Tensor) -> None:
            vrank = self._vrank
            if vrank is None:
                raise UserError(
                    f"a backward pass outside of a task has reached parameter "
                    f"{self._named[index][0]}: its gradient would be this worker's only; call "
                    "step.backward(loss) in the loop over a step's batches, once for each, or "
                    "torch.autograd.grad for a gradient of another kind"
                )
            if param.grad is None or param.grad.layout != torch.strided:
                name = self._named[index][0]
                raise UserError(f"parameter {name} has a sparse gradient: make it dense")
            self._used[index] = 1
            if self.holds:
                return
            bucket.missing -= 1
            if bucket.missing == 0 and bucket in self.active:
                self._fill(bucket, vrank)
            elif bucket.missing < 0:
                name = self._named[index][0]
                raise UserError(
                    f"parameter {name} got a gradient twice in one backward pass: "
                    "use non-reentrant checkpointing (use_reentrant=False)"
                )

        return arrived

    def _fill(self, bucket: Bucket, vrank: int) -> None:
        with torch.no_grad():
            leaf = bucket.leaf()
            self._reached.add(bucket.index)
            current.probe.gradient(vrank, leaf.data)
            self._on_leaf(bucket.index, leaf.data)
            with self._lock:
                if self._purpose is Purpose.AUDITED:
                    bucket.reuse(leaf)
                elif self._purpose is Purpose.SPECULATIVE:
                    self._copies.setdefault(vrank, {})[bucket.index] = leaf
                else:
                    bucket.contribute(vrank, leaf, self._vranks)
                    self._on_filled(bucket)


def _plan(
    named: Sequence[tuple[str, torch.nn.Parameter]],
) -> list[tuple[str, list[torch.nn.Parameter]]]:
    """Group consecutive parameters of one module, dtype and device until a group has its bytes.

    The last one may exceed them: each bucket costs an exchange, and a limit that tensors of half
    its size do not fit into twice would give each of them a bucket of its own.
    """
    groups: list[tuple[str, list[torch.nn.Parameter]]] = []
    filling: dict[tuple, tuple[list[torch.nn.Parameter], int]] = {}
    for name, param in named:
        owner = name.partition(".")[0]
        key = (owner, param.dtype, param.device)
        group, room = filling.get(key, ([], 0))
        if room <= 0:
            group, room = [], BUCKET_BYTES if groups else FIRST_BUCKET_BYTES
            groups.append((owner, group))
        group.append(param)
        filling[key] = group, room - param.numel() * param.element_size()
    return groups

"""Keeps gradients in flat buckets, one partial sum per node of the tree.

A bucket holds consecutive parameters of one dtype and device. Leaves are combined along the
canonical tree as soon as siblings meet. Partial sums are kept until the step is committed, so a
reduction can be repeated after a failure and gives the same bits. The script fills buckets, and the
engine takes the filled ones, to sum them with those of other workers.
"""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Callable, Iterable, Sequence

import torch

from holdfast.engine.core import tree
from holdfast.engine.train.checkpoint.local_tensors import local_gradient, local_of
from holdfast.engine.train.step.driver import Monitor

FIRST_BUCKET_BYTES = 1 << 20  # a small first one lets the exchange start early
BUCKET_BYTES = 8 << 20
PLANS = 1 << 14  # limit for the plans whose messages have tags of their own


class Flat:
    """Is one flat buffer, with a view for this process's part of each parameter of the bucket."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        held = [local_of(p) for p in params]
        total = sum(p.numel() for p in held)
        self.data = torch.zeros(total, dtype=held[0].dtype, device=held[0].device)
        self.views: list[torch.Tensor] = []
        start = 0
        for p in held:
            self.views.append(self.data[start : start + p.numel()].view(p.shape))
            start += p.numel()


class Bucket:
    """Keeps some parameters, their partial sums of the present step, and the reduced result."""

    def __init__(
        self,
        index: int,
        params: list[torch.nn.Parameter],
        places: list[int],
        owners: tuple[str, ...] = (),
        plan: int = 0,
    ) -> None:
        self.index = index
        #: Number of the plan that has made this bucket.
        self.plan = plan
        #: Names under which its parameters' modules are protected.
        self.owners = owners
        self.params = params
        #: Each parameter's place in the model's own order.
        self.places = places
        self.result = Flat(params)
        self.partials: dict[tree.Node, Flat] = {}
        self.contributed: set[int] = set()
        # parameters whose gradients the running backward pass still owes
        self.missing = len(params)
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
        every = [local_gradient(p) for p in self.params]
        grads = [grad for grad in every if grad is not None]
        if len(grads) == len(self.params):
            torch._foreach_copy_(leaf.views, grads)
        else:
            for view, grad in zip(leaf.views, every, strict=True):
                view.zero_() if grad is None else view.copy_(grad)
        for p in self.params:
            p.grad = None
        return leaf

    def contribute(self, vrank: int, leaf: Flat, vranks: int) -> None:
        tree.merge(self.partials, (vrank, 1), leaf, vranks, self._add)
        self.contributed.add(vrank)

    def replace_share(self, nodes: Iterable[tree.Node]) -> Bucket:
        """Return the bucket with zeros for these partial sums, which may still be written."""
        found = copy.copy(self)
        found.partials = dict.fromkeys(nodes, Flat(self.params))
        return found

    def reuse(self, leaf: Flat) -> None:
        """Take back a buffer that is free again, to reuse its memory."""
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


class FilledBuckets:
    """Hands buckets from the script, which fills them, to the engine, which sums them.

    Buckets are handed out in one order, the same on all members. Each member waits for one sum
    before it begins the next ones, so two members with other orders would wait for each other.
    """

    def __init__(self, monitor: Monitor) -> None:
        self._monitor = monitor
        # Virtual ranks whose tasks must be in a bucket.
        self._hosted: set[int] = set()
        self._left: deque[Bucket] = deque()

    def begin(self, hosted: Iterable[int], buckets: Iterable[Bucket]) -> None:
        """Begin the sums: a bucket can be exchanged once all of these virtual ranks are in it.

        A worker without tasks in the sums hosts none, so that all buckets are ready at once.
        """
        with self._monitor:
            self._hosted, self._left = set(hosted), deque(buckets)

    def end(self) -> None:
        """Stop handing out buckets: the sums have ended."""
        with self._monitor:
            self._left.clear()

    def note(self, bucket: Bucket) -> None:
        """Record that a task has contributed to a bucket; called with the monitor held."""
        is_next = bool(self._left) and bucket is self._left[0] and self._is_filled(bucket)
        if is_next or not self._left:  # the engine may not have begun the sums yet
            self._monitor.notify_all()

    def take(self, wait: bool, check: Callable[[], None]) -> Bucket | None:
        """Return the next bucket, or None if it is not filled yet; `wait`: wait until it is.

        `check` raises when no more buckets will be filled.
        """
        with self._monitor:
            while self._left and not self._is_filled(self._left[0]):
                if not wait:
                    return None
                check()
                self._monitor.wait()
            return self._left.popleft() if self._left else None

    def _is_filled(self, bucket: Bucket) -> bool:
        return self._hosted <= bucket.contributed


def group_parameters(
    owned: Sequence[tuple[tuple[str, ...], torch.nn.Parameter]],
) -> list[list[torch.nn.Parameter]]:
    """Group consecutive parameters of one owner, dtype and device until a group has its bytes.

    The last one may exceed them: each bucket costs an exchange, and a limit that tensors of half
    its size do not fit into twice would give each of them a bucket of its own.
    """
    groups: list[list[torch.nn.Parameter]] = []
    filling: dict[tuple, tuple[list[torch.nn.Parameter], int]] = {}
    for owners, param in owned:
        key = (owners, param.dtype, param.device)
        group, room = filling.get(key, ([], 0))
        if room <= 0:
            group, room = [], BUCKET_BYTES if groups else FIRST_BUCKET_BYTES
            groups.append(group)
        group.append(param)
        filling[key] = group, room - local_of(param).nbytes
    return groups

"""Moves gradients from autograd into flat buckets, one partial sum per node of the tree.

A bucket holds consecutive parameters of one dtype and device. As a task's backward pass fills it,
its gradients are copied into a flat leaf, and leaves are combined along the canonical tree as soon
as siblings meet. Nothing here knows about workers: `on_filled` only reports that another virtual
rank has contributed to a bucket. Partial sums are kept until the step is committed, so a reduction
can be repeated after a failure and gives the same bits.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager

import torch
import xxhash

from holdfast.engine.core import tree
from holdfast.engine.core.errors import UserError
from holdfast.engine.core.ground.events import Purpose
from holdfast.engine.train.checkpoint.local_tensors import local_gradient, local_of, place_as
from holdfast.engine.train.step.default_stream import (
    check_stream,
    on_default_stream,
    order_gradient,
)
from holdfast.engine.train.step.monitor import Monitor
from holdfast.engine.train.step.probe import current
from holdfast.engine.train.step.row_table import Rows, RowTable, TablePart

FIRST_BUCKET_BYTES = 1 << 20  # a small first one lets the exchange start early
BUCKET_BYTES = 8 << 20
PLANS = 1 << 14  # limit for the plans whose messages have tags of their own
_OUTSIDE = (
    "a backward pass outside of a task has reached parameter {}: its gradient would be this "
    "worker's only; call step.backward(loss) in the loop over a step's batches, once for each, or "
    "torch.autograd.grad for a gradient of another kind"
)
_BESIDE = (
    "a backward pass of the script's own has reached parameter {}, so Holdfast cannot sum its "
    "gradient with those of the other tasks: call step.backward(loss) instead of loss.backward(), "
    "and step.backward(loss, last=False) for all losses of a batch but its last"
)
_LOST = (
    "parameter {} has no gradient any more when it is to be summed: let no hook of your own set "
    ".grad to None, and update parameters after the step's batches only"
)
_TWICE = (
    "parameter {} got a gradient twice in one backward pass: use non-reentrant checkpointing "
    "(use_reentrant=False), and step.backward(..., last=False) for all but the last pass"
)


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
        self.plan = plan  # number of the plan that has made this bucket
        self.owners = owners  # names under which its parameters' modules are protected
        self.params = params
        self.places = places  # each parameter's place in the model's own order
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


class Gradients:
    """Keeps all buckets of the protected models, and tables of the parameters in `by_row`.

    `by_row`: lists of parameters with sparse gradients. Each list gets one table.

    `on_filled(bucket)` is called with `lock` held when a task has contributed to a bucket;
    `on_leaf(bucket index, gradient)` sees every bucket and table of every task, before it is added.
    A parameter that several modules share is listed with its name in each of them.
    """

    def __init__(
        self,
        params: Iterable[tuple[str, torch.nn.Parameter]],
        vranks: int,
        lock: Monitor,
        on_filled: Callable[[Bucket], None] = lambda bucket: None,
        on_leaf: Callable[[int, torch.Tensor], None] = lambda bucket, leaf: None,
        by_row: Iterable[Iterable[torch.Tensor]] = (),
    ) -> None:
        self._named = list(params)
        self._by_row = _number(by_row)
        self._vranks = vranks
        self._lock = lock
        self._vrank: int | None = None  # virtual rank of the running backward pass
        self._purpose = Purpose.HOSTED
        self._copies: dict[int, dict[int, Flat | Rows]] = {}  # by virtual rank and bucket
        self._reached: set[int] = set()  # buckets and tables that the running task has filled
        self._on_filled = on_filled
        self._on_leaf = on_leaf
        self._used = bytearray()  # plain bytes: marked once per parameter and task
        self.buckets: list[Bucket] = []
        self.tables: list[RowTable] = []
        self.plan = 0  # 63 bits that stand for the summed parameters and their buckets
        self.active: list[Bucket] = []  # buckets that the present step sums
        self.active_tables: list[RowTable] = []
        self._is_in_pass = False  # gradients of the running task are expected
        self._holds = False  # another backward pass of the task follows the running one
        self._hooks: list[tuple[torch.nn.Parameter, Callable[[torch.Tensor], None]]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []  # removes the hooks

    @property
    def used(self) -> torch.Tensor:
        """Return which parameters this worker's tasks of the step have used: [parameters] bool."""
        if not self._used:
            return torch.zeros(0, dtype=torch.bool)
        return torch.frombuffer(bytearray(self._used), dtype=torch.bool)

    def attach(self) -> None:
        """Build the buckets and tables, and hook every parameter."""
        owners: dict[int, tuple[str, ...]] = {}
        for name, p in self._named:
            owners[id(p)] = (*owners.get(id(p), ()), name.partition(".")[0])
        first = {id(p): i for i, (_, p) in reversed(list(enumerate(self._named)))}
        once = {id(p): (name, p) for name, p in reversed(self._named)}  # by its first name
        self._named = list(reversed(once.values()))
        order = {id(p): i for i, (_, p) in enumerate(self._named)}
        self._used = bytearray(len(order))
        self.plan = _digest(self._named, self._by_row)
        flat = [p for _, p in reversed(self._named) if id(p) not in self._by_row]
        for group in _plan([(owners[id(p)], p) for p in flat]):
            places = [order[id(p)] for p in group]
            found = owners[id(group[0])]
            bucket = Bucket(len(self.buckets), group, places, found, self.plan % PLANS)
            self.buckets.append(bucket)
            for param, place in zip(group, places, strict=True):
                self._hooks.append((param, self._hook(bucket, place)))
        # All members sum the buckets in this order, about that in which a backward pass fills them:
        # the gradient of a shared parameter is complete once its first user's is.
        self.buckets.sort(key=lambda bucket: -min(first[id(p)] for p in bucket.params))
        stacks: dict[tuple[int, tuple[str, ...]], list[tuple[str, torch.nn.Parameter, int]]] = {}
        for name, p in self._named:
            if id(p) in self._by_row:
                stack = stacks.setdefault((self._by_row[id(p)], owners[id(p)]), [])
                stack.append((name, p, order[id(p)]))
        for (_, found), stack in stacks.items():
            table = RowTable(len(self.buckets) + len(self.tables), stack, found)
            self.tables.append(table)
            self._hooks += [(part.param, self._table_hook(table, part)) for part in table.parts]
        self._handles = [_register(param, hook) for param, hook in self._hooks]
        self.active, self.active_tables = list(self.buckets), list(self.tables)

    def detach(self) -> None:
        """Forget buckets, tables and gradients, and leave the parameters alone."""
        for handle in self._handles:
            handle.remove()
        for _, p in self._named:
            p.grad = None
        for table in self.tables:
            table.drop_gradient()
        for each in (self._handles, self._hooks, self.buckets, self.tables, self._named):
            each.clear()
        self.sit_out()

    def replan(
        self,
        params: Iterable[tuple[str, torch.nn.Parameter]],
        by_row: Iterable[Iterable[torch.Tensor]],
    ) -> None:
        """Sum the gradients of these parameters from now on. Between two steps only."""
        self.detach()
        self._named, self._by_row = list(params), _number(by_row)
        self.attach()

    def begin_step(self, of: Collection[str] | None = None) -> None:
        """Begin a step that sums gradients of the modules protected as `of`, or of all."""
        self.active = [b for b in self.buckets if of is None or not set(b.owners).isdisjoint(of)]
        self.active_tables = [
            t for t in self.tables if of is None or not set(t.owners).isdisjoint(of)
        ]
        self._move_hooks_last()
        self.clear()

    def sit_out(self) -> None:
        """Begin a step that sums no gradients: those of the step before stay unchanged."""
        self.active, self.active_tables = [], []

    def clear(self) -> None:
        """Forget all gradients of the step: they are computed from the beginning."""
        with self._lock:
            for bucket in self.buckets:
                bucket.reset()
                for leaves in self._copies.values():
                    if isinstance(leaf := leaves.get(bucket.index), Flat):
                        bucket.reuse(leaf)
            for table in self.tables:
                table.reset()
            self._copies.clear()
            self._used = bytearray(len(self._named))
        for _, p in self._named:
            p.grad = None

    def begin_task(self, vrank: int, purpose: Purpose = Purpose.HOSTED) -> None:
        """Begin a task; gradients of audited and speculative ones are not added to the sums.

        UserError if the script computes in a CUDA stream of its own.
        """
        dense = [bucket.result.data for bucket in self.buckets]
        check_stream([*dense, *(table.parts[0].param for table in self.tables)])
        self._vrank, self._purpose, self._holds = vrank, purpose, False
        self._reached.clear()
        for table in self.tables:
            table.begin_task()
        for bucket in self.buckets:
            bucket.missing = len(bucket.params)

    @contextmanager
    def backward_pass(self, *, last: bool = True) -> Iterator[None]:
        """Take in the gradients of one backward pass; `last`: no other one of its task follows."""
        self._is_in_pass, self._holds = True, not last
        try:
            yield
        finally:
            self._is_in_pass = False

    def end_task(self) -> None:
        """Parameters that the backward pass did not reach contribute zeros."""
        vrank, self._vrank = self._vrank, None
        if vrank is None:
            return
        if self._purpose is Purpose.SPECULATIVE:  # also where no parameter is trained
            with self._lock:
                self._copies.setdefault(vrank, {})
        for bucket in self.active:
            if bucket.index not in self._reached:
                self._fill(bucket, vrank)
        for table in self.active_tables:
            if table.index not in self._reached:
                self._fill_table(table, vrank)

    def copy_of(self, vrank: int) -> dict[int, Flat | Rows]:
        """Return the gradient of a task that was copied, by bucket and table."""
        return self._copies[vrank]

    def adopt(self, vrank: int) -> None:
        """Contribute the copy of this task to the sums."""
        leaves = self._copies.pop(vrank)
        for table in self.active_tables:
            rows = leaves[table.index]
            assert isinstance(rows, Rows)
            table.contribute(vrank, rows, self._vranks)
        for bucket in self.active:
            flat = leaves[bucket.index]
            assert isinstance(flat, Flat)
            bucket.contribute(vrank, flat, self._vranks)
            self._on_filled(bucket)

    def publish(self, used: torch.Tensor, scale: float = 1.0, weight: float = 1.0) -> None:
        """Point `.grad` at the reduced sums; None where no virtual rank used the parameter.

        `scale`: to multiply them by, if not 1. `weight`: to divide them by, if not 1; 0: no task
        counts, and all gradients are zeros.
        """
        flags = used.tolist()
        for bucket in self.buckets:
            if bucket not in self.active:
                for param in bucket.params:
                    param.grad = None  # drop the gradient that tasks have left there
        for bucket in self.active:
            if scale != 1.0:
                bucket.result.data.mul_(scale)
            if not weight:
                bucket.result.data.zero_()
            elif weight != 1.0:
                bucket.result.data.div_(weight)
            whole = zip(bucket.params, bucket.result.views, bucket.places, strict=True)
            for param, view, place in whole:
                is_trained = flags[place] or not weight
                param.grad = place_as(param, view) if is_trained else None
        for table in self.tables:
            table.drop_gradient()
        for table in self.active_tables:
            for part, rows in table.split(table.result.times(scale, weight or 1.0)):
                if flags[part.place]:
                    part.param.grad = rows.gradient(part.param)

    def _hook(self, bucket: Bucket, index: int) -> Callable[[torch.Tensor], None]:
        def handle_gradient(param: torch.Tensor) -> None:
            name = self._named[index][0]
            vrank = self._running_task(name)
            if param.grad is None:
                raise UserError(_LOST.format(name))
            if param.grad.layout != torch.strided:
                raise UserError(
                    f"parameter {name} has a sparse gradient, which only the weight of an "
                    "nn.Embedding or nn.EmbeddingBag with sparse=True may have: use one, or "
                    "make the gradient dense"
                )
            self._used[index] = 1
            order_gradient(param)
            if self._holds:
                return
            bucket.missing -= 1
            if bucket.missing == 0 and bucket in self.active:
                self._fill(bucket, vrank)
            elif bucket.missing < 0:
                raise UserError(_TWICE.format(name))

        return handle_gradient

    def _table_hook(self, table: RowTable, part: TablePart) -> Callable[[torch.Tensor], None]:
        def handle_gradient(param: torch.Tensor) -> None:
            vrank = self._running_task(part.name)
            if param.grad is None:
                raise UserError(_LOST.format(part.name))
            self._used[part.place] = 1
            order_gradient(param)
            if self._holds:
                return
            if part.place in table.reached:
                raise UserError(_TWICE.format(part.name))
            table.reached.add(part.place)
            if len(table.reached) == len(table.parts) and table in self.active_tables:
                self._fill_table(table, vrank)

        return handle_gradient

    def _running_task(self, name: str) -> int:
        """Return the virtual rank of the task that is running. UserError if there is none."""
        if self._vrank is None:
            raise UserError(_OUTSIDE.format(name))
        if not self._is_in_pass:
            raise UserError(_BESIDE.format(name))
        return self._vrank

    def _move_hooks_last(self) -> None:
        """Let hooks that the script has added meanwhile see the gradient before we take it."""
        for i, (param, hook) in enumerate(self._hooks):
            if next(reversed(param._post_accumulate_grad_hooks)) != self._handles[i].id:
                self._handles[i].remove()
                self._handles[i] = _register(param, hook)

    def _fill_table(self, table: RowTable, vrank: int) -> None:
        with torch.no_grad(), on_default_stream(table.parts[0].param):
            leaf = table.leaf()
            self._reached.add(table.index)
            current.probe.handle_gradient(vrank, leaf.values)
            self._on_leaf(table.index, leaf.places)
            self._on_leaf(table.index, leaf.values)
            with self._lock:
                if self._purpose is Purpose.SPECULATIVE:
                    self._copies.setdefault(vrank, {})[table.index] = leaf
                elif self._purpose is not Purpose.AUDITED:
                    table.contribute(vrank, leaf, self._vranks)

    def _fill(self, bucket: Bucket, vrank: int) -> None:
        with torch.no_grad(), on_default_stream(bucket.result.data):
            leaf = bucket.leaf()
            self._reached.add(bucket.index)
            current.probe.handle_gradient(vrank, leaf.data)
            self._on_leaf(bucket.index, leaf.data)
            with self._lock:
                if self._purpose is Purpose.AUDITED:
                    bucket.reuse(leaf)
                elif self._purpose is Purpose.SPECULATIVE:
                    self._copies.setdefault(vrank, {})[bucket.index] = leaf
                else:
                    bucket.contribute(vrank, leaf, self._vranks)
                    self._on_filled(bucket)


def _register(
    param: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]
) -> torch.utils.hooks.RemovableHandle:
    """Hook a parameter, also one that is frozen for a while."""
    trained = param.requires_grad
    try:
        return param.requires_grad_(True).register_post_accumulate_grad_hook(hook)
    finally:
        param.requires_grad_(trained)


def _number(by_row: Iterable[Iterable[torch.Tensor]]) -> dict[int, int]:
    """Return the number of each parameter's list, by the parameter's identity."""
    return {id(param): i for i, params in enumerate(by_row) for param in params}


def _digest(named: Sequence[tuple[str, torch.Tensor]], by_row: Mapping[int, int]) -> int:
    parts = [f"{n} {tuple(p.shape)} {p.dtype} {by_row.get(id(p))}" for n, p in named]
    return xxhash.xxh3_64_intdigest("\n".join(parts).encode()) >> 1


def _plan(
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

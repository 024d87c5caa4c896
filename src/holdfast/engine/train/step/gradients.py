"""Moves gradients from autograd into flat buckets and tables of rows, task by task.

As a task's backward pass fills a bucket, its gradients are copied into a flat leaf. This
module knows no workers: `on_filled` only reports that another virtual rank has contributed to a
bucket.

All work on gradients is in one order, given by their GPU's default stream. A task, the sums and the
exchanges of a step use the same memory from several threads, and each thread queues its work on the
default stream. A backward pass may use other streams as well: FSDP2 reduces gradients in one of its
own, and calls the hooks of parameters there.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field

import torch
import xxhash

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.ground.events import Purpose
from holdfast.engine.train.checkpoint.local_tensors import local_of, place_as
from holdfast.engine.train.step.buckets import PLANS, Bucket, Flat, group_parameters
from holdfast.engine.train.step.driver import Monitor
from holdfast.engine.train.step.probe import current
from holdfast.engine.train.step.row_table import Rows, RowTable, TablePart

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


@dataclass(slots=True)
class _RunningTask:
    """Is the task whose gradients arrive. `vrank`: None while there is none."""

    vrank: int | None = None
    purpose: Purpose = Purpose.HOSTED
    #: A backward pass of Holdfast's is running.
    is_in_pass: bool = False
    #: Another backward pass of the task follows the running one.
    goes_on: bool = False
    #: The buckets and tables that the task has filled.
    reached: set[int] = field(default_factory=set)

    def find_rank(self, name: str) -> int:
        """Return the virtual rank, as a parameter gets a gradient. UserError outside of a task."""
        if self.vrank is None:
            raise UserError(_OUTSIDE.format(name))
        if not self.is_in_pass:
            raise UserError(_BESIDE.format(name))
        return self.vrank


class _Hooks:
    """Calls functions as parameters get their gradients, after all hooks of the script."""

    def __init__(self) -> None:
        self._calls: list[tuple[torch.nn.Parameter, Callable[[torch.Tensor], None]]] = []
        self._handles: list[torch.utils.hooks.RemovableHandle] = []

    def add(self, param: torch.nn.Parameter, call: Callable[[torch.Tensor], None]) -> None:
        """Hook a parameter."""
        self._calls.append((param, call))
        self._handles.append(_register(param, call))

    def move_last(self) -> None:
        """Call hooks that the script has added since then before the gradient is taken."""
        for i, (param, call) in enumerate(self._calls):
            if next(reversed(param._post_accumulate_grad_hooks)) != self._handles[i].id:
                self._handles[i].remove()
                self._handles[i] = _register(param, call)

    def remove(self) -> None:
        """Leave all parameters alone."""
        for handle in self._handles:
            handle.remove()
        self._handles.clear()
        self._calls.clear()


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
        self._task = _RunningTask()
        self._copies: dict[int, dict[int, Flat | Rows]] = {}  # by virtual rank and bucket
        self._on_filled = on_filled
        self._on_leaf = on_leaf
        self._used = bytearray()  # plain bytes: marked once per parameter and task
        self.buckets: list[Bucket] = []
        self.tables: list[RowTable] = []
        #: 63 bits that stand for the summed parameters and their buckets.
        self.plan = 0
        #: Buckets that the present step sums.
        self.active: list[Bucket] = []
        self.active_tables: list[RowTable] = []
        self._hooks = _Hooks()

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
        for group in group_parameters([(owners[id(p)], p) for p in flat]):
            places = [order[id(p)] for p in group]
            found = owners[id(group[0])]
            bucket = Bucket(len(self.buckets), group, places, found, self.plan % PLANS)
            self.buckets.append(bucket)
            for param, place in zip(group, places, strict=True):
                self._hooks.add(param, self._hook(bucket, place))
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
            for part in table.parts:
                self._hooks.add(part.param, self._table_hook(table, part))
        self.active, self.active_tables = list(self.buckets), list(self.tables)

    def detach(self) -> None:
        """Forget buckets, tables and gradients, and leave the parameters alone."""
        self._hooks.remove()
        for _, p in self._named:
            p.grad = None
        for table in self.tables:
            table.drop_gradient()
        for kept in (self.buckets, self.tables, self._named):
            kept.clear()
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
        self._hooks.move_last()
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
        self._task = _RunningTask(vrank, purpose)
        for table in self.tables:
            table.begin_task()
        for bucket in self.buckets:
            bucket.missing = len(bucket.params)

    @contextmanager
    def backward_pass(self, *, last: bool = True) -> Iterator[None]:
        """Take in the gradients of one backward pass; `last`: no other one of its task follows."""
        self._task.is_in_pass, self._task.goes_on = True, not last
        try:
            yield
        finally:
            self._task.is_in_pass = False

    def end_task(self) -> None:
        """Parameters that the backward pass did not reach contribute zeros."""
        vrank, self._task.vrank = self._task.vrank, None
        if vrank is None:
            return
        if self._task.purpose is Purpose.SPECULATIVE:  # also where no parameter is trained
            with self._lock:
                self._copies.setdefault(vrank, {})
        for bucket in self.active:
            if bucket.index not in self._task.reached:
                self._fill(bucket, vrank)
        for table in self.active_tables:
            if table.index not in self._task.reached:
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
            vrank = self._task.find_rank(name)
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
            if self._task.goes_on:
                return
            bucket.missing -= 1
            if bucket.missing == 0 and bucket in self.active:
                self._fill(bucket, vrank)
            elif bucket.missing < 0:
                raise UserError(_TWICE.format(name))

        return handle_gradient

    def _table_hook(self, table: RowTable, part: TablePart) -> Callable[[torch.Tensor], None]:
        def handle_gradient(param: torch.Tensor) -> None:
            vrank = self._task.find_rank(part.name)
            if param.grad is None:
                raise UserError(_LOST.format(part.name))
            self._used[part.place] = 1
            order_gradient(param)
            if self._task.goes_on:
                return
            if part.place in table.reached:
                raise UserError(_TWICE.format(part.name))
            table.reached.add(part.place)
            if len(table.reached) == len(table.parts) and table in self.active_tables:
                self._fill_table(table, vrank)

        return handle_gradient

    def _fill_table(self, table: RowTable, vrank: int) -> None:
        with torch.no_grad(), on_default_stream(table.parts[0].param):
            leaf = table.leaf()
            self._task.reached.add(table.index)
            current.probe.handle_gradient(vrank, leaf.values)
            self._on_leaf(table.index, leaf.places)
            self._on_leaf(table.index, leaf.values)
            with self._lock:
                if self._task.purpose is Purpose.SPECULATIVE:
                    self._copies.setdefault(vrank, {})[table.index] = leaf
                elif self._task.purpose is not Purpose.AUDITED:
                    table.contribute(vrank, leaf, self._vranks)

    def _fill(self, bucket: Bucket, vrank: int) -> None:
        with torch.no_grad(), on_default_stream(bucket.result.data):
            leaf = bucket.leaf()
            self._task.reached.add(bucket.index)
            current.probe.handle_gradient(vrank, leaf.data)
            self._on_leaf(bucket.index, leaf.data)
            with self._lock:
                if self._task.purpose is Purpose.AUDITED:
                    bucket.reuse(leaf)
                elif self._task.purpose is Purpose.SPECULATIVE:
                    self._copies.setdefault(vrank, {})[bucket.index] = leaf
                else:
                    bucket.contribute(vrank, leaf, self._vranks)
                    self._on_filled(bucket)


def _register(
    param: torch.nn.Parameter, hook: Callable[[torch.Tensor], None]
) -> torch.utils.hooks.RemovableHandle:
    """Hook a parameter, which may be frozen for a while."""
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


def order_gradient(param: torch.Tensor) -> None:
    """Make the default stream wait for a parameter's gradient, which the present stream computes.

    The gradient's memory is not used again before the default stream has read it.
    """
    if param.is_cuda and param.grad is not None:
        here, default = _streams_of(param)
        if here != default:
            default.wait_stream(here)
            grad = local_of(param.grad)
            for part in (grad._indices(), grad._values()) if grad.is_sparse else (grad,):
                part.record_stream(default)


@contextlib.contextmanager
def on_default_stream(tensor: torch.Tensor) -> Iterator[None]:
    """Queue the body's work on the default stream of a tensor's GPU, if it is on one."""
    if not tensor.is_cuda:
        yield
        return
    with torch.cuda.stream(_streams_of(tensor)[1]):
        yield


def check_stream(tensors: Iterable[torch.Tensor]) -> None:
    """Raise UserError if the script computes in another stream than a GPU's default one."""
    for tensor in {tensor.device: tensor for tensor in tensors if tensor.is_cuda}.values():
        here, default = _streams_of(tensor)
        if here != default:
            raise UserError(
                "the loop over a step's batches runs in a CUDA stream of its own, which would not "
                "wait for the sums of gradients: run it outside of torch.cuda.stream(...); copies "
                "of data may have a stream"
            )


def _streams_of(tensor: torch.Tensor) -> tuple[torch.cuda.Stream, torch.cuda.Stream]:
    """Return the present stream of a tensor's GPU, and its default one."""
    device = tensor.device
    return torch.cuda.current_stream(device), torch.cuda.default_stream(device)

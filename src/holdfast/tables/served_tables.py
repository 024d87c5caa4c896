"""Looks rows up on servers, and gives their gradients back: tables that no worker holds.

Their parameters have the shape of the whole table and take no memory. A look-up fetches the rows
that it needs, once each, and its gradient is sparse, as with torch's modules and sparse=True.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import msgspec
import torch
import xxhash

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.exchange.tensor_bytes import memory_of
from holdfast.engine.train.step.table_parameters import find_keyed_gradient
from holdfast.tables.row_client import RowClient
from holdfast.tables.row_optimizers import RowOptimizer, check_staleness, rows_of
from holdfast.tables.server_access import ServerAccess
from holdfast.tables.server_rows import RowUpdate
from holdfast.tables.server_wire import TableGroup, describe_rule
from holdfast.tables.table_shape import TableShape

READ_AT_ONCE = 1 << 18  # rows
WRITTEN_AT_ONCE = 1 << 21  # numbers, in one update


@dataclass(frozen=True, slots=True)
class FoundRows:
    """Keeps the rows of some ids: `index` of each id in `rows`, and the ids that `rows` are of.

    `index`: as the ids were given; `rows`: [unique, dim]; `unique`: [unique] in growing order.
    """

    index: torch.Tensor
    rows: torch.Tensor
    unique: torch.Tensor

    def find(self, key: int | None) -> int | None:
        """Return the place of one id among the rows, or None if it is not there."""
        if key is None:
            return None
        found = (self.unique == key).nonzero()
        return int(found[0, 0]) if len(found) else None


def find_rows(
    ids: Sequence[torch.Tensor],
    read: Callable[[Sequence[torch.Tensor]], Sequence[torch.Tensor]],
) -> list[FoundRows]:
    """Return the rows of each table's ids.

    `read`: returns the rows [n, dim] of each table's keys [n], which are there once each.
    """
    pairs = [torch.unique(each.detach().cpu(), return_inverse=True) for each in ids]
    found = read([keys for keys, _ in pairs])
    return [
        FoundRows(index.to(given.device), rows.to(given.device), keys.to(given.device))
        for given, rows, (keys, index) in zip(ids, found, pairs, strict=True)
    ]


class _Served(torch.autograd.Function):
    """Passes rows on, and their gradient to the table's parameter as rows of it."""

    @staticmethod
    def forward(
        ctx: Any, weight: torch.Tensor, rows: torch.Tensor, unique: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(unique)
        ctx.shape, ctx.keyed = weight.shape, find_keyed_gradient(weight)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        (unique,) = ctx.saved_tensors
        if ctx.keyed is not None:
            grad = grad.coalesce() if grad.is_sparse else grad
            places = unique[grad.indices()[0]] if grad.is_sparse else unique
            ctx.keyed.add(places.cpu(), (grad.values() if grad.is_sparse else grad).cpu())
            return torch.zeros(ctx.shape), None, None
        if grad.is_sparse:
            places, values = unique[grad._indices()[0]], grad._values()
        else:
            places, values = unique, grad
        found = torch.sparse_coo_tensor(places[None], values, ctx.shape, check_invariants=False)
        return found, None, None


class ServedOptimizer(torch.optim.Optimizer):
    """Stands for the optimizer that updates rows on servers. Its rate may be changed like any.

    `params`: of the tables, in the order of `shapes`. `as_half`: steps read rows as float16.
    UserError for a table that cannot be served.
    """

    is_on_servers = True

    def __init__(
        self,
        params: Sequence[torch.Tensor],
        shapes: Sequence[TableShape],
        rule: RowOptimizer,
        *,
        as_half: bool = False,
    ) -> None:
        super().__init__(params, {"lr": rule.lr})
        self._order, self._as_half = list(params), as_half
        self._client: RowClient | None = None
        self._staleness = 0  # the most that is allowed
        name, settings = describe_rule(rule)
        group = "+".join(shape.name for shape in shapes)
        self._group = TableGroup(name=group, tables=tuple(shapes), rule=name, settings=settings)
        # How many updates there were, of all tables together and of each; and the last ones, which
        # reads do not know yet: each as (keys, gradients, steps, rates).
        # `written`: the last update that wrote rows, which all reads know, and a digest of these.
        self.param_groups[0] |= {"updates": 0, "steps": [0] * len(shapes), "unread": []}
        self.param_groups[0]["written"] = [0, 0]
        # What the script has written before the next step: table, keys and rows.
        self._writes: list[tuple[int, torch.Tensor, torch.Tensor]] = []
        self._access: ServerAccess | None = None

    @property
    def table_names(self) -> list[str]:
        """Return the names of the tables, in the order of their parameters."""
        return [shape.name for shape in self._group.tables]

    def __setstate__(self, state: dict[str, Any]) -> None:
        """Take over a state, also one of a release that had no staleness in it.

        What this script has written so far is in that state, or it is not to count.
        """
        super().__setstate__(state)
        self._writes = []
        self.param_groups[0].setdefault("written", [0, 0])
        self.param_groups[0].setdefault("unread", [])
        self.param_groups[0].setdefault("staleness", self._staleness)
        # This worker may be the only one with these updates.
        if self._client is not None:
            self._client.keep_unread(self._saved_version, [_unpack(each) for each in self._unread])

    def connect(self, access: ServerAccess) -> None:
        """Use the job's servers from now on."""
        self._staleness, self._access = access.link.settings.staleness, access
        self.param_groups[0].setdefault("staleness", access.link.settings.staleness)
        group = msgspec.structs.replace(self._group, staleness=access.link.settings.staleness)
        self._client = RowClient(group, access)

    def set_staleness(self, steps: int) -> None:
        """Allow later steps to read rows without the updates of the last `steps` steps.

        Call it between two steps, on all workers. UserError for more than the job's --staleness.
        """
        check_staleness(steps, self._staleness)
        self.param_groups[0]["staleness"] = steps

    def save(self, step: int, token: str, first: int, parts: Mapping[int, Sequence[int]]) -> None:
        """Order servers to save rows as the next step may read them, as shares from `first` on.

        `parts`: the shards that each server saves.
        """
        if self._client is not None:
            self._client.save(self._saved_version, step, token, first, parts)

    def note_checkpoint(self, step: int) -> None:
        """Record that the state has come from a checkpoint, which holds all rows as well."""
        if self._client is not None:
            self._client.begin_from(self._saved_version, step)

    @property
    def is_connected(self) -> bool:
        """Return whether the job's first loop has begun, so that rows are on servers."""
        return self._client is not None

    def write_rows(self, table: TableShape, ids: torch.Tensor, rows: torch.Tensor) -> None:
        """Give rows of a table these values: now within a step, else as the next one begins."""
        self._writes.append((self._group.tables.index(table), ids, rows))
        link = self._access.link if self._access is not None else None
        if link is not None and link.is_in_step():
            raise UserError(
                "rows of a table were written in the loop over a step's batches, which each worker "
                "enters for its own tasks: write them after that loop"
            )
        if link is not None and link.can_write():
            self.write()

    def write(self) -> None:
        """Send the servers what the script has written."""
        writes, self._writes = self._writes, []
        client, state, shapes = self._client, self.param_groups[0], self._group.tables
        for place, ids, rows in writes:
            assert client is not None, "rows are written in the job's loops"
            at_once = max(WRITTEN_AT_ONCE // shapes[place].dim, 1)
            for keys, values in zip(ids.split(at_once), rows.split(at_once), strict=True):
                parts = {place: (keys, values.to("cpu", torch.float32).contiguous())}
                state["updates"] += 1
                client.write(state["updates"], self._update_of(parts, writes=True))
                state["written"] = [
                    state["updates"],
                    _digest(state["written"][1], shapes[place].name, *parts[place]),
                ]
        if writes:
            state["unread"] = []

    def _update_of(
        self, parts: Mapping[int, tuple[torch.Tensor, torch.Tensor]], *, writes: bool = False
    ) -> RowUpdate:
        """Return an update of the tables at these places: of each, keys [n] and rows [n, dim]."""
        shapes, state = self._group.tables, self.param_groups[0]
        none = torch.empty(0, dtype=torch.int64)
        every = [parts.get(i, (none, torch.empty(0, s.dim))) for i, s in enumerate(shapes)]
        return RowUpdate(
            keys=[keys for keys, _ in every],
            grads=[rows for _, rows in every],
            steps=list(state["steps"]),
            rates=[state["lr"]] * len(shapes),
            writes=writes,
        )

    def find_rows(self, ids: Sequence[torch.Tensor], *, newest: bool = False) -> list[FoundRows]:
        """Return the rows of each table's ids as this step reads them.

        `newest`: as all committed updates have left them, whatever the job's staleness and the
        precision of reads.
        """
        client = self._find_client()
        state = self.param_groups[0]
        version = max(state["updates"] - (0 if newest else state["staleness"]), state["written"][0])
        as_half = self._as_half and not newest
        return find_rows(ids, lambda keys: client.read(version, keys, as_half=as_half))

    def read_rows(self, table: TableShape, ids: torch.Tensor) -> torch.Tensor:
        """Return rows of one table, in blocks, as the committed updates have left them."""
        blocks = []
        for block in ids.split(READ_AT_ONCE):
            none = [ids.new_empty(0) for _ in self._group.tables]
            place = self._group.tables.index(table)
            found = self.find_rows([*none[:place], block, *none[place + 1 :]], newest=True)[place]
            blocks.append(found.rows[found.index])
        return torch.cat(blocks) if blocks else torch.empty(0, table.dim)

    def read_keys(self, table: TableShape) -> torch.Tensor:
        """Return the keys [n] of a table that have rows after all committed updates."""
        client = self._find_client()
        return client.read_keys(self.param_groups[0]["updates"], self._group.tables.index(table))

    @property
    def _saved_version(self) -> int:
        """Return the least number of updates of the rows that the next step may read."""
        state = self.param_groups[0]
        return int(max(state["updates"] - self._staleness, state["written"][0]))

    @property
    def _unread(self) -> list[Any]:
        """Return the updates after that version."""
        return self.param_groups[0]["unread"]

    def _find_client(self) -> RowClient:
        if self._client is None:
            raise UserError(
                f"tables {self._group.name} were looked up before the job's first step: call "
                "job.protect(...) first, and look rows up within job.steps or job.evaluate"
            )
        return self._client

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        """Send the committed sums to the servers."""
        client, state = self._client, self.param_groups[0]
        if client is None or not any(param.grad is not None for param in self._order):
            return
        parts, steps = {}, list(state["steps"])
        for i, param in enumerate(self._order):
            if param.grad is not None:
                steps[i] += 1
                keys, rows = rows_of(param)
                parts[i] = keys.cpu(), rows.cpu()
        state["updates"], state["steps"] = state["updates"] + 1, steps
        update = self._update_of(parts)
        client.push(state["updates"], update)
        if self._staleness:
            kept = [update.keys, update.grads, update.steps, update.rates]
            state["unread"] = [*self._unread, kept][-self._staleness :]


def _unpack(update: Sequence[Any]) -> RowUpdate:
    """Return an update that is kept in the state."""
    keys, grads, steps, rates = update
    return RowUpdate(keys=keys, grads=grads, steps=steps, rates=rates)


def _digest(before: int, table: str, *parts: torch.Tensor) -> int:
    """Return 63 bits of everything that was written to rows."""
    found = xxhash.xxh3_64(f"{before} {table}".encode())
    for each in parts:
        found.update(memory_of(each))
    return found.intdigest() >> 1


def empty_weight(count: int, dim: int, device: Any) -> torch.Tensor:
    """Return a tensor of a table's shape that takes no memory."""
    return torch.zeros(1, 1, device=device).expand(count, dim)


def as_parameter_of(weight: torch.Tensor, found: FoundRows) -> torch.Tensor:
    """Return found rows whose gradient goes to the table's parameter."""
    result: torch.Tensor = _Served.apply(weight, found.rows, found.unique)
    return result

"""Updates the tables of a job whose rows no optimizer of the script updates.

A module says so by an attribute `row_optimizer`, a torch optimizer. It becomes a part of the job's
state beside its module, and takes its step as soon as a step of the job is committed. Must not
know what a table is.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from holdfast.core.errors import UserError
from holdfast.core.servers.heirs import HeirProgress, HolderAnswer
from holdfast.core.servers.placement import lay_out, share_out
from holdfast.core.types import ServerLayout
from holdfast.net.peer_identity import PeerIdentity
from holdfast.train.step.keyed_gradient import find_keyed_gradient

ATTRIBUTE = "row_optimizer"


class HeirWatch:
    """Reports which new processes of servers have all rows, and the newest layout of the rows.

    `report`: is called with both whenever one changes. Threads may share it.
    """

    def __init__(
        self,
        layout: ServerLayout,
        replicas: int,
        report: Callable[[tuple[str, ...], ServerLayout], object],
    ) -> None:
        self._report = report
        self._told: tuple[tuple[str, ...], ServerLayout | None] = ((), None)
        self._progress = HeirProgress(layout, replicas)
        self._lock = threading.Lock()

    def begin(self) -> None:
        """Report for the first time."""
        with self._lock:
            self._tell()

    @property
    def layout(self) -> ServerLayout:
        """Return the newest layout."""
        return self._progress.layout

    def change_layout(self, layout: ServerLayout) -> None:
        """Go by another layout, if it is newer."""
        with self._lock:
            if layout.number > self.layout.number:
                self._progress.change_layout(layout)
                self._tell()

    def add_group(self, group: str) -> None:
        """Add a group of tables."""
        with self._lock:
            self._progress.add_group(group)

    def record_answer(self, group: str, answer: HolderAnswer) -> None:
        """Record a server's answer to an update: see HeirProgress."""
        with self._lock:
            self._progress.record_answer(group, answer)
            self._tell()

    def record_silence(self, group: str, server: int) -> None:
        """Record that a server has not answered, or does not exist."""
        with self._lock:
            self._progress.record_silence(group, server)
            self._tell()

    def _tell(self) -> None:
        found = self._progress.list_complete(), self.layout
        if found != self._told:
            self._told = found
            self._report(*found)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerAccess:
    """Describes how a worker reaches the servers that hold rows.

    `staleness`: how many of the last updates a read leaves out. `find_address`: returns where a
    server listens, empty while that is not known. `find_heir`: likewise for a second process of the
    server, which copies its rows to another node; empty if there is none. `heirs`: knows the layout
    of the rows, and is told how far new processes are. `find_part`: returns this worker's place
    among the members and their number, or None if it is none now. `lose`: gives this worker's state
    up, since rows are lost, and does not return. `tell`: adds a line to the job's events.
    """

    replicas: int
    staleness: int
    identity: PeerIdentity
    find_address: Callable[[int], str]
    find_heir: Callable[[int], str]
    heirs: HeirWatch
    find_part: Callable[[], tuple[int, int] | None]
    lose: Callable[[str], object]
    tell: Callable[[str], object]


class RowUpdates:
    """Knows the optimizers of the protected modules' rows, by the names of these modules."""

    def __init__(self) -> None:
        self._optimizers: dict[str, torch.optim.Optimizer] = {}
        self._access: ServerAccess | None = None

    def find(self, name: str, value: Any) -> dict[str, torch.optim.Optimizer]:
        """Return new optimizers within an object that is protected as `name`, by their names."""
        if not isinstance(value, nn.Module):
            return {}
        found = {}
        for path, module in value.named_modules(prefix=name):
            optimizer = getattr(module, ATTRIBUTE, None)
            known = any(optimizer is each for each in self._optimizers.values())
            if isinstance(optimizer, torch.optim.Optimizer) and not known:
                found[f"{path}.{ATTRIBUTE}"] = optimizer
        self._optimizers |= found
        return found

    def group(self, params: Iterable[torch.Tensor]) -> list[list[torch.Tensor]]:
        """Sort parameters with sparse gradients into lists; each list can be summed as one table.

        The parameters of a list have one optimizer, rows of one width, and no keys.
        """
        owners = {
            id(p): name
            for name, optimizer in self._optimizers.items()
            for group in optimizer.param_groups
            for p in group["params"]
        }
        found: dict[Any, list[torch.Tensor]] = {}
        for param in params:
            key: Any = (owners.get(id(param)), param.shape[1:], param.dtype, param.device)
            if key[0] is None or find_keyed_gradient(param) is not None:
                key = id(param)
            found.setdefault(key, []).append(param)
        return list(found.values())

    def check(self, name: str, value: Any) -> None:
        """Raise UserError if a script's optimizer would update rows that update themselves."""
        if not isinstance(value, torch.optim.Optimizer) or name in self._optimizers:
            return
        mine = {id(p) for group in value.param_groups for p in group["params"]}
        for owner, optimizer in self._optimizers.items():
            if any(id(p) in mine for group in optimizer.param_groups for p in group["params"]):
                table = owner.removesuffix(f".{ATTRIBUTE}")
                raise UserError(
                    f"job.protect({name}=...): this {type(value).__name__} has the parameters of "
                    f"{table}, whose rows the job updates itself: leave them out of the optimizer"
                )

    def connect(self, access: ServerAccess) -> None:
        """Give the job's servers to all optimizers whose rows are there. UserError."""
        if not self._optimizers:
            raise UserError(
                "the job has servers for tables (--servers), but the script protects no table of "
                "holdfast.servers: protect it, or leave --servers out"
            )
        for name, optimizer in self._optimizers.items():
            connect = getattr(optimizer, "connect", None)
            if connect is None:
                table = name.removesuffix(f".{ATTRIBUTE}")
                raise UserError(
                    f"{table} was made before holdfast.join(), so its rows are in this worker and "
                    "not on the job's servers: make tables after holdfast.join()"
                )
            connect(access)
        self._access = access

    def save(self, step: int, token: str, first: int) -> int:
        """Have all servers save the rows as they are now, as shares from number `first` on.

        Returns how many shares of the checkpoint these are.
        """
        access = self._access
        if access is None:
            return 0
        parts = share_out(lay_out(access.heirs.layout, access.replicas))
        start = first
        for _, optimizer in sorted(self._optimizers.items()):
            optimizer.save(step, token, start, parts)  # type: ignore[attr-defined]
            start += len(parts)
        return start - first

    def note_checkpoint(self, step: int) -> None:
        """Record that the state has come from a checkpoint, which holds all rows as well."""
        for optimizer in self._optimizers.values() if self._access is not None else ():
            optimizer.note_checkpoint(step)  # type: ignore[attr-defined]

    def apply(self) -> None:
        """Update all rows that the committed step has used, and forget their gradients."""
        for optimizer in self._optimizers.values():
            optimizer.step()
            optimizer.zero_grad()

"""Is the hosted service of embedding tables: its servers, and a worker's client of them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from holdfast.engine.core.errors import UserError
from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.net.peer_stream import SendRate
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.train.script.row_updates import ATTRIBUTE
from holdfast.engine.train.script.service_link import ServiceClient, ServiceLink
from holdfast.tables.core.placement import lay_out, share_out
from holdfast.tables.served_tables import ServedOptimizer
from holdfast.tables.server_access import ServerAccess
from holdfast.tables.serving import RowServer
from holdfast.tables.table_store import TableStore


def listen(spec: JobSpec, identity: PeerIdentity, host: str, say: Callable[[str], None]) -> str:
    """Serve the tables of a job on this host from now on; return the address."""
    where, rate = spec.checkpoints.store, SendRate(spec.servers.copy_rate * 1e6)
    store = TableStore(Checkpoints(open_storage(where, say), say)) if where else None
    return RowServer(identity, say, store, rate).listen(host)


def connect(link: ServiceLink, protected: Mapping[str, Any]) -> TableClient:
    """Give the job's servers to all protected tables. UserError if there are none on servers."""
    access, found, suffix = ServerAccess(link), dict[str, ServedOptimizer](), f".{ATTRIBUTE}"
    for name, optimizer in protected.items():
        if isinstance(optimizer, ServedOptimizer):
            found[name] = optimizer
        elif name.endswith(suffix):
            raise UserError(
                f"{name.removesuffix(suffix)} was made before holdfast.join(), so its rows are in "
                "this worker and not on the job's servers: make tables after holdfast.join()"
            )
    if not found:
        raise UserError(
            "the job has servers for tables (--servers), but the script protects no table of "
            "holdfast.tables: protect it, or leave --servers out"
        )
    for optimizer in found.values():
        optimizer.connect(access)
    access.begin()
    return TableClient(access, found)


class TableClient(ServiceClient):
    """Sends the orders of a worker to the servers of all its tables, by the tables' names."""

    def __init__(self, access: ServerAccess, optimizers: Mapping[str, ServedOptimizer]) -> None:
        self._access = access
        self._optimizers = [optimizers[name] for name in sorted(optimizers)]

    def change_layout(self, layout: ServerLayout) -> None:
        """Use another layout of the rows, if it is newer."""
        self._access.change_layout(layout)

    def write(self) -> None:
        """Send the rows to the servers that the script has written before this step."""
        for optimizer in self._optimizers:
            optimizer.write()

    def save(self, step: int, token: str, first: int) -> int:
        """Order all servers to save the present rows, as shares from number `first` on."""
        parts = share_out(lay_out(self._access.layout, self._access.link.settings.replicas))
        for place, optimizer in enumerate(self._optimizers):
            optimizer.save(step, token, first + place * len(parts), parts)
        return len(self._optimizers) * len(parts)

    def note_checkpoint(self, step: int) -> None:
        """Record that the state has come from a checkpoint, which holds all rows as well."""
        for optimizer in self._optimizers:
            optimizer.note_checkpoint(step)

"""Keeps a job's orders for nodes in its run directory, where launcher and nodes see them.

Some managers start a container without being able to name its order. There, each order is a file,
and the container that carries it out claims it by a link, which only one process can make. Orders
stay in the book for ever, so that no id is used twice. The folder is closed to other users.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from holdfast.engine.core.domains import Domains
from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.fleet.placements import PlacementId
from holdfast.engine.fleet.cluster_manager import PlacementOrder
from holdfast.engine.state.store.regular_files import create_regular, read_json

ORDERS = "orders"  # in the run directory
ORDER, CLAIM, NOTE = ".order", ".claim", ".note"
WITHDRAWN = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class BookEntry:
    """Describes an order; `holder`: its container, or WITHDRAWN."""

    order: PlacementOrder
    holder: str | None = None
    #: Where the holder is.
    host: str = ""
    #: Failure domains of the host, if they were known as it was chosen.
    domains: Domains = ()

    @property
    def waits(self) -> bool:
        return self.holder is None


class OrderBook:
    """Reads and writes the orders in a folder. OSError; Damaged if a file cannot be read."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def add(self, order: PlacementOrder) -> None:
        """Write an order down; an order that is there already gets its new hosts to avoid."""
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        fields = {
            "command": list(order.command),
            "environment": dict(order.environment),
            "avoid": list(order.avoid),
        }
        os.replace(self._draft(order.id, fields), self._path(order.id, ORDER))

    def entries(self) -> list[BookEntry]:
        """Return all orders, the claimed and withdrawn ones too."""
        return list(self._read_all())

    def find(self, id_: PlacementId) -> BookEntry | None:
        """Return the entry of an id, if there is one."""
        return self._entry(id_) if self._path(id_, ORDER).exists() else None

    def claim(self, id_: PlacementId, holder: str, host: str = "", domains: Domains = ()) -> bool:
        """Claim an order; return False if another process has claimed it before."""
        wanted = {"holder": holder, "host": host, "domains": list(domains)}
        draft = self._draft(id_, wanted)
        try:
            os.link(draft, self._path(id_, CLAIM))
        except FileExistsError:
            # A file server may have made the link and lost the answer.
            return self._read(self._path(id_, CLAIM)) == wanted
        finally:
            draft.unlink()
        return True

    def take(self, holder: str, host: str) -> PlacementOrder | None:
        """Claim the first order that waits and does not avoid the host; None if there is none."""
        for entry in self._read_all():
            fits = entry.waits and host not in entry.order.avoid
            if fits and self.claim(entry.order.id, holder, host):
                return entry.order
        return None

    def withdraw(self, id_: PlacementId) -> bool:
        """Withdraw an order; return False if a container has claimed it before."""
        return self.claim(id_, WITHDRAWN)

    def note(self, id_: PlacementId, text: str) -> None:
        """Record a text about a claimed order for the manager's adapter; "" removes it."""
        path = self._path(id_, NOTE)
        if text:
            os.replace(self._draft(id_, {"text": text}), path)
        elif path.exists():
            path.unlink()

    def read_note(self, id_: PlacementId) -> str:
        """Return the text that was recorded about an order, or ""."""
        path = self._path(id_, NOTE)
        return str(self._read(path).get("text", "")) if path.exists() else ""

    def _read_all(self) -> Iterator[BookEntry]:
        for path in sorted(self._folder.glob(f"*{ORDER}")):
            yield self._entry(PlacementId(path.name.removesuffix(ORDER)))

    def _entry(self, id_: PlacementId) -> BookEntry:
        found, claim = self._read(self._path(id_, ORDER)), self._path(id_, CLAIM)
        try:
            order = PlacementOrder(
                id=id_,
                command=tuple(found["command"]),
                environment=dict(found["environment"]),
                avoid=tuple(found["avoid"]),
            )
            if not claim.exists():
                return BookEntry(order=order)
            told = self._read(claim)
            holder, host = str(told["holder"]), str(told["host"])
            domains = tuple(told.get("domains", ()))
            return BookEntry(order=order, holder=holder, host=host, domains=domains)
        except (KeyError, TypeError) as error:
            raise Damaged(f"{self._folder} has no whole order {id_} ({error!r})") from None

    def _path(self, id_: PlacementId, kind: str) -> Path:
        return self._folder / f"{id_}{kind}"

    def _draft(self, id_: PlacementId, fields: dict[str, Any]) -> Path:
        """Write a file that is moved or linked to its place once it is whole."""
        draft = self._folder / f".{id_}.{os.urandom(8).hex()}"
        try:
            with open(create_regular(draft, 0o600), "w") as file:
                json.dump(fields, file)
        except OSError:
            draft.unlink(missing_ok=True)
            raise
        return draft

    def _read(self, path: Path) -> Any:
        try:
            return read_json(path)
        except ValueError as error:
            raise Damaged(f"{path} cannot be read: {error}") from None

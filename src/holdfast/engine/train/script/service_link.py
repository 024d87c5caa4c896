"""Connects a worker to the hosted service of its job, whose servers run on the job's nodes.

The module of a service has `connect(link, protected)`, which is called once in each worker. It
looks through the protected objects for its own, and returns a `ServiceClient`. The servers' places
and the layout are decided by the coordinator (core/membership/server_places.py). This module must
not know what a service is for; the tables of `holdfast.tables` are the first one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.engine.core.job_spec import ServerSettings
from holdfast.engine.net.tls import PeerIdentity


@dataclass(frozen=True, slots=True, kw_only=True)
class ServiceLink:
    """Describes how a worker reaches the servers of its job, and how it reports on them."""

    settings: ServerSettings
    identity: PeerIdentity
    #: The newest layout that this worker knows.
    layout: ServerLayout
    #: Returns where a server listens; empty while that is not known.
    find_address: Callable[[int], str]
    #: Likewise for a second process of the server, which copies its contents to another node; empty
    #: if there is none.
    find_heir: Callable[[int], str]
    #: Returns this worker's place among the members and their number; None if it is no member now.
    find_part: Callable[[], tuple[int, int] | None]
    #: Reports the addresses of new processes that have all they should, in a layout.
    report: Callable[[tuple[str, ...], ServerLayout], object]
    #: Gives this worker's state up, for a reason, and does not return.
    lose: Callable[[str], object]
    #: Adds a line to the events of the job.
    note: Callable[[str], object]
    #: Returns whether the script is in its loop over a step's batches, which each worker enters for
    #: its own tasks.
    is_in_step: Callable[[], bool] = lambda: False
    #: Returns whether the script may write to the service now, and not only as a step begins.
    can_write: Callable[[], bool] = lambda: True


class ServiceClient(Protocol):
    """Declares a service's part in a worker. All but `change_layout` belongs to the script."""

    def change_layout(self, layout: ServerLayout) -> None:
        """Use another layout if it is newer. Any thread may call this."""

    def write(self) -> None:
        """Send the servers what the script has written before this step."""

    def save(self, step: int, token: str, first: int) -> int:
        """Order the servers to save, as shares from number `first` of a step's checkpoint on.

        Returns the number of shares. `token`: it names this attempt to save.
        """
        ...

    def note_checkpoint(self, step: int) -> None:
        """Record that the state of this worker has come from the checkpoint of a step."""


class HostedService:
    """Passes a script's boundaries on to the client of the job's service, if there is one."""

    def __init__(self) -> None:
        self._client: ServiceClient | None = None

    def use(self, client: ServiceClient) -> None:
        """Pass boundaries on to this client from now on."""
        self._client = client

    def write(self) -> None:
        """Send the servers what the script has written before this step."""
        if self._client is not None:
            self._client.write()

    def save(self, step: int, token: str, first: int) -> int:
        """Order the servers to save; returns how many shares of the checkpoint these are."""
        return self._client.save(step, token, first) if self._client is not None else 0

    def note_checkpoint(self, step: int) -> None:
        """Record that the state has come from a checkpoint."""
        if self._client is not None:
            self._client.note_checkpoint(step)

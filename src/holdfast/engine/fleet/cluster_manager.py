"""Defines the contract between a job and a cluster manager: the duties of an adapter.

An adapter decides nothing and remembers nothing that the manager knows: a new adapter of the same
job gives the same answers. Its contract is written down as tests, in
holdfast.lab.contracts.cluster_contract.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from holdfast.engine.core.errors import WorldError
from holdfast.engine.core.fleet.placements import Placement, PlacementId


class StoppedByOperator(WorldError):
    """Reports that an operator of the cluster has ended a job's application, with all placements.

    The job ends, instead of asking for other placements.
    """


@dataclass(frozen=True, slots=True, kw_only=True)
class PlacementOrder:
    """Describes a placement that is wanted: one process, on a host of its own.

    The manager should not start it again when it ends. `environment` is added to what the host
    has; it may hold the job's secret, so it must not be shown to other users.
    """

    id: PlacementId
    command: tuple[str, ...]
    environment: Mapping[str, str] = field(default_factory=dict)
    avoid: tuple[str, ...] = ()  # hosts, as listings name them


class ClusterManager(Protocol):
    """Asks one cluster manager for the nodes of one job.

    Each method raises WorldError or OSError when the manager cannot be asked or refuses; then the
    request may have been carried out or not. Each may be cancelled.
    """

    async def observe(self) -> Sequence[Placement]:
        """List all placements of this job that are waiting or running, with pending notices.

        Those that have ended may be listed as such, with the host that they had, or not at all.
        It must never leave out a placement that was there when it was called, so a manager that is
        away is an error, not an empty list. StoppedByOperator: no placement is left, and none may
        be asked for. A placement that waits may have the reason (`Placement.why`).
        """
        ...

    async def request(self, order: PlacementOrder) -> None:
        """Ask for a placement; return once the manager has taken the request in.

        An order with an id that the manager still knows is the same request, made again: it must
        not make a second placement.
        """
        ...

    async def release(self, id_: PlacementId, handle: str) -> None:
        """End a placement and all its processes, whatever becomes of its host; wait for nothing.

        It is no error if there is none (any more).
        """
        ...

    async def close(self) -> None:
        """Close what the adapter holds open; placements stay."""
        ...

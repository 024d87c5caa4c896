"""Planted bugs of where servers of tables run."""

from __future__ import annotations

import pytest

from holdfast.core.membership import server_places
from holdfast.core.membership.departure import Departure
from holdfast.sim.world import Machines
from mutation_kit import mutation


@mutation
def servers_of_drained_nodes_move_at_once(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(server_places._Review, "_is_leaving", lambda self, agent: False)
    return Machines()


@mutation
def any_heir_takes_over(patch: pytest.MonkeyPatch) -> Machines:
    """An heir takes its server's place as soon as it listens."""

    class Everything(frozenset[str]):
        def __contains__(self, address: object) -> bool:
            return True

    plain = server_places._Review.__init__

    def init(self: server_places._Review, *words: object) -> None:
        plain(self, *words)  # type: ignore[arg-type]
        self._complete = Everything()  # type: ignore[assignment]

    patch.setattr(server_places._Review, "__init__", init)
    return Machines()


@mutation
def a_node_leaves_before_its_servers_have_moved(patch: pytest.MonkeyPatch) -> Machines:
    def may_end(self: Departure, agent: object, told: object, now: float) -> bool:
        return told is not None and (told.shutdown or self.for_good)  # type: ignore[attr-defined]

    patch.setattr(Departure, "may_end", may_end)
    return Machines()


@mutation
def servers_are_placed_anew_after_the_journal_was_lost(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(server_places._Review, "_recall", lambda self, number: None)
    return Machines()

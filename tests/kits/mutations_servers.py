"""Planted bugs of where servers of tables run."""

from __future__ import annotations

from dataclasses import replace

import pytest

from holdfast.engine.core.membership import server_places
from holdfast.engine.core.membership.departure import Departure
from holdfast.engine.core.membership.durable import Durable
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.protection import Protection
from holdfast.engine.core.types import ViewNumber
from holdfast.lab.sim.world import Machines
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
    def may_end(self: Departure, agent: object, told: object, now: float, *, alone: bool) -> bool:
        return told is not None and (told.shutdown or self.for_good)  # type: ignore[attr-defined]

    patch.setattr(Departure, "may_end", may_end)
    return Machines()


@mutation
def servers_are_placed_anew_after_the_journal_was_lost(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(server_places._Review, "_recall", lambda self, number: None)
    return Machines()


@mutation
def former_servers_are_let_go_at_once(patch: pytest.MonkeyPatch) -> Machines:
    """Another number of servers counts as reached as soon as somebody has asked for it."""
    patch.setattr(server_places._Review, "_is_laid_out", lambda self: True)
    return Machines()


@mutation
def a_layout_is_left_before_everybody_knows_it(patch: pytest.MonkeyPatch) -> Machines:
    plain = server_places._Review._knows_layout

    def is_laid_out(self: server_places._Review) -> bool:
        posts = [self.posts.get(number) for number in range(self.layout.goal)]
        known = [s for s in self._facts.known if plain(self, s)]
        return bool(known) and all(p is not None and p.address in self._complete for p in posts)

    patch.setattr(server_places._Review, "_is_laid_out", is_laid_out)
    return Machines()


@mutation
def rows_of_an_earlier_layout_count(patch: pytest.MonkeyPatch) -> Machines:
    """A worker's word of complete servers counts, whatever they were to hold then."""

    def init(self: server_places._Review, *words: object) -> None:
        plain(self, *words)  # type: ignore[arg-type]
        self._complete = {a for s in self._facts.known for a in s.heirs}

    plain = server_places._Review.__init__
    patch.setattr(server_places._Review, "__init__", init)
    return Machines()


@mutation
def the_first_layout_is_back_after_the_journal_was_lost(patch: pytest.MonkeyPatch) -> Machines:
    patch.setattr(server_places.ServerPlaces, "recall_layout", lambda self, statuses: self)
    return Machines()


@mutation
def states_whose_rows_are_lost_are_recalled(patch: pytest.MonkeyPatch) -> Machines:
    plain = Protection.note_failures

    def note(self: Protection, facts: Facts, durable: Durable, *, is_discarded: bool) -> Protection:
        return plain(self, facts, durable, is_discarded=False)

    patch.setattr(Protection, "note_failures", note)
    return Machines()


@mutation
def rows_that_are_lost_once_are_lost_for_ever(patch: pytest.MonkeyPatch) -> Machines:
    """Once a worker has found rows lost, no later state is recalled either."""
    plain = Protection.note_failures

    def note(self: Protection, facts: Facts, durable: Durable, *, is_discarded: bool) -> Protection:
        found = plain(self, facts, durable, is_discarded=is_discarded)
        return replace(found, useless=ViewNumber(1 << 30)) if is_discarded else found

    patch.setattr(Protection, "note_failures", note)
    return Machines()

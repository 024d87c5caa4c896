"""Cuts the rows of a sum into parts, as a plan of sums (core/sum_plan.py) cuts a buffer.

For this the rows are sorted by keys, which are their places, mixed: a part has the rows whose keys
are in a range. Rows that many tasks use are often those with low numbers, and mixing spreads them
evenly over all parts.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from fractions import Fraction

import torch

from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.sum_plan import WHOLE, Part, overlap, subtract
from holdfast.engine.train.step.row_table import Rows

_KEYS = 1 << 64  # keys are int64, so the least one is minus half of this
_LOW_HALF = (1 << 32) - 1
# Of the mixing function of degski64 (public domain), as int64: the product of both is 1.
_FACTOR, _INVERSE = 0xD6E8FEB86659FD93 - _KEYS, 0xCFEE444D8B59A89B - _KEYS


@dataclass(frozen=True, slots=True, kw_only=True)
class RowPiece:
    """Is a part of the rows of a tree node's sum, by key. `is_used`: the node's whole sum has rows.

    Adding pieces gives the same bits as adding the whole sums with `Rows.add`, which takes a sum
    over unchanged if the other one has no rows at all.
    """

    rows: Rows
    is_used: bool

    @classmethod
    def of(cls, rows: Rows) -> RowPiece:
        """Return all rows of a sum, sorted by key."""
        return cls(rows=_sort(mix(rows.places), [rows]), is_used=len(rows.places) > 0)

    def add(self, other: RowPiece) -> RowPiece:
        """Return the sum; this is the left operand."""
        if not self.is_used or not other.is_used:
            return self if self.is_used else other
        return RowPiece(rows=self.rows.merge(other.rows), is_used=True)

    def cut(self, part: Part) -> RowPiece:
        """Return the rows whose keys are in a part, in the same memory."""
        if part == WHOLE:
            return self
        places, values = self.rows.places, self.rows.values
        where = slice(*(_count_before(places, bound) for bound in part))
        rows = Rows(places=places[where], values=values[where], dense=self.rows.dense)
        return RowPiece(rows=rows, is_used=self.is_used)


class NodeRows:
    """Keeps the pieces of one tree node's sum that are here, for all tables of a step."""

    def __init__(self) -> None:
        # In order, and no two of them overlap. The second member has a piece for each table.
        self._pieces: list[tuple[Part, list[RowPiece]]] = []

    def put(self, part: Part, pieces: Sequence[RowPiece]) -> None:
        """Keep the rows of a part, without those that are here already."""
        missing = [part]
        for held, _ in self._pieces:
            missing = [each for one in missing for each in subtract(one, held)]
        self._pieces += [(each, _cut_all(pieces, part, each)) for each in missing]
        self._pieces.sort(key=lambda item: item[0])

    def take(self, part: Part) -> list[RowPiece]:
        """Return the rows of a part, by table. InvariantError if some of them are missing."""
        return [_join(pieces) for pieces in self._find(part)]

    def gather(self) -> list[Rows]:
        """Return all rows, sorted by place, by table. InvariantError if some are missing."""
        found = []
        for pieces in self._find(WHOLE):
            parts = [each.rows for each in pieces]
            found.append(_sort(unmix(torch.cat([rows.places for rows in parts])), parts))
        return found

    def _find(self, part: Part) -> list[tuple[RowPiece, ...]]:
        """Return the pieces of a part, by table. InvariantError if some of them are missing."""
        missing, found = [part], []
        for held, pieces in self._pieces:
            common = overlap(part, held)
            if common is not None:
                missing = [each for one in missing for each in subtract(one, held)]
                found.append(_cut_all(pieces, held, common))
        if missing:
            raise InvariantError(f"rows of the parts {missing} of a sum are missing")
        return list(zip(*found, strict=True))


def mix(places: torch.Tensor) -> torch.Tensor:
    """Return a key for each place. No two places have the same key."""
    return _fold_half(_fold_half(places) * _FACTOR) * _FACTOR


def unmix(keys: torch.Tensor) -> torch.Tensor:
    """Return the places of keys."""
    return _fold_half(_fold_half(keys * _INVERSE) * _INVERSE)


def _fold_half(numbers: torch.Tensor) -> torch.Tensor:
    """Change the low half of each number by its high half; twice the same changes nothing."""
    return numbers ^ ((numbers >> 32) & _LOW_HALF)


def _sort(places: torch.Tensor, parts: Sequence[Rows]) -> Rows:
    """Return the rows of all parts at these new places, sorted by them."""
    places, order = places.sort()
    values = parts[0].values.new_empty(len(places), *parts[0].values.shape[1:])
    goes_to = torch.empty_like(order)
    goes_to[order] = torch.arange(len(order), device=order.device)
    # Each part is copied to its rows' places: the values are never in memory three times.
    ends = [len(rows.places) for rows in parts]
    for rows, where in zip(parts, goes_to.split(ends), strict=True):
        values[where] = rows.values
    return Rows(places=places, values=values, dense=parts[0].dense)


def _count_before(keys: torch.Tensor, bound: Fraction) -> int:
    """Return the number of keys before a bound of a part."""
    if bound == 1:
        return len(keys)
    first = bound.numerator * _KEYS // bound.denominator - _KEYS // 2
    return int(torch.searchsorted(keys, first))


def _cut_all(pieces: Sequence[RowPiece], held: Part, part: Part) -> list[RowPiece]:
    return [each if part == held else each.cut(part) for each in pieces]


def _join(pieces: Sequence[RowPiece]) -> RowPiece:
    """Return pieces that follow each other as one."""
    if len(pieces) == 1:
        return pieces[0]
    places = torch.cat([each.rows.places for each in pieces])
    values = torch.cat([each.rows.values for each in pieces])
    rows = Rows(places=places, values=values, dense=pieces[0].rows.dense)
    return RowPiece(rows=rows, is_used=pieces[0].is_used)

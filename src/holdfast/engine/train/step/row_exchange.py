"""Exchanges pieces of sums of rows between members: first the numbers of rows, then the rows."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from holdfast.engine.core.sum_plan import Message as Planned
from holdfast.engine.train.exchange.layout import TAG_ROWS
from holdfast.engine.train.exchange.seam import Message, Pending, Transport, is_done
from holdfast.engine.train.step.probe import current
from holdfast.engine.train.step.row_pieces import RowPiece
from holdfast.engine.train.step.row_table import Rows, RowTable

Kind = tuple[torch.dtype, torch.device]
_DENSE, _USED = 1, 2  # flags of a piece
_WORDS = 2  # for each piece: the number of its rows, and its flags


class RowExchange:
    """Exchanges the pieces of one level of a plan, those of all tables together.

    A peer gets one message of numbers, and one for each type of number in the rows. `leaving`: the
    pieces for each peer, by planned message and table. `coming`: the messages to receive.
    """

    def __init__(
        self,
        tables: Sequence[RowTable],
        leaving: Mapping[int, Sequence[RowPiece]],
        coming: Iterable[Planned],
    ) -> None:
        # The pieces that have come, by table, once the exchange is complete.
        self.arrived: list[tuple[Planned, list[RowPiece]]] = []
        self._tables = tables
        self._leaving = leaving
        self._coming: dict[int, list[Planned]] = {}
        for each in coming:
            self._coming.setdefault(each.peer, []).append(each)
        # By peer, as [messages, tables, words].
        self._sizes: dict[int, torch.Tensor] = {}
        self._has_sent_rows = False
        self._sent: list[Message] = []  # kept until they have been sent
        self._pending: Pending | None = None

    def begin(self, transport: Transport) -> None:
        """Exchange the numbers of rows."""
        count = len(self._tables)
        for peer, messages in self._coming.items():
            self._sizes[peer] = torch.zeros(len(messages), count, _WORDS, dtype=torch.int64)
        sends = [(peer, _measure(pieces, count)) for peer, pieces in self._leaving.items()]
        self._exchange(transport, sends, list(self._sizes.items()))

    def is_ready(self) -> bool:
        return is_done(self._pending)

    def advance(self, transport: Transport) -> bool:
        """Exchange the rows once their numbers are here; return False once they are here, too."""
        if self._pending is not None:
            self._pending.wait()
        if self._has_sent_rows:
            return False
        self._has_sent_rows = True
        sends: list[Message] = []
        receives: list[Message] = []
        for peer, pieces in self._leaving.items():
            flats = _pack(_tensors_of(pieces))
            current.probe.handle_sending(peer, sum(flat.nbytes for flat in flats))
            sends += [(peer, flat) for flat in flats]
        count = len(self._tables)
        for peer, sizes in self._sizes.items():
            flats, pieces = self._make_room(sizes)
            receives += [(peer, flat) for flat in flats]
            for i, message in enumerate(self._coming[peer]):
                self.arrived.append((message, pieces[i * count : (i + 1) * count]))
        self._exchange(transport, sends, receives)
        return True

    def _make_room(self, sizes: torch.Tensor) -> tuple[list[torch.Tensor], list[RowPiece]]:
        """Return arrays for the messages of a member, and the pieces in them."""
        expected = [
            RowPiece(
                rows=table.make_rows(count, dense=bool(flags & _DENSE)), is_used=flags & _USED > 0
            )
            for message in sizes.tolist()
            for table, (count, flags) in zip(self._tables, message, strict=True)
        ]
        flats = _pack(_tensors_of(expected))
        rest = {_kind_of(flat): flat for flat in flats}
        found = []
        for each in expected:
            places, values = (_take(rest, like) for like in (each.rows.places, each.rows.values))
            rows = Rows(places=places, values=values, dense=each.rows.dense)
            found.append(RowPiece(rows=rows, is_used=each.is_used))
        return flats, found

    def _exchange(
        self, transport: Transport, sends: list[Message], receives: list[Message]
    ) -> None:
        self._sent = sends
        is_empty = not sends and not receives
        self._pending = None if is_empty else transport.exchange(sends, receives, TAG_ROWS)


def _measure(pieces: Sequence[RowPiece], tables: int) -> torch.Tensor:
    """Return the words about pieces that are sent before them, as [messages, tables, words]."""
    words = [
        (len(each.rows.places), _DENSE * each.rows.dense + _USED * each.is_used) for each in pieces
    ]
    return torch.tensor(words, dtype=torch.int64).view(-1, tables, _WORDS)


def _tensors_of(pieces: Iterable[RowPiece]) -> list[torch.Tensor]:
    rows = [each.rows for each in pieces]
    return [t for each in rows for t in (each.places, each.values) if t.numel()]


def _pack(tensors: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Return one flat tensor for each type of number: few messages in place of many."""
    kinds = dict.fromkeys(map(_kind_of, tensors))
    found = []
    for kind in kinds:
        flats = [t.reshape(-1) for t in tensors if _kind_of(t) == kind]
        found.append(flats[0] if len(flats) == 1 else torch.cat(flats))
    return found


def _kind_of(tensor: torch.Tensor) -> Kind:
    return tensor.dtype, tensor.device


def _take(rest: dict[Kind, torch.Tensor], like: torch.Tensor) -> torch.Tensor:
    """Take the next part of a packed tensor, in the shape of another one."""
    if not like.numel():
        return like
    kind = _kind_of(like)
    part, rest[kind] = rest[kind].tensor_split([like.numel()])
    return part.view(like.shape)

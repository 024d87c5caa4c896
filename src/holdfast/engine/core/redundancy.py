"""Defines how nodes protect a job's state in their memory, as values: pieces, and their places.

A protected state is cut into one **part** for each node of the view's ring that holds it. Each part
is coded into `data + parity` **pieces**, and any `data` of them give the part. A part's first piece
is kept on one of the nodes that hold it, and its further pieces on the next nodes in the ring,
again and again if there are fewer nodes than pieces.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

from holdfast.engine.core.errors import UserError

PIECES_MAX = 255


@dataclass(frozen=True, slots=True, kw_only=True)
class Redundancy:
    """Sets the numbers of pieces of a part; with `data` 0 no state is protected."""

    data: int = 0
    parity: int = 0

    @property
    def pieces(self) -> int:
        return self.data + self.parity

    def pieces_on(self, nodes: int) -> int:
        """Return the pieces of a part on `nodes` nodes; two copies on one node are pointless."""
        return min(self.pieces, nodes) if self.data == 1 else self.pieces

    def nodes_to_lose(self, nodes: int) -> int:
        """Return the number of `nodes` nodes that may be lost, with their pieces."""
        pieces = self.pieces_on(nodes)
        return (pieces - self.data) // -(-pieces // nodes)

    def __str__(self) -> str:
        if not self.data:
            return "none"
        return f"replicate:{self.pieces}" if self.data == 1 else f"rs:{self.data}+{self.parity}"


def read_redundancy(text: str) -> Redundancy:
    """Read `none`, `replicate:R` or `rs:K+M`. UserError names the forms of the text."""
    kind, _, sizes = text.partition(":")
    numbers = sizes.split("+")
    if text == "none":
        return Redundancy()
    if not all(each.isascii() and each.isdecimal() for each in numbers):
        numbers = []
    if kind == "replicate" and len(numbers) == 1 and 1 <= int(numbers[0]) <= PIECES_MAX:
        return Redundancy(data=1, parity=int(numbers[0]) - 1)
    if kind == "rs" and len(numbers) == 2:
        found = Redundancy(data=int(numbers[0]), parity=int(numbers[1]))
        if found.data >= 1 and found.parity >= 1 and found.pieces <= PIECES_MAX:
            return found
    raise UserError(
        "must be none, replicate:R (R copies) or rs:K+M (of K+M pieces any K are enough), with "
        f"{PIECES_MAX} pieces at most"
    )


class Piece(NamedTuple):
    """Names one piece by its part and its number there, data first."""

    part: int
    number: int


@dataclass(frozen=True, slots=True, kw_only=True)
class KeptPieces:
    """Lists the pieces in a node's memory that one worker put there as a member of one view.

    `parts`: the number of parts in that view. `states`: the number of steps before each state.
    `first`, `end`: it holds the reduced gradients of the steps from `first` to before `end`.
    `committed`: the worker has committed the steps before it in the view. `shards`: the shards that
    these are of; empty: all.
    """

    view: int
    worker: int
    parts: int
    pieces: tuple[Piece, ...]
    states: tuple[int, ...] = ()
    first: int = 0
    end: int = 0
    committed: int = 0
    shards: tuple[int, ...] = ()


class GradientSource(NamedTuple):
    """Names `view` as the source of the gradients of the steps from `first` to before `end`."""

    view: int
    first: int
    end: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Recall:
    """Names the sources of the state after `step` steps, where no worker holds it.

    They are the state after `base` steps, which view `view` has put into nodes' memory (0: it is
    the initial state, or a checkpoint's), and the gradients of the steps since. `nodes`: HOST:PORT
    of the nodes that hold pieces.
    """

    base: int
    view: int
    sources: tuple[GradientSource, ...]
    nodes: tuple[str, ...] = ()

    @property
    def step(self) -> int:
        return self.sources[-1].end if self.sources else self.base

    def uses(self, kept: KeptPieces) -> bool:
        """Return whether the state is made of these pieces, or may be made of them."""
        if kept.view == self.view and self.base in kept.states:
            return True
        return any(
            kept.view == source.view and kept.first < source.end and source.first < kept.end
            for source in self.sources
        )

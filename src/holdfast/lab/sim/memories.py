"""Simulates the pieces of the job's state in the memory of nodes, and checks what becomes of them.

Pieces outlive the worker that put them there, and are lost with their node. No worker may recall
pieces that do not fit together. A committed step must not be lost while each part of the state has
lost no more pieces than it can bear.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

from holdfast.engine.core.invalidations import Invalidations, is_invalidated
from holdfast.engine.core.redundancy import KeptPieces, Piece, Redundancy
from holdfast.engine.core.replica.replicating import parts_of, pieces_of
from holdfast.engine.core.types import AgentId, ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.lab.sim.arithmetic import Copy
from holdfast.lab.sim.wrong_bits import Violation

T = TypeVar("T")
Reach = Callable[[AgentId], bool]


@dataclass(slots=True)
class HostShelf:
    """Keeps the pieces that one worker put into a node's memory, in one view and for one shard.

    `shard`: None for pieces of all shards.
    """

    pieces: tuple[Piece, ...]
    parts: int
    shard: int | None = None
    #: The state by the number of steps before it.
    states: dict[int, Copy] = field(default_factory=dict)
    #: The sum of each step.
    sums: dict[int, int | None] = field(default_factory=dict)
    committed: int = 0


class HostMemory:
    """Is the memory of one node. After each change, `changed` is called with its contents."""

    def __init__(
        self, redundancy: Redundancy, changed: Callable[[tuple[KeptPieces, ...]], None]
    ) -> None:
        self._redundancy = redundancy
        self._changed = changed
        self.shelves: dict[tuple[int, int, int], HostShelf] = {}  # by view, worker and shard
        self.losses = 0  # times that all was lost

    def lose(self) -> None:
        """Lose all of it."""
        self.shelves = {}
        self.losses += 1

    def keep_sum(
        self, view: View, worker: WorkerId, step: int, total: int | None, place: int = 0
    ) -> None:
        """Put a worker's pieces of a reduced gradient here, in place of an earlier attempt's.

        `place`: which of its nodes this is.
        """
        for shelf in self._shelves(view, worker, place):
            shelf.sums[step] = total
        self._tell()

    def keep_state(
        self, view: View, worker: WorkerId, step: int, copy: Copy, place: int = 0
    ) -> None:
        """Put a worker's pieces of the state after `step` steps here."""
        for shelf in self._shelves(view, worker, place):
            shelf.states[step] = copy
        self._tell()

    def mark(self, view: int, worker: WorkerId, step: int) -> None:
        """Record that a worker commits a step."""
        for (number, who, _), shelf in self.shelves.items():
            if (number, who) == (view, int(worker)):
                shelf.committed = max(shelf.committed, step + 1)
        self._tell()

    def forget(self, view: int, step: int) -> None:
        """Drop everything older than the state after `step` steps, which a view has protected."""
        for (number, _, _), shelf in self.shelves.items():
            shelf.sums = {s: total for s, total in shelf.sums.items() if s >= step}
            new = number == view
            shelf.states = {
                s: c for s, c in shelf.states.items() if s > step or (new and s == step)
            }
        self._tell()

    def _shelves(self, view: View, worker: WorkerId, place: int) -> list[HostShelf]:
        """Return the shelves of all shards with pieces on this node."""
        found = []
        for shard in shards_told(view):
            key = (int(view.number), int(worker), shard or 0)
            if key not in self.shelves:
                pieces = pieces_of(view, worker, self._redundancy, shard or 0, place)
                self.shelves[key] = HostShelf(pieces, parts_of(view, shard or 0), shard)
            found.append(self.shelves[key])
        return found

    def _tell(self) -> None:
        self._changed(tuple(self.contents()))

    def contents(self) -> list[KeptPieces]:
        """Return the pieces here, by view and worker."""
        found = []
        for (view, worker, _), shelf in sorted(self.shelves.items()):
            first = end = max(shelf.sums, default=-1) + 1
            while first - 1 in shelf.sums:
                first -= 1
            found.append(
                KeptPieces(
                    view=view,
                    worker=worker,
                    parts=shelf.parts,
                    pieces=shelf.pieces,
                    states=tuple(sorted(shelf.states)),
                    first=first,
                    end=end,
                    committed=shelf.committed,
                    shards=() if shelf.shard is None else (shelf.shard,),
                )
            )
        return found


def shards_told(view: View) -> Sequence[int | None]:
    """Return the shards of a spread worker; else None, which stands for all of them."""
    first = view.members[0]
    return range(first.shards) if first.further else (None,)


class Memories:
    """Finds pieces on all nodes, and knows which steps must not be lost."""

    def __init__(self, redundancy: Redundancy) -> None:
        self._redundancy = redundancy
        self.of: dict[AgentId, HostMemory] = {}
        self._rings: dict[int, dict[AgentId, int]] = {}  # by view: earlier losses of each node
        # By view: the node that keeps each piece of each shard.
        self._layouts: dict[int, list[tuple[AgentId, int, Piece]]] = {}
        self._summed_in: dict[int, int] = {}  # by step: the view
        self._useless_until = -1  # the newest view whose states may lack their rows
        self._known_to: dict[int, dict[AgentId, int]] = {}  # by step: whose workers committed it
        # For each step and the view that protected its state: the nodes that know that it counts.
        self._bases: dict[tuple[int, int], dict[AgentId, int]] = {}
        #: The losses of all nodes when the newest view was formed.
        self._losses = 0
        self._dropped: dict[AgentId, int] = {}  # by node: pieces of older steps are of no use there

    # ------------------------------------------------------------ what must not be lost

    def has_lost_any(self) -> bool:
        """Return whether a node has lost its pieces since the newest view was formed."""
        return sum(memory.losses for memory in self.of.values()) > self._losses

    def record_view(self, view: View) -> None:
        """Record which nodes keep pieces during a view."""
        self._losses = sum(memory.losses for memory in self.of.values())
        self._rings[view.number] = {agent: self.of[agent].losses for agent in view.ring}
        self._layouts[view.number] = [
            (agent, shard, piece)
            for member in view.members
            for place, agent in enumerate(member.nodes)
            for shard in (each or 0 for each in (shards_told(view) if view.ring else ()))
            for piece in pieces_of(view, member.worker, self._redundancy, shard, place)
        ]

    def record_commit(self, agent: AgentId, step: int, view: View) -> None:
        """Record that a worker of a node commits a step that was summed in a view."""
        self._summed_in[step] = view.number
        self._known_to.setdefault(step, {})[agent] = self.of[agent].losses

    def record_forgetting(self, agent: AgentId, view: int, step: int) -> None:
        """Record that a worker takes the state after `step` steps as protected by a view.

        The node drops older pieces, although they may bear a loss that the newer ones do not.
        """
        self._dropped[agent] = max(self._dropped.get(agent, 0), step)
        self._bases.setdefault((step, view), {})[agent] = self.of[agent].losses

    def record_useless_states(self, view: int) -> None:
        """Record that memory may hold states of views up to this one whose rows are lost."""
        self._useless_until = view

    def check_new_beginning(self, view: View, reach: Reach) -> None:
        """Check that a view that begins from memory begins as far as it must."""
        known = view.invalidations
        # A state that counts replaces older ones, even if it is wrong.
        invalid = any(is_invalidated(known, base, ViewNumber(of)) for base, of in self._bases)
        step = self.find_newest(known, reach)
        is_useless = self._summed_in.get(step, 0) <= self._useless_until
        if view.resume_step < step and not invalid and not is_useless:
            raise Violation(
                f"view {view.number} begins from step {view.resume_step}: step {step} was committed"
                ", and no part has lost more pieces than it may"
            )
        for later in [each for each in self._summed_in if each >= view.resume_step]:
            del self._summed_in[later], self._known_to[later]
        for later_base in [each for each in self._bases if each[0] > view.resume_step]:
            del self._bases[later_base]
        self._dropped = {a: min(step, view.resume_step) for a, step in self._dropped.items()}

    def find_newest(
        self, known: Invalidations, reach: Reach, saved: int = 0, without: AgentId | None = None
    ) -> int:
        """Return the newest committed step whose state can be put together again.

        `saved`: the step of a checkpoint that it may be made from. `without`: the node whose pieces
        do not count, although its knowledge of commits does.
        """

        def gives(agent: AgentId) -> bool:
            return agent != without and reach(agent)

        step = saved
        for (base, protects), knows in self._bases.items():
            if self._knows(knows, reach) and self._is_whole(protects, base, gives):
                step = max(step, base)
        while self._is_recorded(step, known, reach) and self._is_whole(
            self._summed_in[step], step, gives
        ):
            step += 1
        return step

    def find_base(self, without: AgentId | None) -> int:
        """Return the step of the newest state that is there, and that the next step has compared.

        Members may not know that it counts, so that older ones are still kept. 0: there is none.
        """
        kept = {
            (step, view): True
            for memory in self.of.values()
            for (view, _, _), shelf in memory.shelves.items()
            for step in shelf.states
            if self._summed_in.get(step) == view
        }
        whole = (
            step
            for step, view in kept
            if self.state(view, step, lambda agent: agent != without) is not None
        )
        return max(whole, default=0)

    def _is_recorded(self, step: int, invalidations: Invalidations, reach: Reach) -> bool:
        """Return whether a node still knows that a step was committed, and rightly."""
        view = self._summed_in.get(step, 0)
        right = not is_invalidated(invalidations, step + 1, ViewNumber(view))
        return right and self._knows(self._known_to.get(step, {}), reach)

    def _knows(self, agents: dict[AgentId, int], reach: Reach) -> bool:
        """Return whether one of these nodes still has its memory."""
        return any(reach(agent) and self.of[agent].losses == n for agent, n in agents.items())

    def _is_whole(self, view: int, step: int, reach: Reach) -> bool:
        """Return whether enough nodes of a view's ring still hold their pieces of a step.

        The ring bears the promised number of losses anywhere; more, if enough pieces are left.
        """
        ring, dropped = self._rings.get(view, {}), self._dropped
        held = [
            agent
            for agent, losses in ring.items()
            if reach(agent) and dropped.get(agent, 0) <= step and self.of[agent].losses <= losses
        ]
        if ring and len(ring) - len(held) <= self._redundancy.nodes_to_lose(len(ring)):
            return True
        there: dict[tuple[int, int], int] = {}
        for agent, shard, piece in self._layouts.get(view, []):
            key = (shard, piece.part)
            there[key] = there.get(key, 0) + (agent in held)
        return bool(ring) and min(there.values()) >= self._redundancy.data

    # ------------------------------------------------------------ what there is

    def state(self, view: int, step: int, reach: Reach) -> Copy | None:
        """Put the state after `step` steps together; None if too few pieces are in reach."""
        found = self._pieces(view, lambda shelf: shelf.states.get(step), reach)
        if found is None:
            return None
        if len({copy[0] for copy in found.values()}) > 1:
            raise Violation(f"pieces of the state of step {step} do not fit: {found}")
        flips = [copy[1] for _, copy in sorted(found.items()) if copy[1] is not None]
        return next(iter(found.values()))[0], flips[0] if flips else None

    def total(self, view: int, step: int, reach: Reach) -> int | None:
        """Put the sum of a step together; None if too few pieces are in reach."""
        found = self._pieces(view, lambda shelf: shelf.sums.get(step), reach)
        if found is None:
            return None
        if len(set(found.values())) > 1:
            raise Violation(f"pieces of the gradient of step {step} do not fit: {found}")
        return next(iter(found.values()))

    def _pieces(
        self, view: int, of: Callable[[HostShelf], T | None], reach: Reach
    ) -> dict[tuple[int, Piece], T] | None:
        found: dict[tuple[int, Piece], T] = {}
        parts: dict[int, int] = {}  # number of pieces of each shard
        for agent, memory in self.of.items():
            for (number, _, shard), shelf in memory.shelves.items():
                content = of(shelf)
                if number == view and content is not None and reach(agent):
                    parts[shard] = shelf.parts
                    found |= dict.fromkeys(((shard, piece) for piece in shelf.pieces), content)
        counts = [
            sum(piece.part == part and of_shard == shard for of_shard, piece in found)
            for shard, count in parts.items()
            for part in range(count)
        ]
        told = {shard for _, shard, _ in self._layouts.get(view, [])}
        whole = bool(counts) and min(counts) >= self._redundancy.data and told == set(parts)
        return found if whole else None


class LostRows:
    """Observes the views of a run, and decides which of them have lost their rows.

    The simulator of jobs has no rows. All of them are lost at once, and then every state that was
    made before is of no use: also if the nodes' memory gives the state back, because no rows are
    kept there. Only a job that begins from a checkpoint, or from its initial state, has its rows
    again.
    """

    def __init__(self) -> None:
        self._begun_in: dict[int, int] = {}  # views, by the ones in which their rows were made
        self._lost_in = -1  # rows that were made in views up to this one are lost

    def record_view(self, view: View) -> None:
        """Record a new view. It continues with the last view's rows, or begins with new ones."""
        before = self._begun_in[max(self._begun_in)] if self._begun_in else view.number
        goes_on = bool(view.donors) or view.recall is not None
        self._begun_in[view.number] = before if goes_on else view.number

    def lose(self) -> None:
        """Lose all rows that there are."""
        if self._begun_in:
            self._lost_in = max(self._begun_in)

    def are_lost(self, view: ViewNumber) -> bool:
        """Return whether the rows are lost that belong to the states of a view."""
        return self._begun_in.get(view, self._lost_in + 1) <= self._lost_in

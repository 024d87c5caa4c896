"""Keeps the memory of a story's nodes: pieces of states and of reduced gradients.

The memory itself is the simulator's. Commands of the story put a worker's pieces there, and read
them; an agent looks at its memory when it receives its workers' statuses.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind, SourceKind
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.redundancy import KeptPieces, Redundancy
from holdfast.engine.core.types import AgentId, WorkerId
from holdfast.engine.core.views import View
from holdfast.lab.sim.memories import HostMemory, Memories
from story_text import several

SUM = 5  # stands for the gradient of each step: no story looks at the number


class Keeper:
    """Keeps one worker's orders to write to its nodes' memory and to read from it."""

    def __init__(self) -> None:
        self.states: deque[ef.CopyState] = deque()  # copied, but not in the memory yet
        self.step: ef.KeepStep | None = None
        self.asks: ef.ObtainState | ef.ObtainStep | None = None


class NodeMemories:
    """Is the memory of all nodes; pieces are lost with their node alone."""

    def __init__(self, redundancy: Redundancy) -> None:
        self._redundancy = redundancy
        self._all = Memories(redundancy)
        self._keepers: dict[WorkerId, Keeper] = {}
        self._news: dict[AgentId, tuple[KeptPieces, ...]] = {}
        self._lost: set[AgentId] = set()

    def add(self, node: AgentId) -> None:
        """Add a node with an empty memory, also after it was lost."""

        def note(kept: tuple[KeptPieces, ...]) -> None:
            self._news[node] = kept

        self._all.of.setdefault(node, HostMemory(self._redundancy, note))
        self._lost.discard(node)

    def lose(self, node: AgentId) -> None:
        """Lose a node, and its memory with it."""
        self._all.of[node].lose()
        self._news.pop(node, None)
        self._lost.add(node)

    def news(self, node: AgentId) -> ag.MemoryHeld | None:
        """Return the pieces that an agent finds in its memory; None if it knows them already."""
        kept = self._news.pop(node, None)
        return None if kept is None else ag.MemoryHeld(kept, f"{node}:1")

    # ------------------------------------------------------------ what a worker's machine decides

    def attend(self, worker: WorkerId, nodes: tuple[AgentId, ...], effect: ef.WorkerEffect) -> None:
        """Carry out an order for the nodes' memory."""
        keeper = self._keepers.setdefault(worker, Keeper())
        match effect:
            case ef.MarkCommitted(view, step):
                for node in nodes:
                    self._all.of[node].mark(view, worker, step)
            case ef.Forget(SinkKind.MEMORY, view, step):
                for node in nodes:
                    self._all.of[node].forget(view, step)
            case ef.KeepStep(SinkKind.MEMORY):
                keeper.step = effect
            case ef.ObtainState(SourceKind.MEMORY) | ef.ObtainStep(SourceKind.MEMORY):
                keeper.asks = effect

    def installed(self, worker: WorkerId, view: View) -> None:
        """Begin a view: pieces that a worker has not put into memory by now are dropped."""
        self._keepers[worker] = Keeper()
        if view.ring:
            self._all.record_view(view)

    def copied(self, worker: WorkerId, copy: ef.CopyState) -> None:
        """Record that a worker's script has copied its share of the state."""
        self._keepers.setdefault(worker, Keeper()).states.append(copy)

    # ------------------------------------------------------------ what the story lets happen

    def keep_step(self, worker: WorkerId, view: View) -> ev.StepKept | None:
        """Put a worker's pieces of a gradient into the memory of its nodes."""
        keeper = self._keepers.setdefault(worker, Keeper())
        effect, keeper.step = keeper.step, None
        if effect is None or effect.view != view.number:
            return None
        for place, node in enumerate(_nodes(view, worker)):
            self._all.of[node].keep_sum(view, worker, effect.step, SUM, place)
        return ev.StepKept(view.number, effect.step)

    def keep_state(self, worker: WorkerId, flipped: int) -> ev.StateProtected | None:
        """Put a worker's pieces of the state into the memory of its nodes."""
        keeper = self._keepers.setdefault(worker, Keeper())
        if not keeper.states:
            return None
        effect = keeper.states.popleft()
        for place, node in enumerate(_nodes(effect.view, worker)):
            copy = (effect.step, flipped or None)
            self._all.of[node].keep_state(effect.view, worker, effect.step, copy, place)
        return ev.StateProtected(effect.step)

    def read(self, worker: WorkerId, view: View) -> list[ev.WorkerEvent]:
        """Read a state or a gradient from the memory for a worker; pieces may be missing."""
        keeper, recall = self._keepers.setdefault(worker, Keeper()), view.recall
        effect, keeper.asks = keeper.asks, None
        if effect is None or recall is None:
            return []
        if isinstance(effect, ef.ObtainState):
            found = self._all.state(recall.view, recall.base, self._reaches)
            done: ev.WorkerEvent = ev.StateObtained(SourceKind.MEMORY, view.number)
            before: list[ev.WorkerEvent] = [ev.Loading()]
        else:
            source = next(each for each in recall.sources if each.first <= effect.step < each.end)
            found = self._all.total(source.view, effect.step, self._reaches)
            done, before = ev.StepObtained(SourceKind.MEMORY, view.number, effect.step), []
        if found is None:
            return [*before, ev.ObtainFailed(SourceKind.MEMORY, view.number, "pieces are missing")]
        return [*before, done]

    def _reaches(self, node: AgentId) -> bool:
        return node not in self._lost

    # ------------------------------------------------------------ looking

    def held(self) -> Iterator[tuple[str, str]]:
        """Yield each worker's pieces in the memory of each node."""
        for node, memory in self._all.of.items():
            shards: dict[tuple[str, str], list[int]] = {}
            for kept in memory.contents() if node not in self._lost else ():
                words = [f" in view {kept.view}"]
                words += [f"states {several(kept.states)}"] if kept.states else []
                steps = range(kept.first, kept.end)
                words += [f"gradients {several(steps)}"] if steps else []
                words.append(f"{kept.committed} committed")
                shards.setdefault((f"worker {kept.worker}", ", ".join(words)), []).extend(
                    kept.shards
                )
            for (worker, what), found in shards.items():
                of = f", shards {several(found)}," if found else ""
                yield node, f"holds of {worker}{of}{what}"


def _nodes(view: View, worker: WorkerId) -> tuple[AgentId, ...]:
    member = view.member(worker)
    return member.nodes if member is not None else ()

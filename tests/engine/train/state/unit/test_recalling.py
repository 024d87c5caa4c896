"""Workers recall a protected state from the memory of nodes, all of them in this process."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from holdfast.engine.core.errors import Damaged
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind, SourceKind
from holdfast.engine.core.redundancy import GradientSource, Recall, read_redundancy
from holdfast.engine.core.types import AgentId, Incarnation, Peer, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.state.memory.arena import PieceArena
from holdfast.engine.state.memory.node_memory import NodeMemory, PieceReader, PieceServer
from holdfast.engine.state.memory.pieces import PiecePost
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.state import replicator
from holdfast.engine.train.state.replicator import PieceTarget, Recalling, Replicator
from holdfast.engine.train.step.mover import ViewConnections
from holdfast.engine.train.step.step_data import StepData
from step_data_kit import content_of, fill_step, make_step

IDENTITY = PeerIdentity(key=b"k" * 32)
BUDGET = 1 << 20
NODES = [AgentId(f"n{number}") for number in range(4)]
BASE, STEPS = 4, (4, 5, 6)


@dataclass(frozen=True)
class Layout:
    """Places workers on four nodes, and chooses the code of their state."""

    redundancy: str
    spread: int = 1
    procs: int = 1

    @property
    def members(self) -> tuple[Member, ...]:
        places = [NODES[at : at + self.spread] for at in range(0, len(NODES), self.spread)]
        return tuple(
            Member(
                worker=WorkerId(number),
                incarnation=Incarnation(1),
                agent=nodes[0],
                shards=self.procs,
                further=tuple(nodes[1:]),
            )
            for number, nodes in enumerate(places)
        )

    def view(self, number: int, recall: Recall | None = None) -> View:
        return View(
            number=ViewNumber(number),
            members=self.members,
            owners=(WorkerId(0),) * 4,
            resume_step=0,
            leader=WorkerId(0),
            ring=tuple(NODES),
            recall=recall,
        )


def within(view: View) -> ViewConnections:
    """Return a process's part in a view; no other member is asked."""
    nothing: Any = None
    return ViewConnections(view, nothing, nothing)


class Process:
    """Is a process of a worker, with its model, its step and the memory of its node."""

    def __init__(self, layout: Layout, worker: int, shard: int, memory: NodeMemory) -> None:
        self.shard = shard
        torch.manual_seed(shard)
        self.net, self.step = nn.Linear(30, 10 + shard), make_step()
        self.told: list[Any] = []
        arena = PieceArena(memory.open(worker)[1], worker, BUDGET)
        self.post = PiecePost(arena, IDENTITY)
        target = PieceTarget(
            arena=arena,
            worker=WorkerId(worker),
            shard=shard,
            procs=layout.procs,
            spread=layout.spread,
            post=self.post if layout.spread > 1 else None,
        )
        redundancy = read_redundancy(layout.redundancy)
        self.replicator = Replicator(
            target, redundancy, {"net": self.net}, self.step, self.told.append, self.told.append
        )

    def work(self, view: View) -> None:
        """Protect the state, and the steps that follow."""
        self.replicator.copy(ef.CopyState(SinkKind.MEMORY, BASE, view))
        self.replicator.wait_before_update()
        assert self.told == [ev.StateProtected(BASE, "")]
        for index in STEPS:
            fill_step(self.step, 10 * self.shard + index)
            order = ef.KeepStep(SinkKind.MEMORY, view.number, index)
            assert self.replicator.keep(order, within(view)) == (ev.StepKept(view.number, index),)


class Nodes:
    """Four nodes, whose memory workers have filled in view 1."""

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.memories = [
            NodeMemory(procs=layout.procs, spread=layout.spread) for _ in range(len(NODES))
        ]
        self.addresses = [
            PieceServer(memory, IDENTITY).listen("127.0.0.1") for memory in self.memories
        ]
        for member in layout.members:
            processes = [
                Process(
                    layout, member.worker, shard, self.memories[NODES.index(member.holder(shard))]
                )
                for shard in range(layout.procs)
            ]
            places = {each.shard: each.post.listen("127.0.0.1") for each in processes}
            for each in processes:
                each.post.meet(places)
                each.work(layout.view(1))

    def recall(self, lost: tuple[int, ...] = (), steps: int = len(STEPS)) -> View:
        """Return a view that recalls the state from the nodes that are not lost."""
        sources = (GradientSource(1, BASE, BASE + steps),) if steps else ()
        left = tuple(each for at, each in enumerate(self.addresses) if at not in lost)
        return self.layout.view(2, Recall(base=BASE, view=1, sources=sources, nodes=left))


class Joiner:
    """Is a process that begins with the pieces of its shard on the nodes."""

    def __init__(self, layout: Layout, shard: int = 0) -> None:
        self.net, self.data = nn.Linear(30, 10 + shard), make_step()
        self.news: list[Any] = []
        self.recalling = Recalling(
            Peer(WorkerId(0), shard),
            self.data,
            LoadedState({"net": self.net}),
            IDENTITY,
            read_redundancy(layout.redundancy),
            self._count,
            self.news.append,
        )
        self.loads = 0

    def load(self, view: View) -> ev.WorkerEvent:
        order = ef.ObtainState(SourceKind.MEMORY, view.number, BASE)
        (told,) = self.recalling.load_state(order, within(view))
        return told

    def take(self, view: View, index: int) -> ev.WorkerEvent:
        order = ef.ObtainStep(SourceKind.MEMORY, view.number, index)
        (told,) = self.recalling.take_step(order, within(view))
        return told

    def _count(self) -> None:
        self.loads += 1


class Counted(PieceReader):
    """Counts how many of its kind are connected to nodes."""

    connected = 0

    def __init__(self, *args: Any) -> None:
        super().__init__(*args)
        Counted.connected += 1

    def close(self) -> None:
        super().close()
        Counted.connected -= 1


@pytest.fixture(autouse=True)
def connected(monkeypatch: pytest.MonkeyPatch) -> Iterator[type[Counted]]:
    monkeypatch.setattr(replicator, "PieceReader", Counted)
    monkeypatch.setattr(replicator, "PAUSE_S", 0.0)
    Counted.connected = 0
    yield Counted
    assert Counted.connected == 0, "a process is still connected to nodes"


def is_right(joiner: Joiner, shard: int, index: int) -> bool:
    """Return whether a process has the right gradient of a step."""
    expected: StepData = make_step()
    fill_step(expected, 10 * shard + index)
    return bool(content_of(joiner.data) == content_of(expected))


LAYOUTS = [
    (Layout("replicate:1"), ()),
    (Layout("replicate:2"), (1,)),
    (Layout("rs:2+1"), (3,)),
    (Layout("rs:2+2"), (0, 2)),
    (Layout("replicate:2", spread=2, procs=2), (1,)),
    (Layout("rs:2+1", spread=2, procs=4), (2,)),
]


@pytest.mark.parametrize(("layout", "lost"), LAYOUTS, ids=str)
def test_a_process_recalls_the_state_and_the_steps_since(
    layout: Layout, lost: tuple[int, ...]
) -> None:
    view = Nodes(layout).recall(lost)
    for shard in range(layout.procs):
        torch.manual_seed(shard)
        right = nn.Linear(30, 10 + shard)
        joiner = Joiner(layout, shard)
        assert joiner.load(view) == ev.StateObtained(SourceKind.MEMORY, view.number)
        assert (joiner.loads, joiner.news) == (1, [])
        assert torch.equal(joiner.net.weight, right.weight)
        for index in STEPS:
            told = joiner.take(view, index)
            assert told == ev.StepObtained(SourceKind.MEMORY, view.number, index)
            assert is_right(joiner, shard, index)
        assert ("the gradients of 3 more" in str(joiner.news)) == (shard == 0), "said once"


def test_a_state_without_a_step_since_is_all_of_it() -> None:
    layout = Layout("rs:2+1")
    joiner = Joiner(layout)
    view = Nodes(layout).recall(steps=0)
    assert joiner.load(view) == ev.StateObtained(SourceKind.MEMORY, view.number)
    assert "the gradients of 0 more" in str(joiner.news)


def test_a_lost_state_is_told_and_asked_for_again_in_the_next_view() -> None:
    layout = Layout("rs:2+1")
    nodes, joiner = Nodes(layout), Joiner(layout)
    told = joiner.load(nodes.recall((0, 1)))
    assert isinstance(told, ev.ObtainFailed)
    assert told.reason.startswith("the state after 4 steps cannot be recalled: of part ")
    assert joiner.loads == 0
    assert Counted.connected == 0
    assert isinstance(joiner.load(nodes.recall()), ev.StateObtained)
    told = joiner.take(nodes.recall(steps=4), 7)
    assert isinstance(told, ev.ObtainFailed)
    assert told.reason == (
        "the gradient of step 7 cannot be recalled: no node that is reached holds the gradient of "
        "step 7"
    )
    assert Counted.connected == 0


def test_a_new_view_asks_its_own_nodes() -> None:
    layout = Layout("replicate:2")
    nodes, joiner = Nodes(layout), Joiner(layout)
    assert isinstance(joiner.load(nodes.recall()), ev.StateObtained)
    again = layout.view(3, nodes.recall((1,)).recall)
    assert isinstance(joiner.load(again), ev.StateObtained)
    for index in STEPS:
        assert isinstance(joiner.take(again, index), ev.StepObtained)


def test_a_node_that_fails_once_is_not_asked_again() -> None:
    layout = Layout("replicate:1")
    nodes = Nodes(layout)
    reader = Counted(nodes.addresses, IDENTITY, read_redundancy(layout.redundancy))
    for node in reader._nodes:
        node.close()  # as when its machine has gone
    for told in ("of part 0 of the state of step 4, 0 of the 1 pieces", "no node that is reached"):
        with pytest.raises(Damaged, match=told):
            reader.read("state", 1, BASE)
    with suppress(OSError):
        reader.close()

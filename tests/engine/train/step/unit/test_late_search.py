"""A waiting member finds the late one, though it only knows the next member on the way of rows."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Any, ClassVar

import pytest
import torch

from holdfast.engine.core.ground.events import StillAwaited
from holdfast.engine.core.types import Peer, WorkerId
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.step import late_members
from holdfast.engine.train.step.late_members import NONE_AWAITED, LateSearch
from roster_kit import view_of

STEP = 7


class FakeTimer:
    """Is a timer that the test ends."""

    started: ClassVar[list[FakeTimer]] = []

    def __init__(self, after_s: float, call: Callable[..., None], args: tuple[int, int]) -> None:
        self.daemon = False
        self.end = lambda: call(*args)

    def start(self) -> None:
        self.started.append(self)


class Searchers:
    """Members of a view whose rows spread as far as they can without those of a late one."""

    def __init__(self, size: int, late: int, *, answers: bool) -> None:
        workers = [WorkerId(rank) for rank in range(size)]
        view = view_of(*workers, vranks=size)
        self.messages = 0
        self.found: dict[int, tuple[int, ...]] = {}
        self._queue: deque[tuple[int, int, bytes]] = deque()
        self._hear: dict[int, Callable[[int, bytes], None]] = {}
        layouts = [Layout.of(view, Peer(worker, 0)) for worker in workers]
        self.neighbours = [
            {rank for turn in layout.turns for rank in (turn.give_to, turn.get_from)}
            for layout in layouts
        ]
        self.awaited = spread_rows(layouts, late)
        self.searches = []
        for rank, layout in enumerate(layouts):
            end: Any = End(self, rank)
            search = LateSearch(end, view, layout, end, lambda step, r=rank: self.awaited[r])
            self.searches.append(search)
            if rank != late or answers:
                search.listen()

    def carry(self) -> None:
        while self._queue:
            to, sender, data = self._queue.popleft()
            if to in self._hear:
                self._hear[to](sender, data)


class End:
    """Is one member's driver and transport."""

    def __init__(self, searchers: Searchers, rank: int) -> None:
        self._searchers = searchers
        self._rank = rank

    def listen(self, tag: int, size: int, hear: Callable[[int, bytes], None]) -> None:
        self._searchers._hear[self._rank] = hear

    def exchange(self, sends: list[tuple[int, torch.Tensor]], receives: list, tag: int) -> None:
        for peer, data in sends:
            assert peer in self._searchers.neighbours[self._rank]
            self._searchers.messages += 1
            self._searchers._queue.append((peer, self._rank, data.numpy().tobytes()))

    def post(self, event: StillAwaited) -> None:
        assert event.step == STEP
        self._searchers.found[self._rank] = event.ranks


def spread_rows(layouts: list[Layout], late: int) -> list[int]:
    """Return for each rank the rank that it waits for in the end."""
    done = [0 if layout.rank != late else -1 for layout in layouts]  # turns
    moved = True
    while moved:
        moved = False
        for rank, layout in enumerate(layouts):
            if rank != late and done[rank] < len(layout.turns):
                source = layout.turns[done[rank]].get_from
                if done[source] >= done[rank]:
                    done[rank] += 1
                    moved = True
    return [
        late
        if rank == late
        else layout.turns[done[rank]].get_from
        if done[rank] < len(layout.turns)
        else NONE_AWAITED
        for rank, layout in enumerate(layouts)
    ]


@pytest.mark.parametrize("answers", [True, False])
@pytest.mark.parametrize("size", [2, 3, 8, 13])
def test_the_late_member_is_found(
    size: int, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(late_members.threading, "Timer", FakeTimer)
    for late in range(size):
        for rank in range(size):
            FakeTimer.started.clear()
            searchers = Searchers(size, late, answers=answers)
            searchers.searches[rank].look(STEP)
            searchers.carry()
            if not answers:
                assert searchers.found == {}
            for timer in FakeTimer.started:
                timer.end()
                searchers.carry()
            waits = searchers.awaited[rank] not in (NONE_AWAITED, rank)
            assert searchers.found == ({rank: (late,)} if waits else {})
            assert searchers.messages <= 3 * size.bit_length()


def test_an_answer_of_another_step_or_of_nonsense_is_ignored(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(late_members.threading, "Timer", FakeTimer)
    searchers = Searchers(4, 2, answers=True)
    search = searchers.searches[1]
    search.look(STEP)
    for sender, what, step, value in (
        (2, late_members._ANSWER, STEP + 1, 2),
        (3, late_members._ANSWER, STEP, 3),
        (3, late_members._FOUND, STEP, 2),
        (2, late_members._FOUND, STEP, 99),
        (2, late_members._ANSWER, STEP, NONE_AWAITED),
        (2, late_members._FOUND, STEP, 2),
    ):
        search._receive(sender, late_members._MESSAGE.pack(what, step, value))
    assert searchers.found == {}


def test_a_member_asks_once_for_all_that_ask_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(late_members.threading, "Timer", FakeTimer)
    searchers = Searchers(8, 0, answers=True)
    for search in searchers.searches:
        search.look(STEP)
    searchers.carry()
    waiting = [rank for rank, awaited in enumerate(searchers.awaited) if awaited >= 0 and rank]
    assert searchers.found == dict.fromkeys(waiting, (0,))
    assert searchers.messages <= 3 * len(waiting)

"""How a worker begins from a checkpoint, and how it reports a damaged one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from holdfast.engine.core.errors import Damaged, Unreachable, UserError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SourceKind
from holdfast.engine.core.invalidations import Invalidation
from holdfast.engine.core.types import Peer, ViewNumber, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.state.store.storage import Missing
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.state import restorer
from holdfast.engine.train.state.restorer import STORE_PAUSE_S, NoStore, Restorer
from holdfast.engine.train.step.mover import ViewConnections
from machine_kit import a_view

VIEW = a_view(4, range(2), step=8, joiners=range(2))
RESTORE = ef.ObtainState(SourceKind.STORE, ViewNumber(4), 8)


class Reader(Restorer):
    """Reads checkpoints, or fails with an error of the test."""

    def __init__(self, error: Exception | None = None) -> None:
        unused: Any = None
        self.told: list[str] = []
        super().__init__(unused, unused, lambda: self.told.append("loading"))
        self.error = error
        self.asked: list[Any] = []

    def restore(self, step: int, transport: Any, layout: Layout) -> None:
        self._loading()
        self.asked.append(step)
        if self.error is not None:
            raise self.error

    def find_replacement(self, step: int, invalidations: Any) -> int:
        self.asked.append((step, invalidations))
        return 5


@pytest.fixture
def pauses(monkeypatch: pytest.MonkeyPatch) -> list[float]:
    found: list[float] = []
    monkeypatch.setattr(restorer.time, "sleep", found.append)
    return found


def restored(reader: Reader, view: View = VIEW) -> ev.WorkerEvent:
    nothing: Any = None
    at = ViewConnections(view, Layout.of(view, Peer(WorkerId(0))), nothing)
    (event,) = reader.load_state(RESTORE, at)
    return event


def test_a_worker_that_begins_to_load_says_so_before_its_state_changes() -> None:
    reader = Reader()
    event = restored(reader)
    assert event == ev.StateObtained(SourceKind.STORE, ViewNumber(4))
    assert reader.told == ["loading"]
    assert reader.asked == [8]


@pytest.mark.parametrize("error", [Damaged("it is rotten"), Missing("8")])
def test_a_checkpoint_that_cannot_be_used_is_told_with_the_one_before(
    error: Exception, pauses: list[float]
) -> None:
    doubts = (Invalidation(after=6, view=ViewNumber(2)),)
    reader = Reader(error)
    event = restored(reader, dataclasses.replace(VIEW, invalidations=doubts))
    text = f"the checkpoint of step 8 is not used: {error}"
    assert event == ev.ObtainFailed(SourceKind.STORE, ViewNumber(4), text, 8, 5)
    assert reader.asked == [8, (8, doubts)]
    assert pauses == []


def test_a_store_that_does_not_answer_is_given_a_while(pauses: list[float]) -> None:
    event = restored(Reader(Unreachable("no answer")))
    text = "the checkpoint of step 8 cannot be read just now: no answer"
    assert event == ev.ObtainFailed(SourceKind.STORE, ViewNumber(4), text)
    assert pauses == [STORE_PAUSE_S]


def test_without_a_store_nobody_begins_from_a_checkpoint() -> None:
    with pytest.raises(UserError, match="at step 8, and has no --store"):
        NoStore().load_state(RESTORE, None)

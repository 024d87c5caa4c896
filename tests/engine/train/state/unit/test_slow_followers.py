"""A follower that takes in steps too slowly is reported, and dropped without the rest."""

from __future__ import annotations

import queue
import socket
import threading
from typing import Any

import pytest
from torch import nn

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind, SourceKind
from holdfast.engine.core.types import Incarnation, WorkerId
from holdfast.engine.core.views import Follower, FollowOrder
from holdfast.engine.net.tls import PeerIdentity
from holdfast.engine.train.state import feeder
from holdfast.engine.train.state.fed_receiver import FedReceiver
from holdfast.engine.train.state.feeder import Feeder
from roster_kit import view_of
from step_data_kit import fill_step, in_view, make_step

WAIT_S = 30.0
STEPS_MAX = 1000
FEATURES = 2000  # some 240 KB a step, so that two fit below the budget of 1 MiB
IDENTITY = PeerIdentity(key=b"k" * 32)
SLOW, FAST = WorkerId(1), WorkerId(2)


class Receiver:
    """A follower whose events go into a queue; it reads no event before `gate` is set."""

    def __init__(self, order: int) -> None:
        self.said: queue.Queue[ev.WorkerEvent] = queue.Queue()
        self.gate = threading.Event()
        self.reading = threading.Event()
        unused: Any = None
        self.receiver = FedReceiver(make_step(FEATURES), unused, self.said.put, unused, IDENTITY)
        read = self.receiver._read

        def read_later(channel: socket.socket, feed: Any, rank: int) -> None:
            self.reading.set()
            assert self.gate.wait(WAIT_S)
            read(channel, feed, rank)

        self.receiver._read = read_later  # type: ignore[method-assign]
        self.address = self.receiver.listen("127.0.0.1")
        everybody = FollowOrder(number=order, view=view_of(0).number, followers=())
        assert self.receiver.follow(everybody) == ()

    def until(self, kind: type[Any]) -> list[ev.WorkerEvent]:
        """Return the next events, up to the first one of a kind."""
        found = [self.said.get(timeout=WAIT_S)]
        while not isinstance(found[-1], kind):
            found.append(self.said.get(timeout=WAIT_S))
        return found


def test_a_follower_that_is_too_slow_is_told_of_and_can_be_dropped(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(feeder, "free_bytes", lambda: 1 << 20)
    receivers = {SLOW: Receiver(4), FAST: Receiver(4)}
    receivers[FAST].gate.set()
    step, told = make_step(FEATURES), queue.Queue[ev.WorkerEvent]()
    feeds = Feeder(
        WorkerId(0), {"model": nn.Linear(2, 2)}, step, told.put, IDENTITY, 0.0, compares=False
    )
    followers = tuple(
        Follower(worker=worker, incarnation=Incarnation(1), address=receiver.address)
        for worker, receiver in receivers.items()
    )
    order = FollowOrder(number=4, view=view_of(0).number, followers=followers)
    assert not feeds.copy(ef.CopyState(SinkKind.FOLLOWERS, 7, view_of(0), order)).problem
    assert receivers[SLOW].reading.wait(WAIT_S)
    for index in range(7, 7 + STEPS_MAX):
        fill_step(step, index)
        feeds.keep(ef.KeepStep(SinkKind.FOLLOWERS, view_of(0).number, index), in_view(0, 1))
        steps = receivers[FAST].until(ev.StepFed)
        assert steps[-1] == ev.StepFed(4, index), "the other follower has each step"
        receivers[FAST].receiver._feeds[4].steps.pop(index)
        if not told.empty():
            break
    behind = told.get_nowait()
    assert isinstance(behind, ev.FollowerBehind)
    assert (behind.order, behind.worker) == (4, SLOW)
    assert behind.waiting_bytes > 1 << 20
    feeds.forget(ef.Forget(SinkKind.FOLLOWERS, view_of(0).number, follower=SLOW))
    receivers[SLOW].gate.set()
    failed = receivers[SLOW].until(ev.ObtainFailed)[-1]
    assert isinstance(failed, ev.ObtainFailed)
    assert (failed.source, failed.order) == (SourceKind.FEED, 4)
    feeds.keep(ef.KeepStep(SinkKind.FOLLOWERS, view_of(0).number, index + 1), in_view(0, 1))
    assert receivers[FAST].until(ev.StepFed)[-1] == ev.StepFed(4, index + 1)
    feeds.end(finish=True)

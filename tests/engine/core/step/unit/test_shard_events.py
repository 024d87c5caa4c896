"""The acts of a worker's several processes become one event, and no other."""

from __future__ import annotations

import dataclasses
import random
import sys
from collections.abc import Sequence
from typing import Any, get_args

import pytest

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.effects import SumStage
from holdfast.engine.core.ground.events import SinkKind, SourceKind
from holdfast.engine.core.step.audit import FICKLE, SUBSTITUTED
from holdfast.engine.core.step.shards import ShardEvents, is_shared
from holdfast.engine.core.step.sum_trial import SumTrial
from holdfast.engine.core.types import Tick, ViewNumber, WorkerId
from holdfast.lab.sim.exchanges import answer

VIEW = ViewNumber(3)
TASK = ev.TaskDone(4, 1, ev.Purpose.HOSTED, 8, digest=11)


def hear_all(count: int, events: Sequence[ev.WorkerEvent]) -> list[ev.WorkerEvent]:
    """Return the events once each process has done its part, one after the other."""
    shards, told = ShardEvents(count), []
    for shard, event in enumerate(events):
        assert told == []
        told += shards.hear(shard, event)
    return told


@pytest.mark.parametrize(
    "event",
    [
        ev.LoopEntered(),
        ev.AtBoundary(),
        ev.StepOpened(4),
        TASK,
        ev.StateCopied(SinkKind.STORE, 4),
        ev.StateCopied(SinkKind.FOLLOWERS, 4, order=2),
        ev.StateProtected(4),
        ev.LoopFinishing(),
        ev.LoopEnded(),
        ev.SaveEnded(4, VIEW, durable=True),
        ev.Connected(VIEW),
        ev.StateObtained(SourceKind.STORE, VIEW),
        ev.StepKept(VIEW, 4),
        ev.StepObtained(SourceKind.MEMBERS, VIEW, 4),
        ev.StatesCompared(VIEW),
        ev.Gathered(VIEW, ev.Topic.VOTE, ((1, 2), (3, 4))),
        ev.Summed(view=VIEW, step=4),
        ev.MemberDone(VIEW, 1, 4, 8),
        ev.CountSettled(VIEW, 4, (0, 1)),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_of_all_processes_is_passed_on_once_all_have_sent_it(
    event: ev.WorkerEvent,
) -> None:
    (told,) = hear_all(3, [event] * 3)
    if isinstance(told, ev.TaskDone):  # the digest covers all of them
        told = dataclasses.replace(told, digest=TASK.digest)
    assert told == event


@pytest.mark.parametrize(
    "event",
    [
        ev.GroupBroken(VIEW, "cut"),
        ev.LinkLost(VIEW, (WorkerId(2),)),
        ev.Loading(),
        ev.ObtainFailed(SourceKind.STORE, VIEW, "rotten", 4, 2),
        ev.ObtainFailed(SourceKind.STORE, VIEW, "silent"),
        ev.ObtainFailed(SourceKind.MEMORY, VIEW, "too few"),
        Tick(),
    ],
    ids=lambda event: type(event).__name__,
)
def test_an_event_that_one_process_notices_is_passed_on_at_once(event: ev.WorkerEvent) -> None:
    assert ShardEvents(3).hear(2, event) == [event]


def test_words_of_all_to_people_are_said_once() -> None:
    shards, note = ShardEvents(2), ev.EventNoted("script", "mind this")
    assert shards.hear(1, note) == [note]
    assert shards.hear(0, note) == []
    assert shards.hear(0, note) == [note], "it has happened again"
    assert shards.hear(0, note) == [note]
    assert shards.hear(1, note) == shards.hear(1, note) == []
    assert shards.hear(0, ev.EventNoted("script", "and that")) != []


def test_words_that_all_have_said_take_no_memory() -> None:
    shards, note = ShardEvents(3), ev.EventNoted("script", "mind this")
    before = sys.getrefcount(note)
    for shard in range(3):
        shards.hear(shard, note)
    assert sys.getrefcount(note) == before


def test_a_worker_contradicts_itself_if_one_of_its_processes_does() -> None:
    digests = (11, FICKLE, 12)
    (told,) = hear_all(3, [dataclasses.replace(TASK, digest=digest) for digest in digests])
    assert told == dataclasses.replace(TASK, digest=FICKLE)
    digests = (SUBSTITUTED, FICKLE, 12)  # they read other records, so their digests are no proof
    (told,) = hear_all(3, [dataclasses.replace(TASK, digest=digest) for digest in digests])
    assert told == dataclasses.replace(TASK, digest=SUBSTITUTED)
    assert hear_all(2, [ev.LoopEntered(True), ev.LoopEntered(False)]) == [ev.LoopEntered(False)]


def test_each_shard_counts_in_the_comparison() -> None:
    """If any shard has another fingerprint, the worker's fingerprint is another one."""
    plain = [11, 12, 13]
    others = [[*plain[:i], 99, *plain[i + 1 :]] for i in range(3)] + [[12, 11, 13]]

    def task(prints: list[int]) -> Any:
        return [dataclasses.replace(TASK, digest=each) for each in prints]

    def states(prints: list[int]) -> Any:
        said = [((WorkerId(0), 5), (WorkerId(2), each)) for each in prints]
        return [ev.StatesCompared(VIEW, each) for each in said]

    def parts(prints: list[int]) -> Any:
        return [ev.Summed(view=VIEW, step=4, parts=(0, each)) for each in prints]

    def wholes(prints: list[int]) -> Any:
        return [ev.Summed(view=VIEW, step=4, wholes=(each, 7)) for each in prints]

    def copies(prints: list[int]) -> Any:
        return [ev.Summed(view=VIEW, step=4, copies=(each, 7)) for each in prints]

    def bits(prints: list[int]) -> Any:
        return [ev.Summed(view=VIEW, step=4, bits=each) for each in prints]

    def confessed(prints: list[int]) -> Any:
        return [ev.Gathered(VIEW, ev.Topic.REPORT_FAULT, ((1, 2, each),)) for each in prints]

    for kind in (task, states, parts, wholes, copies, bits, confessed):
        (right,) = hear_all(3, kind(plain))
        assert hear_all(3, kind(plain)) == [right]
        for prints in others:
            (told,) = hear_all(3, kind(prints))
            assert told != right, (kind, prints)
    (told,) = hear_all(3, states(plain))
    (other,) = hear_all(3, states(others[0]))
    assert dict(told.prints)[0] == dict(other.prints)[0], "only worker 2 differs"
    (nothing,) = hear_all(2, [ev.Summed(view=VIEW, step=4, parts=(0, 0))] * 2)
    assert nothing.parts == (0, 0), "what was not taken is not compared"


def test_a_gradient_without_a_digest_has_none() -> None:
    (told,) = hear_all(2, [TASK, dataclasses.replace(TASK, digest=None)])
    assert told == dataclasses.replace(TASK, digest=None)
    sketches = [
        dataclasses.replace(TASK, digest=(1.0, 2.0)),
        dataclasses.replace(TASK, digest=(3.0,)),
    ]
    (told,) = hear_all(2, sketches)
    assert told == dataclasses.replace(TASK, digest=(1.0, 2.0, 3.0))


def test_the_worst_that_any_of_them_says_counts() -> None:
    sums = [
        ev.Summed(view=VIEW, step=4, buckets=n, doubt=d, unlike=u)
        for n, d, u in [(2, 0, (3,)), (1, 9, (1,))]
    ]
    (told,) = hear_all(2, sums)
    assert (told.doubt, told.unlike, told.buckets) == (9, (1, 3), 1)
    (kept,) = hear_all(2, [ev.StepKept(VIEW, 4), ev.StepKept(VIEW, 4, full=True)])
    assert kept.full
    (copied,) = hear_all(
        2, [ev.StateCopied(SinkKind.STORE, 4), ev.StateCopied(SinkKind.STORE, 4, problem="no room")]
    )
    assert copied.problem == "no room"
    first = ev.SaveEnded(4, VIEW, durable=True, first=True)
    failed = ev.SaveEnded(4, VIEW, problem="the disk is full")
    (saved,) = hear_all(2, [first, failed])
    assert (saved.durable, saved.problem, saved.first) == (False, "the disk is full", True)


def test_tasks_may_end_in_any_order() -> None:
    """Each process goes its own pace; a task ends for the machine when the last has done it."""
    dice = random.Random(5)
    for _ in range(50):
        shards, vranks, told = ShardEvents(2), range(4), []
        rest = {shard: dice.sample(vranks, 4) for shard in range(2)}
        done: dict[int, set[int]] = {vrank: set() for vrank in vranks}
        while any(rest.values()):
            shard = dice.choice([s for s, left in rest.items() if left])
            vrank = rest[shard].pop()
            done[vrank].add(shard)
            heard = shards.hear(shard, dataclasses.replace(TASK, vrank=vrank))
            assert bool(heard) == (len(done[vrank]) == 2)
            told += heard
        assert sorted(each.vrank for each in told) == list(vranks)


def test_members_that_are_done_are_told_apart() -> None:
    shards = ShardEvents(2)
    one, two = ev.MemberDone(VIEW, 1, 4, 8), ev.MemberDone(VIEW, 2, 4, 8)
    assert shards.hear(0, one) == shards.hear(1, two) == []
    assert shards.hear(1, one) == [one]
    assert shards.hear(0, two) == [two]


def test_a_view_that_is_over_is_forgotten() -> None:
    shards = ShardEvents(2)
    assert shards.hear(0, ev.Connected(VIEW)) == []
    assert shards.hear(0, ev.SaveEnded(4, VIEW)) == []
    assert shards.hear(0, TASK) == []
    shards.begin(VIEW + 1)
    assert shards.hear(1, ev.Connected(VIEW)) == []  # no process waits for it any more
    assert shards.hear(1, ev.SaveEnded(4, VIEW)) == [ev.SaveEnded(4, VIEW)]
    assert shards.hear(1, TASK) != []
    assert shards.hear(1, ev.Connected(VIEW + 1)) == []
    assert shards.hear(0, ev.Connected(VIEW + 1)) == [ev.Connected(VIEW + 1)]


def test_effects_for_one_process_alone_are_those_of_the_agent_and_the_whole_worker() -> None:
    """One process alone gets only effects that concern the agent, or the worker as a whole."""
    kinds = get_args(ef.WorkerEffect)
    alone = {kind.__name__ for kind in kinds if not is_shared(object.__new__(kind))}
    assert alone == {"Tell", "NoteDoubt", "Withdraw", "LookWhoIsLate", "GiveUp", "Exit"}


def test_a_wrong_sum_of_one_shard_is_put_right() -> None:
    """Three members of two shards sum a bucket again; member 1 is wrong in shard 1 at first."""
    right = {0: (10, 11, 12), 1: (20, 21, 22)}
    hosts, size = (0, 1, 2), 3
    trial = SumTrial(0, hosts, size)
    while trial.question is not None:
        shards = ShardEvents(2)
        for shard in range(2):
            wrongly = (1,) if shard == 1 else ()
            rows = [
                right[shard]
                if trial.question.stage is SumStage.FLAT
                else answer(trial.question, rank, hosts, size, wrongly, shard)
                for rank in range(size)
            ]
            told = shards.hear(shard, ev.SumChecked(VIEW, 0, tuple(rows)))
        (event,) = told
        trial.hear(event.rows)
    assert (trial.right, trial.wrong) == (right[0] + right[1], (1,))

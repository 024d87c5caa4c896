"""Members feed workers that follow, and followers become up to date: decisions of both sides."""

from __future__ import annotations

import dataclasses

import pytest

from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground import events as ev
from holdfast.engine.core.ground.events import SinkKind, SourceKind
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.replica.feeding import SKIPPED_MAX, Feeding, Following
from holdfast.engine.core.types import Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Follower, FollowOrder
from holdfast.engine.core.worker_status import Phase, ReplicaStage, Stage
from roster_kit import THREE, view_of

VIEW = view_of(0, 1)
ME = Follower(worker=WorkerId(2), incarnation=Incarnation(5), address="127.0.0.1:9")
OTHER = Follower(worker=WorkerId(3), incarnation=Incarnation(1), address="127.0.0.1:10")
ORDER = FollowOrder(number=4, view=THREE, followers=(ME,))
NEXT = dataclasses.replace(ORDER, number=5)
EFFECTS_MAX = 10
FOLLOWERS, FEED = SinkKind.FOLLOWERS, SourceKind.FEED


def feeding(base: int = 7, order: FollowOrder = ORDER) -> Feeding:
    """Return the part of a member that has copied the state after `base` steps."""
    found = Feeding()
    assert found.take_order(order, VIEW) == []
    found.agree(4, base)
    assert found.next_copy(base, VIEW, within=True) == [ef.CopyState(FOLLOWERS, base, VIEW, order)]
    return found


# ---------------------------------------------------------------- a member


def test_a_member_can_feed_by_the_order_of_its_view_only() -> None:
    found = Feeding()
    assert found.opinion() == 0
    assert found.take_order(ORDER, None) == found.take_order(None, VIEW) == []
    later = dataclasses.replace(ORDER, view=ViewNumber(4))
    assert found.take_order(later, VIEW) == []
    assert found.opinion() == 0
    found.take_order(ORDER, VIEW)
    assert found.opinion() == 4
    found.record_failure(4)
    assert (found.opinion(), found.unfed) == (0, 4)
    found.take_order(NEXT, VIEW)
    assert found.opinion() == 5
    found.record_failure(3)  # an older one
    assert found.unfed == 4


def test_the_state_is_copied_once_at_the_boundary_that_all_agreed_on() -> None:
    found = Feeding()
    found.take_order(ORDER, VIEW)
    assert found.next_copy(7, VIEW, within=True) == []
    found.agree(4, 7)
    assert found.next_copy(6, VIEW, within=True) == []
    assert len(found.next_copy(8, VIEW, within=True)) == 1, "the script had no boundary at 7"
    assert found.next_copy(9, VIEW, within=True) == []
    found.agree(4, 10)  # a second agreement on the same order
    assert found.next_copy(10, VIEW, within=True) == []
    found.take_order(NEXT, VIEW)
    found.agree(5, 12)
    assert len(found.next_copy(12, VIEW, within=True)) == 1


def test_an_agreement_on_an_older_order_copies_nothing() -> None:
    found = Feeding()
    found.take_order(ORDER, VIEW)
    found.agree(4, 7)
    found.take_order(NEXT, VIEW)
    assert found.next_copy(7, VIEW, within=True) == []


def test_nothing_is_copied_between_two_loops_and_the_order_fails_at_last() -> None:
    found = Feeding()
    found.take_order(ORDER, VIEW)
    found.agree(4, 7)
    for _ in range(SKIPPED_MAX):
        assert found.next_copy(7, VIEW, within=False) == []
        assert found.unfed == 0
    assert found.next_copy(7, VIEW, within=False) == []
    assert found.unfed == 4
    assert found.next_copy(8, VIEW, within=True) == []
    found.take_order(NEXT, VIEW)
    found.agree(5, 9)
    assert found.next_copy(9, VIEW, within=False) == []
    assert len(found.next_copy(9, VIEW, within=True)) == 1, "skips are counted for each order"


def test_steps_after_the_copy_are_sent_until_it_fails() -> None:
    assert Feeding().handle_commit(7) == []
    found = feeding(7)
    assert found.handle_commit(6) == []
    assert found.handle_commit(7) == [ef.KeepStep(FOLLOWERS, THREE, 7, compared=False)]
    found.record_copy(4, "")
    found.record_copy(3, "no memory")
    assert len(found.handle_commit(8)) == 1
    found.record_copy(4, "no memory")
    assert found.handle_commit(9) == []
    assert found.unfed == 4


def test_copies_count_as_compared_once_all_members_show_one() -> None:
    found = feeding()
    for copies in ((), (3, 0), (0, 0)):
        found.record_copies(copies)
        assert found.handle_commit(7) == [ef.KeepStep(FOLLOWERS, THREE, 7, compared=False)]
    found.record_copies((3, 3))
    assert found.handle_commit(8) == [ef.KeepStep(FOLLOWERS, THREE, 8, compared=True)]
    found.take_order(NEXT, VIEW)
    found.agree(5, 9)
    found.next_copy(9, VIEW, within=True)
    assert found.handle_commit(9) == [ef.KeepStep(FOLLOWERS, THREE, 9, compared=False)], (
        "new copies"
    )
    early = Feeding()
    early.take_order(ORDER, VIEW)
    early.record_copies((3, 3))  # fingerprints before there are copies
    early.agree(4, 7)
    early.next_copy(7, VIEW, within=True)
    assert early.handle_commit(7) == [ef.KeepStep(FOLLOWERS, THREE, 7, compared=False)]


def test_a_follower_that_is_too_slow_is_dropped_once_and_the_others_are_fed() -> None:
    order = dataclasses.replace(ORDER, followers=(ME, OTHER))
    found = feeding(7, order)
    slow = ev.FollowerBehind(4, ME.worker, 3 << 20)
    note, dropped = found.fall_behind(slow)
    assert isinstance(note, ev.EventNoted)
    assert note.text == (
        "worker 2 is too slow to be fed while others train: 3 MiB of steps wait to be sent to it"
    )
    assert dropped == ef.Forget(FOLLOWERS, THREE, follower=ME.worker)
    assert found.fall_behind(slow) == [], "once"
    assert len(found.handle_commit(7)) == 1, "the other one is fed"
    _, dropped = found.fall_behind(ev.FollowerBehind(4, OTHER.worker, 1))
    assert dropped == ef.Forget(FOLLOWERS, THREE), "nobody is left"
    assert found.handle_commit(8) == []


def test_a_follower_is_dropped_by_the_present_order_only() -> None:
    found = Feeding()
    slow = ev.FollowerBehind(4, ME.worker, 1)
    assert found.fall_behind(slow) == [], "nobody is fed"
    found = feeding(7)
    assert found.fall_behind(ev.FollowerBehind(3, ME.worker, 1)) == []
    assert len(found.fall_behind(slow)) == 2
    found.take_order(NEXT, VIEW)
    found.agree(5, 9)
    found.next_copy(9, VIEW, within=True)
    assert len(found.fall_behind(ev.FollowerBehind(5, ME.worker, 1))) == 2, "another order"


@pytest.mark.parametrize("order", [None, NEXT, dataclasses.replace(ORDER, view=ViewNumber(9))])
def test_followers_are_forgotten_with_their_order(order: FollowOrder | None) -> None:
    found = feeding()
    assert found.take_order(ORDER, VIEW) == [], "the same one again"
    assert found.take_order(order, VIEW) == [ef.Forget(FOLLOWERS, THREE)]
    assert found.handle_commit(9) == []
    assert found.take_order(None, VIEW) == [], "once"


def test_steps_are_still_sent_when_a_view_begins_with_followers() -> None:
    for fed in ((), (ME,)):
        later = dataclasses.replace(view_of(0, 1, 2), number=ViewNumber(4), fed=fed)
        found = feeding()
        assert found.enter(later) == [ef.Forget(FOLLOWERS, THREE, finish=bool(fed))]
        assert found.enter(later) == []
        assert found.opinion() == 0


# ---------------------------------------------------------------- a follower


class Joiner:
    """A worker that is ready to follow, whose script waits at the first boundary."""

    def __init__(self, *, compares: bool = True) -> None:
        self.standing = Standing(ME.worker, ME.incarnation)
        self.become(stage=Stage.READY, phase=Phase.BOUNDARY)
        self.following = Following(self.standing, compares=compares)

    def effects(self) -> list[ef.WorkerEffect]:
        """Return the effects since the last call; reports are looked at here."""
        effects, status = self.standing.take_effects(), self.standing.status
        told = [each.status for each in effects if isinstance(each, ef.Tell)]
        assert self._known == status or told[-1] == status
        self._known = status
        return [each for each in effects if not isinstance(each, ef.Tell)]

    def become(self, **fields: object) -> None:
        """Change fields that other machines decide."""
        self.standing.change(**fields)
        self._known = self.standing.status

    def ordered(self, order: FollowOrder | None) -> list[ef.WorkerEffect]:
        self.following.heed(order)
        return self.effects()

    def follows(
        self, *events: ev.StateFed | ev.StepFed | ev.StateObtained
    ) -> list[ef.WorkerEffect]:
        """Deliver events; return the effects once no more follow from them."""
        for event in events:
            assert not self.following.hear(event)
        for _ in range(EFFECTS_MAX):
            if not self.following.follow():
                return self.effects()
        raise AssertionError("it never comes to rest")

    def load(self) -> None:
        """Follow an order until the state after 7 steps is loaded."""
        self.ordered(ORDER)
        assert not self.following.hear(ev.StateFed(4, 7))
        assert self.following.follow()
        assert self.follows() == [ef.ObtainState(FEED, THREE, 7, 4)]
        assert self.standing.status.state is ReplicaStage.OBTAINING, "while it is loaded"
        assert not self.following.hear(ev.StateObtained(FEED, THREE, order=4))
        status = self.standing.status
        assert (status.state, status.committed) == (ReplicaStage.CURRENT, 7)

    def apply(self, step: int) -> None:
        """Apply a step whose gradient is here."""
        assert self.effects() == [ef.Begin(step)]
        assert self.standing.status.phase is Phase.COMPUTING
        self.following.opened = step
        assert self.following.follow()
        assert self.follows() == [ef.ObtainStep(FEED, THREE, step)]
        assert self.following.hear(ev.StepObtained(FEED, THREE, step))
        assert self.effects() == [ef.Commit(step)]
        assert self.standing.status.committed == step + 1
        assert self.standing.status.phase is Phase.SCRIPT
        self.become(phase=Phase.BOUNDARY)


def test_a_worker_follows_an_order_that_names_it_while_it_holds_nothing() -> None:
    joiner = Joiner()
    other = dataclasses.replace(
        ORDER, followers=(dataclasses.replace(ME, incarnation=Incarnation(6)),)
    )
    assert joiner.ordered(other) == joiner.ordered(None) == []
    assert joiner.ordered(ORDER) == [ef.Follow(ORDER)]
    assert joiner.ordered(ORDER) == []
    assert joiner.ordered(NEXT) == [ef.Follow(None), ef.Follow(NEXT)]
    assert joiner.ordered(None) == [ef.Follow(None)]
    assert joiner.ordered(NEXT) == [], "an order is followed once"
    for fields in ({"stage": Stage.LOST}, {"state": ReplicaStage.CURRENT}, {"view": THREE}):
        joiner = Joiner()
        joiner.become(**fields)
        assert joiner.ordered(ORDER) == []


def test_a_follower_loads_the_state_once_all_of_it_is_here_and_its_script_waits() -> None:
    joiner = Joiner()
    joiner.ordered(ORDER)
    assert joiner.follows(ev.StateFed(3, 7)) == [], "of another order"
    joiner.become(phase=Phase.SCRIPT)
    assert joiner.follows(ev.StateFed(4, 7)) == []
    joiner.become(phase=Phase.BOUNDARY, promised=THREE)
    assert joiner.follows() == [], "the next view counts on the state as it was promised"
    joiner.become(promised=ViewNumber(2))
    assert joiner.follows() == [ef.ObtainState(FEED, THREE, 7, 4)]
    assert joiner.follows() == []


def test_a_follower_applies_steps_in_their_order_and_says_when_it_is_up_to_date() -> None:
    joiner = Joiner()
    joiner.load()
    assert joiner.follows() == []
    assert joiner.standing.status.abreast == 0, "the copies are not compared yet"
    assert joiner.follows(ev.StepFed(4, 8)) == [], "step 7 is missing"
    assert not joiner.following.hear(ev.StepFed(4, 7, compared=True))
    assert joiner.following.follow()
    joiner.apply(7)
    assert joiner.standing.status.abreast == 0, "step 8 is here"
    assert joiner.following.follow()
    joiner.apply(8)
    assert joiner.follows() == []
    assert joiner.standing.status.abreast == 4
    assert not joiner.following.hear(ev.StepObtained(FEED, THREE, 8)), "twice"


def test_a_follower_without_a_comparison_is_up_to_date_once_nothing_is_missing() -> None:
    joiner = Joiner(compares=False)
    joiner.load()
    assert joiner.following.follow()
    assert joiner.effects() == []
    assert joiner.standing.status.abreast == 4
    assert not joiner.following.follow()


def test_the_script_of_a_follower_waits_for_a_step_that_is_still_to_come() -> None:
    joiner = Joiner()
    joiner.load()
    joiner.become(phase=Phase.COMPUTING)
    joiner.following.opened = 7
    assert joiner.follows() == []
    assert joiner.standing.status.phase is Phase.WAITING
    assert joiner.follows(ev.StepFed(4, 7)) == [ef.ObtainStep(FEED, THREE, 7)]


def test_a_state_that_is_fed_no_further_is_of_no_use() -> None:
    joiner = Joiner()
    joiner.load()
    joiner.become(phase=Phase.COMPUTING)
    assert joiner.ordered(None) == [ef.Follow(None)]
    assert joiner.standing.status.state is ReplicaStage.OBTAINING
    assert joiner.follows() == []
    assert joiner.standing.status.phase is Phase.WAITING, "its script waits for its end"
    early = Joiner()
    early.ordered(ORDER)
    early.ordered(None)
    assert early.standing.status.state is ReplicaStage.ABSENT, "nothing was loaded"


def test_a_worker_that_was_fed_in_vain_says_that_the_next_order_cannot_feed_it() -> None:
    """The next order may name it all the same: the coordinator did not know its state."""
    loading = Joiner()
    loading.ordered(ORDER)
    loading.follows(ev.StateFed(4, 7))
    loaded = Joiner()
    loaded.load()
    for joiner in (loading, loaded):
        assert joiner.ordered(NEXT) == [ef.Follow(None)]
        assert joiner.standing.status.unfed == NEXT.number
        seq = joiner.standing.status.seq
        assert joiner.ordered(NEXT) == joiner.ordered(None) == []
        assert joiner.standing.status.seq == seq, "it says so once"


def test_a_member_that_was_fed_forgets_the_feed_and_keeps_its_script_running() -> None:
    joiner = Joiner()
    joiner.load()
    joiner.following.end_as_member()
    assert joiner.effects() == [ef.Follow(None)]
    joiner.become(phase=Phase.COMPUTING)
    assert joiner.follows() == []
    assert joiner.standing.status.phase is Phase.COMPUTING

"""The results of a history of findings: one bad sample never drains; trust is earned again."""

from __future__ import annotations

from dataclasses import replace

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.membership.admission import choose_drains
from holdfast.engine.host.findings import Finding, Grade
from holdfast.engine.host.history import TRACKS_MAX, Health, HealthVerdict, Watch, WatchPolicy

OK, WARN, FAIL, SKIPPED = Grade.OK, Grade.WARN, Grade.FAIL, Grade.SKIPPED


def finding(grade: Grade, check: str = "disk", **rest: str) -> Finding:
    return Finding(check=check, grade=grade, reason=rest.pop("reason", "because"), **rest)


POLICY = WatchPolicy()
EVERY_S = 10.0


class EventLog:
    """Rounds of a watch, one every ten seconds."""

    def __init__(self, policy: WatchPolicy = POLICY) -> None:
        self.watch = Watch(policy)
        self.now = 0.0

    def round(self, *findings: Finding | Grade, after_s: float = EVERY_S) -> Health:
        self.now += after_s
        given = [finding(f) if isinstance(f, Grade) else f for f in findings]
        verdict = self.watch.observe(given, self.now)
        self.watch.check()
        assert verdict == self.watch.verdict == self.watch.snapshot().verdict
        return verdict.health

    def rounds(self, *grades: Grade) -> list[str]:
        return [self.round(grade).value for grade in grades]


def test_one_bad_round_never_drains() -> None:
    story = EventLog()
    everything = [finding(FAIL, f"check-{n}") for n in range(50)]
    assert story.round(*everything) is Health.SUSPECT
    well = [finding(OK, f"check-{n}") for n in range(50)]
    healths = [story.round(*well) for _ in range(POLICY.window)]
    assert healths[:-1] == [Health.SUSPECT] * (POLICY.window - 1)
    assert healths[-1] is Health.HEALTHY


def test_three_bad_rounds_drain_and_the_reason_says_what_and_what_to_do() -> None:
    story = EventLog()
    bad = finding(FAIL, "gpu-ecc", subject="GPU 3", reason="2 uncorrected", advice="reset it")
    healths = [story.round(OK, bad) for _ in range(3)]
    assert healths == [Health.SUSPECT, Health.SUSPECT, Health.DRAIN]
    assert story.watch.verdict.check == "gpu-ecc"
    assert story.watch.verdict.reason == (
        "gpu-ecc GPU 3: 2 uncorrected (3 failed of the last 3 samples); reset it"
    )


def test_quick_calls_are_not_evidence() -> None:
    story = EventLog()
    assert [story.round(FAIL, after_s=0.1) for _ in range(20)] == [Health.SUSPECT] * 20


def test_a_check_that_fails_now_and_then_drains_too() -> None:
    assert EventLog().rounds(FAIL, OK, FAIL, OK, FAIL)[-1] == "drain"
    assert "drain" not in EventLog().rounds(*[FAIL, OK, OK, OK, OK, OK] * 5)


def test_failures_of_different_checks_do_not_add_up() -> None:
    story = EventLog()
    for number in range(9):
        assert story.round(finding(FAIL, f"check-{number}")) is not Health.DRAIN


def test_warnings_make_suspect_and_never_drain() -> None:
    assert EventLog().rounds(WARN, WARN, WARN)[-1] == "suspect"
    assert EventLog().rounds(WARN, OK, OK, OK, OK, OK, WARN) == ["healthy"] * 7
    assert "drain" not in EventLog().rounds(*[WARN] * 50)


def test_suspicion_ends_only_after_a_clean_window() -> None:
    story = EventLog()
    story.rounds(WARN, WARN, WARN)
    assert story.rounds(OK, OK, OK, OK, OK) == ["suspect"] * 5  # 1 warning in the window is enough
    assert story.rounds(OK) == ["healthy"]


def test_skipped_is_no_evidence_either_way() -> None:
    story = EventLog()
    assert story.rounds(*[SKIPPED] * 9) == ["healthy"] * 9
    story.rounds(FAIL)
    assert story.rounds(*[SKIPPED] * 20) == ["suspect"] * 20
    assert story.rounds(FAIL, *[SKIPPED] * 20, FAIL)[-1] == "drain"


def drained(policy: WatchPolicy = POLICY) -> EventLog:
    story = EventLog(policy)
    assert story.rounds(FAIL, FAIL, FAIL)[-1] == "drain"
    return story


def probation(story: EventLog, grade: Grade = OK, rounds_max: int = 10_000) -> int:
    """Return the number of rounds until the node is taken back."""
    for count in range(1, rounds_max):
        if story.round(grade) is Health.HEALTHY:
            return count
    raise AssertionError("never taken back")


def test_a_drained_node_is_taken_back_after_a_clean_probation() -> None:
    story = drained()
    reason = story.watch.verdict.reason
    assert probation(story) == POLICY.probation_s / EVERY_S + 1
    assert story.watch.verdict == HealthVerdict()
    assert "3 failed" in reason


def test_failures_of_another_check_are_forgotten_with_the_drain() -> None:
    story = EventLog()
    story.round(FAIL, finding(FAIL, "gpu"))
    assert story.rounds(FAIL, FAIL)[-1] == "drain"
    probation(story)
    assert story.rounds(OK) == ["healthy"]


def test_the_reason_stays_the_same_during_a_probation() -> None:
    story = drained()
    reason = story.watch.verdict.reason
    story.rounds(*[OK] * 10)
    assert story.watch.verdict == HealthVerdict(health=Health.DRAIN, reason=reason, check="disk")
    assert story.watch.snapshot().clean_s == 90.0


@pytest.mark.parametrize("grade", [FAIL, WARN])
def test_a_relapse_starts_the_probation_again(grade: Grade) -> None:
    story = drained()
    story.rounds(*[OK] * 50, grade)
    assert story.watch.snapshot().clean_s == 0.0
    assert probation(story) == POLICY.probation_s / EVERY_S + 1


def test_a_failure_elsewhere_starts_it_again_and_must_be_seen_well_too() -> None:
    story = drained()
    story.rounds(*[OK] * 50)
    story.round(OK, finding(FAIL, "gpu"))
    for _ in range(100):
        assert story.round(OK) is Health.DRAIN  # no check reports that the GPU is well
    for _ in range(60):
        story.round(OK, finding(OK, "gpu"))
    assert story.round(OK, finding(OK, "gpu")) is Health.HEALTHY


def test_a_warning_elsewhere_does_not_keep_a_node_out() -> None:
    story = drained()
    for _ in range(60):
        story.round(OK, finding(WARN, "open-files"))
    assert story.round(OK, finding(WARN, "open-files")) is Health.HEALTHY


@pytest.mark.parametrize("silence", [(), (SKIPPED,)])
def test_silence_is_no_proof_of_health(silence: tuple[Grade, ...]) -> None:
    story = drained()
    for _ in range(500):
        assert story.round(*silence) is Health.DRAIN


def test_checks_that_report_at_different_times_can_prove_their_health_together() -> None:
    """One finding a minute of each of two, never in one round, as slow commands give them."""
    story = EventLog()
    disk, slow = finding(OK), finding(OK, "external-dcgm")
    for _ in range(3):
        story.round(finding(FAIL), finding(FAIL, "external-dcgm"))
    assert story.watch.verdict.health is Health.DRAIN
    for minute in range(12):
        story.round(disk, after_s=30.0)
        last = story.round(slow, after_s=30.0)
        assert last is (Health.HEALTHY if minute >= POLICY.probation_s / 60 else Health.DRAIN)
    half = drained()
    for _ in range(2):
        half.round(finding(FAIL, "external-dcgm"))
    for _ in range(500):
        assert half.round(disk) is Health.DRAIN, "one of both is no proof"


def test_a_pause_of_the_observer_is_no_clean_time() -> None:
    story = drained()
    story.round(OK)
    assert story.round(OK, after_s=1e6) is Health.DRAIN
    assert story.watch.snapshot().clean_s == POLICY.gap_s_max


def test_every_further_drain_doubles_the_probation_up_to_a_limit() -> None:
    story = EventLog(replace(POLICY, probation_s=100.0, probation_s_max=350.0))
    times = []
    for _ in range(4):
        story.rounds(FAIL, FAIL, FAIL)
        times.append((probation(story) - 1) * EVERY_S)
    assert times == [100.0, 200.0, 350.0, 350.0]


@pytest.mark.slow
def test_memory_is_bounded_and_clean_tracks_make_room() -> None:
    story = EventLog()
    for number in range(TRACKS_MAX + 50):
        story.round(finding(OK, f"peer-{number}"))
    full = [finding(FAIL, f"gpu-{number}") for number in range(2 * TRACKS_MAX)]
    story.round(*full)
    assert story.round(*full) is Health.SUSPECT


def test_a_policy_by_which_one_sample_drains_is_refused() -> None:
    for change in ({"fails_to_drain": 1}, {"drain_s": 0.0}, {"fails_to_drain": 7}):
        with pytest.raises(InvariantError, match="one sample"):
            replace(POLICY, **change)
    story = EventLog()
    story.round(OK)
    with pytest.raises(InvariantError, match="time went back"):
        story.round(OK, after_s=-1.0)


def test_a_verdict_can_travel() -> None:
    verdict = HealthVerdict(
        health=Health.DRAIN, reason="gpu-ecc GPU 3: 2 uncorrected", check="gpu-ecc"
    )
    data = msgspec.msgpack.encode(verdict)
    assert msgspec.msgpack.decode(data, type=HealthVerdict) == verdict
    assert len(data) < 100


def nodes(*checks: str) -> list[tuple[str, str]]:
    """Return nodes n0, n1, ... each with the check that it fails, or "" for a healthy one."""
    return [(f"n{i}", check) for i, check in enumerate(checks)]


@pytest.mark.parametrize(
    ("checks", "drained", "why"),
    [
        ([""] * 8, [], ""),
        (["", "gpu", *[""] * 6], ["n1"], ""),
        (["gpu", "disk", *[""] * 6], ["n0", "n1"], ""),
        (["gpu", "disk", "arithmetic", *[""] * 5], ["n0", "n1"], "at most 2 of 8"),
        (["disk"] * 3 + [""] * 5, [], "disk fails on 3 of 8 nodes"),
        (["disk", "gpu", "disk", "disk", *[""] * 4], ["n1"], "disk fails on 3"),
        (["disk"] * 8, [], "8 of 8"),
        (["gpu", ""], ["n0"], ""),
        (["gpu", "disk"], ["n0"], "at most 1 of 2"),
        (["gpu", "gpu"], [], "2 of 2"),
        (["gpu"], [], "gpu fails on 1 of 1"),
        ([], [], ""),
    ],
)
def test_a_failure_that_many_nodes_share_drains_none(
    checks: list[str], drained: list[str], why: str
) -> None:
    found, reason = choose_drains(nodes(*checks))
    assert list(found) == drained
    assert why in reason
    assert bool(why) == bool(reason)


GRADES = st.sampled_from([OK, OK, OK, WARN, FAIL, SKIPPED])
ROUNDS = st.lists(
    st.tuples(st.floats(0.0, 100.0), st.lists(st.tuples(st.integers(0, 2), GRADES), max_size=3)),
    max_size=60,
)


@settings(deadline=None)
@given(rounds=ROUNDS)
def test_any_history_keeps_the_promises(
    rounds: list[tuple[float, list[tuple[int, Grade]]]],
) -> None:
    """A drain has three failures of one check behind it, over 15 s at least."""
    watch = Watch(replace(POLICY, probation_s=60.0, probation_samples=2))
    seen: dict[int, list[tuple[float, Grade]]] = {}
    now, before = 0.0, Health.HEALTHY
    for gap_s, grades in rounds:
        now += gap_s
        unique = dict(grades)
        for check, grade in unique.items():
            if grade is not SKIPPED:
                seen.setdefault(check, []).append((now, grade))
        found = [finding(grade, f"check-{check}") for check, grade in unique.items()]
        verdict = watch.observe(found, now)
        watch.check()
        if verdict.health is Health.DRAIN and before is not Health.DRAIN:
            fails = [[t for t, g in s[-POLICY.window :] if g is FAIL] for s in seen.values()]
            assert any(len(f) >= 3 and now - f[0] >= POLICY.drain_s for f in fails)
        if before is Health.DRAIN and verdict.health is not Health.DRAIN:
            assert FAIL not in unique.values()
            seen.clear()
        before = verdict.health

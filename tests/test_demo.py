"""The demo proves what it says, and says so when there is nothing to prove or something differs."""

from __future__ import annotations

import argparse
import dataclasses
import json
import re
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holdfast.cli import demo_command as demo
from holdfast.core.errors import UserError
from holdfast.observe.ledger_audit import LedgerReport
from holdfast.testing import fault_kit as faults
from holdfast.testing.fault_kit import FaultKind, PlannedFault, StepEnd, Strike

STEPS = 12
LOSSES = {step: (2.0 - step / 16).hex() for step in range(STEPS)}
LEDGER = LedgerReport(
    findings=(),
    files=2,
    copies=2 * STEPS,
    steps=STEPS,
    samples=8 * STEPS,
    lost=0,
    repeated=0,
    replayed=(),
    torn=0,
)


def trained(**changes: Any) -> demo.Trained:
    commits = [StepEnd(step=s, loss=1.0, time=100.0 + s) for s in range(STEPS)]
    good = demo.Trained(
        run_dir=Path("run"),
        workers=4,
        seconds=1.0,
        digest="0" * 64,
        losses=LOSSES,
        ledger=LEDGER,
        commits=commits,
        events=[],
        sample="def",
    )
    return dataclasses.replace(good, **changes)


def unequal_by_one_bit() -> dict[int, str]:
    value = float.fromhex(LOSSES[5])
    return LOSSES | {5: (value + value * 2**-52).hex()}


PLANTED = [
    ({"digest": "1" * 64}, "digests differ"),
    ({"losses": unequal_by_one_bit()}, "at 1 steps, first at step 5"),
    ({"losses": {s: x for s, x in LOSSES.items() if s != 7}}, "1 steps lost, first 7"),
    ({"ledger": dataclasses.replace(LEDGER, lost=3)}, "ledger"),
    ({"ledger": dataclasses.replace(LEDGER, repeated=3)}, "ledger"),
    ({"ledger": dataclasses.replace(LEDGER, findings=("line 3: bad",))}, "line 3: bad"),
]


def test_equal_runs_have_no_problems() -> None:
    assert demo.compare(trained(), trained(), STEPS) == []


@pytest.mark.parametrize(("planted", "found"), PLANTED)
@pytest.mark.parametrize("faulty", [True, False])
def test_a_planted_difference_is_found(planted: dict[str, Any], found: str, faulty: bool) -> None:
    runs = (trained(**planted), trained()) if faulty else (trained(), trained(**planted))
    assert found in "\n".join(demo.compare(*runs, STEPS))


STRIKE = Strike(
    fault=PlannedFault(step=4, kind=FaultKind.KILL, order=(2, 1, 0, 3)),
    victims=(2,),
    step=4,
    time=104.5,
)
LOST = {"kind": "lost", "time": 104.6, "worker": 2, "text": "worker 2 was lost: ended by SIGKILL"}


def prove_planted(
    monkeypatch: pytest.MonkeyPatch, strikes: list[Strike], calm: demo.Trained
) -> None:
    """Let `demo.main` find two runs that were never made."""

    def train(run: Any, options: Any, schedule: Any, screen: Any, title: str) -> Any:
        run.run_dir.path.mkdir(parents=True)
        striker = faults.Striker(run, schedule)
        if schedule:
            striker.strikes, striker.pending = strikes, []
        return (trained(events=[LOST]) if schedule else calm), striker

    monkeypatch.setattr(demo, "train", train)


ENDINGS = [
    ([STRIKE], trained(), 0),
    ([STRIKE], trained(losses=unequal_by_one_bit()), 1),
    ([STRIKE], trained(digest="1" * 64), 1),
    ([], trained(), 1),  # nothing was struck, so nothing was proved
]


@pytest.mark.parametrize(("strikes", "calm", "code"), ENDINGS)
def test_the_exit_status_is_the_verdict(
    strikes: list[Strike],
    calm: demo.Trained,
    code: int,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
) -> None:
    prove_planted(monkeypatch, strikes, calm)
    args = ["--steps", str(STEPS), "--out", str(tmp_path / "out")]
    assert demo.main([*args, "--json"]) == code
    found = json.loads(capsys.readouterr().out)
    assert found["ok"] == (code == 0)
    assert bool(found["problems"]) == (code == 1)
    prove_planted(monkeypatch, strikes, calm)
    assert demo.main([*args[:-1], str(tmp_path / "again")]) == code
    text = capsys.readouterr().out
    assert ("DIFFERENT" in text) == (calm != trained())
    assert ("bit for bit." in text) == (code == 0)


@pytest.mark.parametrize("argv", [["--workers", "1"], ["--steps", "3"]])
def test_what_cannot_prove_anything_is_refused(argv: list[str]) -> None:
    with pytest.raises(UserError, match=argv[1]):
        demo.main(argv)


# ---------------------------------------------------------------- faults


def test_the_schedule_follows_from_the_seed() -> None:
    assert faults.schedule(100, 4, 1) == faults.schedule(100, 4, 1)
    orders = {faults.schedule(100, 4, seed)[0].order for seed in range(20)}
    assert len(orders) > 5
    assert {f.kind for f in faults.schedule(100, 4, 1)} == set(FaultKind)


def test_a_recovery_is_measured_at_the_step_that_had_to_recover() -> None:
    # A step a second; step 4 still ends in time, step 5 is the one that is 0.25 s late.
    times = [100.0, 101.0, 102.0, 103.0, 104.0, 104.7, 106.2, 107.2]
    commits = [StepEnd(step=s, loss=1.0, time=t) for s, t in enumerate(times)]
    found = faults.recovery(STRIKE, [LOST], commits)
    assert found is not None
    assert found.causes == ("ended by SIGKILL",)
    assert found.usual_step_s == pytest.approx(1.0)
    assert found.next_step_s == pytest.approx(1.7)
    assert found.stall_s == pytest.approx(0.5)


def test_a_job_that_ends_first_has_no_recovery() -> None:
    commits = [StepEnd(step=s, loss=1.0, time=100.0 + s) for s in range(5)]
    assert faults.recovery(STRIKE, [LOST], commits) is None
    assert faults.recovery(STRIKE, [], [*commits, StepEnd(step=5, loss=1.0, time=106.0)]) is None


WORKERS = [
    {"id": 0, "pid": 10, "state": "computing"},
    {"id": 1, "pid": 11, "state": "waiting"},
    {"id": 2, "pid": 12, "state": "spare"},
    {"id": 3, "pid": 13, "state": "lost"},
]


class FakeRun:
    """What a Striker sees of a run; nothing is hurt: `strike` is replaced as well."""

    def __init__(self) -> None:
        self.told: list[dict[str, Any]] = []

    def status(self) -> dict[str, Any]:
        return {"workers": WORKERS}

    def events(self, kind: str) -> list[dict[str, Any]]:
        return self.told


def test_faults_are_struck_when_due_one_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    hit: list[tuple[int, int]] = []
    monkeypatch.setattr(faults, "strike", lambda pid, number: hit.append((pid, number)))
    run = FakeRun()
    order = (3, 2, 1, 0)
    striker = faults.Striker(
        run,  # type: ignore[arg-type]
        [
            PlannedFault(step=5, kind=FaultKind.KILL, order=order, count=2),  # nobody would survive
            PlannedFault(step=5, kind=FaultKind.FREEZE, order=order),
            PlannedFault(step=2, kind=FaultKind.KILL_JOINING, order=order),
        ],
    )
    assert striker.poll(1) is None
    first = striker.poll(2)
    assert first is not None
    assert first.victims == (2,)
    assert striker.poll(9) is None  # the first is not known to be lost yet
    run.told.append({"worker": 2, "kind": "lost", "time": first.time, "text": ""})
    assert striker.poll(4) is None  # nor has the job gone on
    second = striker.poll(9)
    assert second is not None
    assert second.victims == (1,)
    assert hit == [(12, 9), (11, 19)]
    assert [f.count for f in striker.pending] == [2]


class TalkingRun(FakeRun):
    """A run that has ended after some events; it shows nothing else."""

    out: tuple[str, ...] = ()

    def running(self) -> bool:
        return False

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        return [
            {"kind": "slow", "text": "worker 0 is slow now and then"},
            {"kind": "balance", "text": "worker 0 hosts 0 virtual ranks instead of 1"},
            {"kind": "join", "text": "worker 2 joins"},
        ]


def test_only_what_its_reader_came_for_is_shown(capsys: pytest.CaptureFixture[str]) -> None:
    run = TalkingRun()
    striker = faults.Striker(run, [])  # type: ignore[arg-type]
    demo.watch(run, striker, 12, demo.Screen(Console()))  # type: ignore[arg-type]
    text = capsys.readouterr().out
    assert "worker 2 joins" in text
    assert "slow" not in text
    assert "hosts" not in text


# ---------------------------------------------------------------- the whole demo


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_a_short_demo_proves_itself(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    small = ["--width", "32", "--layers", "1", "--context", "32", "--batch-size", "4"]
    code = demo.main(["--steps", "30", "--json", "--out", str(tmp_path / "out"), "--", *small])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (code, found["problems"]) == (0, []), printed.err
    assert found["ok"]
    assert found["digests"]["faulty"] == found["digests"]["undisturbed"]
    assert re.fullmatch("[0-9a-f]{64}", found["digests"]["faulty"])
    assert found["losses_equal"]
    assert len(found["losses"]) == found["ledger"]["steps"] == 30
    assert (found["steps_lost"], found["samples_lost"], found["samples_repeated"]) == (0, 0, 0)
    assert found["faults"]
    assert {"causes", "next_step_ms", "usual_step_ms", "stall_ms"} <= set(found["faults"][0])
    assert Path(found["plot"]).stat().st_size > 0
    assert found["sample"].startswith("def ")


def test_the_parser_passes_the_rest_to_the_script() -> None:
    options = demo.parser().parse_args(["--steps", "30", "--", "--width", "32"])
    assert isinstance(options, argparse.Namespace)
    assert options.args == ["--width", "32"]

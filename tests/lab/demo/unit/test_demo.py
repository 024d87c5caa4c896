"""The demo proves its claim, and says so when there is nothing to prove or something differs."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import math
import re
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from holdfast.engine.core.errors import UserError
from holdfast.engine.records.incidents import describe_cost, list_incidents
from holdfast.engine.records.ledger_audit import LedgerReport
from holdfast.lab.demo import demo
from holdfast.lab.demo import fault_kit as faults
from holdfast.lab.demo.fault_kit import FaultKind, PlannedFault, StepEnd, Strike

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
    fault=PlannedFault(kind=FaultKind.KILL, order=(2, 1, 0, 3), rest_steps=4),
    victims=(2,),
    step=4,
    time=104.5,
)
LOST = {"kind": "lost", "time": 104.6, "worker": 2, "text": "worker 2 was lost: ended by SIGKILL"}


def prove_planted(
    monkeypatch: pytest.MonkeyPatch, strikes: list[Strike], calm: demo.Trained
) -> None:
    """Give `demo.main` two runs that were never made."""

    def train(run_dir: Path, plan: demo.RunPlan, options: Any, screen: Any) -> Any:
        run_dir.mkdir(parents=True)
        striker = faults.Striker(FakeRun(), plan.schedule)  # type: ignore[arg-type]
        if plan.schedule:
            striker.strikes, striker.pending = strikes, []
        return (trained(events=[LOST]) if plan.schedule else calm), striker

    monkeypatch.setattr(demo, "train", train)


ENDINGS = [
    ([STRIKE], trained(), 0),
    ([STRIKE], trained(losses=unequal_by_one_bit()), 1),
    ([STRIKE], trained(digest="1" * 64), 1),
    ([], trained(), 1),  # no fault was struck, so the run is no proof
]


@pytest.mark.slow_with("strikes3-calm3-1")
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
def test_options_that_cannot_prove_anything_are_refused(argv: list[str]) -> None:
    with pytest.raises(UserError, match=argv[1]):
        demo.main(argv)


# ---------------------------------------------------------------- faults


def test_the_schedule_follows_from_the_seed() -> None:
    assert faults.schedule(100, 4, 1) == faults.schedule(100, 4, 1)
    orders = {faults.schedule(100, 4, seed)[0].order for seed in range(20)}
    assert len(orders) > 5
    assert {f.kind for f in faults.schedule(100, 4, 1)} == set(FaultKind)


def test_a_recovery_is_measured_at_the_step_that_had_to_recover() -> None:
    # A step a second; step 4 still ends in time, step 5 is 0.25 s late.
    times = [100.0, 101.0, 102.0, 103.0, 104.0, 104.7, 106.2, 107.2]
    commits = [StepEnd(step=s, loss=1.0, time=t) for s, t in enumerate(times)]
    found = faults.recovery(STRIKE, [LOST], commits)
    assert found is not None
    assert found.causes == ("ended by SIGKILL",)
    assert found.usual_step_s == pytest.approx(1.0)
    assert found.next_step_s == pytest.approx(1.7)
    assert found.stall_s == pytest.approx(0.5)
    assert found.pause_s is None


def test_the_pause_of_a_recovery_is_the_one_that_explain_prints() -> None:
    commits = [StepEnd(step=s, loss=1.0, time=100.0 + s) for s in range(STEPS)]
    loss = LOST | {"id": "1.7"}
    view = {"kind": "view", "time": 104.7, "text": "view 2", "step": 5, "id": "1.8"}
    resumed = {"kind": "resumed", "time": 104.8, "text": "step 5 is committed", "id": "1.9"}
    events = [
        loss,
        view | {"causes": ["1.7"]},
        resumed | {"causes": ["1.8"], "cost": {"pause_s": 0.25}},
    ]
    found = faults.recovery(STRIKE, events, commits)
    assert found is not None
    assert found.pause_s == 0.25
    assert describe_cost(list_incidents(events)[0]).startswith("0.25 s until the next step")


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
    """Shows a Striker a run; nothing is hurt: `strike` is replaced as well."""

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
    kill, freeze, joiner = FaultKind.KILL, FaultKind.FREEZE, FaultKind.KILL_JOINING
    striker = faults.Striker(
        run,  # type: ignore[arg-type]
        [
            PlannedFault(
                kind=kill, order=order, rest_steps=5, count=2
            ),  # it would leave no survivor
            PlannedFault(kind=freeze, order=order, rest_steps=5),
            PlannedFault(kind=joiner, order=order, rest_steps=1),
        ],
    )
    assert striker.poll(0, 0.0) is None  # the job has not begun
    assert striker.poll(1, 0.0) is None
    first = striker.poll(2, 0.0)
    assert first is not None
    assert first.victims == (2,)
    assert striker.poll(19, 0.0) is None  # the first is not known to be lost yet
    run.told.append({"worker": 2, "kind": "lost", "time": first.time, "text": ""})
    assert striker.poll(4, 0.0) is None  # nor has the job committed a step since
    assert striker.poll(19, 0.0) is None  # the rest begins
    assert striker.poll(23, 0.0) is None
    second = striker.poll(24, 0.0)
    assert second is not None
    assert second.victims == (1,)
    assert hit == [(12, 9), (11, 19)]
    assert [f.count for f in striker.pending] == [2]


def test_on_a_slow_machine_a_rest_takes_few_steps() -> None:
    striker = faults.Striker(FakeRun(), faults.schedule(20, 4, 0))  # type: ignore[arg-type]
    assert striker.measure_rest(0, 50.0) == -1  # start-up is no rest
    assert striker.measure_rest(1, 60.0) == 0
    assert striker.measure_rest(2, 60.0 + faults.REST_S) == 1
    assert striker.measure_rest(4, 60.0 + faults.REST_S - 1) == 3
    assert striker.measure_rest(4, 60.0 + faults.REST_S) == math.inf


class TalkingRun(FakeRun):
    """A run that has ended after some events; it shows only these."""

    out: tuple[str, ...] = ()

    def is_running(self) -> bool:
        return False

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        return [
            {"kind": "slow", "text": "worker 0 is slow now and then"},
            {"kind": "balance", "text": "worker 0 hosts 0 virtual ranks instead of 1"},
            {
                "kind": "copy",
                "text": "worker 1 computed 2 tasks for other workers, which were late",
            },
            {"kind": "join", "text": "worker 2 joins"},
        ]


def test_the_demo_shows_no_events_that_its_readers_did_not_come_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    run = TalkingRun()
    striker = faults.Striker(run, [])  # type: ignore[arg-type]
    plan = demo.RunPlan(title="", workers=4, steps=12)
    demo.watch(run, striker, plan, demo.Screen(Console()))  # type: ignore[arg-type]
    text = capsys.readouterr().out
    assert "worker 2 joins" in text
    assert "slow" not in text
    assert "hosts" not in text
    assert "copied" not in text


# ---------------------------------------------------------------- any machine's speed


class Clock:
    """Replaces the module `time`; it passes only in `sleep`."""

    def __init__(self) -> None:
        self.now = 1000.0

    def time(self) -> float:
        return self.now

    monotonic = time

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class ImaginedRun(FakeRun):
    """Shows a run of four workers as it would be on a machine of some speed."""

    def __init__(self, path: Path, clock: Clock, step_s: float, join_s: float) -> None:
        super().__init__()
        self.run_dir = types.SimpleNamespace(path=path)
        self.out: list[str] = []
        self.steps: int | None = None  # its last step
        self.join_s = join_s
        self._clock, self._step_s = clock, step_s
        self._next = clock.now + join_s + step_s
        self._absent: dict[int, float] = {}  # worker -> time of its fault

    @property
    def commits(self) -> list[StepEnd]:
        found = [m for line in self.out if (m := demo.COMMIT.fullmatch(line))]
        return [StepEnd(step=int(m[1]), loss=float(m[2]), time=float(m[3])) for m in found]

    def is_running(self) -> bool:
        while self._next <= self._clock.now and len(self.out) != self.steps:
            self.out.append(f"step {len(self.out)} loss 1.0 time {self._next:.4f}")
            self._next += self._step_s
            if self.steps is None and (self.run_dir.path / demo.STOP).exists():
                self.steps = len(self.out) + 1
        return len(self.out) != self.steps

    def status(self) -> dict[str, Any]:
        states = dict.fromkeys(range(4), "computing")
        for worker, since in self._absent.items():
            if self._clock.now - since < self.join_s:
                is_back = self._clock.now - since > self.join_s / 2
                states[worker] = "joining" if is_back else "lost"
        return {"workers": [{"id": w, "pid": w, "state": s} for w, s in states.items()]}

    def events(self, kind: str = "") -> list[dict[str, Any]]:
        return [event for event in self.told if event["time"] <= self._clock.now]

    def strike(self, pid: int, number: int) -> None:
        self._absent[pid] = self._clock.now
        loss = {"kind": "lost", "worker": pid, "time": self._clock.now + 1.0, "text": "x: y"}
        self.told.append(loss)


@pytest.fixture
def imagine(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    def watch(step_s: float, join_s: float, steps: int | None = None) -> Any:
        clock = Clock()
        run = ImaginedRun(tmp_path, clock, step_s, join_s)
        run.steps = steps
        monkeypatch.setattr(demo, "time", clock)
        monkeypatch.setattr(faults, "time", clock)
        monkeypatch.setattr(faults, "strike", run.strike)
        rest_steps = steps // demo.RESTS if steps else demo.REST_STEPS
        striker = faults.Striker(run, faults.schedule(rest_steps, 4, 0))  # type: ignore[arg-type]
        plan = demo.RunPlan(title="", workers=4, steps=steps)
        screen = demo.Screen(Console(quiet=True))
        with screen.training("", steps):
            demo.watch(run, striker, plan, screen)  # type: ignore[arg-type]
        for strike in striker.strikes:
            assert faults.recovery(strike, run.told, run.commits) is not None
        return striker, len(run.out), clock.now - 1000.0

    return watch


@pytest.mark.parametrize("step_s", [0.005, 0.1, 0.5])
@pytest.mark.parametrize("join_s", [2.0, 16.0])
def test_every_fault_is_struck_however_busy_the_machine_is(
    imagine: Callable[..., Any], step_s: float, join_s: float
) -> None:
    striker, steps, seconds = imagine(step_s, join_s)
    assert striker.pending == []
    assert seconds < demo.STRIKES_S
    assert steps >= demo.STEPS_AIM or seconds >= demo.TRAIN_S


@pytest.mark.parametrize(("step_s", "join_s"), [(0.1, 90.0), (4.0, 30.0), (30.0, 2.0)])
def test_a_machine_that_is_too_busy_gets_fewer_faults(
    imagine: Callable[..., Any], step_s: float, join_s: float
) -> None:
    striker, _, seconds = imagine(step_s, join_s)
    assert striker.strikes
    assert striker.pending
    assert seconds < demo.STRIKES_S + demo.RECOVERY_S + 2 * step_s


def test_a_given_number_of_steps_is_kept(imagine: Callable[..., Any]) -> None:
    striker, steps, _ = imagine(0.1, 2.0, 30)
    assert steps == 30
    assert striker.strikes


def test_a_slow_run_is_heard_from(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    clock = Clock()
    monkeypatch.setattr(demo, "time", clock)
    screen = demo.Screen(Console())
    with screen.training("", None):
        for step in (0, 0, 0, 1, 1, 2, 2, 3):
            screen.show(step, None, 1.0, 4)
            clock.sleep(demo.SILENCE_S * 0.6)
    lines = capsys.readouterr().out.splitlines()
    heads = [line.split("  ")[-1].split(",")[0] for line in lines[1:]]
    assert heads == ["starting", "step 1", "step 2"]


@pytest.mark.parametrize("is_open", [True, False])
def test_missed_faults_are_explained_in_one_sentence(is_open: bool) -> None:
    proof = demo.Proof(
        steps=STEPS,
        faulty=trained(),
        calm=trained(),
        problems=[],
        recoveries=[],
        missed=list(faults.schedule(1, 4, 0)[2:]),
        plot=None,
    )
    text = demo.explain_missed(proof, is_open=is_open)
    assert "freeze, kill 2 at once" in text
    assert ("without --steps" in text) != is_open
    assert text.endswith(".")


@pytest.mark.parametrize("columns", [60, 72, 80, 120])
def test_both_digests_are_shown_at_the_same_length(columns: int) -> None:
    digest = "0123456789abcdef" * 4
    calm = trained(digest=digest[:-1] + "0")  # differs only in its last digit
    screen = Console(width=columns)
    for other, verdict in ((trained(digest=digest), "equal"), (calm, "DIFFERENT")):
        proof = demo.Proof(
            steps=STEPS,
            faulty=trained(digest=digest),
            calm=other,
            problems=[],
            recoveries=[],
            missed=[],
            plot=None,
        )
        with screen.capture() as shown:
            screen.print(demo.comparison(proof))
        row = next(line for line in shown.get().splitlines() if digest[:8] in line)
        assert row.split()[-3:] == [*[digest[: demo.DIGEST_CHARS] + "..."] * 2, verdict]


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
    assert {"causes", "next_step_ms", "usual_step_ms", "pause_ms"} <= set(found["faults"][0])
    assert Path(found["plot"]).stat().st_size > 0
    assert found["sample"].startswith("def ")


@pytest.mark.slow
@pytest.mark.timeout(600)
def test_a_demo_beside_busy_processes_strikes_every_kind(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    small = ["--width", "32", "--layers", "1", "--context", "32", "--batch-size", "4"]
    with contextlib.ExitStack() as stack:
        for _ in range(2):
            busy = stack.enter_context(subprocess.Popen([sys.executable, "-c", "while True: pass"]))
            stack.callback(busy.kill)
        code = demo.main(["--json", "--out", str(tmp_path / "out"), "--", *small])
    printed = capsys.readouterr()
    found = json.loads(printed.out)
    assert (code, found["problems"]) == (0, []), printed.err
    assert found["digests"]["faulty"] == found["digests"]["undisturbed"]
    assert len(found["losses"]) == found["ledger"]["steps"] == found["steps"]
    struck = {fault["kind"] for fault in found["faults"]}
    missed = {text.partition(" 2 at once")[0] for text in found["faults_missed"]}
    assert struck | missed == {kind.value for kind in FaultKind}
    assert struck


def test_the_parser_passes_the_rest_to_the_script() -> None:
    options = demo.parser().parse_args(["--steps", "30", "--", "--width", "32"])
    assert isinstance(options, argparse.Namespace)
    assert options.args == ["--width", "32"]

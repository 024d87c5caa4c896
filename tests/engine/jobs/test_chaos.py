"""Chaos: jobs of three nodes through random kills of anything, freezes, cuts and losses.

The result must always equal the result of an undisturbed run. A seed chooses the faults and the
times between them; they strike for a while, then the network heals and the job must end well.
"""

from __future__ import annotations

import contextlib
import random
import signal
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.engine.core.errors import HoldfastError
from holdfast.engine.runtime.local_run import LocalRun, strike
from labs.lab import LabRun
from labs.network_lab import Direction, Fault, Lab
from places import TESTS

SCRIPT = TESTS / "scripts" / "trainer.py"
RUN_S = 200.0
FAULTS_S = 20.0
OPTIONS = ("--virtual", "6", "--losses-max", "200")
WORDS = (str(SCRIPT), "--steps", "200", "--task-s", "0.02")

pytestmark = [
    pytest.mark.skipif(bool(Lab.available()), reason=Lab.available() or "-"),
    pytest.mark.timeout(400),
]


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> str:
    run_dir = tmp_path_factory.mktemp("reference") / "run"
    with LocalRun(run_dir, ["--nproc", "2", *OPTIONS], WORDS) as run:
        assert run.wait(RUN_S) == 0, run.log()
        return run.out[-1]


class Chaos:
    """Strikes one run; every method is one kind of fault. Faults that must be healed are kept."""

    def __init__(self, run: LabRun, rng: random.Random) -> None:
        self.run = run
        self.rng = rng
        self.faults: list[Fault] = []
        self.frozen: list[int] = []
        self.struck: list[str] = []
        self._pause = threading.Event()

    def strike(self) -> None:
        kinds: list[Callable[[], None]] = [
            self.kill_worker,
            self.kill_worker,
            self.freeze_worker,
            self.kill_agent,
            self.kill_coordinator,
            self.freeze_coordinator,
            self.crash_node,
            self.cut_node,
            self.cut_pair,
            self.lose_packets,
        ]
        kind = self.rng.choice(kinds)
        with contextlib.suppress(HoldfastError):  # no coordinator answers just now
            kind()
            self.struck.append(kind.__name__)

    def kill_worker(self) -> None:
        strike(self.rng.choice([w["pid"] for w in self.run.status()["workers"]]))

    def freeze_worker(self) -> None:
        self._freeze(self.rng.choice([w["pid"] for w in self.run.status()["workers"]]))

    def kill_agent(self) -> None:
        strike(self.rng.choice([a["pid"] for a in self.run.status()["agents"]]))

    def kill_coordinator(self) -> None:
        strike(self.run.status()["coordinator"]["pid"])

    def freeze_coordinator(self) -> None:
        self._freeze(self.run.status()["coordinator"]["pid"])

    def crash_node(self) -> None:
        """Kill all of a node's processes; the first node has the coordinator and the launcher."""
        host = self.rng.choice(self.run.lab.hosts[1:])
        host.crash()
        self.run.join(host)

    def cut_node(self) -> None:
        host, direction = self.rng.choice(self.run.lab.hosts), self.rng.choice(list(Direction))
        self.faults.append(self.run.lab.cut(host, direction))

    def cut_pair(self) -> None:
        self.faults.append(self.run.lab.cut_pair(*self.rng.sample(self.run.lab.hosts, 2)))

    def lose_packets(self) -> None:
        host = self.rng.choice(self.run.lab.hosts)
        self.faults.append(self.run.lab.drop(host, self.rng.choice((5, 15, 30))))

    def relent(self) -> None:
        """Heal one fault of the network, or one process."""
        if self.faults and self.rng.random() < 0.7:
            self.faults.pop(self.rng.randrange(len(self.faults))).heal()
        if self.frozen:
            strike(self.frozen.pop(0), signal.SIGCONT)

    def heal(self) -> None:
        self.run.lab.heal_all()
        for pid in self.frozen:
            strike(pid, signal.SIGCONT)

    def wait(self, seconds: float) -> None:
        self._pause.wait(seconds)

    def _freeze(self, pid: int) -> None:
        if strike(pid, signal.SIGSTOP):
            self.frozen.append(pid)


@pytest.fixture
def chaos(tmp_path: Path, request: pytest.FixtureRequest) -> Iterator[Chaos]:
    rng = random.Random(request.param)
    with Lab(3) as lab, LabRun(lab, tmp_path / "run", OPTIONS, WORDS) as run:
        run.until_members(3)
        yield Chaos(run, rng)


@pytest.mark.parametrize(
    "chaos", [pytest.param(seed, marks=pytest.mark.slow) for seed in range(30)], indirect=True
)
def test_chaos(chaos: Chaos, expected: str) -> None:
    run, rng = chaos.run, chaos.rng
    until = time.monotonic() + FAULTS_S
    while time.monotonic() < until and run.is_running():
        chaos.strike()
        chaos.wait(rng.uniform(0.5, 4.0))
        if rng.random() < 0.6:
            chaos.relent()
    chaos.heal()
    assert run.wait(RUN_S) == 0, f"{chaos.struck}\n{run.log()}"
    assert run.last_lines() == {expected}, chaos.struck
    assert len(chaos.struck) > 2

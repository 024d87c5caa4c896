"""Runs the checks on one tree, in a process of its own: tests first, then simulated seeds.

The process is forked from a process that has imported the external libraries of the tests, but no
module of Holdfast, so that a check begins within a second. The first failure ends it.
"""

from __future__ import annotations

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import CodeType, FrameType
from typing import Any, NamedTuple

import pytest

SEED_TIMES_MAX = 20.0  # a seed may take this many times as long as without the bug
SEED_S_MIN = 5.0  # every seed is given at least this much processor time
PRELOADED = ("hypothesis", "hypothesis.strategies", "msgspec", "numpy", "xxhash", "rich", "torch")


class Seed(NamedTuple):
    """Describes a seed in a tree without bugs: its processor time, and the digest of its trace."""

    seed: int
    took_s: float
    digest: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Plan:
    """Lists the checks to run on a tree, in this order.

    `light`, `quick`, `thorough`: tests by their ids; the light ones begin at once, without torch.
    `seeds`: seeds of the simulator. `twice`: a failed thorough test counts only if it fails again,
    since many processes share the machine.
    """

    light: Sequence[str] = ()
    quick: Sequence[str] = ()
    seeds: Sequence[Seed] = ()
    thorough: Sequence[str] = ()
    test_s_max: float = 60.0
    twice: bool = True


@dataclass(slots=True)
class Outcome:
    """Describes the result of the checks. `by`: the stage that failed; empty if none did."""

    by: str = ""
    what: str = ""
    why: str = ""
    same_traces: bool | None = None  # whether all seeds that were run gave the same traces


class _Watcher:
    """Records which test failed first in a run of pytest, and why."""

    def __init__(self) -> None:
        self.failed = ""
        self.why = ""

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed and not self.failed:
            self._note(report.nodeid, report.longrepr)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed and not self.failed:
            self._note(report.nodeid, report.longrepr)

    def _note(self, name: str, text: object) -> None:
        lines = [line for line in str(text).splitlines() if line.startswith("E ")]
        self.failed, self.why = name, (lines or [""])[0][2:].strip()[:200]


# ---------------------------------------------------------------- the process


def preload() -> None:
    """Import the external libraries once, for all processes that are forked from this one."""
    for name in ("OMP_NUM_THREADS", "OPENBLAS_NUM_THREADS", "MKL_NUM_THREADS"):
        os.environ.setdefault(name, "1")
    for name in PRELOADED:
        with contextlib.suppress(ImportError):
            __import__(name)
    ours = sorted(name for name in sys.modules if name.partition(".")[0] == "holdfast")
    assert not ours, f"imported before any bug is planted: {ours}"


def enter(root: Path) -> None:
    """Make this process one which knows only this tree."""
    folders = [str(root / each) for each in ("src", "tests", "tests/kits", "tests/house")]
    sys.path[:] = [*folders, *(p for p in sys.path if not (Path(p) / "holdfast").exists())]
    os.environ["PYTHONPATH"] = os.pathsep.join(folders)
    os.chdir(root)
    found = importlib.util.find_spec("holdfast")
    ours = found is not None and Path(found.origin or "").is_relative_to(root)
    assert ours, f"another tree would be checked: {found}"
    _do_not_shrink()


def _do_not_shrink() -> None:
    """Make hypothesis stop at the first example that fails, because no person reads it here."""
    import hypothesis

    phases = (hypothesis.Phase.explicit, hypothesis.Phase.generate)
    register = hypothesis.settings.register_profile

    def without_shrinking(name: str, *args: Any, **settings: Any) -> None:
        register(name, *args, **{"phases": phases, "database": None, **settings})

    # The class refuses new attributes as a protection against typing errors.
    type.__setattr__(hypothesis.settings, "register_profile", staticmethod(without_shrinking))
    hypothesis.settings.register_profile("first failure")
    hypothesis.settings.load_profile("first failure")


def run(plan: Plan, root: Path) -> Outcome:
    """Run the checks of a plan on the tree that was entered; stop at the first that fails."""
    outcome = _tests("test", plan.light, root, plan)
    if not outcome.by:
        outcome = _tests("test", plan.quick, root, plan)
    if not outcome.by and plan.seeds:
        outcome = _seeds(plan.seeds)
    if not outcome.by and plan.thorough:
        same = outcome.same_traces
        outcome = _tests("thorough test", plan.thorough, root, plan)
        if outcome.by and plan.twice:
            outcome = _tests("thorough test", [outcome.what], root, plan)
        outcome.same_traces = same
    return outcome


def _tests(stage: str, names: Sequence[str], root: Path, plan: Plan) -> Outcome:
    if not names:
        return Outcome()
    watcher = _Watcher()
    options = ["-x", "-q", "--no-header", "--tb=short", "-p", "no:cacheprovider", "-p", "no:xdist"]
    options += ["-c", str(root / "pyproject.toml"), "--rootdir", str(root), "-m", ""]
    options += [f"--timeout={plan.test_s_max}", "--hypothesis-seed=0"]
    code = pytest.main([*options, *names], plugins=[watcher])
    if code == pytest.ExitCode.OK:
        return Outcome()
    # The same tests ended well without the bug, so any other result is the bug's doing.
    return Outcome(by=stage, what=watcher.failed or "collection", why=watcher.why or str(code))


# ---------------------------------------------------------------- the simulator


class TookTooLong(BaseException):
    """Ends a seed whose machines go round in circles."""


def _seeds(known: Sequence[Seed]) -> Outcome:
    from holdfast.lab.sim.swarm import run_seed

    same = True
    for seed, usual_s, digest in known:
        limit_s = max(SEED_S_MIN, SEED_TIMES_MAX * usual_s)
        try:
            with _at_most(limit_s):
                result = run_seed(seed)
        except TookTooLong:
            return Outcome(by="simulator", what=f"seed {seed}", why=f"no end in {limit_s:.0f} s")
        if result.failure:
            why = result.failure.splitlines()[0][:200]
            return Outcome(by="simulator", what=f"seed {seed}", why=why)
        same = same and result.digest == digest
    return Outcome(same_traces=same)


@contextlib.contextmanager
def _at_most(limit_s: float) -> Iterator[None]:
    """Bound the processor time, so that a busy machine ends no check."""

    def stop(signum: int, frame: FrameType | None) -> None:
        raise TookTooLong

    signal.signal(signal.SIGVTALRM, stop)
    signal.setitimer(signal.ITIMER_VIRTUAL, limit_s)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_VIRTUAL, 0)


# ---------------------------------------------------------------- which test reaches what


@dataclass(slots=True)
class Reach:
    """Describes a test: how long it takes (processor time), and the functions that it calls.

    A function is named by its file and first line. `processes`: it starts processes, whose calls
    are not seen.
    """

    took_s: float = 0.0
    calls: list[str] = field(default_factory=list)
    processes: bool = False


class Tracer:
    """Records which functions of the code under `src/holdfast` each test calls."""

    def __init__(self, root: Path) -> None:
        self.reached: dict[str, Reach] = {}
        self.failed: dict[str, str] = {}
        self._root = root
        self._prefix = str(root / "src" / "holdfast")
        self._seen: set[CodeType] = set()

    def pytest_collection_modifyitems(self, items: list[pytest.Item]) -> None:
        """Leave out the tests that run jobs of several processes: their calls would not be seen."""
        items[:] = [item for item in items if "start" not in getattr(item, "fixturenames", ())]

    @pytest.hookimpl(hookwrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item) -> Iterator[None]:
        reach = self.reached[item.nodeid] = Reach()
        with _noting_processes(reach), self.watching(reach):
            yield

    @contextlib.contextmanager
    def watching(self, reach: Reach) -> Iterator[None]:
        """Record the functions that are called, and how long all of it takes."""
        self._seen = set()
        began = time.process_time()
        threading.settrace(self._trace)
        sys.settrace(self._trace)
        try:
            yield
        finally:
            sys.settrace(None)
            threading.settrace(None)  # type: ignore[arg-type]
        reach.took_s = time.process_time() - began
        ours = [code for code in self._seen if code.co_filename.startswith(self._prefix)]
        reach.calls = sorted(
            f"{Path(code.co_filename).relative_to(self._root)}:{code.co_firstlineno}"
            for code in ours
        )

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed[report.nodeid] = str(report.longrepr)

    def _trace(self, frame: FrameType, event: str, argument: object) -> None:
        self._seen.add(frame.f_code)


@contextlib.contextmanager
def _noting_processes(reach: Reach) -> Iterator[None]:
    plain = subprocess.Popen.__init__

    def noting(self: Any, *args: Any, **named: Any) -> None:
        reach.processes = True
        plain(self, *args, **named)

    subprocess.Popen.__init__ = noting  # type: ignore[method-assign]
    try:
        yield
    finally:
        subprocess.Popen.__init__ = plain  # type: ignore[method-assign]


def reach(files: Sequence[str], root: Path) -> Tracer:
    """Run the tests of these files and record the code that they reach."""
    tracer = Tracer(root)
    options = ["-q", "--no-header", "-p", "no:cacheprovider", "-p", "no:xdist", "--timeout=300"]
    options += ["-c", str(root / "pyproject.toml"), "--rootdir", str(root), "--hypothesis-seed=0"]
    pytest.main([*options, *(str(root / name) for name in files)], plugins=[tracer])
    return tracer


def know_seeds(seeds: range, root: Path) -> tuple[list[Seed], dict[str, list[int]]]:
    """Return the result of each seed in a tree without bugs, and which seeds reach a function."""
    if not seeds:
        return [], {}
    from holdfast.lab.sim.swarm import run_seed

    tracer, known, reached = Tracer(root), list[Seed](), dict[str, list[int]]()
    for seed in seeds:
        each = Reach()
        with tracer.watching(each):
            result = run_seed(seed)
        assert not result.failure, f"seed {seed} fails without any bug: {result.failure}"
        known.append(Seed(seed, each.took_s, result.digest))
        for function in each.calls:
            reached.setdefault(function, []).append(seed)
    return known, reached

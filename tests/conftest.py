"""Shared by the tests of real processes: starting runs, and the digest they must all end with."""

from __future__ import annotations

import collections
import json
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import hypothesis
import pytest

from holdfast.engine.net import peer_listener
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.runtime.node import fork_server
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage

MISSING_PACKAGE = re.compile(r"\(package ([\w.+-]+)\)")  # skip reasons name Debian's packages so
SCRIPTS = Path(__file__).parent / "scripts"
RUN_S = 100.0  # bounds a hang; a run takes a few seconds

# An example may take long on a busy machine; pytest-timeout bounds a hang.
hypothesis.settings.register_profile("busy", deadline=None)
hypothesis.settings.load_profile("busy")

Start = Callable[..., LocalRun]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """Return start(script_args, nproc=4, options=()), which gives a LocalRun to use with `with`."""
    count = 0

    def make(
        *args: str, nproc: int = 4, script: str = "trainer.py", options: tuple[str, ...] = ()
    ) -> LocalRun:
        nonlocal count
        count += 1
        flags = ["--nproc", str(nproc), *options]
        if "--virtual" not in options:
            flags += ["--virtual", "4"]
        return LocalRun(tmp_path / f"run{count}", flags, [str(SCRIPTS / script), *args])

    return make


def describe_skips(reasons: Sequence[str]) -> str:
    """Return one sentence on all skipped tests: most frequent reason first, packages by name."""
    counts = collections.Counter(reason.removeprefix("Skipped: ") for reason in reasons)
    packages = sorted({m[1] for m in map(MISSING_PACKAGE.search, counts) if m is not None})
    parts = [f"{count}: {reason}" for reason, count in counts.most_common()]
    advice = f"; to run more of them: apt-get install {' '.join(packages)}" if packages else ""
    return f"{sum(counts.values())} skipped ({'; '.join(parts)}){advice}"


def finish(run: LocalRun) -> str:
    """Wait for success; return the last line of output. No process may be left."""
    code = run.wait(RUN_S)
    assert code == 0, f"exit {code}\n{run.log()}"
    assert run.leftovers() == []
    return run.out[-1] if run.out else ""


def has_checkpoint(store: Path, step: int) -> bool:
    """Return whether a run has left a checkpoint of this step: a busy machine may skip a save."""
    return step in Checkpoints(open_storage(str(store))).steps()


def computed_twice(run: LocalRun) -> list[int]:
    """Return the steps that were committed in more than one view."""
    views: dict[int, set[int]] = {}
    for path in (run.run_dir.path / "ledger").iterdir():
        for line in path.read_text().splitlines():
            entry = json.loads(line)
            if entry.get("kind") == "step":
                views.setdefault(entry["step"], set()).add(entry["view"])
    return sorted(step for step, found in views.items() if len(found) > 1)


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """Return reference(steps): the digest of the undisturbed run on one worker with V=4."""
    known: dict[int, str] = {}

    def digest(steps: int) -> str:
        if steps not in known:
            run_dir = tmp_path_factory.mktemp("reference") / "run"
            script = [str(SCRIPTS / "trainer.py"), "--steps", str(steps)]
            with LocalRun(run_dir, ["--nproc", "1", "--virtual", "4"], script) as run:
                known[steps] = finish(run)
            assert re.fullmatch("[0-9a-f]{64}", known[steps])
        return known[steps]

    return digest


@pytest.fixture(scope="session", autouse=True)
def quiet_listeners() -> Iterator[None]:
    """Keep listeners of this process, which outlive their tests, out of the output of others."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(peer_listener, "say_to_log", lambda text: None)
        yield


@pytest.fixture(scope="session", autouse=True)
def forked_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the agents of all tests fork their workers, since importing torch is most of a start.

    The server imports it when the first worker is asked for. A test of the ordinary start removes
    HOLDFAST_FORK_SERVER from its environment.
    """
    path = tmp_path_factory.mktemp("fork") / "server"
    with pytest.MonkeyPatch.context() as patch, fork_server.run_fork_server(path):
        patch.setenv(fork_server.VARIABLE, str(path))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Add options: rewrite the stories, and fail where only a package is missing here."""
    parser.addoption("--rewrite-stories", action="store_true", dest="rewrite_stories")
    parser.addoption("--fail-on-missing-packages", action="store_true", dest="packages_required")


@pytest.hookimpl(tryfirst=True)  # before pytest leaves marked tests out
def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    """Mark tests as slow that are so with some parameters. Parameters of no test are an error."""
    wanted: dict[str, set[str]] = {}
    for item in items:
        function, _, parameters = item.nodeid.partition("[")
        for mark in item.iter_markers("slow_with"):
            missing = wanted.setdefault(function, set(mark.args))
            missing.discard(parameters[:-1])
            if parameters[:-1] in mark.args:
                item.add_marker(pytest.mark.slow)
    stale = [f"{function}[{each}]" for function, ids in wanted.items() for each in sorted(ids)]
    if stale and not any("::" in argument for argument in config.args):
        raise pytest.UsageError(f"slow_with names parameters that no test has: {stale}")


def pytest_terminal_summary(terminalreporter: Any) -> None:
    """Print in one line what was skipped, and the package that is missing."""
    reasons = [report.longrepr[2] for report in terminalreporter.stats.get("skipped", [])]
    if reasons:
        terminalreporter.write_line(describe_skips(reasons), yellow=True)


@pytest.hookimpl(trylast=True)
def pytest_sessionfinish(session: pytest.Session) -> None:
    """Fail, on request, if a test was skipped because a package is missing."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if reporter is None or not session.config.option.packages_required:
        return
    reasons = [report.longrepr[2] for report in reporter.stats.get("skipped", [])]
    if session.exitstatus == 0 and any(map(MISSING_PACKAGE.search, reasons)):
        session.exitstatus = pytest.ExitCode.TESTS_FAILED

"""Shared by the tests of real processes: starting runs, and the digest they must all end with."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from holdfast.runtime.node import fork_server
from holdfast.testing.local_run import LocalRun

SCRIPTS = Path(__file__).parent / "scripts"
RUN_S = 100.0  # bounds a hang; a run takes a few seconds

Start = Callable[..., LocalRun]


@pytest.fixture
def start(tmp_path: Path) -> Start:
    """start(script_args, nproc=4, options=()) -> a LocalRun to be used in a with statement."""
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


def finish(run: LocalRun) -> str:
    """Wait for success; returns the last line of output. Nothing may be left running."""
    code = run.wait(RUN_S)
    assert code == 0, f"exit {code}\n{run.log()}"
    assert run.leftovers() == []
    return run.out[-1] if run.out else ""


@pytest.fixture(scope="session")
def reference(tmp_path_factory: pytest.TempPathFactory) -> Callable[[int], str]:
    """reference(steps) -> the digest of the undisturbed run on one worker with V=4."""
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
def forked_workers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Let the agents of all tests fork their workers, since importing torch is most of a start.

    The server imports it when the first worker is asked for. A test of the ordinary start removes
    HOLDFAST_FORK_SERVER from its environment.
    """
    path = tmp_path_factory.mktemp("fork") / "server"
    with pytest.MonkeyPatch.context() as patch, fork_server.started(path):
        patch.setenv(fork_server.VARIABLE, str(path))
        yield


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let stories be written anew: `pytest tests/test_stories.py --rewrite-stories`."""
    parser.addoption("--rewrite-stories", action="store_true", dest="rewrite_stories")

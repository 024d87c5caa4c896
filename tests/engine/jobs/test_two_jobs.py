"""Two jobs with one secret, one after the other at one address, as the README starts them.

The first one's machine dies, and its other node waits for a coordinator where the second job's one
soon is.
"""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from conftest import RUN_S, SCRIPTS, finish
from holdfast.engine.core.errors import UserError
from holdfast.engine.runtime.contact import job_status
from holdfast.engine.runtime.local_run import LocalRun

STEPS = 12
FOREVER = 100_000


@pytest.fixture
def secret(tmp_path: Path) -> Path:
    path = tmp_path / "secret"
    path.write_text("5e" * 32)
    path.chmod(0o600)
    return path


def job(folder: Path, secret: Path, port: int, steps: int) -> LocalRun:
    options = ["--nproc", "1", "--virtual", "4", "--nodes-max", "2", "--lease-s", "1"]
    options += ["--secret-file", str(secret), "--port", str(port)]
    return LocalRun(folder, options, [str(SCRIPTS / "trainer.py"), "--steps", str(steps)])


def further_node(run: LocalRun, secret: Path, folder: Path) -> LocalRun:
    run.until(run.run_dir.coordinator.exists, RUN_S, "an address")
    host, port = run.run_dir.address()
    words = ("agent", "--join", f"{host}:{port}", "--name", "node1", "--run-dir", str(folder))
    return LocalRun(folder, (), (), command=(*words, "--secret-file", str(secret)))


@pytest.fixture
def left_behind(tmp_path: Path, secret: Path) -> Iterator[tuple[LocalRun, LocalRun]]:
    """The first job, whose first machine has died, and its node that waits at the address."""
    with (
        job(tmp_path / "first", secret, 0, FOREVER) as first,
        further_node(first, secret, tmp_path / "node1") as waiting,
    ):
        first.until_members(2)
        first.until(lambda: first.status()["step"] >= 3, RUN_S, "three steps")
        first.signal(signal.SIGKILL)
        first.wait(RUN_S)
        yield first, waiting


@pytest.mark.slow
def test_the_second_job_ends_as_itself_and_the_first_one_s_node_ends(
    tmp_path: Path,
    secret: Path,
    left_behind: tuple[LocalRun, LocalRun],
    reference: Callable[[int], str],
) -> None:
    first, waiting = left_behind
    _, port = first.run_dir.address()
    with job(tmp_path / "second", secret, port, STEPS) as second:
        assert waiting.wait(RUN_S) == 1
        assert finish(second) == reference(STEPS)
        names = [
            run.run_dir.spec().job if run.run_dir.job.exists() else "" for run in (first, second)
        ]
        assert len(set(names)) == 2
        assert {len(name) for name in names} == {32}
        (told,) = [line for line in waiting.err if "is at its address now" in line]
        assert told.startswith(
            f"holdfast: this node is of job {names[0]}, whose coordinator is gone"
        )
        assert f"job {names[1]} is at its address now" in told
        assert waiting.leftovers() == []
        refused = [each["text"] for each in second.events("refused")]
        assert len(refused) >= 1
        assert all(
            f"it is of job {names[0]}, and this is job {names[1]}" in text for text in refused
        )


@pytest.mark.slow
def test_a_command_for_the_first_job_does_not_speak_to_the_second(
    tmp_path: Path, secret: Path, left_behind: tuple[LocalRun, LocalRun]
) -> None:
    first, _ = left_behind
    _, port = first.run_dir.address()
    with job(tmp_path / "second", secret, port, FOREVER) as second:
        second.until_members(1)
        name = second.run_dir.spec().job
        with pytest.raises(UserError, match=f"job {name} is there, and this is of job "):
            job_status(first.run_dir)

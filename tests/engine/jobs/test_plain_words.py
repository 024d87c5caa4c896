"""Messages when something goes wrong: once, true, and with a remedy."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Awaitable
from functools import partial
from pathlib import Path

import pytest

from conftest import RUN_S, Start
from holdfast.cli.main import main
from holdfast.engine.core.errors import Unreachable, UserError
from holdfast.engine.core.membership.progress import Progress
from holdfast.engine.core.replica.saves import SaveFailures
from holdfast.engine.core.types import WorkerId
from holdfast.engine.runtime.leadership.election import open_election
from holdfast.engine.runtime.local_run import strike
from holdfast.engine.runtime.node import bootstrap
from places import TESTS

SCRIPT = str(TESTS / "scripts" / "faulty.py")


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "--lease-s", "inf", SCRIPT], ["--lease-s inf", "finite", "greater than 0"]),
        (["run", "--run-dir", "FILE", SCRIPT], ["--run-dir FILE is a file", "directory"]),
        (["run", "--run-dir", "FILE/run", SCRIPT], ["FILE/run", "Not a directory", "--run-dir"]),
        (["run", "--store", "s3://", SCRIPT], ["--store s3://", "no bucket", "s3://BUCKET"]),
        (["run", "--store", "FILE", SCRIPT], ["--store", "FILE", "cannot be written"]),
        (["check"], ["no script", "holdfast check train.py"]),
        (["check", "--timeout", "nan", SCRIPT], ["--timeout nan", "above 0"]),
        (["check", "--timeout", "-1", SCRIPT], ["--timeout -1", "above 0"]),
        (["migrate", "-5", "--to", "n", "--run-dir", "r"], ["worker -5", "from 0"]),
    ],
)
def test_a_wrong_word_is_named(
    args: list[str],
    words: list[str],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    assert main(args) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert all(word in line for word in words), line
    assert "free space" not in line
    assert sorted(os.listdir()) == ["FILE"]


def test_options_after_the_script_are_pointed_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "FILE").touch()
    assert main(["launch", "local", "--store", "FILE", SCRIPT, "--nodes", "0"]) == 2
    first, _ = capsys.readouterr().err.splitlines()
    assert "--nodes stands after the script" in first


def test_a_failure_that_repeats_itself_is_counted() -> None:
    failures = SaveFailures()
    said = [failures.count_failure(f"step {step}", "the disk is full") for step in range(1, 101)]
    assert [text for text in said if text] == [
        "step 1 is not saved: the disk is full",
        "step 10 is not saved, nor were the 9 before it: the disk is full",
        "step 100 is not saved, nor were the 99 before it: the disk is full",
    ]
    assert failures.forget_failures() == "; the 100 before it were not"
    assert failures.forget_failures() == ""
    assert failures.count_failure("step 7", "why") == "step 7 is not saved: why"


def test_one_worker_is_no_plural() -> None:
    progress = Progress(5)
    progress.count_loss(WorkerId(0), "its node is lost")
    assert progress.reason_to_give_up(0, 9).startswith("1 worker was lost at step 5")


def test_crashes_at_one_step_cast_doubt_on_the_script() -> None:
    progress, why = Progress(5), "ended by SIGSEGV"

    def lost() -> str:
        progress.count_loss(WorkerId(0), why)
        return progress.doubt(why, 30)

    assert lost() == ""
    again = lost()
    assert "lost twice at step 5: is it the script?" in again
    assert "30 losses" in again
    assert "--losses-max" in again
    assert "lost 3 times at step 5" in lost()
    progress.record_step(6)
    progress.settle()
    assert "script" not in lost()


@pytest.mark.parametrize("why", ["ended by SIGKILL", "its node is lost", "frozen"])
def test_losses_from_outside_raise_no_doubt_about_the_script(why: str) -> None:
    progress = Progress(5)
    for _ in range(4):
        progress.count_loss(WorkerId(0), why)
        assert progress.doubt(why, 30) == ""


def test_a_script_that_dies_by_a_signal_each_time(start: Start, tmp_path: Path) -> None:
    script = tmp_path / "dies.py"
    script.write_text("import os, signal\nos.kill(os.getpid(), signal.SIGSEGV)\n")
    with start(nproc=1, script=str(script), options=("--losses-max", "2")) as run:
        assert run.wait(RUN_S) == 1, run.log()
        text = run.log()
    assert "is it the script?" in text
    assert "--losses-max" in text
    assert 'dies.py", line 2 in <module>' in text, "faulthandler shows where it was"


def told_of(script: Path) -> str:
    told: list[str] = []
    assert bootstrap.run_and_report(partial(bootstrap._run, str(script)), told.append) == 1
    return told[0]


@pytest.mark.parametrize(
    ("text", "last"),
    [
        (b"def f(:\n", "SyntaxError"),
        (b"\x00\x01\x02", "SyntaxError"),
        (b"\xff\xfe nothing", "SyntaxError"),
        (b"1 / 0\n", "ZeroDivisionError: division by zero"),
    ],
)
def test_a_traceback_begins_in_the_script(text: bytes, last: str, tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_bytes(text)
    story = told_of(script)
    assert last in story.splitlines()[-1]
    assert "bootstrap" not in story
    assert "runpy" not in story
    assert "pkgutil" not in story


def test_our_frames_do_not_stand_between_the_script_and_its_dataset(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from holdfast.engine.core.errors import first_line\n"
        "class Data(Exception):\n"
        "    def __str__(self):\n"
        "        raise ValueError('bad record')\n"
        "first_line(Data())\n"
    )
    story = told_of(script)
    assert "ValueError: bad record" in story
    assert story.count("script.py") == 2
    assert "errors.py" not in story


def test_an_error_of_ours_shows_where_it_arose(tmp_path: Path) -> None:
    script = tmp_path / "script.py"
    script.write_text(
        "from holdfast.engine.core.redundancy import read_redundancy\nread_redundancy(3)\n"
    )
    assert "redundancy.py" in told_of(script)


def test_etcd_is_waited_for_with_a_limit() -> None:
    now = iter(range(100))
    election = open_election("etcd://127.0.0.1:1/job", lambda: float(next(now)))
    said: list[str] = []

    def fail() -> Awaitable[None]:
        raise Unreachable("no server of etcd answers")

    with pytest.raises(UserError, match="gave up after 3 s: no server of etcd answers"):
        asyncio.run(election.ask_patiently(fail, said.append, 3.0))
    assert said == ["standing by: no server of etcd answers; trying for 3 s"]


@pytest.mark.slow
def test_the_log_says_for_how_long_a_damaged_journal_is_waited_for(start: Start) -> None:
    with start("hang", nproc=1, script="faulty.py") as run:
        run.until(lambda: "step 0" in run.out, RUN_S, "the first step")
        journal = run.run_dir.journal
        journal.write_bytes(journal.read_bytes()[:-5])
        strike(run.status()["coordinator"]["pid"])
        run.until(lambda: "waiting up to" in run.log(), RUN_S, "the line about the journal")

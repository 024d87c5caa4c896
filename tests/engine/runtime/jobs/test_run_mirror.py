"""Copies of a run's files on another machine, made through the coordinator."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any
from urllib.request import HTTPCookieProcessor, build_opener

import pytest

from conftest import Start, finish
from dashboard_kit import LIMIT_S, write_crashed_run, write_event
from holdfast.cli.main import main
from holdfast.engine.core.errors import UserError
from holdfast.engine.runtime import run_mirror
from holdfast.engine.runtime.contact import Contact
from holdfast.engine.runtime.run_mirror import RunMirror, read_parts
from holdfast.engine.runtime.user_script import SOURCES_FILE
from holdfast.engine.wire.messages import FilePart, FilesReply, FilesRequest
from holdfast.reports.commands.dashboard_command import is_address

CONTACT = Contact(address=("127.0.0.1", 1))


class Twins:
    """Keeps a run and its mirror, which asks without a network. `replies`: how many it took."""

    def __init__(self, tmp_path: Path, patch: pytest.MonkeyPatch) -> None:
        self.run = tmp_path / "run"
        write_crashed_run(self.run)
        self.replies = 0
        patch.setattr(run_mirror, "ask", self._ask)
        (tmp_path / "copy").mkdir()
        self.mirror = RunMirror(CONTACT, bytes(32), tmp_path / "copy")

    def _ask(self, contact: Contact, secret: bytes, question: FilesRequest, answer: type) -> Any:
        self.replies += 1
        return read_parts(self.run, dict(question.held))

    def copied(self, name: str) -> bytes:
        return (self.mirror.run_dir.path / name).read_bytes()

    def assert_equal(self) -> None:
        """Assert that both have the same files, except logs and the machine's own files."""
        names = [p.relative_to(self.run).as_posix() for p in sorted(self.run.rglob("*.json*"))]
        assert {"events.jsonl", "job.json", "ledger/worker-00000-00001.jsonl"} < {*names}
        for name in names:
            if name == SOURCES_FILE:
                continue  # only `holdfast resume` reads it
            assert self.copied(name) == (self.run / name).read_bytes(), name


@pytest.fixture
def twins(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Twins:
    return Twins(tmp_path, monkeypatch)


def test_a_mirror_has_the_files_of_the_run_and_what_they_gain(twins: Twins) -> None:
    twins.mirror.update()
    twins.assert_equal()
    assert twins.replies == 1
    write_event(twins.run, "view", "view 3: workers 0-1", 40.0)
    (twins.run / "times" / "worker-00002-00001.jsonl").write_text('{"new": 1}\n')
    twins.mirror.update()
    twins.assert_equal()
    assert twins.mirror.run_dir.spec().job == "a" * 32


def test_a_file_that_was_replaced_is_copied_again(twins: Twins) -> None:
    twins.mirror.update()
    (twins.run / "events.jsonl").write_text("{}\n")
    (twins.run / "result.json").write_text('{"outcome": ""}\n')
    twins.mirror.update()
    twins.assert_equal()
    assert twins.mirror.run_dir.outcome() == ""


def test_a_long_log_begins_with_a_whole_line_near_its_end(
    twins: Twins, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(run_mirror, "LATE_BYTES", 100)
    lines = [f"line {number:04}\n".encode() for number in range(50)]
    (twins.run / "events.jsonl").write_bytes(b"".join(lines))
    twins.mirror.update()
    assert twins.copied("events.jsonl") == b"".join(lines[-9:])
    with open(twins.run / "events.jsonl", "ab") as log:
        log.write(b"one more\n")
    twins.mirror.update()
    assert twins.copied("events.jsonl") == b"".join([*lines[-9:], b"one more\n"])


def test_large_files_come_in_several_replies(twins: Twins, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_mirror, "REPLY_BYTES", 300)
    twins.mirror.update()
    twins.assert_equal()
    assert twins.replies > 5


def test_a_file_that_cannot_be_read_is_left_out(twins: Twins) -> None:
    os.mkfifo(twins.run / "times" / "pipe.jsonl")
    (twins.run / "times" / "folder.jsonl").mkdir()
    (twins.run / "times" / "..odd name.jsonl").write_text("x\n")
    (twins.run / "job.json").unlink()
    twins.mirror.update()
    found = {path.name for path in (twins.mirror.run_dir.path / "times").iterdir()}
    assert found == {"worker-00000-00001.jsonl", "worker-00001-00001.jsonl"}


@pytest.mark.parametrize("name", ["../evil", "/etc/x", "times/../x.jsonl", "secret", "times/x"])
def test_no_file_is_written_that_no_run_has(
    twins: Twins, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    part = FilePart(name=name, data=b"x", held=1, replaces=True)
    reply = FilesReply(parts=(part,), more=False)
    monkeypatch.setattr(run_mirror, "ask", lambda *args: reply)
    with pytest.raises(UserError, match="which no run has"):
        twins.mirror.update()


def test_any_word_of_a_stranger_is_no_offset(twins: Twins) -> None:
    sent = [
        ("events.jsonl", -5),
        ("job.json", -1),
        ("../x", 7),
        ("times/worker-00000-00001.jsonl", 1 << 62),
    ]
    names = {part.name for part in read_parts(twins.run, dict(sent)).parts}
    assert "times/worker-00000-00001.jsonl" in names
    assert "../x" not in names


def test_an_address_is_told_from_a_directory(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    assert is_address("node7:29600")
    assert is_address("etcd://node7:2379/job")
    assert not is_address("runs/7")
    assert not is_address("runs:x")
    (tmp_path / "run:7").mkdir()
    assert not is_address("run:7")


@pytest.mark.slow
def test_the_dashboard_shows_a_run_by_its_address(start: Start, tmp_path: Path) -> None:
    go = tmp_path / "go"
    words = ("--steps", "12", "--task-s", "0.01", "--hold", "5", str(go))
    with start(*words, nproc=1) as run:
        run.until(run.run_dir.coordinator.exists, LIMIT_S, "the coordinator listens")
        run.until_members(1)
        host, port = run.run_dir.address()
        command = [sys.executable, "-m", "holdfast.cli.main", "dashboard", f"{host}:{port}"]
        secret = tmp_path / "secret"
        shutil.copy(run.run_dir.secret_file, secret)
        command += ["--secret-file", str(secret)]
        environment = {**os.environ, "TMPDIR": str(tmp_path)}
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as it:
            try:
                assert it.stdout is not None
                url = it.stdout.readline().removeprefix("dashboard: ").strip()
                opener = build_opener(HTTPCookieProcessor())
                opener.open(url, timeout=LIMIT_S).close()
                base = url.partition("/?")[0]

                def state() -> dict[str, Any]:
                    with opener.open(f"{base}/api/state", timeout=LIMIT_S) as answer:
                        found: dict[str, Any] = json.load(answer)
                        return found

                def shown() -> dict[str, Any] | None:
                    found = state()
                    return found if "loss" in found and found["status"] else None

                found = run.until(shown, LIMIT_S, "a loss is shown")
                assert found["run"]["name"] == f"{host}:{port}"
                assert found["run"]["virtual_ranks"] == run.run_dir.spec().virtual_ranks
                assert [row[0] for row in found["status"]["workers"]] == [0]
                assert found["files"] == {"problem": ""}
                told = [e["text"] for e in found["events"]["items"] if e["kind"] == "view"]
                assert told == [e["text"] for e in run.events("view")]
                # This script prints nothing, and a worker's log begins with its first line.
                (run.run_dir.logs / "worker-0-1.log").write_text("a line\n")
                with opener.open(f"{base}/api/log?worker=0", timeout=LIMIT_S) as answer:
                    assert json.load(answer) == {"name": "worker-0-1.log", "lines": ["a line"]}
                go.touch()
                finish(run)
                while state()["link"]["state"] == "live":
                    assert it.poll() is None
            finally:
                it.terminate()
    assert it.returncode == 128 + signal.SIGTERM
    assert not list(tmp_path.glob("holdfast-dashboard-*"))


def test_bad_addresses_and_secrets_get_one_sentence(
    start: Start, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with start("--steps", "400", "--task-s", "0.01", nproc=1) as run:
        run.until_members(1)
        host, port = run.run_dir.address()
        wrong = tmp_path / "secret"
        wrong.write_text("0" * 64)
        wrong.chmod(0o600)
        for at, file, sentence in (
            (f"{host}:{port}", wrong, "it hung up on our proof: has it another secret"),
            (f"{host}:{port}", tmp_path / "nowhere", "nowhere cannot be read: No such file"),
            (f"{host}:1", run.run_dir.secret_file, f"{host}:1 cannot be reached"),
        ):
            assert main(["dashboard", at, "--secret-file", str(file)]) == 2
            error = capsys.readouterr().err
            assert sentence in error
            assert error.count("\n") == 1

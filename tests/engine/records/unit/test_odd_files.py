"""Pipes in the place of files of a run directory or of a store: no process waits for them."""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import pytest

from holdfast.clusters.local.local_manager import LocalManager
from holdfast.engine.core.errors import HoldfastError, UserError, WorldError
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.job_spec import JobSpec
from holdfast.engine.fleet.cluster_manager import PLAN_FILE, read_plan
from holdfast.engine.host.external_checks import checks_file, load_checks, save_checks
from holdfast.engine.records.ledger import DoubtLine, LedgerWriter, ledger_path
from holdfast.engine.records.ledger_claims import RESULT_FILE, claim_of_result
from holdfast.engine.runtime.leadership.journal import FileJournal
from holdfast.engine.runtime.rundir import JOB_FILE, RunDir
from holdfast.engine.state.store.regular_files import append_regular, create_regular
from holdfast.engine.train.script.environment import WorkerEnvironment

pytestmark = pytest.mark.timeout(20)  # a pipe that is waited for hangs


def pipe(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path)
    return path


def test_the_event_log_and_workers_logs_are_not_appended_to_pipes(tmp_path: Path) -> None:
    with pytest.raises(OSError, match="not a regular file"):
        append_regular(pipe(tmp_path / "events.jsonl"))
    for word in (b"one", b"two"):
        with os.fdopen(append_regular(tmp_path / "new"), "ab") as file:
            file.write(word)
    assert (tmp_path / "new").read_bytes() == b"onetwo"


def test_a_file_that_is_written_whole_replaces_what_was_there(tmp_path: Path) -> None:
    linked = tmp_path / "other"
    linked.write_bytes(b"kept")
    (tmp_path / "link").symlink_to(linked)
    for name in ("pipe", "link", "new"):
        path = pipe(tmp_path / name) if name == "pipe" else tmp_path / name
        with os.fdopen(create_regular(path), "wb") as file:
            file.write(b"data")
        assert (path.is_symlink(), path.read_bytes()) == (False, b"data")
    assert linked.read_bytes() == b"kept"


def test_a_ledger_that_is_a_pipe_is_refused(tmp_path: Path) -> None:
    writer = LedgerWriter(pipe(ledger_path(tmp_path, 0, 1)))
    with pytest.raises(WorldError, match="is not a regular file"):
        writer.doubt(DoubtLine(step=0, view=1, again=False))


def test_a_result_that_is_a_pipe_claims_nothing(tmp_path: Path) -> None:
    pipe(tmp_path / RESULT_FILE)
    assert claim_of_result(tmp_path) is None


def test_a_journal_is_saved_although_a_pipe_stands_where_it_is_written(tmp_path: Path) -> None:
    async def save() -> JobRecord | None:
        journal = FileJournal(tmp_path / "journal")
        loaded = await journal.load()
        pipe(tmp_path / "journal.new")
        await journal.save(JobRecord(term=loaded.term))
        journal.close()
        return (await FileJournal(tmp_path / "journal").load()).record

    assert asyncio.run(save()) == JobRecord(term=1)


def test_a_worker_is_not_held_up_by_a_job_document_that_is_a_pipe(tmp_path: Path) -> None:
    run_dir = RunDir(tmp_path)
    run_dir.create(JobSpec(job="a" * 32, cwd="/", script="x.py"), bytes(32))
    pipe(tmp_path / JOB_FILE)
    variables = {"HOLDFAST_RUN_DIR": str(tmp_path), "HOLDFAST_WORKER": "0"}
    with pytest.raises(UserError, match="it is not a regular file"):
        WorkerEnvironment.read(variables)


def test_a_fleet_is_not_held_up_by_pipes(tmp_path: Path) -> None:
    pipe(tmp_path / PLAN_FILE)
    with pytest.raises(UserError, match="is not a regular file"):
        read_plan(RunDir(tmp_path))
    manager = LocalManager(tmp_path / "places", ["local0"], os.getpid(), "hf-")
    pipe(tmp_path / "places" / "hf-1.json")
    with pytest.raises(HoldfastError, match="is not a regular file"):
        asyncio.run(manager.observe())


def test_checks_of_the_site_are_neither_written_to_pipes_nor_read_from_them(
    tmp_path: Path,
) -> None:
    path = pipe(checks_file(tmp_path, "node"))
    with pytest.raises(UserError, match="is not a regular file"):
        load_checks(tmp_path, "node")
    save_checks(tmp_path, "node", ())
    assert json.loads(path.read_bytes()) == []

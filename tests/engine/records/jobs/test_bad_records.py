"""Bad records in jobs of real processes: the same model on any workers, or one sentence."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from conftest import RUN_S, Start, finish
from holdfast.engine.records.ledger_audit import verify
from holdfast.engine.state.store.data_index import index_files, write_index
from holdfast.engine.train.data.sampling import plan_of

RECORD = 64
RECORDS_IN_BLOCK = 64
BLOCK = RECORD * RECORDS_IN_BLOCK


@pytest.fixture
def data(tmp_path: Path) -> tuple[str, str, str]:
    """A file whose second block of five has rotted, its index, and a sound copy."""
    sound, rotten, index = (tmp_path / name for name in ("sound", "rotten", "index"))
    whole = bytearray(random.Random(1).randbytes(5 * BLOCK))
    sound.write_bytes(whole)
    root = index_files(sound, BLOCK, lambda count: None, leave_out=index)
    write_index(root, index)
    whole[BLOCK + 999] ^= 4
    rotten.write_bytes(whole)
    return str(rotten), str(index), str(sound)


def test_the_budget_ends_a_run_with_one_sentence(start: Start, data: tuple[str, str, str]) -> None:
    with start(data[0], data[1], script="records.py", nproc=2) as run:
        assert run.wait(RUN_S) == 1, run.log()
        assert run.leftovers() == []
        assert "Traceback" not in run.log()
        (said,) = {line for line in run.err if "--bad-samples-max" in line}
        assert "raises Damaged: block 1 of 5" in said


@pytest.mark.slow
def test_bad_data_end_a_run_with_one_sentence(start: Start, data: tuple[str, str, str]) -> None:
    with start(data[0], data[1], "--raise", script="records.py", nproc=2) as run:
        assert run.wait(RUN_S) == 1, run.log()
        assert "Traceback" not in run.log()
        assert any("differs from the index: restore it, give it mirrors" in e for e in run.err)


@pytest.mark.slow
def test_a_mirror_makes_a_run_whole(start: Start, data: tuple[str, str, str]) -> None:
    last = []
    for args in (data, (data[2], data[1])):
        with start(*args, "--raise", script="records.py", nproc=2) as run:
            last.append(finish(run))
    assert last[0] == last[1]


@pytest.mark.slow
@pytest.mark.parametrize("kept", ["store", "memory"])
def test_records_stay_quarantined_when_every_worker_is_lost(
    kept: str, start: Start, data: tuple[str, str, str], tmp_path: Path
) -> None:
    """The list of bad records is a part of the state, in checkpoints and in the nodes' memory."""
    faults = tmp_path / "faults.txt"
    faults.write_text("worker 0 step 12 kill\nworker 1 step 12 kill\n")
    go, manifests = tmp_path / "go", tmp_path / "store" / "manifests"
    ways = {
        "store": ("--store", str(tmp_path / "store"), "--save-every", "3"),
        "memory": ("--redundancy", "replicate:1", "--protect-every", "4"),
    }
    budget = ("--bad-samples-max", "64")
    last = []
    for options in (budget, (*budget, *ways[kept], "--faults", str(faults))):
        held = f"--hold={go}"
        with start(data[0], data[1], held, script="records.py", nproc=2, options=options) as run:
            if kept == "store" and last:
                run.until(lambda: [*manifests.glob("*")], RUN_S, "a checkpoint")
            go.touch()
            last.append(finish(run))
        go.unlink()
        report = verify(run.run_dir.path, plan_of)
        assert report.ok, report.findings
        assert report.quarantined == RECORDS_IN_BLOCK
    assert any("every worker was lost" in event["text"] for event in run.events("view"))
    assert not any("from step 0 again" in event["text"] for event in run.events("view"))
    assert last[0] == last[1]


@pytest.mark.slow
def test_bad_records_and_deaths_change_nothing(
    start: Start, data: tuple[str, str, str], tmp_path: Path
) -> None:
    faults = tmp_path / "faults.txt"
    faults.write_text("worker 1 step 3 kill\nworker 0 step 9 kill\n")
    last = []
    for nproc, disturbed in ((1, ()), (2, ()), (4, ()), (2, ("--faults", str(faults)))):
        options = ("--bad-samples-max", "64", *disturbed)
        with start(data[0], data[1], script="records.py", nproc=nproc, options=options) as run:
            last.append(finish(run))
        report = verify(run.run_dir.path, plan_of)
        assert report.ok, report.findings
        assert report.quarantined == RECORDS_IN_BLOCK
        said = [event for event in run.events("record") if "is quarantined" in str(event)]
        assert len(said) >= RECORDS_IN_BLOCK - 2 * len(disturbed)
        assert len(run.events("lost")) == (2 if disturbed else 0)
    assert len(set(last)) == 1

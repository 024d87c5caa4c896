"""Files that earlier versions have written are still read, and no format changes unnoticed.

Each number that a format has had has a kept file in tests/fixtures/formats. docs/compatibility.md
is the policy that these tests hold the code to.
"""

from __future__ import annotations

import ast
import dataclasses
import json
import re
import shutil
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import msgspec
import pytest

from holdfast.cli.main import main
from holdfast.doctor.examination import read_report
from holdfast.engine.core.errors import RELEASE, WireError
from holdfast.engine.host import checks_peers
from holdfast.engine.net.secret import write_run_dir
from holdfast.engine.records import ledger, recordings, time_lines, usage_lines
from holdfast.engine.runtime.job_events import read_events
from holdfast.engine.runtime.leadership import journal
from holdfast.engine.runtime.leadership.journal import read_record
from holdfast.engine.runtime.local_run import LocalRun
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.state.store import data_index, manifest, stripes
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.open import open_storage
from holdfast.engine.train.script.script_state import ScriptState
from holdfast.engine.train.state import restorer
from holdfast.engine.train.state.restorer import PROTECTED_AS
from holdfast.engine.wire import frames, job_document
from places import ROOT, TESTS

SOURCE = ROOT / "src" / "holdfast"
KEPT = TESTS / "fixtures" / "formats"
FIRST, SECOND, THIRD = KEPT / "before-0.2.0", KEPT / "0.2.0", KEPT / "0.3.0"
RUN_S = 100.0  # bounds a hang
STEPS = 30  # the kept job ends after them
Capsys = pytest.CaptureFixture[str]


def magic_number(path: Path) -> int:
    """Return the digit at the end of a magic word."""
    found = re.search(rb"(?:HFJOURN|HFMANIF|HFSHARD|HOLDIDX)(\d)", path.read_bytes())
    assert found is not None
    return int(found[1])


def json_number(path: Path) -> int:
    """Return the format that the first line of JSON, or a whole document of it, has."""
    text = path.read_text()
    head = json.loads(text if path.suffix == ".json" else text.partition("\n")[0])
    return int(head.get("format", 0))


def greeting_number(path: Path) -> int:
    return int.from_bytes(path.read_bytes()[len(frames.MAGIC) : frames.HEAD_BYTES], "big")


def recording_number(path: Path) -> int:
    return recordings.open_recording(path).header.format


def number_of_field(kind: type[msgspec.Struct]) -> int:
    """Return the default of a struct's field `format`."""
    (found,) = (each.default for each in msgspec.structs.fields(kind) if each.name == "format")
    return int(found)


@dataclass(frozen=True)
class Format:
    """Describes a format: its number's constant in the code, and a kept file for each number.

    `since`: the first number that is still read.
    """

    constant: str
    number: int
    kept: dict[int, Path]
    number_in: Callable[[Path], int]
    since: int = 1


LEDGER, TIMES = "run/ledger/worker-00000-00001.jsonl", "run/times/worker-00000-00001.jsonl"
MANIFEST, PACK = "store/manifests/000000000010", "volumes/v1/packs/000000000012-6959fb40ae5a341b-0"
FORMATS = {
    "job document": Format(
        constant="engine/wire/job_document.py:FORMAT",
        number=job_document.FORMAT,
        kept={0: FIRST / "run/job.json", 1: SECOND / "run/job.json"},
        number_in=json_number,
        since=0,  # the first ones had no number
    ),
    "messages": Format(
        constant="engine/wire/frames.py:VERSION",
        number=frames.VERSION,
        kept={2: SECOND / "greeting"},
        number_in=greeting_number,
        since=2,
    ),
    "ledger": Format(
        constant="engine/records/ledger.py:FORMAT",
        number=ledger.FORMAT,
        kept={1: FIRST / LEDGER, 2: SECOND / LEDGER, 3: THIRD / LEDGER},
        number_in=lambda path: json_number(path) or 1,  # the first ones had no number
    ),
    "journal": Format(
        constant="engine/runtime/leadership/journal.py:MAGIC",
        number=int(journal.MAGIC[-1:]),
        kept={1: SECOND / "run/journal"},
        number_in=magic_number,
    ),
    "checkpoints": Format(
        constant="engine/state/store/manifest.py:MAGIC",
        number=int(manifest.MAGIC[-1:]),
        kept={1: SECOND / MANIFEST},
        number_in=magic_number,
    ),
    "erasure-coded volumes": Format(
        constant="engine/state/store/stripes.py:MAGIC",
        number=int(stripes.MAGIC[-1:]),
        kept={1: SECOND / PACK},
        number_in=magic_number,
    ),
    "index of training data": Format(
        constant="engine/state/store/data_index.py:MAGIC",
        number=int(data_index.MAGIC[-1:]),
        kept={1: SECOND / "data.hfindex"},
        number_in=magic_number,
    ),
    "recordings": Format(
        constant="engine/records/recordings.py:format",
        number=number_of_field(recordings.Header),
        kept={1: SECOND / "run/recordings/coordinator-1-1.zst"},
        number_in=recording_number,
    ),
    "times of workers": Format(
        constant="engine/records/time_lines.py:format",
        number=number_of_field(time_lines.ProcessHeader),
        kept={1: SECOND / TIMES},
        number_in=json_number,
    ),
    "use of nodes": Format(
        constant="engine/records/usage_lines.py:format",
        number=number_of_field(usage_lines.UsageHeader),
        kept={1: THIRD / "run/usage/node0.jsonl"},
        number_in=json_number,
    ),
    "reports of `holdfast doctor`": Format(
        constant="engine/host/checks_peers.py:FORMAT",
        number=checks_peers.FORMAT,
        kept={1: SECOND / "doctor.json"},
        number_in=json_number,
    ),
}
# Only processes of one run send these to each other, and all of them have one release: the greeting
# of the messages above sees to that.
WITHIN_A_RUN = {
    "engine/state/memory/arena.py:MAGIC",
    "engine/state/memory/pieces.py:MAGIC",
    "engine/state/memory/node_memory.py:MAGIC",
    "engine/runtime/node/shard_processes.py:MAGIC",
    "tables/server_wire.py:MAGIC",
    "engine/train/exchange/tcp_transport.py:MAGIC",
    "engine/train/state/feeder.py:MAGIC",
    "engine/wire/frames.py:MAGIC",
}
OF_THE_LEDGER = {"engine/records/ledger.py:format"}  # the field that holds FORMAT
OF_A_REPORT = {"engine/host/checks_peers.py:format"}


def gap_in(found: Format) -> str:
    """Return the reason why the kept files of a format do not suffice; empty if they do."""
    needed = set(range(found.since, found.number + 1))
    if lacking := needed - set(found.kept):
        return f"no file is kept of format {min(lacking)}"
    for number, path in found.kept.items():
        if found.number_in(path) != number:
            return f"{path.name} has format {found.number_in(path)}, not {number}"
    return ""


@pytest.mark.parametrize("name", FORMATS)
def test_a_file_is_kept_of_each_number_that_a_format_has_had(name: str) -> None:
    found = FORMATS[name]
    assert gap_in(found) == "", f"{name}: see docs/compatibility.md#when-a-format-changes"
    raised = dataclasses.replace(found, number=found.number + 1)
    assert gap_in(raised) == f"no file is kept of format {found.number + 1}"
    copied = {**found.kept, found.number + 1: found.kept[found.number]}
    assert "has format" in gap_in(dataclasses.replace(raised, kept=copied))


def format_constants(path: Path) -> set[str]:
    """Return the constants and fields of a module that look like the number of a format."""
    tree, names = ast.parse(path.read_text()), set()
    for node in tree.body:
        targets = node.targets if isinstance(node, ast.Assign) else []
        targets = [node.target] if isinstance(node, ast.AnnAssign) else targets
        names |= {each.id for each in targets if isinstance(each, ast.Name)}
        for field in node.body if isinstance(node, ast.ClassDef) else ():
            if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name):
                names |= {field.target.id} if field.value is not None else set()
    return names & {"MAGIC", "FORMAT", "VERSION", "format"}


def test_every_format_in_the_code_is_known_here() -> None:
    found = {
        f"{path.relative_to(SOURCE)}:{name}"
        for path in SOURCE.rglob("*.py")
        for name in format_constants(path)
    }
    known = {each.constant for each in FORMATS.values()}
    assert found == known | WITHIN_A_RUN | OF_THE_LEDGER | OF_A_REPORT


def test_the_policy_names_every_format_with_its_numbers() -> None:
    page = (ROOT / "docs" / "compatibility.md").read_text()
    for name, found in FORMATS.items():
        (row,) = re.findall(rf"^\| {re.escape(name)} \|.*$", page, re.MULTILINE)
        assert row.split(" | ")[2] == str(found.number), row


@pytest.mark.parametrize("folder", [FIRST, SECOND], ids=lambda path: path.name)
def test_a_kept_job_is_read(folder: Path) -> None:
    spec = RunDir(folder / "run").spec()
    assert (spec.script, spec.workers.nproc, spec.workers.virtual) == ("train.py", 2, 4)
    assert spec.checkpoints.every == 5
    record = read_record(folder / "run/journal")
    assert record is not None
    assert record.view is not None
    assert [int(each.worker) for each in record.view.members] == [0, 1]


@pytest.mark.parametrize("folder", [FIRST, SECOND, THIRD], ids=lambda path: path.name)
def test_the_ledger_of_a_kept_run_proves_its_steps(folder: Path, capsys: Capsys) -> None:
    assert main(["ledger", "verify", str(folder / "run")]) == 0
    told = capsys.readouterr().out
    assert "13 steps, 104 samples" in told
    assert "every sample was used exactly once" in told


@pytest.mark.parametrize("older", [FIRST, SECOND], ids=lambda path: path.name)
def test_ledgers_of_two_formats_are_compared(older: Path, capsys: Capsys) -> None:
    assert main(["compare", str(older / "run"), str(THIRD / "run")]) == 0
    told = capsys.readouterr().out
    assert "do not differ in their 13 common steps" in told
    assert "gradients and sums were not compared" in told


@pytest.mark.parametrize(
    "store",
    [
        str(FIRST / "store"),
        str(SECOND / "store"),
        "ec:2+1:" + ",".join(str(SECOND / "volumes" / name) for name in ("v1", "v2", "v3")),
    ],
    ids=["before", "now", "volumes"],
)
def test_every_byte_of_kept_checkpoints_is_read(store: str) -> None:
    if store.startswith("ec:"):
        pytest.importorskip("pyeclib")
    checkpoints = Checkpoints(open_storage(store))
    newest = checkpoints.steps()[-1]
    names = {entry.name for entry in checkpoints.manifest(newest).entries}
    assert {"model.bias", "model.weight"} <= names
    assert checkpoints.verify(newest) == []


@pytest.mark.parametrize("folder", [FIRST, SECOND], ids=lambda path: path.name)
def test_a_kept_event_log_is_read(folder: Path, capsys: Capsys) -> None:
    events = read_events(folder / "run/events.jsonl")
    assert {"view", "save"} <= {each["kind"] for each in events}
    assert main(["events", str(folder / "run")]) == 0
    assert "the job starts" in capsys.readouterr().out
    assert main(["explain", str(folder / "run")]) == 0


def test_an_event_log_may_have_fields_that_are_not_known(tmp_path: Path) -> None:
    line = {"time": 1.0, "kind": "view", "text": "view 1", "unheard": {"of": 1}}
    (tmp_path / "events.jsonl").write_text(json.dumps(line) + "\n")
    assert read_events(tmp_path / "events.jsonl") == [line]


def test_a_kept_recording_is_read_and_replayed_or_refused_in_a_sentence(capsys: Capsys) -> None:
    """Decisions hold for the code that made them; a changed coordinator may decide otherwise."""
    found = recordings.open_recording(SECOND / "run/recordings/coordinator-1-1.zst")
    assert (found.header.release, found.header.term, found.problem) == ("0.2.0", 1, "")
    assert len(found.records) > 10
    status = main(["incident", "replay", str(SECOND / "run")])
    told = capsys.readouterr()
    if status == 2:
        (line,) = told.err.splitlines()
        assert "cannot be replayed" in line
    else:
        assert "coordinator-1-1.zst: term 1" in told.out


def test_the_kept_use_of_a_node_is_read() -> None:
    (found,) = usage_lines.read_all_usage(THIRD / "run")
    assert found.header.cores == 2
    assert [sorted(line.workers) for line in found.lines][-1] == [0, 1]


def test_kept_times_are_read() -> None:
    found = time_lines.read_times(SECOND / "run")
    assert sorted(each.worker for each in found) == [0, 1]


def test_a_kept_index_still_finds_damage(tmp_path: Path, capsys: Capsys) -> None:
    shutil.copytree(SECOND / "data", tmp_path / "data")
    shutil.copy(SECOND / "data.hfindex", tmp_path)
    command = ["data", "verify", str(tmp_path / "data")]
    assert main(command) == 0
    (tmp_path / "data/a.bin").write_bytes(b"twelve bites")
    assert main(command) == 1
    assert "a.bin" in capsys.readouterr().out


def test_a_kept_report_of_the_doctor_is_read() -> None:
    found = read_report((SECOND / "doctor.json").read_bytes())
    assert (found.host, found.facts["holdfast"]) == ("node1", "0.2.0")
    assert found.speeds["arithmetic-numpy"] > 0


def test_another_release_on_the_wire_is_named_and_refused() -> None:
    with pytest.raises(WireError) as caught:
        frames.read_greeting((FIRST / "greeting").read_bytes(), "client")
    assert f"the client is Holdfast '0.1.0' and this is {RELEASE!r}" in str(caught.value)
    frames.check_start((SECOND / "greeting").read_bytes(), "client")


def resume_kept(folder: Path, path: Path) -> LocalRun:
    """Return the continuation of a kept run, in a copy at this path."""
    shutil.copytree(folder, path, dirs_exist_ok=True)
    shutil.copy(KEPT / "train.py", path)
    run = RunDir(path / "run")
    run.logs.mkdir(exist_ok=True)
    run.job.write_text(run.job.read_text().replace("/srv/train", str(path)))
    write_run_dir(run.path, b"s" * 32)
    return LocalRun(run.path, [], [], command=["resume", str(run.path)])


@pytest.mark.slow
def test_a_kept_run_goes_on(tmp_path: Path, capsys: Capsys) -> None:
    with resume_kept(SECOND, tmp_path) as resumed:
        assert resumed.wait(RUN_S) == 0, resumed.log()
    assert any("from the checkpoint of step 10" in line for line in resumed.err)
    assert main(["ledger", "verify", str(resumed.run_dir.path)]) == 0
    told = capsys.readouterr().out
    assert f"{STEPS} steps, {STEPS * 8} samples" in told
    assert "every sample was used exactly once" in told


@pytest.mark.slow
def test_a_run_from_before_the_first_release_is_refused_in_a_sentence(tmp_path: Path) -> None:
    """Its checkpoints lack the values that its workers exchanged at an epoch's start."""
    with resume_kept(FIRST, tmp_path) as resumed:
        assert resumed.wait(RUN_S) == 1
    assert resumed.err[-1].endswith("use the version that saved it (train.py, line 17)")
    for path in (FIRST / "store").rglob("*"):
        kept = tmp_path / path.relative_to(FIRST)
        assert path.is_dir() or "saving" in path.parts or kept.read_bytes() == path.read_bytes()


def test_the_scripts_progress_in_a_kept_checkpoint_is_known() -> None:
    """This part of a checkpoint has no number, so a new field in it needs a default."""
    saved = restorer._read(Checkpoints(open_storage(str(SECOND / "store"))), 10)
    progress = ScriptState()
    none_trained = {"trained": progress.trained.state_dict()}  # there is no model here
    progress.load_state_dict({**saved[PROTECTED_AS], **none_trained})
    assert progress.steps == 10

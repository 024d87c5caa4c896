"""What another release has written is called so, never damaged, and none of it is lost."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from fuzz.targets import STATUS
from holdfast.cli.main import main
from holdfast.engine.core.errors import Damaged, OtherRelease, UserError, WireError
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.worker_status import WorkerStatus
from holdfast.engine.runtime.leadership import journal
from holdfast.engine.runtime.leadership.journal import FileJournal
from holdfast.engine.runtime.rundir import RunDir
from holdfast.engine.state.store import data_index, manifest, stripes
from holdfast.engine.state.store.data_index import SampleIndex
from holdfast.engine.state.store.manifest import Manifest
from holdfast.engine.wire.messages import decode, encode
from support import SPEC

NEWER = "was written by a newer Holdfast (format 2); this one reads format 1: upgrade"
MANIFEST = Manifest(step=3, time=1.0, token="t", packs=(), entries=())
FOOTER = stripes.Footer(
    version=(1, 2), k=2, m=1, number=0, size=0, shard_bytes=stripes.ALIGN, table=b""
)


def newer_manifest() -> object:
    body = manifest.encode(MANIFEST)[: -manifest.DIGEST_BYTES].replace(b"MANIF1", b"MANIF2")
    return manifest.decode(body + manifest.digest(body), "manifests/3")


def newer_footer() -> object:
    head = stripes.encode_footer(FOOTER).rstrip(b"\0").replace(b"SHARD1", b"SHARD2")
    end = len(stripes.MAGIC) + 2 + int.from_bytes(head[len(stripes.MAGIC) :][:2], "little")
    return stripes.decode_footer(head[:end] + manifest.digest(head[:end]), 0, "a shard")


def newer_journal() -> object:
    return journal.unseal(journal.seal(JobRecord(term=1)).replace(b"HFJOURN1", b"HFJOURN2"))


def newer_index() -> object:
    body = data_index.encode_index(SampleIndex(digests=b""))[: -data_index.DIGEST_BYTES]
    body = body.replace(b"HOLDIDX1", b"HOLDIDX2")
    return data_index.decode_index(body + data_index.block_digest(body), "an index")


@pytest.mark.parametrize("read", [newer_manifest, newer_footer, newer_journal, newer_index])
def test_a_newer_format_is_named(read: Callable[[], object]) -> None:
    with pytest.raises((OtherRelease, UserError)) as caught:
        read()
    assert NEWER in str(caught.value)


def test_a_newer_magic_word_over_other_bytes_is_damage() -> None:
    data = manifest.encode(MANIFEST).replace(b"MANIF1", b"MANIF2")
    with pytest.raises(Damaged, match="is damaged"):
        manifest.decode(data, "manifests/3")


def with_more(value: object, **more: object) -> bytes:
    """Encode a value as a release would that knows more fields of it."""
    return msgspec.msgpack.encode({**msgspec.to_builtins(value), **more})


def test_unknown_fields_are_refused() -> None:
    manifest_file = manifest._seal(with_more(MANIFEST, secret_sauce=1))
    with pytest.raises(OtherRelease, match=r"manifests/3 .*unknown field `secret_sauce`"):
        manifest.decode(manifest_file, "manifests/3")
    message = encode(STATUS)[:1] + with_more(STATUS, secret_sauce=1)
    with pytest.raises(WireError, match="unknown field `secret_sauce`"):
        decode(message, WorkerStatus)


def test_an_unknown_field_is_refused_however_deep() -> None:
    entry: dict[str, Any] = {"name": "n", "size": 0, "digests": b"", "runs": (), "colour": "red"}
    data = manifest._seal(with_more(MANIFEST, entries=(entry,)))
    with pytest.raises(OtherRelease, match=r"unknown field `colour` - at `\$\.entries\[0\]`"):
        manifest.decode(data, "manifests/3")


def test_a_coordinator_leaves_the_journal_of_another_release_where_it_is(tmp_path: Path) -> None:
    path = tmp_path / "journal"
    newer = journal.seal(JobRecord(term=1)).replace(b"HFJOURN1", b"HFJOURN2")
    path.write_bytes(newer)
    with pytest.raises(UserError) as caught:
        asyncio.run(FileJournal(path).load())
    assert NEWER in str(caught.value)
    assert str(path) in str(caught.value)
    assert path.read_bytes() == newer


def test_a_job_document_of_a_newer_release(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create(SPEC, b"")
    document = json.loads(run_dir.job.read_text())
    assert document.pop("format") == 1
    run_dir.job.write_text(json.dumps(document))
    assert run_dir.spec() == SPEC, "the first documents had no format"
    run_dir.job.write_text(json.dumps({**document, "format": 2, "unheard": {"of": 1}}))
    assert main(["resume", str(run_dir.path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert NEWER in line
    assert "damaged" not in line


def test_a_run_whose_journal_is_of_a_newer_release_is_not_resumed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    run_dir = RunDir(tmp_path / "run")
    run_dir.create(SPEC, b"")
    newer = journal.seal(JobRecord(term=1)).replace(b"HFJOURN1", b"HFJOURN2")
    run_dir.journal.write_bytes(newer)
    assert main(["resume", str(run_dir.path)]) == 2
    (line,) = capsys.readouterr().err.splitlines()
    assert NEWER in line


def test_a_ledger_of_a_newer_release(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "ledger").mkdir()
    header = {"kind": "header", "format": 4, "everything": "else"}
    (tmp_path / "ledger" / "worker-00000-00001.jsonl").write_text(json.dumps(header) + "\n")
    assert main(["ledger", "verify", str(tmp_path)]) == 2
    assert "a newer Holdfast (format 4); this one reads format 3" in capsys.readouterr().err

"""Numbers that cannot be right and files of odd kinds: one sentence, no hang, no traceback."""

from __future__ import annotations

import dataclasses
import os
from pathlib import Path

import pytest
import zstandard

from holdfast.cli.main import main
from holdfast.core.errors import Damaged, UserError
from holdfast.observe.ledger_audit import verify as verify_ledger
from holdfast.runtime.coordinate.journal import read_record
from holdfast.store import compression
from holdfast.store.checkpoint_reading import verify
from holdfast.store.data_index import open_index
from holdfast.store.files import FileStorage
from holdfast.store.manifest import (
    CHUNK_BYTES,
    DIGEST_BYTES,
    Entry,
    Manifest,
    Run,
    decode,
    digest,
    encode,
    manifest_name,
)
from holdfast.store.regular_files import read_regular
from holdfast.train.data.sampling import plan_of

GIB = 1 << 30
HANG_S = 20  # an odd file must not be waited for


def entry(size: int, chunks: int = 1, **more: object) -> Entry:
    runs = (Run(chunks=chunks, pack=0, offset=0),) if chunks else ()
    found = Entry(name="w", size=size, digests=bytes(DIGEST_BYTES) * chunks, runs=runs)
    return dataclasses.replace(found, **more)  # type: ignore[arg-type]  # fields of Entry


def manifest(only: Entry, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    return Manifest(
        step=1, time=0.0, token="t", packs=("p",), entries=(only,), chunk_bytes=chunk_bytes
    )


@pytest.mark.parametrize(
    ("found", "problem"),
    [
        (manifest(entry(8), chunk_bytes=1 << 62), f"chunks of {1 << 62} bytes"),
        (manifest(entry(200 * GIB), chunk_bytes=1 << 40), f"chunks of {1 << 40} bytes"),
        (manifest(entry(8), chunk_bytes=0), "chunks of 0 bytes"),
        (manifest(entry(200 * GIB)), f"w has {200 * GIB} bytes and 16 of digests"),
        (manifest(entry(8, dtype="float32", shape=(3,))), "8 bytes, and is a float32 of shape [3]"),
        (manifest(entry(8, dtype="float32", shape=(2, -1))), "is a float32 of shape [2, -1]"),
        (manifest(entry(8, dtype="float32", shape=(-1, -2))), "float32 of shape [-1, -2]"),
        (manifest(entry(8, dtype="float99", shape=(3,))), "is a float99 of shape [3]"),
        (manifest(entry(8, shape=(2,))), "w has a shape and no type"),
        (
            manifest(entry(8, dtype="int32", shape=(2,), offset=(3,), whole=(4,))),
            "w lies at [3], outside of [4]",
        ),
        (
            manifest(entry(8, dtype="int32", shape=(2,), offset=(0, 0), whole=(4, 4))),
            "w is a part of [4, 4] at [0, 0]",
        ),
    ],
)
def test_a_manifest_with_numbers_that_cannot_be_right_is_refused(
    found: Manifest, problem: str
) -> None:
    with pytest.raises(Damaged) as refused:
        decode(encode(found), "manifests/1")
    assert str(refused.value).startswith("manifests/1 contradicts itself: ")
    assert problem in str(refused.value)


def test_a_part_of_a_larger_tensor_is_accepted() -> None:
    part = entry(8, dtype="int32", shape=(2, 1), offset=(2, 0), whole=(4, 1))
    assert decode(encode(manifest(part)), "x").entries == (part,)
    empty = entry(0, chunks=0, dtype="float32", shape=(0, 7))
    assert decode(encode(manifest(empty)), "x").entries == (empty,)


def test_what_expands_to_more_than_it_should_is_refused() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    place = bytearray(100)
    problem = compression.expand(memoryview(bomb), memoryview(place))
    assert problem == f"it has {64 << 20} bytes, decompressed, and not 100"
    # The same with a header that lies about it.
    at = bomb.index((64 << 20).to_bytes(4, "little"))
    liar = bomb[:at] + (100).to_bytes(4, "little") + bomb[at + 4 :]
    assert "cannot be decompressed" in compression.expand(memoryview(liar), memoryview(place))


def odd(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.timeout(HANG_S)
def test_a_pipe_among_the_packs_is_damage_and_nobody_waits_for_it(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    data = b"8 bytes."
    odd(tmp_path / "p")
    found = manifest(entry(8, digests=digest(data)))
    (bad,) = verify(storage, found)
    assert (bad.passing, "not a regular file" in bad.why) == (False, True)
    odd(tmp_path / manifest_name(1))
    with pytest.raises(Damaged, match="is not a regular file: remove it"):
        storage.size(manifest_name(1))


@pytest.mark.timeout(HANG_S)
def test_pipes_in_the_place_of_other_files_are_refused_in_a_sentence(tmp_path: Path) -> None:
    pipe = odd(tmp_path / "pipe")
    with pytest.raises(Damaged, match="cannot be read: it is not a regular file"):
        read_record(pipe)
    with pytest.raises(UserError, match="it is not a regular file"):
        open_index(pipe)
    odd(tmp_path / "run" / "ledger" / "worker0.1.jsonl")
    report = verify_ledger(tmp_path / "run", plan_of)
    assert not report.ok


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "large").write_bytes(bytes(101))
    assert read_regular(tmp_path / "large", 101) == bytes(101)
    with pytest.raises(OSError, match="it has 101 bytes, more than the 100 that can be right"):
        read_regular(tmp_path / "large", 100)


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["run", "--nproc", "999999999", "x.py"], "--nproc 999999999 must be from 1 to 1024"),
        (["run", "--procs-per-worker", "99999", "x.py"], "must be from 1 to 1024"),
        (["run", "--nodes-per-worker", "99999", "x.py"], "must be from 1 to 1024"),
        (["run", "--threads", "99999", "x.py"], "--threads 99999 must be from 1 to 1024"),
        (["run", "--spares", "99999", "x.py"], "--spares 99999 must be from 0 to 1024"),
        (["run", "--virtual", "9999999", "x.py"], "--virtual 9999999 must be from 1 to 100000"),
        (["run", "--nodes-min", "9999999", "x.py"], "must be from 1 to 100000"),
        (["sim", "--seed", "1", "--nodes", "99999999"], "give 2 to 100000"),
        (["sim", "--seed", "9" * 5000], "is not a seed"),
        (["sim", "--seeds", "0:" + "9" * 5000], "is not a range of seeds"),
    ],
)
def test_counts_without_measure_are_refused(
    args: list[str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = main(args)
    except SystemExit as end:  # argparse's way
        code = int(end.code or 0)
    said = capsys.readouterr().err
    assert code in (1, 2)
    assert words in said
    assert "Traceback" not in said

"""Numbers that cannot be right and files of odd kinds: one sentence, no hang, no traceback."""

from __future__ import annotations

import contextlib
import dataclasses
import os
from pathlib import Path

import msgspec
import pytest
import torch
import zstandard

from holdfast.cli.main import main
from holdfast.engine.core.errors import Damaged, UserError, WireError
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.redundancy import PIECES_MAX
from holdfast.engine.core.types import AgentId, Incarnation, ViewNumber, WorkerId
from holdfast.engine.core.views import Member, View
from holdfast.engine.records.ledger_audit import verify as verify_ledger
from holdfast.engine.runtime.leadership.journal import read_record, seal, unseal
from holdfast.engine.state.memory.arena import (
    FIRST,
    PARTS_MAX,
    STATE,
    ArenaReading,
    PieceArena,
    PieceEntry,
    PieceShelf,
    Table,
    problem_of_table,
)
from holdfast.engine.state.store.checkpoint_reading import verify
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.data_index import open_index
from holdfast.engine.state.store.files import FileStorage
from holdfast.engine.state.store.manifest import (
    CHUNK_BYTES,
    CHUNK_BYTES_MAX,
    DIGEST_BYTES,
    SKELETON,
    Entry,
    Manifest,
    Run,
    decode,
    digest,
    encode,
    expand,
    manifest_name,
    pack_name,
)
from holdfast.engine.state.store.regular_files import read_regular
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.data.sampling import plan_of
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.state.restorer import Restorer, load_saved
from holdfast.lab.contracts.memory_transport import MemoryNetwork

GIB = 1 << 30
HANG_S = 20  # an odd file must not be waited for


def entry(size: int, chunks: int = 1, **more: object) -> Entry:
    runs = (Run(chunks=chunks, pack=0, offset=0),) if chunks else ()
    found = Entry(name="w", size=size, digests=bytes(DIGEST_BYTES) * chunks, runs=runs)
    return dataclasses.replace(found, **more)  # type: ignore[arg-type]  # fields of Entry


def manifest(only: Entry, chunk_bytes: int = CHUNK_BYTES) -> Manifest:
    return Manifest(
        step=1, time=0.0, token="t", packs=("packs/p",), entries=(only,), chunk_bytes=chunk_bytes
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


def test_compressed_data_that_expands_to_more_than_its_size_is_refused() -> None:
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))
    place = bytearray(100)
    problem = expand(memoryview(bomb), memoryview(place))
    assert problem == f"it has {64 << 20} bytes, decompressed, and not 100"
    # The same with a header that lies about it.
    at = bomb.index((64 << 20).to_bytes(4, "little"))
    liar = bomb[:at] + (100).to_bytes(4, "little") + bomb[at + 4 :]
    assert "cannot be decompressed" in expand(memoryview(liar), memoryview(place))


def large_checkpoint(folder: Path) -> Checkpoints:
    """A checkpoint whose every byte is right: a skeleton, and a tensor of 200 GiB of zeros.

    All chunks of the tensor are one and the same in the pack.
    """
    count, chunk = 200 * GIB // CHUNK_BYTES_MAX, bytes(CHUNK_BYTES_MAX)
    stored = zstandard.ZstdCompressor().compress(chunk)
    tensor = torch.empty(200 * GIB // 4, device="meta")
    skeleton = state.flatten({"model": {"w": tensor}}, "state")[0]
    same = Run(chunks=1, pack=0, offset=0, stored=(len(stored),))
    entries = (
        Entry(
            name=SKELETON,
            size=len(skeleton),
            digests=digest(skeleton),
            runs=(Run(chunks=1, pack=0, offset=len(stored)),),
        ),
        Entry(
            name="w",
            size=200 * GIB,
            digests=digest(chunk) * count,
            runs=(same,) * count,
            dtype="float32",
            shape=tuple(tensor.shape),
        ),
    )
    storage, pack = FileStorage(folder), pack_name(1, "t", 0)
    storage.put(pack, [stored, skeleton])
    found = Manifest(
        step=1, time=0.0, token="t", packs=(pack,), entries=entries, chunk_bytes=CHUNK_BYTES_MAX
    )
    storage.put(manifest_name(1), [encode(found)])
    return Checkpoints(storage)


def test_a_state_that_does_not_fit_into_memory_is_refused_before_it_is_loaded(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    store = large_checkpoint(tmp_path)
    words = "the checkpoint of step 1 takes 214.7 GB of memory, and "
    model = torch.nn.Linear(1, 1)
    alone = Layout(0, 1, 1, ((0,),), ((),), (WorkerId(0),))
    restorer = Restorer(store, LoadedState({"model": model}))
    with pytest.raises(UserError, match=words):
        restorer.restore(1, MemoryNetwork().transport(), alone)
    with pytest.raises(UserError, match=words):
        load_saved(str(tmp_path), 1, {"model": model})
    assert main(["ckpt", "export", str(tmp_path), "1", str(tmp_path / "out")]) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_a_skeleton_that_names_an_impossible_tensor_is_damaged() -> None:
    for shape in ((1 << 62, 1 << 62), (1 << 70,), (-1,)):
        with pytest.raises(WireError, match="names an impossible tensor"):
            state.size_of(("float32", shape))


def test_a_table_of_pieces_may_go_to_its_limits() -> None:
    last = (PARTS_MAX - 1, PIECES_MAX - 1)
    for parts, piece, is_right in (
        (PARTS_MAX, last, True),
        (PARTS_MAX + 1, last, False),
        (1, (0, 0), True),
        (0, (0, 0), False),
        (PARTS_MAX, (PARTS_MAX, 0), False),
        (1, (0, PIECES_MAX), False),
    ):
        table = Table(5, (PieceShelf(1, parts, (piece,), 0),), ())
        assert (problem_of_table(table) == "") == is_right, (parts, piece)


PIECE = PieceEntry(STATE, 1, 4, 30, 10, FIRST, (bytes(16),) * 2)
SHELF = PieceShelf(1, 3, ((0, 0), (2, 1)), 0)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"shelves": (PieceShelf(1, 1 << 40, ((0, 0),), 0),)}, f"a shelf of {1 << 40} parts"),
        ({"shelves": (PieceShelf(1, 3, ((7, 0),), 0),)}, "with piece 0 of part 7"),
        ({"shelves": (PieceShelf(-1, 3, (), 0),)}, "a shelf of view -1"),
        ({"entries": (PieceEntry("x", 1, 4, 30, 10, FIRST, ()),)}, "of kind 'x'"),
        ({"entries": (PieceEntry(STATE, 1, -4, 30, 10, FIRST, ()),)}, "step -4"),
        ({"entries": (PieceEntry(STATE, 1, 4, 1 << 60, 10, FIRST, ()),)}, "an entry of view 1"),
        ({"entries": (PieceEntry(STATE, 1, 4, 30, 200 * GIB, FIRST, (bytes(16),)),)}, "up to byte"),
        ({"entries": (PieceEntry(STATE, 1, 4, 30, 10, -5, (bytes(16),)),)}, "at byte -5"),
        ({"entries": (PieceEntry(STATE, 1, 4, 30, 10, FIRST, (b"x",)),)}, "of another length"),
        ({"forgotten": (1, -(1 << 60))}, "has forgotten"),
    ],
)
def test_a_table_of_pieces_with_absurd_numbers_is_damaged(
    changed: dict[str, object], problem: str
) -> None:
    table = Table(5, (SHELF,), (PIECE,))
    found = msgspec.structs.replace(table, **changed)
    assert problem_of_table(table, FIRST + 20) == ""
    assert problem in problem_of_table(found, FIRST + 20)
    descriptor = os.memfd_create("test")
    arena, reading = PieceArena(descriptor, 5, 20), ArenaReading(descriptor)
    with contextlib.closing(reading):
        arena._write(table, [])
        assert reading.table() == table
        arena._write(found, [])
        arena._write(found, [])
        with pytest.raises(Damaged, match="both tables of a worker's pieces are damaged"):
            reading.table()


VIEW = View(
    number=ViewNumber(3),
    members=(Member(worker=WorkerId(0), agent=AgentId("a"), incarnation=Incarnation(1)),),
    owners=(WorkerId(0), WorkerId(0)),
    resume_step=7,
    leader=WorkerId(0),
)


@pytest.mark.parametrize(
    ("changed", "problem"),
    [
        ({"term": -1}, "term -1"),
        ({"workers_named": 1 << 62}, f"{1 << 62} workers named"),
        ({"saved": (1 << 60,)}, f"a checkpoint of step {1 << 60}"),
        ({"view": dataclasses.replace(VIEW, number=ViewNumber(1 << 62))}, f"view {1 << 62}"),
        ({"view": dataclasses.replace(VIEW, resume_step=-1)}, "begins at step -1"),
        ({"view": dataclasses.replace(VIEW, owners=(WorkerId(9),))}, "worker 9, which is no"),
        ({"view": dataclasses.replace(VIEW, leader=WorkerId(2))}, "worker 2, which is no"),
        ({"view": dataclasses.replace(VIEW, members=VIEW.members * 2)}, "lists a member twice"),
    ],
)
def test_a_journal_with_absurd_numbers_is_damaged(changed: dict[str, object], problem: str) -> None:
    right = JobRecord(term=1, view=VIEW, views_used=ViewNumber(3), workers_named=1)
    assert unseal(seal(right)) == right
    with pytest.raises(Damaged, match="it contradicts itself: ") as refused:
        unseal(seal(dataclasses.replace(right, **changed)))  # type: ignore[arg-type]
    assert problem in str(refused.value)


def odd(path: Path) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    os.mkfifo(path)
    return path


@pytest.mark.timeout(HANG_S)
def test_a_pipe_among_the_packs_is_damage_and_nobody_waits_for_it(tmp_path: Path) -> None:
    storage = FileStorage(tmp_path)
    data = b"8 bytes."
    odd(tmp_path / "packs" / "p")
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


@pytest.mark.parametrize(
    ("args", "words"),
    [
        (["slurm", "--nodes", "0"], "--nodes 0: at least 1 node is needed"),
        (["slurm", "--nodes", "99999999"], "must be from 1 to 100000"),
        (["slurm", "--drain-s", "1e300"], "--drain-s 1e+300 must be from 0 to 65535"),
        (["slurm", "--drain-s", "nan"], "--drain-s nan must be from 0 to 65535"),
        (["slurm", "--port", "99999"], "--port 99999 must be from 0 to 65535"),
        (["slurm", "--host", "a b"], "--host 'a b' is no name or address of a machine"),
        (["slurm", "--check-limit-s", "inf"], "--check-limit-s inf must be above 0"),
        (["slurm", f"--sbatch=-{'x' * 5000}"], "is too long: 4096 characters at most"),
        (["ray", "--cpus", "1e300"], "--cpus 1e+300: an agent needs 0 or more, at most 100000"),
        (["ray", "--gpus", "-1"], "--gpus -1: an agent needs 0 or more"),
        (["ray", "--port", "-7"], "--port -7 must be from 0 to 65535"),
        (["k8s", "--image", "a b"], "--image 'a b' cannot be right: name one such as"),
        (["k8s", "--image", "i", "--cpu", "1e99"], "--cpu '1e99' cannot be right"),
        (["k8s", "--image", "i", "--memory", "0Gi"], "--memory '0Gi' cannot be right"),
        (["k8s", "--image", "i", "--gpus", "9" * 30], "cannot be right: give a whole number"),
        (["k8s", "--image", "i", "--namespace", "x" * 64], "63 characters at most"),
        (["k8s", "--image", "i", "--claim", "A_b"], "give the name of a PersistentVolumeClaim"),
        (["k8s", "--image", "i", "--spread", "a/b/c"], "--spread 'a/b/c' cannot be right"),
        (["k8s", "--image", "i", "--port", "0"], "--port 0: pods must know the port"),
    ],
)
def test_options_that_no_cluster_can_meet_are_refused(
    args: list[str], words: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    script, run_dir = tmp_path / "x.py", tmp_path / "run"
    script.touch()
    try:
        code = main(["launch", *args, "--run-dir", str(run_dir), str(script)])
    except SystemExit as end:  # argparse's way
        code = int(end.code or 0)
    said = capsys.readouterr().err
    assert code in (1, 2)
    assert words in said
    assert "Traceback" not in said
    assert not run_dir.exists()

"""Indexes of training data: no flipped bit is missed, and bytes that are no index are refused."""

from __future__ import annotations

import json
import os
import pickle
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import TensorDataset

import holdfast
from holdfast.engine.commands.data_command import main
from holdfast.engine.core.errors import Damaged, UserError
from holdfast.engine.state.store.data_index import (
    FileIndex,
    SampleIndex,
    VerifiedFiles,
    decode_index,
    encode_index,
    index_files,
    open_index,
    read_index,
    verify_files,
    write_index,
)
from holdfast.engine.train.data.sample_digest import index_samples, sample_digest

BLOCK = 4096
PLACES = 200
NOWHERE = Path("nowhere")


def nothing(count: int) -> None:
    """Ignore the progress."""


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """Make three files: of several blocks, of a block that is not full, and empty."""
    root, chance = tmp_path / "data", random.Random(1)
    (root / "part").mkdir(parents=True)
    (root / "a.bin").write_bytes(chance.randbytes(5 * BLOCK + 17))
    (root / "part" / "b.bin").write_bytes(chance.randbytes(100))
    (root / "part" / "empty").write_bytes(b"")
    return root


def written(root: Path, path: Path) -> FileIndex:
    index = index_files(root, BLOCK, nothing, leave_out=NOWHERE)
    write_index(index, path)
    return index


def flip(path: Path, place: int) -> None:
    """Flip one bit of a file; `place` is its number."""
    data = bytearray(path.read_bytes())
    data[place // 8] ^= 1 << place % 8
    path.write_bytes(data)


def test_every_flip_in_a_file_is_found(tree: Path, tmp_path: Path) -> None:
    index, chance = written(tree, tmp_path / "index"), random.Random(2)
    assert not list(verify_files(tree, index, nothing))
    files = [tree / "a.bin", tree / "part" / "b.bin"]
    for _ in range(PLACES):
        path = chance.choice(files)
        place = chance.randrange(8 * path.stat().st_size)
        flip(path, place)
        (found,) = verify_files(tree, index, nothing)
        assert (tree / found.name, found.block) == (path, place // 8 // BLOCK)
        with pytest.raises(Damaged, match=f"block {found.block} of"):
            VerifiedFiles(tree, tmp_path / "index").read(place // 8, 1, found.name)
        flip(path, place)
    assert not list(verify_files(tree, index, nothing))


def test_every_flip_in_an_index_is_found(tree: Path, tmp_path: Path) -> None:
    data, chance = bytearray(encode_index(written(tree, tmp_path / "index"))), random.Random(3)
    for _ in range(PLACES):
        place = chance.randrange(8 * len(data))
        data[place // 8] ^= 1 << place % 8
        with pytest.raises(UserError):
            decode_index(bytes(data), "x")
        data[place // 8] ^= 1 << place % 8
    for length in range(len(data)):
        with pytest.raises(UserError):
            decode_index(bytes(data[:length]), "x")
    decode_index(bytes(data), "x")


def test_every_flip_in_a_sample_changes_its_digest() -> None:
    chance = random.Random(4)
    array = np.frombuffer(chance.randbytes(3000), np.uint8).copy()
    sample = {"x": torch.from_numpy(array[:1000]), "y": (array[1000:2000], 7), "z": "text"}
    expected = sample_digest({**sample, "b": array[2000:].tobytes()})
    for _ in range(PLACES):
        place = chance.randrange(8 * len(array))
        array[place // 8] ^= 1 << place % 8
        assert sample_digest({**sample, "b": array[2000:].tobytes()}) != expected
        array[place // 8] ^= 1 << place % 8
    assert sample_digest({**sample, "b": array[2000:].tobytes()}) == expected


@dataclass
class Pair:
    left: int
    right: float


UNLIKE: list[Any] = [
    *(None, True, False, 0, 1, -1, 2**80, 0.0, -0.0, 1.0, "", "1", b"", b"1", "\ud800"),
    *([], [[]], [1, 2], [[1], 2], [1, [2]], {}, {"a": 1}, {"a": 2}, {1: "a"}, Pair(1, 2.0)),
    *(torch.zeros(4), torch.zeros(2, 2), torch.zeros(4, dtype=torch.int32), torch.zeros(0)),
    *(np.zeros(4), np.zeros(4, ">f8"), np.zeros((4, 1)), np.float32(1), np.float64(1)),
    *(torch.zeros(4, dtype=torch.bfloat16), torch.tensor(0.0), ["ab", "c"], ["a", "bc"]),
    *(set(), {1, 2}, {1, 3}, {(1, 2)}, torch.eye(3).to_sparse(), torch.eye(4).to_sparse()),
    *(2 * torch.eye(3).to_sparse(), torch.eye(3), torch.eye(3).to_sparse_csr()),
    *(torch.eye(3).to_sparse_csc(), torch.tensor([1j]), torch.tensor([1j]).conj()),
]


def test_unlike_samples_have_unlike_digests() -> None:
    assert len({sample_digest(sample) for sample in UNLIKE}) == len(UNLIKE)
    turned = torch.arange(6).view(2, 3).t()
    assert sample_digest(turned) == sample_digest(turned.contiguous())
    assert sample_digest((1, 2)) == sample_digest([1, 2])
    words = [f"word {i}" for i in range(50)]
    assert sample_digest(set(words)) == sample_digest(frozenset(reversed(words)))
    twice = torch.sparse_coo_tensor([[1, 1]], [1.0, 2.0], (3,))
    assert sample_digest(twice) == sample_digest(twice.coalesce())
    with pytest.raises(UserError, match=r"the sample\[1\] is a object"):
        sample_digest([1, object()])


def test_ranges_are_read_block_by_block(tree: Path, tmp_path: Path) -> None:
    written(tree, tmp_path / "index")
    files = holdfast.VerifiedFiles(tree, tmp_path / "index")
    whole, chance = (tree / "a.bin").read_bytes(), random.Random(5)
    assert files.names() == ["a.bin", "part/b.bin", "part/empty"]
    for _ in range(300):
        start = chance.randrange(len(whole) + 1)
        size = chance.randrange(len(whole) - start + 1)
        assert files.read(start, size, "a.bin") == whole[start : start + size]
    assert files.read(0, 0, "part/empty") == b""
    assert pickle.loads(pickle.dumps(files)).read(1, 2, "a.bin") == whole[1:3]  # noqa: S301
    files.close()
    assert files.read(3, 2, "a.bin") == whole[3:5]
    for offset, size in ((-1, 1), (0, len(whole) + 1), (2, -1)):
        with pytest.raises(UserError, match="are not in it"):
            files.read(offset, size, "a.bin")
    with pytest.raises(UserError, match="knows no file 'c'"):
        files.read(0, 1, "c")


def test_a_flip_on_the_way_is_read_again(
    tree: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    written(tree, tmp_path / "index")
    flips, pread = iter([True]), os.pread

    def disturbed(handle: int, size: int, offset: int) -> bytes:
        data = pread(handle, size, offset)
        return bytes([data[0] ^ 1]) + data[1:] if next(flips, False) else data

    monkeypatch.setattr(os, "pread", disturbed)
    files = VerifiedFiles(tree, tmp_path / "index")
    assert files.read(10, 50, "a.bin") == (tree / "a.bin").read_bytes()[10:60]
    assert files.healed == ["block 0 of 'a.bin' is sound at the second reading"]


def test_a_mirror_heals_files(tree: Path, tmp_path: Path) -> None:
    written(tree, tmp_path / "index")
    whole = (tree / "a.bin").read_bytes()
    mirror = tmp_path / "mirror"
    mirror.mkdir()
    (mirror / "a.bin").write_bytes(whole)
    flip(tree / "a.bin", 8 * BLOCK)
    (tree / "part" / "b.bin").unlink()
    files = VerifiedFiles(tree, tmp_path / "index", [tmp_path / "none", mirror])
    for _ in range(2):
        assert files.read(0, len(whole), "a.bin") == whole
    assert files.healed == [f"block 1 of 'a.bin' is sound from {mirror}"]
    with pytest.raises(Damaged, match=r"cannot be read .*, and so in all mirrors"):
        files.read(0, 1, "part/b.bin")


# ---------------------------------------------------------------- indexes


def test_an_index_is_read_as_it_was_written(tree: Path, tmp_path: Path) -> None:
    path = tmp_path / "index"
    assert written(tree, path) == open_index(path)
    samples = index_samples(TensorDataset(torch.arange(5)))
    write_index(samples, path)
    assert read_index(path, SampleIndex) == samples
    assert len(samples) == 5
    assert [p.name for p in tmp_path.iterdir() if p.name.startswith(".")] == []
    with pytest.raises(UserError, match="is an index of a dataset's samples: give one of files"):
        read_index(path, FileIndex)
    for junk in (b"", b"HOLDIDX1", b"\x80\x04K\x01.", os.urandom(100)):
        path.write_bytes(junk)
        with pytest.raises(UserError, match="is not an index"):
            open_index(path)
    with pytest.raises(UserError, match="cannot be read"):
        open_index(tmp_path)


def heads() -> Iterator[dict[str, Any]]:
    """Yield heads that no index has, though their own digests are right."""
    good = {"of": "files", "version": 1, "block_bytes": BLOCK, "files": [["a", 1]]}
    yield from ({**good, "version": 2}, {**good, "more": 1}, {**good, "of": "else"})
    yield from ({**good, "block_bytes": 0}, {**good, "files": [["a", -1]]})
    yield from ({**good, "files": [["a", BLOCK + 1]]}, {**good, "files": [["../a", 1]]})
    yield from ({**good, "files": [["/a", 1]]}, {**good, "files": [["b", 0], ["a", 1]]})
    yield from ({"of": "samples", "version": 1, "length": 2}, {"of": "samples", "length": 1})


def test_a_head_is_not_trusted() -> None:
    import msgspec
    import xxhash

    def sealed(head: dict[str, Any]) -> bytes:
        packed = msgspec.msgpack.encode(head)
        body = b"HOLDIDX1" + len(packed).to_bytes(4, "little") + packed + bytes(16)
        return body + xxhash.xxh3_128_digest(body)

    decode_index(sealed({"of": "samples", "version": 1, "length": 1}), "x")
    for head in heads():
        with pytest.raises(UserError, match="this version cannot read"):
            decode_index(sealed(head), "x")


# ---------------------------------------------------------------- the command


def test_the_command_finds_what_changed(
    tree: Path, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    assert main(["index", str(tree), "--block", "4", "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["files"], told["bytes"]) == (3, 5 * BLOCK + 117)
    assert main(["verify", str(tree)]) == 0
    flip(tree / "a.bin", 8 * (2 * BLOCK + 1))
    (tree / "part" / "b.bin").unlink()
    (tree / "part" / "empty").write_bytes(b"no more")
    capsys.readouterr()
    assert main(["verify", str(tree), told["index"], "--json"]) == 1
    differing = json.loads(capsys.readouterr().out)["differing"]
    assert [(each["file"], each["block"]) for each in differing] == [
        ("a.bin", 2),
        ("part/b.bin", None),
        *[("part/empty", 0), ("part/empty", None)],
    ]
    assert main(["verify", str(tree)]) == 1
    assert f"block 2 of {tree}/a.bin differs\n" in capsys.readouterr().out
    one, index = str(tree / "a.bin"), str(tmp_path / "one")
    assert main(["index", one, "--out", index]) == 0
    assert main(["verify", one, index]) == 0
    flip(tree / "a.bin", 0)
    assert main(["verify", one, index]) == 1


def test_the_command_indexes_datasets(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    code = "def make():\n    return {0}\ndef no():\n    return 5\n"
    (tmp_path / "some_data.py").write_text(code.format([1.0, 2.0, 3.0]))
    (tmp_path / "other_data.py").write_text(code.format([1.0, 2.5, 3.0]))
    (tmp_path / "long_data.py").write_text(code.format([1.0]))
    monkeypatch.chdir(tmp_path)
    assert main(["index", "some_data:make"]) == 0
    index = "some_data.make.hfindex"
    assert capsys.readouterr().out == f"{index}: digests of 3 samples\n"
    assert main(["verify", "some_data:make"]) == 0
    assert main(["verify", "other_data:make", index]) == 1
    assert "record 1 differs" in capsys.readouterr().out
    for data, words in (
        ("long_data:make", "1 samples and its index 3"),
        ("some_data:none", "cannot be found"),
        ("nowhere:make", "cannot be found"),
        ("some_data:no", "no __len__"),
        ("some_data.py", "is an index of a dataset"),
    ):
        with pytest.raises(UserError, match=words):
            main(["verify", data, index])
    with pytest.raises(UserError, match="there is no"):
        main(["index", "missing"])

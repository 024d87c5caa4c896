"""Checkpoints: never half of one, never a wrong byte, no bytes written twice, none lost."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from checkpoint_kit import SIZES, Loaded, make_state, save, stored_bytes
from holdfast.engine.core.errors import Damaged, UserError, WorldError
from holdfast.engine.core.replica.retention import Retention
from holdfast.engine.net.descriptors import wait_readable
from holdfast.engine.state.store.checkpoint_reading import load_range
from holdfast.engine.state.store.checkpoints import Checkpoints, scrub
from holdfast.engine.state.store.files import FileStorage
from holdfast.engine.state.store.manifest import (
    CHUNK_BYTES,
    MANIFESTS,
    PACKS,
    SAVING,
    Entry,
    Manifest,
    decode,
    encode,
    expand,
    manifest_name,
    shorten,
)
from holdfast.engine.state.store.storage import Missing
from holdfast.lab.contracts.storages import Crash, CrashDisk, MemoryStorage
from places import TESTS
from scripts import saver

SAVER = TESTS / "scripts" / "saver.py"


def test_a_saved_state_is_loaded_with_its_description() -> None:
    store, state = Checkpoints(MemoryStorage()), make_state(1)
    save(store, 7, state)
    loaded = Loaded()
    manifest = store.load(7, loaded)
    assert loaded.state == state
    assert (manifest.step, manifest.about) == (7, {"job": "test"})
    assert manifest.size == sum(SIZES.values())
    assert [(e.name, e.dtype, e.shape) for e in manifest.entries] == [
        (name, "uint8", (size,)) for name, size in SIZES.items()
    ]
    assert store.verify(7) == []
    assert store.storage.names(SAVING) == []


def test_unchanged_chunks_are_not_written_again() -> None:
    storage = MemoryStorage()
    store, state = Checkpoints(storage), make_state(1)
    save(store, 1, state)
    once = stored_bytes(storage)
    save(store, 2, state)
    assert stored_bytes(storage) == once
    state["table"][2 * CHUNK_BYTES + 5] ^= 1
    save(store, 3, state)
    assert stored_bytes(storage) == once + CHUNK_BYTES
    save(Checkpoints(storage), 4, state)  # another process, which must look up the stored chunks
    assert stored_bytes(storage) == once + CHUNK_BYTES
    for step in (1, 2, 3, 4):
        assert store.verify(step) == []


def test_equal_chunks_are_kept_once() -> None:
    storage = MemoryStorage()
    chunk = random.Random(1).randbytes(CHUNK_BYTES)
    save(Checkpoints(storage), 1, {f"m{i}": bytearray(2 * chunk) for i in range(5)})
    assert stored_bytes(storage) == CHUNK_BYTES
    assert Checkpoints(storage).verify(1) == []


def test_chunks_that_become_much_shorter_are_compressed_and_no_others() -> None:
    storage, state = MemoryStorage(), make_state(1)
    store = Checkpoints(storage)
    (sparse,) = save(store, 1, {"sparse": state["sparse"]}).entries
    assert stored_bytes(storage) < 0.1 * SIZES["sparse"]
    assert [len(run.stored) for run in sparse.runs] == [3]
    before = stored_bytes(storage)
    entries = save(store, 2, state).entries
    others = sum(SIZES.values()) - SIZES["sparse"]
    assert stored_bytes(storage) == before + others  # and `sparse` is found in its short form
    assert all(not run.stored for entry in entries[:-1] for run in entry.runs)
    tail = bytearray(1000)  # a part of a compressed chunk
    start = CHUNK_BYTES + 12_345
    load_range(storage, store.manifest(2), entries[-1], start, memoryview(tail))
    assert tail == state["sparse"][start : start + 1000]


def test_a_chunk_that_looks_compressed_and_is_not_is_told() -> None:
    storage, state = MemoryStorage(), make_state(1)
    store = Checkpoints(storage)
    save(store, 1, {"sparse": state["sparse"]})
    (pack,) = storage.names(PACKS)
    bomb = zstandard.ZstdCompressor().compress(bytes(64 << 20))  # it fits the first chunk's length
    data = storage.objects[pack]
    storage.objects[pack] = bomb + data[len(bomb) :]
    assert "decompress" in store.verify(1)[0].why


def test_some_entries_can_be_read_without_the_others() -> None:
    read = []

    class Counting(MemoryStorage):
        def read(self, name: str, offset: int, into: memoryview) -> None:
            read.append(len(into))
            super().read(name, offset, into)

    store = Checkpoints(Counting())
    save(store, 1, make_state(1))
    read.clear()
    loaded = Loaded(only="bias")
    store.load(1, loaded)
    assert loaded.state == {"bias": make_state(1)["bias"]}
    assert sum(read) < 5000


# ---------------------------------------------------------------- damage


@pytest.mark.parametrize(
    "flips", [pytest.param(100, marks=pytest.mark.slow), pytest.param(1000, marks=pytest.mark.slow)]
)
def test_every_flipped_bit_is_found(flips: int) -> None:
    """No flipped bit in any file is ever loaded; most often an older checkpoint is used instead."""
    storage = MemoryStorage()
    store = Checkpoints(storage)
    save(store, 1, make_state(1))
    save(store, 2, make_state(2))
    intact, rng = dict(storage.objects), random.Random(5)
    newest = [n for n in intact if "000000000002" in n]
    for _ in range(flips):
        storage.objects = dict(intact)
        name = rng.choice(newest)
        data = bytearray(storage.objects[name])
        data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        storage.objects[name] = bytes(data)
        said: list[str] = []
        loaded = Loaded()
        found = Checkpoints(storage, said.append).load_newest(loaded)
        assert found is not None
        assert found.step == 1
        assert loaded.state == make_state(1)
        assert "the checkpoint of step 2 is not used" in said[0]
        assert name in said[0]


def test_damage_in_a_pack_is_located_to_the_byte() -> None:
    storage = MemoryStorage()
    store = Checkpoints(storage)
    save(store, 1, make_state(1))
    (pack,) = storage.names(PACKS)
    data = bytearray(storage.objects[pack])
    data[CHUNK_BYTES + 99] ^= 4
    storage.objects[pack] = bytes(data)
    (bad,) = store.verify(1)
    assert (bad.entry, bad.start, bad.size) == ("weight", CHUNK_BYTES, CHUNK_BYTES)
    assert bad.offset == CHUNK_BYTES
    with pytest.raises(Damaged, match=f"bytes {CHUNK_BYTES} to {2 * CHUNK_BYTES} of weight"):
        store.load(1, Loaded())
    store.load(1, Loaded(only="bias"))


def test_a_pack_that_is_cut_short_spoils_only_the_lost_part() -> None:
    storage = MemoryStorage()
    store = Checkpoints(storage)
    save(store, 1, make_state(1))
    (pack,) = storage.names(PACKS)
    storage.objects[pack] = storage.objects[pack][: CHUNK_BYTES + 5]
    bad = store.verify(1)
    assert {b.entry for b in bad} == {"weight", "bias", "table", "sparse"}
    assert min(b.start for b in bad if b.entry == "weight") == CHUNK_BYTES


def test_when_none_can_be_read_that_is_an_error_and_none_at_all_is_not() -> None:
    storage = MemoryStorage()
    assert Checkpoints(storage).load_newest(Loaded()) is None
    save(Checkpoints(storage), 1, make_state(1))
    storage.objects[manifest_name(1)] = b"garbage"
    with pytest.raises(UserError, match="none of the 1 checkpoints can be read"):
        Checkpoints(storage).load_newest(Loaded())


def test_a_save_does_not_build_upon_what_cannot_be_read() -> None:
    storage, said = MemoryStorage(), list[str]()
    save(Checkpoints(storage), 1, make_state(1))
    storage.objects[manifest_name(1)] = b"garbage"
    store = Checkpoints(storage, said.append)
    for step in (2, 3):
        save(store, step, make_state(1))
        assert store.verify(step) == []
        store.collect(Retention(last=1))
    assert len(said) == 1  # not with each look
    assert "is not built upon" in said[0]


ENTRY = st.builds(
    Entry,
    name=st.sampled_from("abc"),
    size=st.integers(-1, 3 * CHUNK_BYTES),
    digests=st.binary(max_size=64),
    runs=st.just(()),
)


def test_no_flipped_bit_makes_decompression_take_memory_or_raise() -> None:
    """This holds for the bits of a frame's own length field, too."""
    chunk = make_state(1)["sparse"][:CHUNK_BYTES]
    good = bytes(shorten(memoryview(chunk)))
    into, wrong = bytearray(CHUNK_BYTES), 0
    for at in range(24):  # magic, descriptor, length, and the first blocks
        for bit in range(8):
            data = bytearray(good)
            data[at] ^= 1 << bit
            wrong += bool(expand(memoryview(data), memoryview(into))) or into != chunk
    assert wrong > 100  # the other bits are in parts that are not read
    assert expand(memoryview(good), memoryview(into)) == ""
    assert into == chunk


@pytest.mark.parametrize("how", ["load", "verify", "scrub"])
def test_a_save_does_not_build_upon_a_pack_that_was_found_rotten(how: str) -> None:
    storage, state = MemoryStorage(), make_state(1)
    store = Checkpoints(storage)
    save(store, 1, state)
    (pack,) = storage.names(PACKS)
    data = bytearray(storage.objects[pack])
    data[CHUNK_BYTES + 99] ^= 4
    storage.objects[pack] = bytes(data)
    if how == "load":
        with pytest.raises(Damaged):
            store.load(1, Loaded())
    elif how == "verify":
        assert store.verify(1)
    else:
        assert [*scrub(store, lambda count: None)]
    save(Checkpoints(storage), 2, state)
    assert store.verify(2) == []
    store.collect(Retention(last=1))
    assert storage.names("suspect/") == []
    assert store.verify(2) == []


def test_a_storage_that_does_not_answer_is_not_damage() -> None:
    class Away(MemoryStorage):
        away = False

        def read(self, name: str, offset: int, into: memoryview) -> None:
            if self.away and name.startswith(PACKS):
                raise WorldError("no answer")
            super().read(name, offset, into)

    storage = Away()
    store = Checkpoints(storage)
    save(store, 1, make_state(1))
    storage.away = True
    with pytest.raises(WorldError, match="no answer") as caught:
        store.load(1, Loaded())
    assert not isinstance(caught.value, Damaged)
    assert storage.names("suspect/") == []


@given(st.binary(max_size=200) | st.builds(bytes, st.lists(st.integers(0, 255), max_size=80)))
@settings(max_examples=300)
def test_no_bytes_make_a_manifest_by_accident(data: bytes) -> None:
    with pytest.raises(Damaged):
        decode(data, "x")


@given(st.lists(ENTRY, max_size=3))
def test_a_manifest_that_contradicts_itself_is_refused(entries: list[Entry]) -> None:
    """Its digest is right all the same, so its contents must be checked before they are used."""
    manifest = Manifest(step=1, time=0.0, token="t", packs=("packs/p",), entries=tuple(entries))
    names = [e.name for e in entries]
    sound = len(set(names)) == len(names) and all(e.size == 0 and not e.digests for e in entries)
    try:
        decode(encode(manifest), "x")
        assert sound
    except Damaged:
        assert not sound


# ---------------------------------------------------------------- crashes and failures


def test_a_crash_at_any_call_leaves_the_checkpoints_before(tmp_path: Path) -> None:
    """No half checkpoint is left either; the next save and collection remove the remains."""
    base = tmp_path / "base"
    before = Checkpoints(FileStorage(base))
    save(before, 1, make_state(1))
    changed = make_state(1)
    changed["bias"] = bytearray(b"x" * 40)
    crash_at = crashes = committed = 0
    while True:
        crash_at += 1
        folder = tmp_path / "crashed"
        shutil.copytree(base, folder)
        disk = CrashDisk(crash_at, random.Random(crash_at))
        try:
            save(Checkpoints(FileStorage(folder, disk)), 2, changed)
        except Crash:
            crashes += 1
            disk.survive()
        store = Checkpoints(FileStorage(folder))
        assert store.steps() in ([1], [1, 2])
        committed += 2 in store.steps()
        for step in store.steps():
            loaded = Loaded()
            store.load(step, loaded)
            assert loaded.state == (changed if step == 2 else make_state(1))
        save(store, 3, changed)
        store.collect(Retention(last=1))
        assert store.steps() == [3]
        assert store.verify(3) == []
        shutil.rmtree(folder)
        if disk.calls < crash_at:
            break
    assert crashes > 10
    assert committed > 1


class FailingStorage(MemoryStorage):
    """Refuses its nth write."""

    def __init__(self, fail_at: int) -> None:
        super().__init__()
        self.left = fail_at

    def put(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        self.left -= 1
        if self.left == 0:
            raise WorldError("no space left")
        return super().put(name, parts)


@pytest.mark.parametrize("fail_at", [4, 5, 6])
def test_a_write_that_fails_costs_one_checkpoint(fail_at: int) -> None:
    storage = FailingStorage(fail_at)
    store = Checkpoints(storage)
    save(store, 1, make_state(1))  # three writes: the intent, a pack, the manifest
    with pytest.raises(WorldError, match="no space left"):
        save(store, 2, make_state(2))
    assert store.steps() == [1]
    save(store, 3, make_state(2))
    store.collect(Retention(last=1))
    assert store.steps() == [3]
    assert len(storage.names(PACKS)) == 1
    assert store.verify(3) == []


def test_a_missing_step_is_missing() -> None:
    with pytest.raises(Missing, match=MANIFESTS):
        Checkpoints(MemoryStorage()).manifest(4)


# ---------------------------------------------------------------- kills


@pytest.mark.timeout(600)
@pytest.mark.parametrize(
    "kills", [pytest.param(6, marks=pytest.mark.slow), pytest.param(200, marks=pytest.mark.slow)]
)
def test_a_saving_process_that_is_killed_loses_nothing(kills: int, tmp_path: Path) -> None:
    """Every checkpoint that it reported as saved is there, and every checkpoint there is whole."""
    rng, said = random.Random(kills), -1
    command = [sys.executable, str(SAVER), str(tmp_path / "store")]
    for _ in range(kills):
        with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as popen:
            assert popen.stdout is not None
            for _ in range(rng.randint(1, 3)):
                said = int(popen.stdout.readline())
            wait_readable([popen.stdout], rng.uniform(0.0, 0.15))
            popen.kill()
            said = max([said, *map(int, popen.stdout.read().split())])
        store = Checkpoints(FileStorage(tmp_path / "store"))
        loaded = Loaded()
        newest = store.load_newest(loaded)
        assert newest is not None
        assert newest.step >= said
        assert {k: bytes(v) for k, v in loaded.state.items()} == saver.state(newest.step)
        assert all(store.verify(step) == [] for step in store.steps())
    store.collect(Retention(last=1))
    used = sum(path.stat().st_size for path in (tmp_path / "store" / "packs").iterdir())
    assert used <= 2 * saver.PARTS * saver.PART_BYTES

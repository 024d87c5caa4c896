"""Checkpoints: never half of one, never a wrong byte, nothing written twice, nothing lost."""

from __future__ import annotations

import random
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterable
from functools import partial
from pathlib import Path

import pytest
import zstandard
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.core.errors import Damaged, UserError, WorldError
from holdfast.net.readiness import wait_readable
from holdfast.store import compression
from holdfast.store.checkpoint_reading import load_range
from holdfast.store.checkpoints import Checkpoints
from holdfast.store.files import FileStorage
from holdfast.store.manifest import (
    CHUNK_BYTES,
    MANIFESTS,
    PACKS,
    SAVING,
    Entry,
    Intent,
    Manifest,
    decode,
    decode_intent,
    encode,
    encode_intent,
    manifest_name,
)
from holdfast.store.retention import Retention, choose_kept
from holdfast.store.saving import Item
from holdfast.store.scrub import scrub
from holdfast.store.storage import Missing
from holdfast.testing.storages import Crash, CrashDisk, MemoryStorage
from scripts import saver

SAVER = Path(__file__).parent / "scripts" / "saver.py"
State = dict[str, bytearray]
SIZES = {
    "weight": 3 * CHUNK_BYTES + 17,
    "bias": 40,
    "empty": 0,
    "table": 3 * CHUNK_BYTES,
    "sparse": 2 * CHUNK_BYTES + 9,
}


def make_state(seed: int) -> State:
    """Return a state of random bytes, except `sparse`, which can be compressed."""
    rng = random.Random(seed)
    state = {name: bytearray(rng.randbytes(size)) for name, size in SIZES.items()}
    state["sparse"] = bytearray(SIZES["sparse"])
    for at in range(0, SIZES["sparse"], 500):
        state["sparse"][at] = rng.randrange(256)
    state["sparse"][-9:] = rng.randbytes(9)  # a chunk of its own
    return state


def items(state: State) -> list[Item]:
    return [
        Item(name=name, data=memoryview(data), dtype="uint8", shape=(len(data),))
        for name, data in state.items()
    ]


def save(store: Checkpoints, step: int, state: State) -> Manifest:
    return store.save(step, items(state), {"job": "test"})


class Loaded:
    """Targets that remember which bytes they got."""

    def __init__(self, only: str = "") -> None:
        self.state: State = {}
        self._only = only

    def __call__(self, manifest: Manifest) -> list[tuple[Entry, memoryview]]:
        wanted = [e for e in manifest.entries if self._only in e.name]
        self.state = {e.name: bytearray(e.size) for e in wanted}
        return [(e, memoryview(self.state[e.name])) for e in wanted]


def stored_bytes(storage: MemoryStorage) -> int:
    return sum(len(data) for name, data in storage.objects.items() if name.startswith(PACKS))


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


@pytest.mark.parametrize("flips", [100, pytest.param(1000, marks=pytest.mark.slow)])
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
    save(store, 2, make_state(1))
    assert store.verify(2) == []
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
    good = bytes(compression.shorten(memoryview(chunk)))
    into, wrong = bytearray(CHUNK_BYTES), 0
    for at in range(24):  # magic, descriptor, length, and the first blocks
        for bit in range(8):
            data = bytearray(good)
            data[at] ^= 1 << bit
            wrong += bool(compression.expand(memoryview(data), memoryview(into))) or into != chunk
    assert wrong > 100  # the other bits are in parts that are not read
    assert compression.expand(memoryview(good), memoryview(into)) == ""
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
    manifest = Manifest(step=1, time=0.0, token="t", packs=("p",), entries=tuple(entries))
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


# ---------------------------------------------------------------- retention and garbage


def test_retention_decides_which_checkpoints_are_kept() -> None:
    saved = [(step, 100.0 * step) for step in range(1, 11)]
    assert choose_kept(saved, Retention(last=2), 1e9) == (9, 10)
    assert choose_kept(saved, Retention(last=2, every=4), 1e9) == (4, 8, 9, 10)
    assert choose_kept(saved, Retention(last=1, age_s=250.0), 1000.0) == (8, 9, 10)
    assert choose_kept(saved, Retention(last=0), 1e9) == (10,)
    gone_back = [(100, 1.0), (200, 2.0), (300, 3.0), (50, 4.0)]
    assert choose_kept(gone_back, Retention(last=2), 1e9) == (50, 300)
    assert choose_kept([], Retention(), 0.0) == ()


def test_collecting_keeps_every_byte_of_kept_checkpoints() -> None:
    storage = MemoryStorage()
    store, state = Checkpoints(storage), make_state(1)
    for step in range(1, 9):
        state["table"][step * 1000] ^= 0xFF
        save(store, step, state)
        store.collect(Retention(last=2, every=4))
    assert store.steps() == [4, 7, 8]
    assert all(store.verify(step) == [] for step in store.steps())
    used = {pack for step in store.steps() for pack in store.manifest(step).packs}
    assert set(storage.names(PACKS)) == used


def test_a_pack_that_is_little_used_dies_out() -> None:
    """The chunks that are still used are written again, so that no space is lost for ever."""
    storage = MemoryStorage()
    store, rng = Checkpoints(storage), random.Random(0)
    state = {f"m{i}": bytearray(rng.randbytes(CHUNK_BYTES)) for i in range(10)}
    for step in range(12):
        if step < 10:
            state[f"m{step}"] = bytearray(rng.randbytes(CHUNK_BYTES))
        save(store, step, state)
        store.collect(Retention(last=1))
    assert stored_bytes(storage) <= 2 * 10 * CHUNK_BYTES
    assert store.verify(11) == []


def test_nothing_is_removed_while_a_manifest_cannot_be_read() -> None:
    storage, said = MemoryStorage(), list[str]()
    store = Checkpoints(storage, said.append)
    save(store, 1, make_state(1))
    save(store, 2, make_state(2))
    storage.objects[manifest_name(1)] = b"garbage"
    packs = storage.names(PACKS)
    assert store.collect(Retention(last=1)).packs == 0
    assert storage.names(PACKS) == packs
    assert any("nothing is removed" in line for line in said)


class Interleaved(MemoryStorage):
    """Runs something once, during one of its calls, as another process would."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0
        self.at = -1
        self.act: Callable[[], object] = lambda: None

    def _step(self) -> None:
        self.calls += 1
        if self.calls == self.at:
            self.act()

    def put(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
        self._step()
        return super().put(name, parts)

    def size(self, name: str) -> int | None:
        self._step()
        return super().size(name)

    def names(self, prefix: str) -> list[str]:
        self._step()
        return super().names(prefix)

    def delete(self, name: str) -> None:
        self._step()
        super().delete(name)


def test_garbage_may_be_collected_at_any_point_of_a_save() -> None:
    at, struck = 0, 0
    while True:
        at += 1
        storage = Interleaved()
        old, state = make_state(1), make_state(1)
        save(Checkpoints(storage), 1, old)
        save(Checkpoints(storage), 2, make_state(2))
        before = storage.calls
        storage.at = before + at
        storage.act = partial(Checkpoints(storage).collect, Retention(last=1))
        store = Checkpoints(storage)
        save(store, 3, state)
        struck += storage.calls >= storage.at
        assert 3 in store.steps()
        assert store.verify(3) == []
        if storage.calls < before + at:
            break
    assert struck > 8


def test_a_save_may_come_at_any_point_of_a_collection() -> None:
    at = 0
    while True:
        at += 1
        storage = Interleaved()
        for step in (1, 2):
            save(Checkpoints(storage), step, make_state(1))
        changed = make_state(1)
        changed["bias"] = bytearray(40)
        before = storage.calls
        storage.at, storage.act = before + at, partial(save, Checkpoints(storage), 3, changed)
        store = Checkpoints(storage)
        store.collect(Retention(last=1))
        for step in store.steps():
            assert store.verify(step) == []
        if storage.calls < before + at:
            break
        assert 3 in store.steps()
    assert at > 6


def test_a_dead_save_protects_nothing_and_one_elsewhere_does_for_a_day() -> None:
    storage = MemoryStorage()
    store = Checkpoints(storage)
    saving = store.begin(1)
    saving.write(items(make_state(1)))
    assert store.collect().packs == 0
    (name,) = storage.names(SAVING)
    found = decode_intent(storage.objects[name], name)
    elsewhere = Intent(token=found.token, host="elsewhere", pid=1, time=found.time)
    storage.put(name, [encode_intent(elsewhere)])
    assert store.collect().packs == 0
    dead = Intent(token=found.token, host=found.host, pid=2**22 + 1, time=found.time)
    storage.put(name, [encode_intent(dead)])
    assert store.collect().packs == 1
    assert storage.names("") == []


def test_a_missing_step_is_missing() -> None:
    with pytest.raises(Missing, match=MANIFESTS):
        Checkpoints(MemoryStorage()).manifest(4)


# ---------------------------------------------------------------- kills


@pytest.mark.timeout(600)
@pytest.mark.parametrize("kills", [6, pytest.param(200, marks=pytest.mark.slow)])
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

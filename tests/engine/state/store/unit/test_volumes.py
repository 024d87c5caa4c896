"""Erasure-coded volumes: any m of them may be lost, or lie, and no byte is lost."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Iterable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from holdfast.engine.core.errors import Damaged, UserError, WorldError
from holdfast.engine.core.replica.retention import Retention
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.files import FileStorage
from holdfast.engine.state.store.saving import Item
from holdfast.engine.state.store.storage import Missing
from holdfast.engine.state.store.stripes import SHARD_BYTES, Geometry, shard_of
from holdfast.engine.state.store.volumes import VolumeStorage
from holdfast.lab.contracts.storages import STORAGE_CASES, MemoryStorage, content

reed_solomon = pytest.importorskip("holdfast.engine.state.coding.reed_solomon")
try:
    reed_solomon.ReedSolomon(2, 1)
except UserError as error:
    pytest.skip(str(error), allow_module_level=True)


@given(size=st.integers(0, 5 * SHARD_BYTES), k=st.integers(1, 9))
def test_the_geometry_covers_every_byte_once(size: int, k: int) -> None:
    geometry = Geometry(size, k, SHARD_BYTES)
    stripes = [geometry.stripe(i) for i in range(geometry.count)]
    assert sum(s.size for s in stripes) == size
    assert all(s.shard * k >= s.size for s in stripes)
    assert [s.offset for s in stripes] == [i * SHARD_BYTES for i in range(len(stripes))]
    assert list(geometry.stripes_of(0, size)) == stripes
    assert shard_of(1, k, SHARD_BYTES) == 64


# ---------------------------------------------------------------- the storage


def memories(count: int) -> list[MemoryStorage]:
    return [MemoryStorage() for _ in range(count)]


@pytest.mark.parametrize("shape", [(1, 0), (1, 1), (2, 1), (4, 2)])
@pytest.mark.parametrize("case", STORAGE_CASES)
def test_the_contract(case: str, shape: tuple[int, int]) -> None:
    k, m = shape
    STORAGE_CASES[case](VolumeStorage(memories(k + m), k, m))


@pytest.mark.parametrize("case", STORAGE_CASES)
def test_the_contract_with_volumes_lost(case: str) -> None:
    class Lost(MemoryStorage):
        def put(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
            raise WorldError("this volume is gone")

        def size(self, name: str) -> int | None:
            raise WorldError("this volume is gone")

        def names(self, prefix: str) -> list[str]:
            raise WorldError("this volume is gone")

        def delete(self, name: str) -> None:
            raise WorldError("this volume is gone")

    STORAGE_CASES[case](VolumeStorage([Lost(), *memories(3), Lost(), MemoryStorage()], 4, 2))


DATA = random.Random(3).randbytes(3 * 4 * SHARD_BYTES + 70_001)


def filled(
    say: Callable[[str], None] = lambda line: None,
) -> tuple[VolumeStorage, list[MemoryStorage]]:
    volumes = memories(6)
    storage = VolumeStorage(volumes, 4, 2, say)
    storage.put("packs/x", [DATA])
    return storage, volumes


@pytest.mark.parametrize("lost", list(itertools.combinations(range(6), 2)))
def test_any_two_of_six_volumes_may_be_lost(lost: tuple[int, int]) -> None:
    storage, volumes = filled()
    for i in lost:
        volumes[i].objects.clear()
    assert content(storage, "packs/x") == DATA
    assert storage.names("packs/") == ["packs/x"]
    part = bytearray(100_000)
    storage.read("packs/x", 2 * SHARD_BYTES - 7, memoryview(part))
    assert part == DATA[2 * SHARD_BYTES - 7 :][: len(part)]
    assert len(storage.repair("packs/x")) == 2
    assert storage.repair("packs/x") == []
    for i in [i for i in range(6) if i not in lost][:2]:
        volumes[i].objects.clear()
    assert content(VolumeStorage(volumes, 4, 2), "packs/x") == DATA


def test_three_lost_volumes_are_too_many_and_it_is_said() -> None:
    storage, volumes = filled()
    for volume in volumes[:3]:
        volume.objects.clear()
    with pytest.raises(Missing, match="packs/x on 4 of the volumes"):
        content_of(storage)


class Unplugged(MemoryStorage):
    """Has kept all its bytes, and does not answer."""

    def size(self, name: str) -> int | None:
        raise WorldError("no answer")


def unplug(volume: MemoryStorage) -> None:
    volume.__class__ = Unplugged


def plug_in(volume: MemoryStorage) -> None:
    volume.__class__ = MemoryStorage


def test_objects_on_unreachable_volumes_are_not_missing_and_not_garbage() -> None:
    volumes = memories(6)
    storage = VolumeStorage(volumes, 4, 2)
    store, data = Checkpoints(storage), bytearray(DATA)
    for step in (1, 2):
        data[step] ^= 1
        item = Item(name="w", data=memoryview(data), dtype="uint8", shape=(len(data),))
        store.save(step, [item], {})
    before = [dict(v.objects) for v in volumes]
    for volume in volumes[:3]:
        unplug(volume)
    assert store.steps() == [1, 2]
    for failing in (lambda: store.manifest(1), lambda: store.collect(Retention(last=1))):
        with pytest.raises(WorldError, match="no answer") as caught:
            failing()
        assert not isinstance(caught.value, Missing | Damaged)
    for volume in volumes[:3]:
        plug_in(volume)
    assert [dict(v.objects) for v in volumes] == before
    assert store.verify(1) == store.verify(2) == []


def test_packs_that_an_interrupted_save_has_left_on_volumes_are_collected() -> None:
    volumes = memories(6)
    store = Checkpoints(VolumeStorage(volumes, 4, 2))
    store.storage.put("packs/000000000001-dead-0", [DATA])
    for volume in volumes[:3]:
        volume.objects.clear()
    assert store.collect().packs == 1
    assert not any(volume.objects for volume in volumes)


def test_an_object_that_is_deleted_while_it_is_repaired_does_not_come_back() -> None:
    volumes = memories(2)
    storage = VolumeStorage(volumes, 1, 1)  # where one volume alone would bring it back
    storage.put("packs/x", [DATA])
    for lost in range(2):
        storage.put("packs/x", [DATA])
        del volumes[lost].objects["packs/x"]

        class Deleting(MemoryStorage):
            def put(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
                kept = [bytes(part) for part in parts]
                storage.delete(name)
                return super().put(name, kept)

        volumes[lost].__class__ = Deleting
        with pytest.raises(Missing, match="was deleted while it was repaired"):
            storage.repair("packs/x")
        plug_in(volumes[lost])
        assert storage.all_names() == []


def content_of(storage: VolumeStorage) -> bytes:
    data = bytearray(len(DATA))
    storage.read("packs/x", 0, memoryview(data))
    return bytes(data)


@pytest.mark.slow
def test_a_thousand_flipped_bits_are_all_found_and_all_mended() -> None:
    rng = random.Random(11)
    for _ in range(200):
        said: list[str] = []
        storage, volumes = filled(said.append)
        intact = [dict(v.objects) for v in volumes]
        for i in rng.sample(range(6), 2):
            data = bytearray(volumes[i].objects["packs/x"])
            for _ in range(rng.randint(1, 4)):
                data[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
            volumes[i].objects["packs/x"] = bytes(data)
        assert content(storage, "packs/x") == DATA
        storage.repair("packs/x")
        assert [dict(v.objects) for v in volumes] == intact
        assert said


def test_bits_in_the_same_stripe_of_three_volumes_are_damage_and_not_other_bytes() -> None:
    storage, volumes = filled()
    for volume in volumes[:3]:
        data = bytearray(volume.objects["packs/x"])
        data[5] ^= 1
        volume.objects["packs/x"] = bytes(data)
    with pytest.raises(Damaged, match="lost on too many volumes"):
        content_of(storage)
    tail = bytearray(1000)  # the other stripes are well
    storage.read("packs/x", len(DATA) - 1000, memoryview(tail))
    assert tail == DATA[-1000:]


def test_a_write_that_was_cut_short_is_not_there() -> None:
    storage, volumes = filled()
    storage.put("packs/y", [b"new"])
    for volume in volumes[:3]:
        del volume.objects["packs/y"]
    assert storage.size("packs/y") is None
    assert storage.names("packs/") == ["packs/x"]
    assert "packs/y" in storage.all_names()
    storage.put("packs/y", [b"again"])
    assert content(storage, "packs/y") == b"again"


def test_an_older_write_of_the_same_name_is_never_mixed_in() -> None:
    volumes = memories(6)
    storage = VolumeStorage(volumes, 4, 2)
    storage.put("m", [b"old" * 1000])
    old = [dict(v.objects) for v in volumes]
    storage.put("m", [b"new" * 1000])
    for i in (1, 4):
        volumes[i].objects = dict(old[i])
    assert content(storage, "m") == b"new" * 1000
    assert len(storage.repair("m")) == 2
    for i in (0, 5):
        volumes[i].objects.clear()
    assert content(storage, "m") == b"new" * 1000


def test_the_later_write_counts_whatever_the_clock_says(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each half of the volumes holds one of two writes; the clock was set back between them."""
    volumes = memories(4)
    storage, now = VolumeStorage(volumes, 2, 2), [10**18]
    monkeypatch.setattr("time.time_ns", lambda: now[0])
    storage.put("m", [b"old" * 1000])
    old = [dict(v.objects) for v in volumes[:2]]
    now[0] -= 3600 * 10**9
    storage.put("m", [b"new" * 1000])
    for volume, objects in zip(volumes[:2], old, strict=True):
        volume.objects = objects
    assert content(storage, "m") == b"new" * 1000


def test_a_volume_that_fills_up_in_the_middle_costs_parity_only() -> None:
    class Full(MemoryStorage):
        def put(self, name: str, parts: Iterable[bytes | memoryview]) -> int:
            for count, _ in enumerate(parts):
                if count == 2:
                    raise WorldError("No space left on device")
            return 0

    said: list[str] = []
    storage = VolumeStorage([*memories(5), Full()], 4, 2, said.append)
    storage.put("packs/x", [DATA])
    assert content(storage, "packs/x") == DATA
    assert any("less parity" in line and "No space left" in line for line in said)
    few = VolumeStorage([*memories(3), Full(), Full(), Full()], 4, 2)
    with pytest.raises(WorldError, match="3 of 6 volumes fail"):
        few.put("packs/x", [DATA])
    assert few.names("") == []


def test_checkpoints_on_volumes_survive_the_loss_of_two_disks(tmp_path: Path) -> None:
    folders = [tmp_path / f"disk{i}" for i in range(6)]
    said: list[str] = []
    storage = VolumeStorage([FileStorage(f) for f in folders], 4, 2, said.append)
    store, data = Checkpoints(storage), bytearray(DATA)
    item = Item(name="w", data=memoryview(data), dtype="uint8", shape=(len(data),))
    store.save(1, [item], {})
    for folder in folders[1:3]:
        for path in [p for p in folder.rglob("*") if p.is_file()]:
            path.unlink()
    loaded = bytearray(len(data))
    again = Checkpoints(VolumeStorage([FileStorage(f) for f in folders], 4, 2))
    again.load(1, lambda manifest: [(manifest.entries[0], memoryview(loaded))])
    assert loaded == data
    for name in storage.all_names():
        storage.repair(name)
    for folder in (folders[0], folders[5]):
        for path in [p for p in folder.rglob("*") if p.is_file()]:
            path.unlink()
    assert again.verify(1) == []


def test_the_number_of_volumes_must_fit() -> None:
    with pytest.raises(UserError, match="need 6 volumes, not 5"):
        VolumeStorage(memories(5), 4, 2)

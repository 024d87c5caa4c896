"""Which checkpoints are kept or removed: checkpoints and saves never lose parts that they need."""

from __future__ import annotations

import dataclasses
import random
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

import pytest

from checkpoint_kit import items, make_state, save, stored_bytes
from holdfast.engine.core.errors import WorldError
from holdfast.engine.core.replica.retention import Retention, Saved, SaveOrder, choose_kept
from holdfast.engine.core.types import NO_VIEW, ViewNumber
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.manifest import (
    CHUNK_BYTES,
    PACKS,
    SAVING,
    decode_intent,
    encode_intent,
    manifest_name,
)
from holdfast.lab.contracts.storages import MemoryStorage


def test_retention_decides_which_checkpoints_are_kept() -> None:
    saved = [saved_in(1, step, 1000.0 - 100 * step) for step in range(1, 11)]
    assert choose_kept(saved, Retention(last=2)) == (9, 10)
    assert choose_kept(saved, Retention(last=2, every=4)) == (4, 8, 9, 10)
    assert choose_kept(saved, Retention(last=1, age_s=250.0)) == (8, 9, 10)
    assert choose_kept(saved, Retention(last=0)) == (10,)
    gone_back = [*(saved_in(5, step) for step in (100, 200, 300)), saved_in(6, 50)]
    assert choose_kept(gone_back, Retention(last=2)) == (50, 300)
    assert choose_kept(gone_back, Retention(last=1, settled=40)) == (50,)
    assert choose_kept([saved_in(NO_VIEW, 900), *gone_back], Retention(last=1)) == (50,)
    assert choose_kept([], Retention()) == ()


def saved_in(view: int, step: int, age_s: float = 0.0) -> Saved:
    return Saved(order=SaveOrder(view=ViewNumber(view), step=step), age_s=age_s)


@pytest.mark.parametrize("hours", [-1, 1])
def test_the_newest_checkpoint_stays_whatever_the_clocks_say(
    hours: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The clock of the node that saves is set by hours before each save, and once it goes back."""
    storage, now = MemoryStorage(), [1e9]
    monkeypatch.setattr("time.time", lambda: now[0])
    for step in range(1, 9):
        view = "2" if step < 6 else "3"
        step = step if step < 6 else step - 4  # the job goes back to step 1
        Checkpoints(storage).save(step, items(make_state(step)), {"view": view})
        now[0] += hours * 3600
        Checkpoints(storage).collect(Retention(last=2))
        assert step in Checkpoints(storage).steps()
    assert Checkpoints(storage).steps() == [3, 4]


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


def test_a_dead_save_protects_nothing() -> None:
    storage = MemoryStorage()
    store = Checkpoints(storage)
    saving = store.begin(1)
    saving.write(items(make_state(1)))
    assert store.collect().packs == 0
    change_intents(storage, pid=2**22 + 1)
    assert store.collect().packs == 1
    assert storage.names("") == []


def change_intents(storage: MemoryStorage, **changes: Any) -> None:
    """Rewrite the announcements of all saves under way."""
    for name in storage.names(SAVING):
        found = decode_intent(storage.objects[name], name)
        storage.put(name, [encode_intent(dataclasses.replace(found, **changes))])


@pytest.mark.parametrize("time", [0.0, 1e12])
def test_a_save_elsewhere_protects_its_packs_until_a_newer_checkpoint_is_there(time: float) -> None:
    storage = MemoryStorage()
    store = Checkpoints(storage)
    saving = store.begin(3, view=ViewNumber(2))
    part = saving.write(items(make_state(3)))
    change_intents(storage, host="elsewhere", time=time)
    for step, view in ((9, "1"), (2, "2")):  # neither is newer
        store.save(step, items(make_state(step)), {"view": view})
        assert store.collect().packs == 0
    store.save(1, items(make_state(1)), {"view": "3"})
    assert store.collect().packs == 1
    with pytest.raises(WorldError, match="given up"):
        saving.commit([part], {"view": "2"})
    saving.abandon()
    assert storage.names(SAVING) == []
    assert store.steps() == [1, 2, 9]


@pytest.mark.slow
def test_a_save_elsewhere_may_be_given_up_at_any_point() -> None:
    """It is saved whole, or it fails: a checkpoint never lacks bytes."""
    results = set()
    for at in range(1, 100):
        storage = Interleaved()
        store = Checkpoints(storage)
        store.save(5, items(make_state(1)), {"view": "2"})
        store.save(6, items(make_state(2)), {"view": "2"})

        def overtake(storage: Interleaved = storage) -> None:
            change_intents(storage, host="elsewhere")
            Checkpoints(storage).collect(Retention(last=1))

        first = storage.calls
        storage.at, storage.act = first + at, overtake
        saving = store.begin(4, writer=0, view=ViewNumber(2))
        try:
            saving.commit([saving.write(items(make_state(1)))], {"view": "2"})
        except WorldError:
            saving.abandon()
        struck, storage.at = storage.calls >= first + at, -1
        results.add(4 in store.steps())
        assert all(store.verify(step) == [] for step in store.steps())
        if not struck:
            break
    assert results == {True, False}


def test_the_announcements_of_all_writers_end_with_the_commit() -> None:
    storage = MemoryStorage()
    first = Checkpoints(storage).begin(1, "t", 0)
    other = Checkpoints(storage).begin(1, "t", 1)
    other.publish(other.write([], 1))
    part = first.write(items(make_state(1)))
    first.commit([part, *first.gather(2, 0.0)], {})
    assert storage.names(SAVING) == storage.names("parts/") == []

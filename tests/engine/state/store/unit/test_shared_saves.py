"""Checkpoints that several writers save together, each a share of it."""

from __future__ import annotations

import threading

import pytest

from checkpoint_kit import Loaded, items, make_state
from holdfast.engine.core.errors import WorldError
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.manifest import PACKS, SAVING, Intent, decode_intent, encode_intent
from holdfast.lab.contracts.storages import MemoryStorage


def test_several_writers_save_parts_of_one_checkpoint() -> None:
    storage, state = MemoryStorage(), make_state(3)
    store = Checkpoints(storage)
    saving = store.begin(5)
    every = items(state)
    parts = [saving.write(every[:2], writer=0), saving.write(every[2:], writer=1)]
    assert store.steps() == []
    saving.commit(parts, {})
    loaded = Loaded()
    store.load(5, loaded)
    assert loaded.state == state
    assert len(storage.names(PACKS)) == 2


def test_a_share_that_is_being_written_is_waited_for_patiently() -> None:
    storage = MemoryStorage()
    first = Checkpoints(storage).begin(7, "token", 0)
    second = Checkpoints(storage).begin(7, "token", 1)
    part = second.write(items(make_state(0)), 1)
    late = threading.Timer(0.2, second.publish, [part])
    late.start()
    assert first.gather(2, wait_s=0.0, patience_s=60.0) == [part]
    late.join()


def test_a_share_that_nobody_writes_is_not_waited_for_patiently() -> None:
    storage = MemoryStorage()
    first = Checkpoints(storage).begin(7, "token", 0)
    with pytest.raises(WorldError, match="the share of writer 1 has not come"):
        first.gather(2, wait_s=0.0, patience_s=60.0)
    Checkpoints(storage).begin(7, "token", 1)
    name = f"{SAVING}token.1"
    found = decode_intent(storage.objects[name], name)
    ended = Intent(token=found.token, host=found.host, pid=2**22 + 1, time=found.time)
    storage.put(name, [encode_intent(ended)])
    with pytest.raises(WorldError, match="the share of writer 1 has not come"):
        first.gather(2, wait_s=0.0, patience_s=60.0)

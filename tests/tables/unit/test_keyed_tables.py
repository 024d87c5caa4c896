"""Tables of any keys: the keys that have rows are the same on any servers."""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_row_servers import Servers

from holdfast.engine.core.errors import UserError
from holdfast.engine.state.store.checkpoints import Checkpoints
from holdfast.engine.state.store.files import FileStorage
from holdfast.tables import SGD, Adagrad, LazyAdam, RowOptimizer
from holdfast.tables import server_wire as wire
from holdfast.tables.core.placement import SHARDS, find_holders, share_out
from holdfast.tables.embeddings import Embedding, EmbeddingBag
from holdfast.tables.keyed_rows import (
    EVERY_PLACE,
    FORGET_AFTER,
    KeyedTable,
    find_keys,
    first_values,
)
from holdfast.tables.row_memory import KeyIndex, encode, find_shards
from holdfast.tables.server_rows import RowUpdate
from holdfast.tables.table_set import write_shard
from holdfast.tables.table_shape import AGE, FREQUENCY, KeyRules, TableShape, hash_keys

DIM = 3
NEWEST = 1 << 62
RULES = [SGD(lr=0.1, momentum=0.9), LazyAdam(lr=0.1)]


def shape(**rules: object) -> TableShape:
    given = KeyRules(**({"capacity": 64} | rules))
    limits = (-1.0, 1.0)
    return TableShape(name="t", count=0, dim=DIM, seed=7, limits=limits, padding=5, keyed=given)


@dataclass
class Model:
    """Is a slow table, key by key, of plain dictionaries: the oracle for KeyedTable."""

    shape: TableShape
    rule: RowOptimizer
    rows: dict[int, torch.Tensor] = field(default_factory=dict)
    slots: dict[int, dict[str, torch.Tensor]] = field(default_factory=dict)
    used: dict[int, tuple[int, int]] = field(default_factory=dict)
    seen: dict[tuple[int, int], tuple[int, int]] = field(default_factory=dict)

    def first(self, key: int) -> torch.Tensor:
        blank = KeyedTable(replace(self.shape, keyed=KeyRules(capacity=1)), [], self.rule)
        return first_values(blank.shape, torch.tensor([key]))[0]

    def shard(self, key: int) -> int:
        return int(self.shape.shards_of(torch.tensor([key])))

    def read(self, key: int) -> torch.Tensor:
        return self.rows[key] if key in self.rows else self.first(key)

    def admit(self, keys: list[int], number: int) -> list[int]:
        rules = self.shape.keyed
        assert rules is not None
        new = [key for key in keys if key not in self.rows]
        if rules.admit_after == 1:
            return new
        cells = {key: (self.shard(key), cell_of(key, self.shape.shard_rows)) for key in new}
        for cell in set(cells.values()):
            count, last = self.seen.get(cell, (0, 0))
            before = count if last + FORGET_AFTER >= number else 0
            self.seen[cell] = (before + list(cells.values()).count(cell), number)
        return [key for key in new if self.seen[cells[key]][0] >= rules.admit_after]

    def make_room(self, shard: int, needed: int, busy: set[int]) -> None:
        rules = self.shape.keyed
        assert rules is not None
        may_go = [k for k in self.rows if self.shard(k) == shard and k not in busy]
        may_go.sort(
            key=lambda k: (self.used[k] if rules.evict == FREQUENCY else self.used[k][1], k)
        )
        for key in may_go[: max(needed, self.shape.shard_rows // 16)]:
            del self.rows[key], self.slots[key], self.used[key]

    def update(self, keys: list[int], grads: torch.Tensor, number: int) -> None:
        keys, order = zip(*sorted((k, i) for i, k in enumerate(keys)), strict=True)
        busy = {key for key in keys if key in self.rows}
        admitted = self.admit(list(keys), number)
        for shard in range(SHARDS):
            mine = [key for key in admitted if self.shard(key) == shard]
            held = sum(self.shard(k) == shard for k in self.rows)
            if held + len(mine) > self.shape.shard_rows:
                self.make_room(shard, held + len(mine) - self.shape.shard_rows, busy)
            held = sum(self.shard(k) == shard for k in self.rows)
            for key in mine[: self.shape.shard_rows - held]:
                self.rows[key] = self.first(key)
                found = self.rule.slots(DIM).items()
                self.slots[key] = {n: torch.full((1, w), v) for n, (w, v) in found}
                self.used[key] = (0, 0)
        for key, i in zip(keys, order, strict=True):
            if key in self.rows:
                row = self.rows[key][None].clone()
                self.rule.update(row, self.slots[key], grads[i][None], 0.1, number)
                self.rows[key] = row[0]
                self.used[key] = (self.used[key][0] + 1, number)


def cell_of(key: int, cells: int) -> int:
    return int(hash_keys(torch.tensor([key]))[0] >> 8) % cells


KEYS = st.sampled_from([0, 5, -1, 1 << 62, -(1 << 63), *range(100, 180)])
UPDATES = st.lists(st.lists(KEYS, min_size=1, max_size=30, unique=True), min_size=1, max_size=12)


@pytest.mark.slow
@settings(max_examples=25, deadline=None)
@given(
    updates=UPDATES,
    capacity=st.sampled_from([1, 16, 40, 64]),
    admit_after=st.sampled_from([1, 2, 3]),
    evict=st.sampled_from([AGE, FREQUENCY]),
    rule=st.sampled_from(RULES),
)
def test_a_table_of_keys_is_what_dictionaries_say(
    updates: list[list[int]], capacity: int, admit_after: int, evict: str, rule: RowOptimizer
) -> None:
    described = shape(capacity=capacity, admit_after=admit_after, evict=evict)
    table, model = KeyedTable(described, range(SHARDS), rule), Model(described, rule)
    every = sorted({key for update in updates for key in update} | {1, 2})
    reads = [torch.stack([model.read(key) for key in every])]
    had = [sorted(model.rows)]
    dice = torch.Generator().manual_seed(3)
    for number, keys in enumerate(updates, start=1):
        grads = torch.randn(len(keys), DIM, generator=dice)
        table.update(torch.tensor(keys), grads, 0.1, number, number)
        model.update(keys, grads, number)
        reads.append(torch.stack([model.read(key) for key in every]))
        had.append(sorted(model.rows))
    for version, wanted in enumerate(reads):
        assert torch.equal(table.read(torch.tensor(every), version), wanted), version
        found = torch.cat([find_keys(table, shard, version) for shard in range(SHARDS)])
        assert sorted(found.tolist()) == had[version]
    half = len(updates) // 2
    table.forget_undos(half)
    assert torch.equal(table.read(torch.tensor(every), half), reads[half])


@settings(max_examples=15, deadline=None)
@given(updates=UPDATES, begin=st.integers(0, 5), admit_after=st.sampled_from([1, 2]))
def test_a_copy_of_a_shard_goes_on_like_the_original(
    updates: list[list[int]], begin: int, admit_after: int
) -> None:
    described = shape(capacity=40, admit_after=admit_after)
    whole = KeyedTable(described, range(SHARDS), RULES[1])
    other = KeyedTable(described, [3, 8], RULES[1])
    dice = torch.Generator().manual_seed(3)
    begin = min(begin, len(updates))
    for number, keys in enumerate(updates, start=1):
        given = torch.tensor(keys)
        grads = torch.randn(len(keys), DIM, generator=dice)
        whole.update(given, grads, 0.1, number, number)
        if number > begin:
            mine = described.are_in([3, 8], given)
            other.update(given[mine], grads[mine], 0.1, number, number)
        if number == begin:
            for shard in (3, 8):
                names = whole.array_names
                count = range(len(names))
                copies = [whole.copy(shard, begin, i, EVERY_PLACE) for i in count]
                write_shard(other, shard, copies)
                other.seal(shard, other.sum_up(shard, copies))
    if begin and begin <= len(updates):
        for shard in (3, 8):
            for version in range(begin, len(updates) + 1):
                for i, name in enumerate(whole.array_names):
                    ours, theirs = (t.copy(shard, version, i, EVERY_PLACE) for t in (whole, other))
                    assert torch.equal(ours, theirs), (shard, version, name)


def test_a_key_is_admitted_only_if_its_uses_are_near_each_other() -> None:
    table = KeyedTable(shape(admit_after=2), range(SHARDS), SGD(lr=1.0))
    key, grad = torch.tensor([1234]), torch.ones(1, DIM)

    def has_row() -> bool:
        return any(len(find_keys(table, shard, NEWEST)) for shard in range(SHARDS))

    table.update(key, grad, 1.0, 1, 1)
    assert not has_row()
    table.update(key, grad, 1.0, 2, FORGET_AFTER + 2)
    assert not has_row()
    table.update(key, grad, 1.0, 3, 2 * FORGET_AFTER + 2)
    assert has_row()


def test_codes_keep_the_keys_of_a_shard_together() -> None:
    keys = torch.cat([torch.arange(-500, 500), torch.tensor([-(1 << 63), (1 << 63) - 1])])
    codes = encode(keys)
    assert len(codes.unique()) == len(keys)
    shards = shape().shards_of(keys)
    assert torch.equal(find_shards(codes), shards)
    assert torch.equal(shards[codes.argsort()], shards.sort().values)


@pytest.mark.parametrize("seed", [1, 2])
def test_an_index_finds_keys_that_have_moved_or_have_come_with_a_shard(
    seed: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.tables.row_memory.RECENT_MIN", 100)
    size, sorted_in, dice = 20, 0, torch.Generator().manual_seed(seed)
    keys, uses = (torch.zeros(SHARDS * size, dtype=torch.int64) for _ in range(2))
    every = torch.arange(-1, 60 * size)
    by_shard = [every[shape().are_in([shard], every)] for shard in range(SHARDS)]
    index = KeyIndex(keys, uses)
    for turn in range(20):
        # Some shards have other keys, as a copy of them has come.
        changed = torch.randperm(SHARDS, generator=dice)[: turn % 3].tolist()
        taken: dict[int, torch.Tensor] = {}
        for shard in changed:
            mine, here = by_shard[shard], slice(shard * size, (shard + 1) * size)
            keys[here] = mine[torch.randperm(len(mine), generator=dice)[:size]]
            uses[here] = torch.randint(0, 1 + turn % 5, (size,), generator=dice)
            taken[shard] = uses[here].nonzero().flatten() + shard * size
        index.replace(taken)
        # In all shards some keys lose their rows, and other keys get one at these places.
        for shard in range(SHARDS):
            places = torch.randperm(size, generator=dice)[: size // 4] + shard * size
            here = slice(shard * size, (shard + 1) * size)
            index.remove(keys[places[uses[places] > 0]])
            uses[places] = 0
            there = torch.isin(by_shard[shard], keys[here][uses[here] > 0])
            lacks = by_shard[shard][~there]
            new = lacks[torch.randperm(len(lacks), generator=dice)[: len(places)]]
            keys[places[: len(new)]], uses[places[: len(new)]] = new, 1
            index.add(new, places[: len(new)])
            sorted_in += shard not in find_shards(index._recent.codes)
        found = index.find(every)
        assert torch.equal(found, index.list_places(every))
        assert set(every[found >= 0].tolist()) == set(keys[uses > 0].tolist())
        assert torch.equal(keys[found[found >= 0]], every[found >= 0])
    assert sorted_in > 10


def described(rule: RowOptimizer, **rules: object) -> wire.TableGroup:
    name, given = wire.describe_rule(rule)
    return wire.TableGroup(name="t", tables=(shape(**rules),), rule=name, settings=given)


def updates_of(steps: int, keys: int = 60) -> list[RowUpdate]:
    found, dice = [], torch.Generator().manual_seed(1)
    for step in range(1, steps + 1):
        chosen = torch.randint(0, keys, (20,), generator=dice).unique() * 977 - 10_000
        grads = torch.randn(len(chosen), DIM, generator=dice)
        found.append(RowUpdate(keys=[chosen], grads=[grads], steps=[step], rates=[0.1]))
    return found


@pytest.mark.parametrize(("servers", "at_once"), [(1, 1 << 16), (5, 1)])
def test_servers_have_the_rows_of_one_table_and_save_them(
    servers: int, at_once: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("holdfast.tables.row_client.PLACES_AT_ONCE", at_once)
    rule, steps = Adagrad(lr=0.1), 9
    rules = {"capacity": 32, "admit_after": 2, "evict": FREQUENCY}
    alone = KeyedTable(shape(**rules), range(SHARDS), rule)
    three = Servers(3, 2, tmp_path).client(described(rule, **rules))
    every = torch.arange(60) * 977 - 10_000
    for step, update in enumerate(updates_of(steps), start=1):
        alone.update(update.keys[0], update.grads[0], 0.1, step, step)
        three.push(step, update)
        assert torch.equal(three.read(step, [every])[0], alone.read(every, step))
    keys = torch.cat([find_keys(alone, shard, NEWEST) for shard in range(SHARDS)]).sort().values
    assert torch.equal(three.read_keys(steps, 0), keys)
    assert len(keys) < 40  # some have lost their rows
    store = Checkpoints(FileStorage(tmp_path))
    three.save(steps, 40, "token", 1, share_out(find_holders(3, 2)))
    first = store.begin(40, "token", 0)
    first.commit([first.write([], 0), *first.gather(4, 30.0)], {})
    others = Servers(servers, 1, tmp_path).client(described(rule, **rules))
    others.begin_from(steps, 40)
    assert torch.equal(others.read(steps, [every])[0], alone.read(every, steps))
    assert torch.equal(others.read_keys(steps, 0), keys)


def test_a_table_of_numbered_rows_has_no_keys() -> None:
    with pytest.raises(UserError, match="has rows 0 to 9, and no keys"):
        Embedding(10, 4).read_keys()


@pytest.mark.parametrize("kind", [Embedding, EmbeddingBag])
@pytest.mark.parametrize(
    ("given", "told"),
    [
        ((10, 4, KeyRules(capacity=5)), "num_embeddings=10 and max_capacity=5"),
        ((None, 4, None), "needs max_capacity"),
        ((None, 4, KeyRules(capacity=0)), "max_capacity=0, embedding_dim=4"),
        ((None, 4, KeyRules(capacity=5, admit_after=0)), "admit_after=0"),
        ((None, 4, KeyRules(capacity=5, evict="luck")), "evict='luck'"),
    ],
)
def test_rules_that_make_no_sense_are_refused(
    kind: type[Embedding | EmbeddingBag], given: tuple[int, int, KeyRules], told: str
) -> None:
    count, dim, keys = given
    with pytest.raises(UserError, match=told):
        kind(count, dim, keys=keys)


def test_a_table_that_does_not_fit_is_named() -> None:
    with pytest.raises(UserError, match=r"table words: 4000000000 GB .* num_embeddings=1000000000"):
        Embedding(10**15, 1000, name="words")
    with pytest.raises(UserError, match="make max_capacity=1000000000000000 smaller"):
        Embedding(None, 1000, keys=KeyRules(capacity=10**15))

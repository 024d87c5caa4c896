"""Sums and gathers of the simulator follow the product's plans, and faults strike within them."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence

import pytest

from holdfast.engine.core.spread_turns import plan_turns
from holdfast.engine.core.types import WorkerId
from holdfast.lab.sim.arithmetic import MISSING, add, expected_sum, task
from holdfast.lab.sim.swarm import run_seed
from holdfast.lab.sim.turns import Hosting, read, sum_nodes
from mutation_kit import EXCHANGES, GOES_ON

STATE, STEP = 3, 5


@pytest.mark.parametrize("size", [1, 2, 3, 4, 5, 7, 8, 13, 64, 100])
def test_every_record_reaches_every_member_once_and_in_the_order_of_the_ranks(size: int) -> None:
    plans = [plan_turns(rank, size) for rank in range(size)]
    held = [[rank] for rank in range(size)]
    for turn in range(len(plans[0])):
        before = [list(each) for each in held]
        for rank in range(size):
            now = plans[rank][turn]
            assert plans[now.get_from][turn].give_to == rank
            assert now.distance == len(before[rank])
            held[rank] += before[now.get_from][: now.records]
    assert held == [[(rank + i) % size for i in range(size)] for rank in range(size)]
    assert len(plans[0]) == (size - 1).bit_length()


class Carrier:
    """Carries the plans of all members out, one turn of one member at a time."""

    def __init__(self, owners: Sequence[int], size: int) -> None:
        workers, vranks = [WorkerId(w) for w in range(size)], len(owners)
        hosting = Hosting(workers, tuple(WorkerId(w) for w in owners))
        self.plans = [hosting.of(rank) for rank in range(size)]
        self.values: list[list[int]] = []
        for rank, plan in enumerate(self.plans):
            own = {v: task(STATE, STEP, v) for v in range(vranks) if owners[v] == rank}
            sums = sum_nodes(own, vranks)
            self.values.append([MISSING, *(sums[node] for node in plan.nodes)])
        self.turns = [-1] * size
        self.under_way: dict[tuple[int, int, int], tuple[tuple[int, ...], list[int]]] = {}

    def begin_next(self, rank: int) -> None:
        self.turns[rank] += 1
        for each in self.sends(rank):
            values = [read(self.values[rank], slots) for slots in each.slots]
            self.under_way[rank, each.rank, each.number] = each.pieces, values

    def sends(self, rank: int) -> Sequence[object]:
        turns = self.plans[rank].turns
        return turns[self.turns[rank]].sends if self.turns[rank] < len(turns) else ()

    def advance(self, rank: int) -> bool:
        """Take the present turn, if its messages are here; return whether it was taken."""
        if self.turns[rank] == len(self.plans[rank].turns):
            return False
        turn, values = self.plans[rank].turns[self.turns[rank]], self.values[rank]
        names = [(each.rank, rank, each.number) for each in turn.receives]
        if any(name not in self.under_way for name in names):
            return False
        for name, each in zip(names, turn.receives, strict=True):
            pieces, found = self.under_way.pop(name)
            assert pieces == each.pieces
            values += found
        values += [add(read(values, left), read(values, right)) for left, right in turn.additions]
        self.begin_next(rank)
        return True


@pytest.mark.parametrize("seed", range(60))
def test_level_by_level_every_member_has_the_sum_of_the_tree(seed: int) -> None:
    rng = random.Random(seed)
    size, vranks = rng.randint(1, 9), rng.randint(1, 17)
    scattered = [rng.randrange(size) for _ in range(vranks)]
    owners = scattered if seed % 2 else [v * size // vranks for v in range(vranks)]
    carrier = Carrier(owners, size)
    for rank in range(size):
        carrier.begin_next(rank)
    while any(carrier.advance(rank) for rank in rng.sample(range(size), size)):
        pass
    assert not carrier.under_way
    for plan, values in zip(carrier.plans, carrier.values, strict=True):
        assert read(values, plan.total) == expected_sum(STATE, STEP, vranks)


def test_members_of_large_groups_have_few_peers() -> None:
    size = 256
    workers = tuple(WorkerId(w) for w in range(size))
    plan = Hosting(workers, workers).of(100)
    messages = [each.rank for turn in plan.turns for each in turn.sends]
    assert len(set(messages)) <= 8
    assert len(messages) <= 16


@pytest.mark.slow
def test_faults_strike_within_sums_and_gathers() -> None:
    struck: Counter[str] = Counter()
    for seed in range(12):
        result = run_seed(seed, small=True, tuned=GOES_ON | EXCHANGES)
        assert not result.failure, f"{result.failure}\n{result.replay}"
        struck.update(result.faults)
    for act in ("kill", "freeze", "partition"):
        for place in ("sum", "gather"):
            assert struck[f"{act}_in_{place}"] > 1, (act, place)


@pytest.mark.slow
def test_the_drawn_schedules_strike_within_exchanges() -> None:
    results = [run_seed(seed) for seed in range(12)]
    struck = {kind for result in results for kind in result.faults}
    assert any(kind.endswith("_in_sum") for kind in struck)
    assert any(kind.endswith("_in_gather") for kind in struck)
    assert any(result.options.repeats for result in results)

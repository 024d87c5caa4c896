"""A plan sums every element in the canonical order, whoever hosts what, with few messages."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from holdfast.engine.core import tree
from holdfast.engine.core.sum_plan import Message, SumPlan, cut, plan_sum

ALIGN = 4


def nodes_of(hosting: Sequence[int], workers: int) -> list[tuple[tree.Node, ...]]:
    hosted = [[v for v, host in enumerate(hosting) if host == rank] for rank in range(workers)]
    return [tree.maximal_nodes(each, len(hosting)) for each in hosted]


def expression(node: tree.Node, vranks: int) -> str:
    start, width = node
    if width == 1:
        return str(start)
    left, right = tree.children(node)
    if right[0] >= vranks:
        return expression(left, vranks)
    return f"({expression(left, vranks)}+{expression(right, vranks)})"


class Carrier:
    """Carries plans out with text in place of numbers, one exchange of each worker at a time."""

    def __init__(self, hosting: Sequence[int], workers: int, numel: int) -> None:
        self.numel = numel
        self.plans = [plan_sum(nodes_of(hosting, workers), len(hosting), r) for r in range(workers)]
        self.held: list[dict[tree.Node, dict[int, str]]] = []
        for nodes in nodes_of(hosting, workers):
            every = {n: dict.fromkeys(range(numel), expression(n, len(hosting))) for n in nodes}
            self.held.append(every)
        self.results: list[dict[int, str]] = [{} for _ in range(workers)]
        self.in_flight: dict[tuple[int, int], list[tuple[Message, dict[int, str]]]] = {}

    def part(self, message: Message) -> range:
        where = cut(message.part, self.numel, ALIGN)
        return range(where.start, where.stop)

    def send(self, rank: int, messages: Sequence[Message], *, up: bool) -> None:
        for each in messages:
            source = self.held[rank][each.node] if up else self.results[rank]
            body = {e: source[e] for e in self.part(each)}
            self.in_flight.setdefault((rank, each.peer), []).append((each, body))

    def receive(self, rank: int, message: Message) -> dict[int, str]:
        sent, body = self.in_flight[message.peer, rank].pop(0)
        assert (sent.node, sent.part) == (message.node, message.part)
        return body

    def run(self) -> None:
        ranks = range(len(self.plans))
        turns = [self.work(rank) for rank in ranks]
        order = random.Random(len(self.plans) + self.numel)
        live = set(ranks)
        while live:
            rank = order.choice(sorted(live))
            if next(turns[rank], None) is None:
                live.remove(rank)
        assert not any(self.in_flight.values()), "a message that nobody has received"

    def work(self, rank: int):
        plan: SumPlan = self.plans[rank]
        held = self.held[rank]
        for level in plan.up:
            self.send(rank, level.sends, up=True)
            got: dict[tree.Node, dict[int, str]] = {n: dict(each) for n, each in held.items()}
            for each in level.receives:
                while not self.in_flight.get((each.peer, rank)):
                    yield "waits"
                got.setdefault(each.node, {}).update(self.receive(rank, each))
            for each in level.additions:
                where = cut(each.part, self.numel, ALIGN)
                held[each.node] = {
                    e: f"({got[each.left][e]}+{got[each.right][e]})"
                    for e in range(where.start, where.stop)
                }
        if plan.own is not None:
            where = cut(plan.own[1], self.numel, ALIGN)
            self.results[rank] = {e: held[plan.own[0]][e] for e in range(where.start, where.stop)}
        for level in plan.down:
            self.send(rank, level.sends, up=False)
            for each in level.receives:
                while not self.in_flight.get((each.peer, rank)):
                    yield "waits"
                self.results[rank].update(self.receive(rank, each))


def random_hosting(seed: int) -> tuple[list[int], int]:
    dice = random.Random(seed)
    workers = dice.randint(1, 9)
    vranks = dice.randint(1, 20)
    hosting = sorted(dice.randrange(workers) for _ in range(vranks))
    if seed % 3 == 0:
        dice.shuffle(hosting)
    return hosting, workers


@pytest.mark.parametrize("seed", range(200))
def test_every_worker_ends_with_the_canonical_sum_of_every_element(seed: int) -> None:
    hosting, workers = random_hosting(seed)
    carrier = Carrier(hosting, workers, numel=(1, 7, 64, 129)[seed % 4])
    carrier.run()
    wanted = expression(tree.root(len(hosting)), len(hosting))
    for found in carrier.results:
        assert found == dict.fromkeys(range(carrier.numel), wanted)


def sent(plan: SumPlan, *, up: bool) -> float:
    levels = plan.up if up else plan.down
    return float(sum(m.part[1] - m.part[0] for each in levels for m in each.sends))


@pytest.mark.parametrize(("workers", "vranks"), [(2, 2), (8, 8), (64, 64), (64, 256), (256, 256)])
def test_contiguous_blocks_need_log_n_peers_and_the_bytes_of_a_ring(
    workers: int, vranks: int
) -> None:
    nodes = nodes_of([v * workers // vranks for v in range(vranks)], workers)
    for rank in range(0, workers, max(1, workers // 8)):
        plan = plan_sum(nodes, vranks, rank)
        assert len(plan.peers) == workers.bit_length() - 1
        assert sent(plan, up=True) == sent(plan, up=False) == 1 - 1 / workers


def test_low_levels_stay_within_a_machine() -> None:
    """Machines of eight workers send less than 1 each to other machines for a sum of size 1."""
    nodes = nodes_of(range(64), 64)
    plans = [plan_sum(nodes, 64, rank) for rank in range(8)]
    crossing = [m for p in plans for lv in p.up for m in lv.sends if m.peer >= 8]
    assert sum(m.part[1] - m.part[0] for m in crossing) == 1 - 1 / 8


@pytest.mark.parametrize("lost", [1, 4, 24])
def test_lost_workers_leave_few_peers(lost: int) -> None:
    """The blocks are not contiguous again before the next boundary."""
    dice = random.Random(lost)
    gone = set(dice.sample(range(1024), lost))
    left = [rank for rank in range(1024) if rank not in gone]
    hosting = [
        left.index(rank) if rank not in gone else dice.randrange(len(left)) for rank in range(1024)
    ]
    nodes = nodes_of(hosting, len(left))
    for rank in dice.sample(range(len(left)), 5):
        assert len(plan_sum(nodes, 1024, rank).peers) <= 40

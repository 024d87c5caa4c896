"""A disputed sum is decided by majority, and whoever made it wrongly is found."""

from __future__ import annotations

import random

import pytest

from holdfast.engine.core.ground.effects import COMPARE, SumQuestion, SumStage
from holdfast.engine.core.step.sum_trial import SumTrial, find_makers, find_wrong, majority
from holdfast.lab.sim.exchanges import makers_of

TRACE = SumQuestion(SumStage.TRACE)


def test_a_sum_that_all_have_twice_alike_is_right() -> None:
    trial = SumTrial(4, (0, 1), 2)
    assert trial.question == COMPARE
    trial.hear(((5, 5), (5, 5)))
    assert (trial.question, trial.right, trial.wrong) == (None, (), ())


@pytest.mark.parametrize("table", [((5, 6), (5, 6)), ((5, 5), (6, 6)), ((5, 5, 7, 8),) * 2])
def test_results_that_differ_between_runs_members_or_in_one_shard_are_disputed(
    table: tuple[tuple[int, ...], ...],
) -> None:
    trial = SumTrial(4, (0, 1), 2)
    trial.hear(table)
    assert trial.question == SumQuestion(SumStage.FLAT, 0)


@pytest.mark.parametrize("odd", [0, 1, 2])
def test_a_worker_that_sums_a_piece_wrongly_once_is_found_in_the_third_run(odd: int) -> None:
    """Rank (p - r) % 3 sums piece p in run r, and all members get its result."""
    trial = SumTrial(0, (0, 1, 2), 3)
    trial.hear(((1, 2),) * 3)
    for turn in range(3):
        assert trial.question == SumQuestion(SumStage.FLAT, turn)
        row = [5, 6, 7]
        for piece in range(3):
            if (piece - turn) % 3 == odd and turn == 1:
                row[piece] = 99
        trial.hear((tuple(row),) * 3)
    assert (trial.question, trial.right) == (TRACE, (5, 6, 7))
    rows = ((10, 11, 10, 11, 1, 1, 1, 1), (12, 13, 12, 13, 1, 1, 1, 1), (14, 15, 1, 1, 1, 1))
    trial.hear(tuple(rows))
    assert (trial.question, trial.wrong, trial.is_undecided) == (None, (odd,), False)


def test_a_copy_that_alone_is_wrong_is_its_holders() -> None:
    right = ((5, 6, 7),) * 3
    damaged = ((5, 6, 7), (5, 9, 7), (5, 6, 7))
    assert find_wrong([damaged, right, right], (5, 6, 7)) == (1,)
    assert majority([damaged, right, right]) == (5, 6, 7)


def test_without_a_majority_a_sum_stays_undecided() -> None:
    each_other = [((n, n),) * 2 for n in range(3)]
    assert majority(each_other) is None
    one_only = [((5, 6),) * 2, ((5, 6),) * 2, ((8, 9),) * 2]
    assert majority(one_only) == (5, 6)
    trial = SumTrial(0, (0, 1), 2)
    for table in (((1, 2),) * 2, *each_other):
        trial.hear(table)
    assert trial.is_undecided
    assert trial.question is None


def test_the_maker_of_a_wrong_sum_is_found_wherever_it_is_in_the_tree() -> None:
    """Hosts, shards (up to three) and wrong makers are random; only wrong makers are blamed."""
    found = 0
    for seed in range(400):
        dice = random.Random(seed)
        size = dice.randint(2, 9)
        vranks = dice.randint(size, 20)
        hosts = tuple(dice.randrange(size) for _ in range(vranks))
        makers = makers_of(hosts, size)
        many = dice.choice([0, 1, 1, 1, 2, size])
        wrongly = makers.makers_among(sorted(dice.sample(range(size), many)))
        shards = dice.randint(1, 3)
        wrong_shard = dice.randrange(shards)
        table = [
            tuple(
                word
                for shard in range(shards)
                for word in makers.trace(rank, wrongly if shard == wrong_shard else (), shard)
            )
            for rank in range(size)
        ]
        blamed = find_makers(hosts, size, tuple(table))
        assert blamed <= set(wrongly)
        if len(wrongly) == 1:
            assert blamed == set(wrongly)
            found += 1
    assert found > 100

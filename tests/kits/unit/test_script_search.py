"""Tests that scripts composed at random from habits keep the promise, or are refused by name."""

from __future__ import annotations

import collections
from pathlib import Path

import pytest

from script_search.compose import compose
from script_search.habit import Truth
from script_search.runs import (
    CRASH,
    EXACT,
    FALSE,
    NAMED,
    SILENT,
    Result,
    Run,
    examine,
    examine_all,
    judge,
    quiet,
)

SEEDS = (0, 1, 2, 3)
MANY = range(500)
REFUSED_BY_TORCH = (242,)  # swap_tensors in a hook


def bad(results: list[Result]) -> list[Result]:
    return [each for each in results if each.verdict in (SILENT, FALSE, CRASH)]


@pytest.mark.parametrize("seed", SEEDS)
def test_a_composed_script_is_exact_or_refused_by_name(seed: int, tmp_path: Path) -> None:
    with quiet():
        found = examine(compose(seed), tmp_path)
    assert found.verdict in (EXACT, NAMED), found


@pytest.mark.slow
@pytest.mark.timeout(3600)
def test_no_script_of_many_is_silently_wrong() -> None:
    results = examine_all(MANY)
    found = [each for each in bad(results) if each.seed not in REFUSED_BY_TORCH]
    assert not found, found


def test_a_seed_gives_the_same_script_and_seeds_differ() -> None:
    texts = [compose(seed).text for seed in range(50)]
    assert texts == [compose(seed).text for seed in range(50)]
    assert len(set(texts)) == 50
    for text in texts:
        compile(text, "train.py", "exec")


def test_every_truth_is_drawn() -> None:
    counts = collections.Counter(compose(seed).truth for seed in MANY)
    assert all(counts[truth] >= 10 for truth in Truth), counts


def verdict(seed: int, *ends: tuple[str, str]) -> str:
    runs = tuple(Run(name="", digest=digest, refused=refused) for digest, refused in ends)
    return judge(compose(seed), runs)


def test_verdicts_on_runs_follow_from_their_results_and_refusals() -> None:
    harmless = next(s for s in range(50) if compose(s).truth is Truth.HARMLESS)
    harmful = next(s for s in range(50) if compose(s).truth is Truth.TASKS)
    refusal = f"UserError: {compose(harmful).names[0]} is kept"
    assert verdict(harmful, ("a", ""), ("a", ""), ("a", "")) == EXACT
    assert verdict(harmful, ("a", ""), ("b", ""), ("", refusal)) == SILENT
    assert verdict(harmful, ("a", ""), ("", refusal), ("a", "")) == NAMED
    assert verdict(harmless, ("a", ""), ("", refusal), ("a", "")) == FALSE
    assert verdict(harmless, ("a", ""), ("", "KeyError: 3"), ("a", "")) == CRASH

"""Tests which captured states count as the same, and how a difference is named."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch

from guard_kit import told
from holdfast.engine.core.errors import StateMismatch
from holdfast.engine.train.checkpoint import state
from holdfast.engine.train.checkpoint.loaded_state import check_loaded, fingerprint
from holdfast.engine.train.job import Job
from loop_kit import dataset, digest, everywhere, net, step_once
from thread_cluster import ThreadWorker

KEPT = {"a": torch.arange(3), "b": {"x": 1.5, 2: torch.ones(2, 2)}, "c": ["one", None, 3]}


def captured(value: Any) -> tuple[bytes, list[torch.Tensor]]:
    return state.flatten({"keeper": value}, "state")


def reordered(value: Any) -> Any:
    if not isinstance(value, dict):
        return value
    return {key: reordered(value[key]) for key in reversed(value)}


def test_the_order_of_keys_does_not_count() -> None:
    one, other = captured(KEPT), captured(reordered(KEPT))
    assert one != other
    assert fingerprint(*one) == fingerprint(*other)
    check_loaded(one, other)


def test_the_order_of_an_ordered_dictionary_counts() -> None:
    one, other = OrderedDict(a=1, b=2), OrderedDict(b=2, a=1)
    assert fingerprint(*captured(one)) != fingerprint(*captured(other))


def test_values_that_change_places_count() -> None:
    one, other = (
        {"a": torch.zeros(2), "b": torch.ones(2)},
        {"a": torch.ones(2), "b": torch.zeros(2)},
    )
    assert fingerprint(*captured(one)) != fingerprint(*captured(other))


@pytest.mark.parametrize(
    ("change", "text"),
    [
        ({"a": torch.arange(4)}, "keeper['a'] is a tensor [4] of int64 after loading a state in"),
        ({"a": torch.ones(3).long()}, "keeper['a'], a tensor [3] of int64, has other values"),
        ({"b": {"x": 2.5}}, "keeper['b']['x'] is 2.5 after loading a state in which it is 1.5"),
        ({"c": ["one", None]}, "keeper['c'][2] is missing after loading a state in which it is 3"),
        ({"d": True}, "the number of keys of keeper is 4 after loading a state in which it is 3"),
        ({"a": None}, "keeper['a'] is None after loading a state in which it is a tensor [3]"),
    ],
)
def test_the_first_difference_is_named(change: dict[str, Any], text: str) -> None:
    with pytest.raises(StateMismatch) as caught:
        check_loaded(captured(KEPT), captured({**KEPT, **change}))
    assert text in str(caught.value)
    assert "load_state_dict() keep every value" in str(caught.value)


class Keeper:
    """Keeps numbers in an object of the script's own, and loads them by `rule`."""

    def __init__(self, rule: Any) -> None:
        self.kept = {"best": 0.0, "seen": 0}
        self.rule = rule

    def state_dict(self) -> dict[str, Any]:
        return self.kept

    def load_state_dict(self, found: dict[str, Any]) -> None:
        self.kept = self.rule(found)


def keeps(rule: Any) -> Any:
    def script(job: Job, me: ThreadWorker) -> Any:
        model, keeper = net(), Keeper(rule)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        job.protect(model=model, optimizer=optimizer, keeper=keeper)
        for step in job.steps(job.batches(dataset(), 3), until=12):
            step_once(step, model, optimizer)
            keeper.kept["seen"] += 1
        return digest(model), keeper.kept["seen"]

    return script


@pytest.mark.slow
def test_a_joiner_may_keep_its_keys_in_another_order() -> None:
    everywhere(keeps(reordered))


def test_an_object_that_does_not_take_its_state_is_named() -> None:
    found = told(keeps(lambda found: {"best": found["best"], "seen": 0}), 2, {1: 20})
    assert "keeper['seen'] is 0 after loading a state in which it is" in found

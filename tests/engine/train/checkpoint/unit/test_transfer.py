"""Joiners receive the state from few donors and from each other, and never load a damaged one."""

from __future__ import annotations

import copy
from collections.abc import Sequence

import pytest
import torch
from torch import nn

from holdfast.engine.core.errors import Aborted
from holdfast.engine.core.types import WorkerId
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.checkpoint.transfer import DONORS_MAX, StateSync
from holdfast.engine.train.exchange.layout import TAG_STATE, Layout, spread_shares
from mailboxes import mailboxes, together


def sync(
    modules: Sequence[nn.Module], donors: list[int], joiners: list[int], damaged: int = -1
) -> tuple[list[BaseException], list[int], set[tuple[int, int]]]:
    """Send the donors' state to the joiners; `damaged`: the rank that damages a message.

    Return the errors, the ranks that have loaded a state, and pairs of senders and receivers.
    """
    size = len(modules)
    boxes = mailboxes(size)
    if damaged >= 0:
        boxes[damaged].damage = True
    hosted = tuple((rank,) for rank in range(size))
    nodes = tuple(((rank, 1),) for rank in range(size))
    loads: list[int] = []
    syncs = []
    for rank, module in enumerate(modules):
        layout = Layout(rank, size, size, hosted, nodes, tuple(map(WorkerId, range(size))))
        loaded = LoadedState({"m": module})
        syncs.append(StateSync(boxes[rank], layout, loaded, lambda r=rank: loads.append(r)))
    actions = [lambda each=each: each.run(donors, joiners) for each in syncs]
    errors = together(*actions)
    pairs = {(a, b) for a, b, tag in boxes[0]._shared if tag == TAG_STATE}
    return errors, sorted(loads), pairs


def test_a_joiner_receives_the_state() -> None:
    donor, joiner = nn.Linear(20, 20), nn.Linear(20, 20)
    assert sync([donor, joiner], [0], [1])[:2] == ([], [1])
    assert torch.equal(donor.weight, joiner.weight)


@pytest.mark.parametrize(("donors", "joiners"), [(1, 5), (3, 2), (5, 1), (2, 6), (20, 1), (18, 3)])
def test_joiners_receive_the_state_from_few_donors_and_from_each_other(
    donors: int, joiners: int
) -> None:
    size = donors + joiners
    source = nn.Linear(40, 40)
    modules = [copy.deepcopy(source) for _ in range(donors)]
    modules += [nn.Linear(40, 40) for _ in range(joiners)]
    late = list(range(donors, size))
    errors, loads, pairs = sync(modules, list(range(donors)), late)
    assert (errors, loads) == ([], late)
    assert all(torch.equal(each.weight, source.weight) for each in modules)
    words = {
        (a, b)
        for distance in (1, 2, 4, 8, 16)
        for a in range(size)
        for b in range(size)
        if (a - b) % size == distance
    }  # fingerprints of the states spread along these
    for joiner in late:
        assert len({a for a, b in pairs - words if b == joiner and a < donors}) <= DONORS_MAX


@pytest.mark.parametrize("damaged", [0, 1, 3])
def test_a_damaged_transfer_is_never_loaded(damaged: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """The damage may come from a donor, or from a joiner that hands the state on."""
    monkeypatch.setattr("mailboxes.RUN_S", 1.0)  # the donors wait for the joiners without success
    source = nn.Linear(20, 20)
    modules = [copy.deepcopy(source) for _ in range(2)] + [nn.Linear(20, 20) for _ in range(3)]
    before = [each.weight.clone() for each in modules]
    errors, loads, _ = sync(modules, [0, 1], [2, 3, 4], damaged)
    assert any(isinstance(e, Aborted) and "damaged" in str(e) for e in errors), errors
    assert len(loads) < 3
    for rank in {2, 3, 4} - set(loads):
        assert torch.equal(modules[rank].weight, before[rank])


@pytest.mark.parametrize("size", range(1, 10))
def test_shares_reach_all_in_log_n_exchanges(size: int) -> None:
    wanted = [[torch.full((rank % 3,), rank), torch.arange(rank)] for rank in range(size)]
    boxes = mailboxes(size)
    had: list[list[list[torch.Tensor]]] = []

    def spread(rank: int) -> None:
        mine = [
            [t.clone() if owner == rank else torch.zeros_like(t) for t in share]
            for owner, share in enumerate(wanted)
        ]
        had.append(mine)
        spread_shares(boxes[rank], range(size), rank, mine, TAG_STATE)

    assert together(*[lambda r=r: spread(r) for r in range(size)]) == []
    for shares in had:
        for share, right in zip(shares, wanted, strict=True):
            assert all(map(torch.equal, share, right))
    for rank in range(size):
        assert len({b for a, b, _ in boxes[0]._shared if a == rank}) <= (size - 1).bit_length()

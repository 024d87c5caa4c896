"""Values of tasks spread to all members along open connections, in log2 N messages each."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from holdfast.engine.core.errors import Aborted
from holdfast.engine.train.exchange.layout import Layout
from holdfast.engine.train.step.reduction import TableGather
from holdfast.engine.train.step.step_table import StepTable
from holdfast.engine.train.step.values import PROPOSAL, VALUES_BYTES_MAX, StepValues, ValuesGather
from peer_kit import OpenConnections, complete_all, connect, lay_out
from roster_kit import view_of


def gathers(
    layouts: Sequence[Layout], every: Sequence[StepValues], dropped: int = -1
) -> list[tuple[TableGather, ValuesGather]]:
    """Return the operations by which members learn of sizes, and then of values."""
    size, vranks = len(layouts), layouts[0].vranks
    view = view_of(*range(size), vranks=vranks)
    found = []
    for layout, mine in zip(layouts, every, strict=True):
        values = ValuesGather(mine, layout, view, counts=layout.rank != dropped)
        used = torch.zeros(1, dtype=torch.bool)
        rows = TableGather(StepTable(vranks, 1), used, layout, follows=values.size)
        values.expect(rows.follows)
        found.append((rows, values))
    return found


def messages_of_values(transports: Sequence[OpenConnections], layout: Layout) -> list[int]:
    """Return the number of messages sent besides the rows, by rank, two in each turn."""
    return [len(each.sent) - 2 * len(layout.turns) for each in transports]


@settings(max_examples=40, deadline=None)
@given(data=st.data(), size=st.sampled_from([1, 2, 3, 5, 8, 13]))
def test_every_member_gets_the_values_of_all(data: st.DataObject, size: int) -> None:
    vranks = data.draw(st.integers(1, 16))
    layouts = lay_out(
        data.draw(st.lists(st.integers(0, size - 1), min_size=vranks, max_size=vranks)), size
    )
    dropped = data.draw(st.integers(-1, size - 1))
    every = [StepValues() for _ in range(size)]
    expected = {}
    if data.draw(st.booleans()):
        every[0].put(PROPOSAL, b"agreed")
        expected[PROPOSAL] = b"agreed"
    for vrank, host in enumerate(layouts[0].owners):
        value = data.draw(st.sampled_from([b"", b"x", b"%d" % vrank * 1000]))
        if value or data.draw(st.booleans()):
            every[host].put(vrank, value)
            if host != dropped:
                expected[vrank] = value
    transports = connect(layouts)
    complete_all(gathers(layouts, every, dropped), transports)
    for values in every:
        assert values.told == expected
        assert values.encode() == every[0].encode()
    counts = messages_of_values(transports, layouts[0])
    assert max(counts) <= len(layouts[0].turns)
    if not expected:
        assert counts == [0] * size


def test_a_member_sends_log_n_messages_and_every_value_once() -> None:
    layouts = lay_out(range(16), 16)
    every = [StepValues() for _ in layouts]
    for vrank, values in enumerate(every):
        values.put(vrank, bytes(1000))
    transports = connect(layouts)
    complete_all(gathers(layouts, every), transports)
    assert messages_of_values(transports, layouts[0]) == [4] * 16
    for transport in transports:
        of_rows = sum(size for _, size in transport.sent) - 15 * 1007
        assert 0 < of_rows < 16 * 200


@pytest.mark.parametrize("size", [-1, VALUES_BYTES_MAX + 1])
def test_values_of_an_impossible_size_are_refused(size: int) -> None:
    layouts = lay_out(range(2), 2)
    operations = gathers(layouts, [StepValues(), StepValues()])
    operations[1][0].follows[1] = size
    with pytest.raises(Aborted, match=f"impossible sizes were announced.*{size}"):
        complete_all(operations, connect(layouts))

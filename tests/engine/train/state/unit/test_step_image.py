"""The bytes of a reduced step, in the nodes' memory and on the way to other workers, are pinned.

A worker of one release may recall what another has put into the nodes' memory, and members of a
view may run two releases while nodes are replaced. So these digests never change.
"""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import Any

import pytest
import torch
import xxhash
from torch import nn

from holdfast.engine.core.errors import WireError
from holdfast.engine.core.ground import effects as ef
from holdfast.engine.core.ground.events import SinkKind
from holdfast.engine.core.types import ViewNumber, WorkerId
from holdfast.engine.train.exchange.tensor_bytes import as_bytes
from holdfast.engine.train.state.feeder import Feeder, send_message
from holdfast.engine.train.state.step_image import MissedSteps, StepImage, put_images
from holdfast.engine.train.step.driver import Monitor
from holdfast.engine.train.step.gradients import Gradients
from holdfast.engine.train.step.step_data import StepData
from holdfast.engine.train.step.step_table import Buffers, StepTable
from step_data_kit import (
    VRANKS,
    content_of,
    fill_step,
    in_view,
    keep_missed,
    make_step,
    send_missed,
)


def make_step_with_rows() -> StepData:
    model = nn.Sequential(nn.EmbeddingBag(50, 4, sparse=True), nn.Linear(4, 3))
    by_row = [[model[0].weight]]
    gradients = Gradients(model.named_parameters(), VRANKS, Monitor(), by_row=by_row)
    gradients.attach()
    rest: Any = None
    table = StepTable(VRANKS, len(list(model.parameters())))
    return StepData(gradients, table, Buffers([]), rest, rest)


def fill(step: StepData, index: int) -> None:
    fill_step(step, index, left=bool(len(step.buffers)))
    for table in step.gradients.active_tables:
        rows = table.make_rows(5)
        rows.places.copy_(torch.arange(5) * 3 + index)
        rows.values.copy_(torch.arange(20).view(5, 4) / 7)
        table.result = rows


def image_digest(step: StepData) -> str:
    return xxhash.xxh3_64_hexdigest(
        b"".join(as_bytes(t).numpy().tobytes() for t in StepImage.view(step).encode())
    )


def feed_digest(step: StepData, rank: int) -> str:
    unused: Any = None
    feeder = Feeder(WorkerId(0), {}, step, unused, unused, 0.0, compares=True)
    feeder._rank, feeder._feeders = rank, 2
    ours, theirs = socket.socketpair()
    sender: Any = Sender(ours)
    feeder._senders = [sender]
    feeder.keep(ef.KeepStep(SinkKind.FOLLOWERS, ViewNumber(1), 7, compared=True), in_view(rank, 2))
    ours.close()
    data = b""
    while more := theirs.recv(1 << 16):
        data += more
    theirs.close()
    return xxhash.xxh3_64_hexdigest(data)


class Sender:
    budget = 1 << 40

    def __init__(self, channel: socket.socket) -> None:
        self.channel = channel

    def put(self, message: Any) -> int:
        send_message(self.channel, message.head, message.buffers)
        return 0


class Sent:
    def __init__(self) -> None:
        self.digest = xxhash.xxh3_64()

    def exchange(self, sends: Any, receives: Any, tag: int) -> Sent:
        for to, tensor in sends:
            self.digest.update(f"{to} {tensor.nbytes};".encode())
            self.digest.update(as_bytes(tensor).numpy().tobytes())
        return self

    def wait(self) -> None:
        pass


def missed_digest(step: StepData, rank: int) -> str:
    missed, sent = MissedSteps(step), Sent()
    transport: Any = sent
    keep_missed(missed, 7, rank, 2)
    send_missed(missed, transport, range(7, 8), rank, 2)
    return sent.digest.hexdigest()


@pytest.mark.parametrize(
    ("make", "image", "feeds", "messages"),
    [
        (
            make_step,
            "6d27b03c4f354857",
            ["408bd215f0d5bca7", "802af8e34de8d77a"],
            ["4ab7b84f0dd50fd3", "6ea3de6c27d04a86"],
        ),
        (
            make_step_with_rows,
            "c4ec26a72cb3400a",
            ["27b1d84db8905b0d", "cdaff885cc8ac965"],
            ["ad59b3d10de0ea92", "2d06800538d394c2"],
        ),
    ],
)
def test_the_bytes_of_a_step_are_the_same_for_ever(
    make: Callable[[], StepData], image: str, feeds: list[str], messages: list[str]
) -> None:
    step = make()
    fill(step, 7)
    assert image_digest(step) == image
    assert [feed_digest(step, rank) for rank in (0, 1)] == feeds
    assert [missed_digest(step, rank) for rank in (0, 1)] == messages


@pytest.mark.parametrize("make", [make_step, make_step_with_rows])
def test_a_step_is_restored_from_its_image(make: Callable[[], StepData]) -> None:
    torch.manual_seed(0)
    given, taken = make(), make()
    fill(given, 7)
    data = b"".join(as_bytes(part).numpy().tobytes() for part in StepImage.view(given).encode())
    put_images(taken, [StepImage.decode(memoryview(bytearray(data)))])
    assert content_of(taken) == content_of(given)
    for mine, other in zip(
        taken.gradients.active_tables, given.gradients.active_tables, strict=True
    ):
        assert mine.result.equals(other.result)
    with pytest.raises(WireError, match="cannot be read"):
        StepImage.decode(memoryview(data[:40]))

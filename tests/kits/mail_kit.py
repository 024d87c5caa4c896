"""Provides a transport between threads, for tests of exchanges outside of steps."""

from __future__ import annotations

import queue

import torch

from conftest import RUN_S
from holdfast.engine.train.exchange.seam import Message


class Mail:
    """Connects threads: messages of a pair arrive in the order sent, once both are there."""

    ordered = False

    def __init__(self, boxes: dict[tuple[int, int], queue.Queue[torch.Tensor]], rank: int) -> None:
        self.boxes = boxes
        self.rank = rank

    def exchange(
        self, sends: list[Message], receives: list[Message], tag: int, sent_us: int = 0
    ) -> Mail:
        for peer, tensor in sends:
            self.boxes[self.rank, peer].put(tensor.clone())
        for peer, tensor in receives:
            tensor.copy_(self.boxes[peer, self.rank].get(timeout=RUN_S))
        return self

    def wait(self) -> None:
        return


class Noisy(Mail):
    """Damages a bit of the messages of rank 0."""

    def exchange(
        self, sends: list[Message], receives: list[Message], tag: int, sent_us: int = 0
    ) -> Mail:
        if self.rank == 0 and sends:
            sends = [(peer, tensor.clone()) for peer, tensor in sends]
            sends[0][1].view(torch.uint8)[0] ^= 1
        return super().exchange(sends, receives, tag)

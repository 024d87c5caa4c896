"""Connects threads of one process: the tiniest fake transport that keeps the contract."""

from __future__ import annotations

import collections
import threading

import torch

from conftest import RUN_S
from holdfast.engine.train.exchange.seam import Message, NothingPending, Pending


class Mailbox:
    """Connects threads of one process: the tiniest fake transport that keeps the contract."""

    ordered = False

    def __init__(self, rank: int, shared: dict, changed: threading.Condition) -> None:
        self._rank = rank
        self._shared = shared
        self._changed = changed
        self.damage = False  # a planted fault: the next large message arrives with a flipped bit

    def exchange(
        self, sends: list[Message], receives: list[Message], tag: int, sent_us: int = 0
    ) -> Pending:
        with self._changed:
            for peer, tensor in sends:
                copy = tensor.clone()
                if self.damage and copy.numel() > 100:
                    copy.view(-1).view(torch.uint8)[7] ^= 1
                    self.damage = False
                self._shared[self._rank, peer, tag].append(copy)
            self._changed.notify_all()
            for peer, tensor in receives:
                box = self._shared[peer, self._rank, tag]
                assert self._changed.wait_for(lambda box=box: box, RUN_S)
                tensor.copy_(box.popleft())
        return NothingPending()


def mailboxes(size: int) -> list[Mailbox]:
    shared: dict = collections.defaultdict(collections.deque)
    changed = threading.Condition()
    return [Mailbox(rank, shared, changed) for rank in range(size)]


def together(*actions: object) -> list[BaseException]:
    """Run all actions in threads; return the errors that they raised."""
    errors: list[BaseException] = []

    def guarded(action: object) -> None:
        try:
            action()
        except BaseException as error:  # noqa: BLE001 - returned to the test
            errors.append(error)

    threads = [threading.Thread(target=guarded, args=(a,)) for a in actions]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(RUN_S)
    return errors

"""How the members of a view agree on whose results of a step count, when it does not wait for all.

Whoever is done with all its tasks says so to the first member, which tells all who counts as soon
as enough are done. That must be known before anything is summed. It comes at any time, also while
this worker's script still computes the step before, so a thread listens to each who may say
something.
"""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch

from holdfast.core.errors import Aborted
from holdfast.core.step.backup import BackupPolicy, who_counts
from holdfast.train.driver import Driver
from holdfast.train.step.reduction import Layout
from holdfast.train.transport.seam import Transport

TAG_BACKUP = 10
FIRST = 0  # the rank of the member that hears who is done


class Agreement:
    """Of one view, seen from one member. Begin with `start`."""

    def __init__(
        self,
        driver: Driver,
        policy: BackupPolicy,
        view: int,
        layout: Layout,
        transport: Transport,
    ) -> None:
        self._driver = driver
        self._policy = policy
        self._view = view
        self._rank, self._size, self._peers = layout.rank, layout.size, layout.peers
        self._transport = transport
        self._step = 0  # the one that is agreed on; a later one may be agreed on already
        self._done: dict[int, dict[int, int]] = {}  # by step and rank: samples used
        self._counted: dict[int, tuple[int, ...]] = {}  # by step: the ranks that count
        self._broken = False

    def start(self) -> None:
        for peer in self._peers if self._rank == FIRST else [FIRST]:
            threading.Thread(
                target=self._listen, args=(peer,), name="holdfast-backup", daemon=True
            ).start()

    def drops(self, step: int) -> bool:
        """Whether it is known that this worker's results of the step do not count."""
        with self._driver.changed:
            return step in self._counted and self._rank not in self._counted[step]

    def settle(self, step: int, samples: Callable[[], int | None]) -> tuple[int, ...]:
        """Wait until it is known which ranks count in this step. Aborted.

        `samples`: how many this worker's tasks have used, once all of them are done.
        """
        changed, said = self._driver.changed, False
        with changed:
            self._step = step
            for table in (self._done, self._counted):
                for old in [s for s in table if s < step]:
                    del table[old]
        while True:
            with changed:
                while step not in self._counted and (said or samples() is None):
                    self._driver.check_alive(self._view)
                    if self._broken:
                        raise Aborted("the exchange of who is done has failed")
                    changed.wait()
                if step in self._counted:
                    return self._counted[step]
                used = samples() or 0
            said = True
            if self._rank == FIRST:
                self._note(FIRST, step, used)
            else:
                self._send([FIRST], step, [used])

    def _listen(self, peer: int) -> None:
        """To all that this peer says, for the life of the view."""
        words = torch.zeros(1 + self._size, dtype=torch.int64)
        try:
            while True:
                self._transport.exchange([], [(peer, words)], TAG_BACKUP).wait()
                step, *said = words.tolist()
                if self._rank == FIRST:
                    self._note(peer, step, said[0])
                    continue
                with self._driver.changed:
                    self._counted[step] = tuple(r for r, counts in enumerate(said) if counts)
                    self._driver.changed.notify_all()
        except Aborted:
            with self._driver.changed:
                self._broken = True
                self._driver.changed.notify_all()

    def _note(self, rank: int, step: int, samples: int) -> None:
        """This member is done; perhaps too late. Aborted."""
        with self._driver.changed:
            if step < self._step or step in self._counted:
                return
            done = self._done.setdefault(step, {})
            done[rank] = samples
            counted = who_counts(self._policy, self._size, done)
            if not counted:
                return
            self._counted[step] = counted
            self._driver.changed.notify_all()
        self._send(self._peers, step, [int(r in counted) for r in range(self._size)])

    def _send(self, to: list[int], step: int, said: list[int]) -> None:
        words = torch.zeros(1 + self._size, dtype=torch.int64)
        words[: 1 + len(said)] = torch.tensor([step, *said])
        self._transport.exchange([(p, words) for p in to], [], TAG_BACKUP).wait()

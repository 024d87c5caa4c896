"""Simulates exchanges of gradients in virtual time, by the engine's own rules.

It tests the reports on waits in votes: here the slow links are known.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Iterator, Sequence

from holdfast.engine.core.ground.events import Wait
from holdfast.engine.train.exchange.seam import Waits

BUCKETS = 3
COMPUTE_S = 0.1
NOISE, MESSAGE_NOISE = 0.03, 0.2  # relative, of computing and of messages
ODD = 0.01  # share of both that takes 1.3 to 3 times as long
VOTE_S = 0.002  # members see the end of a vote at different times


class MadeUpExchange:
    """Simulates a job, and the report on its waits in each member's vote.

    A member fills its buckets during the last part of its computing, sends each to all other
    members, and cannot begin with further ones while it waits. The messages of a link go one after
    the other.
    """

    def __init__(self, size: int, dice: random.Random, message_s: float, overlap: float) -> None:
        """Set up a job of `size` members.

        `message_s`: time of one bucket from one member to another. `overlap`: of computing and
        sending.
        """
        self._dice = dice
        self._message_s = message_s
        self._overlap = overlap
        self._now = [0.0] * size
        self._waits = [Waits(lambda m=m: self._now[m]) for m in range(size)]  # type: ignore[misc]
        self._arrivals: dict[tuple[int, int, int], float] = {}  # bucket, from, to
        self._sent_us: dict[tuple[int, int], int] = {}  # bucket, from
        self._link: Callable[[int, int], float] = lambda a, b: 1.0
        self.took_s: list[float] = []  # each member's computing in the last step

    def _varied(self, usual: float, noise: float) -> float:
        odd = self._dice.uniform(1.3, 3.0) if self._dice.random() < ODD else 1.0
        return usual * odd * math.exp(self._dice.gauss(0, noise))

    def step(self, slow: Callable[[int], float], link: Callable[[int, int], float]) -> list[Wait]:
        """Simulate a step, given factors for each member's computing and for each message."""
        members = range(len(self._now))
        self.took_s = [self._varied(COMPUTE_S * slow(m), NOISE) for m in members]
        self._arrivals.clear()
        self._link = link
        begin = max(self._now)
        for member in members:
            self._now[member] = begin + self._dice.uniform(0, VOTE_S)
            self._waits[member].begin()
        running = {m: self._member(m) for m in members}
        wanted = {m: next(engine, None) for m, engine in running.items()}
        while any(wanted.values()):
            for m, want in wanted.items():
                if want in self._arrivals:
                    self._now[m] = max(self._now[m], self._arrivals[want])
                    wanted[m] = next(running[m], None)
        return [waits.wait_of_step() for waits in self._waits]

    def _member(self, me: int) -> Iterator[tuple[int, int, int]]:
        """Run one member, and yield the messages that it waits for."""
        waits, begun = self._waits[me], 0
        peers = [(me + i) % len(self._now) for i in range(1, len(self._now))]
        left = [1 - self._overlap * b / BUCKETS for b in reversed(range(BUCKETS))]
        filled = [self._now[me] + self.took_s[me] * share for share in left]
        for bucket in range(BUCKETS):
            if begun == bucket:
                self._now[me] = max(self._now[me], filled[bucket])
            while begun < BUCKETS and filled[begun] <= self._now[me]:
                waits.begin_bucket()
                self._send(me, peers, begun)
                begun += 1
            waits.begin_wait()
            for peer in peers:
                yield bucket, peer, me
                waits.record_arrival(peer, self._sent_us[bucket, peer])

    def _send(self, me: int, peers: Sequence[int], bucket: int) -> None:
        self._sent_us[bucket, me] = self._waits[me].now_us()
        for peer in peers:
            free = self._arrivals.get((bucket - 1, me, peer), 0.0)
            took = self._varied(self._message_s, MESSAGE_NOISE) * self._link(me, peer)
            self._arrivals[bucket, me, peer] = max(free, self._now[me]) + took

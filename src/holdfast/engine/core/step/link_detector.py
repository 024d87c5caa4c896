"""Finds slow links between workers: verdicts, with reasons, from the waits in the votes. Pure.

A member's vote names the member whose gradients took the network longest, and the time: from the
moment at which that peer began to send them, which they carry, to their arrival. The time that a
peer computes, or waits for a third one, is not in it. A wait counts if it is longer than other
members' waits in the same step, by so much that it costs something. A link is slow when the waits
are for the same peer so often that chance is no explanation. If most other members wait for the
same peer, it is not a link but that worker's network.
"""

from __future__ import annotations

import math
import statistics
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.core.ground.events import NO_MEMBER, Wait
from holdfast.engine.core.types import WorkerId

RECENT = 16  # steps
COSTS_MIN_US = 5000  # lost in a step, for a verdict to be worth a line
COSTS_MIN = 0.05  # the same, of the time that the slowest computes: less is not worth a search
CLEARLY = 0.5  # longer than usual: networks vary more than computing does
RATE_MIN = 0.05  # at least this share of a healthy link's steps counts as clearly late
CHANCE_MAX = 1e-5  # for a verdict; with healthy other links, 8 of 16 steps


@dataclass(frozen=True, slots=True, kw_only=True)
class LinkVerdict:
    """Reports that the link from `worker` to `to` is slow, or not any more.

    `to`: None if it is the worker's whole network. `late_us`: how late it was in a step.
    """

    worker: WorkerId
    to: WorkerId | None
    #: The link is slow; if not, it is slow no more.
    slow: bool
    late_us: int
    reason: str

    def __str__(self) -> str:
        link = f"link from worker {self.worker} to worker {self.to}"
        what = link if self.to is not None else f"network of worker {self.worker}"
        state = "slow" if self.slow else "not slow any more"
        return f"the {what} is {state}: {self.reason}"


class LinkDetector:
    """Finds the slow links between the workers of one view. `observe` is the only mutator."""

    def __init__(self, workers: Sequence[WorkerId]) -> None:
        self._workers = tuple(workers)
        self._recent: deque[dict[int, tuple[int, int]]] = deque()  # by step, of each who waited
        self._hits: Counter[tuple[int, int]] = Counter()  # recent steps, by peer and who waited
        self._hits_of: Counter[int] = Counter()  # the same, by peer
        self._slow: dict[tuple[int, int | None], None] = {}  # reported: peer, waiting one or None

    def observe(self, waits: Sequence[Wait], compute_us: Sequence[int]) -> list[LinkVerdict]:
        """Take in the waits and computing times of a step, by rank; return new verdicts."""
        if len(waits) < 2:
            return []
        row = _find_long_waits(waits, max(COSTS_MIN_US, COSTS_MIN * max(compute_us)))
        self._remember(row)
        found = [self._make_recovery(*each) for each in list(self._slow) if self._is_over(*each)]
        for rank, (peer, _) in row.items():
            if (peer, None) in self._slow or (peer, rank) in self._slow:
                continue
            if self._chance(peer, rank) <= CHANCE_MAX:
                found.append(self._make_verdict(peer, rank))
        return found

    def _remember(self, row: dict[int, tuple[int, int]]) -> None:
        self._recent.append(row)
        old = self._recent.popleft() if len(self._recent) > RECENT else {}
        for rank, (peer, _) in row.items():
            self._hits[peer, rank] += 1
            self._hits_of[peer] += 1
        for rank, (peer, _) in old.items():
            self._hits[peer, rank] -= 1
            self._hits_of[peer] -= 1
            if not self._hits[peer, rank]:
                del self._hits[peer, rank]

    def _chance(self, peer: int, rank: int) -> float:
        """Return the probability that by chance this member waits so often for that peer.

        It is Chernoff's bound, for waits that are as frequent as the waits for other peers.
        """
        others = self._hits_of.total() - self._hits_of[peer]
        pairs = (len(self._workers) - 1) ** 2  # with another peer
        rate = max(RATE_MIN, others / (RECENT * pairs))
        share = self._hits[peer, rank] / RECENT
        if share <= rate:
            return 1.0
        exponent = share * math.log(share / rate)
        if share < 1:
            exponent += (1 - share) * math.log((1 - share) / (1 - rate))
        return math.exp(-RECENT * exponent)

    def _make_verdict(self, peer: int, rank: int) -> LinkVerdict:
        others = len(self._workers) - 1
        often = self._hits[peer, rank] / 2
        waiting = [r for r in range(others + 1) if self._hits[peer, r] >= often]
        who = f"{len(waiting)} of {others} others wait"
        many = len(waiting) > max(1, others / 2)
        if many:
            for told in [each for each in self._slow if each[0] == peer]:
                del self._slow[told]
        else:
            waiting, who = [rank], f"worker {self._workers[rank]} waits"
        self._slow[peer, None if many else rank] = None
        rows = [row[r] for row in self._recent for r in waiting if r in row]
        times = [late_us for whose, late_us in rows if whose == peer]
        late_us = sum(times) // len(times)
        return LinkVerdict(
            worker=self._workers[peer],
            to=None if many else self._workers[rank],
            slow=True,
            late_us=late_us,
            reason=f"{who} {late_us / 1000:.3g} ms a step for gradients that it sends in time",
        )

    def _is_over(self, peer: int, rank: int | None) -> bool:
        ranks = range(len(self._workers)) if rank is None else (rank,)
        return all(self._hits[peer, r] <= 1 for r in ranks)

    def _make_recovery(self, peer: int, rank: int | None) -> LinkVerdict:
        del self._slow[peer, rank]
        return LinkVerdict(
            worker=self._workers[peer],
            to=None if rank is None else self._workers[rank],
            slow=False,
            late_us=0,
            reason=f"it kept nobody waiting for {RECENT} steps",
        )


def _find_long_waits(waits: Sequence[Wait], worth_us: float) -> dict[int, tuple[int, int]]:
    """Find who waited for the network for so long that it counts: for which peer, how long."""
    if max(wait.counted_us for wait in waits) < worth_us:
        return {}
    known = [wait for wait in waits if wait.peer != NO_MEMBER]
    # The usual time comes from members that name another peer, perhaps only a few.
    most, many = Counter(wait.peer for wait in known).most_common(1)[0]
    usual_us = others_us = statistics.median_low(wait.took_us for wait in known)
    others = [wait.took_us for wait in known if wait.peer != most]
    if 2 * many > len(known) and others:
        others_us = statistics.median_low(others)
    row = {}
    for rank, wait in enumerate(waits):
        fair_us = others_us if wait.peer == most else usual_us
        late_us = wait.counted_us - fair_us
        if late_us >= max(worth_us, CLEARLY * fair_us):
            row[rank] = (wait.peer, late_us)
    return row

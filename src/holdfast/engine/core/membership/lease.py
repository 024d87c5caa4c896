"""Computes until when a silent node's workers may act, and from when they surely do not. Pure.

A worker can only commit a step with the votes of all members of its view. So its right to act must
end before its virtual ranks are given away, and there are two ways to renew that right:

- an answer of the coordinator to a report, counted from when the report was sent;
- a proof: a complete vote of its view shows that every other member was still acting in it when the
step began. A coordinator that forms another view must first have a report that at least one member
promised not to act any more, or died: its *witness*. No proof is newer than the witness.

A node that has announced when it will be taken away ends its workers by then in any case.

So without a coordinator a whole view continues, and a right that cannot be proved ends by itself:
`lease_s` after the newest renewal, and `abandon_s` after the newest answer in any case. The
coordinator waits `margin_s` longer, by its own clock. The margin must cover the drift of two clocks
during a lease, and the delay with which a node may stop its workers: 0.5 s allows for 5 % drift
over 2 s, or 0.03 % over `abandon_s`, and 0.4 s of delay.
"""

from __future__ import annotations

from holdfast.engine.core.errors import require
from holdfast.engine.core.policies import LeasePolicy

UNANSWERED_MAX = 1024  # reports whose sending time is remembered until the coordinator answers


def acting_deadline(answered_at: float, proved_at: float, policy: LeasePolicy) -> float:
    """Return when a worker must stop acting, by its node's clock, as both renewals are."""
    renewed_at = max(answered_at, proved_at)
    return min(renewed_at + policy.lease_s, answered_at + policy.abandon_s)


def fence_time(
    heard_at: float, witness_at: float | None, policy: LeasePolicy, ends_at: float = float("inf")
) -> float:
    """Return when a silent node's workers surely act no more, by the coordinator's clock.

    `heard_at`: when the newest report arrived, or the coordinator started. `witness_at`: when it
    learned that some member of the view can act in it no more; None while none is known. `ends_at`:
    when the node ends all its workers, as it has announced.
    """
    announced = max(heard_at + policy.fence_s, ends_at + policy.margin_s)
    alone = min(heard_at + policy.abandon_s + policy.margin_s, announced)
    if witness_at is None:
        return alone
    return min(alone, max(heard_at, witness_at) + policy.fence_s)


class CoordinatorContact:
    """Keeps what the answers of the coordinator prove to one node, by the node's clock."""

    def __init__(self, policy: LeasePolicy) -> None:
        #: When the newest report that was answered was sent.
        self.answered_at: float | None = None
        self._policy = policy
        self._sent_at: dict[int, float] = {}  # by the number of the report

    def record_report(self, seq: int, now: float) -> None:
        """Record that a report is sent; the oldest ones without an answer are forgotten."""
        self._sent_at[seq] = now
        self._sent_at.pop(seq - UNANSWERED_MAX, None)

    def record_answer(self, heard: int) -> None:
        """Record that the coordinator has answered the report with this number."""
        if (sent_at := self._sent_at.get(heard)) is not None:
            self.answered_at = sent_at
            self._sent_at = {seq: at for seq, at in self._sent_at.items() if seq > heard}

    def has_lease(self, now: float) -> bool:
        """Return whether an answer alone gives the right to act."""
        return self.answered_at is not None and now < self.answered_at + self._policy.lease_s

    def is_abandoned(self, now: float) -> bool:
        """Return whether the coordinator has been silent for so long that it has given us up."""
        return self.answered_at is not None and now >= self.answered_at + self._policy.abandon_s

    def acting_until(self, proved_at: float, now: float) -> float:
        """Return when a worker must stop acting; it has not begun to before the first answer."""
        if self.answered_at is None:
            return now
        return acting_deadline(self.answered_at, proved_at, self._policy)

    def check(self) -> None:
        """Assert that at most `UNANSWERED_MAX` reports are remembered."""
        require(len(self._sent_at) <= UNANSWERED_MAX, "reports without an answer pile up")

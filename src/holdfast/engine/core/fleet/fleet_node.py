"""Describes one placement and its agent for a fleet, and judges whether that is over.

There are two sources. The manager decides on requests and returns. Only the job's coordinator
decides whether an agent that has reported to it is lost.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, replace

from holdfast.engine.core.fleet.placements import (
    FleetPolicy,
    Holding,
    NodeSeen,
    Notice,
    Placement,
    PlacementId,
)


@dataclass(frozen=True, slots=True)
class Ending:
    """Records since when a manager has a placement for ended, and its reason, if it gives one."""

    since: float
    why: str = ""


@dataclass(slots=True)
class FleetNode:
    """Records one placement; `missing_at`: when a listing without it was asked for, at last."""

    id: PlacementId
    tries: int = 0
    #: An answer is awaited until this time.
    answer_until: float | None = None
    retry_at: float | None = None
    granted_at: float | None = None
    #: The end of the last try.
    tried_at: float = float("-inf")
    missing_at: float = float("-inf")
    #: Hosts that its newest request avoids. None: an earlier fleet has made it.
    avoid: tuple[str, ...] | None = None
    #: It may run on hosts that have failed: better these than none.
    takes_any: bool = False
    #: When the manager was first seen to let it wait for a host. None: it does not wait.
    waits_since: float | None = None
    #: When the manager was first seen to report that it is stuck.
    stuck_since: float | None = None
    #: The placement as the manager lists it.
    kept: Placement | None = None
    #: Further placements of the same id.
    copies: tuple[Placement, ...] = ()
    host: str = ""
    runs_since: float | None = None
    #: The end of the placement, in the manager's opinion.
    ending: Ending | None = None
    notice: Notice | None = None
    #: The job has had a report of its agent, at any time.
    heard: bool = False
    seen: NodeSeen | None = None
    #: The time since which its agent is silent and has no members.
    silent_since: float | None = None
    #: The time since which it leaves, has no members and is not needed.
    empty_since: float | None = None
    #: The reason to drain it; a node with one does not count any more.
    leaving: str = ""
    #: The time of the next order to drain it; None: there was no order.
    drain_at: float | None = None
    #: The time before which its domains are not sent again.
    label_at: float = float("-inf")
    #: The reason for which it is not needed any more.
    over: str = ""
    #: The time of the next request to end it.
    release_at: float = float("-inf")
    releases: int = 0

    @property
    def is_alive(self) -> bool:
        """Return whether its agent reports to the job."""
        return self.seen is not None and not self.seen.silent

    @property
    def members(self) -> int:
        return self.seen.members if self.seen is not None else 0

    @property
    def serves(self) -> bool:
        return self.is_alive and self.members > 0

    @property
    def exists(self) -> bool:
        """Return whether the manager has given it, or may, and it is not to be given back."""
        return not self.over and self.ending is None

    @property
    def counts(self) -> bool:
        """Return whether it is one of the nodes that the job should have."""
        return self.exists and not self.leaving

    @property
    def is_disturbed(self) -> bool:
        """Return whether the job is just losing it, by choice or not."""
        if self.members == 0 or self.seen is None:
            return False
        return self.seen.silent or bool(self.seen.draining) or self.drain_at is not None

    @property
    def is_asked(self) -> bool:
        """Return whether a request for it may still be carried out."""
        return self.answer_until is not None or self.missing_at < self.tried_at

    def list(self, listed: Sequence[Placement], asked_at: float, now: float) -> None:
        """Take in what the manager lists under this id."""
        present = [p for p in listed if p.holding is not Holding.ENDED]
        if not present:
            self.missing_at = max(self.missing_at, asked_at)
            # A manager may list a request that it has refused: it never gave this placement.
            given = self.granted_at is not None or any(p.host for p in listed)
            was = self.kept is not None or (bool(listed) and given) or self.heard
            self.host = self.host or (listed[0].host if listed else "")
            self.kept, self.copies, self.notice, self.waits_since = None, (), None, None
            self.stuck_since = None
            if was and self.ending is None and asked_at > self.tried_at:
                self.ending = Ending(now, listed[0].why if listed else "")
            return
        known = self.kept.handle if self.kept is not None else ""
        present.sort(key=lambda p: (p.handle != known, p.holding is not Holding.RUNNING))
        self.kept, self.copies = present[0], tuple(present[1:])
        self.answer_until = self.retry_at = self.ending = None
        self.host = self.kept.host or self.host
        if self.kept.holding is not Holding.WAITING or self.kept.host:
            self.waits_since = None
        elif self.waits_since is None:
            self.waits_since = now
        if not self.kept.stuck:
            self.stuck_since = None
        elif self.stuck_since is None:
            self.stuck_since = now
        if self.kept.holding is not Holding.RUNNING:
            self.runs_since = None
        elif self.runs_since is None:
            self.runs_since = now
        self._note(self.kept.notice)

    def _note(self, notice: Notice | None) -> None:
        """Keep the earliest deadline of a notice that is repeated."""
        old = self.notice
        if notice is not None and old is not None and old.until is not None:
            until = old.until if notice.until is None else min(old.until, notice.until)
            notice = replace(notice, until=until)
        self.notice = notice

    def hear(self, seen: NodeSeen | None, now: float) -> bool:
        """Take in the job's record of its agent; return whether it is the first one."""
        first = not self.heard and seen is not None
        self.heard = self.heard or first
        if not self.heard:
            return False
        self.seen = seen if seen is not None else NodeSeen(name=self.id, silent=True)
        if self.is_alive or self.members > 0:
            self.silent_since = None
        elif self.silent_since is None:
            self.silent_since = now
        works = self.members > 0 or self.seen.needed
        if not self.is_alive or works or not (self.leaving or self.seen.draining):
            self.empty_since = None
        elif self.empty_since is None:
            self.empty_since = now
        return first and self.is_alive

    def is_disowned(self, policy: FleetPolicy) -> bool:
        """Return whether listings have left it out for so long that it should be left."""
        ending = self.ending
        return ending is not None and self.missing_at >= ending.since + policy.disowned_s

    def waits_for_long(self, policy: FleetPolicy, now: float) -> bool:
        """Return whether its request has waited for so long that any host is better than none."""
        return self.waits_since is not None and now >= self.waits_since + policy.picky_s

    def reason_to_renew(self, policy: FleetPolicy, avoided: Collection[str], now: float) -> str:
        """Return the reason to repeat its request, which waits for a host; "" if there is none.

        `avoided`: the hosts that a new request would avoid. The manager keeps to the old list.
        """
        since = self.waits_since
        if self.over or self.heard or since is None or now < since + policy.again_s:
            return ""
        admitted = [host for host in self.avoid or () if host not in avoided]
        if admitted:
            return f"{', '.join(admitted)} may be used again"
        choosy = self.avoid is None or (bool(self.avoid) and not self.takes_any)
        if choosy and self.waits_for_long(policy, now):
            return "it has waited for long, so hosts that have failed may be used"
        return ""

    def judge(
        self, policy: FleetPolicy, now: float, *, others_run: bool = False
    ) -> tuple[str, bool]:
        """Return the reason if it is over, or "", and whether its host is to blame.

        Only for when the job has reported: an agent that it then does not know holds no work.
        `others_run`: placements on other hosts run, so an error is not one of the whole job.
        """
        if not self.heard:
            return self._judge_unheard(policy, now, others_run)
        unasked = not (self.leaving or self.notice is not None)
        if self.silent_since is not None:
            wait_s = policy.lost_s if self.ending is None else 0.0
            if now >= self.silent_since + wait_s:
                lost = f"its agent is lost{self._say_end()}"
                return (lost if unasked else "it has left"), unasked
        if self.empty_since is not None and now >= self.empty_since + policy.lost_s:
            asked_for = self.drain_at is not None or self.notice is not None
            return "it has left", not asked_for
        return "", False

    def _say_end(self) -> str:
        """Return the manager's reason for its end, for people; "" if there is none."""
        return f" ({self.ending.why})" if self.ending is not None and self.ending.why else ""

    def _judge_unheard(self, policy: FleetPolicy, now: float, others_run: bool) -> tuple[str, bool]:
        if self.ending is not None:
            return f"it ended before its agent was heard{self._say_end()}", bool(self.host)
        if self.notice is not None:
            return f"its host is about to be taken ({self.notice.reason})", False
        stuck_since = self.stuck_since if others_run else None
        if stuck_since is not None and now >= stuck_since + policy.stuck_s:
            why = self.kept.why if self.kept is not None else ""
            return f"it is kept waiting ({why})", True
        if self.runs_since is not None and now >= self.runs_since + policy.join_s:
            return f"its agent was not heard in {policy.join_s:g} s", True
        if self.granted_at is not None and self.kept is None:
            if self.missing_at >= self.granted_at + policy.unseen_s:
                return "it was granted and never listed", False
        return "", False

    def alarms(self, policy: FleetPolicy) -> Iterator[float]:
        """Yield the times at which its treatment may change without an event."""
        for moment, wait_s in (
            (self.answer_until, 0.0),
            (self.retry_at, 0.0),
            (self.drain_at, 0.0),
            (self.silent_since, policy.lost_s),
            (self.empty_since, policy.lost_s),
            (None if self.heard else self.runs_since, policy.join_s),
            (None if self.heard else self.stuck_since, policy.stuck_s),
            (self.waits_since, policy.again_s),
            (self.waits_since, policy.picky_s),
            (self.notice.until if self.notice is not None else None, -policy.drain_lead_s),
            (self.release_at if self.over else None, 0.0),
        ):
            if moment is not None:
                yield moment + wait_s

"""Remembers which hosts have failed: each is avoided for longer every time, then readmitted.

A host that is readmitted is on probation: its next failure counts on top of the earlier ones, until
it has served for long enough without one.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

from holdfast.engine.core.fleet.placements import FleetPolicy, PlacementId


@dataclass(slots=True)
class _Host:
    strikes: int
    avoid_until: float
    #: The placement that failed last. Its manager may forget it, and then list it again.
    failed: PlacementId | None = None
    serves_since: float | None = None


class HostStrikes:
    """Keeps the hosts that have failed, by name; all others are as good as new."""

    def __init__(self, policy: FleetPolicy) -> None:
        self._policy = policy
        self._hosts: dict[str, _Host] = {}

    def strike(self, host: str, failed: PlacementId, now: float) -> float:
        """Count a placement that failed, once; return how long its host is avoided."""
        found = self._hosts.setdefault(host, _Host(0, now))
        if found.failed == failed:
            return max(found.avoid_until - now, 0.0)
        found.failed = failed
        found.strikes += 1
        found.serves_since = None
        doublings = min(found.strikes - 1, 30)
        wait_s = min(self._policy.avoid_s * 2.0**doublings, self._policy.avoid_max_s)
        found.avoid_until = max(found.avoid_until, now + wait_s)
        return wait_s

    def note_serving(self, serving: Collection[str], now: float) -> None:
        """Record which hosts serve the job just now; forget those whose probation is over."""
        for name, host in list(self._hosts.items()):
            if name not in serving:
                host.serves_since = None
            elif host.serves_since is None:
                host.serves_since = now
            elif now >= host.serves_since + self._policy.probation_s:
                del self._hosts[name]

    def hosts_to_avoid(self, now: float) -> list[str]:
        return sorted(name for name, host in self._hosts.items() if now < host.avoid_until)

    def next_admission(self, now: float) -> float | None:
        """Return when the next host is readmitted, if one is avoided."""
        later = (host.avoid_until for host in self._hosts.values() if host.avoid_until > now)
        return min(later, default=None)

    def count_strikes(self, host: str) -> int:
        found = self._hosts.get(host)
        return found.strikes if found is not None else 0

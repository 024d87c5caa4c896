"""Remembers why a job takes no offer of Mesos, as a sentence for people.

Mesos does not explain its offers. The reason is made of the last offers that the job has declined,
and of the moment since which none fits.
"""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any

HOSTS_MAX = 8  # in one sentence
UNUSABLE = frozenset({"revocable", "shared"})  # keys of resources that a task must not take


class DeclinedOffers:
    """Keeps the last offer of each host, from when an order begins to wait until one is taken.

    `needs`: the resources of one task. Moments are on the clock on the wall.
    """

    def __init__(self, needs: Mapping[str, float]) -> None:
        self._needs = dict(needs)
        self._since: float | None = None
        self._lacks: dict[str, str] = {}  # by host

    def look(self, waits: bool, wall: float) -> None:
        """Begin a look at offers. `waits`: whether an order waits for one."""
        if not waits:
            self._since, self._lacks = None, {}
        elif self._since is None:
            self._since = wall

    def take(self, host: str, wall: float) -> None:
        """Record an offer that fits. Orders that still wait have waited since this moment."""
        self._since = wall
        self._lacks[host] = "has a node of the job"

    def decline(self, offer: Mapping[str, Any], lack: str) -> None:
        """Record an offer that does not fit. `lack`: why; empty: it is too small."""
        if self._since is not None:
            self._lacks[offer["hostname"]] = lack or f"offers {name_resources(offer, self._needs)}"

    def reason(self) -> str:
        """Return why an order waits; empty if none does."""
        if self._since is None:
            return ""
        wanted = ", ".join(f"{key} {need:g}" for key, need in self._needs.items() if need)
        moment = time.strftime("%H:%M:%S UTC", time.gmtime(self._since))
        seen = "; ".join(f"{host} {lack}" for host, lack in sorted(self._lacks.items())[:HOSTS_MAX])
        more = len(self._lacks) - HOSTS_MAX
        seen += f"; and {more} more" if more > 0 else ""
        return f"no offer of Mesos since {moment} fits {wanted} ({seen or 'it has made none'})"


def name_resources(offer: Mapping[str, Any], needs: Mapping[str, float]) -> str:
    """Name the amounts of an offer that a task may use, of the resources that it needs."""
    has = {key: 0.0 for key, need in needs.items() if need}
    for each in offer["resources"]:
        if each["name"] in has and not UNUSABLE & set(each):
            has[each["name"]] += each["scalar"]["value"]
    return ", ".join(f"{key} {value:g}" for key, value in has.items())

"""Finds out why YARN does not give a node that a job waits for, in a sentence for people.

There are three kinds of reasons: a container does not read its order, because its host does not see
the run directory or its command fails; YARN does not start the service's master; YARN does not
allocate a container, for reasons that its scheduler gives for each host.

It also finds the reason why a container has ended, where possible: YARN writes it only to its log.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

Document = Mapping[str, Any]

UNREAD_S = 20.0  # a container that has not read its order after this time does not see it
FAILED_MIN = 2  # one container may end because its host is lost
STALE_S = 60.0  # YARN forgets an ended container's tag within seconds, or not at all
ASK_S = 5.0  # between two questions to YARN's scheduler
CONSTRAINT = "placement constraints"
STAMP = re.compile(r"^\[[^\]]*\] *")  # the time before a message of YARN


class UnreadOrders:
    """Remembers containers that do not take an order which waits for them.

    `run_dir` and `python`: the paths that a container needs on its host.
    """

    def __init__(self, run_dir: str, python: str) -> None:
        self._run_dir = run_dir
        self._python = python
        self._since: dict[str, float] = {}  # by container
        self._hosts: dict[str, str] = {}  # by container
        self._failed: dict[str, str] = {}  # hosts of containers that ended without an order

    def observe(
        self, fitting: Sequence[Document], ended: Sequence[Document], now: float
    ) -> set[str]:
        """Take in a look at the service; return the containers that do not see their order.

        `fitting`: containers that run without an order, while one waits that fits. `ended`:
        containers that never had one.
        """
        self._since = {each["id"]: self._since.get(each["id"], now) for each in fitting}
        self._hosts = {each["id"]: each["bare_host"] for each in fitting}
        self._failed.update((each["id"], each["bare_host"]) for each in ended)
        return {id_ for id_, since in self._since.items() if now >= since + UNREAD_S}

    def forget(self) -> None:
        """Forget all containers, because no order waits any more."""
        self._since, self._hosts, self._failed = {}, {}, {}

    def describe(self, unread: Iterable[str]) -> Iterator[str]:
        """Yield a sentence for each host whose containers do not read their orders."""
        for host in sorted({self._hosts[id_] for id_ in unread}):
            yield (
                f"the container on {host} has not read its order for {UNREAD_S:g} s: {host} does "
                f"not see the run directory {self._run_dir}, which must be on a file system that "
                "all nodes share, at the same path"
            )
        if len(self._failed) >= FAILED_MIN:
            hosts = ", ".join(sorted({*self._failed.values()}))
            yield (
                f"{len(self._failed)} containers on {hosts} ended before they read an order: the "
                f"host must have {self._python} with Holdfast, and its user must be able to read "
                f"{self._run_dir} (`yarn logs` shows their output)"
            )


class Allocation:
    """Explains why YARN does not allocate a container, by its scheduler's reasons for each host."""

    def __init__(self, tag: str, resume: str) -> None:
        """Prepare to explain. `tag`: of the containers; `resume`: the command for a new service."""
        self._tag = tag
        self._resume = resume
        self._stale: dict[str, float] = {}  # hosts kept empty, and since when
        self._quiet_until = float("-inf")
        self._last = ""

    def is_due(self, now: float) -> bool:
        """Return whether YARN may be asked again."""
        return now >= self._quiet_until

    @property
    def last(self) -> str:
        return self._last

    def forget(self) -> None:
        """Forget all reasons, because no order waits for a container any more."""
        self._stale, self._quiet_until, self._last = {}, float("-inf"), ""

    def explain(self, activities: Document, held: Iterable[str], now: float) -> str:
        """Return the reason, or "". `held`: hosts where the service has a container."""
        self._quiet_until = now + ASK_S
        said = dict(diagnostics(activities))
        kept = {host for host, text in said.items() if CONSTRAINT in text} - {*held}
        self._stale = {host: self._stale.get(host, now) for host in sorted(kept)}
        hosts: dict[str, list[str]] = {}
        for host, text in sorted(said.items()):
            if CONSTRAINT not in text:
                hosts.setdefault(text, []).append(host)
        found = [f"YARN says of {', '.join(some)}: {text}" for text, some in hosts.items()]
        for host, since in self._stale.items():
            if now >= since + STALE_S:
                found.append(
                    f"{host} has room, but YARN still counts a container there that has ended (the "
                    f"host keeps the allocation tag {self._tag!r}) and gives no other of this "
                    f"service: stop the job, and `{self._resume}` starts another service"
                )
        if said and not found and not self._stale:
            found = ["each host that YARN could give has a container of this job"]
        self._last = "; ".join(found) or self._last
        return self._last


def diagnostics(activities: Document) -> Iterator[tuple[str, str]]:
    """Yield (host, reason) from a scheduler's activities for one application, the newest last."""

    def walk(entry: Document, host: str) -> Iterator[tuple[str, str]]:
        host = str(entry.get("nodeId", host)).partition(":")[0]
        if entry.get("diagnostic") and host:
            yield host, ", ".join(str(entry["diagnostic"]).splitlines())
        for child in entry.get("children", ()):
            yield from walk(child, host)

    for allocation in reversed((activities.get("appActivities") or {}).get("allocations") or ()):
        yield from walk(allocation, "")


def describe_master(application: Document) -> str:
    """Return YARN's reason why the master of a service is not up yet; "" if it has none."""
    text = shorten(application.get("diagnostics"))
    return f"the service's master is not up: {text}" if text else ""


def describe_end(node: Document, excess: str) -> str:
    """Return the reason why a container has ended; "" if none is known.

    `node`: YARN's document about its host; `excess`: the memory that it had too much.
    """
    if node.get("state") == "UNHEALTHY":
        return f"YARN calls the host unhealthy ({shorten(node.get('healthReport'))})"
    if excess and node.get("state") == "RUNNING":
        return (
            f"its processes had {excess} that its container asked for: if YARN has ended it for "
            "that, raise --memory"
        )
    return ""


def shorten(diagnostics: object) -> str:
    """Return the first line of a message of YARN, without its time."""
    lines = STAMP.sub("", str(diagnostics or "").strip()).splitlines()
    return lines[0][:500].rstrip("; ") if lines else ""


def count_pending(application: Document, tag: str) -> int:
    """Return the number of containers with a tag that YARN has still to allocate."""
    requests = application.get("resourceRequests") or ()
    return sum(
        int(each["numContainers"]) for each in requests if tag in each.get("allocationTags", ())
    )

"""Reconciles the nodes of a job with the nodes that a cluster manager gives. Pure.

It is the same for every manager, and knows neither managers nor sockets nor clocks. Each event only
updates the facts; then `_advance` derives the requests, so a lost, late or repeated message delays
a decision and never changes it, and a new machine with the same facts decides the same. The
invariants: an id is requested again only while no place of it can be listed; an agent that reports
to the job is never given up on the manager's word; at most `nodes_max` places are asked for.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import dataclass

from holdfast.engine.core.domains import has_other_keys
from holdfast.engine.core.errors import assert_never, require
from holdfast.engine.core.fleet.fleet_events import (
    DrainNode,
    Finished,
    FleetEffect,
    FleetEvent,
    JobEnded,
    JobHeard,
    LabelNode,
    NodesWanted,
    Note,
    Observed,
    ReleasePlacement,
    Request,
    RequestAnswered,
)
from holdfast.engine.core.fleet.fleet_node import FleetNode
from holdfast.engine.core.fleet.placements import (
    FleetPolicy,
    Holding,
    NodeSeen,
    Placement,
    PlacementId,
)
from holdfast.engine.core.types import Tick

NOT_NEEDED = "it is not needed any more"
JOB_OVER = "the job is over"


@dataclass(slots=True)
class _Host:
    strikes: int
    avoid_until: float
    #: The placement that failed last. Its manager may forget it, and then list it again.
    failed: PlacementId | None = None
    serves_since: float | None = None


class HostStrikes:
    """Keeps the hosts that have failed, by name; a host without a strike is as good as new."""

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


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetNodeSnapshot:
    """Describes one placement for people; `state` is one word."""

    id: PlacementId
    host: str
    state: str
    why: str


@dataclass(frozen=True, slots=True, kw_only=True)
class FleetSnapshot:
    wanted: int
    nodes: tuple[FleetNodeSnapshot, ...]
    avoided: tuple[str, ...]
    finished: bool


class FleetMachine:
    """Decides which placements are requested, drained and released; `handle` is the only mutator.

    `epoch` is part of the ids that it makes: no two machines of a job may have the same.
    """

    def __init__(self, policy: FleetPolicy, epoch: str) -> None:
        self._policy = policy
        self._epoch = epoch
        self._wanted = policy.nodes
        self._nodes: dict[PlacementId, FleetNode] = {}
        self._made = 0  # ids
        self._hosts = HostStrikes(policy)
        self._observed_at = float("-inf")  # when the newest listing was asked for
        self._job_heard = False
        self._seen: dict[str, NodeSeen] = {}  # as the job reported last
        self._ended_at: float | None = None
        self._finished = False
        self._failures = 0  # in a row, without a report of an agent in between
        self._request_from = float("-inf")
        self._now = float("-inf")

    def handle(self, event: FleetEvent, now: float) -> list[FleetEffect]:
        """Apply one event at time `now` (seconds); return effects in order."""
        effects: list[FleetEffect] = []
        match event:
            case Observed(placements, asked_at):
                if asked_at >= self._observed_at:
                    self._observe(placements, asked_at, now)
            case JobHeard(nodes):
                effects += self._hear(nodes, now)
            case RequestAnswered(id_, problem):
                effects += self._handle_answer(id_, problem, now)
            case NodesWanted(nodes):
                self._wanted = min(max(nodes, 0), self._policy.nodes_max)
            case JobEnded():
                if self._ended_at is None:
                    self._ended_at = now
            case Tick():
                pass
            case _:
                assert_never(event)
        self._now = now
        return [*effects, *self._advance(now)]

    def deadline(self) -> float | None:
        """Return the earliest time at which a Tick could change something."""
        alarms = [self._request_from]
        for node in self._nodes.values():
            alarms += node.alarms(self._policy)
        admission = self._hosts.next_admission(self._now)
        if admission is not None and any(n.waits_since is not None for n in self._nodes.values()):
            alarms.append(admission)
        return min((at for at in alarms if at > self._now), default=None)

    def snapshot(self) -> FleetSnapshot:
        return FleetSnapshot(
            wanted=self._wanted,
            nodes=tuple(
                FleetNodeSnapshot(
                    id=n.id, host=n.host, state=_state(n), why=n.over or n.leaving or ""
                )
                for n in self._nodes.values()
            ),
            avoided=tuple(self._hosts.hosts_to_avoid(self._now)),
            finished=self._finished,
        )

    def check(self) -> None:
        require(self._wanted <= self._policy.nodes_max, "more nodes are wanted than may be")
        for id_, node in self._nodes.items():
            require(id_ == node.id, f"{id_} holds the record of {node.id}")
            require(id_.startswith(self._policy.prefix), f"{id_} is not of this job")
            require(node.retry_at is None or node.kept is None, f"{id_} is listed and requested")
            require(self._ended_at is None or bool(node.over), f"{id_} outlives the job")

    # ------------------------------------------------------------ hearing

    def _observe(self, placements: tuple[Placement, ...], asked_at: float, now: float) -> None:
        self._observed_at = asked_at
        listed: dict[PlacementId, list[Placement]] = {}
        for placement in placements:
            listed.setdefault(placement.id, []).append(placement)
        for id_, found in listed.items():
            if id_ not in self._nodes and any(p.holding is not Holding.ENDED for p in found):
                self._nodes[id_] = FleetNode(id_)
                self._nodes[id_].hear(self._seen.get(id_), now)
        for node in self._nodes.values():
            node.list(listed.get(node.id, ()), asked_at, now)

    def _hear(self, nodes: tuple[NodeSeen, ...], now: float) -> Iterator[FleetEffect]:
        self._job_heard = True
        seen = self._seen = {each.name: each for each in nodes}
        for each in nodes:
            id_ = PlacementId(each.name)
            if each.name.startswith(self._policy.prefix) and not each.silent:
                if id_ not in self._nodes:  # only the job knows of it: listings may
                    self._nodes[id_] = FleetNode(id_)
        for node in self._nodes.values():
            if node.hear(seen.get(node.id), now):
                self._failures = 0
                yield Note(f"node {node.id} is here{_place_of(node)}")

    def _handle_answer(self, id_: PlacementId, problem: str, now: float) -> Iterator[FleetEffect]:
        node = self._nodes.get(id_)
        if node is None or node.answer_until is None:
            return
        node.answer_until, node.tried_at = None, now
        if not problem:
            node.granted_at = now
            return
        wait_s = _double_delay(self._policy.retry_s, node.tries, self._policy.retry_max_s)
        node.retry_at = now + wait_s
        yield Note(f"node {id_} could not be requested ({problem}): again in {wait_s:g} s")

    # ------------------------------------------------------------ deciding

    def _advance(self, now: float) -> Iterator[FleetEffect]:
        for node in self._nodes.values():
            if node.answer_until is not None and now >= node.answer_until:
                yield from self._handle_answer(node.id, "no answer", now)
        yield from self._judge(now)
        self._choose_leaving()
        yield from self._drop_surplus()
        yield from self._renew(now)
        yield from self._label(now)
        yield from self._drain(now)
        yield from self._release(now)
        self._forget()
        yield from self._request(now)
        if self._ended_at is not None and not self._finished:
            if self._observed_at > self._ended_at and not self._nodes:
                self._finished = True
                yield Finished()

    def _judge(self, now: float) -> Iterator[FleetEffect]:
        policy = self._policy
        others_run = any(n.is_alive or n.runs_since is not None for n in self._nodes.values())
        for node in self._nodes.values():
            if not node.over and self._ended_at is not None:
                node.over = JOB_OVER
                node.release_at = now + policy.farewell_s if node.is_alive else now
            if node.over or not self._job_heard:
                continue
            node.over, blame = node.judge(policy, now, others_run=others_run)
            if not node.over:
                continue
            if not node.heard and node.host and node.notice is None:
                self._failures += 1
                wait_s = _double_delay(policy.retry_s, self._failures, policy.retry_max_s)
                self._request_from = now + wait_s
            avoided = ""
            if blame and node.host:
                avoid_s = self._hosts.strike(node.host, node.id, now)
                avoided = f"; {node.host} is avoided for {avoid_s:.0f} s"
            yield Note(f"node {node.id}{_place_of(node)}: {node.over}{avoided}")
        self._hosts.note_serving([n.host for n in self._nodes.values() if n.serves], now)

    def _choose_leaving(self) -> None:
        """Find nodes to be left: announced by the manager, or chosen by the job or its people."""
        for node in self._nodes.values():
            if node.over or not node.heard:
                continue
            if node.seen is not None and node.seen.draining:
                node.leaving = node.leaving or node.seen.draining
            elif node.notice is not None:
                node.leaving = node.notice.reason
            elif node.is_disowned(self._policy):
                node.leaving = "its manager has ended it"
            elif node.drain_at is None:
                node.leaving = ""  # the order was taken back in time

    def _drop_surplus(self) -> Iterator[FleetEffect]:
        """Give surplus nodes back: best those without work, and the newest of these."""
        if not self._knows_nodes():
            return
        counting = [n for n in self._nodes.values() if n.counts and n.silent_since is None]
        counting.reverse()
        counting.sort(key=lambda n: (n.heard, n.runs_since is not None, n.kept is not None))
        for node in counting[: max(len(counting) - self._wanted, 0)]:
            if node.heard:
                node.leaving = NOT_NEEDED
            else:
                node.over = NOT_NEEDED
                yield Note(f"node {node.id}{_place_of(node)}: {NOT_NEEDED}")

    def _drain(self, now: float) -> Iterator[FleetEffect]:
        """Order nodes to leave: a few at a time, unless the manager's deadline is near."""
        policy = self._policy
        disturbed = sum(node.is_disturbed for node in self._nodes.values())
        for node in self._nodes.values():
            reason = node.over or node.leaving  # an agent that lives on without a place leaves too
            if not reason or not node.is_alive or self._ended_at is not None:
                continue
            until = node.notice.until if node.notice is not None else None
            known = node.seen is not None and bool(node.seen.draining)
            if node.drain_at is None and not known:
                near = until is not None and now >= until - policy.drain_lead_s
                if not near and node.members and disturbed >= policy.disruptions_max:
                    continue
                disturbed += node.members > 0
                node.drain_at = now
                yield Note(f"node {node.id}{_place_of(node)} is drained: {reason}")
            if node.drain_at is not None and now >= node.drain_at:
                node.drain_at = now + policy.again_s
                if not known:
                    yield DrainNode(node.id, reason, until)

    def _label(self, now: float) -> Iterator[FleetEffect]:
        """Send the job failure domains that only the manager knows."""
        for node in self._nodes.values():
            if node.kept is None or node.seen is None or not node.is_alive or now < node.label_at:
                continue
            if has_other_keys(node.seen.domains, node.kept.domains):
                node.label_at = now + self._policy.again_s
                yield LabelNode(node.id, node.kept.domains)

    def _release(self, now: float) -> Iterator[FleetEffect]:
        for node in self._nodes.values():
            kept = [node.kept] if node.over and node.kept is not None else []
            present = [*kept, *node.copies]
            if not present:
                node.releases, node.release_at = 0, float("-inf")
            elif now >= node.release_at:
                node.releases += 1
                wait_s = _double_delay(
                    self._policy.retry_s, node.releases, self._policy.retry_max_s
                )
                node.release_at = now + wait_s
                for each in present:
                    why = node.over or "there is another one of the same id"
                    yield ReleasePlacement(node.id, each.handle, why)

    def _forget(self) -> None:
        """Forget nodes that are over, once no earlier request can bring them back."""
        for node in list(self._nodes.values()):
            heard = node.is_alive and self._ended_at is None
            if node.over and node.kept is None and not node.is_asked and not heard:
                del self._nodes[node.id]

    def _knows_nodes(self) -> bool:
        """Return whether both the job and the manager have answered, so all nodes are known."""
        return self._job_heard and self._observed_at > float("-inf")

    def _add_node(self, now: float, *, takes_any: bool = False) -> None:
        self._made += 1
        id_ = PlacementId(f"{self._policy.prefix}{self._epoch}-{self._made}")
        self._nodes[id_] = FleetNode(id_, retry_at=now, takes_any=takes_any)

    def _renew(self, now: float) -> Iterator[FleetEffect]:
        """Repeat requests that wait although a host that they avoid may be used by now."""
        if self._ended_at is not None or not self._knows_nodes():
            return
        avoided = {*self._hosts.hosts_to_avoid(now), *_list_noticed(self._nodes.values())}
        for node in list(self._nodes.values()):
            if why := node.reason_to_renew(self._policy, avoided, now):
                node.over = f"it is asked for again: {why}"
                waited = node.waits_for_long(self._policy, now)
                self._add_node(now, takes_any=node.takes_any or waited)
                yield Note(f"node {node.id}: {node.over}")

    def _request(self, now: float) -> Iterator[FleetEffect]:
        """Ask for the nodes that are missing, once it is known what there is already."""
        if self._ended_at is not None or not self._knows_nodes():
            return
        nodes = list(self._nodes.values())
        room = self._policy.nodes_max - sum(node.exists for node in nodes)
        missing = self._wanted - sum(node.counts for node in nodes)
        if now >= self._request_from:
            for _ in range(min(room, missing)):
                self._add_node(now)
        noticed = _list_noticed(nodes)
        for node in self._nodes.values():
            if node.retry_at is None or now < node.retry_at or node.over:
                continue
            if node.tries and node.is_asked:
                continue  # a listing since the last try will show whether it worked
            node.tries += 1
            node.retry_at, node.answer_until = None, now + self._policy.answer_s
            # A host that has failed is better than none: the manager may have no other.
            node.takes_any = node.takes_any or node.tries > self._policy.picky_tries
            failed = () if node.takes_any else self._hosts.hosts_to_avoid(now)
            node.avoid = tuple(sorted({*failed, *noticed}))
            yield Request(node.id, node.avoid)


def _list_noticed(nodes: Iterable[FleetNode]) -> set[str]:
    """Return the hosts that are to be left, as the manager has announced."""
    return {node.host for node in nodes if node.notice is not None and node.host}


def _double_delay(first_s: float, times: int, most_s: float) -> float:
    return min(first_s * 2.0 ** min(max(times - 1, 0), 30), most_s)


def _place_of(node: FleetNode) -> str:
    return f" (on {node.host})" if node.host else ""


def _state(node: FleetNode) -> str:
    if node.over:
        return "over"
    if node.leaving:
        return "leaving"
    if node.serves:
        return "serving"
    if node.heard:
        return "here" if node.is_alive else "silent"
    if node.kept is not None:
        return node.kept.holding.value
    return "requested"

"""Decides on which node each server of a hosted service runs, for the coordinator.

A server stays where it is until its node is lost, is drained or has left. If the node is drained, a
second process of the server, its heir, copies the contents on another node. It takes the server's
place once a worker has seen that it has all of them. Only workers can fill an heir, so it also
takes over if no worker has trained for a while. No process must be fenced: two processes of one
server have the same contents, and no worker asks a process that is not in the book.

The number of servers may change while the job trains. New servers copy their shares, while the
former ones still get every update. Once all have their shares, and every member of the view knows
where they are, the servers that are not needed any more end.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.engine.core.hosted_service import ServerLayout, ServerPlace
from holdfast.engine.core.job_record import JobRecord
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.facts import Facts, is_given_up
from holdfast.engine.core.membership.formation import LEAVE_RESERVE_S
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.policies import CoordinatorPolicy, LeasePolicy
from holdfast.engine.core.types import AgentId
from holdfast.engine.core.worker_status import WorkerStatus


@dataclass(frozen=True, slots=True)
class Post:
    """Names the node of a server or of its heir, and where it listens; empty: not known.

    `order`: the number of this place among all places of the server so far.
    """

    agent: AgentId
    address: str = ""
    order: int = 0


@dataclass(frozen=True, slots=True)
class ServerPlaces:
    """Remembers the node of each server, by the server's number.

    `layout`: how many servers there are. `is_guess`: it is the first one, as the record of later
    ones is lost. Servers wait for `nodes_min` nodes, or the first view, so that they are spread
    over these.
    """

    layout: ServerLayout
    nodes_min: int = 1
    posts: Mapping[int, Post] = field(default_factory=dict)
    heirs: Mapping[int, Post] = field(default_factory=dict)

    is_guess: bool = False

    @classmethod
    def recall(
        cls, policy: CoordinatorPolicy, record: JobRecord | None, passed_over: int
    ) -> ServerPlaces:
        """Return the places that a record has. `passed_over`: numbers that a lost one may have."""
        servers, layout = policy.servers, record.layout if record else None
        first = ServerLayout(number=passed_over, count=servers, goal=servers)
        posts, heirs = (
            {p.number: Post(p.agent, p.address, p.order) for p in places if p.heir is is_heir}
            for places in [record.servers if record else ()]
            for is_heir in (False, True)
        )
        is_guess = layout is None and passed_over > 0
        return cls(layout or first, policy.nodes_min, posts, heirs, is_guess=is_guess)

    def recall_layout(self, statuses: Iterable[WorkerStatus]) -> ServerPlaces:
        """Return this with the newest layout that a worker knows, unless it is an older one."""
        known = [status.layout for status in statuses if status.layout is not None]
        newest = max(known, key=lambda layout: layout.number, default=self.layout)
        if not self.is_guess and newest.number <= self.layout.number:
            return self
        return dataclasses.replace(self, layout=newest, is_guess=self.is_guess and not known)

    def scale(self, goal: int) -> tuple[ServerPlaces, list[Announce]]:
        """Begin to use `goal` servers: return this with that aim, and a line if it is new.

        Another change that is under way ends, since the former servers still have all contents.
        """
        layout = self.layout
        if goal == layout.goal:
            return self, []
        asked = ServerLayout(number=layout.number + 1, count=layout.count, goal=goal)
        text = f"the service goes from {name_count(layout.count)} to {goal}"
        if not asked.is_changing:
            text = f"the service stays on {name_count(goal)}"
        return dataclasses.replace(self, layout=asked), [Announce("server", text)]

    @property
    def book(self) -> tuple[ServerPlace, ...]:
        """Return the places of all placed servers and their heirs, for every node."""
        every = [(n, post, False) for n, post in self.posts.items()]
        every += [(n, post, True) for n, post in self.heirs.items()]
        return tuple(
            ServerPlace(
                number=number,
                agent=post.agent,
                address=post.address,
                heir=is_heir,
                order=post.order,
            )
            for number, post, is_heir in sorted(every, key=lambda each: (each[0], each[2]))
        )

    def review(self, facts: Facts) -> tuple[ServerPlaces, list[Announce]]:
        """Return the places of servers from now on, and lines on servers that move."""
        found = _Review(self, facts)
        lines = list(found.go_through())
        changed = {"layout": found.layout, "posts": found.posts, "heirs": found.heirs}
        return dataclasses.replace(self, **changed), lines  # type: ignore[arg-type]

    def list_alarms(self, roster: Roster, lease: LeasePolicy) -> Iterator[float]:
        """Yield the times at which servers may have to move without anything else happening."""
        if self.heirs:
            yield find_limit(roster, lease)
            yield from (node.leave_by - LEAVE_RESERVE_S for node in roster.nodes.values())


class _Review:
    """Changes `posts`, `heirs` and `layout` as the facts demand."""

    def __init__(self, places: ServerPlaces, facts: Facts) -> None:
        self._facts, self.layout = facts, places.layout
        self._count = places.layout.servers
        self._usable = [
            name
            for name, node in sorted(facts.roster.nodes.items())
            if not node.draining and name not in facts.silent and not node.report.draining
        ]
        if facts.view is None and len(self._usable) < places.nodes_min:
            self._count = 0
        self.posts, self.heirs = (
            _find_addresses(facts, each) for each in (places.posts, places.heirs)
        )
        # The words of a worker that goes by an earlier layout do not count: there, a server may
        # have had its whole share although it lacks some now.
        self._complete = {a for s in facts.known if self._knows_layout(s) for a in s.heirs}

    def go_through(self) -> Iterator[Announce]:
        """Place every server, and yield a line on each server that moves."""
        self._drop_surplus()
        for number, heir in list(self.heirs.items()):
            is_gone = self._is_drained(heir.agent) or is_given_up(self._facts, heir.agent)
            if is_gone or self.posts[number].agent in self._usable:
                del self.heirs[number]
        for number in range(self._count if self._usable else 0):
            if number not in self.posts:
                self.posts[number] = self._recall(number) or self._choose(number)
            if self.posts[number].agent not in self._usable:
                yield from self._move(number, self.posts[number])
        if self.layout.is_changing and self._is_laid_out():
            number, goal = self.layout.number + 1, self.layout.goal
            yield Announce("server", f"the service is on {name_count(goal)} now")
            self.layout = ServerLayout(number=number, count=goal, goal=goal)
            self._drop_surplus()

    def _drop_surplus(self) -> None:
        """Forget servers that the layout does not have any more."""
        for places in (self.posts, self.heirs):
            for number in [n for n in places if n >= self.layout.servers]:
                del places[number]

    def _is_laid_out(self) -> bool:
        """Return whether each server has its whole share, and every member goes by this layout."""
        statuses = [self._facts.status(member) for member in self._facts.members]
        posts = [self.posts.get(number) for number in range(self.layout.goal)]
        return (
            bool(statuses)
            and all(status is not None and self._knows_layout(status) for status in statuses)
            and all(post is not None and post.address in self._complete for post in posts)
        )

    def _knows_layout(self, status: WorkerStatus) -> bool:
        """Return whether a worker goes by the present layout; each knows the first one."""
        known = status.layout.number if status.layout is not None else 0
        return known == self.layout.number

    def _move(self, number: int, post: Post) -> Iterator[Announce]:
        """Begin or end the move of a server whose node is not used any more, if it is time."""
        heir = self.heirs.get(number)
        if self._is_leaving(post.agent):
            if heir is None:
                self.heirs[number] = heir = self._choose(number)
                text = f"server {number} is copied from {post.agent} to {heir.agent}"
                yield Announce("server", text)
            if not heir.address or heir.address not in self._complete:
                return
        elif not is_given_up(self._facts, post.agent) and not self._is_drained(post.agent):
            return
        self.posts[number] = heir if heir is not None else self._choose(number)
        self.heirs.pop(number, None)
        text = f"server {number} moves from {post.agent} to {self.posts[number].agent}"
        yield Announce("server", text)

    def _is_leaving(self, agent: AgentId) -> bool:
        """Return whether a node is drained, and its servers work for a while yet."""
        node = self._facts.roster.nodes.get(agent)
        if node is None or agent in self._facts.silent or not self._is_drained(agent):
            return False
        # While a worker acts in the view, its step may take as long as it likes.
        return self._facts.now < node.leave_by - LEAVE_RESERVE_S and self._facts.is_moving()

    def _is_drained(self, agent: AgentId) -> bool:
        node = self._facts.roster.nodes.get(agent)
        return node is not None and bool(node.draining or node.report.draining)

    def _recall(self, number: int) -> Post | None:
        """Return a node that runs this server, which a coordinator may have forgotten.

        A drained node takes precedence: any other may be empty yet.
        """
        found = {
            name: Post(name, server.address, server.order)
            for name, node in sorted(self._facts.roster.nodes.items())
            for server in node.report.servers
            if server.number == number and name not in self._facts.silent
        }
        drained = [name for name in found if self._is_drained(name)]
        return next((found[name] for name in (*drained, *found)), None)

    def _choose(self, number: int) -> Post:
        """Return a new place on the usable node with the fewest servers."""
        loads = Counter(post.agent for post in (*self.posts.values(), *self.heirs.values()))
        agent = min(self._usable, key=lambda name: (loads[name], self._usable.index(name)))
        known = [each.get(number) for each in (self.posts, self.heirs)]
        orders = [post.order for post in known if post is not None]
        for node in self._facts.roster.nodes.values():
            orders += [s.order for s in node.report.servers if s.number == number]
        return Post(agent, order=max(orders, default=-1) + 1)


def name_count(servers: int) -> str:
    """Return "1 server" or "3 servers"."""
    return f"{servers} server{'s' if servers != 1 else ''}"


def find_limit(roster: Roster, lease: LeasePolicy) -> float:
    """Return the time until which an heir is waited for although no worker trains."""
    return roster.moved_at + lease.abandon_s


def _find_addresses(facts: Facts, posts: Mapping[int, Post]) -> dict[int, Post]:
    """Return these with their newest addresses, which their nodes have reported."""
    found = {}
    for number, post in posts.items():
        node = facts.roster.nodes.get(post.agent)
        servers = node.report.servers if node is not None else ()
        told = {(s.number, s.order): s.address for s in servers}
        address = told.get((number, post.order), post.address)
        found[number] = dataclasses.replace(post, address=address)
    return found

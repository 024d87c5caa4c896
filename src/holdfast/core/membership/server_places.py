"""Decides on which node each server of tables runs, as one of the coordinator's decisions.

A server stays where it is until its node is lost, is drained or has left. If the node is drained, a
second process of the server, its heir, copies the rows on another node, and takes the server's
place once a worker has seen that it has all of them. Nobody has to be fenced: two processes of one
server hold the same rows, and nobody asks the one that is not in the book.
"""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from holdfast.core.membership.coordinator_events import Announce
from holdfast.core.membership.facts import Facts, is_given_up
from holdfast.core.membership.formation import LEAVE_RESERVE_S
from holdfast.core.types import AgentId, ServerPlace


@dataclass(frozen=True, slots=True)
class Post:
    """Names the node of a server or of its heir, and where it listens; empty: not known."""

    agent: AgentId
    address: str = ""


@dataclass(frozen=True, slots=True)
class ServerPlaces:
    """Remembers the node of each server, by the server's number; `count`: how many there are.

    Servers wait for `nodes_min` nodes, or the first view, so that they are spread over these.
    """

    count: int
    nodes_min: int = 1
    posts: Mapping[int, Post] = field(default_factory=dict)
    heirs: Mapping[int, Post] = field(default_factory=dict)

    @classmethod
    def recall(cls, count: int, nodes_min: int, places: tuple[ServerPlace, ...]) -> ServerPlaces:
        """Return the places that a record has."""
        posts, heirs = (
            {p.number: Post(p.agent, p.address) for p in places if p.heir is is_heir}
            for is_heir in (False, True)
        )
        return cls(count=count, nodes_min=nodes_min, posts=posts, heirs=heirs)

    @property
    def book(self) -> tuple[ServerPlace, ...]:
        """Return where all placed servers and their heirs are, for every node."""
        every = [(n, post, False) for n, post in self.posts.items()]
        every += [(n, post, True) for n, post in self.heirs.items()]
        return tuple(
            ServerPlace(number=number, agent=post.agent, address=post.address, heir=is_heir)
            for number, post, is_heir in sorted(every, key=lambda each: (each[0], each[2]))
        )

    def review(self, facts: Facts) -> tuple[ServerPlaces, list[Announce]]:
        """Return where servers are from now on, and lines on those that move."""
        move = _Review(self, facts)
        lines = list(move.go_through())
        posts, heirs = (_find_addresses(facts, each) for each in (move.posts, move.heirs))
        return dataclasses.replace(self, posts=posts, heirs=heirs), lines


class _Review:
    """Changes `posts` and `heirs` as the facts demand."""

    def __init__(self, places: ServerPlaces, facts: Facts) -> None:
        self._facts, self._count = facts, places.count
        self._usable = [
            name
            for name, node in sorted(facts.roster.nodes.items())
            if not node.draining and name not in facts.silent and not node.report.draining
        ]
        if facts.view is None and len(self._usable) < places.nodes_min:
            self._count = 0
        self.posts, self.heirs = dict(places.posts), dict(places.heirs)
        self._complete = {address for status in facts.known for address in status.heirs}

    def go_through(self) -> Iterator[Announce]:
        """Place every server; yields lines on those that move."""
        for number, heir in list(self.heirs.items()):
            if heir.agent not in self._usable or self.posts[number].agent in self._usable:
                del self.heirs[number]  # it is gone, or its server can stay
        for number in range(self._count if self._usable else 0):
            post = self.posts.get(number)
            if post is None:
                self.posts[number] = self._choose()
            elif post.agent not in self._usable:
                yield from self._move(number, post)

    def _move(self, number: int, post: Post) -> Iterator[Announce]:
        """Begin or end the move of a server whose node is not used any more, if it is time."""
        heir = self.heirs.get(number)
        if self._is_leaving(post.agent):
            if heir is None:
                self.heirs[number] = heir = self._choose()
                text = f"server {number} is copied from {post.agent} to {heir.agent}"
                yield Announce("server", text)
            if not heir.address or heir.address not in self._complete:
                return
        elif not is_given_up(self._facts, post.agent) and not self._is_drained(post.agent):
            return
        self.posts[number] = heir if heir is not None else self._choose()
        self.heirs.pop(number, None)
        text = f"server {number} moves from {post.agent} to {self.posts[number].agent}"
        yield Announce("server", text)

    def _is_leaving(self, agent: AgentId) -> bool:
        """Return whether a node is drained, and its servers work for a while yet."""
        node = self._facts.roster.nodes.get(agent)
        if node is None or agent in self._facts.silent or not self._is_drained(agent):
            return False
        return self._facts.now < node.leave_by - LEAVE_RESERVE_S

    def _is_drained(self, agent: AgentId) -> bool:
        node = self._facts.roster.nodes.get(agent)
        return node is not None and bool(node.draining or node.report.draining)

    def _choose(self) -> Post:
        """Return the usable node with the fewest servers."""
        loads = Counter(post.agent for post in (*self.posts.values(), *self.heirs.values()))
        return Post(min(self._usable, key=lambda name: (loads[name], self._usable.index(name))))


def _find_addresses(facts: Facts, posts: Mapping[int, Post]) -> dict[int, Post]:
    """Return where these listen, as their nodes have told; the last known where none has."""
    found = {}
    for number, post in posts.items():
        node = facts.roster.nodes.get(post.agent)
        told = {s.number: s.address for s in node.report.servers} if node is not None else {}
        found[number] = Post(post.agent, told.get(number, post.address))
    return found

"""Names the servers of a hosted service, their nodes and the layout of their contents. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engine.core.types import AgentId


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """Names a process of a hosted service on a node."""

    number: int
    #: It grows within one incarnation of the agent.
    incarnation: int
    #: HOST:PORT where the process listens.
    address: str
    pid: int = 0
    #: The number of its ServerPlace.
    order: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """Gives the number of servers that share the contents of a service, and the number wanted.

    While `goal` differs from `count`, the first `count` servers have all contents, and the first
    `goal` servers copy their future shares.
    """

    #: The number grows with each change.
    number: int = 0
    count: int
    goal: int

    @property
    def is_changing(self) -> bool:
        """Return whether contents are being copied to another number of servers."""
        return self.goal != self.count

    @property
    def servers(self) -> int:
        """Return the number of servers that run now."""
        return max(self.count, self.goal)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """Names the node of a server."""

    number: int
    agent: AgentId
    #: The address at which it listens, if known.
    address: str = ""
    #: The process copies the server's contents, and then takes the server's place.
    heir: bool = False
    #: The number of places that the server had before. Each place has a process of its own.
    order: int = 0

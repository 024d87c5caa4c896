"""Decides for one node which processes of servers run there. It does not know processes or clocks.

A server that ends is started again at once, and after longer and longer pauses if it keeps ending
soon after its start. Another place for the same server on this node is another process.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from holdfast.engine.core.errors import assert_never, require
from holdfast.engine.core.hosted_service import RunningServer, ServerPlace
from holdfast.engine.core.types import AgentId, Tick

BACKOFF_S = 0.25
BACKOFF_MAX_S = 30.0
STEADY_S = 10.0  # a server that has lived this long starts afresh


# ---------------------------------------------------------------- events


@dataclass(frozen=True, slots=True)
class BookArrived:
    """The coordinator has ordered where servers run; `over`: the job is over, so none should."""

    book: tuple[ServerPlace, ...]
    over: bool = False


@dataclass(frozen=True, slots=True)
class ServerListens:
    """A server's process is ready, and listens at `address`."""

    number: int
    incarnation: int
    address: str
    pid: int


@dataclass(frozen=True, slots=True)
class ServerEnded:
    """A server's process has ended."""

    number: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class ServerFroze:
    """A server's process is stopped, or is frozen."""

    number: int
    incarnation: int


HostEvent = BookArrived | ServerListens | ServerEnded | ServerFroze | Tick

# ---------------------------------------------------------------- effects


@dataclass(frozen=True, slots=True)
class StartServer:
    """Start a process; ServerListens or ServerEnded follows, and in the end ServerEnded."""

    number: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class EndServer:
    """Kill a process; ServerEnded follows."""

    number: int
    incarnation: int


@dataclass(frozen=True, slots=True)
class TellServers:
    """Report to the coordinator soon: something about servers has changed."""


HostEffect = StartServer | EndServer | TellServers


@dataclass(frozen=True, slots=True)
class _Server:
    incarnation: int
    order: int
    running: bool
    since: float
    address: str = ""
    pid: int = 0
    #: The losses without a steady life in between.
    losses: int = 0


class ServerHost:
    """Decides for one node, as the module describes; `handle` is the only mutator."""

    def __init__(self, agent: AgentId) -> None:
        self._agent = agent
        self._wanted: dict[int, int] = {}  # orders by number
        self._servers: dict[int, _Server] = {}

    def handle(self, event: HostEvent, now: float) -> list[HostEffect]:
        """Apply one event at time `now` (seconds); return effects in order."""
        effects: list[HostEffect] = []
        match event:
            case BookArrived(book, over):
                here = () if over else book
                self._wanted = {p.number: p.order for p in here if p.agent == self._agent}
            case ServerListens(number, incarnation, address, pid):
                server = self._find(number, incarnation)
                if server is not None:
                    self._servers[number] = replace(server, address=address, pid=pid)
                    effects.append(TellServers())
            case ServerEnded(number, incarnation):
                server = self._find(number, incarnation)
                if server is not None:
                    steady = now - server.since >= STEADY_S
                    losses = 1 if steady else server.losses + 1
                    ended = replace(server, running=False, address="", pid=0)
                    self._servers[number] = replace(ended, losses=losses, since=now)
                    effects.append(TellServers())
            case ServerFroze(number, incarnation):
                if self._find(number, incarnation) is not None:
                    effects.append(EndServer(number, incarnation))
            case Tick():
                pass
            case _:
                assert_never(event)
        return [*effects, *self._reconcile(now)]

    def report(self) -> tuple[RunningServer, ...]:
        """Return the servers that listen here."""
        return tuple(
            RunningServer(
                number=n, incarnation=s.incarnation, address=s.address, pid=s.pid, order=s.order
            )
            for n, s in sorted(self._servers.items())
            if s.running and s.address
        )

    def deadline(self) -> float | None:
        """Return when a server is to be started again; None if none waits."""
        waiting = [self._servers.get(number) for number in self._wanted]
        return min((_starts_at(s) for s in waiting if s and not s.running), default=None)

    @property
    def is_empty(self) -> bool:
        """Return whether no server's process runs here."""
        return not any(server.running for server in self._servers.values())

    def check(self) -> None:
        """Assert every invariant."""
        for number, server in self._servers.items():
            require(server.running or not server.address, f"server {number} listens, but ended")

    def _find(self, number: int, incarnation: int) -> _Server | None:
        server = self._servers.get(number)
        is_it = server is not None and server.running and server.incarnation == incarnation
        return server if is_it else None

    def _reconcile(self, now: float) -> list[HostEffect]:
        effects: list[HostEffect] = []
        for number, server in self._servers.items():
            if server.running and self._wanted.get(number) != server.order:
                effects.append(EndServer(number, server.incarnation))
        for number, order in self._wanted.items():
            old = self._servers.get(number)
            if old is not None and (old.running or now < _starts_at(old)):
                continue
            incarnation = old.incarnation + 1 if old is not None else 1
            losses = old.losses if old is not None else 0
            self._servers[number] = _Server(incarnation, order, True, now, losses=losses)
            effects.append(StartServer(number, incarnation))
        return effects


def _starts_at(server: _Server) -> float:
    """Return when a server that has ended is started again, in seconds."""
    if server.losses <= 1:
        return server.since
    return server.since + min(BACKOFF_S * 2.0 ** min(server.losses - 2, 20), BACKOFF_MAX_S)

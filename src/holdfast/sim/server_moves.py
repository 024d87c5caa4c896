"""Moves servers of tables to other processes, for the simulator of tables.

It does what the coordinator and the nodes do in a job: it starts the heir of a server, lets workers
hear of it, and puts it in the server's place once a worker has seen that it has all rows. The heir
of server N has the number N + the number of servers.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.core.servers.heirs import HeirProgress
from holdfast.core.servers.placement import add_heirs, find_holders, find_shards
from holdfast.core.servers.reading import RowReading
from holdfast.sim.simulated_servers import RowMessages, RowTruth, SimServer

ROWS = "rows"  # the only group of tables


@dataclass(slots=True)
class SimWorker:
    """Is one worker: how many updates it has committed, and which it keeps."""

    number: int
    committed: int = 0
    kept_after: int = 0
    reading: RowReading | None = None
    version: int = 0  # the read's
    attempt: int = 0  # grows when the job begins again, or the worker is replaced
    suspects: dict[int, float] = field(default_factory=dict)
    heirs: set[int] = field(default_factory=set)  # servers that it knows to be moving
    progress: HeirProgress = field(default_factory=HeirProgress)


class ServerMoves:
    """Knows all processes of servers, and moves servers. `count`: how many have moved.

    `holders`: by shard, the servers that hold it.
    """

    def __init__(
        self,
        time: RowMessages,
        truth: RowTruth,
        dice: random.Random,
        counts: tuple[int, int],
        workers: Sequence[SimWorker],
    ) -> None:
        """Start the servers. `counts`: how many they are, and how many hold each shard."""
        self._time, self._truth, self._dice, self._workers = time, truth, dice, workers
        self._servers, replicas = counts
        self.holders, self.count = find_holders(self._servers, replicas), 0
        self._processes: list[SimServer] = []  # all that there were
        self._heirs: dict[int, SimServer] = {}  # by the number of their servers
        self._successors: dict[int, SimServer] = {}  # likewise: heirs that no worker asks as such
        time.servers = [self._start(n) for n in range(2 * self._servers)]
        for number in range(self._servers):
            time.servers[self._servers + number].is_dead = True
        for worker in workers:
            held = {n: find_shards(n, self.holders) for n in range(self._servers)}
            worker.progress.add_group(ROWS, held)

    def begin(self) -> None:
        """Start the heir of a server; workers hear of it one after the other."""
        number = self._dice.randrange(self._servers)
        if number in self._heirs or number in self._successors:
            return
        self._heirs[number] = self._start(number)
        self._time.servers[self._servers + number] = self._heirs[number]
        for worker in self._workers:
            self._tell_later(lambda w=worker: w.heirs.add(number))  # type: ignore[misc]

    def report_complete(self, worker: SimWorker) -> None:
        """Let the coordinator hear which heirs have all rows, as this worker has seen."""
        for name in worker.progress.list_complete():
            self._tell_later(lambda name=name: self._hand_over(name))  # type: ignore[misc]

    def find_holders(self, worker: SimWorker, shards: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return which servers hold these shards, and after them the heirs of these servers."""
        heirs = [self._servers + number for number in sorted(worker.heirs)]
        return add_heirs(self.holders, shards, heirs, self._servers)

    def list_running(self) -> list[int]:
        """Return the numbers of all servers, and of the heirs that there are now."""
        return [*range(self._servers), *(self._servers + n for n in sorted(self._heirs))]

    def restart(self, server: SimServer) -> None:
        """Put a new process in the place of one that has ended, if it has one yet."""
        fresh = self._start(server.number)
        for found in (self._heirs, self._successors):
            for number, each in found.items():
                if each is server:
                    found[number] = fresh
        self._time.servers = [fresh if s is server else s for s in self._time.servers]

    def count_damages(self) -> int:
        """Return how many shards were dropped, since their memory had changed."""
        return sum(server.damages for server in self._processes)

    def _start(self, number: int) -> SimServer:
        name = f"process {len(self._processes)}"
        shards = find_shards(number % self._servers, self.holders)
        self._processes.append(SimServer(number, shards, self._truth, name))
        return self._processes[-1]

    def _hand_over(self, name: str) -> None:
        """Let an heir take its server's place, if it is still there."""
        for number, heir in list(self._heirs.items()):
            if heir.name == name:
                self.count += 1
                self._successors[number] = self._heirs.pop(number)
                nobody = self._start(number)
                nobody.is_dead = self._time.servers[number].is_dead = True
                self._time.servers[self._servers + number] = nobody
                self._tell_later(lambda n=number: self._replace(n))  # type: ignore[misc]

    def _replace(self, number: int) -> None:
        """Let requests for a server go to its heir from now on."""
        self._time.servers[number] = self._successors.pop(number)
        for worker in self._workers:
            self._tell_later(lambda w=worker: self._forget_heir(w, number))  # type: ignore[misc]

    def _forget_heir(self, worker: SimWorker, number: int) -> None:
        if number not in self._heirs:  # unless it moves again
            worker.heirs.discard(number)
            worker.progress.record_silence(ROWS, number)

    def _tell_later(self, act: Callable[[], None]) -> None:
        """Do something when a message of the coordinator, or to it, has arrived."""
        self._time.call_after(self._dice.uniform(0.0, 0.1), act)

"""Moves and adds servers of tables, and lets some go, for the simulator of tables.

It does what the coordinator and the nodes do in a job. It starts the heir of a server, sends its
address to the workers, and puts it in the server's place once a worker has seen that it has all
rows. If the number of servers is to change, it starts new ones and ends the ones that no worker
needs any more.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.lab.sim.simulated_servers import RowMessages, RowTruth, SimServer
from holdfast.tables.core.heirs import HeirProgress
from holdfast.tables.core.placement import HEIRS, add_heirs, find_shards, lay_out
from holdfast.tables.core.reading import RowReading

ROWS = "rows"  # the only group of tables
SERVERS_MAX = 6


@dataclass(slots=True)
class SimWorker:
    """Is one worker: how many updates it has committed, and which it keeps.

    `replicas`: how many servers hold each shard. `progress`: has the layout that it knows.
    """

    number: int
    replicas: int
    progress: HeirProgress
    committed: int = 0
    kept_after: int = 0
    reading: RowReading | None = None
    #: The version of the read.
    version: int = 0
    #: The values that the read has returned.
    found: dict[int, int] = field(default_factory=dict)
    #: Shards and values that servers have reported.
    heard: set[tuple[int, int]] = field(default_factory=set)
    #: The worker asks again in a moment.
    waits: bool = False
    #: Grows when the job begins again, or the worker is replaced.
    attempt: int = 0
    # Servers that did not answer: the name of the process, and until when it is asked last.
    suspects: dict[int, tuple[str, float]] = field(default_factory=dict)
    #: Servers that the worker knows to be moving.
    heirs: set[int] = field(default_factory=set)

    @property
    def holders(self) -> tuple[tuple[int, ...], ...]:
        """Return the servers that hold each shard, or must hold it, by the worker's knowledge."""
        return lay_out(self.progress.layout, self.replicas)

    def find_holders(self, shards: Sequence[int]) -> dict[int, tuple[int, ...]]:
        """Return which servers hold these shards, and after them the heirs of these servers."""
        return add_heirs(self.holders, shards, [HEIRS + number for number in sorted(self.heirs)])

    def find_shards(self, number: int) -> tuple[int, ...]:
        """Return the shards that a server or an heir is to hold."""
        return find_shards(number % HEIRS, self.holders)

    def list_servers(self) -> list[int]:
        """Return the numbers of all servers and heirs."""
        heirs = (HEIRS + number for number in sorted(self.heirs))
        return [*range(self.progress.layout.servers), *heirs]


class ServerMoves:
    """Knows all processes of servers, and moves servers. `count`: how many have moved.

    `scaled`: times that another number of servers held all rows.
    """

    def __init__(
        self,
        time: RowMessages,
        truth: RowTruth,
        dice: random.Random,
        counts: tuple[int, int, int],
    ) -> None:
        """Start the servers. `counts`: how many they are, how many hold each shard, and workers."""
        self._time, self._truth, self._dice = time, truth, dice
        servers, self._replicas, workers = counts
        self.count = self.scaled = 0
        self._layout = ServerLayout(count=servers, goal=servers)
        self.workers = [SimWorker(n, self._replicas, self._make_progress()) for n in range(workers)]
        # The newest words of each worker: its layout, and the names of complete processes.
        self._heard: dict[int, tuple[int, tuple[str, ...]]] = {}
        # All processes, also ended ones.
        self._processes: list[SimServer] = []
        self._heirs: dict[int, SimServer] = {}  # by the number of their servers
        self._successors: dict[int, SimServer] = {}  # likewise: heirs that no worker asks as such
        time.servers = {n: self._start(n) for n in range(SERVERS_MAX)}
        time.servers |= {HEIRS + n: self._start(HEIRS + n) for n in range(SERVERS_MAX)}
        for number, server in time.servers.items():
            server.is_dead = number >= servers

    def begin(self) -> None:
        """Start the heir of a server; workers learn of it one after the other."""
        number = self._dice.randrange(self._layout.servers)
        if number in self._heirs or number in self._successors:
            return
        self._heirs[number] = heir = self._start(HEIRS + number)
        self._time.servers[HEIRS + number] = heir

        def learn(worker: SimWorker) -> None:
            if number in self._heirs:  # words of a coordinator do not overtake each other
                worker.heirs.add(number)

        for worker in self.workers:
            self._tell_later(lambda w=worker: learn(w))  # type: ignore[misc]

    def scale(self) -> None:
        """Move all rows to another number of servers."""
        goal = self._dice.randint(self._replicas, SERVERS_MAX)
        layout = self._layout
        if goal == layout.goal:
            return
        for number in range(layout.servers, goal):
            self._time.servers[number] = self._start(number)
        self._lay_out(ServerLayout(number=layout.number + 1, count=layout.count, goal=goal))

    def report_complete(self, worker: SimWorker) -> None:
        """Report to the coordinator the new processes that this worker has seen with all rows."""
        layout, complete = worker.progress.layout.number, worker.progress.list_complete()
        self._tell_later(lambda: self._hear(worker.number, layout, complete))

    def find_holders(self, shard: int) -> list[SimServer]:
        """Return the processes that are to hold a shard now, and the heirs of these."""
        holding = lay_out(self._layout, self._replicas)[shard]
        heirs = (HEIRS + number for number in holding if number in self._heirs)
        return [self._time.servers[number] for number in (*holding, *heirs)]

    def spoil(self) -> None:
        """Make a server compute its next update of a shard wrongly.

        It is a shard that all other servers have whole: two faults at once are not covered.
        """
        server = self._time.servers[self._dice.choice(self.list_running())]
        others = [each for each in self._time.servers.values() if each is not server]
        sound = [
            shard
            for shard in sorted(server.values)
            if all(each.is_whole(shard, server.holdings.version(shard)) for each in others)
        ]
        if sound and not server.errors:
            server.errors[self._dice.choice(sound)] = False

    def list_running(self) -> list[int]:
        """Return the numbers of all servers, and of the heirs that there are now."""
        return [*range(self._layout.servers), *(HEIRS + n for n in sorted(self._heirs))]

    def replace_worker(self, worker: SimWorker) -> None:
        """Put another process, which knows the newest layout and heirs, in a worker's place."""
        worker.progress, worker.heirs = self._make_progress(), set(self._heirs)
        self.report_complete(worker)

    def restart(self, server: SimServer) -> None:
        """Put a new process in the place of a process that has ended, if it still has a place."""
        fresh = self._start(server.number)
        for found in (self._heirs, self._successors):
            for number, each in found.items():
                if each is server:
                    found[number] = fresh
        for number, each in self._time.servers.items():
            if each is server:
                self._time.servers[number] = fresh

    def count_damages(self) -> int:
        """Return the number of shards that were dropped, because their memory had changed."""
        return sum(server.damages for server in self._processes)

    def _make_progress(self) -> HeirProgress:
        made = HeirProgress(self._layout, self._replicas)
        made.add_group(ROWS)
        return made

    def _start(self, number: int) -> SimServer:
        self._processes.append(SimServer(number, self._truth, f"process {len(self._processes)}"))
        return self._processes[-1]

    def _start_none(self, number: int) -> SimServer:
        """Return a process that has ended, for a number that no server has now."""
        nobody = self._start(number)
        nobody.is_dead = True
        return nobody

    def _hear(self, worker: int, layout: int, complete: tuple[str, ...]) -> None:
        """Decide as the coordinator does on a worker's report."""
        self._heard[worker] = layout, complete
        if layout != self._layout.number:
            return
        for name in complete:
            self._hand_over(name)
        heard = [told for told in self._heard.values() if told[0] == layout]
        names = {name for _, each in heard for name in each}
        servers = [self._time.servers[number] for number in range(self._layout.goal)]
        has_rows = all(s.name in names for s in servers) and not self._successors
        if self._layout.is_changing and len(heard) == len(self.workers) and has_rows:
            self.scaled += 1
            goal = self._layout.goal
            self._lay_out(ServerLayout(number=layout + 1, count=goal, goal=goal))

    def _lay_out(self, layout: ServerLayout) -> None:
        """Adopt another layout, end servers that have no part in it, and inform workers."""
        self._layout = layout
        for number in range(layout.servers, SERVERS_MAX):
            self._heirs.pop(number, None)
            for each in (number, HEIRS + number):
                self._time.servers[each].is_dead = True
                self._time.servers[each] = self._start_none(each)
        for worker in self.workers:
            self._tell_later(lambda w=worker: self._inform(w, layout))  # type: ignore[misc]

    def _inform(self, worker: SimWorker, layout: ServerLayout) -> None:
        if layout.number > worker.progress.layout.number:
            worker.progress.change_layout(layout)
            worker.heirs = {n for n in worker.heirs if n < layout.servers}
            self.report_complete(worker)

    def _hand_over(self, name: str) -> None:
        """Put an heir in its server's place, if it still exists."""
        for number, heir in list(self._heirs.items()):
            if heir.name == name:
                self.count += 1
                self._successors[number] = self._heirs.pop(number)
                self._time.servers[number].is_dead = True
                self._time.servers[number] = self._start_none(number)
                self._time.servers[HEIRS + number] = self._start_none(HEIRS + number)
                self._tell_later(lambda n=number: self._replace(n))  # type: ignore[misc]

    def _replace(self, number: int) -> None:
        """Send requests for a server to its heir from now on."""
        heir = self._successors.pop(number)
        if number >= self._layout.servers:
            heir.is_dead = True  # it is not needed any more
            return
        self._time.servers[number] = heir
        for worker in self.workers:
            self._tell_later(lambda w=worker: self._forget_heir(w, number))  # type: ignore[misc]

    def _forget_heir(self, worker: SimWorker, number: int) -> None:
        if number not in self._heirs:  # unless it moves again
            worker.heirs.discard(number)
            worker.progress.record_silence(ROWS, HEIRS + number)

    def _tell_later(self, act: Callable[[], None]) -> None:
        """Do something when a message of the coordinator, or to it, has arrived."""
        self._time.call_after(self._dice.uniform(0.0, 0.1), act)

"""Draws an operator's acts and faults from a seed, and does them to a job on a real cluster.

Hosts are killed, drained and brought back, nodes die, the manager is away. After each act the job
must soon use every host that is there, admitted and wanted, and no other.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

SETTLE_S = 60.0  # the longest time for which a host may be there and admitted without work
LOOK_S = 0.2
PRESENT_MIN = 2  # hosts that an operator leaves to the job
AWAY_MAX_S = 12.0
REASON = "a new fan"


class OperatedJob(Protocol):
    """Runs a job on a cluster whose hosts it names as the manager does."""

    # The number of nodes that the job wants; each has a host of its own.
    nodes: int
    # The manager takes at most this many seconds to see that a host is gone, or back.
    notice_s: float
    # Further acts, by a phrase that names them; each returns the nodes that it ends.
    more_acts: Mapping[str, Callable[[], Iterable[str]]]

    @property
    def hosts(self) -> Sequence[str]:
        """Return the hosts on which nodes may run."""
        ...

    @property
    def kept(self) -> Sequence[str]:
        """Return the hosts that the job cannot lose; they are neither killed nor drained."""
        ...

    def serving(self) -> Mapping[str, str]:
        """Return the hosts of the nodes that train; empty while some node does not answer."""
        ...

    def kill(self, host: str) -> None: ...

    def drain(self, host: str, reason: str) -> None: ...

    def bring_back(self, host: str) -> None:
        """Make a host that was killed or drained take part again."""
        ...

    def away(self, away: bool) -> None:
        """End the manager's servers, or start them again."""
        ...

    def lose(self, node: str) -> None:
        """Kill all processes of a node."""
        ...

    def log(self) -> str: ...


@dataclass(slots=True)
class OperatorWeek:
    """Keeps the cluster as its operator knows it: the hosts that are absent, and the diary."""

    job: OperatedJob
    seed: int
    diary: list[str] = field(default_factory=list)
    _absent: list[str] = field(default_factory=list)
    _dead: set[str] = field(default_factory=set)  # nodes

    def work(self, acts: int) -> None:
        """Do this number of acts, and bring all hosts back. AssertionError: a host is not used."""
        rng = random.Random(self.seed)
        self._settle("the job has begun")
        for _ in range(acts):
            done = self._act(rng)
            if rng.random() < 0.3:  # at once
                done = f"{done}, then {self._act(rng)}"
            self._settle(done)
        for host in self._absent:
            self.job.bring_back(host)
        self._absent = []
        self._settle("all hosts are back")

    def _act(self, rng: random.Random) -> str:
        """Do one act, and return a phrase about it."""
        present = self._present()
        others = [host for host in present if host not in self.job.kept]
        acts: list[str] = ["lose", "away", *self.job.more_acts]
        acts += ["kill", "drain"] * (len(present) > PRESENT_MIN and bool(others))
        acts += ["bring back"] * 2 * bool(self._absent)
        act = rng.choice(acts)
        if act == "kill":
            self.job.kill(host := self._remove(rng.choice(others)))
            return f"{host} is killed"
        if act == "drain":
            self.job.drain(host := self._remove(rng.choice(others)), REASON)
            return f"{host} is drained"
        if act == "bring back":
            host = self._absent.pop(rng.randrange(len(self._absent)))
            self.job.bring_back(host)
            return f"{host} is back"
        if act == "lose":
            return self._lose(rng, sorted(self.job.serving()))
        if act == "away":
            return self._end_manager(rng)
        self._dead.update(self.job.more_acts[act]())
        return act

    def _remove(self, host: str) -> str:
        self._absent.append(host)
        return host

    def _end_manager(self, rng: random.Random) -> str:
        """End the manager's servers for some seconds, in which a node may die."""
        nodes, seconds = sorted(self.job.serving()), rng.uniform(1.0, AWAY_MAX_S)
        self.job.away(True)
        lost = self._lose(rng, nodes) if rng.random() < 0.5 else "no node dies"
        time.sleep(seconds)  # the length of the fault
        self.job.away(False)
        return f"the manager is away for {seconds:.0f} s, and {lost}"

    def _lose(self, rng: random.Random, nodes: Sequence[str]) -> str:
        if not nodes:
            return "no node trains"
        node = rng.choice(nodes)
        self._dead.add(node)
        self.job.lose(node)
        return f"{node} dies"

    def _present(self) -> list[str]:
        return [host for host in self.job.hosts if host not in self._absent]

    def _settle(self, done: str) -> None:
        """Wait until the job uses the hosts that it should; note how long that takes."""
        began, present = time.monotonic(), self._present()
        count = min(self.job.nodes, len(present))
        limit_s = SETTLE_S + self.job.notice_s
        while True:
            serving = self.job.serving()
            taken_s = time.monotonic() - began
            hosts = sorted(serving.values())
            is_whole = len(hosts) == len({*hosts}) == count and {*hosts} <= {*present}
            if is_whole and not self._dead & {*serving}:
                break
            if taken_s > limit_s:
                seen = f"{serving} after {taken_s:.0f} s, not {count} of {present}"
                diary = "\n".join([*self.diary, done])
                raise AssertionError(f"seed {self.seed}: {seen}\n{diary}\n{self.job.log()}")
            time.sleep(LOOK_S)
        self.diary.append(f"{done}: {count} nodes train after {taken_s:.1f} s")
        print(self.diary[-1], flush=True)

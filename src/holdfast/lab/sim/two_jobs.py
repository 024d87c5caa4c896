"""Runs a job at an address where an earlier one, with the same secret, has lost its machine.

The earlier job trains in a world of its own until the node with its coordinator is lost for good.
Its other nodes wait, and then meet the coordinator of the job that is begun there. None of them may
take part in it, and each must end soon. Both worlds share one timeline.
"""

from __future__ import annotations

import dataclasses

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.types import AgentId
from holdfast.lab.sim.hosts import AgentHost, CoordinatorHost
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.world import World
from holdfast.lab.sim.wrong_bits import Violation

RECONNECT_S = 0.1
END_S = 5.0  # for an agent that has met another job to end its workers and itself
STEPS = 400  # so that the earlier job does not end by itself


class SharedAddress(CoordinatorHost):
    """Stands in the earlier world where its coordinator was, and leads to that of the later one."""

    def __init__(self, earlier: World, later: World) -> None:
        super().__init__(earlier)
        self.outcome = "its machine is lost"
        self._later = later
        self._met: dict[AgentId, float] = {}
        self._sent: dict[AgentId, int] = {}  # reports before that: their connection is no more

    def connect(self, host: AgentHost) -> None:
        """Let an agent connect, again and again, once a coordinator listens here."""
        coordinator = self._later.coordinator
        if host.machine is None or coordinator.outcome is not None:
            return
        if (
            coordinator.machine is not None
            and not coordinator.frozen
            and host.name not in self._met
        ):
            self._met[host.name] = self._later.now
            self._later.hosts[host.name] = host
            host.handle(ag.CoordinatorReached(self._later.job))
        if host.frozen and host.name in self._met:
            self._met[host.name] = self._later.now  # its time to end begins when it wakes
        met_at = self._met.get(host.name, self._later.now)
        if self._later.now > met_at + END_S:
            raise Violation(f"{host.name} is still there {END_S:g} s after it met another job")
        self.world.call_later(RECONNECT_S, self.connect, host)

    def hear(self, report: AgentReport) -> None:
        """Pass on what an agent reports that takes this coordinator for its own."""
        if report.seq > self._sent.get(report.agent, report.seq):
            self._later.hosts[report.agent] = self.world.hosts[report.agent]
            self._later.coordinator.hear(report)


def run_after_another(later: World) -> None:
    """Run a job from start to end, after another one. Violation, as `World.run`."""
    age_s = later.options.left_behind_s
    earlier = World(
        _earlier(later.options), later.machines, later.listener, later.timeline, "left", "earlier"
    )
    earlier.begin()
    while later.timeline.step(age_s):
        earlier.count_event()
    address = SharedAddress(earlier, later)
    earlier.coordinator.crash()
    earlier.coordinator = address
    first, *others = earlier.hosts.values()
    first.gone = True
    first.crash()
    later.begin()
    for host in others:
        earlier.call_later(earlier.rng.uniform(0.0, 2.0), address.connect, host)
    _run_both(earlier, later)


def _run_both(earlier: World, later: World) -> None:
    checked, deadline = 0, later.options.finish_by_s + later.options.left_behind_s
    while not later.is_over and later.timeline.step(deadline):
        later.count_event()
        if later.truth.newest > checked:
            checked = later.truth.newest
            for member in later.truth.views[checked].members:
                if member.agent in earlier.hosts:
                    raise Violation(f"view {checked} includes node {member.agent} of another job")
    if not later.is_over:
        raise later.describe_delay()


def _earlier(options: Options) -> Options:
    """Describe the earlier job: alike, of another seed, and nothing happens to it before."""
    return dataclasses.replace(
        options,
        seed=options.seed + (1 << 32),
        agents=max(options.agents, 2),
        agents_late=0,
        loops=(STEPS,),
        faults=(),
        loss=0.0,
        duplicate=0.0,
        stop_s=0.0,
        stop_again_s=0.0,
        fails_in=-1,
        shard_optimizer=False,
        pieces=(0, 0),
        left_behind_s=0.0,
    )

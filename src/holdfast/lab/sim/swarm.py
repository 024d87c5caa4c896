"""Runs the seeds: one to a result, many to a summary.

A seed may run its job at an address where an earlier job, with the same secret, has lost its
machine. The earlier job trains in a world of its own until the node with its coordinator is lost
for good. Its other nodes wait, and then meet the coordinator of the job that begins there. None of
them may take part in it, and each must end soon. Both worlds share one timeline.
"""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.engine.core.directives import AgentReport
from holdfast.engine.core.errors import InvariantError
from holdfast.engine.core.membership import agent as ag
from holdfast.engine.core.types import AgentId
from holdfast.lab.sim.drawn_options import draw, draw_large
from holdfast.lab.sim.hosts import AgentHost, CoordinatorHost, Names
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.world import Machines, World
from holdfast.lab.sim.wrong_bits import Violation

RECONNECT_S = 0.1
END_S = 5.0  # for an agent that has met another job to end its workers and itself
STEPS = 400  # so that the earlier job does not end by itself
EARLIER = Names(nodes="left", job="earlier")


@dataclass(frozen=True, slots=True, kw_only=True)
class Result:
    """Describes the run of one seed. `failure` is empty if it is clean."""

    options: Options
    small: bool
    nodes: int | None
    events: int
    simulated_s: float
    digest: int
    views: int
    commits: int
    spawns: int
    faults: dict[str, int] = field(default_factory=dict)
    #: The coordinator's outcome; empty: success.
    outcome: str | None = None
    failure: str = ""
    story: tuple[str, ...] = ()

    @property
    def replay(self) -> str:
        size = " --small" if self.small else ""
        size = f" --nodes {self.nodes}" if self.nodes is not None else size
        return f"holdfast sim --seed {self.options.seed}{size} --trace"


def run_seed(
    seed: int,
    *,
    small: bool = False,
    nodes: int | None = None,
    machines: Machines | None = None,
    listener: Callable[[str], None] | None = None,
    tuned: dict[str, object] | None = None,
) -> Result:
    """Run one seed to its end. Every failure is a result, also a crash of a machine.

    `nodes`: the nodes of a large job, instead of one whose size is drawn.
    `tuned` replaces some of the drawn options, for tests that aim at one situation.
    """
    options = draw(seed, small) if nodes is None else draw_large(seed, nodes)
    if tuned:
        tuned = {"spares": 0} | tuned if "slots" in tuned else tuned
        options = dataclasses.replace(options, **tuned)  # type: ignore[arg-type]
    world = World(options, machines or Machines(), listener)
    failure = ""
    try:
        run_after_another(world) if options.left_behind_s else world.run()
    except (Violation, InvariantError) as error:
        failure = f"{type(error).__name__}: {error}"
    except Exception as error:  # noqa: BLE001 - a machine that breaks in any way is a finding
        where = traceback.format_exc(limit=-4)
        failure = f"{type(error).__name__}: {error}\n{where}"
    return Result(
        options=options,
        small=small,
        nodes=nodes,
        events=world.story.events,
        simulated_s=world.now,
        digest=world.story.digest,
        views=len(world.truth.membership.views),
        commits=world.truth.steps.commits,
        spawns=world.count["spawns"],
        faults=dict(world.faults.count),
        outcome=world.coordinator.outcome,
        failure=failure,
        story=tuple(world.story.recent()) if failure else (),
    )


@dataclass(slots=True)
class Summary:
    """Sums up the runs of many seeds; a run without faults and view changes proves little."""

    seeds: int = 0
    failures: int = 0
    events: int = 0
    simulated_s: float = 0.0
    views: int = 0
    commits: int = 0
    spawns: int = 0
    faults: dict[str, int] = field(default_factory=dict)

    def add(self, result: Result) -> None:
        self.seeds += 1
        self.failures += bool(result.failure)
        self.events += result.events
        self.simulated_s += result.simulated_s
        self.views += result.views
        self.commits += result.commits
        self.spawns += result.spawns
        for kind, count in sorted(result.faults.items()):
            self.faults[kind] = self.faults.get(kind, 0) + count


def run_many(seeds: range, small: bool = False, nodes: int | None = None) -> Iterator[Result]:
    for seed in seeds:
        yield run_seed(seed, small=small, nodes=nodes)


class SharedAddress(CoordinatorHost):
    """Has the address of the earlier world's coordinator, and leads to the later world's."""

    def __init__(self, earlier: World, later: World) -> None:
        super().__init__(earlier)
        self.outcome = "its machine is lost"
        self._later = later
        self._met: dict[AgentId, float] = {}
        self._sent: dict[AgentId, int] = {}  # reports before that: their connection is no more

    def connect(self, host: AgentHost) -> None:
        """Connect an agent, again and again, once a coordinator listens here."""
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
            host.handle(ag.CoordinatorReached(self._later.names.job))
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
        _earlier(later.options), later.machines, later.story.listener, later.timeline, EARLIER
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
        if later.truth.membership.newest > checked:
            checked = later.truth.membership.newest
            for member in later.truth.membership.views[checked].members:
                if member.agent in earlier.hosts:
                    raise Violation(f"view {checked} includes node {member.agent} of another job")
    if not later.is_over:
        raise later.describe_delay()


def _earlier(options: Options) -> Options:
    """Describe the earlier job: alike, of another seed, and no fault strikes it before."""
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

"""Runs the seeds: one to a result, many to a summary."""

from __future__ import annotations

import dataclasses
import traceback
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

from holdfast.engine.core.errors import InvariantError
from holdfast.lab.sim.drawn_options import draw
from holdfast.lab.sim.large_jobs import draw_large
from holdfast.lab.sim.run_options import Options
from holdfast.lab.sim.two_jobs import run_after_another
from holdfast.lab.sim.world import Machines, World
from holdfast.lab.sim.wrong_bits import Violation


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
    outcome: str | None = None  # what the coordinator ended with; empty: success
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
        events=world.events,
        simulated_s=world.now,
        digest=world.digest,
        views=len(world.truth.views),
        commits=world.truth.commits,
        spawns=world.count["spawns"],
        faults=dict(world.faults.count),
        outcome=world.coordinator.outcome,
        failure=failure,
        story=tuple(world.recent()) if failure else (),
    )


@dataclass(slots=True)
class Summary:
    """Sums up the runs of many seeds; a run without faults and view changes proves nothing."""

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

"""The bytes of a step's sum that leave machines and racks, for the hosting that Holdfast chooses.

No job is run: the real assignment and the real plan of the sum are asked. Of a sum of size S, each
of N machines has to send at least S (1 - 1/N) on the way up, and as much on the way down. The
figures are multiples of that: the mean over all machines, and the machine that sends most. The
result is in MANY_WORKERS.md.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fractions import Fraction

from holdfast.engine.core import tree
from holdfast.engine.core.assignment import assign_at_boundary, assign_mid_step
from holdfast.engine.core.domains import Path, find_paths
from holdfast.engine.core.sum_plan import plan_sum
from holdfast.engine.core.types import WorkerId

RACK, MACHINE = 1, 2  # names at the beginning of a path that are the same on one of them
Paths = Mapping[WorkerId, Path]
Owners = tuple[WorkerId, ...]


@dataclass(frozen=True)
class Traffic:
    """Gives the bytes that machines, or racks, send for one sum, in multiples of the least."""

    mean: float
    most: float


def measure(owners: Sequence[WorkerId], paths: Paths, depth: int = MACHINE) -> Traffic:
    """Return the bytes that leave the machines, or racks, of the hosts; each must host a task."""
    workers = sorted(set(owners))
    rank_of = {worker: rank for rank, worker in enumerate(workers)}
    nodes = tree.find_host_nodes([rank_of[owner] for owner in owners], len(workers))
    places = [paths[worker][:depth] for worker in workers]
    sent = dict.fromkeys(places, Fraction(0))
    for rank, here in enumerate(places):
        plan = plan_sum(nodes, len(owners), rank)
        for message in (m for level in (*plan.up, *plan.down) for m in level.sends):
            if places[message.peer] != here:
                sent[here] += message.part[1] - message.part[0]
    if len(sent) == 1:
        return Traffic(0.0, 0.0)
    least = 2 * (1 - Fraction(1, len(sent)))
    mean, most = sum(sent.values()) / len(sent), max(sent.values())
    return Traffic(float(mean / least), float(most / least))


def make_paths(machines: int, workers: int, racks: int, seed: int = 0) -> dict[WorkerId, Path]:
    """Place machines in racks at random, in joining order; each brings the next workers."""
    dice = random.Random(seed)
    rack_of = dice.sample([i * racks // machines for i in range(machines)], machines)
    names = [f"gpu{number}" for number in dice.sample(range(machines * 10), machines)]
    nodes = {
        WorkerId(i * workers + j): (names[i], (f"rack=r{rack_of[i]}",))
        for i in range(machines)
        for j in range(workers)
    }
    return find_paths(nodes)


def list_layouts(vranks: int, paths: Paths) -> list[tuple[str, Owners]]:
    """Return the hosts of virtual ranks, in the order in which a job may have them."""
    workers = sorted(paths)
    lost = workers[len(workers) // 3]
    machine = [worker for worker in workers if paths[worker] == paths[lost]]
    begun = assign_at_boundary(vranks, workers, (), paths)
    found = [
        ("by worker number alone", assign_at_boundary(vranks, workers, ())),
        ("near each other", begun),
    ]
    for what, gone in (("a worker", [lost]), ("a machine", machine)):
        left = [worker for worker in workers if worker not in gone]
        at_once = assign_mid_step(left, begun, paths)
        found.append((f"{what} is lost, at once", at_once))
        found.append(("at the next boundary", assign_at_boundary(vranks, left, at_once, paths)))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--machines", type=int, default=8, metavar="N")
    parser.add_argument("--workers", type=int, default=8, metavar="N", help="on each machine")
    parser.add_argument("--racks", type=int, default=4, metavar="N")
    parser.add_argument("--virtual", type=int, metavar="V", help="default: one for each worker")
    options = parser.parse_args()
    machines, workers, racks = options.machines, options.workers, options.racks
    vranks = machines * workers if options.virtual is None else options.virtual
    if workers < 1 or not 2 <= racks <= machines or vranks < machines * workers:
        parser.error(
            f"{machines} machines with {workers} workers each in {racks} racks, V = {vranks}: give "
            "two racks or more, a machine for each, and no fewer virtual ranks than workers"
        )
    paths = make_paths(machines, workers, racks)
    print(
        "| hosting | machines: mean | most | racks: mean | most |",
        "|---|---|---|---|---|",
        sep="\n",
    )
    for what, owners in list_layouts(vranks, paths):
        found = (measure(owners, paths), measure(owners, paths, RACK))
        cells = [cell for each in found for cell in (each.mean, each.most)]
        print(f"| {what} | {' | '.join(f'{cell:.2f}' for cell in cells)} |", flush=True)


if __name__ == "__main__":
    main()

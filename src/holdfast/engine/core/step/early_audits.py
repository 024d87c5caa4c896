"""Plans which tasks another member computes, too, to see that no worker keeps something. Pure.

A script may keep a value that its first batch sets, an address, or the time of its start. Then the
results of a worker agree with each other, and only another worker's computation of the same task
shows it. So members compare tasks in the job's first steps, in the first steps after workers have
joined, and later one task in a cycle, in the step in which its owner repeats that task: who repeats
and who compares compute at the same time.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.core.step.audit import Audit
from holdfast.engine.core.types import WorkerId
from holdfast.engine.core.views import View

EARLY_STEPS = 4  # first steps of a job, or after a join, in which a script is watched closely
PAIRS_MAX = 4  # pairs of workers compare a task in one of these


def plan_early(view: View, step: int, owners: Sequence[WorkerId], cycle: int) -> tuple[Audit, ...]:
    """Return the step's audits of the script, by virtual rank; `cycle`: steps, 0: there are none.

    An early step has some pairs of workers, so that in few steps each is compared with another.
    """
    workers = view.workers
    if not cycle or len(workers) < 2:
        return ()
    if not _is_early(view, step):
        turn, within = divmod(step, cycle)
        vrank = turn % len(owners)
        return (
            ()
            if within
            else (Audit(vrank, owners[vrank], (_other_worker(workers, owners[vrank], turn),)),)
        )
    hosts = [worker for worker in workers if worker in owners]
    first = step * PAIRS_MAX % len(hosts)
    chosen = [*hosts[first:], *hosts[:first]][:PAIRS_MAX]
    found = []
    for owner in chosen:
        hosted = [vrank for vrank, each in enumerate(owners) if each == owner]
        vrank = hosted[step % len(hosted)]
        found.append(Audit(vrank, owner, (_other_worker(workers, owner, step),)))
    return tuple(sorted(found, key=lambda audit: audit.vrank))


def _is_early(view: View, step: int) -> bool:
    joined = bool(view.joiners) and step < view.resume_step + EARLY_STEPS
    return joined or step < EARLY_STEPS


def _other_worker(workers: Sequence[WorkerId], owner: WorkerId, turn: int) -> WorkerId:
    """Return another worker than the owner, a different one each turn."""
    others = [worker for worker in workers if worker != owner]
    return others[(workers.index(owner) + turn) % len(others)]

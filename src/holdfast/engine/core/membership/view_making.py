"""Makes views from proposals: the step to resume at, and the hosts of tasks. Pure.

The vote of step t ends with every member holding the complete reduced gradient of t. So if any
member committed t, all can. If no member did, but all live and hold the gradient, committing it
loses no work. Otherwise t is redone, and redoing gives the same bits: a member that is lost before
it voted may have been the only one to see that its piece of the sum was not finite."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass

from holdfast.engine.core.assignment import Paths, assign_at_boundary, assign_mid_step
from holdfast.engine.core.domains import Domains, find_paths
from holdfast.engine.core.errors import require
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.roster import Roster
from holdfast.engine.core.redundancy import Recall
from holdfast.engine.core.types import ViewNumber, WorkerId, spans
from holdfast.engine.core.views import Follower, LateWorker, Member, View
from holdfast.engine.core.worker_status import WorkerStatus


@dataclass(frozen=True, slots=True, kw_only=True)
class Room:
    """Bounds the members of a view: `hosts` of them host tasks, the rest are spares."""

    hosts: int
    spares: int = 0

    @property
    def members(self) -> int:
        return self.hosts + self.spares


NO_LIMIT = Room(hosts=1 << 30)


@dataclass(frozen=True, slots=True, kw_only=True)
class Proposal:
    """Describes the next view, before it has a number."""

    workers: tuple[WorkerId, ...]
    owners: tuple[WorkerId, ...]
    resume_step: int
    joiners: tuple[WorkerId, ...]
    why: str
    suspended: tuple[LateWorker, ...] = ()
    catching_up: tuple[LateWorker, ...] = ()
    fed: tuple[Follower, ...] = ()
    spares: tuple[WorkerId, ...] = ()
    #: The number of tasks of suspended workers.
    redone: int = 0
    recall: Recall | None = None


def choose_hosts(
    workers: Collection[WorkerId],
    owners_now: Sequence[WorkerId],
    room: Room,
    late: Collection[WorkerId] = (),
) -> list[WorkerId]:
    """Choose hosts of tasks: present ones first, and `late` ones last; the rest are spares."""
    hosting = frozenset(owners_now) & frozenset(workers)
    ranked = sorted(workers, key=lambda worker: (worker not in hosting, worker in late, worker))
    return sorted(ranked[: max(room.hosts, len(hosting))])


def choose_owners(
    workers: Collection[WorkerId],
    owners_now: Sequence[WorkerId],
    room: Room,
    late: Collection[WorkerId],
    paths: Paths,
) -> tuple[list[WorkerId], tuple[WorkerId, ...]]:
    """Choose the hosts of tasks at a boundary, and the owner of each virtual rank.

    `late`: fed workers, which may still wait for the last step. They own no virtual rank until they
    have voted once. Then blocks are cut again (core/step/speeds.py), so until then only lost
    virtual ranks move.
    """
    hosts = choose_hosts(workers, owners_now, room, late)
    now = [worker for worker in hosts if worker not in late]
    if now == hosts:
        return hosts, assign_at_boundary(len(owners_now), hosts, owners_now, paths)
    return hosts, assign_mid_step(now, owners_now, paths)


def initial_view(
    ready: Sequence[WorkerStatus],
    room: Room,
    vranks: int,
    recall: Recall,
    again: str,
    paths: Paths,
) -> Proposal:
    """Propose a first view, when no worker holds the state; it starts from a recalled state.

    `again`: why this is not the job's beginning. `paths`: the places of the workers' nodes.
    """
    hosts = tuple(sorted(s.worker for s in ready[: room.hosts]))
    members = sorted(ready[: room.members], key=lambda status: status.worker)
    workers = tuple(status.worker for status in members)
    base, remembers = recall.base, bool(recall.view or recall.sources)
    where = f"from the checkpoint of step {base}" if base else "from step 0 again"
    begins = f"the job goes on {where}" if base else "the job starts"
    if remembers:
        where = f"from step {recall.step}, as the nodes' memory has it"
    return Proposal(
        workers=workers,
        owners=assign_at_boundary(vranks, hosts, (), paths),
        resume_step=recall.step,
        joiners=workers,
        catching_up=tuple(
            LateWorker(worker=s.worker, incarnation=s.incarnation, committed=base)
            for s in members
            if remembers
        ),
        spares=tuple(worker for worker in workers if worker not in hosts),
        recall=recall if remembers else None,
        why=f"{again}: {where}" if again else begins,
    )


def make_view(
    proposal: Proposal, number: ViewNumber, old: View | None, roster: Roster, procs: int = 1
) -> View:
    """Make a view; a leader that survives stays, to finish work that it alone has begun.

    `procs`: processes of each worker.
    """
    workers, joiners = proposal.workers, frozenset(proposal.joiners)
    eligible = [w for w in workers if w not in joiners] or workers
    slots = [(w, roster.slots[w]) for w in workers]
    return View(
        number=number,
        members=tuple(
            Member(
                worker=w,
                incarnation=p.incarnation,
                agent=p.agent,
                shards=procs,
                further=p.further,
                domains=_find_domains(w, roster, old),
            )
            for w, p in slots
        ),
        owners=proposal.owners,
        resume_step=proposal.resume_step,
        leader=old.leader if old is not None and old.leader in eligible else eligible[0],
        joiners=proposal.joiners,
        unproven=_find_unproven(proposal, old, roster),
        suspended=proposal.suspended,
        catching_up=proposal.catching_up,
        fed=proposal.fed,
        spares=proposal.spares,
        recall=proposal.recall,
        reason=proposal.why,
    )


def find_worker_paths(workers: Iterable[WorkerId], roster: Roster, old: View | None) -> Paths:
    """Return the places of these workers' nodes, as their next view will give them."""
    return find_paths({w: (roster.slots[w].agent, _find_domains(w, roster, old)) for w in workers})


def _find_domains(worker: WorkerId, roster: Roster, old: View | None) -> Domains:
    """Return the failure domains that a node has reported, or else those of the present view."""
    node = roster.nodes.get(roster.slots[worker].agent)
    if node is not None:
        return node.report.domains
    member = old.member(worker) if old is not None else None
    return member.domains if member is not None else ()


def _find_unproven(proposal: Proposal, old: View | None, roster: Roster) -> tuple[WorkerId, ...]:
    """Return the workers that join, or have joined and committed no task yet."""
    found = set(proposal.joiners)
    for member in old.members if old is not None else ():
        worker, incarnation = member.worker, member.incarnation
        before = old is not None and worker in old.unproven
        if before and worker in proposal.workers and roster.wants(worker, incarnation):
            status = roster.status(worker, incarnation)
            found |= {worker} if status is None or status.unproven else set()
    return tuple(sorted(found)) if len(found) < len(proposal.workers) else ()


def check_view(view: View, vranks: int) -> None:
    """Assert the rules of every view."""
    workers = list(view.workers)
    require(workers == sorted(set(workers)), f"view {view.number} repeats a member")
    require(set(view.owners) <= set(workers), f"view {view.number}: a stranger owns a rank")
    spare = set(view.spares)
    require(spare <= set(workers) - set(view.owners), f"view {view.number}: a spare owns a rank")
    require(len(view.owners) == vranks, f"view {view.number}: a virtual rank has no owner")


def announce_view(view: View, *, again: bool) -> Announce:
    """Return the line of the event log on a view; `again`: it may repeat committed steps."""
    members = spans(view.workers)
    return Announce(
        "view",
        f"view {view.number}: workers {members}; {view.reason}",
        view=view.number,
        step=view.resume_step,
        members=members,
        again=again,
    )


def resume_step(survivors: Sequence[WorkerStatus], lost: bool) -> tuple[int, str]:
    """Return the number of steps that count as committed, and the reason why.

    `survivors` all hold state and have promised not to act in the stopped view. `lost`: some member
    of that view is not among them.
    """
    require(len(survivors) > 0, "no survivor to resume from")
    newest = max(s.committed for s in survivors)
    behind = [s for s in survivors if s.committed < newest]
    if behind:
        for s in behind:
            require(
                s.committed == newest - 1 and s.reduced,
                f"worker {s.worker} is at step {s.committed} (reduced: {s.reduced}) while another "
                f"committed {newest} steps",
            )
        return newest, f"step {newest - 1} was committed by a survivor: all commit it"
    if all(s.reduced for s in survivors) and not lost:
        return newest + 1, f"all members hold the gradient of step {newest}: all commit it"
    why = "for the lost virtual ranks" if lost else "since not all members have its gradient"
    return newest, f"step {newest} is redone {why}"

"""Defines the words of the protocol as values: ids, statuses, views and records that travel.

Everything here is immutable. Both control protocols are level-triggered: each record carries the
whole state of its sender, never a change alone, so that a lost, repeated or late record does no
harm (an older one is recognised by its sequence number and dropped).
"""

from __future__ import annotations

import bisect
import enum
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from operator import attrgetter
from typing import NamedTuple, NewType

from holdfast.engine.core.domains import Domains, Path, find_paths
from holdfast.engine.core.machine_errors import MachineError
from holdfast.engine.core.redundancy import KeptPieces, Recall
from holdfast.engine.core.setbacks import NO_SETBACKS, Setbacks

# The usual number of the signal that asks a process to end.
SIGTERM = 15

WorkerId = NewType("WorkerId", int)
AgentId = NewType("AgentId", str)
Incarnation = NewType("Incarnation", int)
ViewNumber = NewType("ViewNumber", int)

NO_VIEW = ViewNumber(0)
RELEASE_ALL = 1 << 30  # a release_loop no loop counter reaches
_WORKER = attrgetter("worker")


@dataclass(frozen=True, slots=True)
class Tick:
    """Time has passed: a machine looks at the clock again."""


class Peer(NamedTuple):
    """Names one process of a worker, as others' processes address it; a worker may have several.

    `shard`: which part of the model it holds; the processes of one shard exchange gradients.
    """

    worker: WorkerId
    shard: int = 0


class ProcessRole(enum.Enum):
    """Names the jobs that an agent's process may have."""

    WORKER = "worker"  # runs the user's script and hosts virtual ranks
    STORE = "store"  # serves torch.distributed's store to a group (core/membership/group.py)


class Stage(enum.Enum):
    """Names the stages in the life of a worker's process."""

    BOOTING = "booting"  # started; its script has not asked for steps yet
    READY = "ready"  # wants to be, or is, a member of views
    EXITED = "exited"  # ended by itself with exit code 0
    FAILED = "failed"  # the user's script raised: a bug, not a fault
    LOST = "lost"  # killed, crashed or fenced: a machine fault

    @property
    def alive(self) -> bool:
        return self in (Stage.BOOTING, Stage.READY)


class StateCopy(enum.Enum):
    """Describes the state that a worker's process holds."""

    INITIAL = "initial"  # as the script made it
    DIRTY = "dirty"  # neither initial nor the job's: a load has begun and is not verified
    CURRENT = "current"  # the job's state after `committed` steps
    DISCARDED = "discarded"  # it was the job's; something wrong may have been used to make it


class Phase(enum.Enum):
    """Names the places where a worker's script may be in a step."""

    SCRIPT = "script"  # its own code: before, between or after steps
    BOUNDARY = "boundary"  # held between two steps, its state at rest
    COMPUTING = "computing"  # its tasks of the step
    WAITING = "waiting"  # its tasks of the step are done; it waits for others
    OVERDUE = "overdue"  # it has waited for others for longer than steps take
    LEAVING = "leaving"  # it has left its loop; other workers or a save still need this process
    ENDED = "ended"  # its loop has run all its steps


@dataclass(frozen=True, slots=True, kw_only=True)
class JobEvent:
    """Describes an event that a worker adds to the job's log; `number` grows within a worker.

    `about`: the worker that it is about, if that is another one.
    """

    number: int
    kind: str
    text: str
    about: WorkerId | None = None


@dataclass(frozen=True, slots=True, kw_only=True)
class Invalidation:
    """Declares copies of the state untrue: of steps beyond `after`, made in views up to `view`.

    `wrong`: the workers that have computed wrongly in that view again and again.
    """

    after: int
    view: ViewNumber
    wrong: tuple[WorkerId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Follower:
    """Names a worker that is brought up to date while others train, and where it listens."""

    worker: WorkerId
    incarnation: Incarnation
    address: str = ""  # HOST:PORT


@dataclass(frozen=True, slots=True, kw_only=True)
class FollowOrder:
    """Asks the members of `view` to feed these workers: the state of one step, and steps since.

    It is void in any other view. `number` grows from order to order.
    """

    number: int
    view: ViewNumber
    followers: tuple[Follower, ...]

    def names(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether this process is one of the followers."""
        return any((f.worker, f.incarnation) == (worker, incarnation) for f in self.followers)


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerStatus:
    """Describes one incarnation of a worker to the control plane.

    `promised` is the heart of every view change: the worker will never again act in a view numbered
    `promised` or less, so its `committed` and `reduced` only change in a later view.
    """

    worker: WorkerId
    incarnation: Incarnation
    seq: int = 0
    stage: Stage = Stage.BOOTING
    view: ViewNumber = NO_VIEW  # newest view installed
    promised: ViewNumber = NO_VIEW
    state: StateCopy = StateCopy.INITIAL
    committed: int = 0  # steps committed; also the index of the next step
    reduced: bool = False  # holds the complete reduced gradient of step `committed`
    hosted: tuple[int, ...] = ()  # its virtual ranks in step `committed`
    phase: Phase = Phase.SCRIPT
    loop: int = 0  # how many step loops its script has entered
    opened: int = 0  # the number of steps up to the newest one that its loop has opened
    line: str = ""  # the script's line that opened its step or ended its loop, for people
    unreached: tuple[WorkerId, ...] = ()  # members of `view` that the network does not reach
    left_for: str = ""  # why it has left `view` without an order, as a phrase that follows its name
    proved_at: float = 0.0  # its node's clock: every member of `view` acted in it since then
    saved: int = 0  # the step of the newest checkpoint that it knows to be durable
    unreadable: int = 0  # the step of one that it could not read
    unrecalled: ViewNumber = NO_VIEW  # the newest view whose state could not be recalled
    invalidations: tuple[Invalidation, ...] = ()  # those known to the worker
    events: tuple[JobEvent, ...] = ()  # the newest few
    detail: str = ""  # why it was lost, or the traceback of a failure
    activity: int = 0  # in a group: the times that its node has seen the process at work
    pid: int = 0
    address: str = ""  # where it can be fed, before it is a member
    meets_at: str = ""  # HOST:PORT where its processes on further nodes find it
    place: int = 0  # the number of the node among the worker's nodes; it tells of its own processes
    saving: int = 0  # the step at which its view has ended, while its share of that is saved
    abreast: int = 0  # the number of the order by which it was fed until nothing was missing
    unproven: bool = False  # it has joined, and none of its tasks has been committed yet
    unfed: int = 0  # number of the newest order to follow that failed here
    heirs: tuple[str, ...] = ()  # addresses of servers and their heirs that have all new rows
    layout: ServerLayout | None = None  # of servers, the newest that it uses: `heirs` goes by it
    machine_error: MachineError | None = None  # of its own, by which the process has ended
    no_room: bool = False  # its ledger cannot grow: it rests at a boundary until there is room

    @property
    def has_state(self) -> bool:
        """Return whether it holds the job's state after `committed` steps."""
        return self.state is StateCopy.CURRENT

    @property
    def dirty(self) -> bool:
        """Return whether its state is neither the initial one nor the job's."""
        return self.state in (StateCopy.DIRTY, StateCopy.DISCARDED)

    @property
    def discarded(self) -> bool:
        """Return whether it has given its state up, since something wrong was used."""
        return self.state is StateCopy.DISCARDED

    @property
    def has_stopped(self) -> bool:
        """Return whether it acts in no view now, so that it commits nothing before the next one."""
        return self.promised >= self.view

    @property
    def at_boundary(self) -> bool:
        """Return whether it rests between two steps and acts in no view: it can donate state."""
        return self.phase is Phase.BOUNDARY and self.has_stopped and self.has_state

    @property
    def in_step(self) -> bool:
        """Return whether its script is in the middle of a step."""
        return self.phase in (Phase.COMPUTING, Phase.WAITING, Phase.OVERDUE)

    @property
    def waiting(self) -> bool:
        """Return whether its own tasks of the step are done, and it waits for others."""
        return self.phase in (Phase.WAITING, Phase.OVERDUE)

    @property
    def late(self) -> bool:
        """Return whether it has waited for others for longer than steps take."""
        return self.phase is Phase.OVERDUE

    @property
    def ended(self) -> bool:
        """Return whether its current loop has run all its steps."""
        return self.phase is Phase.ENDED

    @property
    def has_left_loop(self) -> bool:
        """Return whether its script takes no further step in its current loop."""
        return self.phase in (Phase.LEAVING, Phase.ENDED)


@dataclass(frozen=True, slots=True, kw_only=True)
class Member:
    """Names one incarnation of a worker as a member of a view."""

    worker: WorkerId
    incarnation: Incarnation
    agent: AgentId
    shards: int = 1  # processes that it consists of
    further: tuple[AgentId, ...] = ()  # nodes besides `agent`, if it is spread over several
    domains: Domains = ()  # known failure domains of `agent`

    @property
    def nodes(self) -> tuple[AgentId, ...]:
        """Return its nodes, in the order of the shards that they hold."""
        return (self.agent, *self.further)

    def holder(self, shard: int) -> AgentId:
        """Return the node that holds a shard: each holds the same number, one after the other."""
        return self.nodes[shard * len(self.nodes) // self.shards]

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Return its processes, in the order of their shards."""
        return tuple(Peer(self.worker, shard) for shard in range(self.shards))


@dataclass(frozen=True, slots=True, kw_only=True)
class LateWorker:
    """Names a worker that the others have gone on without, in the middle of step `committed`.

    It keeps its state, to catch up by the gradients of the steps that it has missed.
    """

    worker: WorkerId
    incarnation: Incarnation
    committed: int


@dataclass(frozen=True, kw_only=True)
class View:
    """Records a numbered membership decision. `members` are sorted by worker.

    What is asked of it again and again, in large jobs, is found once (hence no slots).

    `owners[v]` hosts virtual rank v at first; while the view lasts its members may agree otherwise
    (core/step/balance.py).
    """

    number: ViewNumber
    members: tuple[Member, ...]
    owners: tuple[WorkerId, ...]
    resume_step: int
    leader: WorkerId  # stays the same as long as it survives
    joiners: tuple[WorkerId, ...] = ()
    unproven: tuple[WorkerId, ...] = ()  # joined, but have committed no step with others yet
    suspended: tuple[LateWorker, ...] = ()  # no members: members keep the steps that they miss
    catching_up: tuple[LateWorker, ...] = ()  # joiners that catch up
    fed: tuple[Follower, ...] = ()  # joiners that were fed, and may still wait for the last step
    spares: tuple[WorkerId, ...] = ()  # host nothing as long as no other member is lost
    invalidations: tuple[Invalidation, ...] = ()  # all known ones
    ring: tuple[AgentId, ...] = ()  # nodes that keep pieces of the state; none: nothing is kept
    pieces_at: tuple[str, ...] = ()  # HOST:PORT where they serve these
    recall: Recall | None = None  # from what the members make the state again
    abandoned: tuple[Invalidation, ...] = ()  # what nodes keep of it that was never built on
    reason: str = ""
    restarts: int = 0  # faults before a group of processes (core/membership/group.py)

    @cached_property
    def workers(self) -> tuple[WorkerId, ...]:
        return tuple(m.worker for m in self.members)

    @cached_property
    def incarnations(self) -> frozenset[tuple[WorkerId, Incarnation]]:
        """Return which incarnation of each worker is a member."""
        return frozenset((m.worker, m.incarnation) for m in self.members)

    @cached_property
    def paths(self) -> Mapping[WorkerId, Path]:
        """Return for each member where its node is; near members have like paths."""
        return find_paths({m.worker: (m.agent, m.domains) for m in self.members})

    @property
    def peers(self) -> tuple[Peer, ...]:
        """Return all processes of all members; each must be reached before the group works."""
        return tuple(peer for member in self.members for peer in member.peers)

    @cached_property
    def donors(self) -> tuple[WorkerId, ...]:
        """Members that hold the state; empty when the job starts from its initial state."""
        joiners = frozenset(self.joiners)
        return tuple(w for w in self.workers if w not in joiners)

    @property
    def base(self) -> int:
        """Return the step after which the state is that the members begin with, if none has it."""
        return self.resume_step if self.recall is None else self.recall.base

    def hosted_by(self, worker: WorkerId) -> tuple[int, ...]:
        return self._hosted.get(worker, ())

    @cached_property
    def _hosted(self) -> Mapping[WorkerId, tuple[int, ...]]:
        found: dict[WorkerId, list[int]] = {}
        for vrank, owner in enumerate(self.owners):
            found.setdefault(owner, []).append(vrank)
        return {owner: tuple(vranks) for owner, vranks in found.items()}

    def late_worker(self, worker: WorkerId) -> LateWorker | None:
        """Return what a member has to catch up with; None if nothing."""
        return next((each for each in self.catching_up if each.worker == worker), None)

    def is_late(self, worker: WorkerId) -> bool:
        """Return whether a member may still have to apply steps before that of the view."""
        return self.late_worker(worker) is not None or self.feeds(worker)

    def feeds(self, worker: WorkerId) -> bool:
        """Return whether this worker joins with a state that it was fed, while the others go on."""
        return any(each.worker == worker for each in self.fed)

    def list_hosted(self) -> dict[WorkerId, tuple[int, ...]]:
        """Return what `hosted_by` says of each member, for all at once."""
        return {worker: self.hosted_by(worker) for worker in self.workers}

    def member(self, worker: WorkerId) -> Member | None:
        i = self.rank(worker)
        found = self.members[i] if i < len(self.members) else None
        return found if found is not None and found.worker == worker else None

    def rank(self, worker: WorkerId) -> int:
        """Return a member's position among the members."""
        members = self.members
        if 0 <= worker < len(members) and members[worker].worker == worker:
            return worker  # no worker before it has left: large jobs ask very often
        return bisect.bisect_left(members, worker, key=_WORKER)

    def includes(self, worker: WorkerId, incarnation: Incarnation) -> bool:
        """Return whether this very process is a member."""
        member = self.member(worker)
        return member is not None and member.incarnation == incarnation


@dataclass(frozen=True, slots=True, kw_only=True)
class Leaving:
    """Names a process that is to take no part any more, for a worker on node `to` ("": on any)."""

    worker: WorkerId
    incarnation: Incarnation = Incarnation(0)  # 0, in an order: the one that runs
    to: AgentId = AgentId("")
    reason: str = ""


@dataclass(frozen=True, slots=True, kw_only=True)
class RunningServer:
    """Names a process that serves rows of tables on a node, and where it listens."""

    number: int
    incarnation: int  # grows within one incarnation of the agent
    address: str  # HOST:PORT
    pid: int = 0
    order: int = 0  # the number of its ServerPlace


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerLayout:
    """Is the number of servers that hold the rows of tables, and the number that is wanted.

    `number`: grows with each change. While `goal` differs from `count`, the first `count` servers
    have all rows, and the first `goal` servers copy their future rows.
    """

    number: int = 0
    count: int
    goal: int

    @property
    def is_changing(self) -> bool:
        """Return whether rows are being copied to another number of servers."""
        return self.goal != self.count

    @property
    def servers(self) -> int:
        """Return how many servers run now."""
        return max(self.count, self.goal)


@dataclass(frozen=True, slots=True, kw_only=True)
class ServerPlace:
    """Names the node of a server of tables, and the address at which it listens, if known.

    `heir`: the process copies the server's rows, and then takes the server's place. `order`: counts
    the places that the server has had. Each has a process of its own.
    """

    number: int
    agent: AgentId
    address: str = ""
    heir: bool = False
    order: int = 0


@dataclass(frozen=True, slots=True, kw_only=True)
class AgentReport:
    """Agent to coordinator: the whole state of a node. `seq` grows within one agent incarnation."""

    agent: AgentId
    incarnation: Incarnation
    seq: int
    slots: int
    spares: int = 0  # slots among them for workers that are held back
    pid: int = 0
    draining: str = ""  # why this node asks to be left at a step boundary, if it does
    failing: str = ""  # the check that it fails, if that is why
    leaves_in_s: float = float("inf")  # after so long the node will be gone, as far as it knows
    leaving: tuple[Leaving, ...] = ()  # workers that are to be moved
    domains: Domains = ()  # failure domains that this node is in
    kept: tuple[KeptPieces, ...] = ()  # what its memory holds of the job's state
    pieces_at: str = ""  # HOST:PORT where it serves that
    pieces_bytes: int = 0  # bytes used by those pieces
    servers: tuple[RunningServer, ...] = ()  # processes that hold tables
    view_known: ViewNumber = NO_VIEW
    view: View | None = None  # only for a coordinator that has forgotten it
    release_loop: int = 0
    ending: bool = False  # it knows that the job is over: nothing starts here any more
    workers: tuple[WorkerStatus, ...] = ()

    @property
    def leaves(self) -> bool:
        """Return whether the node is to be left for good, and not just until it is well again."""
        return bool(self.draining) and not self.failing


@dataclass(frozen=True, slots=True, kw_only=True)
class WantedProcess:
    """Names one process that the coordinator wants to run on a node, and its role.

    `place`: on which of the worker's nodes this is; on further ones than the first, its process
    finds that one's at `meets_at`.
    """

    worker: WorkerId
    incarnation: Incarnation
    role: ProcessRole = ProcessRole.WORKER
    place: int = 0
    meets_at: str = ""


class Freed(NamedTuple):
    """Frees a leaving node: the job does not need the pieces in this report and earlier ones."""

    agent: AgentId
    incarnation: Incarnation
    report: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Directive:
    """Coordinator to agent: what the node should be doing. Ordered by (term, seq)."""

    term: int
    seq: int
    agent: AgentId
    agent_incarnation: Incarnation
    heard: int = 0  # newest report heard; the agent's lease runs from when it sent that
    wanted: tuple[WantedProcess, ...] = ()
    stop_view: ViewNumber = NO_VIEW
    pending_view: ViewNumber = NO_VIEW
    pending_save: bool = False  # the state at that boundary is saved
    view_number: ViewNumber = NO_VIEW  # the newest view formed
    view: View | None = None  # the newest view, for agents that may not know it
    release_loop: int = 0
    undecided: bool = False  # the coordinator still learns what there is: go on as before
    shutdown: bool = False
    end_signal: int = SIGTERM  # by which scripts for torchrun are asked to end
    save_wanted: int = 0  # the newest order to save the state at the next boundary; 0: none
    follow: FollowOrder | None = None
    freed: tuple[Freed, ...] = ()  # nodes that may leave with their pieces of the state
    servers: tuple[ServerPlace, ...] = ()  # all servers of tables
    layout: ServerLayout | None = None  # of their rows


@dataclass(frozen=True, slots=True, kw_only=True)
class WorkerDirective:
    """Agent to worker, over a channel that keeps order: what of a directive concerns it."""

    stop_view: ViewNumber = NO_VIEW
    pending_view: ViewNumber = NO_VIEW
    pending_save: bool = False
    view: View | None = None
    release_loop: int = 0
    save_wanted: int = 0
    follow: FollowOrder | None = None
    servers: tuple[ServerPlace, ...] = ()
    layout: ServerLayout | None = None
    acting_until: float = float("inf")  # its node's clock: it promises its view then


@dataclass(frozen=True, slots=True, kw_only=True)
class Slot:
    """Records a worker's place on a node, and the newest incarnation that was ordered for it.

    `further`: nodes over which it is spread, too.
    """

    worker: WorkerId
    agent: AgentId
    incarnation: Incarnation
    role: ProcessRole = ProcessRole.WORKER
    further: tuple[AgentId, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class LeaderEnd:
    """Records that the script of a leader has ended: all scripts must end after the same step.

    `is_exact`: its last status has come, so it has not got further than `committed`.
    """

    worker: WorkerId
    view: ViewNumber
    loop: int
    committed: int
    line: str = ""
    is_exact: bool = True


@dataclass(frozen=True, slots=True, kw_only=True)
class JobRecord:
    """Keeps the facts that a coordinator must never forget: journalled before anyone is told."""

    term: int
    view: View | None = None
    views_used: ViewNumber = NO_VIEW  # no number up to this may be given to another view
    slots: tuple[Slot, ...] = ()
    workers_named: int = 0  # ids below this have been given to slots
    forgotten: int = 0  # grows with each record that is lost; numbers continue from it
    release_loop: int = 0
    saved: tuple[int, ...] = ()  # the steps of checkpoints that can be begun from
    servers: tuple[ServerPlace, ...] = ()  # all servers of tables
    invalidations: tuple[Invalidation, ...] = ()
    outcome: str | None = None  # None while running, "" after success, else the reason of failure
    layout: ServerLayout | None = None  # None: as the job began
    setbacks: Setbacks = NO_SETBACKS
    ended: LeaderEnd | None = None  # the first leader whose script has ended, while others have not

"""Defines the events of the worker machine as values, which its driver posts to it."""

from __future__ import annotations

import enum
from dataclasses import dataclass

from holdfast.engine.core.directives import WorkerDirective
from holdfast.engine.core.hosted_service import ServerLayout
from holdfast.engine.core.types import Tick, ViewNumber, WorkerId

FIRST = 0  # the member of this rank collects which members are done
NO_MEMBER = -1  # in the place of a rank


class Doubt(enum.IntEnum):
    """Grades the doubts about a step's sums; of a vote's doubts the greatest counts."""

    FINITE = 0
    #: The sums are not finite, and that is right: the tasks' results are not.
    CONFIRMED_NON_FINITE = 1
    #: The sums are not finite, and no member's part is known to be the reason.
    UNATTRIBUTED = 2
    #: The bits of a speculative task differ from the bits of the task that it copies.
    CONTRADICTED = 3
    #: This number plus a rank: the part of that rank is not finite.
    BLAMED = 4


class SourceKind(enum.Enum):
    """Names where a worker gets a state or a reduced gradient from."""

    #: A checkpoint.
    STORE = "store"
    #: Pieces in the nodes' memory.
    MEMORY = "memory"
    #: Steps that members of the view have kept.
    MEMBERS = "members"
    #: The state and steps that members send to a follower.
    FEED = "feed"


class SinkKind(enum.Enum):
    """Names the receivers of a copy of the state, or of a reduced gradient."""

    STORE = "store"
    MEMORY = "memory"
    #: Workers that are fed.
    FOLLOWERS = "followers"
    #: Members that were suspended, and return.
    LATE = "late"


Digest = int | tuple[float, ...]  # a task's gradient as 63 bits, or a sketch where bits vary
Row = tuple[int | float, ...]  # one member's words in a gather: whole numbers, or sketches


@dataclass(frozen=True, slots=True)
class Wait:
    """Describes the longest time that a member waited for the network in a step.

    `peer`: the rank whose gradients came `took_us` after it began to send them, and `waited_us`
    after this member began to send its own; NO_MEMBER: unknown. If it waited for none, `waited_us`
    is 0, and the gradients that were sent last took `took_us` at most.
    """

    peer: int = NO_MEMBER
    took_us: int = 0
    waited_us: int = 0

    @property
    def counted_us(self) -> int:
        """Return the part of the wait that is the network's."""
        return min(self.took_us, self.waited_us)


NO_WAIT = Wait()


class Purpose(enum.Enum):
    """Names the purposes of a task."""

    #: The worker hosts the virtual rank.
    HOSTED = "hosted"
    #: Another worker hosts it, and the bits are compared.
    AUDITED = "audited"
    #: Another worker hosts it, and is late with it.
    SPECULATIVE = "speculative"


class StepKind(enum.Enum):
    """Names the kinds of steps by the things that they bring together."""

    #: Sums over all virtual ranks.
    GRADIENTS = "gradients"
    #: Results of tasks, which are not timed, audited, copied or dropped.
    VALUES = "values"


class Topic(enum.Enum):
    """Names the topics on which the members of a view exchange rows in a gather."""

    #: How alike audited tasks must be, and the step whose whole state is compared.
    AGREE = "agree"
    #: Digests of the audited tasks.
    AUDIT = "audit"
    #: The step since which something may be wrong.
    REPORT_FAULT = "report fault"
    #: The opinion that ends a step.
    VOTE = "vote"


# ---------------------------------------------------------------- events: the script


@dataclass(frozen=True, slots=True)
class LoopEntered:
    """The script has asked for steps; this makes it a candidate.

    `exact`: on a sound machine of one kind a task has the same bits each time.
    """

    exact: bool = False


@dataclass(frozen=True, slots=True)
class AtBoundary:
    """The script has finished its last step and asks for the next: the state is at rest."""


@dataclass(frozen=True, slots=True)
class RoomSeen:
    """The worker's ledger cannot grow any more, or all of its lines are written again."""

    has_room: bool


@dataclass(frozen=True, slots=True)
class StepOpened:
    """The script is ready to compute tasks of `step`.

    `rested`: it was at a boundary before; otherwise it continues right after the step before.
    `line`: the script's line that has opened the step, for people.
    """

    step: int
    kind: StepKind = StepKind.GRADIENTS
    rested: bool = True
    line: str = ""


@dataclass(frozen=True, slots=True)
class TaskDone:
    """The script has computed a task from `samples` samples; `digest` if one was asked for."""

    step: int
    vrank: int
    purpose: Purpose
    samples: int = 1
    digest: Digest | None = None


@dataclass(frozen=True, slots=True)
class StateProtected:
    """This worker's pieces of the state after `step` steps are in memory; `problem`: or why not."""

    step: int
    problem: str = ""


@dataclass(frozen=True, slots=True)
class LoopFinishing:
    """The script has left its loop; it still waits for saves, or for other workers.

    `line`: the script's line that has left it, for people.
    """

    line: str = ""


@dataclass(frozen=True, slots=True)
class LoopEnded:
    """The script's loop is over. `line`: the script's line that has ended it, for people."""

    line: str = ""


# ---------------------------------------------------------------- events: the replica


@dataclass(frozen=True, slots=True)
class StateObtained:
    """A source has given the state, and it is loaded; `order`: the number of the feed's order."""

    source: SourceKind
    view: ViewNumber
    order: int = 0


@dataclass(frozen=True, slots=True)
class StepObtained:
    """A source has given the reduced gradient of `step`, and it is in its place."""

    source: SourceKind
    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class ObtainFailed:
    """A source cannot give the state or step that was asked for.

    `damaged`: the step of a checkpoint that cannot be read, and will not be; `instead`: the step of
    a readable one (0: none). Without it a store is only silent. `order`: the number of a feed's
    order that this follower, or this member, cannot carry out.
    """

    source: SourceKind
    view: ViewNumber
    reason: str
    damaged: int | None = None
    instead: int = 0
    order: int = 0


@dataclass(frozen=True, slots=True)
class StateCopied:
    """The state after `step` steps was copied for a sink: the script may continue.

    `stall_s`: how long the script stood still. `problem`: why there is no copy. Pieces for MEMORY
    are made afterwards (StateProtected). `order`: the number of the feed's order.
    """

    sink: SinkKind
    step: int
    stall_s: float = 0.0
    problem: str = ""
    order: int = 0


@dataclass(frozen=True, slots=True)
class StepKept:
    """This worker's pieces of the reduced gradient of `step` are in its node's memory.

    `full`: there is no room for many more, so that the state should be protected soon.
    """

    view: ViewNumber
    step: int
    full: bool = False


# ---------------------------------------------------------------- events: the control plane


@dataclass(frozen=True, slots=True)
class StateLost:
    """A part of the job's state that no worker holds is gone: contents of servers."""


@dataclass(frozen=True, slots=True)
class Directed:
    """The agent has passed on what concerns this worker in a directive."""

    directive: WorkerDirective


@dataclass(frozen=True, slots=True)
class SaveEnded:
    """The writer has answered for a share. `durable`: the whole checkpoint is, as of now.

    `first`: it is the share that waits for all other shares.
    """

    step: int
    view: ViewNumber
    durable: bool = False
    problem: str = ""
    took_s: float = 0.0
    first: bool = False


@dataclass(frozen=True, slots=True)
class Reachable:
    """This worker can be fed at this address."""

    address: str


@dataclass(frozen=True, slots=True)
class StateFed:
    """All shares of the state after `step` steps are here, sent by an order."""

    order: int
    step: int


@dataclass(frozen=True, slots=True)
class StepFed:
    """All pieces of the gradient of `step` are here, sent by an order.

    `compared`: the members have reported that their copies are equal.
    """

    order: int
    step: int
    compared: bool = False


@dataclass(frozen=True, slots=True)
class FollowerBehind:
    """A follower is so slow that no memory is left for further steps to send to it.

    `order`: number of its order. `waiting_bytes`: size of the steps that are not sent yet.
    """

    order: int
    worker: WorkerId
    waiting_bytes: int


@dataclass(frozen=True, slots=True)
class EventNoted:
    """The driver has noticed what belongs in the job's event log.

    `about`: the worker that it is about, if that is another one.
    """

    kind: str
    text: str
    about: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class HeirsSeen:
    """The heirs and servers at these addresses have their whole shares.

    Heirs are second processes of servers that move. Servers are named only while their number
    changes. `layout`: the newest layout known to this worker.
    """

    addresses: tuple[str, ...]
    layout: ServerLayout | None = None


# ---------------------------------------------------------------- events: the view's group


@dataclass(frozen=True, slots=True)
class Connected:
    """All members of the view are connected."""

    view: ViewNumber


@dataclass(frozen=True, slots=True)
class GroupBroken:
    """An exchange of this view has failed here, with the member `peer` if that is known."""

    view: ViewNumber
    reason: str
    peer: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class LinkLost:
    """The network does not reach these members of the view any more."""

    view: ViewNumber
    peers: tuple[WorkerId, ...]


@dataclass(frozen=True, slots=True)
class Loading:
    """The driver is beginning to overwrite the script's state with the job's."""


@dataclass(frozen=True, slots=True)
class StatesCompared:
    """All members have compared states: they are the same, or `prints` shows whose differ."""

    view: ViewNumber
    prints: tuple[tuple[WorkerId, int], ...] = ()


@dataclass(frozen=True, slots=True)
class Gathered:
    """The rows of all members on the topic are here; `rows`: by rank."""

    view: ViewNumber
    topic: Topic
    rows: tuple[Row, ...]


@dataclass(frozen=True, slots=True, kw_only=True)
class Summed:
    """All buckets of the step are summed, and every member's rows are here.

    `buckets`: their number; sparse gradients count as one, the last. `parts`, `wholes`: by rank,
    fingerprints of a part of the state and of all of it (0: not taken). `copies`: by rank, a
    fingerprint of the copy for followers, made one step before. `doubt`: FINITE if the sums made
    here are finite, else BLAMED plus the rank of a bad part. `bits`: a digest of the sums, if they
    are not finite. `unlike`: virtual ranks whose gradients differ from this worker's speculative
    tasks.
    """

    view: ViewNumber
    step: int
    buckets: int = 1
    parts: tuple[int, ...] = ()
    wholes: tuple[int, ...] = ()
    copies: tuple[int, ...] = ()
    doubt: int = Doubt.FINITE
    bits: int = 0
    unlike: tuple[int, ...] = ()
    compute_us: int = 0
    wait: Wait = NO_WAIT


@dataclass(frozen=True, slots=True)
class SumChecked:
    """All members have answered a question about a bucket's sum; `rows`: by rank."""

    view: ViewNumber
    bucket: int
    rows: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class MemberDone:
    """A member is done with all its tasks of `step`, from `samples` samples."""

    view: ViewNumber
    rank: int
    step: int
    samples: int


@dataclass(frozen=True, slots=True)
class CountSettled:
    """The first member has settled that only what these ranks compute of `step` counts."""

    view: ViewNumber
    step: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class StillAwaited:
    """These ranks are not done with their tasks of `step`, as far as seen here."""

    view: ViewNumber
    step: int
    ranks: tuple[int, ...]


GroupEvent = (
    Connected
    | StepKept
    | StatesCompared
    | Gathered
    | Summed
    | SumChecked
    | MemberDone
    | CountSettled
    | StillAwaited
)
Obtained = StateObtained | StepObtained | ObtainFailed
WorkerEvent = (
    LoopEntered
    | AtBoundary
    | RoomSeen
    | StepOpened
    | TaskDone
    | LoopFinishing
    | LoopEnded
    | StateLost
    | Directed
    | SaveEnded
    | Reachable
    | Obtained
    | StateFed
    | StepFed
    | StateCopied
    | StateProtected
    | FollowerBehind
    | EventNoted
    | HeirsSeen
    | Tick
    | GroupBroken
    | LinkLost
    | Loading
    | GroupEvent
)

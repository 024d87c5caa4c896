"""Defines the effects of the worker machine as values, which its driver carries out in order.

Effects for the engine are carried out one after the other by the owner of the view's group, those
for the script by the script's thread, and the rest at once.
"""

from __future__ import annotations

import enum
from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.engine.core.ground.events import EventNoted, Purpose, Row, SinkKind, SourceKind, Topic
from holdfast.engine.core.invalidations import Invalidations
from holdfast.engine.core.types import ViewNumber, WorkerId
from holdfast.engine.core.views import FollowOrder, LateWorker, View
from holdfast.engine.core.worker_status import WorkerStatus


class SumStage(enum.Enum):
    """Names what the members do, and what their rows contain."""

    #: Digests of the results of both runs along the tree.
    COMPARE = "compare"
    #: Digests of the pieces of a flat run.
    FLAT = "flat"
    #: Digests of the sums made at tree nodes in each run, and verdicts.
    TRACE = "trace"


@dataclass(frozen=True, slots=True)
class SumQuestion:
    """Asks all members for a table. `turned`: by how many ranks the pieces of a flat run move."""

    stage: SumStage
    turned: int = 0


COMPARE = SumQuestion(SumStage.COMPARE)


class ForScript:
    """Marks effects that the script's thread carries out, one after the other."""

    __slots__ = ()


class ForEngine:
    """Marks effects that the owner of the view's group carries out, one after the other.

    A replica's effects are carried out there by their source or sink: see `needs_group`.
    """

    __slots__ = ()


# ---------------------------------------------------------------- effects: at once


@dataclass(frozen=True, slots=True)
class Tell:
    """Send this status to the agent, soon and in order."""

    status: WorkerStatus


@dataclass(frozen=True, slots=True)
class Abort:
    """Break the group of this view (and of every older one) at once."""

    view: ViewNumber


@dataclass(frozen=True, slots=True)
class MarkCommitted:
    """Record in the node's memory, for later recalls, that this worker commits `step`."""

    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class Redo:
    """Forget all results of `step`: it is computed again."""

    step: int


@dataclass(frozen=True, slots=True)
class Adopt(ForScript):
    """The speculative task of this virtual rank is this worker's own task now."""

    vrank: int


@dataclass(frozen=True, slots=True)
class UseCorrectSum:
    """Use, for each piece of a bucket's sum, the run with this digest."""

    bucket: int
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoteDoubt:
    """Record in the ledger that steps from `step` on may be wrong; `again`: they are redone."""

    step: int
    view: ViewNumber
    again: bool


@dataclass(frozen=True, slots=True)
class Withdraw:
    """Remove checkpoints that are invalidated from the store, whenever it answers."""

    invalidations: Invalidations


@dataclass(frozen=True, slots=True)
class Exit:
    """End this process at once: it computes wrongly, or holds a wrong state."""


@dataclass(frozen=True, slots=True)
class GiveUp:
    """Raise an error with this reason in the script; `by_script`: the script is at fault."""

    reason: str
    by_script: bool = False


# ---------------------------------------------------------------- effects: the script


@dataclass(frozen=True, slots=True)
class Begin(ForScript):
    """Leave the boundary and open `step`. `whole`: take a fingerprint of all of the state.

    `joined`: workers have joined, and have yet to prove that they compute the same results.
    """

    step: int
    whole: bool = False
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Compute(ForScript):
    """Compute a task of `step`. `digest`: report the gradient's digest (or its sketch: `near`).

    `disputed`: workers have computed different results: compute it several times, and report FICKLE
    (core/step/audit.py) instead of a digest if the results differ. `compared`: workers compare
    tasks in this step, so if results differ here, they can find out whose fault that is.
    """

    step: int
    vrank: int
    purpose: Purpose
    digest: bool = False
    near: bool = False
    disputed: bool = False
    compared: bool = False


@dataclass(frozen=True, slots=True)
class Commit(ForScript):
    """Apply the gradient of `step`.

    `voted`: all members of the view have just voted for it, this worker among them.
    """

    step: int
    voted: bool = False


@dataclass(frozen=True, slots=True)
class Release(ForScript):
    """Leave the ended loop."""

    loop: int


# ---------------------------------------------------------------- effects: the replica


@dataclass(frozen=True, slots=True)
class ObtainState:
    """Load the state after `step` steps from a source; then post StateObtained or ObtainFailed.

    `order`: the number of the feed's order.
    """

    source: SourceKind
    view: ViewNumber
    step: int
    order: int = 0


@dataclass(frozen=True, slots=True)
class ObtainStep:
    """Put the reduced gradient of `step` into its place; then post StepObtained or ObtainFailed."""

    source: SourceKind
    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class CopyState(ForScript):
    """Copy this worker's share of the state after `step` steps for a sink; then post StateCopied.

    `order`: the order to feed followers. `checked`: there may be no further step to compare the
    state in. So fingerprints of it are written with the shares, and the checkpoint exists only if
    they are equal.
    """

    sink: SinkKind
    step: int
    view: View
    order: FollowOrder | None = None
    checked: bool = False


@dataclass(frozen=True, slots=True)
class KeepStep:
    """Keep or send this member's piece of the reduced gradient of `step` for a sink.

    MEMORY: post StepKept once it is there. `compared`: all members have shown by now that their
    copies of the state for followers are the same.
    """

    sink: SinkKind
    view: ViewNumber
    step: int
    compared: bool = False


@dataclass(frozen=True, slots=True)
class Forget:
    """Drop states or steps that a sink does not need any more.

    LATE: every step. MEMORY: states and steps older than the state after `step` steps, which `view`
    has protected. FOLLOWERS: feed no worker, or only this `follower` no more; `finish`: steps kept
    so far are still sent.
    """

    sink: SinkKind
    view: ViewNumber
    step: int = 0
    finish: bool = False
    follower: WorkerId | None = None


@dataclass(frozen=True, slots=True)
class Follow:
    """Take in what members send to this worker by an order; None: forget it, and hang up."""

    order: FollowOrder | None


# ---------------------------------------------------------------- effects: the engine


@dataclass(frozen=True, slots=True)
class Install(ForEngine):
    """Connect the members of this view."""

    view: View


@dataclass(frozen=True, slots=True)
class SendMissed(ForEngine):
    """Send the kept pieces of the steps that a member has missed."""

    view: ViewNumber
    to: LateWorker


@dataclass(frozen=True, slots=True)
class SyncState(ForEngine):
    """Bring joiners up to date, and compare the states of all members."""

    view: ViewNumber


@dataclass(frozen=True, slots=True)
class Gather(ForEngine):
    """Send all members this row, and receive theirs. REPORT_FAULT: with the state's fingerprint."""

    view: ViewNumber
    topic: Topic
    row: Row


@dataclass(frozen=True, slots=True)
class Reduce(ForEngine):
    """Sum the buckets of `step` as they fill, exchanged by who hosts what (`owners`).

    `counted`: ranks whose results count; this worker adds zeros if its own do not.
    """

    view: ViewNumber
    step: int
    owners: tuple[WorkerId, ...]
    counted: Sequence[int]


@dataclass(frozen=True, slots=True)
class ShareRows:
    """This worker's tasks of `step` are done, or do not count: its rows may be exchanged."""

    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class CheckSum(ForEngine):
    """Answer a question about a bucket's sum, together with all members: most sum it again."""

    view: ViewNumber
    bucket: int
    question: SumQuestion


@dataclass(frozen=True, slots=True)
class SendDone(ForEngine):
    """Send the first member word that this worker is done with its tasks of `step`."""

    view: ViewNumber
    step: int
    samples: int


@dataclass(frozen=True, slots=True)
class SendCounted(ForEngine):
    """Send all members the ranks whose results of `step` count."""

    view: ViewNumber
    step: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LookWhoIsLate:
    """Answer with the members that are not done with their tasks of `step` (StillAwaited)."""

    view: ViewNumber
    step: int


ReplicaEffect = ObtainState | ObtainStep | CopyState | KeepStep | Forget | Follow
ScriptEffect = Begin | Compute | CopyState | Commit | Release
EngineEffect = (
    Install
    | ObtainState
    | ObtainStep
    | KeepStep
    | Forget
    | SendMissed
    | SyncState
    | Gather
    | Reduce
    | CheckSum
)
PromptEffect = (
    Tell
    | Abort
    | MarkCommitted
    | Redo
    | Adopt
    | ReplicaEffect
    | UseCorrectSum
    | NoteDoubt
    | Withdraw
    | Exit
    | GiveUp
    | ShareRows
    | SendDone
    | SendCounted
    | LookWhoIsLate
)
WorkerEffect = ScriptEffect | EngineEffect | PromptEffect
Outcome = WorkerEffect | EventNoted  # what a part of a machine decides


def needs_group(effect: ReplicaEffect) -> bool:
    """Return whether a replica's effect is carried out by the engine, in their order.

    The rest are carried out at once, but for copies of the state: the script's thread makes them,
    between two steps.
    """
    match effect:
        case ObtainState(source) | ObtainStep(source):
            return source is not SourceKind.FEED
        case KeepStep(sink):
            return sink is SinkKind.MEMORY
        case Forget(sink):
            return sink is SinkKind.LATE
    return False

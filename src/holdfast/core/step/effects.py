"""Defines the effects of the worker machine as values, which its driver carries out in order.

Effects for the engine are carried out one after the other by whoever owns the view's group, those
for the script by the script's thread; all others at once. Decisions pass from the step machine to
the worker machine and never reach a driver.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from holdfast.core.invalidations import Invalidations
from holdfast.core.redundancy import Recall
from holdfast.core.step.events import EventNoted, Purpose, Row, Topic
from holdfast.core.types import (
    FollowOrder,
    Invalidation,
    LateWorker,
    Phase,
    StateCopy,
    View,
    ViewNumber,
    WorkerId,
    WorkerStatus,
)

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
    """Note in the node's memory, for whoever recalls it, that this worker commits `step`."""

    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class ForgetProtected:
    """The state after `step` steps is protected by `view`: drop what is older from the memory."""

    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class Redo:
    """Forget all that was computed of `step`: it is computed again."""

    step: int


@dataclass(frozen=True, slots=True)
class Adopt:
    """The speculative task of this virtual rank is this worker's own task now."""

    vrank: int


@dataclass(frozen=True, slots=True)
class KeepStep:
    """Keep this member's piece of the reduced gradient of `step`, for those who miss it."""

    step: int


@dataclass(frozen=True, slots=True)
class FeedStep:
    """Send this member's piece of the reduced gradient of `step` to followers.

    `compared`: all members have shown by now that their copies for them are the same.
    """

    step: int
    compared: bool = False


@dataclass(frozen=True, slots=True)
class EndFeeding:
    """Feed nobody any more. `finish`: what was kept so far is still sent."""

    finish: bool


@dataclass(frozen=True, slots=True)
class Follow:
    """Take in what the members of a view send to this worker by this order."""

    order: FollowOrder


@dataclass(frozen=True, slots=True)
class LoadFed:
    """Load the state that was fed, while the script waits; then say FedLoaded."""

    number: int


@dataclass(frozen=True, slots=True)
class TakeFed:
    """Put the gradient of `step`, as it was fed, into its place; then say FedTaken."""

    step: int


@dataclass(frozen=True, slots=True)
class Unfollow:
    """Forget what was fed, and listen to no order."""


@dataclass(frozen=True, slots=True)
class PutRight:
    """Take of each piece of a bucket's sum the run that has this digest."""

    bucket: int
    digests: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class NoteDoubt:
    """Note in the ledger: what was committed from `step` on may be wrong; `again`: it is redone."""

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
    """Have the script raise an error with this reason."""

    reason: str


# ---------------------------------------------------------------- effects: the script


@dataclass(frozen=True, slots=True)
class Begin:
    """Leave the boundary and open `step`. `whole`: take a fingerprint of all of the state.

    `joined`: workers have joined, and have yet to prove that they compute as the others do.
    """

    step: int
    whole: bool = False
    joined: bool = False


@dataclass(frozen=True, slots=True)
class Compute:
    """Compute a task of `step`. `digest`: tell the gradient's digest (or its sketch: `near`)."""

    step: int
    vrank: int
    purpose: Purpose
    digest: bool = False
    near: bool = False


@dataclass(frozen=True, slots=True)
class SaveShare:
    """Copy this worker's share of the state after `step` steps, and have it saved.

    `checked`: nobody may take a further step and compare it, so prints of the state are written
    with the shares, and the checkpoint exists only if they are equal.
    """

    step: int
    view: View
    checked: bool = False


@dataclass(frozen=True, slots=True)
class StageState:
    """Copy this worker's share of the state after `step` steps, and feed it to those who follow."""

    step: int
    order: FollowOrder
    view: View


@dataclass(frozen=True, slots=True)
class ProtectState:
    """Put this worker's pieces of the state after `step` steps into its node's memory."""

    step: int
    view: View


@dataclass(frozen=True, slots=True)
class Commit:
    """Apply the gradient of `step`.

    `voted`: all members of the view have just voted for it, this worker among them.
    """

    step: int
    voted: bool = False


@dataclass(frozen=True, slots=True)
class Release:
    """Leave the ended loop."""

    loop: int


# ---------------------------------------------------------------- effects: the engine


@dataclass(frozen=True, slots=True)
class Install:
    """Connect the members of this view."""

    view: View


@dataclass(frozen=True, slots=True)
class Restore:
    """Load the checkpoint of the view's step, together with all members."""

    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class RecallState:
    """Load the state from which the view begins, from pieces in the nodes' memory."""

    view: ViewNumber
    recall: Recall


@dataclass(frozen=True, slots=True)
class RecallStep:
    """Get the reduced gradient of `step`, from pieces in the nodes' memory."""

    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class KeepGradient:
    """Put this worker's pieces of the reduced gradient of `step` into its node's memory."""

    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class SendMissed:
    """Send what was kept of the steps that a member has missed."""

    view: ViewNumber
    to: LateWorker


@dataclass(frozen=True, slots=True)
class ReceiveMissed:
    """Receive the gradient of a step that this worker has missed."""

    view: ViewNumber
    step: int


@dataclass(frozen=True, slots=True)
class SyncState:
    """Bring joiners up to date, and compare the states of all members."""

    view: ViewNumber


@dataclass(frozen=True, slots=True)
class ForgetMissed:
    """Forget what was kept of earlier steps: nobody needs it any more."""

    view: ViewNumber


@dataclass(frozen=True, slots=True)
class Gather:
    """Tell all members this, and hear what they say. CONFESS: with a fingerprint of the state."""

    view: ViewNumber
    topic: Topic
    row: Row


@dataclass(frozen=True, slots=True)
class Reduce:
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
class CheckSum:
    """Compare the digests of a bucket's sum; with `run`, sum it again before, by other members."""

    view: ViewNumber
    bucket: int
    run: int


@dataclass(frozen=True, slots=True)
class SendDone:
    """Tell the first member that this worker is done with its tasks of `step`."""

    view: ViewNumber
    step: int
    samples: int


@dataclass(frozen=True, slots=True)
class SendCounted:
    """Tell all members whose results of `step` count."""

    view: ViewNumber
    step: int
    ranks: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class LookWhoIsLate:
    """Say which members are not done with their tasks of `step` (StillAwaited)."""

    view: ViewNumber
    step: int


ScriptEffect = Begin | Compute | SaveShare | StageState | ProtectState | Commit | Release
EngineEffect = (
    Install
    | Restore
    | RecallState
    | RecallStep
    | KeepGradient
    | SendMissed
    | ReceiveMissed
    | SyncState
    | ForgetMissed
    | Gather
    | Reduce
    | CheckSum
)
PromptEffect = (
    Tell
    | Abort
    | MarkCommitted
    | ForgetProtected
    | Redo
    | Adopt
    | KeepStep
    | FeedStep
    | EndFeeding
    | Follow
    | LoadFed
    | TakeFed
    | Unfollow
    | PutRight
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

# ---------------------------------------------------------------- from the step to the worker


@dataclass(frozen=True, slots=True)
class BecameSynced:
    """The view is synced: every member holds the state, and all agree on what audits ask."""


@dataclass(frozen=True, slots=True)
class BecameBased:
    """This worker holds the state after `step` steps, to which later gradients are applied."""

    step: int


@dataclass(frozen=True, slots=True)
class BecameReduced:
    """The complete gradient is here and may be used; or not any more."""

    reduced: bool


@dataclass(frozen=True, slots=True)
class BecameIdle:
    """The script has nothing of the step to compute for now; or it has again."""

    idle: bool


@dataclass(frozen=True, slots=True, kw_only=True)
class BecameFed:
    """This worker holds more of the job, by what it was fed; None: nothing new of that."""

    state: StateCopy | None = None
    committed: int | None = None
    phase: Phase | None = None
    abreast: int | None = None


@dataclass(frozen=True, slots=True)
class Decided:
    """All members have decided to commit the step.

    `pending`: one knows of a planned change. `owners`: of the next step. `dropped`: what this
    worker computes of the step does not count and is not complete.
    """

    step: int
    pending: bool
    owners: tuple[WorkerId, ...]
    dropped: bool = False


@dataclass(frozen=True, slots=True)
class Doubted:
    """Copies of the state are not to be believed; `discarded`: nor are those of the members."""

    invalidation: Invalidation
    discarded: bool


@dataclass(frozen=True, slots=True)
class Failed:
    """The view's exchange cannot go on."""

    reason: str


@dataclass(frozen=True, slots=True)
class SavedUpTo:
    """The checkpoint of `step` is durable, and others have the same state."""

    step: int
    view: ViewNumber


Decision = (
    BecameSynced
    | BecameBased
    | BecameReduced
    | BecameIdle
    | BecameFed
    | Decided
    | Doubted
    | Failed
    | SavedUpTo
    | EventNoted
)
Outcome = WorkerEffect | Decision

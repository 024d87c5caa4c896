"""Decides whether the job ends, or its view, because its workers cannot continue. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.job_changes import (
    CoordinatorChange,
    CountStandstill,
    EndJob,
    Stir,
    StopView,
)
from holdfast.engine.core.membership.parting import describe_waits, find_parting
from holdfast.engine.core.membership.progress import Progress
from holdfast.engine.core.policies import CoordinatorPolicy
from holdfast.engine.core.types import ViewNumber, WorkerId

STANDSTILLS_MAX = 2  # groups whose members all waited for each other, before the last one


@dataclass(frozen=True, slots=True)
class Stopping:
    """Waits for a checkpoint of step `after` or a later one, at most until `until`."""

    reason: str
    after: int
    until: float

    def is_over(self, durable: int, now: float) -> bool:
        """Return whether the job may end: `durable` is the step of the newest checkpoint."""
        return durable >= self.after or now >= self.until


def plan_end(
    facts: Facts, progress: Progress, policy: CoordinatorPolicy
) -> list[CoordinatorChange]:
    """End the job if a script has failed, if scripts part ways, or if the job gets no further."""
    worker: WorkerId | None = None
    if failed := facts.roster.failed_workers():
        first = min(failed, key=lambda status: status.worker)
        worker, why = first.worker, f"worker {first.worker} failed: {first.detail}"
    else:
        losses_max, retreats_max = policy.restart.losses_max, policy.retreats_max
        why = (
            find_parting(facts)
            or progress.reason_by_machines(facts.list_places)
            or progress.reason_to_give_up(losses_max, retreats_max)
        )
    return [EndJob(why), Announce("failed", why, worker)] if why else []


def plan_stop(stopping: Stopping | None, saved: int, now: float) -> list[CoordinatorChange]:
    """End a job that an operator stops, once it has saved; `saved`: the newest durable step."""
    if stopping is None or not stopping.is_over(saved, now):
        return []
    return [EndJob(stopping.reason), Announce("stop", stopping.reason)]


def standstill_s(progress: Progress, hang_s: float) -> float:
    """Return the seconds for which the members of a view may all wait for each other."""
    return hang_s * 2.0**progress.standstills


def break_standstill(
    facts: Facts, progress: Progress, since: float, hang_s: float, stopped: ViewNumber
) -> list[CoordinatorChange]:
    """Stop a view whose members all wait for each other; end the job if that never helps.

    A new group exchanges everything again, which helps if a message was lost. It has twice as long
    as the group before, because what looks like a standstill may be a very slow exchange. `since`:
    when the job moved last. `stopped`: the newest view that was stopped.
    """
    view = facts.view
    if view is None or view.number <= stopped:
        return [Stir()]
    if facts.now < since + standstill_s(progress, hang_s):
        return []
    why = describe_waits(facts.known)
    if progress.standstills == STANDSTILLS_MAX:
        why = f"{why}, again after new groups were formed: please report this, with the bundle"
        return [EndJob(why), Announce("failed", why)]
    number, text = view.number, f"view {view.number} is stopped: {why}"
    return [CountStandstill(), StopView(number), Announce("stop_view", text, None, number), Stir()]

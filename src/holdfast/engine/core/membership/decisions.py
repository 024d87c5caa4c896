"""Decides for a job of workers. Pure.

Each function reads facts and what the coordinator knows of its job, and returns a plan: changes for
the machine to carry out before the next function is called. The machine has their order
(coordinator.py). Reasons that take more than a few lines have modules of their own.
"""

from __future__ import annotations

from typing import Protocol

from holdfast.engine.core.membership import admission, formation, job_end, restart, view_end
from holdfast.engine.core.membership.admission import Attendance
from holdfast.engine.core.membership.changes import Change
from holdfast.engine.core.membership.coordinator_events import Announce
from holdfast.engine.core.membership.facts import Facts
from holdfast.engine.core.membership.followers import find_strays
from holdfast.engine.core.membership.job_changes import (
    EndJob,
    MarkJudged,
    MarkTold,
    Plan,
    ReleaseLoop,
    Remember,
    Stir,
    StopView,
)
from holdfast.engine.core.membership.job_state import JobState
from holdfast.engine.core.membership.next_view import NextView
from holdfast.engine.core.membership.parting import are_all_waiting
from holdfast.engine.core.membership.roster import have_all_exited
from holdfast.engine.core.types import RELEASE_ALL, ViewNumber
from holdfast.engine.core.worker_status import Stage

# ---------------------------------------------------------------- nodes, workers, servers


class AttendedJob(Protocol):
    """Is what a coordinator, of workers or of groups, knows of its job."""

    @property
    def attendance(self) -> Attendance: ...


def decide_on_news(facts: Facts, job: JobState) -> Plan:
    """Log the events that workers have reported, each once."""
    log = job.event_log
    speaking = [each for each in facts.roster.newest.values() if not log.is_told(each)]
    return [*log.news(speaking), *map(MarkTold, speaking)] if speaking else []


def decide_on_wrong(facts: Facts, job: JobState) -> Plan:
    """Quarantine workers that compute wrongly."""
    if not (accused := job.durable.accused):
        return []
    return [*restart.quarantine_wrong(facts, accused, job.policy.restart), MarkJudged()]


def decide_servers(facts: Facts, job: JobState) -> Plan:
    """Place the servers of the hosted service, and move them."""
    places, lines = job.servers.review(facts)
    return [Remember(places), *lines]


def decide_spares(facts: Facts, job: JobState) -> Plan:
    """Find the number of spares on each node."""
    reserve, plan = job.reserve.review(facts.roster, facts.view, facts.now)
    return [Remember(reserve), *plan]


def decide_admission(facts: Facts, job: JobState) -> Plan:
    """Give nodes their slots."""
    waiting, plan = admission.admit(facts, job.policy)
    attendance, lines = job.attendance.tell_waiting(waiting, job.policy.spread)
    return [*plan, Remember(attendance), *lines]


def decide_silence(facts: Facts, job: AttendedJob) -> list[Remember | Announce]:
    """Log nodes that fall silent, or report again."""
    attendance, lines = job.attendance.tell_silent(facts)
    return [Remember(attendance), *lines]


def decide_drains(facts: Facts, job: AttendedJob) -> list[Change | Remember]:
    """Leave nodes that are drained, or fail their checks."""
    not_drained, plan = admission.drain(facts)
    attendance, lines = job.attendance.tell_not_drained(not_drained)
    return [*plan, Remember(attendance), *lines]


def decide_handover(facts: Facts, job: JobState) -> Plan:
    """Keep nodes that leave for as long as they are needed."""
    return view_end.plan_handover(facts, job.policy, job.handover, job.protection, job.durable)


def decide_on_hung(facts: Facts, job: JobState) -> Plan:
    """Replace workers if the job makes no progress for very long while a member waits."""
    excused = facts.has_no_room() or any(map(facts.find_silent_node, facts.members))
    still_since = facts.now if excused else job.agenda.still_since
    hang_s = job.policy.hang_s
    if facts.now < still_since + hang_s:
        return [Stir()] if excused else []
    if are_all_waiting(facts):
        stopped = job.view_end.stopped
        return job_end.break_standstill(facts, job.progress, still_since, hang_s, stopped)
    return [*restart.replace_all(restart.find_hung(facts), f"hung for {hang_s:g} s"), Stir()]


def decide_on_lost(facts: Facts, job: JobState) -> Plan:
    """Replace workers that are lost."""
    bridges = job.protection.make_coverage_test(facts, job.durable)
    return [*restart.replace_lost(facts, job.policy.restart, bridges)]


# ---------------------------------------------------------------- the end of the job


def decide_end(facts: Facts, job: JobState) -> Plan:
    """End the job if it has failed, or has been stopped."""
    plan = job_end.plan_end(facts, job.progress, job.policy)
    return plan or job_end.plan_stop(job.stopping, job.durable.step, facts.now)


def decide_release(facts: Facts, job: JobState) -> Plan:
    """Release ended workers once the leader's script is past the loop."""
    view = facts.view
    member = view.member(view.leader) if view else None
    leader = facts.status(member) if member else None
    if leader is None:
        return []
    loop = RELEASE_ALL if leader.stage is Stage.EXITED else leader.loop - 1
    return [ReleaseLoop(loop, leader)]


def decide_finish(facts: Facts, job: JobState) -> Plan:
    """End the job once all scripts have ended."""
    if not job.is_finishing:
        return [EndJob("")] if have_all_exited(facts.roster) else []
    if why := job.progress.reason_of_uneven_ends(facts.roster.newest.values()):
        return [EndJob(why), Announce("failed", why)]
    return [EndJob("")] if all(map(facts.is_fenced, facts.members)) else []


# ---------------------------------------------------------------- views


def decide_stop(facts: Facts, job: JobState) -> Plan:
    """Stop the present view if it is broken."""
    view = facts.view
    if view is None or job.view_end.stopped >= view.number:
        return []
    waited_s = facts.now - job.agenda.still_since
    minds_late = job.budget.allows(job.progress.step)
    reason = formation.reason_to_stop(facts, waited_s, job.policy.patience_s, minds_late)
    if reason is None:
        return []
    text = f"view {view.number} is stopped: {reason}"
    return [StopView(view.number), Announce("stop_view", text, None, view.number)]


def decide_separation(facts: Facts, job: JobState) -> Plan:
    """Leave out workers that other members do not reach, once none can act in the view."""
    if formation.survivors_of(facts) is None:
        return []
    policy, left_out = job.policy.restart, formation.choose_unreachable(facts)
    return [change for worker in left_out for change in restart.quarantine(facts, worker, policy)]


def decide_replacements(facts: Facts, job: JobState, number: ViewNumber) -> Plan:
    """Restart processes whose state is of no use for the next view, which has this number."""
    return _next_view(job, number).plan_replacements(facts, job.progress)


def decide_view(facts: Facts, job: JobState, number: ViewNumber) -> Plan:
    """Form the next view, with this number, once no member acts in the present one any more."""
    return _next_view(job, number).plan(facts)


def _next_view(job: JobState, number: ViewNumber) -> NextView:
    return NextView(
        policy=job.policy,
        protection=job.protection,
        durable=job.durable,
        number=number,
        finishing=job.is_finishing,
        wanting_since=job.wanting_since,
    )


def decide_feeding(facts: Facts, job: JobState) -> Plan:
    """Order members to feed workers that could join; replace fed workers that cannot."""
    is_ending = facts.view is not None and job.view_end.is_decided(facts.view.number)
    trains = not is_ending and job.stopping is None
    trains = trains and len(facts.members) >= job.policy.workers_min
    trains = trains and not any(status.ended for status in facts.known)
    room = formation.room_beside_drained(facts)
    followers, lines = job.followers.review(facts, room, may_order=trains)
    found = find_strays(facts, followers.order)
    plan = restart.replace_all(found, "it was fed, and not until it could join")
    return [Remember(followers), *lines, *plan]


def decide_change(facts: Facts, job: JobState) -> Plan:
    """Plan a change of the view at the next boundary."""
    step = job.progress.step
    return view_end.plan_change(facts, job.view_end, job.policy, job.handover, step)


def decide_last_saves(facts: Facts, job: JobState) -> Plan:
    """Order a checkpoint before workers are ended, where it is the only other copy of the state."""
    saves, lines = job.last_saves.review(facts, job.durable.step, job.handover.saves)
    return [Remember(saves), *(lines if job.policy.keeps else ())]

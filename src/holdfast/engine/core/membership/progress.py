"""Records the progress of a job, its losses and setbacks, and when it must give up. Pure.

Two further counts belong to it: the reasons for which the job began again (`FallCauses`), and how
often each worker was suspended (`Suspensions`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from holdfast.engine.core.invalidations import Invalidations
from holdfast.engine.core.job_record import NO_SETBACKS, LeaderEnd, Setbacks
from holdfast.engine.core.membership.machine_losses import MachineLoss, MachineLosses
from holdfast.engine.core.membership.parting import describe_uneven_ends
from holdfast.engine.core.types import AgentId, WorkerId
from holdfast.engine.core.views import View
from holdfast.engine.core.worker_status import Stage, WorkerStatus

KILLED = ("ended by SIGKILL", "ended by signal 9")  # from outside, not by a mistake of its own
FALLS_ALIKE = 3  # times that a job may begin again from one step for one reason
DELAY_MAX = 32  # steps; fewer than a worker may miss (core/membership/formation.py)
ON_TIME = 128  # steps without being late, after which earlier times are forgotten


def is_crash(why: str) -> bool:
    """Return whether a process was lost by a signal of its own making."""
    return why.startswith("ended by ") and why not in KILLED


class Progress:
    """Counts the job's progress.

    `step`: the next one to be committed, as far as known. `losses`: workers lost since the last
    one.
    """

    def __init__(
        self, step: int, setbacks: Setbacks = NO_SETBACKS, ended: LeaderEnd | None = None
    ) -> None:
        self.step = step
        self.losses = 0
        self._last_loss = ""  # why the last worker was lost
        self._lost_since_begun = False
        self._crashes = 0  # processes that ended by a signal of their own, since the furthest step
        self._causes = FallCauses()
        self._setbacks = setbacks if setbacks.has_any else Setbacks(furthest=step)
        self._suspensions = Suspensions()
        self._machine_losses = MachineLosses()
        self._invalidations: Invalidations = ()  # those for which the job has gone back
        self.ended = ended  # the first leader whose script has ended

    @property
    def setbacks(self) -> Setbacks:
        """Return the counts since the furthest step, for the journal; mostly they are all zero."""
        return self._setbacks if self._setbacks.has_any else NO_SETBACKS

    @property
    def standstills(self) -> int:
        """Return the number of standstills since the furthest step."""
        return self._setbacks.standstills

    def record_step(self, step: int) -> bool:
        """Record the step of a member of the view; return whether it is the newest."""
        if step <= self.step:
            return False
        self.step, self.losses = step, 0
        return True

    def settle(self) -> None:
        """Forget the setbacks if the job has come further by now."""
        if self.step > self._setbacks.furthest:
            self._setbacks, self._crashes = Setbacks(furthest=self.step), 0

    def note_view(self, view: View, *, begins: bool) -> None:
        """Record a new view, in which the job begins, or survivors resume."""
        (self.begin if begins else self.record_resume)(view.resume_step)
        self._suspensions.note_view(view)

    def held_back(self, view: View | None) -> frozenset[WorkerId]:
        """Return the suspended workers of a view that are not taken back yet."""
        return self._suspensions.held_back(view, self.step)

    def begin(self, step: int) -> None:
        """Begin the job, or begin it again after all workers were lost, from this step.

        The nodes' memory may hold steps that no worker has lived to report.
        """
        self.settle()
        if step > self._setbacks.furthest:
            self.losses = 0
        self.step = step
        self.settle()
        if self.ended is not None and not self.ended.is_exact:
            self.ended = None
        self._setbacks = self._setbacks.fall(step, lost=self._lost_since_begun)
        self._lost_since_begun = False

    def record_words(self, status: WorkerStatus) -> None:
        """Record what a worker has reported last of wrong results: it may leave for that reason."""
        self._causes.record_words(status)

    def count_loss(
        self,
        worker: WorkerId,
        why: str,
        machine: MachineLoss | None = None,
        *,
        announced: bool = False,
    ) -> None:
        """Count a worker that was lost, perhaps by an error of its `machine`.

        `announced`: its node was to be taken away at a known time. Such a loss spends no budget,
        unless the process has crashed.
        """
        if announced and machine is None and not is_crash(why):
            return
        self.losses += 1
        self._lost_since_begun = True
        self._last_loss = why.partition("\n")[0]
        self._crashes += is_crash(why)
        crash = self._last_loss if is_crash(why) else ""
        self._setbacks = self._setbacks.blame(self._causes.find_cause(worker, crash))
        if machine is not None:
            self._machine_losses.count(worker, machine, self.step)

    def doubt(self, why: str, losses_max: int) -> str:
        """Return a doubt to add to the line on the loss that was counted last, if there is one."""
        if not is_crash(why) or self._crashes < 2:
            return ""
        times = "twice" if self._crashes == 2 else f"{self._crashes} times"
        return (
            f"; lost {times} at step {self._setbacks.furthest}: is it the script? After more than "
            f"{losses_max} losses without a step the job gives up (--losses-max)"
        )

    def count_standstill(self) -> None:
        """Count that all members waited for each other, for too long."""
        self._setbacks = self._setbacks.stand_still()

    def has_gone_back(self, invalidations: Invalidations) -> bool:
        """Return whether the job has gone back already because of these."""
        return invalidations == self._invalidations

    def go_back(self, invalidations: Invalidations) -> None:
        """Count a retreat: workers computed different results."""
        self._invalidations = invalidations
        self._setbacks = self._setbacks.go_back()

    def record_end(self, leader: WorkerStatus) -> None:
        """Record that the script of a leader has ended, though its newest status may be older."""
        if self.ended is None or (leader.ended and not self.ended.is_exact):
            self.ended = LeaderEnd(
                worker=leader.worker,
                view=leader.view,
                loop=leader.loop,
                committed=leader.committed,
                line=leader.line,
                is_exact=leader.ended,
            )

    def record_resume(self, step: int) -> None:
        """Record that survivors have formed a view, in which they resume at this step.

        A leader whose last status was lost has come one step further at most.
        """
        if self.ended is not None and not self.ended.is_exact:
            self.ended = dataclasses.replace(self.ended, committed=step + 1, is_exact=True)

    def reason_of_uneven_ends(self, statuses: Iterable[WorkerStatus]) -> str:
        """Return the reason why scripts do not all end after the same step; empty if they may.

        Statuses of views before the one in which a script ended do not count: since then the job
        may have begun again from an earlier step. Ended workers still report their statuses after
        the journal was lost.
        """
        known, first = list(statuses), self.ended
        ends: list[WorkerStatus | LeaderEnd] = [first] if first and first.is_exact else []
        ends += [each for each in known if each.stage is Stage.EXITED and each.ended]
        for end in ends:
            same = [s for s in known if s.loop == end.loop and s.view >= end.view]
            further = [s for s in same if max(s.committed, s.opened) > end.committed]
            if further:
                return describe_uneven_ends(end, further[0])
        return ""

    def reason_by_machines(self, list_places: Callable[[], Mapping[WorkerId, AgentId]]) -> str:
        """Return the reason to give up because all machines have the same error; empty to continue.

        `list_places` returns the node of each worker that may run.
        """
        return self._machine_losses.reason_to_end(self.step, list_places)

    def reason_to_give_up(self, losses_max: int, retreats_max: int) -> str:
        """Return the reason to give up; empty to continue."""
        setbacks = self._setbacks
        if why := describe_alike_falls(setbacks):
            return why
        if self.losses > losses_max:
            count = "1 worker was" if self.losses == 1 else f"{self.losses} workers were"
            return (
                f"{count} lost at step {self.step} with no step committed in "
                f"between (the last one: {self._last_loss}): see the worker logs; raise "
                "--losses-max if the machines are to blame"
            )
        if setbacks.falls > losses_max:
            return (
                f"the job began again {setbacks.falls} times and never came further than step "
                f"{setbacks.furthest}, where its workers were lost (the last one: "
                f"{self._last_loss or 'before this coordinator'}): "
                "see the worker logs; raise --losses-max if the machines are to blame"
            )
        if setbacks.retreats > retreats_max:
            return (
                f"workers came to different results {setbacks.retreats} times, not further than "
                f"step {setbacks.furthest}, and the job went back each time: `holdfast doctor` "
                "may tell which machine computes wrongly; with three workers or more the majority "
                "decides"
            )
        return ""


class FallCauses:
    """Remembers what workers have reported of wrong results, as reasons for which they leave.

    Only reasons of the workers' own count: what the outside world does to them may happen often.
    """

    def __init__(self) -> None:
        #: The newest words of each worker on a wrong result.
        self._words: dict[WorkerId, str] = {}

    def record_words(self, status: WorkerStatus) -> None:
        """Record what a worker has reported last of wrong results: it may leave for that reason."""
        wrong = [event.text for event in status.events if event.kind == "wrong"]
        if wrong:
            self._words[status.worker] = wrong[-1]

    def find_cause(self, worker: WorkerId, crash: str) -> str:
        """Return the cause of a loss. `crash`: the signal of its own crash, or empty."""
        return self._words.pop(worker, "") or crash


def describe_alike_falls(setbacks: Setbacks) -> str:
    """Return the reason to give up, because the job began again too often; empty to continue."""
    for fall in setbacks.alike:
        if fall.times >= FALLS_ALIKE:
            return (
                f"the job began again from step {fall.step} {fall.times} times for the same "
                f"reason: {fall.cause}; a machine hardly fails alike so often, so look at the "
                "script first"
            )
    return ""


@dataclass(frozen=True, slots=True, kw_only=True)
class LateTimes:
    """Counts how often a worker was late, and records the last `step` in which it was."""

    count: int
    step: int

    @property
    def delay(self) -> int:
        """Return the number of steps for which it is held back; none the first time."""
        return min(1 << min(self.count - 1, 30), DELAY_MAX) if self.count > 1 else 0


class Suspensions:
    """Keeps the workers that were late not long ago, by name."""

    def __init__(self) -> None:
        self._times: dict[WorkerId, LateTimes] = {}

    def note_view(self, view: View) -> None:
        """Count the workers that a new view suspends; forget workers that are on time again."""
        for worker, times in list(self._times.items()):
            if view.resume_step > times.step + times.delay + ON_TIME:
                del self._times[worker]
        for lag in view.suspended:
            known = self._times.get(lag.worker)
            count = known.count + 1 if known is not None else 1
            self._times[lag.worker] = LateTimes(count=count, step=lag.committed)

    def held_back(self, view: View | None, step: int) -> frozenset[WorkerId]:
        """Return the suspended workers that are not taken back yet, in this step of the job."""
        found = []
        for lag in view.suspended if view is not None else ():
            times = self._times.get(lag.worker)
            if times is not None and step < times.step + times.delay:
                found.append(lag.worker)
        return frozenset(found)

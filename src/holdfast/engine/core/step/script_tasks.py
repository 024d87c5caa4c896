"""Decides what the script computes in a step, and when it computes a step again. Pure.

A worker first computes the tasks that it hosts, then the tasks of other workers that it audits.
While it waits for late members it copies some of their tasks.
"""

from __future__ import annotations

from collections.abc import Sequence

from holdfast.engine.core.ground import effects
from holdfast.engine.core.ground.events import Purpose, StepKind, StepOpened, StillAwaited, TaskDone
from holdfast.engine.core.ground.standing import Standing
from holdfast.engine.core.replica.feeding import Following
from holdfast.engine.core.step.activities import Activity
from holdfast.engine.core.step.audit import Audit
from holdfast.engine.core.step.audits import Audits
from holdfast.engine.core.step.backup import CountedMembers
from holdfast.engine.core.step.course import Course
from holdfast.engine.core.step.late_watch import LateWatch
from holdfast.engine.core.step.open_step import OpenStep


class ScriptTasks:
    """Orders one task after the other of the step that the script has opened."""

    def __init__(
        self,
        standing: Standing,
        course: Course,
        following: Following,
        audits: Audits,
        counted: CountedMembers,
        watch: LateWatch,
    ) -> None:
        self._standing = standing
        self._course = course
        self._following = following
        self._audits = audits
        self._counted = counted
        self._watch = watch
        self._open: OpenStep | None = None
        self._again: tuple[Audit, ...] = ()  # to be computed in the next attempt at the step

    def enter(self) -> None:
        """Keep the open step in a new view only if it is the one to be committed next."""
        self._open = self.opened

    def open(self, event: StepOpened) -> None:
        """Record the step for which the script is ready; it waits for no member yet."""
        self._open = OpenStep(event.step, event.kind)
        self._watch.open_step()

    @property
    def opened(self) -> OpenStep | None:
        """Return the open step, if it is the one to be committed next."""
        step = self._open
        return step if step is not None and step.index == self._course.step else None

    @property
    def is_timed(self) -> bool:
        """Return whether the time of the open step counts as the time of a step."""
        return self._open is None or self._open.kind is StepKind.GRADIENTS

    @property
    def is_dropped(self) -> bool:
        """Return whether what this member computes of the step does not count in this view."""
        course = self._course
        return course.activity is not Activity.CLOSED and self._counted.drops(course.step)

    def record(self, task: TaskDone) -> bool:
        """Record a finished task; return whether it is one of the open step."""
        if task.purpose is Purpose.SPECULATIVE:
            self._watch.lateness.count_copy()
        step = self._open
        if step is None or step.index != task.step:
            return False
        step.note(task)
        if self._course.activity is Activity.REDO:
            self._begin_again()
        return True

    def proceed(self) -> None:
        """Order the script's next task, if it computes none now."""
        step, standing, course = self.opened, self._standing, self._course
        if step is None or self._following.is_fed_outside:
            return
        if course.activity in (Activity.TASKS, Activity.SUM, Activity.ROWS):
            self._audits.plan(course.view, course.step, course.owners, step.kind)
        if step.running is not None:
            return
        hosted = () if self.is_dropped else standing.status.hosted
        standing.order(*(effects.Adopt(vrank) for vrank in step.adopt(hosted)))
        task = self._next_task(step, hosted)
        self._watch.record_idle(task is None or task[1] is Purpose.SPECULATIVE)
        if task is None:
            return
        vrank, purpose = step.running = task
        standing.order(self._audits.order(step.index, vrank, purpose))

    def _next_task(self, step: OpenStep, hosted: Sequence[int]) -> tuple[int, Purpose] | None:
        if missing := step.missing_tasks(hosted):
            return missing[0], Purpose.HOSTED
        if owed := self._audits.owed_vranks(self._standing.me, step):
            return owed[0], Purpose.AUDITED
        course = self._course
        late = self._watch.choose_task(course.owners, course.view, step.speculative)
        return None if late is None else (late, Purpose.SPECULATIVE)

    def copy_late(self, event: StillAwaited) -> None:
        """Copy the tasks that this worker would host without the late members."""
        course = self._course
        if course.activity is Activity.ROWS and event.step == course.step:
            self._watch.late = tuple(course.view.workers[rank] for rank in event.ranks)
            self.proceed()

    def repeat(self, audits: Sequence[Audit]) -> None:
        """Compute the step again, after the script has ended its present task."""
        self._again = tuple(audits)
        self._course.go_to(Activity.REDO)
        if self._open is None or self._open.running is None:
            self._begin_again()

    def _begin_again(self) -> None:
        step = self._open
        assert step is not None, "no step to compute again"
        step.restart()
        self._audits.plan_again(self._again)
        self._course.go_to(Activity.TASKS)
        self._standing.order(effects.Redo(self._course.step))

"""How much may be computed again because somebody is late with it. Pure.

A share of all tasks of the job, with a little in advance; and one attempt at most in each step, for
a stop after which nobody turns out to be late has cost something, too.
"""

from __future__ import annotations


class Budget:
    """`share`: of all tasks; 0: none. `tasks`: in each step."""

    def __init__(self, share: float, tasks: int) -> None:
        self.spent = 0  # tasks computed again
        self._share = share
        self._tasks = tasks
        self._tried_in = -1
        self._since: int | None = None  # the step from which tasks are counted

    def allows(self, step: int) -> bool:
        """Whether what is late in this step may be computed by others."""
        if self._since is None:
            self._since = step
        if not self._share or step == self._tried_in:
            return False
        committed = (step - self._since) * self._tasks
        return self.spent <= self._share * committed

    def tried(self, step: int) -> None:
        """A view is stopped for this."""
        self._tried_in = step

    def spend(self, tasks: int) -> None:
        """So many are computed again."""
        self.spent += tasks

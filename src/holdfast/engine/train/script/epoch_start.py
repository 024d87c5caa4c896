"""Has a worker that joins in the middle of an epoch run the lines above its steps as others did.

Values that workers have exchanged in these lines are a part of the job's state, so that no worker
is asked for them twice. Changes of the state in these lines are undone.
"""

from __future__ import annotations

from collections.abc import Callable

from holdfast.engine.core.errors import UserError
from holdfast.engine.train.checkpoint.loaded_state import LoadedState
from holdfast.engine.train.script.script_state import ScriptState


class EpochStart:
    """Detects whether the script is above the first step of an epoch, and replays values there."""

    def __init__(self, progress: ScriptState, loaded: LoadedState) -> None:
        self._progress = progress
        self._loaded = loaded
        self._above = False  # the script is there
        self._again = False  # others have been there before, in this epoch
        self._asked = 0  # number of values that the script was given there

    @property
    def is_above(self) -> bool:
        """Return whether the script is in an epoch, and above its first step."""
        return self._above

    def enter(self, loop: int, epoch: int) -> None:
        """Begin an epoch, which this or another worker may have begun before."""
        self._above, self._asked = True, 0
        self._again = tuple(self._progress.epoch[:2]) == (loop, epoch)
        if not self._again:
            self._progress.epoch = loop, epoch, []

    def leave(self) -> None:
        """Go on to the epoch's steps, or away from it.

        If others have run the lines above before, what these lines have changed is set back.
        """
        if self._above and self._again:
            self._loaded.load_again()
        self._above = False

    def tell(self, ask: Callable[[], bytes]) -> bytes:
        """Return the result of `ask`, or the one that others had above the epoch's steps."""
        if not self._above:
            return ask()
        told = self._progress.epoch[2]
        if not self._again:
            told.append(ask())
        elif self._asked >= len(told):
            raise UserError(
                f"a worker that has joined in epoch {self._progress.epoch[1]} calls job.evaluate "
                f"or job.agree before its steps more often than others have ({len(told)} times): "
                "the calls there must be the same on all workers"
            )
        self._asked += 1
        return told[self._asked - 1]

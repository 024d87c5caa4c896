"""Keeps the position of the job's script, and its values: a part of the job's state.

It travels with the protected objects. So a worker that joins, or begins from a checkpoint, knows
which loops of its script are over, which step of the present one comes next, and which values all
workers have exchanged between loops.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from holdfast.engine.core.errors import StateMismatch
from holdfast.engine.train.script import data_places
from holdfast.engine.train.script.data_places import DataPlaces
from holdfast.engine.train.script.job_values import Values
from holdfast.engine.train.script.made_settings import MadeSettings
from holdfast.engine.train.script.rank_states import RankStates
from holdfast.engine.train.script.row_updates import RowUpdates
from holdfast.engine.train.step.module_attributes import ModuleAttributes
from holdfast.engine.train.step.trained import TrainedParameters

KEPT = data_places.KEPT | {
    "steps",
    "stopped",
    "values",
    "ended",
    "told",
    "epoch",
    "modules",
    "trained",
}
RANK_STATES = "rank_states"  # saved by jobs that have any
SETTINGS = "settings"  # older releases have not saved them
EpochEntry = tuple[int, int, list[bytes]]


class ScriptState:
    """Counts a script's steps and finished loops; protected like a model. See the module."""

    def __init__(self, rank_states: RankStates | None = None) -> None:
        self.steps = 0  # steps of the script so far, over all its loops
        self.stopped = False  # the script's loops are to end
        self.values = Values()
        self.settings = MadeSettings()
        self.scratch: dict[str, Any] = {}  # the script's own, and no part of the state
        # for each finished loop, the number of steps after which it ended
        self.ended: list[int] = []
        self.places = DataPlaces()
        self.trained = TrainedParameters()
        self.told: dict[int, bytes] = {}  # values exchanged between loops: by number of the loop
        # The newest epoch: the number of its loop, its own number, and the values that workers
        # have exchanged in it before its first step.
        self.epoch: EpochEntry = (-1, -1, [])
        self.attributes = ModuleAttributes([])  # filled in once the protected modules are known
        self.rank_states = rank_states or RankStates()
        self.row_updates = RowUpdates()

    def state_dict(self) -> dict[str, Any]:
        """Return a copy of everything, in plain values."""
        rank_states = self.rank_states.state_dict()
        return {
            "steps": self.steps,
            "stopped": self.stopped,
            "values": self.values.state_dict(),
            "ended": list(self.ended),
            SETTINGS: self.settings.state_dict(),
            **self.places.state_dict(),
            "told": dict(self.told),
            "epoch": [self.epoch[0], self.epoch[1], list(self.epoch[2])],
            "modules": self.attributes.state_dict(),
            "trained": self.trained.state_dict(),
            **({RANK_STATES: rank_states} if rank_states else {}),
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Take over the job's position and values; StateMismatch if they are of another version."""
        if set(state) - {RANK_STATES, SETTINGS, data_places.PACKED, data_places.FACTS} != KEPT:
            raise StateMismatch(
                f"the script's progress is kept as {sorted(state)}, which this version of Holdfast "
                "does not know: use the version that saved it"
            )
        self.steps, self.stopped = state["steps"], state["stopped"]
        self.ended, self.told = list(state["ended"]), dict(state["told"])
        loop, epoch, told = state["epoch"]
        self.epoch = loop, epoch, list(told)
        self.attributes.load_state_dict(state["modules"])
        self.trained.load_state_dict(state["trained"])
        self.rank_states.load_state_dict(state.get(RANK_STATES, {}))
        self.settings.load_state_dict(state.get(SETTINGS, {}))
        self.places.load_state_dict(state)
        self.values.load_state_dict(state["values"])
